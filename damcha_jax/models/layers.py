"""The parts of a Transformer around its attention."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention.activations import constrain
from damcha_jax.metric.generator import SharedGenerator

Array = jax.Array


class Initializers(NamedTuple):
  """Initial values of what reads the residual stream, what adds to it, and what feeds it."""

  kernel: Callable
  residual_kernel: Callable
  embedding: Callable
  head: Callable


def make_initializers(name: str, num_layers: int) -> Initializers:
  """Initial values by name.

  'gpt2': std 0.02, that of residual outputs divided by sqrt(2N).
  'lecun': unit variance is kept everywhere, whatever the width: kernels of std 1 / sqrt(fan-in),
  residual outputs divided by sqrt(2N), embeddings of std 1; meant for an untied head.
  'vit': std 0.02 throughout, as in the authors' Vision Transformer, which truncates it at +-2.
  """
  small = nn.initializers.normal(0.02)
  if name == "gpt2":
    residual = nn.initializers.normal(0.02 / math.sqrt(2 * num_layers))
    return Initializers(small, residual, embedding=small, head=small)
  if name == "lecun":
    residual = nn.initializers.variance_scaling(1 / (2 * num_layers), "fan_in", "truncated_normal")
    unit = nn.initializers.normal(1.0)
    return Initializers(nn.initializers.lecun_normal(), residual, embedding=unit, head=small)
  if name == "vit":
    return Initializers(small, small, embedding=small, head=small)
  raise ValueError(f"initializer {name!r} is none of 'gpt2', 'lecun', 'vit'")


class FeedForward(nn.Module):
  """gelu(x W_1 + b_1) W_2 + b_2, [.., D] -> [.., D].

  Attributes:
    gelu: 'exact' (x Phi(x), PyTorch's nn.GELU) or 'tanh' (its approximation, which the published
      GPT-2 weights were trained with).
  """

  hidden_features: int
  dropout_rate: float = 0.0
  initializers: Initializers = make_initializers("lecun", 1)
  gelu: str = "exact"
  partitioned: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Array, deterministic: bool = True) -> Array:
    axes = lambda init, *names: (
        nn.with_logical_partitioning(init, names) if self.partitioned else init
    )
    dense = lambda features, kernel_init, names, name: nn.Dense(
        features,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        kernel_init=axes(kernel_init, *names),
        bias_init=axes(nn.initializers.zeros, names[1]),
        name=name,
    )
    hidden = dense(self.hidden_features, self.initializers.kernel, ("embed", "mlp"), "in")(x)
    if self.gelu not in ("exact", "tanh"):
      raise ValueError(f"gelu {self.gelu!r} is neither 'exact' nor 'tanh'")
    hidden = nn.gelu(hidden, approximate=self.gelu == "tanh")
    hidden = nn.Dropout(self.dropout_rate)(hidden, deterministic=deterministic)
    return dense(x.shape[-1], self.initializers.residual_kernel, ("mlp", "embed"), "out")(hidden)


def layer_norm(name: str, partitioned: bool, dtype: Any, param_dtype: Any) -> nn.LayerNorm:
  """LayerNorm with PyTorch's epsilon."""
  axes = lambda init: nn.with_logical_partitioning(init, ("norm",)) if partitioned else init
  return nn.LayerNorm(
      epsilon=1e-5,
      dtype=dtype,
      param_dtype=param_dtype,
      scale_init=axes(nn.initializers.ones),
      bias_init=axes(nn.initializers.zeros),
      name=name,
  )


def sinusoidal_positions(positions: Array, features: int) -> Array:
  """sin and cos of position / 10000^(2i/D), interleaved: [..] -> [.., D]."""
  rates = jnp.exp(jnp.arange(0, features, 2) * (-math.log(10000.0) / features))
  angles = positions[..., None].astype(jnp.float32) * rates
  pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1)
  return pairs.reshape(*positions.shape, -1)[..., :features]


