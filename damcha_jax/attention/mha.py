"""Multi-head attention (Vaswani et al. 2017), the baseline of every comparison.

    y = concat_i softmax(X W_Q^i (X W_K^i)^T / sqrt(K)) X W_V^i  W_O
"""

from __future__ import annotations

from typing import Optional

from damcha_jax.attention.base import Array, AttentionBase, Inputs


class MultiHeadAttention(AttentionBase):
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
    return self.attend_and_project(
        *project_heads(self, inputs), inputs, deterministic, dropout_rng, sow_weights
    )


def project_heads(attention: AttentionBase, inputs: Inputs) -> tuple[Array, Array, Array]:
  """Queries, keys and values [.., H, K], with K from the width of the queries, as in Flax."""
  head_features = attention.head_features(
      attention.qkv_features or inputs.query_BTD.shape[-1]
  )
  project = lambda name: attention.project(name, head_features=head_features)
  return (
      project("query")(inputs.query_BTD),
      project("key")(inputs.key_BSD),
      project("value")(inputs.value_BSD),
  )
