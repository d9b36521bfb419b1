"""The task of a causal decoder on tokens, whatever they stand for: text, pixels, translations.

A batch holds `inputs`, `targets` (int32) and `weights` (float32), all [B, T], and, where rows are
padded or packed, `padding_mask` or `segment_ids` [B, T] as `DecoderLM` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from damcha_jax.analysis.geometry import adaptivity_by_layer
from damcha_jax.config import DecoderConfig, TransformerConfig
from damcha_jax.models.decoder import DecoderLM, init_params, make_decoder
from damcha_jax.training.task import Batch, EvalSource, ParameterGroup, Task, TrainSource

PyTree = Any


def decoder_task(config: DecoderConfig, attention: str, *, train_source: TrainSource,
                 eval_sources: Mapping[str, EvalSource],
                 metrics_of: Callable[[Mapping[str, float]], dict[str, float]],
                 probe: Batch, data_hashes: Mapping[str, str] = MappingProxyType({})) -> Task:
  """The task of one run. Losses are in nats; the best checkpoint has the fewest per token.

  Args:
    config: the experiment.
    attention: the attention's name.
    train_source, eval_sources: batches as described above.
    metrics_of: as in `Task`; must give `nats_per_token`.
    probe: a batch on which the adaptivity of the generated metrics is recorded during training.
    data_hashes: as in `Task`.

  Raises:
    ConfigError: the model cannot be built.
  """
  model = make_decoder(config, attention)
  eval_model = make_decoder(config, attention, evaluation=True)
  return Task(
      name=attention,
      model=model,
      init_params=lambda rng: init_params(
          model, rng, jnp.zeros((1, config.context_length), jnp.int32)),
      loss_fn=lambda params, batch, rng: loss_and_sums(model, params, batch, rng),
      eval_loss_fn=lambda params, batch: sums_per_row(eval_model, params, batch),
      train_source=train_source,
      eval_sources=eval_sources,
      metrics_of=metrics_of,
      selection_metric="nats_per_token",
      parameter_groups=parameter_groups(config),
      diagnostics=lambda params: adaptivity_on(model, params, probe),
      data_hashes=data_hashes,
  )


def adaptivity_on(model: nn.Module, params: PyTree, probe: Batch) -> dict[str, jax.Array]:
  """The adaptivity of the metrics that the model generates on a batch."""
  _, state = model.apply({"params": params}, probe["inputs"], **_layout(probe),
                         mutable=["intermediates"])
  return adaptivity_by_layer(state.get("intermediates", {}))


def loss_and_sums(model: DecoderLM, params: PyTree, batch: Mapping[str, jax.Array],
                  rng: Optional[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`sum_t w_t (-log p(target_t)) + w A`, w the total weight and A the model's auxiliary losses.

  A is the sum of what the layers sow into the collection `losses`; divided by w it is added to the
  mean cross-entropy as it is. The sums are w, the cross-entropies' and, under the name of each
  auxiliary loss, w times its sum over the layers. Dropout is off where `rng` is None.
  """
  logits_BTV, sown = model.apply(
      {"params": params}, batch["inputs"], deterministic=rng is None, **_layout(batch),
      rngs={} if rng is None else {"dropout": rng}, mutable=["losses"])
  weights_BT = batch["weights"]
  weight = weights_BT.sum()
  nats = jnp.sum(weights_BT * cross_entropy(logits_BTV, batch["targets"]))
  auxiliary = auxiliary_sums(sown, weight)
  return nats + sum(auxiliary.values()), {"weight": weight, "nats": nats, **auxiliary}


def auxiliary_sums(sown: Mapping[str, Any], weight: jax.Array) -> dict[str, jax.Array]:
  """By the name of each loss that layers sowed, `weight` times its sum over them."""
  sums = {}
  for path, loss in jax.tree_util.tree_leaves_with_path(sown):
    name = path[-2].key  # .. / name / index: what is sown comes as a tuple
    # Under scan the layers' losses are stacked on an axis.
    sums[name] = sums.get(name, 0.0) + weight * jnp.sum(loss)
  return sums


def sums_per_row(model: DecoderLM, params: PyTree,
                 batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """`weight` and `nats` of each row, [B]; auxiliary losses are no part of a likelihood."""
  logits_BTV = model.apply({"params": params}, batch["inputs"], **_layout(batch))
  weights_BT = batch["weights"]
  nats_BT = weights_BT * cross_entropy(logits_BTV, batch["targets"])
  return {"weight": weights_BT.sum(-1), "nats": nats_BT.sum(-1)}


def _layout(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """What the batch says of padding and of packed documents."""
  return {name: batch[name] for name in ("padding_mask", "segment_ids") if name in batch}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """-log softmax(logits)[target] in nats, at least in float32: [B, T, V], [B, T] -> [B, T]."""
  wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
  return optax.softmax_cross_entropy_with_integer_labels(wide, targets_BT)


def parameter_groups(config: TransformerConfig) -> tuple[ParameterGroup, ...]:
  """Weight decay on matrices only: not on biases, norms, embeddings, positions, context vectors.

  (nanoGPT decays everything with two or more axes, embeddings and positions included.)

  What `rowsum` stores in place of H blocks counts as H copies. The full-width form has no blocks.
  """
  damcha = config.damcha
  summed = damcha.parameterization == "rowsum" and damcha.form == "head_slice"
  copies = config.model.num_heads if summed else 1
  return (
      ParameterGroup(r"(^|/)generator/out_kernel$", decay=True, copies=copies),
      ParameterGroup(r"(^|/)generator/out_bias$", decay=False, copies=copies),
      ParameterGroup(r"(^|/)metric_blocks$", decay=True, copies=copies),
      ParameterGroup(r"(^|/)(embedding|positions|vector|log_half_life)$", decay=False),
      ParameterGroup(r"(^|/)(\w+_)?(scale|bias)$", decay=False),
      ParameterGroup(r"(^|/)(head|(\w+_)?kernel)$", decay=True),
      # Matrices of the authors' attentions that are no layer of their own.
      ParameterGroup(r"(^|/)attention/(mix_\w+|combine_\w+|query|key|value)$", decay=True),
  )
