"""DAMCHA without its generator and without sharing: Section 5.3, Table 4, and two more variants.

  python -m experiments.ablations --config=configs/table4.py

`static` is the paper's "w/o f(x)+share", a metric per layer that is trained itself; `unshared` is
"w/o share", a generator per layer of the same width, so with more parameters, which the rows
`num_params` show; `full` is DAMCHA. The paper has no `rowsum`, which stores the sums of the blocks
alone and computes the same function with other initial values, nor `robust`, whose initial values
let a deep generator follow its context. Needs the data sets and weights of `cifar10.py`,
`cifar100.py`, `wmt14.py` and `commongen.py`. The paper reports, on CIFAR-10, FID@Top-50 76.55,
77.85 and 65.13 and FID 233.04, 228.96 and 227.64, in this order.

  python -m experiments.ablations --config=configs/table4.py:wide

The same with generators as wide as the model.

  python -m experiments.ablations --config=configs/table4.py:cpu

Half an hour on two cores, on images and concept sets that ship with the package.

  python -m experiments.ablations --config=configs/table4.py:smoke

A minute; every part of the program once.
"""

import ml_collections

from configs import ablations


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = ablations.base("table4", size)
  config.variants = "static,unshared,full,rowsum,robust"  # 5.3: the first three
  if size == "smoke":
    ablations.shrink_to_smoke(config)
    config.datasets = "cifar10"
  return config.lock()
