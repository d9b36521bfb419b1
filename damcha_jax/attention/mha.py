"""Multi-head attention (Vaswani et al. 2017), the baseline of every comparison.

    y = concat_i softmax(X W_Q^i (X W_K^i)^T / sqrt(K)) X W_V^i  W_O
"""

from __future__ import annotations

from typing import Optional

from flax import linen as nn

from damcha_jax.attention.base import Array, AttentionBase


class MultiHeadAttention(AttentionBase):
  """Drop-in for `nn.MultiHeadDotProductAttention`, with the same parameter tree.

  D*D parameters each for query, key, value and out, plus biases with `use_bias`.
  """

  @nn.compact
  def __call__(
      self,
      inputs_q: Array,
      inputs_k: Optional[Array] = None,
      inputs_v: Optional[Array] = None,
      *,
      mask: Optional[Array] = None,
      padding_mask: Optional[Array] = None,
      query_padding_mask: Optional[Array] = None,
      key_padding_mask: Optional[Array] = None,
      segment_ids: Optional[Array] = None,
      bias: Optional[Array] = None,
      deterministic: Optional[bool] = None,
      dropout_rng: Optional[Array] = None,
      sow_weights: bool = False,
  ) -> Array:
    """Attends from `inputs_q` [B, T, D] to `inputs_k`, `inputs_v` [B, S, D]; see AttentionBase."""
    inputs = self.prepare(
        inputs_q, inputs_k, inputs_v, mask, padding_mask, query_padding_mask, key_padding_mask,
        segment_ids, bias,
    )
    query_BTHK = self.project("query")(inputs.query_BTD)
    key_BSHK = self.project("key")(inputs.key_BSD)
    value_BSHK = self.project("value")(inputs.value_BSD)
    return self.attend_and_project(
        query_BTHK, key_BSHK, value_BSHK, inputs, deterministic, dropout_rng, sow_weights
    )
