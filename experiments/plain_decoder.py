"""The decoder as one writes it with Flax alone: what the suite's decoders are timed against."""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.config import ModelConfig

Array = jax.Array
EPSILON = 1e-5  # of every LayerNorm, as in the suite


class PlainBlock(nn.Module):
  """x = x + attention(norm(x));  x = x + feed_forward(norm(x))."""

  model: ModelConfig
  decode: bool

  @nn.compact
  def __call__(self, x_BTD: Array, mask: Array) -> Array:
    attention = nn.MultiHeadDotProductAttention(self.model.num_heads, decode=self.decode)
    x_BTD = x_BTD + attention(nn.LayerNorm(EPSILON)(x_BTD), mask=mask)
    hidden_BTF = nn.Dense(self.model.mlp_features)(nn.LayerNorm(EPSILON)(x_BTD))
    return x_BTD + nn.Dense(self.model.features)(nn.gelu(hidden_BTF, approximate=False))


class PlainDecoder(nn.Module):
  """Tokens [B, T] -> logits [B, T, V]: pre-LN, learned positions, tied embeddings, float32.

  Attributes:
    model: its sizes; nothing else of the section is read.
    context_length: rows of the table of positions.
    decode: append one token a call to Flax's key-value cache.
  """

  model: ModelConfig
  context_length: int
  decode: bool = False

  @nn.compact
  def __call__(self, tokens_BT: Array, deterministic: bool = True) -> Array:
    del deterministic  # there is no dropout
    embed = nn.Embed(self.model.vocab_size, self.model.features)
    table_TD = self.param("positions", nn.initializers.normal(0.02),
                          (self.context_length, self.model.features))
    start, mask = 0, nn.make_causal_mask(tokens_BT)
    if self.decode:
      appends = self.has_variable("cache", "num_tokens")
      num_tokens = self.variable("cache", "num_tokens", jnp.zeros, (), jnp.int32)
      if appends:
        start = num_tokens.value
        num_tokens.value = start + tokens_BT.shape[1]
    positions_TD = jax.lax.dynamic_slice_in_dim(table_TD, start, tokens_BT.shape[1])
    x_BTD = embed(tokens_BT) + positions_TD
    for _ in range(self.model.num_layers):
      x_BTD = PlainBlock(self.model, self.decode)(x_BTD, mask)
    return embed.attend(nn.LayerNorm(EPSILON)(x_BTD))
