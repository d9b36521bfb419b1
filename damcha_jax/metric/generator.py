"""The metric generator f_theta: context -> cross-head metric (paper Sections 3.2 to 3.4)."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional, Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.metric import blocks as blocks_lib
from damcha_jax.metric.application import Factors
from damcha_jax.metric.context import accumulator
from damcha_jax.metric.options import check_dtypes
from damcha_jax.metric.options import check_integers
from damcha_jax.metric.options import check_widths

Array = jax.Array

PARAMETERIZATIONS = ("blocks", "rowsum")
GELU_SECOND_MOMENT = 0.425  # E[gelu(z)^2] for a standard normal z


class Preset(NamedTuple):
  """How a generator is initialised and wired."""

  initializer: str  # a key of INITIALIZERS
  residual: bool  # hidden layers of equal width add their input
  normalize_context: bool  # contexts are divided by their root mean square


PRESETS = {
    "paper": Preset(initializer="torch", residual=False, normalize_context=False),
    "robust": Preset(initializer="variance_preserving", residual=True, normalize_context=True),
}


class Initializers(NamedTuple):
  hidden_kernel: Callable[[int], Callable]  # fan-in -> initialiser
  hidden_bias: Callable[[int], Callable]
  out_std: Callable[[int, int], float]  # (fan-in, K) -> std of an entry of m's input-dependent part
  out_bias_std: Callable[[int, int], float]
  out_uniform: bool


def _uniform(bound: float) -> Callable:
  def init(key, shape, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return init


def _torch_uniform(fan_in: int) -> Callable:
  return _uniform(1.0 / math.sqrt(fan_in))


def _variance_preserving(fan_in: int) -> Callable:
  return nn.initializers.normal(1.0 / math.sqrt(GELU_SECOND_MOMENT * fan_in))


# The std of an entry of one block; RowSum adds H independent ones. Under "variance_preserving" the
# adaptive and the constant half of m together have entries of variance 1 / K, so that unit inputs
# give unit scores.
INITIALIZERS = {
    # PyTorch's nn.Linear: kernels and biases uniform within 1 / sqrt(fan-in).
    "torch": Initializers(
        _torch_uniform,
        _torch_uniform,
        lambda fan_in, _: 1.0 / math.sqrt(3 * fan_in),
        lambda fan_in, _: 1.0 / math.sqrt(3 * fan_in),
        out_uniform=True,
    ),
    # nn.Dense: LeCun normal kernels, zero biases.
    "flax": Initializers(
        lambda _: nn.initializers.lecun_normal(),
        lambda _: nn.initializers.zeros,
        lambda fan_in, _: 1.0 / math.sqrt(fan_in),
        lambda *_: 0.0,
        out_uniform=False,
    ),
    # The authors' Vision Transformer, whose truncation at +-2 cuts nothing off.
    "vit": Initializers(
        lambda _: nn.initializers.normal(0.02),
        lambda _: nn.initializers.zeros,
        lambda *_: 0.02,
        lambda *_: 0.0,
        out_uniform=False,
    ),
    "variance_preserving": Initializers(
        _variance_preserving,
        lambda _: nn.initializers.zeros,
        lambda fan_in, head_features: math.sqrt(0.5 / (fan_in * head_features)),
        lambda _, head_features: math.sqrt(0.5 / head_features),
        out_uniform=False,
    ),
}


class MetricGenerator(nn.Module):
  """f_theta, an MLP from a context to the effective metric of every head.

    h_0 = c,  h_l = gelu(h_{l-1} W_l + b_l),  M(c) = reshape(h W + b),  m_i(c) = sum_j M_ij(c)

  With P Linear layers there are P - 1 `widths`. `blocks` stores the last kernel for all of M
  [.., H, K, H, K], as the paper does; `rowsum` stores its sum over j, the same function class with
  H times fewer parameters (the gradients of all blocks in a row are equal). Under `rowsum` with
  Adam, give `out_kernel` and `out_bias` a learning rate H times larger to follow `blocks` exactly.

  Attributes:
    num_heads: H.
    widths: hidden widths; None means (2H, 2H), with which a `rowsum` generator has about as many
      parameters as the query and key projections it replaces in one layer.
    parameterization: 'blocks' or 'rowsum'.
    preset: 'paper' (PyTorch's initial values, plain MLP) or 'robust' (variance-preserving initial
      values, residual hidden layers, normalised contexts).
    initializer, residual, normalize_context: override one entry of the preset.
    block_ablation: 'full', 'diagonal', 'off_diagonal' (Table 3) or 'shifted'; needs 'blocks'.
    fuse_rowsum: sum the last kernel before the product (equal up to rounding, H times cheaper);
      False forms M first, which is what Table 2's operation counts assume.
    row_features, column_features: size of m_i, by default K = D / H each; the full-width form
      uses D rows ('rowsum' only).
    zero_output: start the last layer at zero, so that an adaptive update starts as no update.
    partitioned: attach logical axis names to the parameters.
  """

  num_heads: int
  widths: Optional[Sequence[int]] = None
  parameterization: str = "rowsum"
  preset: str = "paper"
  initializer: Optional[str] = None
  residual: Optional[bool] = None
  normalize_context: Optional[bool] = None
  block_ablation: str = "full"
  fuse_rowsum: bool = True
  row_features: Optional[int] = None
  column_features: Optional[int] = None
  zero_output: bool = False
  partitioned: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32

  adaptive = True  # makes a metric of its context, unlike StaticMetric
  factorable = True  # `factors` are to be had

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "num_heads")
    check_integers(self, "row_features", "column_features", optional=True)
    check_widths(() if self.widths is None else self.widths)
    check_dtypes(self)

  @nn.compact
  def __call__(self, context: Array, layer_index: Any = None, return_blocks: bool = False,
               return_factors: bool = False) -> Array | Factors:
    """Maps contexts [.., D] to metrics m [.., H, K, K], summed in float32 or more.

    Args:
      context: [.., D].
      layer_index: unused here; generators with a per-layer part take it.
      return_blocks: return M [.., H, K, H, K] instead ('blocks' only), ablation applied.
      return_factors: return the factors of m instead.

    Raises:
      ValueError: widths, preset, parameterization or ablation that do not go together.
    """
    del layer_index
    features = context.shape[-1]
    self._check(features, return_blocks)
    preset = self._preset()
    initializers = INITIALIZERS[preset.initializer]
    dtype = self.dtype or context.dtype
    hidden = context.astype(accumulator(context.dtype))
    if preset.normalize_context:
      hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-6)
    hidden = self._hidden(hidden.astype(dtype), preset.residual, initializers)

    kernel, bias = self._output_layer(hidden.shape[-1], features, initializers)
    weights_HH = blocks_lib.block_weights(self.block_ablation, self.num_heads)
    fuse = (self.fuse_rowsum or return_factors) and not return_blocks
    if self.parameterization == "blocks" and fuse:
      kernel, bias = (blocks_lib.row_sum(part, weights_HH) for part in (kernel, bias))
    if return_factors:
      hidden = jnp.concatenate([hidden, jnp.ones((*hidden.shape[:-1], 1), hidden.dtype)], -1)
      return Factors(hidden, jnp.concatenate([kernel, bias[None]]).astype(dtype))
    sum_dtype = accumulator(hidden.dtype)
    metric = jnp.tensordot(hidden, kernel.astype(dtype), 1, preferred_element_type=sum_dtype)
    metric = metric + bias.astype(sum_dtype)
    if self.parameterization == "rowsum" or fuse:
      return metric
    if not return_blocks:
      return blocks_lib.row_sum(metric, weights_HH)
    return metric if weights_HH is None else metric * weights_HH[:, None, :, None]

  def blocks(self, context: Array, layer_index: Any = None) -> Array:
    """M [.., H, K, H, K] for contexts [.., D] ('blocks' parameterization only)."""
    return self(context, layer_index, return_blocks=True)

  def factors(self, context: Array, layer_index: Any = None) -> Factors:
    """The factors of m for contexts [.., D]."""
    return self(context, layer_index, return_factors=True)

  def metric_shape(self, features: int) -> tuple[int, int, int]:
    """(H, K, L) of the metrics for contexts of `features`."""
    head_features = features // self.num_heads
    return (self.num_heads, self.row_features or head_features,
            self.column_features or head_features)

  def num_factors(self, features: int) -> int:
    """W, the bias included, of `factors` for contexts of `features`."""
    return (self._widths() or (features,))[-1] + 1

  def _widths(self) -> tuple[int, ...]:
    return (2 * self.num_heads,) * 2 if self.widths is None else tuple(self.widths)

  def _preset(self) -> Preset:
    preset = PRESETS[self.preset]
    overrides = {
        name: getattr(self, name)
        for name in Preset._fields
        if getattr(self, name) is not None
    }
    return preset._replace(**overrides)

  def _check(self, features: int, return_blocks: bool) -> None:
    _check_parameterization(self.parameterization)
    if self.preset not in PRESETS:
      raise ValueError(f"preset {self.preset!r} is not one of {tuple(PRESETS)}")
    if self._preset().initializer not in INITIALIZERS:
      raise ValueError(f"initializer {self.initializer!r} is not one of {tuple(INITIALIZERS)}")
    blocks_lib.block_weights(self.block_ablation, self.num_heads)
    if features % self.num_heads:
      raise ValueError(
          f"num_heads {self.num_heads} does not divide the context width {features}; "
          "choose a number of heads that does"
      )
    if self.parameterization == "rowsum" and self.block_ablation != "full":
      raise ValueError(
          f"block_ablation {self.block_ablation!r} needs parameterization 'blocks': "
          "'rowsum' stores only the sum of each block row"
      )
    if self.parameterization == "rowsum" and return_blocks:
      raise ValueError("'rowsum' stores only the sum of each block row; use 'blocks' to see blocks")
    if self.parameterization == "blocks" and (self.row_features or self.column_features):
      raise ValueError("full-width metrics have no blocks; use parameterization 'rowsum'")

  def _hidden(self, hidden: Array, residual: bool, initializers: Initializers) -> Array:
    widths = self._widths()
    num_residual = sum(a == b for a, b in zip(widths, widths[1:]))
    for index, width in enumerate(widths):
      fan_in = hidden.shape[-1]
      layer = nn.Dense(
          width,
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          kernel_init=self._axes(
              initializers.hidden_kernel(fan_in),
              "metric_in" if index == 0 else "metric_hidden",
              None,
          ),
          bias_init=self._axes(initializers.hidden_bias(fan_in), None),
          name=f"hidden_{index}",
      )
      update = nn.gelu(layer(hidden), approximate=False)
      if residual and index > 0 and width == fan_in:
        update = hidden + update / math.sqrt(num_residual)
      hidden = update
    return hidden

  def _output_layer(
      self, fan_in: int, features: int, initializers: Initializers
  ) -> tuple[Array, Array]:
    head_features = features // self.num_heads
    _, rows, columns = self.metric_shape(features)
    if self.parameterization == "blocks":
      shape = (self.num_heads, rows, self.num_heads, columns)
      axes = ("heads", "metric_row", None, None)
      scale = 1.0
    else:
      shape = (self.num_heads, rows, columns)
      axes = ("heads", "metric_row", None)
      scale = math.sqrt(self.num_heads)  # the std of a sum of H independent blocks
    if initializers is INITIALIZERS["variance_preserving"]:
      scale /= math.sqrt(self.num_heads)  # its std is stated for the sum
    kernel_init = self._out_init(scale * initializers.out_std(fan_in, head_features), initializers)
    bias_init = self._out_init(
        scale * initializers.out_bias_std(fan_in, head_features), initializers
    )
    kernel = self.param(
        "out_kernel",
        self._axes(kernel_init, "metric_hidden", *axes),
        (fan_in, *shape),
        self.param_dtype,
    )
    bias = self.param("out_bias", self._axes(bias_init, *axes), shape, self.param_dtype)
    return kernel, bias

  def _out_init(self, std: float, initializers: Initializers) -> Callable:
    if self.zero_output or std == 0.0:
      return nn.initializers.zeros
    return _uniform(math.sqrt(3) * std) if initializers.out_uniform else nn.initializers.normal(std)

  def _axes(self, init: Callable, *names: Optional[str]) -> Callable:
    return nn.with_logical_partitioning(init, names) if self.partitioned else init


class StaticMetric(nn.Module):
  """The ablation "w/o f(x)+share" (Table 4): a trainable M, no generator; starts at the identity.

    m_i = sum_j M_ij,  M [H, K, H, K] ('blocks') or m [H, K, K] itself ('rowsum')
  """

  num_heads: int
  features: int
  parameterization: str = "blocks"
  block_ablation: str = "full"
  partitioned: bool = False
  param_dtype: Any = jnp.float32

  adaptive = False

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "num_heads", "features")
    check_dtypes(self)
    if self.features % self.num_heads:
      raise ValueError(f"num_heads {self.num_heads} does not divide the metric's width"
                       f" {self.features}; choose a number of heads that does")
    _check_parameterization(self.parameterization)

  @nn.compact
  def __call__(self, return_blocks: bool = False) -> Array:
    """m [H, K, K], or M [H, K, H, K] with `return_blocks`."""
    num_heads, head_features = self.num_heads, self.features // self.num_heads
    weights_HH = blocks_lib.block_weights(self.block_ablation, num_heads)
    if self.parameterization == "rowsum":
      if weights_HH is not None or return_blocks:
        raise ValueError("a 'rowsum' static metric has no blocks; use parameterization 'blocks'")
      shape = (num_heads, head_features, head_features)
      axes = ("heads", "metric_row", None)
      init = lambda *_: jnp.broadcast_to(jnp.eye(head_features, dtype=self.param_dtype), shape)
      return self.param("metric_blocks", self._axes(init, axes))
    axes = ("heads", "metric_row", None, None)
    init = lambda *_: blocks_lib.split_blocks(
        jnp.eye(self.features, dtype=self.param_dtype), num_heads
    )
    metric = self.param("metric_blocks", self._axes(init, axes))
    if not return_blocks:
      return blocks_lib.row_sum(metric, weights_HH)
    return metric if weights_HH is None else metric * weights_HH[:, None, :, None]

  def blocks(self) -> Array:
    return self(return_blocks=True)

  def _axes(self, init: Callable, names: Sequence[Optional[str]]) -> Callable:
    return nn.with_logical_partitioning(init, names) if self.partitioned else init


class SharedGenerator(nn.Module):
  """A block's handle on the stack's generator: one set of parameters for all blocks (Section 3.4)."""

  generator: nn.Module

  def setup(self):
    nn.share_scope(self, self.generator)

  def __call__(self, context: Array, layer_index: Any = None) -> Array:
    return self.generator(context, layer_index)

  def factors(self, context: Array, layer_index: Any = None) -> Factors:
    return self.generator.factors(context, layer_index)

  @property
  def factorable(self) -> bool:
    return self.generator.factorable

  def metric_shape(self, features: int) -> tuple[int, int, int]:
    return self.generator.metric_shape(features)

  def num_factors(self, features: int) -> int:
    return self.generator.num_factors(features)


def _check_parameterization(parameterization: str) -> None:
  if parameterization not in PARAMETERIZATIONS:
    raise ValueError(f"parameterization {parameterization!r} is not one of {PARAMETERIZATIONS}")
