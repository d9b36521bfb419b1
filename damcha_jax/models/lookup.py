"""Transformers that answer the synthetic look-ups (paper Section 5.6), and the control."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import DamchaConfig
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.models.attentions import attention_factory
from damcha_jax.models.layers import Initializers
from damcha_jax.models.layers import layer_norm
from damcha_jax.models.layers import make_initializers
from damcha_jax.models.stack import BlockStack

Array = jax.Array

TOLD = "told"
# DAMCHA otherwise than the paper's Section 5.1 has it.
DAMCHA_VARIANTS = ("damcha_robust", "damcha_full_width")


def methods() -> tuple[str, ...]:
  """What is compared: every attention, also those added to `ATTENTIONS` since, and the control."""
  return (*ATTENTIONS, *DAMCHA_VARIANTS, TOLD)


class _Sizes(NamedTuple):
  """What `attention_factory` reads of a model."""

  num_layers: int
  num_heads: int
  features: int
  initializer: str
  attention_implementation: str
  dtype: str
  param_dtype: str
  attention_dropout_rate: float = 0.0


class LookupTransformer(nn.Module):
  """Logits of the queries' symbols, [B, Q, C] in float32.

    x = slices of [features_h; symbol_h], h = 1 .. H;  x = stack(x);  logits = norm(x) W + b

  Head h's slice of the input is the h-th subspace of the features and some features of its own for
  the token's symbol, learned; queries have a symbol of their own. No layer comes before the stack,
  so that the data's subspaces are the heads'. There are no positions: the items are a set.

  Attributes:
    stack: makes the pre-LN BlockStack.
    symbol_features: of each head.
  """

  stack: Callable[..., BlockStack]
  num_heads: int
  symbol_features: int
  num_classes: int
  initializers: Initializers = make_initializers("lecun", 1)
  dtype: Any = None
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, features_BTD: Array, symbols_BN: Array) -> Array:
    """Logits of the queries, which are the tokens after the N items."""
    batch_size, length, _ = features_BTD.shape
    num_items = symbols_BN.shape[1]
    symbols_BT = jnp.pad(symbols_BN, [(0, 0), (0, length - num_items)],
                         constant_values=self.num_classes)
    embedded_BTE = nn.Embed(
        self.num_classes + 1, self.num_heads * self.symbol_features, dtype=self.dtype,
        param_dtype=self.param_dtype, embedding_init=self.initializers.embedding, name="symbols",
    )(symbols_BT)
    slices = [part.astype(embedded_BTE.dtype).reshape(batch_size, length, self.num_heads, -1)
              for part in (features_BTD, embedded_BTE)]
    x_BTD = jnp.concatenate(slices, axis=-1).reshape(batch_size, length, -1)
    x_BTD = self.stack(name="stack")(x_BTD)[:, num_items:]
    x_BTD = layer_norm("norm", False, self.dtype, self.param_dtype)(x_BTD)
    return nn.Dense(
        self.num_classes, dtype=jnp.promote_types(x_BTD.dtype, jnp.float32),
        param_dtype=self.param_dtype, kernel_init=self.initializers.head, name="head")(x_BTD)


class ToldLookup(nn.Module):
  """The control that is told how subspaces belong together, and learns the sharpness b alone.

    p = sum_s softmax_s(e^b query M x_s) [y_s = c],  logits = log p

  With e^b = 1 / sigma^2 that is the posterior, so the control shows that what is asked for can be
  had by one softmax attention.
  """

  num_classes: int

  @nn.compact
  def __call__(self, features_BTD: Array, symbols_BN: Array, metric_DD: Array) -> Array:
    num_items = symbols_BN.shape[1]
    keys_BND = features_BTD[:, :num_items] @ metric_DD
    precision = jnp.exp(self.param("log_precision", nn.initializers.zeros, ()))
    scores_BQN = precision * jnp.einsum("bqd,bnd->bqn", features_BTD[:, num_items:], keys_BND)
    classes_BNC = jax.nn.one_hot(symbols_BN, self.num_classes)
    return jnp.log(jax.nn.softmax(scores_BQN) @ classes_BNC + 1e-6)


def make_lookup(config: SyntheticConfig, task: str, dimension: int, attention: str,
                mlp_features: int) -> LookupTransformer:
  """The Transformer of one cell of the study.

  Args:
    config: of the study.
    task: a name of a task.
    dimension: of the features.
    attention: a key of `ATTENTIONS`, or of DAMCHA_VARIANTS.
    mlp_features: F.

  Raises:
    ConfigError: unknown attention, or options that do not go together.
  """
  model, lookup = config.model, config.lookup(task)
  sizes = _Sizes(model.num_layers, model.num_heads,
                 dimension + model.num_heads * model.symbol_features, model.initializer,
                 model.attention_implementation, model.dtype, model.param_dtype)
  damcha = dataclasses.replace(config.damcha, context=lookup.damcha_context)
  name = "damcha" if attention in DAMCHA_VARIANTS else attention
  sections = dataclasses.replace(config, damcha=_variant(damcha, attention, config))
  factory = attention_factory(sections, name, sizes, causal=lookup.causal)
  initializers = make_initializers(model.initializer, model.num_layers)
  dtypes = dict(dtype=jnp.dtype(model.dtype), param_dtype=jnp.dtype(model.param_dtype))
  stack = functools.partial(BlockStack, num_layers=model.num_layers, attention=factory.attention,
                            mlp_features=mlp_features, initializers=initializers, **dtypes,
                            **factory.stack_options)
  return LookupTransformer(stack, model.num_heads, model.symbol_features, lookup.num_classes,
                           initializers, **dtypes)


def _variant(damcha: DamchaConfig, attention: str, config: SyntheticConfig) -> DamchaConfig:
  changes = {
      "damcha_robust": {"preset": "robust"},
      # Contains multi-head attention: the whole token's metric, with an adaptive update.
      "damcha_full_width": {"form": "full_width", "parameterization": "rowsum",
                            "update_rank": config.full_width_rank},
  }
  return dataclasses.replace(damcha, **changes.get(attention, {}))


def matched_mlp_features(config: SyntheticConfig, task: str, dimension: int,
                         attention: str) -> int:
  """The F that gives a model the number of parameters of MHA's with `model.mlp_features`.

  Parameters grow linearly with F, so the nearest count is a division away. 0 or less where the
  attention alone has more than that.
  """
  count = functools.partial(num_params, config, task, dimension)
  slope = count("mha", 2) - count("mha", 1)
  wanted = count("mha", config.model.mlp_features)
  return 1 + round((wanted - count(attention, 1)) / slope)


@functools.cache
def num_params(config: SyntheticConfig, task: str, dimension: int, attention: str,
                mlp_features: int) -> int:
  model = make_lookup(config, task, dimension, attention, mlp_features)
  shapes = jax.eval_shape(lambda key: init_lookup(model, key, dimension), jax.random.key(0))
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def init_lookup(model: LookupTransformer, key: Array, dimension: int) -> Any:
  """Initial parameters, without logical axis names."""
  features_BTD, symbols_BN = jnp.zeros((1, 2, dimension)), jnp.zeros((1, 1), jnp.int32)
  return nn.meta.unbox(model.init(key, features_BTD, symbols_BN)["params"])
