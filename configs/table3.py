"""Depth of the metric generator, and inference without some blocks: Section 5.3, Table 3.

  python -m experiments.ablations --config=configs/table3.py

Generators of 1, 3, 5, 7 and 9 hidden layers, each trained once on each data set and evaluated with
all blocks of the metric, with the diagonal ones, with the others, and, as a control that the paper
lacks, with one other block of each row in place of the diagonal one. Needs the data sets and
weights of `cifar10.py`, `cifar100.py`, `wmt14.py` and `commongen.py`. The paper reports, on
CIFAR-10 with 1 and 9 layers: FID@Top-50 77.97 and 58.64 with all blocks, 102.51 and 112.86 with
the diagonal, 97.32 and 126.92 without it; FID 250.35 and 229.84 with all.

  python -m experiments.ablations --config=configs/table3.py:wide

The same with generators as wide as the model.

  python -m experiments.ablations --config=configs/table3.py:cpu

Some 45 minutes on two cores, on images and concept sets that ship with the package.

  python -m experiments.ablations --config=configs/table3.py:smoke

A minute; two depths, every part of the program once.
"""

import ml_collections

from configs import ablations


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = ablations.base("table3", size)
  config.variants = "depth1,depth3,depth5,depth7,depth9"  # 5.3, hidden layers
  # 5.3; 'shifted' is a control of ours: one block of each row as with the diagonal, but another.
  config.inference = "full,diagonal,off_diagonal,shifted"
  if size == "smoke":
    ablations.shrink_to_smoke(config)
    config.datasets = "commongen"
    config.variants = "depth1,depth3"
  return config.lock()
