"""Metrics of many contexts, ready to apply to queries: multiplied out, or left in their factors.

With a context per token, the metrics of a sequence are T matrices per head, which take longer to
write and read than to compute. What a generator returns is linear in its last hidden layer h,

    q_t = x_t m(c_t) = sum_w h_w(c_t) x_t A_w = (h(c_t) (x) x_t) A

so queries can be had from T vectors h (x) x_t of W K numbers, and one product with A [W K, L].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import core
from damcha_jax.attention.activations import constrain_rows
from damcha_jax.metric.application import apply_metric
from damcha_jax.metric.application import check_heads
from damcha_jax.metric.application import Factors
from damcha_jax.metric.context import accumulator
from damcha_jax.metric.context import Contexts

Array = jax.Array

# Numbers of a chunk of queries: on a CPU a chunk stays in the cache, on an accelerator it is large
# enough to keep it busy.
_CHUNK_NUMBERS = 2**22
_LEAST_CHUNK = 64
# Metrics of more bytes are made again for every chunk, in the backward pass too.
_MOST_METRIC_BYTES = 2**26


class Metric(NamedTuple):
  """A metric ready to apply: m [H, K, L] or [B, C, H, K, L] or its factors, one of the two.

  Attributes:
    m: multiplied out.
    contexts: where the queries of each context sit; None for a single metric.
    factors: of a metric per context.
  """

  m: Optional[Array]
  contexts: Optional[Contexts]
  factors: Optional[Factors] = None

  def sow(self, module: nn.Module) -> None:
    """Stores m [B, C', H, K, L] of at most 8 contexts per row, for analysis, if that is asked for."""
    if self.contexts is None or not module.is_mutable_collection("intermediates"):
      return
    every = -(-self.contexts.vectors_BCD.shape[1] // 8)
    if self.factors is None:
      shown = self.m[:, ::every]
    else:
      shown = self.factors._replace(hidden_BCW=self.factors.hidden_BCW[:, ::every]).metric()
    module.sow("intermediates", "metric", shown)

  def apply(self, x_BTHK: Array) -> Array:
    """q_i = x_i m_i(c), each query with the metric of its own context; see `apply_metric`."""
    if self.factors is None:
      return apply_metric(x_BTHK, self.m, self.contexts)
    return apply_factors(x_BTHK, self.factors, self.contexts)


def make_metric(generator: nn.Module, contexts: Contexts, layer_index: Any = None,
                shared: bool = False) -> Metric:
  """The metric of `contexts` in the form that costs less.

  Args:
    generator: a bound generator, such as a submodule.
    contexts: of one layer, or of the stack.
    layer_index: for generators with a part per layer.
    shared: whether other layers will apply the metric too.
  """
  if _in_factors(generator, contexts, shared):
    return Metric(None, contexts, generator.factors(contexts.vectors_BCD, layer_index))
  # Metrics are larger than the kernel that makes them: let that move to the rows of the batch.
  metric = constrain_rows(generator(contexts.vectors_BCD, layer_index))
  # XLA would add their gradients, one per layer where they are shared, again for each product that
  # takes the sum, and transpose them; lists of numbers cannot be transposed.
  flat = jax.lax.optimization_barrier(metric.reshape(*metric.shape[:2], math.prod(metric.shape[2:])))
  return Metric(flat.reshape(metric.shape), contexts)


def _in_factors(generator: nn.Module, contexts: Contexts, shared: bool) -> bool:
  batch_size, num_contexts, features = contexts.vectors_BCD.shape
  if contexts.stride > 1 or num_contexts == 1 or not generator.factorable:
    return False
  num_heads, num_rows, num_columns = generator.metric_shape(features)
  if generator.num_factors(features) <= num_columns:
    return True
  # Factors that outnumber the columns cost more in every layer: only memory speaks for them.
  num_bytes = 4 * batch_size * num_contexts * num_heads * num_rows * num_columns
  return not (shared or core.is_symbolic(num_bytes)) and num_bytes > _MOST_METRIC_BYTES


def apply_factors(x_BTHK: Array, factors: Factors, contexts: Contexts) -> Array:
  """`apply_metric` of `factors.metric()`, which is never in memory for all queries.

  Args:
    x_BTHK: head slices of the layer input (H may be 1: the same input for every head).
    factors: hidden [B, C, W] and kernel [W, H, K, L].
    contexts: where the queries sit; one token per context.

  Returns:
    q_BTHL in x's dtype; zero for queries without a context (padding).
  """
  num_factors, num_heads, num_rows, num_columns = factors.kernel_WHKL.shape
  check_heads(x_BTHK, num_heads, num_rows)
  batch_size, length = x_BTHK.shape[:2]
  hidden_BTW = factors.hidden_BCW
  if contexts.column_BT is not None:
    row_B1 = jnp.arange(batch_size)[:, None]
    hidden_BTW = hidden_BTW.at[row_B1, contexts.column_BT].get(mode="fill", fill_value=0)
  hidden_BTW = hidden_BTW[:, :length].astype(x_BTHK.dtype)
  kernel_WHKL = factors.kernel_WHKL.astype(x_BTHK.dtype)
  apply = _outer_products if num_factors <= num_columns else _metrics

  def of_queries(rows: core.Rows) -> Array:
    return apply(rows(x_BTHK), rows(hidden_BTW), kernel_WHKL)

  a_query = batch_size * num_heads * num_rows * min(num_factors, num_columns)
  chunk = None
  if not core.is_symbolic(a_query):
    chunk = max(_LEAST_CHUNK, _CHUNK_NUMBERS // max(1, a_query))  # of an empty batch, no numbers
  return core.in_query_chunks(of_queries, length, chunk)


def _outer_products(x_BTHK: Array, hidden_BTW: Array, kernel_WHKL: Array) -> Array:
  num_factors, num_heads, num_rows, num_columns = kernel_WHKL.shape
  batch_size, length = x_BTHK.shape[:2]
  kernel_HZL = jnp.swapaxes(kernel_WHKL, 0, 1).reshape(num_heads, -1, num_columns)
  x_HBTK = jnp.moveaxis(x_BTHK, 2, 0)
  outer_HBTWK = hidden_BTW[None, ..., None] * x_HBTK[:, :, :, None, :]
  outer_HBTZ = outer_HBTWK.reshape(len(x_HBTK), batch_size, length, num_factors * num_rows)
  outer_HBTZ = jnp.broadcast_to(outer_HBTZ, (num_heads, *outer_HBTZ.shape[1:]))
  q_HBTL = jnp.einsum("hbtz,hzl->hbtl", outer_HBTZ, kernel_HZL,
                      preferred_element_type=accumulator(x_BTHK.dtype))
  return jnp.moveaxis(q_HBTL, 0, 2).astype(x_BTHK.dtype)


def _metrics(x_BTHK: Array, hidden_BTW: Array, kernel_WHKL: Array) -> Array:
  metric = Factors(hidden_BTW, kernel_WHKL).metric()
  return apply_metric(x_BTHK, metric, Contexts(hidden_BTW, None, stride=1))
