"""Any attention by name, with the options of an experiment's config, for any model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import AttentionsConfig, AuthorsConfig, ConfigError, DamchaConfig
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.generator import StaticMetric
from damcha_jax.models.layers import make_initializers

# The attentions whose options are the section of their name.
_SECTIONS = {field.name for field in dataclasses.fields(AttentionsConfig)} - {"damcha", "authors"}
# Those that keep their own papers' initial values, whatever `model.initializer` says.
_OWN_INITIAL_VALUES = ("tha", "dcmha", "colmha", "moa", "mma")
_AUTHORS_OPTIONS: dict[str, Callable[[AuthorsConfig], dict[str, Any]]] = {
    "authors_dcmha": lambda authors: dict(router_rank=authors.router_rank),
    "authors_moa": lambda authors: dict(expert_factor=authors.expert_factor),
    "authors_mma": lambda authors: dict(
        window=authors.local_window, allow_future_leak=authors.allow_future_leak),
}


class AttentionFactory(NamedTuple):
  """How a stack makes its attentions.

  Attributes:
    attention: makes one layer's attention; takes further fields, such as `name`.
    stack_options: what a BlockStack must be given besides, such as the generator to share.
  """

  attention: Callable[..., nn.Module]
  stack_options: dict[str, Any]


def attention_factory(
    sections: Any,
    name: str,
    model: Any,
    *,
    causal: bool = True,
    evaluation: bool = False,
    decode: bool = False,
) -> AttentionFactory:
  """The attentions of one model.

  Args:
    sections: a config with the attentions' sections, those of `AttentionsConfig`.
    name: a key of `ATTENTIONS`.
    model: the config's section with the fields num_layers, num_heads, features, initializer, dtype,
      param_dtype, attention_dropout_rate and attention_implementation.
    causal: whether to hide the future.
    evaluation: apply `damcha.block_ablation_eval` rather than `block_ablation_train`.
    decode: keep a key-value cache.

  Raises:
    ConfigError: unknown attention, or options that do not go together.
  """
  if name not in ATTENTIONS:
    raise ConfigError(f"unknown attention '{name}'; choose from {', '.join(ATTENTIONS)}")
  if model.features % model.num_heads:
    raise ConfigError(
        f"model.num_heads={model.num_heads} does not divide model.features={model.features};"
        " choose a number of heads that does"
    )
  if model.attention_implementation == "cudnn" and not (
      jax.default_backend() == "gpu" and model.dtype == "bfloat16"
  ):
    raise ConfigError(
        "model.attention_implementation='cudnn' needs a GPU and model.dtype='bfloat16'; use 'auto', "
        "and for a workdir that has 'cudnn' a GPU"
    )
  if model.attention_implementation == "pallas" and jax.default_backend() != "tpu":
    raise ConfigError("model.attention_implementation='pallas' needs a TPU; use 'auto', and for a "
                      "workdir that has 'pallas' a TPU")
  common = dict(
      num_heads=model.num_heads,
      dropout_rate=model.attention_dropout_rate,
      dtype=jnp.dtype(model.dtype),
      param_dtype=jnp.dtype(model.param_dtype),
      causal=causal,
      implementation=model.attention_implementation,
      partitioned=True,
      decode=decode,
  )
  if name not in _OWN_INITIAL_VALUES:
    initializers = make_initializers(model.initializer, model.num_layers)
    common.update(kernel_init=initializers.kernel, out_kernel_init=initializers.residual_kernel)
  if name in _AUTHORS_OPTIONS:
    common.update(_AUTHORS_OPTIONS[name](sections.authors))
  elif name in _SECTIONS:
    common.update(dataclasses.asdict(getattr(sections, name)))
  try:
    if name == "damcha":
      factory = _damcha(sections.damcha, model, common, evaluation)
    else:
      factory = AttentionFactory(functools.partial(ATTENTIONS[name], **common), {})
    factory.attention(parent=None)  # raises for options that do not go together
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return factory


def _damcha(
    damcha: DamchaConfig, model: Any, common: dict[str, Any], evaluation: bool
) -> AttentionFactory:
  generator = _metric_module(damcha, model, evaluation)
  attention = functools.partial(
      ATTENTIONS["damcha"],
      context=damcha.context,
      stride=damcha.stride,
      half_life=damcha.half_life,
      mix_slices=damcha.mix_slices,
      form=damcha.form,
      update_rank=damcha.update_rank,
      static_part=damcha.static_part,
      allow_future_leak=damcha.allow_future_leak,
      **common,
  )
  no_generator = damcha.form == "full_width" and damcha.update_rank == 0
  if no_generator:
    return AttentionFactory(attention, {})
  if damcha.metric == "static" or damcha.sharing == "none":
    # A new module for every layer: one instance in all layers would be one set of parameters.
    own = lambda **fields: attention(generator=generator(parent=None), **fields)
    return AttentionFactory(own, {})
  return AttentionFactory(attention, dict(
      generator=generator,
      sharing=damcha.sharing,
      context=damcha.context,
      stride=damcha.stride,
      half_life=damcha.half_life,
      causal=common["causal"],
      allow_future_leak=damcha.allow_future_leak,
  ))


def _metric_module(damcha: DamchaConfig, model: Any, evaluation: bool) -> Callable[..., nn.Module]:
  ablation = damcha.block_ablation_eval if evaluation else damcha.block_ablation_train
  common = dict(
      num_heads=model.num_heads,
      parameterization=damcha.parameterization,
      block_ablation=ablation,
      partitioned=True,
      param_dtype=jnp.dtype(model.param_dtype),
  )
  if damcha.metric == "static":
    if damcha.form == "full_width":
      raise ConfigError("damcha.metric='static' is the head-slice ablation; the static full-width"
                        " form is damcha.update_rank=0")
    return functools.partial(StaticMetric, features=model.features, **common)
  if damcha.form == "full_width":
    columns = model.features if damcha.update_rank is None else damcha.update_rank
    common.update(row_features=model.features, column_features=columns, zero_output=True)
  initializer = damcha.initializer
  if initializer is None and model.initializer == "vit" and damcha.preset == "paper":
    initializer = "vit"  # the authors' own in that model
  return functools.partial(
      MetricGenerator,
      widths=damcha.widths,
      preset=damcha.preset,
      initializer=initializer,
      residual=damcha.residual,
      normalize_context=damcha.normalize_context,
      dtype=jnp.dtype(model.dtype),
      **common,
  )
