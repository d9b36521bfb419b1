"""Typed configuration of the theory experiment (paper Section 4, Appendices C and D)."""

from __future__ import annotations

import dataclasses

from damcha_jax.config.conversion import names_differ, require
from damcha_jax.config.efficiency import EfficiencyConfig


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
  """C.1, Step 1: multi-head attention as full-width DAMCHA, and what the head-slice form lacks."""

  shapes: tuple[tuple[int, int, int], ...]  # T, D and H
  num_instances: int  # random weights and inputs per shape and seed
  slice_lengths: tuple[int, ...]  # T of the scores that head slices are to reach, at the first D, H


@dataclasses.dataclass(frozen=True)
class StrictnessConfig:
  """C.1, Step 2: a metric of full rank, and factorisations of lower rank."""

  length: int
  features: int
  num_heads: int
  ranks: tuple[int, ...]  # of the factorisations; D / H is multi-head attention's
  num_starts: int  # of training, per rank and seed
  num_steps: int
  learning_rate: float


@dataclasses.dataclass(frozen=True)
class ContextsConfig:
  """C.2: contexts that need different metrics."""

  features: int
  num_heads: int
  num_contexts: tuple[int, ...]
  ranks: tuple[int, ...]  # of static and adaptive metrics
  conditions: tuple[float, ...]  # of the tokens' second moments; with 1 the bound is attained
  heterogeneity: float  # of the contexts' metrics, relative to what they have in common
  heterogeneities: tuple[float, ...]  # compared at the last of num_contexts and of conditions


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
  """C.2, Assumption 4: a generator that has to find the context in the mean of the tokens."""

  num_contexts: int
  signals: tuple[float, ...]  # of the context in the mean, in its standard deviations
  length: int
  noise: float  # standard deviation of the scores that are learned
  widths: tuple[int, ...]
  num_steps: int
  batch_size: int
  learning_rate: float
  num_held_out: int  # sequences


@dataclasses.dataclass(frozen=True)
class GrowthConfig:
  """C.2, Assumption 3 where scores go through a softmax."""

  features: int
  length: int
  num_directions: int
  num_samples: int
  radii: tuple[float, ...]  # distances from the best metric, ascending


@dataclasses.dataclass(frozen=True)
class TheoryConfig:
  """What is checked of each theorem, at which sizes."""

  experiment: str
  name: str  # of the config file
  size: str
  seeds: tuple[int, ...]  # of all that is drawn but `costs`, which has its own
  embedding: EmbeddingConfig
  strictness: StrictnessConfig
  contexts: ContextsConfig
  generator: GeneratorConfig
  growth: GrowthConfig
  costs: EfficiencyConfig  # Appendix D

  def __post_init__(self):
    require(0 < len(self.seeds) == len(set(self.seeds)),
            f"config key 'seeds' must name at least one seed and none twice, not {self.seeds}")
    require(all(0 <= seed < 2**63 for seed in self.seeds),
            f"config key 'seeds' must hold numbers from 0 to 2^63 - 1, not {self.seeds}")
    for section in ("embedding", "strictness", "contexts", "generator", "growth"):
      _check_positive(section, getattr(self, section))
    for length, features, num_heads in self.embedding.shapes:
      _check_shape("embedding.shapes", length, features, num_heads)
    _check_shape("strictness", self.strictness.length, self.strictness.features,
                 self.strictness.num_heads)
    _check_shape("contexts", 2, self.contexts.features, self.contexts.num_heads)
    for section in ("strictness", "contexts"):
      sizes = getattr(self, section)
      require(max(sizes.ranks) <= sizes.features,
              f"config key '{section}.ranks' has {max(sizes.ranks)}, more than "
              f"{section}.features={sizes.features}; choose ranks up to that")
      require(sizes.features // sizes.num_heads in sizes.ranks,
              f"config key '{section}.ranks' lacks {sizes.features // sizes.num_heads}, the width "
              "of a head; add it")
    require(min(self.contexts.conditions) >= 1,
            "config key 'contexts.conditions' must hold ratios of the largest eigenvalue to the "
            f"smallest, so none below 1, not {self.contexts.conditions}")
    require(self.generator.num_held_out > 1 and self.generator.length > 1,
            "config keys 'generator.num_held_out' and 'generator.length' must be at least 2")
    require(list(self.growth.radii) == sorted(set(self.growth.radii)),
            f"config key 'growth.radii' must ascend, not {self.growth.radii}")
    require(self.costs.scaling is not None,
            "config key 'costs.scaling' is None; Appendix D needs its sizes")


_LARGEST = 10**6  # of which squares and their ratios stay far from the ends of float32
_MAY_BE_ZERO = ("heterogeneity", "heterogeneities", "signals", "noise")


def _check_positive(section: str, sizes: object) -> None:
  for field in dataclasses.fields(sizes):
    value = getattr(sizes, field.name)
    numbers = value if isinstance(value, tuple) else (value,)
    require(len(numbers) > 0, f"config key '{section}.{field.name}' is empty; name at least one")
    if isinstance(numbers[0], tuple):
      continue
    zero = field.name in _MAY_BE_ZERO
    require(all(0 < one <= _LARGEST or (one == 0 and zero) for one in numbers),
            f"config key '{section}.{field.name}' must be {'at least 0' if zero else 'positive'}, "
            f"and at most {_LARGEST:,}, not {value}")
    require(field.name == "widths" or names_differ(numbers),
            f"config key '{section}.{field.name}' names an entry twice, or two that differ by less "
            f"than rows tell: {value}")


def _check_shape(key: str, length: int, features: int, num_heads: int) -> None:
  require(length > 1 and features > 0 and num_heads > 0 and features % num_heads == 0,
          f"config key '{key}' has T={length}, D={features}, H={num_heads}; T must be at least 2, "
          "and H divide D")
