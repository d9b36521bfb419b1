"""The geometry of generated metrics (paper Sections 3.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any

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
