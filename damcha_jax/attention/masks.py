"""Masks shared by the attentions. True means visible; all are broadcastable to [B, H, T, S]."""

from __future__ import annotations

from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def causal(num_queries: int, num_keys: int, first_query: int = 0) -> Array:
  """[1, 1, T, S]: query t sees keys 0 .. first_query + t."""
  return jnp.tril(jnp.ones((num_queries, num_keys), bool), first_query)[None, None]


def same_segment(segment_ids_BT: Array) -> Array:
  """[B, 1, T, T]: tokens see their own segment of a packed row."""
  return (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]


def combine(*masks: Optional[Array]) -> Optional[Array]:
  """The conjunction of the masks that are not None."""
  present = [mask.astype(bool) for mask in masks if mask is not None]
  if not present:
    return None
  combined = present[0]
  for mask in present[1:]:
    combined = combined & mask
  return combined


def tokens_seen(mask: Optional[Array], batch_size: int, num_keys: int) -> Optional[Array]:
  """[B, S]: the keys that some query of some head sees; None without a mask."""
  return _any_over(mask, axis=-2, shape=(batch_size, num_keys))


def queries_seeing(mask: Optional[Array], batch_size: int, num_queries: int) -> Optional[Array]:
  """[B, T]: the queries that see some key in some head; None without a mask."""
  return _any_over(mask, axis=-1, shape=(batch_size, num_queries))


def _any_over(mask: Optional[Array], axis: int, shape: tuple[int, int]) -> Optional[Array]:
  if mask is None:
    return None
  seen = mask.astype(bool).any(axis=axis)
  if seen.ndim == 3:  # [B, H, positions]
    seen = seen.any(axis=1)
  return jnp.broadcast_to(seen, shape)


def documents(mask_BHTS: Array, batch_size: int, length: int) -> Optional[Array]:
  """[B, T]: the number of the document of each token, if documents are packed by the mask alone.

  A document begins at token b if no query from b on sees a key before b, and none before b sees a
  key from b on. None where a mask whose values are known now shows a single document per row.
  """
  seen_BTS = jnp.broadcast_to(mask_BHTS.astype(bool).any(1), (batch_size, length, length))
  sees_BT = seen_BTS.any(-1)
  first_BT = jnp.where(sees_BT, jnp.argmax(seen_BTS, -1), length)
  last_BT = jnp.where(sees_BT, length - 1 - jnp.argmax(seen_BTS[..., ::-1], -1), -1)
  from_here_BT = jax.lax.cummin(first_BT, axis=1, reverse=True)
  up_to_here_BT = jax.lax.cummax(last_BT, axis=1)
  before_BT = jnp.pad(up_to_here_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  position_T = jnp.arange(length)
  documents_BT = jnp.cumsum((from_here_BT >= position_T) & (before_BT < position_T), axis=1)
  if not isinstance(documents_BT, jax.core.Tracer):
    used_BT = np.asarray(seen_BTS.any(1))
    numbers = np.asarray(documents_BT)
    if all(len(np.unique(row[used])) <= 1 for row, used in zip(numbers, used_BT)):
      return None
  return documents_BT


def is_concrete_causal(mask: Optional[Array]) -> bool:
  """Whether a mask whose values are known now hides the future from every query."""
  if mask is None or isinstance(mask, jax.core.Tracer):
    return False
  visible = np.asarray(mask).astype(bool)
  if visible.ndim < 2 or visible.shape[-2] < 2 or visible.shape[-2] != visible.shape[-1]:
    return False
  return not np.triu(visible, k=1).any()
