"""Typed, frozen configuration: the one place where a ConfigDict becomes dataclasses.

`configs/*.py` write every value out; `freeze` turns the result into the dataclasses below, which
the rest of the package takes. No field has a default: a key that is missing, unknown or of the
wrong type is a `ConfigError` that names it and, for an unknown one, the nearest valid name. What
involves several keys at once is checked when the dataclass is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Optional

import ml_collections


_FRACTIONS = ("model.dropout_rate", "model.attention_dropout_rate", "optimizer.b1", "optimizer.b2")
_NOT_NEGATIVE = ("optimizer.learning_rate", "optimizer.end_learning_rate_factor", "optimizer.eps",
                 "optimizer.weight_decay", "optimizer.clip_norm", "checkpoint.keep_best",
                 "sampling.temperature", "sampling.top_k", "mma.local_window",
                 "moa.switch_coefficient", "moa.z_coefficient", "moa.cv_coefficient")
_POSITIVE_OR_NONE = ("tha.num_key_heads", "tha.num_softmax_heads", "tha.num_value_heads",
                     "tha.query_chunk", "dcmha.window", "dcmha.query_chunk", "colmha.key_features",
                     "moa.num_experts", "moa.experts_per_token", "moa.expert_features")
# The attentions that a fused scaled-dot-product kernel can compute.
_FUSED = ("mha", "damcha", "moa", "mma")


class ConfigError(ValueError):
  """A configuration that cannot be run; the message names the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Transformer decoder: N layers, H heads, width D, feed-forward width F, V symbols."""

  num_layers: int
  num_heads: int
  features: int
  mlp_features: int
  vocab_size: int
  positions: Literal["learned", "sinusoidal"]
  norm_placement: Literal["pre", "post"]
  tie_embeddings: bool
  initializer: Literal["gpt2", "lecun"]
  gelu: Literal["exact", "tanh"]
  dropout_rate: float  # of embeddings and of what blocks add to the residual stream
  attention_dropout_rate: float  # of attention weights; above 0 the fused kernels do not apply
  remat: bool
  scan_layers: bool
  attention_implementation: Literal["auto", "plain", "xla", "cudnn"]
  dtype: Literal["float32", "bfloat16"]  # of the computation; the softmax stays float32
  param_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class VisionModelConfig:
  """Vision Transformer: N layers, H heads, width D, feed-forward width F; sizes in pixels."""

  num_layers: int
  num_heads: int
  features: int
  mlp_features: int
  image_size: int
  patch_size: int
  num_classes: int
  initializer: Literal["vit", "gpt2", "lecun"]
  dropout_rate: float
  attention_dropout_rate: float
  remat: bool
  scan_layers: bool
  attention_implementation: Literal["auto", "plain", "xla", "cudnn"]
  dtype: Literal["float32", "bfloat16"]
  param_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class DamchaConfig:
  """The DAMCHA attention and its metric generator f_theta (paper Section 3)."""

  form: Literal["head_slice", "full_width"]
  update_rank: Optional[int]  # full_width only: rank of the adaptive update, None for a full one
  metric: Literal["generated", "static"]  # 'static': the ablation "w/o f(x)+share"
  sharing: Literal["generator", "stack", "none"]
  context: Literal["prefix", "sequence", "learned"]
  stride: int
  widths: tuple[int, ...]  # hidden widths of f_theta: P - 1 numbers
  parameterization: Literal["blocks", "rowsum"]
  preset: Literal["paper", "robust"]
  block_ablation_train: Literal["full", "diagonal", "off_diagonal"]
  block_ablation_eval: Literal["full", "diagonal", "off_diagonal"]
  allow_future_leak: bool


@dataclasses.dataclass(frozen=True)
class ThaConfig:
  """Talking-heads attention; None stands for model.num_heads."""

  num_key_heads: Optional[int]
  num_softmax_heads: Optional[int]
  num_value_heads: Optional[int]
  query_chunk: Optional[int]  # queries whose scores are in memory at a time; None: all


@dataclasses.dataclass(frozen=True)
class DcmhaConfig:
  """Dynamically composable multi-head attention."""

  static: bool  # parts of the composition
  dynamic: bool
  gate: bool
  rank: int
  gelu: Literal["tanh", "exact"]
  qk_norm: Optional[Literal["rms", "layer"]]
  rope: bool
  window: Optional[int]  # keys that a query sees, its own included; None: all
  query_chunk: Optional[int]
  use_bias: bool


@dataclasses.dataclass(frozen=True)
class ColmhaConfig:
  """Collaborative multi-head attention."""

  form: Literal["fairseq", "epfml"]
  key_features: Optional[int]  # Dk; None: model.features
  mixing_init: Optional[Literal["xavier_uniform", "normal", "blocks"]]  # None: the form's


@dataclasses.dataclass(frozen=True)
class MoaConfig:
  """Mixture of attention heads."""

  num_experts: Optional[int]  # E; None: twice model.num_heads
  experts_per_token: Optional[int]  # k; None: model.num_heads
  expert_features: Optional[int]  # width of a head; None: model.features / model.num_heads
  renormalize: bool
  switch_coefficient: float  # of the auxiliary losses; 0 leaves one out
  z_coefficient: float
  cv_coefficient: float
  dispatch: Literal["dense", "sorted"]


@dataclasses.dataclass(frozen=True)
class MmaConfig:
  """Mixed multi-head attention."""

  local_window: int  # how far a local head sees


@dataclasses.dataclass(frozen=True)
class AuthorsConfig:
  """The comparators as the DAMCHA authors' repository has them (`authors_*`)."""

  allow_future_leak: bool  # authors_mma: let its future heads see the future


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with warm-up and cosine decay."""

  learning_rate: float
  end_learning_rate_factor: float
  warmup_steps: int
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float
  accumulation_steps: int


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where corpora live and how Mix is made."""

  data_dir: str
  decontaminate: bool
  max_held_out_bytes: Optional[int]  # of each source's validation and test part; None: all


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Device mesh; at most one axis may be -1, which takes the devices that are left."""

  data: int
  fsdp: int
  tensor: int


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  every_steps: int
  batch_size: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  every_steps: int
  keep_last: int
  keep_best: int


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
  every_steps: int
  tensorboard: bool


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """The text printed at the end of a language-model run."""

  prompt: str
  num_tokens: int
  temperature: float
  top_k: int  # 0: off
  top_p: float  # 1.0: off


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
  """One language-model experiment (paper Section 5.4)."""

  experiment: str
  name: str  # of the config file
  size: str
  dataset: str  # 'enwik8' | 'text8' | 'mix' | 'sample_*' | path of a text file
  attentions: str  # comma-separated
  seeds: tuple[int, ...]
  num_steps: int
  batch_size: int
  context_length: int
  model: ModelConfig
  damcha: DamchaConfig
  tha: ThaConfig
  dcmha: DcmhaConfig
  colmha: ColmhaConfig
  moa: MoaConfig
  mma: MmaConfig
  authors: AuthorsConfig
  optimizer: OptimizerConfig
  data: DataConfig
  mesh: MeshConfig
  logical_rules: tuple[tuple[str, Any], ...]
  evaluation: EvaluationConfig
  checkpoint: CheckpointConfig
  logging: LoggingConfig
  sampling: SamplingConfig
  prng_impl: Literal["threefry2x32", "rbg", "unsafe_rbg"]

  def __post_init__(self):
    _check_language_model(self)

  @property
  def attention_names(self) -> tuple[str, ...]:
    return tuple(self.attentions.split(","))


def freeze(config: ml_collections.ConfigDict | Mapping[str, Any],
           cls: type = LanguageModelConfig) -> Any:
  """Turns a ConfigDict, or the contents of a `config.json`, into `cls`.

  Raises:
    ConfigError: a key is missing, unknown or of the wrong type, or values do not fit each other.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  return _freeze(config, cls, prefix="")


