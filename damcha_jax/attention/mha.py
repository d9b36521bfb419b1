"""Multi-head attention (Vaswani et al. 2017), the baseline of every comparison.

    y = concat_i softmax(X W_Q^i (X W_K^i)^T / sqrt(K)) X W_V^i  W_O
"""

from __future__ import annotations

from typing import Optional

from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.metric.options import CheckedOptions


class MultiHeadAttention(CheckedOptions, AttentionBase):
  """Drop-in for `nn.MultiHeadDotProductAttention`, with the same parameter tree.

  D*D parameters each for query, key, value and out, plus biases with `use_bias`.
  """

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    query_BTHK = self.project("query")(inputs.query_BTD)
    key_BSHK = self.project("key")(inputs.key_BSD)
    value_BSHK = self.project("value")(inputs.value_BSD)
    return self.attend_and_project(
        query_BTHK, key_BSHK, value_BSHK, inputs, deterministic, dropout_rng, sow_weights
    )
