"""The sections that experiments' configs are made of. No field has a default."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, Literal, Optional

from damcha_jax.config.conversion import require


MAX_FLOAT32 = 2.0**128
MAX_WIDTH = 10**6
MAX_LAYERS = 10_000  # each is built, one after the other
# Options of attentions: keys of the sections that every experiment with attentions has.
_POSITIVE = ("damcha.stride", "dcmha.rank", "authors.expert_factor", "authors.local_window")
_NOT_NEGATIVE = ("mma.local_window", "moa.switch_coefficient", "moa.z_coefficient",
                 "moa.cv_coefficient")
_POSITIVE_OR_NONE = ("tha.num_key_heads", "tha.num_softmax_heads", "tha.num_value_heads",
                     "tha.key_head_features", "tha.value_head_features", "tha.query_chunk",
                     "damcha.half_life", "dcmha.window", "dcmha.query_chunk",
                     "colmha.key_features", "moa.num_experts", "moa.experts_per_token",
                     "moa.expert_features", "authors.router_rank")


def check_attentions(config: AttentionsConfig) -> None:
  """Checks the attentions' sections of a config, also of those that it does not name.

  Raises:
    ConfigError: a value that no attention can have.
  """
  for name in _POSITIVE:
    require(operator.attrgetter(name)(config) > 0, f"config key '{name}' must be positive")
  for name in _POSITIVE_OR_NONE:
    value = operator.attrgetter(name)(config)
    require(value is None or value > 0, f"{name}={value} must be positive, or None")
  for name in _NOT_NEGATIVE:
    value = operator.attrgetter(name)(config)
    require(0 <= value < math.inf, f"{name}={value} must be at least 0 and finite")
  check_widths("damcha.widths", config.damcha.widths)


def check_widths(key: str, widths: tuple[int, ...]) -> None:
  require(all(0 < width <= MAX_WIDTH for width in widths),
          f"config key '{key}' must hold positive widths of at most {MAX_WIDTH:,}, not {widths}")


def check_num_layers(key: str, num_layers: int) -> None:
  require(num_layers <= MAX_LAYERS,
          f"config key '{key}' has num_layers={num_layers}; it must be at most {MAX_LAYERS}")


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
  attention_implementation: Literal["auto", "plain", "xla", "cudnn", "pallas"]
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
  pooling: Literal["class", "mean"]  # what is classified: a token of its own, the patches' mean
  initializer: Literal["vit", "gpt2", "lecun"]
  dropout_rate: float
  attention_dropout_rate: float
  stochastic_depth_rate: float  # how often the last layer's branches are left out; the first's: 0
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
  static_part: bool  # full_width only: keep W_Q W_K^T beside the update
  metric: Literal["generated", "static"]  # 'static': the ablation "w/o f(x)+share"
  sharing: Literal["generator", "stack", "none"]
  context: Literal["prefix", "sequence", "learned"]
  stride: int
  half_life: Optional[float]  # tokens after which one counts half in a prefix mean; None: never
  mix_slices: bool  # head_slice only: slices are of X W, W learned
  widths: tuple[int, ...]  # hidden widths of f_theta: P - 1 numbers
  parameterization: Literal["blocks", "rowsum"]
  preset: Literal["paper", "robust"]
  # Each in place of one entry of the preset; None: the preset's.
  initializer: Optional[Literal["torch", "flax", "vit", "variance_preserving"]]
  residual: Optional[bool]
  normalize_context: Optional[bool]
  block_ablation_train: Literal["full", "diagonal", "off_diagonal", "shifted"]
  block_ablation_eval: Literal["full", "diagonal", "off_diagonal", "shifted"]
  allow_future_leak: bool


@dataclasses.dataclass(frozen=True)
class ThaConfig:
  """Talking-heads attention."""

  num_key_heads: Optional[int]  # None: model.num_heads, as the next two
  num_softmax_heads: Optional[int]
  num_value_heads: Optional[int]
  key_head_features: Optional[int]  # width of a head; None: model.features over their number
  value_head_features: Optional[int]
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

  router_rank: Optional[int]  # authors_dcmha; None: max(4, H / 2)
  expert_factor: int  # authors_moa: experts per head
  local_window: int  # authors_mma: keys that a local head sees, the query's own included
  allow_future_leak: bool  # authors_mma: let its future heads see the future


@dataclasses.dataclass(frozen=True)
class AttentionsConfig:
  """The sections of attentions, which a config that names attentions has."""

  damcha: DamchaConfig
  tha: ThaConfig
  dcmha: DcmhaConfig
  colmha: ColmhaConfig
  moa: MoaConfig
  mma: MmaConfig
  authors: AuthorsConfig


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

  def __post_init__(self):
    for name in ("b1", "b2"):
      value = getattr(self, name)
      require(0 <= value < 1, f"optimizer.{name}={value} must be at least 0 and below 1")
    for name in ("learning_rate", "end_learning_rate_factor", "eps", "weight_decay", "clip_norm"):
      value = getattr(self, name)
      require(0 <= value < MAX_FLOAT32, f"optimizer.{name}={value} must be at least 0 and finite")


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

  def __post_init__(self):
    require(self.keep_best >= 0, f"checkpoint.keep_best={self.keep_best} must be at least 0")


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