class Block(nn.Module):
  """One layer: attention and feed-forward, each with its residual and LayerNorm.

    pre:  x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    post: x = norm(x + attention(x));  x = norm(x + feed_forward(x))

  Attributes:
    attention: makes the attention, e.g. functools.partial(DamchaAttention, num_heads=8).
    shared_generator: the stack's metric generator; None where the attention has its own or none.
    stochastic_depth_step: while training, layer i (from 0) leaves out what it would add to an
      example with probability i times this, and divides what it adds by the probability that it
      does, branch by branch (Huang et al. 2016, with its linear decay).
  """

  attention: Callable[..., nn.Module]
  mlp_features: int
  norm_placement: str = "pre"
  dropout_rate: float = 0.0
  initializers: Initializers = make_initializers("lecun", 1)
  shared_generator: Optional[nn.Module] = None
  deterministic: bool = True
  gelu: str = "exact"
  stochastic_depth_step: float = 0.0
  partitioned: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
      self,
      x_BTD: Array,
      layer_index: Any = None,
      padding_mask_BT: Optional[Array] = None,
      segment_ids_BT: Optional[Array] = None,
      metric: Any = None,
      generator_params: Any = None,
  ) -> Array:
    sharing = {}
    if metric is not None:
      sharing["metric"] = metric
    elif self.shared_generator is not None:
      sharing = {"shared_generator": self._bound_generator(generator_params),
                 "layer_index": layer_index}

    def attend(y_BTD: Array) -> Array:
      attention = self.attention(name="attention")
      if getattr(attention, "generator", None) is not None:
        sharing["layer_index"] = layer_index
      return attention(
          y_BTD,
          padding_mask=padding_mask_BT,
          segment_ids=segment_ids_BT,
          deterministic=self.deterministic,
          **sharing,
      )

    def feed_forward(y_BTD: Array) -> Array:
      return FeedForward(
          self.mlp_features,
          self.dropout_rate,
          self.initializers,
          self.gelu,
          self.partitioned,
          self.dtype,
          self.param_dtype,
          name="mlp",
      )(y_BTD, self.deterministic)

    x_BTD = constrain(self._residual(constrain(x_BTD), attend, "attention_norm", layer_index))
    return constrain(self._residual(x_BTD, feed_forward, "mlp_norm", layer_index))

  def _bound_generator(self, generator_params: Any) -> nn.Module:
    """The stack's generator: with given parameters under scan, else through the shared scope."""
    if generator_params is None:
      return SharedGenerator(self.shared_generator)
    rngs = {"alpha": self.make_rng("alpha")} if self.has_rng("alpha") else {}
    return self.shared_generator.copy(parent=None).bind({"params": generator_params}, rngs=rngs)

  def _residual(
      self, x_BTD: Array, layer: Callable[[Array], Array], norm_name: str, layer_index: Any
  ) -> Array:
    norm = layer_norm(norm_name, self.partitioned, self.dtype, self.param_dtype)

    def drop(y_BTD: Array) -> Array:
      y_BTD = nn.Dropout(self.dropout_rate)(y_BTD, deterministic=self.deterministic)
      if self.deterministic or self.stochastic_depth_step == 0.0:
        return y_BTD
      # Under scan the layer's index, and so its rate, is known only when the program runs.
      kept = 1.0 - layer_index * self.stochastic_depth_step
      shape = (len(y_BTD), 1, 1)
      kept_B11 = jax.random.bernoulli(self.make_rng("dropout"), kept, shape)
      return jnp.where(kept_B11, y_BTD / jnp.asarray(kept, y_BTD.dtype), 0)

    if self.norm_placement == "pre":
      return x_BTD + drop(layer(norm(x_BTD)))
    if self.norm_placement == "post":
      return norm(x_BTD + drop(layer(x_BTD)))
    raise ValueError(f"norm_placement {self.norm_placement!r} is neither 'pre' nor 'post'")
