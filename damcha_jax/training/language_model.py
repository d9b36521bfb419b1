"""The language-model task of Section 5.4: next-byte prediction with any of the attentions."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
import optax

from damcha_jax.analysis.geometry import adaptivity_by_layer
from damcha_jax.config import ConfigError, LanguageModelConfig
from damcha_jax.data.sources import EvalWindows, TrainWindows, load_corpus
from damcha_jax.models.decoder import DecoderLM, init_params, make_decoder
from damcha_jax.training.task import ParameterGroup, Task

PyTree = Any
NUM_BYTES = 256


def language_model_task(config: LanguageModelConfig, attention: str, seed: int) -> Task:
  """The task of one run. Losses are in nats per token; a token is a byte.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the training windows; the parameters' and dropout's goes to `loop.train`.

  Raises:
    ConfigError: the model cannot be built, or its vocabulary does not hold every byte.
    DataError: the corpus is missing or damaged.
  """
  if config.model.vocab_size < NUM_BYTES:
    raise ConfigError(f"model.vocab_size {config.model.vocab_size} does not hold the {NUM_BYTES} "
                      "byte values; set it to 256")
  model = make_decoder(config, attention)
  eval_model = make_decoder(config, attention, evaluation=True)
  corpus = load_corpus(config.dataset, config.data)
  return Task(
      name=attention,
      model=model,
      init_params=lambda rng: init_params(
          model, rng, jnp.zeros((1, config.context_length), jnp.int32)),
      loss_fn=lambda params, batch, rng: loss_and_sums(model, params, batch, rng),
      eval_loss_fn=lambda params, batch: sums_per_row(eval_model, params, batch),
      train_source=TrainWindows(corpus.train, config.batch_size, config.context_length, seed,
                                jax.process_index(), jax.process_count()),
      eval_sources={
          split if len(arrays) == 1 else f"{split}/{source}":
              EvalWindows(array, config.context_length)
          for split, arrays in (("validation", corpus.validation), ("test", corpus.test))
          for source, array in arrays.items()},
      metrics_of=metrics_of,
      selection_metric="nats_per_token",
      parameter_groups=parameter_groups(config),
      diagnostics=lambda params: diagnostics(model, params, corpus.validation),
  )


def diagnostics(model: DecoderLM, params: PyTree, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Adaptivity of the generated metrics over 8 windows spread evenly over each source."""
  inputs = []
  for array in arrays.values():
    windows = EvalWindows(array, model.context_length)
    starts = [index * len(windows) // 8 for index in range(8)]
    inputs += [windows.batch(start, 1)["inputs"] for start in starts]
  _, state = model.apply({"params": params}, jnp.concatenate(inputs), mutable=["intermediates"])
  return adaptivity_by_layer(state.get("intermediates", {}))


def loss_and_sums(model: DecoderLM, params: PyTree, batch: Mapping[str, jax.Array],
                  rng: Optional[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`sum_t w_t (-log p(target_t)) + w A`, w the total weight and A the model's auxiliary losses.

  A is the sum of what the layers sow into the collection `losses`; divided by w it is added to the
  mean cross-entropy as it is. The sums are w, the cross-entropies' and, under the name of each
  auxiliary loss, w times its sum over the layers. Dropout is off where `rng` is None.
  """
  logits_BTV, sown = model.apply(
      {"params": params}, batch["inputs"], deterministic=rng is None,
      rngs={} if rng is None else {"dropout": rng}, mutable=["losses"])
  weights_BT = batch["weights"]
  weight = weights_BT.sum()
  nats = jnp.sum(weights_BT * cross_entropy(logits_BTV, batch["targets"]))
  auxiliary = {}
  for path, loss in jax.tree_util.tree_leaves_with_path(sown):
    name = path[-2].key  # .. / name / index: what is sown comes as a tuple
    # Under scan the layers' losses are stacked on an axis.
    auxiliary[name] = auxiliary.get(name, 0.0) + weight * jnp.sum(loss)
  return nats + sum(auxiliary.values()), {"weight": weight, "nats": nats, **auxiliary}


def sums_per_row(model: DecoderLM, params: PyTree,
                 batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """`weight` and `nats` of each row, [B]; auxiliary losses are no part of a likelihood."""
  logits_BTV = model.apply({"params": params}, batch["inputs"])
  weights_BT = batch["weights"]
  nats_BT = weights_BT * cross_entropy(logits_BTV, batch["targets"])
  return {"weight": weights_BT.sum(-1), "nats": nats_BT.sum(-1)}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  """-log softmax(logits)[target] in nats, at least in float32: [B, T, V], [B, T] -> [B, T]."""
  wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
  return optax.softmax_cross_entropy_with_integer_labels(wide, targets_BT)


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
  """Nats per token, bits per byte = nats / ln 2 (tokens are bytes), perplexity = exp(nats).

  Auxiliary losses, which training has, come under their own names as what they add to the loss.
  """
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  nats = means.pop("nats")
  return {"nats_per_token": nats, "bits_per_byte": nats / math.log(2),
          "perplexity": math.exp(min(nats, 700.0)),  # exp(710) overflows a float
          **means}


def parameter_groups(config: LanguageModelConfig) -> tuple[ParameterGroup, ...]:
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
      ParameterGroup(r"(^|/)(embedding|positions|vector|scale|bias|\w+_bias)$", decay=False),
      ParameterGroup(r"(^|/)(head|kernel|\w+_kernel)$", decay=True),
  )
