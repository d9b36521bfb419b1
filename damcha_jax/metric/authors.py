"""The generator variants of the DAMCHA authors' code that the paper itself does not describe.

They are needed to load the authors' checkpoints and to repeat their ablations. M is the cross-head
metric [H, K, H, K], block row i and block column j, and `raw` what the MLP f_theta returns for it.

    off_diagonal   block (i, j), i != j
    'mlp'          raw_ij, as in the paper
    'linear_comb'  sum_k alpha_ijk raw_kk
    'bayesian'     the same, alpha ~ N(mean, exp(logvar)) where an 'alpha' random stream is given
                   (in training), else its mean
    'separate_B'   B_ij, whatever the context

With `compact_rank` r the MLP returns two factors U, V [D, r] and M = U V^T / sqrt(r); with
`free_metric` M = raw; both overrule `off_diagonal`. The bias (P * s_l) Q^T of layer l, of rank
`layer_bias_rank` in a basis common to the layers, comes next, and the scales of the diagonal and
the off-diagonal blocks last.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.metric import blocks as blocks_lib
from damcha_jax.metric.generator import INITIALIZERS
from damcha_jax.metric.options import check_dtypes
from damcha_jax.metric.options import check_finite
from damcha_jax.metric.options import check_integers
from damcha_jax.metric.options import check_rate
from damcha_jax.metric.options import check_widths

Array = jax.Array

OFF_DIAGONAL_MODES = ("mlp", "linear_comb", "bayesian", "separate_B")


class AuthorsMetricGenerator(nn.Module):
  """f_theta with the authors' options; a `MetricGenerator` in all else.

  The head metrics m_i = sum_j s_ij M_ij are formed without M, unless `fuse_rowsum` is off: every
  part of M is linear in what the last layer returns, so the sum over j moves to the left of it.

  Attributes:
    num_heads: H.
    widths: hidden widths of f_theta; () for a single Linear layer.
    off_diagonal, compact_rank, free_metric, layer_bias_rank: see the module's docstring; a rank of
      0 turns that part off.
    alpha_std: initial standard deviation of alpha.
    num_layers: number of layers that the layer bias tells apart.
    diagonal_scale, off_diagonal_scale: factors on the blocks of M, layer bias included.
    block_ablation: 'diagonal' or 'off_diagonal' keeps these blocks alone, at scale 1 (the authors'
      block-only metrics); 'full' keeps all, scaled.
    layer_index: the layer whose bias is added where a call names none.
    dropout_rate: dropout after every hidden layer, where a 'dropout' random stream is given.
    fuse_rowsum: False forms M before its sum, which is what Table 2's operation counts assume.
    parameterization: 'blocks'; 'rowsum' is an error, since these modes tell a row's blocks apart.
    initializer: initial values of the MLP, a key of `metric.generator.INITIALIZERS`.
    partitioned: attach logical axis names to the parameters.
  """

  num_heads: int
  widths: tuple[int, ...]
  off_diagonal: str = "mlp"
  alpha_std: float = 0.1
  compact_rank: int = 0
  free_metric: bool = False
  layer_bias_rank: int = 0
  num_layers: int = 1
  diagonal_scale: float = 1.0
  off_diagonal_scale: float = 1.0
  block_ablation: str = "full"
  layer_index: int = 0
  dropout_rate: float = 0.0
  fuse_rowsum: bool = True
  parameterization: str = "blocks"
  initializer: str = "torch"
  partitioned: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32

  adaptive = True  # makes a metric of its context, unlike StaticMetric
  factorable = False

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "num_heads", "num_layers")
    check_integers(self, "compact_rank", "layer_bias_rank", least=0)  # 0: off
    check_finite(self, "diagonal_scale", "off_diagonal_scale")
    check_finite(self, "alpha_std", least=0)
    check_rate(self, "dropout_rate")
    check_widths(self.widths)
    check_dtypes(self)

  @nn.compact
  def __call__(self, context: Array, layer_index: Any = None, return_blocks: bool = False) -> Array:
    """Maps contexts [.., D] to head metrics m [.., H, K, K] in float32 (float64 if `dtype` is).

    Args:
      context: [.., D].
      layer_index: the layer whose bias is added; a traced index is clamped to the layers there are.
      return_blocks: return M [.., H, K, H, K] instead.

    Raises:
      ValueError: an option is unknown, or options, widths or layers do not go together.
    """
    features = context.shape[-1]
    self._check(features)
    forms_blocks = return_blocks or not self.fuse_rowsum
    scale_HH = self._scales()
    hidden = self._hidden(context.astype(self._compute_dtype()))
    # Declared before use, so that every mode owns the parameters that its checkpoints hold.
    alpha_HHH = self._alpha()
    constant = self._constant(features, layer_index)
    if self.compact_rank:
      metric = self._compact(hidden, features, scale_HH, forms_blocks)
    elif self.free_metric or self.off_diagonal == "mlp":
      metric = self._full(hidden, features, scale_HH, forms_blocks)
    else:
      metric = self._mixed(hidden, features, alpha_HHH, scale_HH, forms_blocks)
    if constant is not None and forms_blocks:
      metric = metric + constant * scale_HH[:, None, :, None]
    elif constant is not None:
      metric = metric + blocks_lib.row_sum(constant, scale_HH)
    return blocks_lib.row_sum(metric) if forms_blocks and not return_blocks else metric

  def blocks(self, context: Array, layer_index: Any = None) -> Array:
    """M [.., H, K, H, K] for contexts [.., D], scaled and ablated."""
    return self(context, layer_index, return_blocks=True)

  def kl_divergence(self) -> Array:
    """KL(q(alpha) || N(0, 1)) = 1/2 sum_{i != j, k} (sigma^2 + mu^2 - 1 - log sigma^2), in nats.

    Zero unless `off_diagonal` is 'bayesian'. The authors add 1e-4 times this to the training loss.
    """
    if self.off_diagonal != "bayesian":
      return jnp.zeros(())
    read = lambda name: self._accumulated(nn.unbox(self.get_variable("params", name)))
    mean_HHH, logvar_HHH = read("alpha"), read("alpha_logvar")
    terms_HHH = jnp.exp(logvar_HHH) + mean_HHH**2 - 1.0 - logvar_HHH
    return 0.5 * jnp.sum(terms_HHH * (1.0 - self._identity())[..., None])

  def _check(self, features: int) -> None:
    if self.parameterization != "blocks":
      raise ValueError(
          f"parameterization {self.parameterization!r} cannot hold the authors' modes, which tell"
          " the blocks of a row apart; use 'blocks'"
      )
    if self.off_diagonal not in OFF_DIAGONAL_MODES:
      raise ValueError(f"off_diagonal {self.off_diagonal!r} is not one of {OFF_DIAGONAL_MODES}")
    if self.initializer not in INITIALIZERS:
      raise ValueError(f"initializer {self.initializer!r} is not one of {tuple(INITIALIZERS)}")
    if features % self.num_heads:
      raise ValueError(
          f"num_heads {self.num_heads} does not divide the context width {features}; "
          "choose a number of heads that does"
      )

  def _scales(self) -> Array:
    weights_HH = blocks_lib.block_weights(self.block_ablation, self.num_heads)
    if weights_HH is not None:
      return self._accumulated(weights_HH)
    diagonal_HH = self._identity()
    return diagonal_HH * self.diagonal_scale + (1.0 - diagonal_HH) * self.off_diagonal_scale

  def _hidden(self, hidden: Array) -> Array:
    initializers = INITIALIZERS[self.initializer]
    for index, width in enumerate(self.widths):
      fan_in = hidden.shape[-1]
      rows = "metric_in" if index == 0 else "metric_hidden"
      hidden = nn.Dense(
          width,
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          kernel_init=self._axes(initializers.hidden_kernel(fan_in), rows, None),
          bias_init=self._axes(initializers.hidden_bias(fan_in), None),
          name=f"hidden_{index}",
      )(hidden)
      hidden = nn.gelu(hidden, approximate=False)
      hidden = nn.Dropout(self.dropout_rate)(hidden, deterministic=not self.has_rng("dropout"))
    return hidden

  def _output_layer(self, fan_in: int, head_features: int) -> tuple[Array, Array]:
    if self.compact_rank:
      shape = (2, self.num_heads, head_features, self.compact_rank)
      axes = (None, "heads", "metric_row", None)
    else:
      shape = (self.num_heads, head_features) * 2
      axes = ("heads", "metric_row", None, None)
    initializers = INITIALIZERS[self.initializer]

    def init(std: float) -> Callable:
      if not initializers.out_uniform:
        return nn.initializers.normal(std)
      bound = math.sqrt(3) * std
      return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)

    kernel_init = init(initializers.out_std(fan_in, head_features))
    bias_init = init(initializers.out_bias_std(fan_in, head_features))
    kernel = self.param(
        "out_kernel", self._axes(kernel_init, "metric_hidden", *axes), (fan_in, *shape),
        self.param_dtype,
    )
    bias = self.param("out_bias", self._axes(bias_init, *axes), shape, self.param_dtype)
    return kernel, bias

  def _project(self, hidden: Array, kernel: Array, bias: Array) -> Array:
    kernel, bias = kernel.astype(self._compute_dtype()), self._accumulated(bias)
    return jnp.tensordot(hidden, kernel, 1, preferred_element_type=bias.dtype) + bias

  def _compute_dtype(self) -> Any:
    return jnp.dtype(self.dtype or jnp.float32)

  def _accumulated(self, array: Array) -> Array:
    """In the dtype of sums: the compute dtype, but float32 at least."""
    return array.astype(jnp.promote_types(self._compute_dtype(), jnp.float32))

  def _identity(self) -> Array:
    return self._accumulated(jnp.eye(self.num_heads))

  def _full(self, hidden: Array, features: int, scale_HH: Array, return_blocks: bool) -> Array:
    kernel, bias = self._output_layer(hidden.shape[-1], features // self.num_heads)
    if return_blocks:
      return self._project(hidden, kernel, bias) * scale_HH[:, None, :, None]
    kernel, bias = (blocks_lib.row_sum(part, scale_HH) for part in (kernel, bias))
    return self._project(hidden, kernel, bias)

  def _compact(self, hidden: Array, features: int, scale_HH: Array, return_blocks: bool) -> Array:
    kernel, bias = self._output_layer(hidden.shape[-1], features // self.num_heads)
    factors = self._project(hidden, kernel, bias) / self.compact_rank**0.25
    rows, columns = factors[..., 0, :, :, :], factors[..., 1, :, :, :]
    if return_blocks:
      return jnp.einsum("...ikr,...jlr,ij->...ikjl", rows, columns, scale_HH)
    summed = jnp.einsum("...jlr,ij->...ilr", columns, scale_HH)
    return jnp.einsum("...ikr,...ilr->...ikl", rows, summed)

  def _mixed(
      self, hidden: Array, features: int, alpha_HHH: Optional[Array], scale_HH: Array,
      return_blocks: bool,
  ) -> Array:
    """Blocks that are mixtures of the diagonal ones, M_ij = sum_k w_ijk raw_kk."""
    kernel, bias = self._output_layer(hidden.shape[-1], features // self.num_heads)
    diagonal = self._project(hidden, *(_diagonal_blocks(part) for part in (kernel, bias)))
    identity_HH = self._identity()
    weights_HHH = identity_HH[:, :, None] * identity_HH[:, None, :]
    if alpha_HHH is not None:
      weights_HHH += (1.0 - identity_HH)[:, :, None] * alpha_HHH
    weights_HHH *= scale_HH[:, :, None]
    if return_blocks:
      return jnp.einsum("ijc,...ckl->...ikjl", weights_HHH, diagonal)
    return jnp.einsum("ic,...ckl->...ikl", weights_HHH.sum(1), diagonal)

  def _alpha_params(self) -> tuple[Array, Optional[Array]]:
    shape = (self.num_heads,) * 3
    axes = ("heads", None, None)

    def param(name: str, init: Callable) -> Array:
      return self._accumulated(self.param(name, self._axes(init, *axes), shape, self.param_dtype))

    mean_HHH = param("alpha", nn.initializers.normal(self.alpha_std))
    if self.off_diagonal != "bayesian":
      return mean_HHH, None
    return mean_HHH, param("alpha_logvar", nn.initializers.constant(-4.0))

  def _alpha(self) -> Optional[Array]:
    if self.off_diagonal not in ("linear_comb", "bayesian"):
      return None
    mean_HHH, logvar_HHH = self._alpha_params()
    if logvar_HHH is None or not self.has_rng("alpha"):
      return mean_HHH
    noise_HHH = jax.random.normal(self.make_rng("alpha"), mean_HHH.shape, mean_HHH.dtype)
    return mean_HHH + jnp.exp(0.5 * logvar_HHH) * noise_HHH

  def _constant(self, features: int, layer_index: Any) -> Optional[Array]:
    """What M has whatever the context: B's off-diagonal blocks and the layer bias."""
    parts = []
    if self.off_diagonal == "separate_B":
      blocks = self._separate_blocks(features)
      if not (self.compact_rank or self.free_metric):
        parts.append(blocks)
    if self.layer_bias_rank:
      parts.append(self._layer_bias(features, layer_index))
    return sum(parts) if parts else None

  def _separate_blocks(self, features: int) -> Array:
    shape = (self.num_heads, features // self.num_heads) * 2
    axes = ("heads", "metric_row", None, None)
    init = self._axes(nn.initializers.normal(0.01), *axes)
    blocks = self._accumulated(self.param("separate_blocks", init, shape, self.param_dtype))
    return blocks * (1.0 - self._identity())[:, None, :, None]

  def _layer_bias(self, features: int, layer_index: Any) -> Array:
    def basis(name: str) -> Array:
      init = self._axes(nn.initializers.orthogonal(0.1), None, None)
      return self.param(name, init, (features, self.layer_bias_rank), self.param_dtype)

    def scales_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
      growth_N = 0.1 * (1.0 + 0.2 * jnp.arange(shape[0], dtype=dtype))
      return growth_N[:, None] * jax.random.normal(key, shape, dtype)

    left, right = basis("bias_left"), basis("bias_right")
    scales = self.param(
        "bias_scales",
        self._axes(scales_init, None, None),
        (self.num_layers, self.layer_bias_rank),
        self.param_dtype,
    )
    index = self._checked_index(self.layer_index if layer_index is None else layer_index)
    left, scale, right = (self._accumulated(part) for part in (left, scales[index], right))
    return blocks_lib.split_blocks((left * scale) @ right.T, self.num_heads)

  def _checked_index(self, index: Any) -> Any:
    if isinstance(index, jax.core.Tracer):
      return jnp.clip(index, 0, self.num_layers - 1)
    index = operator.index(index)
    if not 0 <= index < self.num_layers:
      raise ValueError(
          f"layer_index {index} is outside the {self.num_layers} layers of the layer bias; set"
          " num_layers to the depth of the stack"
      )
    return index

  def _axes(self, init: Callable, *names: Optional[str]) -> Callable:
    return nn.with_logical_partitioning(init, names) if self.partitioned else init


def _diagonal_blocks(blocks: Array) -> Array:
  """[.., H, K, H, K] -> [.., H, K, K], block (i, i) of each row."""
  return jnp.einsum("...ikil->...ikl", blocks)
