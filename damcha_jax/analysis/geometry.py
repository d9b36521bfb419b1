"""The geometry of generated metrics (paper Sections 3.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def adaptivity_by_layer(intermediates: Mapping[str, Any]) -> dict[str, Array]:
  """`adaptivity` of every metric that an apply with mutable `intermediates` stored.

  Returns:
    `{"adaptivity/layer_0": ..}` for per-layer metrics, numbered in order of depth, `adaptivity`
    their mean; the single metric of a shared stack counts as a layer. Empty without any.
  """
  layers = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
    names = [entry.key for entry in path if hasattr(entry, "key")]
    if names[-1] == "metric":
      index = next((int(name[6:]) for name in names if re.fullmatch(r"layer_\d+", name)), 0)
      # Under scan the layers are stacked in front: [N, B, C, H, K, L].
      layers += [(index, part) for part in (leaf if leaf.ndim == 6 else leaf[None])]
  layers.sort(key=lambda layer: layer[0])
  values = [adaptivity(lambda m: m, m.reshape(-1, *m.shape[2:])) for _, m in layers]
  if not values:
    return {}
  named = {f"adaptivity/layer_{index}": value for index, value in enumerate(values)}
  return {"adaptivity": sum(values) / len(values), **named}


def stored_blocks(params: Mapping[str, Any]) -> list[Array]:
  """What stores blocks [.., H, K, H, K]: last layers of generators, and static metrics.

  Under `rowsum` they store sums in place of blocks, [.., H, K, K].
  """
  names = ("out_kernel", "out_bias", "metric_blocks")
  return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
          if path[-1].key in names]


def block_drift(initial: Sequence[Array], trained: Sequence[Array]) -> dict[str, float]:
  """How far training moved the stored blocks, and how far apart it moved the blocks of a row.

    d_ij = M_ij(trained) - M_ij(initial),  s_ij = d_ij - mean_j d_ij

  All blocks of a row get one gradient (Section 3.3: m_i = sum_j M_ij), so s is 0 but for rounding,
  unless weight decay or a block ablation in training tells them apart.

  Args:
    initial: blocks [.., H, K, H, K] before training, as `stored_blocks` finds them.
    trained: after it.

  Returns:
    Root mean squares `block_drift` of d, `block_spread` of s, `block_difference` of
    M_ij - mean_j M_ij at the start; and the largest |s|, `block_spread_max`.
  """
  wide = lambda arrays: [np.asarray(array, np.float64) for array in arrays]
  initial, trained = wide(initial), wide(trained)
  drifts = [after - before for before, after in zip(initial, trained, strict=True)]
  spreads = [_from_row_mean(drift) for drift in drifts]
  rms = lambda parts: float(np.sqrt(np.mean(np.concatenate([part.ravel() for part in parts]) ** 2)))
  return {"block_drift": rms(drifts), "block_spread": rms(spreads),
          "block_spread_max": float(max(np.abs(part).max() for part in spreads)),
          "block_difference": rms([_from_row_mean(blocks) for blocks in initial])}


def _from_row_mean(blocks: np.ndarray) -> np.ndarray:
  """Blocks [.., H, K, H, K] without the mean of their row."""
  return blocks - blocks.mean(-2, keepdims=True)


class LayerGeometry(NamedTuple):
  """One layer's metrics m [E, H, K, K] of E contexts; means are over contexts.

  Attributes:
    mean_HKK: the mean metric of every head.
    norm_H: its Frobenius norm.
    spectrum_K: mean over heads too of singular values, largest first.
    effective_rank_H: mean `effective_rank`.
    rank_max: the largest `numerical_rank` of any head and context; K at most (Section 3.3).
    asymmetry_H: mean `asymmetry`.
    adaptivity: see `adaptivity`; over all heads.
  """

  mean_HKK: np.ndarray
  norm_H: np.ndarray
  spectrum_K: np.ndarray
  effective_rank_H: np.ndarray
  rank_max: int
  asymmetry_H: np.ndarray
  adaptivity: float


def layer_geometry(m_EHKK: np.ndarray) -> LayerGeometry:
  m_EHKK = np.asarray(m_EHKK, np.float32)
  mean_HKK = m_EHKK.mean(0, dtype=np.float64)
  values_EHK = np.linalg.svd(m_EHKK, compute_uv=False).astype(np.float64)
  return LayerGeometry(
      mean_HKK, _norm(mean_HKK), values_EHK.mean((0, 1)), effective_rank(values_EHK).mean(0),
      int(numerical_rank(values_EHK, m_EHKK.shape[-2]).max()), asymmetry(m_EHKK).mean(0),
      float(adaptivity(lambda m: m, jnp.asarray(m_EHKK))))


def effective_rank(values_XK: np.ndarray) -> np.ndarray:
  """exp of the entropy of singular values [.., K]: from 1, one direction only, to K, all alike.

    p_k = s_k / sum s,  exp(-sum_k p_k log p_k);  0 for a matrix of zeros
  """
  total_X1 = values_XK.sum(-1, keepdims=True)
  p_XK = values_XK / np.where(total_X1 > 0, total_X1, 1.0)
  entropy_X = -np.sum(p_XK * np.log(np.where(p_XK > 0, p_XK, 1.0)), axis=-1)
  return np.where(total_X1[..., 0] > 0, np.exp(entropy_X), 0.0)


def numerical_rank(values_XK: np.ndarray, num_rows: int) -> np.ndarray:
  """How many singular values [.., K] of float32 matrices exceed rounding, s_1 max(rows, K) eps."""
  size = max(num_rows, values_XK.shape[-1])
  least_X1 = values_XK.max(-1, keepdims=True) * size * np.finfo(np.float32).eps
  return np.sum(values_XK > least_X1, axis=-1)


def asymmetry(m_XKK: np.ndarray) -> np.ndarray:
  """||m - m^T|| / (2 ||m||), the antisymmetric part: 0 symmetric, 1 antisymmetric.

  sqrt((1 - 1/K) / 2), about 0.7, is what independent entries give on average.
  """
  return (_norm(m_XKK - m_XKK.swapaxes(-1, -2))
          / (2 * np.maximum(_norm(m_XKK), np.finfo(np.float64).tiny)))


def relative_distance(initial_XKL: np.ndarray, trained_XKL: np.ndarray) -> np.ndarray:
  """||m - m_0|| / ||m_0|| in the Frobenius norm: how far matrices have moved."""
  return (_norm(trained_XKL - initial_XKL)
          / np.maximum(_norm(initial_XKL), np.finfo(np.float64).tiny))


def diagonal_share(energy_HH: np.ndarray) -> float:
  """sum_i E_ii / sum_ij E_ij of block energies; 1/H where all blocks are alike."""
  return float(np.trace(energy_HH) / max(energy_HH.sum(), np.finfo(np.float64).tiny))


def _norm(m_XKL: np.ndarray) -> np.ndarray:
  return np.sqrt(np.sum(np.square(m_XKL, dtype=np.float64), axis=(-2, -1)))


def adaptivity(generate: Callable[[Array], Any], contexts_CD: Array) -> Array:
  """How much of a metric's spread is due to its input: 0 for a constant one, at most 1.

    sqrt(mean_e Var_c m_e(c)) / sqrt(Var_{c,e} m_e(c)),  e over the entries of m, c over contexts

  A generator whose output hardly moves when its context does is a static metric in disguise.

  Args:
    generate: maps contexts [C, D] to metrics [C, ..].
    contexts_CD: contexts as the layer sees them; they should differ.

  Returns:
    A scalar; 0 where all entries are equal.
  """
  metric_CE = generate(contexts_CD)
  metric_CE = metric_CE.reshape(len(contexts_CD), -1).astype(jnp.float32)
  # About the mean metric first: a part that is 1e-4 of the whole must not drown in rounding.
  mean_E = metric_CE.mean(0)
  within = jnp.mean((metric_CE - mean_E) ** 2)
  total = within + jnp.var(mean_E)
  return jnp.sqrt(within / jnp.where(total > 0, total, 1.0))
