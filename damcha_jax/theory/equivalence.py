"""Which attention contains which: Appendix C.1, checked through the modules.

C.1 compares functions of the input before the softmax, with any D x D matrix as a head's metric,

    multi-head   S_i(X) = X M_i X^T / sqrt(K),     M_i = A_i B_i^T,  A_i, B_i [D, K]  (rank <= K)
    DAMCHA       S_i(X) = X m_i(X) X^T / sqrt(K),  m_i(X) [D, D]

which is DAMCHA's full-width form. In the head-slice form m_i is K x K, that is, D x D with only one
block that is not zero: E_i m_i E_i^T, E_i [D, K] the columns of slice i of the identity.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis.closed_forms import Size
from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.interop.mha_to_damcha import mha_to_damcha
from damcha_jax.metric.generator import StaticMetric
from damcha_jax.theory.low_rank import truncate

Array = jax.Array


class Difference(NamedTuple):
  """The largest difference of two attentions over many instances, relative to the largest entry."""

  scores: float  # before the softmax, which is what C.1 is about
  output: float


def converted_difference(
    size: Size, num_instances: int, seed: int, dtype: Any, update_rank: int | None = None
) -> Difference:
  """Multi-head attention against the full-width DAMCHA that the suite converts it to.

    m_i = W_Q^i (W_K^i)^T + U_i(c) V_i^T,  u_i = W_K^i b_Q^i,  U_i(c) = 0

  Weights and inputs are random, biases included, and both are causal.

  Args:
    size: T, D and H.
    num_instances: how many pairs of weights and inputs.
    seed: of them.
    dtype: in which all is computed; float64 needs `jax.enable_x64`.
    update_rank: rank of the adaptive part that starts at zero, None for a full one.
  """
  mha = _mha(size, dtype, use_bias=True)
  damcha = DamchaAttention(
      size.num_heads, form="full_width", update_rank=update_rank, causal=True, dtype=dtype,
      param_dtype=dtype,
  )
  x_NTD, params = _instances(mha, size, num_instances, seed, dtype)
  initial = _init(damcha, jax.random.key(seed), x_NTD[:1])
  converted = jax.vmap(lambda params: mha_to_damcha(params, initial))(params)
  return _difference(mha, params, damcha, converted, x_NTD)


def constant_metric_difference(
    size: Size, num_instances: int, seed: int, dtype: Any
) -> Difference:
  """Multi-head attention against DAMCHA by the paper's own construction (C.1, Step 1).

  The generator's last kernel is zero and its bias is m_i = W_Q^i (W_K^i)^T: by Assumption 1 it
  represents constants. Without biases elsewhere, as the paper defines both.
  """
  mha = _mha(size, dtype, use_bias=False)
  x_NTD, params = _instances(mha, size, num_instances, seed, dtype)
  metrics = jnp.einsum("ndhk,nehk->nhde", params["query"]["kernel"], params["key"]["kernel"])
  damcha, constant = constant_metric_attention(metrics, params["value"], params["out"])
  return _difference(mha, params, damcha, constant, x_NTD)


def constant_metric_attention(
    metrics_NHDD: Array, value: Any, out: Any
) -> tuple[DamchaAttention, Any]:
  """The full-width DAMCHA whose generator gives these metrics whatever its context, N times.

  Args:
    metrics_NHDD: m_i of every head, of N attentions.
    value, out: the parameters of their projections, without biases.

  Returns:
    The module, causal, and its parameters with a leading axis N.
  """
  num_instances, num_heads, features, _ = metrics_NHDD.shape
  dtype = metrics_NHDD.dtype
  damcha = DamchaAttention(
      num_heads, form="full_width", static_part=False, causal=True, use_bias=False, dtype=dtype,
      param_dtype=dtype,
  )
  shapes = jax.eval_shape(damcha.init, jax.random.key(0), jnp.zeros((1, 1, features), dtype))
  generator = jax.tree.map(
      lambda leaf: jnp.ones((num_instances, *leaf.shape), leaf.dtype),
      shapes["params"]["generator"],
  )
  generator["out_kernel"] = jnp.zeros_like(generator["out_kernel"])
  generator["out_bias"] = metrics_NHDD
  return damcha, {"generator": generator, "value": value, "out": out}


def head_slice_difference(size: Size, num_instances: int, seed: int, dtype: Any) -> Difference:
  """Head-slice DAMCHA of a constant metric against the multi-head attention that it is.

    X_i m_i X_i^T = X (E_i m_i) E_i^T X^T,  so  W_Q^i = E_i m_i,  W_K^i = E_i

  So a head-slice metric has rank at most K, like multi-head attention's, and what is new in it is
  that it depends on the context.
  """
  features, num_heads = size.features, size.num_heads
  metric = StaticMetric(num_heads, features, "rowsum", param_dtype=dtype)
  damcha = DamchaAttention(
      num_heads, generator=metric, causal=True, use_bias=False, dtype=dtype, param_dtype=dtype
  )
  x_NTD, params = _instances(damcha, size, num_instances, seed, dtype)
  slices_DHK = jnp.eye(features, dtype=dtype).reshape(features, num_heads, -1)
  query = jnp.einsum("dhk,nhkl->ndhl", slices_DHK, params["generator"]["metric_blocks"])
  key = jnp.broadcast_to(slices_DHK, query.shape)
  as_mha = {"query": {"kernel": query}, "key": {"kernel": key}, "value": params["value"],
            "out": params["out"]}
  return _difference(_mha(size, dtype, use_bias=False), as_mha, damcha, params, x_NTD)


def full_rank_errors(size: Size, num_instances: int, seed: int, dtype: Any) -> tuple[float, float]:
  """How far each is from the scores of metrics of full rank (C.1, Step 2): DAMCHA, multi-head.

    ||S - X M_i X^T / sqrt(K)||_F / ||X M_i X^T / sqrt(K)||_F

  over random M_i [D, D] and inputs; multi-head attention has the factors of rank K that are nearest
  to M_i. One head, K = D, loses nothing.
  """
  rng = np.random.default_rng(seed)
  length, features, num_heads = size
  head_features = features // num_heads
  x_NTD = rng.normal(size=(num_instances, length, features))
  metrics = rng.normal(size=(num_instances, num_heads, features, features)) / features
  wanted = np.einsum("ntd,nhde,nse->nhts", x_NTD, metrics, x_NTD, optimize=True)
  wanted /= math.sqrt(head_features)
  projection = np.ones((num_instances, features, num_heads, head_features))
  value = {"kernel": jnp.asarray(projection, dtype)}
  out = {"kernel": jnp.asarray(projection.swapaxes(1, 2).swapaxes(2, 3), dtype)}
  damcha, constant = constant_metric_attention(jnp.asarray(metrics, dtype), value, out)
  query, key = (jnp.asarray(np.swapaxes(factor, 1, 2), dtype)
                for factor in truncate(metrics, head_features))
  factored = {"query": {"kernel": query}, "key": {"kernel": key}, "value": value, "out": out}
  error = lambda module, params: float(
      np.linalg.norm(attend(module, params, jnp.asarray(x_NTD, dtype))[0] - wanted)
      / np.linalg.norm(wanted))
  return error(damcha, constant), error(_mha(size, dtype, use_bias=False), factored)


def slice_metric_residual(size: Size, seed: int) -> float:
  """The part of random multi-head metrics that no head-slice metric has.

    min_m ||M_i - E_i m E_i^T||_F / ||M_i||_F,  attained by the block (i, i) of M_i

  One block of H^2: sqrt(1 - 1 / H^2) where no direction is preferred.
  """
  rng = np.random.default_rng(seed)
  _, features, num_heads = size
  query, key = rng.normal(size=(2, num_heads, features, features // num_heads))
  metric_HDD = query @ np.swapaxes(key, 1, 2)
  missed_HDD = metric_HDD.copy()
  for head, part in enumerate(np.split(np.arange(features), num_heads)):
    missed_HDD[head, part[:, None], part] = 0.0
  return float(np.linalg.norm(missed_HDD) / np.linalg.norm(metric_HDD))


def slice_score_residual(size: Size, seed: int) -> float:
  """What no head-slice DAMCHA reaches of a multi-head attention's scores, whatever its generator.

  Row t of the scores of slice i is (x_t^i m) X_i^T / sqrt(K). Even with a metric of its own for
  every query, made from anything, and up to a constant per row, which the softmax does not see, it
  is in the span of X_i's K columns and of 1:

    min ||S - R||_F / ||S||_F = ||S (I - P)||_F / ||S||_F,  P the projection on span(X_i, 1)

  with S in each row without its mean. Zero for T <= K + 1.

  Returns:
    The residual of all heads together, of a random multi-head attention on random inputs.
  """
  rng = np.random.default_rng(seed)
  length, features, num_heads = size
  x_TD = rng.normal(size=(length, features))
  query, key = rng.normal(size=(2, num_heads, features, features // num_heads))
  scores_HTS = np.einsum("td,hdk,hek,se->hts", x_TD, query, key, x_TD, optimize=True)
  scores_HTS -= scores_HTS.mean(-1, keepdims=True)
  missed = [
      without_span(scores_TS, np.column_stack([x_TK, np.ones(length)]))
      for scores_TS, x_TK in zip(scores_HTS, np.split(x_TD, num_heads, axis=1), strict=True)
  ]
  return float(np.linalg.norm(missed) / np.linalg.norm(scores_HTS))


def without_span(rows_TS: np.ndarray, columns_SK: np.ndarray) -> np.ndarray:
  """What is left of each row once its part in the span of the columns is gone, [T, S]."""
  basis, size, _ = np.linalg.svd(columns_SK, full_matrices=False)
  basis = basis[:, size > 1e-10 * size[0]]
  return rows_TS - (rows_TS @ basis) @ basis.T


def _mha(size: Size, dtype: Any, use_bias: bool) -> MultiHeadAttention:
  return MultiHeadAttention(
      size.num_heads, causal=True, use_bias=use_bias, dtype=dtype, param_dtype=dtype
  )


def _instances(
    module: nn.Module, size: Size, num_instances: int, seed: int, dtype: Any
) -> tuple[Array, Any]:
  """Inputs of unit variance [N, T, D] and N sets of parameters that keep it so, biases included."""
  key_x, key_params = jax.random.split(jax.random.key(seed))
  x_NTD = jax.random.normal(key_x, (num_instances, size.length, size.features), dtype)
  leaves, tree = jax.tree.flatten(jax.eval_shape(module.init, key_x, x_NTD[:1])["params"])
  keys = jax.random.split(key_params, len(leaves))
  std = 1 / math.sqrt(size.features)
  leaves = [std * jax.random.normal(key, (num_instances, *leaf.shape), dtype)
            for key, leaf in zip(keys, leaves, strict=True)]
  return x_NTD, jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnums=0)
def _init(module: nn.Module, key: Array, x_BTD: Array) -> Any:
  return module.init(key, x_BTD)["params"]


@functools.partial(jax.jit, static_argnums=0)
def attend(module: nn.Module, params: Any, x_NTD: Array) -> tuple[Array, Array]:
  """Scores [N, H, T, T], before the softmax, and outputs [N, T, D] of N attentions."""

  def one(params_and_x: tuple[Any, Array]) -> tuple[Array, Array]:
    params, x_TD = params_and_x
    output, sown = module.apply(
        {"params": params}, x_TD[None], sow_weights=True, mutable="intermediates"
    )
    (scores,) = sown["intermediates"]["attention_scores"]
    return scores[0], output[0]

  return jax.lax.map(one, (params, x_NTD))


def _difference(
    left: nn.Module, left_params: Any, right: nn.Module, right_params: Any, x_NTD: Array
) -> Difference:
  pairs = zip(attend(left, left_params, x_NTD), attend(right, right_params, x_NTD), strict=True)
  return Difference(*(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs))
