"""Typed configuration of the efficiency experiment (paper Section 5.2, Table 7, Appendix D.4)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal, Optional

from damcha_jax.config.conversion import ConfigError
from damcha_jax.config.sections import (AttentionsConfig, MAX_WIDTH, ModelConfig, OptimizerConfig,
                                        check_attentions, check_num_layers, check_widths)


@dataclasses.dataclass(frozen=True)
class ShapeConfig:
  """A stack of layers, without embedding or head, whose costs are counted and may be measured."""

  dataset: str  # of its rows, as is `variant`; the inputs are synthetic
  variant: Optional[str]
  batch_size: int
  context_length: int
  causal: bool
  num_layers: int
  num_heads: int
  features: int
  mlp_features: int
  first_commit: bool  # DAMCHA as the authors' first public commit had it, which Table 2 counted
  damcha_context: Literal["prefix", "sequence", "learned"]
  damcha_stride: int
  damcha_widths: tuple[int, ...]
  measured: Literal["nothing", "memory", "forward", "train_step"]
  omitted: tuple[str, ...]  # attentions to leave out, such as those that cannot have this shape
  initializer: Literal["gpt2", "lecun"]
  attention_dropout_rate: float
  attention_implementation: Literal["auto", "plain", "xla", "cudnn"]
  dtype: Literal["float32", "bfloat16"]
  param_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
  """Sizes of a shape, each of which is varied while the others stay."""

  shape: ShapeConfig
  context_lengths: tuple[int, ...]
  features: tuple[int, ...]
  num_heads: tuple[int, ...]
  num_layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DamchaVariantConfig:
  """A DAMCHA among the decoders whose speed is measured; the rest is as section `damcha` says."""

  name: str
  stride: int
  sharing: Literal["generator", "stack", "none"]


@dataclasses.dataclass(frozen=True)
class DecoderShapeConfig:
  """A whole decoder, on random bytes."""

  variant: str  # of its rows
  batch_size: int
  context_length: int
  model: ModelConfig
  damcha_widths: tuple[int, ...]
  # steps: train and evaluation steps, and the input pipeline; sampling: cached, token by token;
  # memory and depth: of the compiled train step, the latter with 4 times the layers as well.
  measured: Literal["steps", "sampling", "memory", "depth"]
  omitted: tuple[str, ...]  # decoders to leave out


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
  """Decoders to time side by side: plain Flax's, those of `attentions`, and DAMCHA's variants."""

  damcha_variants: tuple[DamchaVariantConfig, ...]  # in place of `damcha` in `attentions`
  shapes: tuple[DecoderShapeConfig, ...]


@dataclasses.dataclass(frozen=True)
class EfficiencyConfig(AttentionsConfig):
  """What is counted and measured, of which attentions; `damcha` but for what a shape says."""

  experiment: str
  name: str  # of the config file
  size: str
  attentions: str  # comma-separated
  seeds: tuple[int, ...]  # of weights and inputs; each is timed anew
  num_rounds: int  # of interleaved timing
  shapes: tuple[ShapeConfig, ...]
  scaling: Optional[ScalingConfig]
  speed: Optional[SpeedConfig]
  optimizer: OptimizerConfig  # of the train step

  def __post_init__(self):
    for name, values in (("attentions", self.attention_names), ("seeds", self.seeds)):
      if not 0 < len(values) == len(set(values)):
        raise ConfigError(f"config key '{name}' must name at least one entry and none twice, not "
                          f"{values}")
    if not all(0 <= seed < 2**63 for seed in self.seeds):
      raise ConfigError("config key 'seeds' must hold numbers from 0 to 2^63 - 1, not "
                        f"{self.seeds}")
    if self.num_rounds < 1:
      raise ConfigError(f"config key 'num_rounds' must be positive, not {self.num_rounds}")
    check_attentions(self)
    names = [(shape.dataset, shape.variant) for shape in self.shapes]
    if len(set(names)) < len(names):
      raise ConfigError("two entries of config key 'shapes' have the same dataset and variant; "
                        "rename one")
    for shape in self.shapes:
      _check_shape(shape, "shapes")
    if self.scaling is not None:
      _check_shape(self.scaling.shape, "scaling.shape")
      _check_scaling(self.scaling)
    if self.speed is not None:
      _check_speed(self.speed)

  @property
  def attention_names(self) -> tuple[str, ...]:
    return tuple(self.attentions.split(","))


def _check_shape(shape: ShapeConfig, key: str) -> None:
  _check_sizes({name: getattr(shape, name) for name in (
      "batch_size", "context_length", "num_layers", "num_heads", "features", "mlp_features",
      "damcha_stride")}, key)
  check_widths(f"{key}.damcha_widths", shape.damcha_widths)
  if not 0 <= shape.attention_dropout_rate < 1:
    raise ConfigError(f"config key '{key}' has attention_dropout_rate="
                      f"{shape.attention_dropout_rate}; it must be at least 0 and below 1")


def _check_sizes(sizes: dict[str, int], key: str) -> None:
  for name, size in sizes.items():
    if not 1 <= size <= MAX_WIDTH:
      raise ConfigError(f"config key '{key}' has {name}={size}; it must be positive, and at most "
                        f"{MAX_WIDTH:,}")
  check_num_layers(key, sizes["num_layers"])
  if sizes["features"] % sizes["num_heads"]:
    raise ConfigError(f"config key '{key}' has num_heads={sizes['num_heads']}, which does not "
                      f"divide features={sizes['features']}; choose a number of heads that does")


def _check_scaling(scaling: ScalingConfig) -> None:
  for name in ("context_lengths", "features", "num_heads", "num_layers"):
    values = getattr(scaling, name)
    if not 1 < len(values) == len(set(values)) or min(values) < 1:
      raise ConfigError(f"config key 'scaling.{name}' must hold at least two positive sizes, each "
                        f"once, not {values}")
    if max(values) > MAX_WIDTH:
      raise ConfigError(f"config key 'scaling.{name}' holds {max(values)}; sizes must be at most "
                        f"{MAX_WIDTH:,}")
  check_num_layers("scaling.num_layers", max(scaling.num_layers))
  pairs = itertools.product((*scaling.features, scaling.shape.features),
                            (*scaling.num_heads, scaling.shape.num_heads))
  if any(features % heads for features, heads in pairs):
    raise ConfigError(f"config key 'scaling.num_heads' {scaling.num_heads} must divide every one "
                      f"of scaling.features {scaling.features}")


def _check_speed(speed: SpeedConfig) -> None:
  for key, names in (("damcha_variants", [one.name for one in speed.damcha_variants]),
                     ("shapes", [shape.variant for shape in speed.shapes])):
    if len(set(names)) < len(names):
      raise ConfigError(f"two entries of config key 'speed.{key}' have the same name; rename one")
  for one in speed.damcha_variants:
    if one.stride < 1:
      raise ConfigError(f"config key 'speed.damcha_variants' has stride={one.stride}; it must be "
                        "positive")
  for shape in speed.shapes:
    sizes = {"batch_size": shape.batch_size, "context_length": shape.context_length}
    for name in ("num_layers", "num_heads", "features", "mlp_features", "vocab_size"):
      sizes[name] = getattr(shape.model, name)
    _check_sizes(sizes, "speed.shapes")
