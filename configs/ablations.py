"""The ablations of Section 5.3: what Tables 3 and 4 have in common.

Not an experiment of its own: `table3.py` and `table4.py` choose the variants. A section named for a
data set is the config of its own file (`cifar10.py` and so on), where each value stands beside its
source; 5.3 names no other values. A comment `5.3` marks what that section states, `omitted` what it
leaves out, with the reason for the value chosen here.
"""

import ml_collections

from configs import cifar10
from configs import cifar100
from configs import commongen
from configs import generation
from configs import wmt14

DATASETS = {"cifar10": cifar10, "cifar100": cifar100, "wmt14": wmt14, "commongen": commongen}
# Sections have these from the config as a whole.
COMMON = ("experiment", "name", "size", "attentions", "seeds")


def base(name: str, size: str) -> ml_collections.ConfigDict:
  """All but the variants.

  Raises:
    ValueError: `size` is none of `generation.SIZES`.
  """
  generation.check_size(size)
  config = ml_collections.ConfigDict()
  config.experiment = "ablations"
  config.name = name
  config.size = size
  config.datasets = "cifar10,cifar100,wmt14,commongen"  # 5.3; comma-separated
  config.variants = ""  # comma-separated
  config.inference = "full"  # comma-separated
  config.seeds = (0,)  # omitted: one run per cell is what the tables show
  # 5.3: "1, 3, 5, 7, 9 hidden layers". 'linear' counts the last layer too, as 5.1's 9-layer MLP.
  config.depth_reading = "hidden"
  for dataset, module in DATASETS.items():
    section = module.get_config(size)
    with section.unlocked():
      for key in COMMON:
        del section[key]
      section.damcha.parameterization = "blocks"  # 3.2; RowSum alone has no blocks to leave out
    config[dataset] = section
  if size in ("cpu", "smoke"):
    config.datasets = "cifar10,commongen"  # samples that ship with the package
  return config


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds a variant: nearly all of it is compiling."""
  for dataset in DATASETS:
    section = config[dataset]
    section.num_steps = 10
    section.damcha.widths = (8, 8)
    section.evaluation.every_steps = section.checkpoint.every_steps = 10
    section.logging.tensorboard = False
