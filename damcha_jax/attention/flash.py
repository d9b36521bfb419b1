"""Fused attention on TPUs: the Pallas flash attention that JAX ships, each device on its own part.

XLA cannot divide a kernel among devices. So the rows of a batch are divided as the caller of the
model has them, and the heads by the mesh axis `tensor`, if they are a multiple of it.
"""

from __future__ import annotations

import functools
import numbers

import jax
from jax.experimental.pallas.ops.tpu import flash_attention as kernels
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from damcha_jax.attention import activations

Array = jax.Array

_BLOCK = 128  # the kernel's rows and columns of scores; lengths are multiples of it
_LARGEST_BLOCK = 512  # larger ones are quicker, until they do not fit a core's memory
_HEADS_AXIS = "tensor"


def attend(
    query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, *, scale: float, is_causal: bool
) -> Array:
  """softmax(q k^T * scale) v as [B, T, H, K], in the dtype of the values.

  Args:
    query_BTHK, key_BTHK, value_BTHK: of self-attention; a single head of keys and of values serves
      all query heads.
    scale: factor on the dot products.
    is_causal: hide keys after the query's position.

  Raises:
    ValueError: B or T is 0 or symbolic, T is no multiple of 128 or not that of the keys, the values
      are float64, or the scale is an array.
  """
  num_rows, length, num_heads, _ = query_BTHK.shape
  fixed = all(isinstance(size, int) and size for size in (num_rows, length))
  if not fixed or length % _BLOCK or key_BTHK.shape[1] != length:
    raise ValueError(
        f"implementation 'pallas' attends, in one or more rows, among as many queries as keys, a"
        f" multiple of {_BLOCK}, all known when it is compiled; not in {num_rows} from {length} to"
        f" {key_BTHK.shape[1]}; use implementation='plain' (or 'auto')")
  if value_BTHK.dtype == jnp.float64 or not isinstance(scale, numbers.Real):
    raise ValueError(
        f"implementation 'pallas' takes no float64 and no array as scale, not {value_BTHK.dtype} and"
        f" {type(scale).__name__}; use implementation='plain' (or 'auto')")
  whole = lambda x: jnp.broadcast_to(x, (*x.shape[:2], num_heads, x.shape[3]))
  heads_first = lambda x: jnp.swapaxes(whole(x.astype(value_BTHK.dtype)), 1, 2)
  attend_part = functools.partial(
      kernels.flash_attention, causal=is_causal, sm_scale=float(scale), block_sizes=_block_sizes(length))
  output_BHTK = _on_every_device(attend_part, num_heads)(
      *map(heads_first, (query_BTHK, key_BTHK, value_BTHK)))
  return jnp.swapaxes(output_BHTK, 1, 2)


def _block_sizes(length: int) -> kernels.BlockSizes:
  size = next(size for size in (_LARGEST_BLOCK, 2 * _BLOCK, _BLOCK) if length % size == 0)
  backward = ("q_major_dkv", "k_major_dkv", "k_dkv", "q_dkv", "k_major_dq", "k_dq", "q_dq")
  return kernels.BlockSizes(block_q=size, block_k_major=size, block_k=size, block_b=1,
                            **{f"block_{name}": size for name in backward})


def _on_every_device(attend_part, num_heads: int):
  """`attend_part` of [B, H, T, K] thrice, on the mesh that the model's caller named, if any."""
  batch = activations.sharding()
  if batch is None:
    return attend_part
  ways = batch.mesh.shape.get(_HEADS_AXIS, 1)
  spec = PartitionSpec(batch.spec[0], _HEADS_AXIS if ways > 1 and num_heads % ways == 0 else None)
  return jax.shard_map(attend_part, mesh=batch.mesh, in_specs=(spec, spec, spec), out_specs=spec,
                       check_vma=False)
