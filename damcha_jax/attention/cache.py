"""The key-value cache of cached decoding, as `nn.MultiHeadDotProductAttention` keeps it.

Initialising a module with `decode=True` on inputs of the full length sizes the cache; each later
call appends its T tokens (one, or a whole prompt) and attends to all that are cached. Keys and
values may have any shape [B, S, ..], and an attention may keep further numbers of every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


class Cached(NamedTuple):
  key_BSHK: Array
  value_BSHK: Array
  extra: dict[str, Array]  # [B, S, ..] each
  mask_BHTS: Array  # which cached tokens each new query sees: real ones, not after itself
  valid_BS: Array


def append(
    module: nn.Module,
    key_BTHK: Array,
    value_BTHK: Array,
    valid_BT: Optional[Array],
    extra: Optional[Mapping[str, Array]] = None,
) -> Optional[Cached]:
  """Appends T tokens to `module`'s cache; None in the call that creates it.

  Tokens beyond the cache's length cannot be kept: the values then turn to NaN, since an error
  cannot be raised under jit and a silent overwrite would be worse.
  """
  initialised = module.has_variable("cache", "cached_key")
  batch_size, num_new = key_BTHK.shape[:2]
  zeros = lambda array: jnp.zeros(array.shape, array.dtype)
  cached_key = module.variable("cache", "cached_key", zeros, key_BTHK)
  cached_value = module.variable("cache", "cached_value", zeros, value_BTHK)
  extra = {} if extra is None else extra
  cached_extra = {
      name: module.variable("cache", f"cached_{name}", zeros, new) for name, new in extra.items()
  }
  cached_valid = module.variable("cache", "cached_valid", jnp.zeros, (batch_size, num_new), bool)
  index = module.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
  if not initialised:
    return None
  length = cached_key.value.shape[1]
  if num_new > length:
    raise ValueError(f"{num_new} tokens do not fit a cache of {length}; initialise a longer cache")
  valid_BT = jnp.ones((batch_size, num_new), bool) if valid_BT is None else valid_BT.astype(bool)
  start = index.value
  fits = start + num_new <= length

  def insert(cached: Array, new: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cached, new.astype(cached.dtype), start, axis=1)

  cached_key.value = insert(cached_key.value, key_BTHK)
  cached_value.value = insert(
      cached_value.value, jnp.where(fits, value_BTHK, jnp.array(jnp.nan, value_BTHK.dtype))
  )
  for name, new in extra.items():
    cached_extra[name].value = insert(cached_extra[name].value, new)
  cached_valid.value = insert(cached_valid.value, valid_BT)
  index.value = start + num_new
  position_T = start + jnp.arange(num_new)
  mask_TS = jnp.arange(length)[None, :] <= position_T[:, None]
  mask_BHTS = mask_TS[None, None] & cached_valid.value[:, None, None, :]
  extra = {name: cached.value for name, cached in cached_extra.items()}
  return Cached(cached_key.value, cached_value.value, extra, mask_BHTS, cached_valid.value)
