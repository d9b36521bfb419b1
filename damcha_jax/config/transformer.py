"""The config of an experiment that trains Transformers with any of the attentions."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any, Literal

from damcha_jax.config.conversion import require
from damcha_jax.config.sections import (AttentionsConfig, CheckpointConfig, DamchaConfig,
                                        EvaluationConfig, LoggingConfig, MeshConfig, ModelConfig,
                                        OptimizerConfig, VisionModelConfig, check_attentions,
                                        check_num_layers)

_POSITIVE = ("batch_size", "model.num_layers", "model.num_heads", "model.features",
             "model.mlp_features")
_FRACTIONS = ("model.dropout_rate", "model.attention_dropout_rate")
# The attentions that each fused scaled-dot-product kernel can compute.
_FUSED = {**dict.fromkeys(("xla", "cudnn"), ("mha", "damcha", "moa", "mma")),
          "pallas": ("mha", "damcha", "moa")}  # no masks, such as mma's windows


@dataclasses.dataclass(frozen=True)
class TransformerConfig(AttentionsConfig):
  """What every experiment that trains one kind of Transformer has in common."""

  experiment: str
  name: str  # of the config file
  size: str
  dataset: str
  attentions: str  # comma-separated
  seeds: tuple[int, ...]
  num_steps: int
  batch_size: int
  model: ModelConfig | VisionModelConfig  # subclasses say which
  optimizer: OptimizerConfig
  mesh: MeshConfig
  logical_rules: tuple[tuple[str, Any], ...]
  evaluation: EvaluationConfig
  checkpoint: CheckpointConfig
  logging: LoggingConfig
  prng_impl: Literal["threefry2x32", "rbg", "unsafe_rbg"]

  def __post_init__(self):
    _check(self)

  @property
  def attention_names(self) -> tuple[str, ...]:
    return tuple(self.attentions.split(","))


def for_any_device(config: Any) -> Any:
  """The config with attention that every device can compute; what it computes is the same."""
  return dataclasses.replace(
      config, model=dataclasses.replace(config.model, attention_implementation="auto"))


def _check(config: TransformerConfig) -> None:
  """Checks what would otherwise fail deep in the model; the rest is checked where it is used."""
  model, damcha = config.model, config.damcha
  for name in _POSITIVE:
    require(operator.attrgetter(name)(config) > 0, f"config key '{name}' must be positive")
  check_num_layers("model", model.num_layers)
  for name, values in (("attentions", config.attention_names), ("seeds", config.seeds)):
    require(len(set(values)) == len(values) > 0,
            f"config key '{name}' must name at least one entry and none twice, not {values}")
  for name in config.attention_names:  # which become those of folders
    require(re.fullmatch(r"\w+", name) is not None,
            f"config key 'attentions' must hold names, comma-separated, not {name!r}")
  require(config.dataset != "", "config key 'dataset' is empty; name a corpus or a text file")
  require(all(0 <= seed < 2**63 for seed in config.seeds),
          f"config key 'seeds' must hold numbers from 0 to 2^63 - 1, not {config.seeds}")
  require(model.features % model.num_heads == 0,
          f"model.features={model.features} is not divisible by model.num_heads="
          f"{model.num_heads}; choose a multiple")
  for name in _FRACTIONS:
    value = operator.attrgetter(name)(config)
    require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1")
  check_attentions(config)
  fused = model.attention_implementation in _FUSED
  require(not fused or model.attention_dropout_rate == 0,
          "model.attention_dropout_rate needs the weights that a fused kernel never forms; use 0, "
          "or model.attention_implementation='plain'")
  require(model.attention_implementation != "cudnn" or model.dtype == "bfloat16",
          f"model.attention_implementation='cudnn' computes in bfloat16, not in "
          f"model.dtype='{model.dtype}'; change that, or use 'plain' (or 'auto')")
  for name in config.attention_names if fused else ():
    can = _FUSED[model.attention_implementation]
    others = ",".join(one for one in config.attention_names if one in can)
    require(name in can,
            f"attention '{name}' mixes, widens or masks what "
            f"model.attention_implementation='{model.attention_implementation}' computes; use "
            "'plain' (or 'auto')" + (f", or attentions={others}" if others else ""))
  _check_form(damcha, fused and "damcha" in config.attention_names)
  require(damcha.parameterization == "blocks"
          or damcha.block_ablation_train == damcha.block_ablation_eval == "full",
          "damcha.parameterization='rowsum' keeps no single blocks to ablate; use 'blocks'")


def _check_form(damcha: DamchaConfig, fused: bool) -> None:
  rank = damcha.update_rank
  if damcha.form == "head_slice":
    require(rank is None,
            "damcha.update_rank is for damcha.form='full_width'; the head-slice metric is K x K")
    return
  require(rank is None or rank >= 0,
          f"damcha.update_rank={rank} must be at least 0, or None for a full update")
  require(rank == 0 or damcha.parameterization == "rowsum",
          "damcha.form='full_width' has no blocks; use damcha.parameterization='rowsum'")
  require(rank == 0 or not fused,
          "damcha.form='full_width' has queries wider than values, which fused kernels do not "
          "take; use model.attention_implementation='plain'")
