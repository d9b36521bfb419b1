"""Scores, softmax and values: the part that every attention here shares.

    y_t = sum_s softmax_s(q_t . k_s * scale) v_s

Softmax runs in float32 whatever the compute dtype; a query that sees no key gets zeros. Attentions
that mix their heads do so through two hooks, on the scores before masking and on the weights after
the softmax; either may change the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import contextvars
import functools
from typing import Any, Callable, NamedTuple, Optional

import jax
import jax.numpy as jnp

from damcha_jax.attention import masks

Array = jax.Array

IMPLEMENTATIONS = ("auto", "plain", "xla", "cudnn", "pallas")
Compose = Callable[[Array], Array]  # [B, H, T, S] -> [B, H', T, S]
Sow = Callable[[str, Array], Any]
Rows = Callable[..., Array]  # rows(x, axis=1): the entries of x that belong to the queries at hand

# Causal attention goes by blocks of queries, each without the keys after it: N blocks make
# (N + 1) / 2N of all scores, and fewer at a time. More blocks gain little and compile for longer.
_MOST_BLOCKS = 4
_LEAST_BLOCK = 64
_whole = contextvars.ContextVar("whole", default=False)


@contextlib.contextmanager
def whole_scores() -> Iterator[None]:
  """Where operations are counted: attention makes all scores, as is the convention, and shows them.

  In a fused kernel nobody sees them.
  """
  token = _whole.set(True)
  try:
    yield
  finally:
    _whole.reset(token)


class Dropout(NamedTuple):
  """Which weights stay, broadcastable to [B, H, T, S], and the probability with which they do."""

  kept_BHTS: Array
  keep: float

  def __call__(self, weights_BHTS: Array) -> Array:
    dropped_BHTS = jnp.where(self.kept_BHTS, weights_BHTS / self.keep, 0)
    return dropped_BHTS.astype(weights_BHTS.dtype)


def attention_weights(
    query_BTHK: Array,
    key_BSHK: Array,
    *,
    scale: float,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    is_causal: bool = False,
    first_query: int = 0,
    precision: Any = None,
    compose_scores: Optional[Compose] = None,
    sow: Optional[Sow] = None,
) -> Array:
  """softmax(compose(q k^T * scale) + bias) as [B, H, T, S] in float32, zero where masked.

  With `is_causal`, query t sees keys 0 .. first_query + t.
  """
  equation, key = "bthk,bshk->bhts", key_BSHK
  if key_BSHK.shape[2] == 1:  # one key head serves all queries
    equation, key = "bthk,bsk->bhts", key_BSHK[:, :, 0]
  scores_BHTS = jnp.einsum(
      equation,
      query_BTHK,
      key,
      precision=precision,
      preferred_element_type=jnp.promote_types(query_BTHK.dtype, jnp.float32),
  )
  scores_BHTS = scores_BHTS * scale
  if compose_scores is not None:
    scores_BHTS = compose_scores(scores_BHTS)
  for name, value in (("bias", bias), ("mask", mask)):  # a bias may mask
    if value is not None and value.shape[1] not in (1, scores_BHTS.shape[1]):
      raise ValueError(f"{name} is for {value.shape[1]} heads, but {scores_BHTS.shape[1]} attend;"
                       " give it one for all, or one for each")
  if bias is not None:
    scores_BHTS = scores_BHTS + bias.astype(scores_BHTS.dtype)
  if sow is not None:
    sow("attention_scores", scores_BHTS)
  # Causality alone leaves every query the first key; a bias might outweigh it.
  may_be_blind = mask is not None or bias is not None
  seen = visible(mask, is_causal, scores_BHTS.shape, first_query)
  return masked_softmax(scores_BHTS, seen, may_be_blind)


def visible(mask: Optional[Array], is_causal: bool, shape: tuple[int, ...],
            first_query: int = 0) -> Optional[Array]:
  causal = masks.causal(shape[-2], shape[-1], first_query) if is_causal else None
  return masks.combine(mask, causal)


def masked_softmax(
    scores_BHTS: Array, mask: Optional[Array], may_be_blind: bool = True
) -> Array:
  """Softmax over keys in float32; masked keys, and all keys of a blind query, weigh zero.

  Where no query is blind, the softmax itself gives masked keys exactly zero: one pass less.
  """
  scores_BHTS = scores_BHTS.astype(jnp.promote_types(scores_BHTS.dtype, jnp.float32))
  if mask is None:
    return jax.nn.softmax(scores_BHTS)
  scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(scores_BHTS.dtype).min)
  weights_BHTS = jax.nn.softmax(scores_BHTS)
  return jnp.where(mask, weights_BHTS, 0.0) if may_be_blind else weights_BHTS


def attend(
    query_BTHK: Array,
    key_BSHK: Array,
    value_BSHK: Array,
    *,
    scale: float,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    is_causal: bool = False,
    implementation: str = "auto",
    dropout: Optional[Dropout] = None,
    sow: Optional[Sow] = None,
    precision: Any = None,
    compose_scores: Optional[Compose] = None,
    compose_weights: Optional[Compose] = None,
) -> Array:
  """Scaled dot-product attention [B, T, H, K] by the implementation that is asked for.

  Args:
    query_BTHK, key_BSHK, value_BSHK: value may have another width than key, and keys or values
      another number of heads where a hook makes it fit ('plain' only). A single head of keys or of
      values serves all query heads (with a fused kernel: of both).
    scale: factor on the dot products.
    bias: finite, added to the scaled (and composed) dot products, broadcastable to [B, H, T, S].
    mask: boolean, broadcastable to [B, H, T, S]; True means visible.
    is_causal: hide keys after the query's position as well.
    implementation: 'plain' (einsum; with `is_causal` and no hook, blocks of queries leave out most
      hidden scores), 'xla' or 'cudnn' (`jax.nn.dot_product_attention`), 'pallas' (JAX's flash
      attention for TPUs: self-attention without bias or mask, T a multiple of 128), or 'auto':
      cuDNN on a GPU where it applies, else plain. All agree within rounding.
    dropout: applied to the (composed) weights ('plain' only).
    precision: of the products ('plain' only; fused kernels have their own).
    sow: receives, by name, `attention_scores` (composed, not masked), `attention_softmax` if there
      is a hook on the weights, and `attention_weights` (composed) ('plain' only).
    compose_scores: mixes the heads of the scaled dot products before bias and mask ('plain' only).
    compose_weights: mixes the heads of the weights after the softmax ('plain' only).

  Raises:
    ValueError: unknown implementation, or a fused one asked for what only 'plain' can do.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
  hooks = (dropout, sow, compose_scores, compose_weights)
  needs_plain = any(hook is not None for hook in hooks)
  needs_plain |= key_BSHK.shape[2:] != value_BSHK.shape[2:]
  if implementation == "auto":
    fused = not needs_plain and _cudnn_applies(query_BTHK)
    implementation = "cudnn" if fused else "plain"
  if _whole.get():
    implementation = "plain"
  if implementation == "plain":
    plain = functools.partial(_attend_plain, scale=scale, is_causal=is_causal, precision=precision)
    if is_causal and all(hook is None for hook in (sow, compose_scores, compose_weights)):
      return _in_causal_blocks(plain, query_BTHK, key_BSHK, value_BSHK, bias, mask, dropout)
    return plain(query_BTHK, key_BSHK, value_BSHK, bias=bias, mask=mask, dropout=dropout, sow=sow,
                 compose_scores=compose_scores, compose_weights=compose_weights)
  if needs_plain:
    raise ValueError(
        f"implementation {implementation!r} can neither drop, return nor mix weights, nor use"
        " values of another width or number of heads than keys; use implementation='plain' (or"
        " 'auto')"
    )
  if implementation == "pallas":
    if bias is not None or mask is not None:
      raise ValueError("implementation 'pallas' takes no bias and no mask, nor padding or segments;"
                       " use implementation='plain' (or 'auto')")
    from damcha_jax.attention import flash  # half a second, which only those with TPUs need spend
    return flash.attend(query_BTHK, key_BSHK, value_BSHK, scale=scale, is_causal=is_causal)
  output_BTHK = jax.nn.dot_product_attention(
      query_BTHK,
      key_BSHK,
      value_BSHK,
      bias=None if bias is None else bias.astype(query_BTHK.dtype),
      mask=mask,
      scale=scale,
      is_causal=is_causal,
      implementation=implementation,
  )
  if mask is None:
    return output_BTHK
  num_queries, num_keys = query_BTHK.shape[1], key_BSHK.shape[1]
  sees_BHT = visible(mask, is_causal, (num_queries, num_keys)).any(-1)
  return jnp.where(jnp.swapaxes(sees_BHT, -1, -2)[..., None], output_BTHK, 0)


