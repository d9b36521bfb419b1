"""Block views of the cross-head metric M [.., H, K, H, K] (paper Sections 3.1 and 3.3).

M is indexed block row i, row in block, block column j, column in block. RowSum adds the blocks of
a block row, m_i = sum_j M_ij, and is linear, so it commutes with the generator's last layer: summing
that layer's kernel over j first gives the same m_i for H times fewer operations.

It follows that every block of a row gets the same gradient, dL/dM_ij = dL/dm_i: blocks of the last
layer differ by their initial values, for ever, and no training teaches off-diagonal blocks anything
that diagonal ones do not learn. Dropping blocks at inference (Table 3) therefore removes a random
share of one sum rather than a separate "cross-head" part; only a model trained without them is a
model of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp

Array = jax.Array

# 'shifted' keeps the blocks (i, i + 1 mod H), a control: as many as the diagonal ones, and none of
# them within a head.
ABLATIONS = ("full", "diagonal", "off_diagonal", "shifted")


def block_weights(ablation: str, num_heads: int) -> Optional[Array]:
  """Weights [H, H] of the blocks under a block ablation (Table 3); None where all are one."""
  if ablation == "full":
    return None
  diagonal_HH = jnp.eye(num_heads)
  if ablation == "diagonal":
    return diagonal_HH
  if ablation == "off_diagonal":
    return 1.0 - diagonal_HH
  if ablation == "shifted":
    return jnp.roll(diagonal_HH, 1, axis=1)
  raise ValueError(f"block_ablation {ablation!r} is not one of {', '.join(ABLATIONS)}")


def row_sum(blocks: Array, weights_HH: Optional[Array] = None) -> Array:
  """m_i = sum_j w_ij M_ij:  [.., H, K, H, K] -> [.., H, K, K]."""
  if weights_HH is None:
    return blocks.sum(-2)
  return jnp.einsum("...ikjl,ij->...ikl", blocks, weights_HH.astype(blocks.dtype))


def split_blocks(matrix: Array, num_heads: int) -> Array:
  """[.., D, D] -> [.., H, K, H, K]."""
  features = matrix.shape[-1]
  head_features = features // num_heads
  return matrix.reshape(*matrix.shape[:-2], num_heads, head_features, num_heads, head_features)


def join_blocks(blocks: Array) -> Array:
  """[.., H, K, H, K] -> [.., D, D]."""
  *batch, num_heads, head_features, _, _ = blocks.shape
  return blocks.reshape(*batch, num_heads * head_features, num_heads * head_features)


def blocks_to_rowsum(params: Mapping[str, Any]) -> dict[str, Any]:
  """Parameters of a `blocks` model as those of the `rowsum` model that computes the same function.

  Sums every generator's last kernel [.., H, K, H, K] and bias, and every static metric, over the
  block column; all other parameters pass unchanged. The conversion is exact, and not invertible.
  """

  def convert(path, leaf):
    name = path[-1].key
    if name not in ("out_kernel", "out_bias", "metric_blocks"):
      return leaf
    return leaf.sum(-2)

  return jax.tree_util.tree_map_with_path(convert, dict(params))