def to_dict(config: Any) -> dict[str, Any]:
  """The config as plain JSON-able containers, as written to `config.json`."""
  return dataclasses.asdict(config)


def unknown_key_message(key: str, valid: Iterable[str]) -> str:
  nearest = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.0)
  return f"unknown config key '{key}'; the nearest valid key is '{nearest[0]}'"


def _freeze(config: Mapping[str, Any], cls: type, prefix: str) -> Any:
  hints = typing.get_type_hints(cls)
  for key in config:
    if key not in hints:
      raise ConfigError(unknown_key_message(prefix + key, [prefix + name for name in hints]))
  values = {}
  for name, hint in hints.items():
    if name not in config:
      raise ConfigError(f"config key '{prefix}{name}' is missing; add it to the config file")
    values[name] = _convert(config[name], hint, prefix + name)
  return cls(**values)


def _convert(value: Any, hint: Any, name: str) -> Any:
  if hint is Any:
    return tuple(value) if isinstance(value, list) else value
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ConfigError(f"config key '{name}' must be a section, not {value!r}")
    return _freeze(value, hint, prefix=name + ".")
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal:
    if value not in options:
      choices = ", ".join(map(repr, options))
      raise ConfigError(f"config key '{name}' must be one of {choices}, not {value!r}")
    return value
  if origin is typing.Union:  # Optional[...]
    return None if value is None else _convert(value, options[0], name)
  if origin is tuple:
    if not isinstance(value, (tuple, list)):
      raise ConfigError(f"config key '{name}' must be a tuple, not {value!r}")
    hints = options[:1] * len(value) if options[-1] is Ellipsis else options
    if len(value) != len(hints):
      raise ConfigError(f"config key '{name}' must hold entries of {len(hints)}, not {value!r}")
    return tuple(_convert(entry, hint, name) for entry, hint in zip(value, hints, strict=True))
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:  # `is`: a bool is an int to isinstance
    raise ConfigError(f"config key '{name}' must be {hint.__name__}, not {value!r}")
  return value


