"""The decoder-only language model: GPT-2's shape with any of the attentions (paper Section 5.4)."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.config import ConfigError, LanguageModelConfig, ModelConfig
from damcha_jax.metric.context import positions_in_segment
from damcha_jax.models.attentions import attention_factory
from damcha_jax.models.layers import layer_norm
from damcha_jax.models.layers import make_initializers
from damcha_jax.models.layers import sinusoidal_positions
from damcha_jax.models.stack import BlockStack
from damcha_jax.models.stack import stack_layers

Array = jax.Array


class DecoderLM(nn.Module):
  """Causal language model: tokens [B, T] -> logits [B, T, V] in float32.

    x = embed(tokens) + position;  x = stack(x);  logits = norm(x) E^T   (E the embedding, if tied)

  Positions count the real tokens of the own row or segment, so padding shifts nothing. A post-LN
  stack ends in a LayerNorm already and gets no other.

  Attributes:
    stack: makes the BlockStack; `make_decoder` builds it from a config.
    context_length: T of the learned positions; longer inputs are an error.
  """

  stack: Callable[..., BlockStack]
  model: ModelConfig
  context_length: int
  decode: bool = False

  @nn.compact
  def __call__(
      self,
      tokens_BT: Array,
      *,
      padding_mask: Optional[Array] = None,
      segment_ids: Optional[Array] = None,
      positions: Optional[Array] = None,
      deterministic: bool = True,
  ) -> Array:
    """Logits for the token after each position.

    Args:
      tokens_BT: token ids; while decoding, the T tokens to append.
      padding_mask: [B, T], True for real tokens.
      segment_ids: [B, T], the document of each token of packed rows.
      positions: [B, T], overrides the counted positions.
      deterministic: no dropout.

    Raises:
      ValueError: more tokens than `context_length` with learned positions.
    """
    config = self.model
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    initializers = make_initializers(config.initializer, config.num_layers)
    embed = nn.Embed(
        config.vocab_size,
        config.features,
        dtype=dtype,
        param_dtype=param_dtype,
        embedding_init=nn.with_logical_partitioning(initializers.embedding, ("vocab", "embed")),
        name="embed",
    )
    if positions is None:
      positions = self._positions(tokens_BT, padding_mask, segment_ids)
    x_BTD = embed(tokens_BT) + self._position_vectors(positions).astype(dtype)
    x_BTD = nn.Dropout(config.dropout_rate)(x_BTD, deterministic=deterministic)
    x_BTD = self.stack(name="stack", decode=self.decode)(
        x_BTD, padding_mask=padding_mask, segment_ids=segment_ids, deterministic=deterministic
    )
    if config.norm_placement == "pre":
      x_BTD = layer_norm("norm", True, dtype, param_dtype)(x_BTD)
    if config.tie_embeddings:
      table_VD = embed.embedding.astype(dtype)
    else:
      head_init = nn.with_logical_partitioning(initializers.head, ("vocab", "embed"))
      table_VD = self.param(
          "head", head_init, (config.vocab_size, config.features), param_dtype
      ).astype(dtype)
    return jnp.einsum("btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32)

  def _positions(
      self, tokens_BT: Array, padding_mask: Optional[Array], segment_ids: Optional[Array]
  ) -> Array:
    valid_BT = jnp.ones(tokens_BT.shape, bool) if padding_mask is None else padding_mask
    positions_BT = positions_in_segment(valid_BT, segment_ids)
    if not self.decode:
      return positions_BT
    initialised = self.has_variable("cache", "num_tokens")
    count_B = self.variable("cache", "num_tokens", jnp.zeros, tokens_BT.shape[:1], jnp.int32)
    if not initialised:
      return positions_BT
    positions_BT = positions_BT + count_B.value[:, None]
    count_B.value = count_B.value + valid_BT.sum(-1, dtype=jnp.int32)
    return positions_BT

  def _position_vectors(self, positions_BT: Array) -> Array:
    config = self.model
    if config.positions == "sinusoidal":
      return sinusoidal_positions(positions_BT, config.features)
    if positions_BT.shape[1] > self.context_length:
      raise ValueError(
          f"{positions_BT.shape[1]} tokens exceed the context length {self.context_length} of the"
          " learned positions; shorten the input"
      )
    initializers = make_initializers(config.initializer, config.num_layers)
    table_TD = self.param(
        "positions",
        nn.with_logical_partitioning(initializers.embedding, ("positions", "embed")),
        (self.context_length, config.features),
        jnp.dtype(config.param_dtype),
    )
    # A position past the table would silently repeat the last one; NaN cannot be overlooked.
    return table_TD.at[positions_BT].get(mode="fill", fill_value=jnp.nan)


def make_decoder(
    config: LanguageModelConfig, attention: str, *, evaluation: bool = False, decode: bool = False
) -> DecoderLM:
  """The language model of `config` with the named attention.

  Args:
    config: a frozen experiment config.
    attention: a key of `ATTENTIONS`.
    evaluation: apply `damcha.block_ablation_eval` rather than `block_ablation_train`.
    decode: keep a key-value cache.

  Raises:
    ConfigError: unknown attention, or options that do not go together.
  """
  model = config.model
  factory = attention_factory(config, attention, model, evaluation=evaluation, decode=decode)
  stack = functools.partial(
      BlockStack,
      num_layers=model.num_layers,
      attention=factory.attention,
      mlp_features=model.mlp_features,
      norm_placement=model.norm_placement,
      dropout_rate=model.dropout_rate,
      initializers=make_initializers(model.initializer, model.num_layers),
      gelu=model.gelu,
      remat=model.remat,
      scan_layers=model.scan_layers,
      partitioned=True,
      dtype=jnp.dtype(model.dtype),
      param_dtype=jnp.dtype(model.param_dtype),
      **factory.stack_options,
  )
  try:
    stack(parent=None)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return DecoderLM(stack, model, config.context_length, decode=decode)


def init_params(model: DecoderLM, rng: Array, tokens_BT: Array) -> Any:
  """Initial parameters; a scanned model gets exactly the numbers of the unrolled one, stacked."""
  if not model.model.scan_layers:
    return model.init(rng, tokens_BT)["params"]
  unrolled = model.copy(stack=functools.partial(model.stack, scan_layers=False))
  return stack_layers(unrolled.init(rng, tokens_BT)["params"])


def init_cache(model: DecoderLM, batch_size: int, max_length: int) -> Any:
  """An empty cache for `max_length` columns per row of a model built with `decode=True`.

  Padding takes up columns too, so there may be more of them than the context length.
  """
  model = model.clone(context_length=max(model.context_length, max_length))
  tokens_BT = jnp.zeros((batch_size, max_length), jnp.int32)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens_BT))["cache"]
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
