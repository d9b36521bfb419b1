"""Contexts: the vectors from which the metric generator makes its metrics (paper Section 3.2).

A context is a mean over token vectors of the layer input. Which mean decides what a query may see:

  sequence  one context, the mean of all real tokens:  c = mean_s x_s                 (not causal)
  prefix    one context per stride of `stride` tokens: c_k = mean of tokens 0 .. k * stride, used by
            the queries k * stride .. (k + 1) * stride - 1                             (causal)

With a half-life h (one for each feature), a prefix mean weighs token s of 0 .. t by 2^(-(t - s) / h);
without, by 1.

Positions count real tokens of the own segment, not columns, so padding on either side and packing
leave every row the metrics it would have alone.

Axes: B batch, T query, C context, D width.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from flax import struct
import jax
import jax.numpy as jnp

Array = jax.Array


@struct.dataclass
class Contexts:
  """Contexts and which query uses which.

  Query t sits in column `column_BT[b, t]` of a grid of C * stride columns (in column t if
  `column_BT` is None), and column g uses context g // stride. A column outside the grid marks a
  query without a metric (padding).
  """

  vectors_BCD: Array
  column_BT: Optional[Array]
  stride: int = struct.field(pytree_node=False)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
  """The dtype in which values of `dtype` are summed: float32, or float64 for float64."""
  return jnp.promote_types(dtype, jnp.float32)


class PrefixState(NamedTuple):
  """What cached decoding carries: the sum and count of the tokens so far and the last context."""

  sum_BD: Array
  count_B: Array
  context_BD: Array


def empty_state(batch_size: int, features: int, dtype: jnp.dtype) -> PrefixState:
  zeros_BD = jnp.zeros((batch_size, features), accumulator(dtype))
  return PrefixState(zeros_BD, jnp.zeros((batch_size,), jnp.int32), zeros_BD)


def sequence_context(
    x_BTD: Array, valid_BT: Optional[Array] = None, segment_ids_BT: Optional[Array] = None
) -> Contexts:
  """The mean over the real tokens of the sequence (of the own segment, if packed)."""
  x_BTD = x_BTD.astype(accumulator(x_BTD.dtype))
  valid_BT = jnp.ones(x_BTD.shape[:2], bool) if valid_BT is None else valid_BT
  weights_BT = valid_BT.astype(x_BTD.dtype)
  if segment_ids_BT is None:
    sum_BD = jnp.einsum("bt,btd->bd", weights_BT, x_BTD)
    mean_BD = sum_BD / jnp.maximum(weights_BT.sum(-1, keepdims=True), 1.0)
    return Contexts(mean_BD[:, None], None, stride=x_BTD.shape[1])
  same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
  same_BTS = same_BTS * weights_BT[:, None, :]
  sum_BTD = jnp.einsum("bts,bsd->btd", same_BTS, x_BTD)
  return Contexts(sum_BTD / jnp.maximum(same_BTS.sum(-1), 1.0)[..., None], None, stride=1)


def prefix_contexts(
    x_BTD: Array,
    stride: int,
    valid_BT: Optional[Array] = None,
    segment_ids_BT: Optional[Array] = None,
    half_life_D: Optional[Array] = None,
) -> Contexts:
  """Causal contexts: the mean of tokens 0 .. k * stride for the k-th stride of queries."""
  if segment_ids_BT is not None:
    return _packed_prefix_contexts(x_BTD, stride, valid_BT, segment_ids_BT, half_life_D)
  if valid_BT is None:
    if half_life_D is None:
      return _dense_prefix_contexts(x_BTD, stride)
    valid_BT = jnp.ones(x_BTD.shape[:2], bool)
  num_contexts = math.ceil(x_BTD.shape[1] / stride)
  state = empty_state(x_BTD.shape[0], x_BTD.shape[2], x_BTD.dtype)
  return _masked_prefix_contexts(x_BTD, stride, valid_BT, state, num_contexts, half_life_D)[0]


def continue_prefix(
    x_BTD: Array,
    stride: int,
    valid_BT: Optional[Array],
    state: PrefixState,
    half_life_D: Optional[Array] = None,
) -> tuple[Contexts, PrefixState]:
  """`prefix_contexts` for T more tokens of sequences whose earlier tokens are in `state`."""
  if valid_BT is None:
    valid_BT = jnp.ones(x_BTD.shape[:2], bool)
  # The first new token may fall inside a stride, which therefore spills into one more context.
  num_contexts = math.ceil((x_BTD.shape[1] + stride - 1) / stride)
  return _masked_prefix_contexts(x_BTD, stride, valid_BT, state, num_contexts, half_life_D)


def _dense_prefix_contexts(x_BTD: Array, stride: int) -> Contexts:
  batch_size, length, features = x_BTD.shape
  num_contexts = math.ceil(length / stride)
  x_BTD = x_BTD.astype(accumulator(x_BTD.dtype))
  anchor_BCD = x_BTD[:, ::stride]
  whole_BTD = x_BTD[:, : (num_contexts - 1) * stride]
  strides_BCGD = whole_BTD.reshape(batch_size, num_contexts - 1, stride, features)
  before_BCD = jnp.pad(jnp.cumsum(strides_BCGD.sum(2), axis=1), ((0, 0), (1, 0), (0, 0)))
  count_C = jnp.arange(num_contexts) * stride + 1.0
  return Contexts((before_BCD + anchor_BCD) / count_C[None, :, None], None, stride)


def _masked_prefix_contexts(
    x_BTD: Array,
    stride: int,
    valid_BT: Array,
    state: PrefixState,
    num_contexts: int,
    half_life_D: Optional[Array],
) -> tuple[Contexts, PrefixState]:
  valid_BT = valid_BT.astype(bool)
  x_BTD = jnp.where(valid_BT[..., None], x_BTD.astype(accumulator(x_BTD.dtype)), 0.0)
  # Index of each real token within its sequence; padding carries the index of the token before it.
  index_BT = state.count_B[:, None] + jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32) - 1
  if half_life_D is None:
    sum_BTD = state.sum_BD[:, None] + jnp.cumsum(x_BTD, axis=1)
  else:
    kept_BTD, sum_BTD = _decayed_sum(x_BTD, _kept(valid_BT, half_life_D))
    sum_BTD += kept_BTD * state.sum_BD[:, None]
  mean_BTD = sum_BTD / _total_weight(index_BT + 1, half_life_D)
  first_B = state.count_B // stride
  column_BT = jnp.where(valid_BT, index_BT - (first_B * stride)[:, None], num_contexts * stride)

  anchor_BT = valid_BT & (index_BT % stride == 0)
  slot_BT = jnp.where(anchor_BT, column_BT // stride, num_contexts)
  row_B1 = jnp.arange(x_BTD.shape[0])[:, None]
  vectors_BCD = jnp.zeros((x_BTD.shape[0], num_contexts, x_BTD.shape[2]), mean_BTD.dtype)
  vectors_BCD = vectors_BCD.at[row_B1, slot_BT].set(mean_BTD, mode="drop")
  # A sequence that stopped inside a stride goes on with the context of that stride.
  inside_B = state.count_B % stride != 0
  first_BD = jnp.where(inside_B[:, None], state.context_BD, vectors_BCD[:, 0])
  vectors_BCD = vectors_BCD.at[:, 0].set(first_BD)

  count_B = index_BT[:, -1] + 1
  last_B = jnp.clip((count_B - 1) // stride - first_B, 0, num_contexts - 1)
  context_BD = jnp.take_along_axis(vectors_BCD, last_B[:, None, None], axis=1)[:, 0]
  context_BD = jnp.where((count_B == state.count_B)[:, None], state.context_BD, context_BD)
  return Contexts(vectors_BCD, column_BT, stride), PrefixState(sum_BTD[:, -1], count_B, context_BD)


def _packed_prefix_contexts(
    x_BTD: Array,
    stride: int,
    valid_BT: Optional[Array],
    segment_ids_BT: Array,
    half_life_D: Optional[Array],
) -> Contexts:
  # How many strides a packed row has depends on the data, so each query gets its own context.
  valid_BT = jnp.ones(x_BTD.shape[:2], bool) if valid_BT is None else valid_BT.astype(bool)
  x_BTD = jnp.where(valid_BT[..., None], x_BTD.astype(accumulator(x_BTD.dtype)), 0.0)
  starts_BT = segment_starts(segment_ids_BT)
  if half_life_D is None:
    sum_BTD = _restarting_sum(x_BTD, starts_BT)
  else:
    kept_BTD = _kept(valid_BT, half_life_D) * ~starts_BT[..., None]
    _, sum_BTD = _decayed_sum(x_BTD, kept_BTD)
  count_BT = _restarting_sum(valid_BT.astype(jnp.int32)[..., None], starts_BT)[..., 0]
  mean_BTD = sum_BTD / _total_weight(count_BT, half_life_D)
  anchor_BT = valid_BT & ((count_BT - 1) % stride == 0)
  position_T = jnp.arange(x_BTD.shape[1])
  # A segment that starts with padding has no context yet; its own start keeps it from borrowing
  # the previous segment's.
  latest_BT = jax.lax.cummax(jnp.where(anchor_BT | starts_BT, position_T, 0), axis=1)
  return Contexts(jnp.take_along_axis(mean_BTD, latest_BT[..., None], axis=1), None, stride=1)


def _kept(valid_BT: Array, half_life_D: Array) -> Array:
  """What each token leaves of the weights of those before it: 2^(-1/h), or all if it is padding."""
  return jnp.where(valid_BT[..., None], jnp.exp2(-1.0 / half_life_D), 1.0)


def _total_weight(count_BT: Array, half_life_D: Optional[Array]) -> Array:
  """Of so many tokens, at least 1: their number, or sum_n 2^(-n/h) = (1 - 2^(-N/h)) / (1 - 2^(-1/h))."""
  count_BT1 = jnp.maximum(count_BT, 1)[..., None]
  if half_life_D is None:
    return count_BT1
  return jnp.expm1(-jnp.log(2.0) * count_BT1 / half_life_D) / jnp.expm1(-jnp.log(2.0) / half_life_D)


def _decayed_sum(x_BTD: Array, kept_BTD: Array) -> tuple[Array, Array]:
  """Products of `kept` so far, and s_t = kept_t s_{t-1} + x_t."""

  def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]

  return jax.lax.associative_scan(combine, (kept_BTD, x_BTD), axis=1)


def segment_starts(segment_ids_BT: Array) -> Array:
  """True where a new segment begins."""
  changed_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  return jnp.pad(changed_BT, ((0, 0), (1, 0)), constant_values=True)


def positions_in_segment(valid_BT: Array, segment_ids_BT: Optional[Array] = None) -> Array:
  """Index of each real token within its row or segment; padding gets a neighbour's, at least 0."""
  count_BT = valid_BT.astype(jnp.int32)
  if segment_ids_BT is None:
    index_BT = jnp.cumsum(count_BT, axis=1) - 1
  else:
    starts_BT = segment_starts(segment_ids_BT)
    index_BT = _restarting_sum(count_BT[..., None], starts_BT)[..., 0] - 1
  return jnp.maximum(index_BT, 0)


def _restarting_sum(x_BTD: Array, starts_BT: Array) -> Array:
  """Running sum over T that restarts where `starts_BT`, without the cancellation of a difference."""

  def combine(left, right):
    left_start, left_sum = left
    right_start, right_sum = right
    return left_start | right_start, jnp.where(right_start, right_sum, left_sum + right_sum)

  _, sum_BTD = jax.lax.associative_scan(combine, (starts_BT[..., None], x_BTD), axis=1)
  return sum_BTD