def _attend_plain(
    query_BTHK: Array,
    key_BSHK: Array,
    value_BSHK: Array,
    *,
    scale: float,
    bias: Optional[Array],
    mask: Optional[Array],
    is_causal: bool,
    dropout: Optional[Dropout],
    precision: Any,
    first_query: int = 0,
    sow: Optional[Sow] = None,
    compose_scores: Optional[Compose] = None,
    compose_weights: Optional[Compose] = None,
) -> Array:
  weights_BHTS = attention_weights(
      query_BTHK,
      key_BSHK,
      scale=scale,
      bias=bias,
      mask=mask,
      is_causal=is_causal,
      first_query=first_query,
      precision=precision,
      compose_scores=compose_scores,
      sow=sow,
  )
  if compose_weights is not None:
    if sow is not None:
      sow("attention_softmax", weights_BHTS)
    weights_BHTS = compose_weights(weights_BHTS)
  if sow is not None:
    sow("attention_weights", weights_BHTS)
  weights_BHTS = weights_BHTS.astype(value_BSHK.dtype)
  if dropout is not None:
    weights_BHTS = dropout(weights_BHTS)
  if value_BSHK.shape[2] == 1:
    value_BSK = value_BSHK[:, :, 0]
    return jnp.einsum("bhts,bsk->bthk", weights_BHTS, value_BSK, precision=precision)
  return jnp.einsum("bhts,bshk->bthk", weights_BHTS, value_BSHK, precision=precision)


