"""The geometry of generated metrics (paper Sections 3.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import re
from typing import Any

import jax
import jax.numpy as jnp

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
