"""Metrics as a generator hands them over, and their application to the queries of their contexts."""

from __future__ import annotations

from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp

from damcha_jax.metric.context import accumulator
from damcha_jax.metric.context import Contexts

Array = jax.Array


class Factors(NamedTuple):
  """Metrics before they are multiplied out: m(c) = sum_w hidden_w(c) kernel_w [H, K, L].

  Attributes:
    hidden_BCW: of every context; its last number is 1, which the bias multiplies.
    kernel_WHKL: of all contexts.
  """

  hidden_BCW: Array
  kernel_WHKL: Array

  def metric(self) -> Array:
    """m [B, C, H, K, L], summed in float32 or more."""
    return jnp.tensordot(self.hidden_BCW, self.kernel_WHKL, 1,
                         preferred_element_type=accumulator(self.hidden_BCW.dtype))


def apply_metric(x_BTHK: Array, metric: Array, contexts: Optional[Contexts]) -> Array:
  """q_i = x_i m_i(c), each query with the metric of its own context, summed in float32.

  Args:
    x_BTHK: head slices of the layer input (H may be 1: the same input for every head).
    metric: [H, K, L] for all queries, or [B, C, H, K, L] one per context (B may be 1).
    contexts: where the queries of `metric`'s contexts sit; unused for [H, K, L].

  Returns:
    q_BTHL in x's dtype; zero for queries without a context (padding).

  Raises:
    ValueError: the metric is that of other heads.
  """
  check_heads(x_BTHK, *metric.shape[-3:-1])
  metric, sum_dtype = metric.astype(x_BTHK.dtype), accumulator(x_BTHK.dtype)
  if metric.ndim == 5 and metric.shape[:2] == (1, 1):
    metric = metric[0, 0]
  if metric.ndim == 3:
    x_BTHK = _heads(x_BTHK, metric.shape[0])
    q = jnp.einsum("bthk,hkl->bthl", x_BTHK, metric, preferred_element_type=sum_dtype)
    return q.astype(x_BTHK.dtype)
  num_contexts, stride = metric.shape[1], contexts.stride
  x_BTHK = _heads(x_BTHK, metric.shape[2])
  batch_size, length = x_BTHK.shape[:2]
  num_columns = num_contexts * stride
  if contexts.column_BT is None:
    grid = jnp.pad(x_BTHK, ((0, 0), (0, num_columns - length), (0, 0), (0, 0)))
  else:
    row_B1 = jnp.arange(batch_size)[:, None]
    grid = jnp.zeros((batch_size, num_columns, *x_BTHK.shape[2:]), x_BTHK.dtype)
    grid = grid.at[row_B1, contexts.column_BT].set(x_BTHK, mode="drop")
  grid_BCGHK = grid.reshape(batch_size, num_contexts, stride, *grid.shape[2:])
  q = jnp.einsum("bcghk,bchkl->bcghl", grid_BCGHK, metric, preferred_element_type=sum_dtype)
  q_BGHL = q.astype(x_BTHK.dtype).reshape(batch_size, num_columns, *q.shape[3:])
  if contexts.column_BT is None:
    return q_BGHL[:, :length]
  return q_BGHL.at[row_B1, contexts.column_BT].get(mode="fill", fill_value=0)


def check_heads(x_BTHK: Array, num_heads: int, num_rows: int) -> None:
  """Raises ValueError unless a metric of these heads fits the slices."""
  if x_BTHK.shape[2] not in (1, num_heads) or x_BTHK.shape[3] != num_rows:
    raise ValueError(
        f"the metric is for {num_heads} heads of width {num_rows}, but the attention has"
        f" {x_BTHK.shape[2]} of width {x_BTHK.shape[3]}; give its generator the same num_heads and"
        " width"
    )


def _heads(x_BTHK: Array, num_heads: int) -> Array:
  if x_BTHK.shape[2] == num_heads:
    return x_BTHK
  return jnp.broadcast_to(x_BTHK, (*x_BTHK.shape[:2], num_heads, x_BTHK.shape[3]))