def _in_causal_blocks(
    attend_block: Callable[..., Array],
    query_BTHK: Array,
    key_BSHK: Array,
    value_BSHK: Array,
    bias: Optional[Array],
    mask: Optional[Array],
    dropout: Optional[Dropout],
) -> Array:
  """Each block of queries with the keys up to its end; those after it they do not see."""
  num_queries = query_BTHK.shape[1]
  num_blocks = (1 if _whole.get() or is_symbolic(num_queries)
                else min(_MOST_BLOCKS, num_queries // _LEAST_BLOCK))
  if num_blocks <= 1:
    return attend_block(query_BTHK, key_BSHK, value_BSHK, bias=bias, mask=mask, dropout=dropout)
  size = -(-num_queries // num_blocks)
  starts = range(0, num_queries, size)
  # The gradient of a split, unlike that of slices, is in one piece before anything uses it.
  queries = jnp.split(query_BTHK, list(starts[1:]), axis=1)
  outputs = []
  for start, block_BTHK in zip(starts, queries, strict=True):
    stop = min(start + size, num_queries)
    cut = lambda x: None if x is None else _part(_part(x, 2, start, stop), 3, 0, stop)
    outputs.append(attend_block(
        block_BTHK, key_BSHK[:, :stop], value_BSHK[:, :stop], first_query=start,
        bias=cut(bias), mask=cut(mask),
        dropout=dropout and dropout._replace(kept_BHTS=cut(dropout.kept_BHTS))))
  return jnp.concatenate(outputs, axis=1)


def _part(x: Array, axis: int, start: int, stop: int) -> Array:
  """Entries along `axis`, unless there is one for all."""
  if x.shape[axis] == 1:
    return x
  return jax.lax.slice_in_dim(x, start, min(stop, x.shape[axis]), axis=axis)


def in_query_chunks(
    attend_rows: Callable[[Rows], Array], num_queries: int, chunk_size: Optional[int]
) -> Array:
  """`attend_rows(rows)` [B, T', ..] for every `chunk_size` queries, concatenated to [B, T, ..].

  One chunk's scores are in memory at a time, in the backward pass too, which makes them again.
  """
  if chunk_size is None or is_symbolic(num_queries) or num_queries <= chunk_size:
    return attend_rows(lambda x, axis=1: x)

  @functools.partial(jax.checkpoint, static_argnums=1)
  def chunk(start: Array, size: int) -> Array:
    def rows(x: Array, axis: int = 1) -> Array:
      if x.shape[axis] == 1:  # the same for all queries
        return x
      return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    return attend_rows(rows)

  num_chunks, rest = divmod(num_queries, chunk_size)
  starts_N = jnp.arange(num_chunks) * chunk_size
  output = jnp.moveaxis(jax.lax.map(lambda start: chunk(start, chunk_size), starts_N), 0, 1)
  output = output.reshape(output.shape[0], num_chunks * chunk_size, *output.shape[3:])
  if not rest:
    return output
  return jnp.concatenate([output, chunk(num_chunks * chunk_size, rest)], axis=1)


def is_symbolic(*sizes: Any) -> bool:
  """Whether one is not known yet, as `jax.export` may have it."""
  return not all(isinstance(size, int) for size in sizes)


def _cudnn_applies(query_BTHK: Array) -> bool:
  half = query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
  return half and query_BTHK.shape[-1] <= 128 and jax.default_backend() == "gpu"