def _check_language_model(config: LanguageModelConfig) -> None:
  """Checks what would otherwise fail deep in the model; the rest is checked where it is used."""
  model, damcha = config.model, config.damcha
  for name in ("context_length", "model.num_layers", "model.num_heads", "model.features",
               "model.mlp_features", "model.vocab_size", "damcha.stride", "dcmha.rank",
               "sampling.num_tokens"):
    _require(operator.attrgetter(name)(config) > 0, f"config key '{name}' must be positive")
  for name, values in (("attentions", config.attention_names), ("seeds", config.seeds)):
    _require(len(set(values)) == len(values) > 0,
             f"config key '{name}' must name at least one entry and none twice, not {values}")
  limit = config.data.max_held_out_bytes
  _require(limit is None or limit > 0,
           f"data.max_held_out_bytes={limit} must be positive, or None for whole splits")
  _require(config.dataset != "", "config key 'dataset' is empty; name a corpus or a text file")
  _require(all(seed >= 0 for seed in config.seeds),
           f"config key 'seeds' must hold no negative seed, not {config.seeds}")
  _require(0 < config.sampling.top_p <= 1,
           f"sampling.top_p={config.sampling.top_p} must be above 0 and at most 1 (1: all)")
  _require(all(width > 0 for width in damcha.widths),
           f"config key 'damcha.widths' must hold positive widths, not {damcha.widths}")
  _require(model.features % model.num_heads == 0,
           f"model.features={model.features} is not divisible by model.num_heads="
           f"{model.num_heads}; choose a multiple")
  for name in _FRACTIONS:
    value = operator.attrgetter(name)(config)
    _require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1")
  for name in _POSITIVE_OR_NONE:
    value = operator.attrgetter(name)(config)
    _require(value is None or value > 0, f"{name}={value} must be positive, or None")
  for name in _NOT_NEGATIVE:
    value = operator.attrgetter(name)(config)
    _require(0 <= value < math.inf, f"{name}={value} must be at least 0 and finite")
  fused = model.attention_implementation in ("xla", "cudnn")
  _require(not fused or model.attention_dropout_rate == 0,
           "model.attention_dropout_rate needs the weights that a fused kernel never forms; use 0, "
           "or model.attention_implementation='plain'")
  for name in config.attention_names if fused else ():
    _require(name in _FUSED, f"attention '{name}' mixes or widens what fused kernels compute; use "
             "model.attention_implementation='plain' (or 'auto')")
  _check_form(damcha, fused and "damcha" in config.attention_names)
  _require(damcha.context != "sequence" or damcha.allow_future_leak,
           "damcha.context='sequence' lets a causal decoder see the future; use 'prefix', or set "
           "damcha.allow_future_leak=True to study the leak")
  _require(damcha.parameterization == "blocks"
           or damcha.block_ablation_train == damcha.block_ablation_eval == "full",
           "damcha.parameterization='rowsum' keeps no single blocks to ablate; use 'blocks'")


def _check_form(damcha: DamchaConfig, fused: bool) -> None:
  rank = damcha.update_rank
  if damcha.form == "head_slice":
    _require(rank is None,
             "damcha.update_rank is for damcha.form='full_width'; the head-slice metric is K x K")
    return
  _require(rank is None or rank >= 0,
           f"damcha.update_rank={rank} must be at least 0, or None for a full update")
  _require(rank == 0 or damcha.parameterization == "rowsum",
           "damcha.form='full_width' has no blocks; use damcha.parameterization='rowsum'")
  _require(rank == 0 or not fused,
           "damcha.form='full_width' has queries wider than values, which fused kernels do not "
           "take; use model.attention_implementation='plain'")


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(message)
