"""The inputs and masks of an attention's call, checked and merged."""

from __future__ import annotations

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from damcha_jax.attention import masks

Array = jax.Array


class Inputs(NamedTuple):
  """Checked inputs of one call; masks are None where everything is visible."""

  query_BTD: Array
  key_BSD: Array
  value_BSD: Array
  mask_BHTS: Optional[Array]  # the caller's mask, padding and segments; not causality
  bias_BHTS: Optional[Array]  # added to the scores; finite
  valid_query_BT: Optional[Array]  # which tokens count for a context
  valid_key_BS: Optional[Array]
  padded_query_BT: Optional[Array]  # explicit only: outputs there are zero
  segment_ids_BT: Optional[Array]
  is_self: bool


def prepare(
    inputs_q: Array,
    inputs_k: Optional[Array],
    inputs_v: Optional[Array],
    mask: Optional[Array],
    padding_mask: Optional[Array],
    query_padding_mask: Optional[Array],
    key_padding_mask: Optional[Array],
    segment_ids: Optional[Array],
    bias: Optional[Array],
    *,
    decode: bool,
    cached: Optional[tuple[int, int]],
) -> Inputs:
  """Fills in defaults, checks shapes and merges the masks of an attention's call.

  Args:
    inputs_q, inputs_k, inputs_v, mask, padding_mask, query_padding_mask, key_padding_mask,
      segment_ids, bias: as in AttentionBase.
    decode: whether keys are cached.
    cached: batch size and length of the cache that is filled in this call; None where none is.

  Raises:
    ValueError: shapes or masks that do not go together.
  """
  decoding = cached is not None
  is_self = inputs_k is None or inputs_k is inputs_q
  if inputs_k is None:
    if inputs_v is not None:
      raise ValueError("inputs_v needs inputs_k: pass both, or neither for self-attention")
    inputs_k = inputs_q
  if inputs_v is None:
    inputs_v = inputs_k
  for name, value in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
    if value.ndim != 3:
      raise ValueError(f"{name} must be [batch, length, features], not shape {value.shape}")
  inputs_q, inputs_k, inputs_v = map(_as_floats, (inputs_q, inputs_k, inputs_v))
  batch_size, num_queries = inputs_q.shape[:2]
  num_keys = inputs_k.shape[1]
  for name, value in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
    if value.shape[:2] != (batch_size, num_keys):
      raise ValueError(
          f"{name} must be [{batch_size}, {num_keys}, features] to go with inputs_q and inputs_k,"
          f" not shape {value.shape}"
      )
  if decoding and cached[0] != batch_size:
    raise ValueError(f"the cache was initialised for batch size {cached[0]}, not {batch_size}")
  if padding_mask is not None:
    if not is_self:
      raise ValueError(
          "padding_mask is for self-attention; cross-attention takes query_padding_mask and"
          " key_padding_mask"
      )
    if query_padding_mask is not None or key_padding_mask is not None:
      raise ValueError("pass padding_mask, or query_padding_mask and key_padding_mask, not both")
    query_padding_mask = key_padding_mask = padding_mask
  elif is_self and (query_padding_mask is not None or key_padding_mask is not None):
    raise ValueError("self-attention takes padding_mask for queries and keys alike")
  if segment_ids is not None and (not is_self or decode):
    raise ValueError("segment_ids are for self-attention without decode")
  _check_mask("query_padding_mask", query_padding_mask, (batch_size, num_queries))
  _check_mask("key_padding_mask", key_padding_mask, (batch_size, num_keys))
  _check_mask("segment_ids", segment_ids, (batch_size, num_queries))
  shape = (batch_size, num_queries, cached[1] if decoding else num_keys)
  mask, bias = _four_axes("mask", mask, shape), _four_axes("bias", bias, shape)
  if bias is not None:  # a row of minus infinities would make the softmax NaN
    mask = masks.combine(mask, ~jnp.isneginf(bias))
    bias = jnp.where(jnp.isneginf(bias), 0.0, bias)
  inputs_q = _without_padding(inputs_q, query_padding_mask)
  inputs_k = _without_padding(inputs_k, key_padding_mask)
  inputs_v = _without_padding(inputs_v, key_padding_mask)
  valid_query_BT = query_padding_mask
  if valid_query_BT is None and mask is not None and not decoding:
    if is_self:
      valid_query_BT = masks.tokens_seen(mask, batch_size, num_queries)
    else:
      valid_query_BT = masks.queries_seeing(mask, batch_size, num_queries)
  keys_mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
  segments_mask = None if segment_ids is None else masks.same_segment(segment_ids)
  return Inputs(
      inputs_q,
      inputs_k,
      inputs_v,
      # While decoding, keys are the cache's, whose padding the cache itself remembers.
      mask if decoding else masks.combine(mask, keys_mask, segments_mask),
      bias,
      valid_query_BT,
      key_padding_mask,
      query_padding_mask,
      segment_ids,
      is_self,
  )


def _four_axes(
    name: str, mask: Optional[Array], shape: tuple[int, int, int]
) -> Optional[Array]:
  """A mask or bias [T, S] or [B, H, T, S] with its missing axes; `shape` is [B, T, S]."""
  if mask is None:
    return None
  mask = jnp.asarray(mask)
  if mask.ndim == 2:
    mask = mask[None, None]
  if mask.ndim != 4:
    raise ValueError(
        f"{name} must be broadcastable to [batch, heads, queries, keys], not shape {mask.shape};"
        f" add a heads axis with {name}[:, None]"
    )
  fits = [size in (1, wanted) for size, wanted in zip((mask.shape[0], *mask.shape[2:]), shape)]
  if not all(fits):
    batch_size, num_queries, num_keys = shape
    raise ValueError(
        f"{name} must be broadcastable to [{batch_size}, heads, {num_queries}, {num_keys}], not"
        f" shape {mask.shape}"
    )
  return mask


def _as_floats(x_BTD: Array) -> Array:
  """Integers as the numbers they are: nothing here may compute in their dtype."""
  return x_BTD if jnp.issubdtype(x_BTD.dtype, jnp.inexact) else x_BTD.astype(jnp.float32)


def _without_padding(x_BTD: Array, valid_BT: Optional[Array]) -> Array:
  """Zeros for what is not finite in padded tokens: a weight of 0 would not hide it."""
  if valid_BT is None:
    return x_BTD
  return jnp.where(valid_BT.astype(bool)[..., None] | jnp.isfinite(x_BTD), x_BTD, 0)


def _check_mask(name: str, mask: Optional[Array], shape: tuple[int, int]) -> None:
  if mask is not None and mask.shape != shape:
    raise ValueError(f"{name} must have shape {shape}, not {mask.shape}")
