"""The Vision Transformer with any of the attentions (paper Section 5.5, Table 6)."""

from __future__ import annotations

import functools
from typing import Any, Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.config import VisionModelConfig
from damcha_jax.models.attentions import attention_factory
from damcha_jax.models.layers import Initializers
from damcha_jax.models.layers import layer_norm
from damcha_jax.models.layers import make_initializers
from damcha_jax.models.stack import BlockStack

Array = jax.Array


class VisionTransformer(nn.Module):
  """Image classifier: images [B, rows, columns, channels] -> logits [B, num_classes] in float32.

    x = [cls; patches W_E + b_E] + positions;  x = stack(x);  logits = norm(x_0) W + b

  Patches are squares of `patch_size` that do not overlap, in row-major order; the first of the
  T = 1 + (image_size / patch_size)^2 tokens, a trainable vector, stands for the class. With the
  pooling 'mean' there is no such token, and the mean over all T of norm(x) takes the place of
  norm(x_0). Images of 8-bit values are scaled to [-1, 1].

  Attributes:
    stack: makes the pre-LN BlockStack; `make_vit` builds it from a config.
    features: D.
    pooling: 'class' or 'mean'.
  """

  stack: Callable[..., BlockStack]
  features: int
  image_size: int
  patch_size: int
  num_classes: int
  dropout_rate: float = 0.0
  initializers: Initializers = make_initializers("vit", 1)
  dtype: Any = None
  param_dtype: Any = jnp.float32
  pooling: str = "class"

  @nn.compact
  def __call__(self, images: Array, *, deterministic: bool = True) -> Array:
    """Logits of a batch of images.

    Raises:
      ValueError: the images are not image_size x image_size, patches do not tile them, or an
        unknown pooling.
    """
    if images.ndim != 4 or images.shape[1:3] != (self.image_size, self.image_size):
      raise ValueError(
          f"images must be [batch, {self.image_size}, {self.image_size}, channels], not shape"
          f" {images.shape}; resize them, or set image_size"
      )
    if self.image_size % self.patch_size:
      raise ValueError(
          f"patches of {self.patch_size} do not tile images of {self.image_size}; choose a"
          " patch_size that divides image_size"
      )
    if self.pooling not in ("class", "mean"):
      raise ValueError(f"pooling {self.pooling!r} is neither 'class' nor 'mean'")
    images = scaled(images)
    axes, zeros = nn.with_logical_partitioning, nn.initializers.zeros
    grid_BYXD = nn.Conv(
        self.features,
        (self.patch_size, self.patch_size),
        strides=self.patch_size,
        padding="VALID",
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        kernel_init=axes(self.initializers.kernel, (None, None, None, "embed")),
        bias_init=axes(zeros, ("embed",)),
        name="patch_embed",
    )(images)
    x_BTD = grid_BYXD.reshape(images.shape[0], -1, self.features)
    embedding = self.initializers.embedding
    if self.pooling == "class":
      class_D = self.param("class", axes(embedding, ("embed",)), (self.features,), self.param_dtype)
      class_BTD = jnp.broadcast_to(class_D.astype(x_BTD.dtype), (len(x_BTD), 1, self.features))
      x_BTD = jnp.concatenate([class_BTD, x_BTD], axis=1)
    positions_TD = self.param(
        "positions", axes(embedding, ("positions", "embed")), x_BTD.shape[1:], self.param_dtype
    )
    x_BTD = x_BTD + positions_TD.astype(x_BTD.dtype)
    x_BTD = nn.Dropout(self.dropout_rate)(x_BTD, deterministic=deterministic)
    x_BTD = self.stack(name="stack")(x_BTD, deterministic=deterministic)
    norm = layer_norm("norm", True, self.dtype, self.param_dtype)
    pooled_BD = norm(x_BTD[:, 0]) if self.pooling == "class" else norm(x_BTD).mean(1)
    return nn.Dense(
        self.num_classes,
        dtype=jnp.promote_types(pooled_BD.dtype, jnp.float32),
        param_dtype=self.param_dtype,
        kernel_init=axes(self.initializers.head, ("embed", "vocab")),
        bias_init=axes(zeros, ("vocab",)),
        name="head",
    )(pooled_BD)


def scaled(images: Array) -> Array:
  """8-bit values in [-1, 1]; other images as they are."""
  return images.astype(jnp.float32) / 127.5 - 1.0 if images.dtype == jnp.uint8 else images


def make_vit(config: Any, attention: str, *, evaluation: bool = False) -> VisionTransformer:
  """The Vision Transformer of `config` with the named attention.

  Args:
    config: with the section `model`, a VisionModelConfig, and the attentions' own sections.
    attention: a key of `ATTENTIONS`.
    evaluation: apply `damcha.block_ablation_eval` rather than `block_ablation_train`.

  Raises:
    ConfigError: unknown attention, or options that do not go together.
  """
  model: VisionModelConfig = config.model
  factory = attention_factory(config, attention, model, causal=False, evaluation=evaluation)
  initializers = make_initializers(model.initializer, model.num_layers)
  dtypes = dict(dtype=jnp.dtype(model.dtype), param_dtype=jnp.dtype(model.param_dtype))
  stack = functools.partial(
      BlockStack,
      num_layers=model.num_layers,
      attention=factory.attention,
      mlp_features=model.mlp_features,
      dropout_rate=model.dropout_rate,
      initializers=initializers,
      remat=model.remat,
      scan_layers=model.scan_layers,
      partitioned=True,
      stochastic_depth_rate=model.stochastic_depth_rate,
      **dtypes,
      **factory.stack_options,
  )
  return VisionTransformer(
      stack,
      model.features,
      model.image_size,
      model.patch_size,
      model.num_classes,
      model.dropout_rate,
      initializers,
      pooling=model.pooling,
      **dtypes,
  )
