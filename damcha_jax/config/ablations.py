"""The config of the ablations (paper Section 5.3, Tables 3 and 4)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from damcha_jax.config.conversion import freeze, require
from damcha_jax.config.decoder import DecoderConfig
from damcha_jax.config.image_generation import ImageGenerationConfig
from damcha_jax.config.text_generation import TextGenerationConfig

# Data set -> the experiment that it is of, and the class of that one's config.
DATASETS = {
    "cifar10": ("image_generation", ImageGenerationConfig),
    "cifar100": ("image_generation", ImageGenerationConfig),
    "wmt14": ("text_generation", TextGenerationConfig),
    "commongen": ("text_generation", TextGenerationConfig),
}
# Variant -> what it changes in the section `damcha` of the data set. Besides, `depth<p>`.
CHANGES = {
    "full": {},
    "static": {"metric": "static"},
    "unshared": {"sharing": "none"},
    "rowsum": {"parameterization": "rowsum"},
    "robust": {"preset": "robust"},
}
INFERENCE = ("full", "diagonal", "off_diagonal", "shifted")
# What all sections have from the config as a whole.
COMMON = ("experiment", "name", "size", "attentions", "seeds")


@dataclasses.dataclass(frozen=True)
class AblationsConfig:
  """Variants of DAMCHA, trained and evaluated on every data set as an experiment of its family.

  A data set's section is the config of its experiment without `COMMON`.
  """

  experiment: str
  name: str  # of the config file
  size: str
  datasets: str  # comma-separated, of DATASETS
  variants: str  # comma-separated, of CHANGES and 'depth1', 'depth2', ..
  inference: str  # comma-separated, of INFERENCE: the blocks that what is trained is evaluated with
  seeds: tuple[int, ...]
  depth_reading: Literal["hidden", "linear"]  # what depth<p> counts: hidden or Linear layers
  cifar10: dict
  cifar100: dict
  wmt14: dict
  commongen: dict

  def __post_init__(self):
    for key, names, valid in (("datasets", self.dataset_names, DATASETS),
                              ("variants", self.variant_names, (*CHANGES, "depth<p>")),
                              ("inference", self.inference_names, INFERENCE)):
      require(len(set(names)) == len(names),
              f"config key '{key}' names an entry twice: {','.join(names)}")
      for name in names:
        known = depth(name) is not None if name.startswith("depth") else name in valid
        require(known,
                f"unknown entry '{name}' in config key '{key}'; choose from {', '.join(valid)}")
    require(self.inference_names[0] == "full",
            f"config key 'inference' must begin with 'full', not '{self.inference_names[0]}': the "
            "others are evaluations of what is trained with all blocks")
    for cell in self.cells:
      self.family_config(*cell)

  @property
  def dataset_names(self) -> tuple[str, ...]:
    return tuple(self.datasets.split(","))

  @property
  def variant_names(self) -> tuple[str, ...]:
    return tuple(self.variants.split(","))

  @property
  def inference_names(self) -> tuple[str, ...]:
    return tuple(self.inference.split(","))

  @property
  def cells(self) -> tuple[tuple[str, str, str], ...]:
    """(data set, variant, inference) of all evaluations; 'rowsum' has no blocks to leave out."""
    return tuple((dataset, variant, inference) for dataset in self.dataset_names
                 for variant in self.variant_names for inference in self.inference_names
                 if inference == "full" or variant != "rowsum")

  def family_config(self, dataset: str, variant: str, inference: str = "full") -> DecoderConfig:
    """The config with which the family of `dataset` trains and evaluates `variant`.

    Raises:
      ConfigError: a section lacks a key, has another, or values that do not go together.
    """
    section = getattr(self, dataset)
    experiment, cls = DATASETS[dataset]
    for key in COMMON:
      require(key not in section, f"config key '{dataset}.{key}' has no effect; use '{key}'")
    config = freeze({**section, "experiment": experiment, "name": dataset, "size": self.size,
                     "attentions": "damcha", "seeds": self.seeds}, cls, prefix=f"{dataset}.")
    changes: dict[str, Any] = {"block_ablation_eval": inference}
    layers = depth(variant)
    if layers is None:
      changes |= CHANGES[variant]
    else:
      require(len(config.damcha.widths) > 0,
              f"config key '{dataset}.damcha.widths' is empty; the width of {variant} is its last")
      num_hidden = layers if self.depth_reading == "hidden" else layers - 1
      changes["widths"] = config.damcha.widths[-1:] * num_hidden
    return dataclasses.replace(config, damcha=dataclasses.replace(config.damcha, **changes))


def depth(variant: str) -> int | None:
  """p of `depth<p>`, from 1; None for any other name."""
  match = re.fullmatch(r"depth([1-9]\d*)", variant)
  return int(match[1]) if match else None
