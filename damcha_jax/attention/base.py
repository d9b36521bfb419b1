"""What the attentions share around their scores: inputs, masks, projections, cache, dropout."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import cache
from damcha_jax.attention import core
from damcha_jax.attention import masks
from damcha_jax.attention.inputs import Inputs
from damcha_jax.attention.inputs import prepare
from damcha_jax.metric.context import positions_in_segment
from damcha_jax.metric.options import check_dtypes
from damcha_jax.metric.options import check_integers
from damcha_jax.metric.options import check_rate

Array = jax.Array
Compose = Callable[[Array, core.Rows], Array]


class Keys(NamedTuple):
  """What the queries of one call attend to: that call's keys or, while decoding, the cache's."""

  key_BSHK: Array
  value_BSHK: Array
  extra: dict[str, Array]  # further numbers of every key, [B, S, ..] each
  mask_BHTS: Optional[Array]
  is_causal: bool  # hide the future in addition to the mask; never of cached keys


class AttentionBase(nn.Module):
  """Fields and steps that attentions share, as in `nn.MultiHeadDotProductAttention` if named so.

  Call with `(inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, ...)`:
  `inputs_k` defaults to `inputs_q` and `inputs_v` to `inputs_k`. Self-attention is told by its
  absence or by `inputs_k is inputs_q`; two arrays of the same values, as a transformation makes of
  `attention(x, x)`, are cross-attention.

  Masks: `mask` is boolean and broadcastable to [B, H, T, S], True meaning visible. `padding_mask`
  [B, T] marks the real tokens of self-attention; cross-attention takes `query_padding_mask` [B, T]
  and `key_padding_mask` [B, S]. `segment_ids` [B, T] keeps the documents of packed rows apart.
  `bias`, broadcastable like `mask`, is added to the scaled scores; minus infinity there masks.
  Outputs of padded queries are zero, and what stands in tokens that a padding mask marks, even NaN,
  is never used; a query that sees no key gets the output bias alone.

  Attributes beyond Flax's:
    causal: hide the future (in addition to `mask`). None leaves that to `mask`.
    implementation: 'auto', 'plain', 'xla', 'cudnn' or 'pallas' (with `decode`, 'plain' in its
      place); see `core.attend`.
    partitioned: attach logical axis names to the parameters.
  """

  num_heads: int
  dtype: Any = None
  param_dtype: Any = jnp.float32
  qkv_features: Optional[int] = None
  out_features: Optional[int] = None
  broadcast_dropout: bool = True
  dropout_rate: float = 0.0
  deterministic: Optional[bool] = None
  precision: Any = None
  kernel_init: Callable = nn.linear.default_kernel_init
  out_kernel_init: Optional[Callable] = None
  bias_init: Callable = nn.initializers.zeros_init()
  out_bias_init: Optional[Callable] = None
  use_bias: bool = True
  decode: bool = False
  causal: Optional[bool] = None
  implementation: str = "auto"
  partitioned: bool = False

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "num_heads")
    check_integers(self, "qkv_features", "out_features", optional=True)
    check_rate(self, "dropout_rate")
    check_dtypes(self)

  @nn.compact
  def __call__(
      self,
      inputs_q: Array,
      inputs_k: Optional[Array] = None,
      inputs_v: Optional[Array] = None,
      *,
      mask: Optional[Array] = None,
      padding_mask: Optional[Array] = None,
      query_padding_mask: Optional[Array] = None,
      key_padding_mask: Optional[Array] = None,
      segment_ids: Optional[Array] = None,
      bias: Optional[Array] = None,
      deterministic: Optional[bool] = None,
      dropout_rng: Optional[Array] = None,
      sow_weights: bool = False,
  ) -> Array:
    """Attends from `inputs_q` [B, T, D] to `inputs_k`, `inputs_v` [B, S, D], giving [B, T, D].

    Raises:
      ValueError: inputs that do not go together, or that this attention is not defined for.
    """
    inputs = self.prepare(
        inputs_q, inputs_k, inputs_v, mask, padding_mask, query_padding_mask, key_padding_mask,
        segment_ids, bias,
    )
    return self.compute(inputs, deterministic, dropout_rng, sow_weights)

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    """What the attention does with its checked inputs; called within `__call__`."""
    raise NotImplementedError

  def prepare(self, *call: Optional[Array]) -> Inputs:
    """`inputs.prepare` of a call's inputs and masks, in its order."""
    cached = None
    if self._decoding():
      cached = self.get_variable("cache", "cached_key").shape[:2]
    return prepare(*call, decode=self.decode, cached=cached)

  def head_features(self, features: int, num_heads: Optional[int] = None) -> int:
    """K = D / H."""
    num_heads = num_heads or self.num_heads
    if features % num_heads:
      raise ValueError(
          f"num_heads {num_heads} does not divide the attention width {features}; choose a"
          " number of heads that does"
      )
    return features // num_heads

  def positions(self, inputs: Inputs) -> Array:
    """[B, T] or [1, T]: how many real tokens, cached ones too, precede each in its row or segment."""
    batch_size, num_queries = inputs.query_BTD.shape[:2]
    valid_BT = inputs.valid_query_BT
    if valid_BT is None and inputs.segment_ids_BT is None:
      positions_BT = jnp.arange(num_queries)[None]
    else:
      valid_BT = jnp.ones((batch_size, num_queries), bool) if valid_BT is None else valid_BT
      positions_BT = positions_in_segment(valid_BT, inputs.segment_ids_BT)
    if self._decoding():
      positions_BT += self.get_variable("cache", "cached_valid").sum(-1, keepdims=True)
    return positions_BT

  def project(
      self,
      name: str,
      num_heads: Optional[int] = None,
      head_features: Optional[int] = None,
      *,
      use_bias: Optional[bool] = None,
      kernel_init: Optional[Callable] = None,
  ) -> Callable[[Array], Array]:
    """A projection [.., D] -> [.., H, K] with the attention's dtypes.

    Args:
      name: of the projection.
      num_heads: H, by default the attention's.
      head_features: K, by default the attention's width over H.
      use_bias: by default the attention's.
      kernel_init: by default the attention's.
    """
    num_heads = num_heads or self.num_heads

    def dense(x: Array) -> Array:
      width = self.qkv_features or x.shape[-1]
      return nn.DenseGeneral(
          features=(num_heads, head_features or self.head_features(width, num_heads)),
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          kernel_init=self.axes(kernel_init or self.kernel_init, "embed", "heads", "head_dim"),
          bias_init=self.axes(self.bias_init, "heads", "head_dim"),
          use_bias=self.use_bias if use_bias is None else use_bias,
          precision=self.precision,
          name=name,
      )(x)

    return dense

  def project_shared(
      self, name: str, features: int, *, use_bias: bool, kernel_init: Callable
  ) -> nn.Dense:
    """A projection [.., D] -> [.., features] that all heads share."""
    return nn.Dense(
        features,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        kernel_init=self.axes(kernel_init, "embed", "head_dim"),
        bias_init=self.axes(self.bias_init, "head_dim"),
        use_bias=use_bias,
        precision=self.precision,
        name=name,
    )

  def weight(
      self, name: str, init: Callable, shape: tuple[int, ...], *axes: Optional[str]
  ) -> Array:
    """A parameter of the attention itself, in the compute dtype."""
    value = self.param(name, self.axes(init, *axes), shape, self.param_dtype)
    return value if self.dtype is None else value.astype(self.dtype)

  def attend_and_project(
      self,
      query_BTHK: Array,
      key_BSHK: Array,
      value_BSHK: Array,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
      scale: Optional[float] = None,
      **options: Any,
  ) -> Array:
    """`attend` to these keys, through the cache when decoding, then the output projection."""
    keys = self.remember(key_BSHK, value_BSHK, inputs)
    output_BTHK = self.attend(
        query_BTHK, keys, inputs, deterministic, dropout_rng, sow_weights, scale, **options
    )
    return self.project_out(output_BTHK, inputs)

  def remember(
      self,
      key_BSHK: Array,
      value_BSHK: Array,
      inputs: Inputs,
      *,
      hide_future: bool = True,
      **extra: Array,
  ) -> Keys:
    """The keys to attend to, after appending them to the cache when decoding.

    Args:
      key_BSHK, value_BSHK: of this call's tokens; one head, if all heads share it.
      inputs: of this call.
      hide_future: False if the attention itself sees to `causal`.
      **extra: what else must be known of every key, [B, S, ..] each.
    """
    if self.decode:
      if not inputs.is_self:
        raise ValueError("decode=True caches self-attention; cross-attention needs no cache")
      cached = cache.append(self, key_BSHK, value_BSHK, inputs.padded_query_BT, extra)
      if cached is not None:
        visible_BHTS = cached.mask_BHTS if hide_future else cached.valid_BS[:, None, None, :]
        mask_BHTS = masks.combine(inputs.mask_BHTS, visible_BHTS)
        return Keys(cached.key_BSHK, cached.value_BSHK, cached.extra, mask_BHTS, False)
    is_causal = hide_future and bool(self.causal)
    return Keys(key_BSHK, value_BSHK, extra, inputs.mask_BHTS, is_causal)

  def attend(
      self,
      query_BTHK: Array,
      keys: Keys,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
      scale: Optional[float] = None,
      *,
      bias: Optional[Array] = None,
      compose_scores: Optional[Compose] = None,
      compose_weights: Optional[Compose] = None,
      weight_heads: Optional[int] = None,
      query_chunk: Optional[int] = None,
  ) -> Array:
    """softmax(q k^T * scale + bias) v as [B, T, H, K].

    Args:
      query_BTHK, keys, inputs, deterministic, dropout_rng, sow_weights: of this call.
      scale: by default 1 / sqrt(K), K the width of the values.
      bias: in place of the caller's.
      compose_scores, compose_weights: the hooks of `core.attend`, called with the scores or weights
        [B, H, T', S] and with `rows`; rows(x_BT) are the numbers x of the T' queries at hand.
      weight_heads: how many heads of weights there are, if not as many as of queries.
      query_chunk: how many queries to attend from at a time; None: from all.
    """
    if scale is None:
      scale = 1.0 / math.sqrt(keys.value_BSHK.shape[-1])
    bias = inputs.bias_BHTS if bias is None else bias
    mask, is_causal = keys.mask_BHTS, keys.is_causal
    if query_chunk is not None and is_causal:
      queries_and_keys = (query_BTHK.shape[1], keys.key_BSHK.shape[1])
      mask, is_causal = masks.combine(mask, masks.causal(*queries_and_keys)), False
    # A cache masks what it does not hold yet, which that kernel cannot.
    cached_pallas = self.decode and self.implementation == "pallas"
    implementation = "plain" if cached_pallas else self.implementation
    shape = (query_BTHK.shape[0], weight_heads or query_BTHK.shape[2], query_BTHK.shape[1],
             keys.key_BSHK.shape[1])
    dropout = self._dropout(shape, deterministic, dropout_rng)

    def attend_rows(rows: core.Rows) -> Array:
      cut = lambda x, axis=2: None if x is None else rows(x, axis)
      bind = lambda compose: None if compose is None else lambda x_BHTS: compose(x_BHTS, rows)
      return core.attend(
          rows(query_BTHK),
          keys.key_BSHK,
          keys.value_BSHK,
          scale=scale,
          bias=cut(bias),
          mask=cut(mask),
          is_causal=is_causal,
          implementation=implementation,
          dropout=dropout and dropout._replace(kept_BHTS=cut(dropout.kept_BHTS)),
          sow=self._sow if sow_weights else None,
          precision=self.precision,
          compose_scores=bind(compose_scores),
          compose_weights=bind(compose_weights),
      )

    # The weights of all queries are asked for, or a chunk could not hand out its own.
    chunk = None if sow_weights else query_chunk
    return core.in_query_chunks(attend_rows, query_BTHK.shape[1], chunk)

  def project_out(
      self, output_BTHK: Array, inputs: Inputs, kernel_init: Optional[Callable] = None
  ) -> Array:
    """The output projection [B, T, H, K] -> [B, T, D]; `kernel_init` where no field says."""
    output_BTD = nn.DenseGeneral(
        features=self.out_features or inputs.query_BTD.shape[-1],
        axis=(-2, -1),
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        kernel_init=self.axes(
            self.out_kernel_init or self.kernel_init or kernel_init, "heads", "head_dim", "embed"
        ),
        bias_init=self.axes(self.out_bias_init or self.bias_init, "embed"),
        use_bias=self.use_bias,
        precision=self.precision,
        name="out",
    )(output_BTHK)
    return self.without_padded_queries(output_BTD, inputs)

  def without_padded_queries(self, output_BTD: Array, inputs: Inputs) -> Array:
    if inputs.padded_query_BT is None:
      return output_BTD
    return jnp.where(inputs.padded_query_BT.astype(bool)[..., None], output_BTD, 0)

  def axes(self, init: Callable, *names: str) -> Callable:
    return nn.with_logical_partitioning(init, names) if self.partitioned else init

  def _decoding(self) -> bool:
    return self.decode and self.has_variable("cache", "cached_key")

  def _sow(self, name: str, x_BHTS: Array) -> None:
    self.sow("intermediates", name, x_BHTS)

  def _dropout(
      self, shape: tuple[int, ...], deterministic: Optional[bool], dropout_rng: Optional[Array]
  ) -> Optional[core.Dropout]:
    """The dropout of weights of `shape` [B, H, T, S], None where there is none."""
    if self.dropout_rate == 0.0:
      return None
    if nn.merge_param("deterministic", self.deterministic, deterministic):
      return None
    rng = self.make_rng("dropout") if dropout_rng is None else dropout_rng
    keep = 1.0 - self.dropout_rate
    return core.Dropout(jax.random.bernoulli(rng, keep, self._dropout_shape(shape)), keep)

  def _dropout_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    # One pattern for all rows and heads, as in Flax.
    return (1, 1, *shape[2:]) if self.broadcast_dropout else shape
