"""The image-classification task of Section 5.5: a Vision Transformer with any of the attentions.

A batch holds `inputs` uint8 [B, size, size, 3], `targets` int32 [B] and `weights` float32 [B].
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from types import MappingProxyType
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
import optax

from damcha_jax.config import AugmentationConfig, ConfigError, ImageClassificationConfig
from damcha_jax.data.labelled_images import (AugmentedBatches, EvalLabelledImages,
                                             load_labelled_images, TrainLabelledImages)
from damcha_jax.data.shuffling import ShuffledEpochs
from damcha_jax.models.stack import stack_layers
from damcha_jax.models.vit import make_vit, scaled, VisionTransformer
from damcha_jax.training.decoder import (adaptivity_on, auxiliary_sums, cross_entropy,
                                         parameter_groups)
from damcha_jax.training.task import Batch, EvalSource, ParameterGroup, Task, TrainSource

PyTree = Any

NUM_PROBES = 8  # images on which adaptivity is recorded
PROBED_SPLIT = "training_images"  # evaluated in the way of held-out ones
TOP = 5


def image_classification_task(config: ImageClassificationConfig, attention: str,
                              seed: int) -> Task:
  """The task of one run. Losses are in nats per image.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the order of the images and of their augmentation; the parameters', dropout's and
      mixup's goes to `loop.train`.

  Raises:
    ConfigError: the model cannot be built, or does not fit the data.
    DataError: the images are missing or damaged.
  """
  images = load_labelled_images(config.dataset, config.data.data_dir)
  _check_data(config, images.num_classes, len(images.train))
  size, data = config.model.image_size, config.data
  order = ShuffledEpochs(len(images.train), config.batch_size, seed, jax.process_index(),
                         jax.process_count())
  probe = EvalLabelledImages(images.validation, size, dataclasses.replace(data, num_workers=0),
                             NUM_PROBES)
  return classifier_task(
      config, attention,
      train_source=TrainLabelledImages(
          AugmentedBatches(images.train, order, seed, size, config.augmentation),
          config.num_steps, data.num_workers),
      data_hashes=images.hashes,
      eval_sources={
          "validation": EvalLabelledImages(images.validation, size, data,
                                           data.max_held_out_images),
          PROBED_SPLIT: EvalLabelledImages(images.train, size, data, data.num_probed_images)},
      probe=probe.batch(0, NUM_PROBES))


def _check_data(config: ImageClassificationConfig, num_classes: int, num_images: int) -> None:
  if config.model.num_classes != num_classes:
    raise ConfigError(f"model.num_classes={config.model.num_classes} is not the {num_classes} of "
                      f"'{config.dataset}'; set it to {num_classes}")
  steps = max(1, num_images // config.batch_size)
  if config.steps_per_epoch not in (steps, steps + 1):
    raise ConfigError(f"steps_per_epoch={config.steps_per_epoch} is not what {num_images:,} images "
                      f"take with batch_size={config.batch_size}; set it to {steps}, and num_steps "
                      "to a multiple of it")


def classifier_task(config: ImageClassificationConfig, attention: str, *,
                    train_source: Optional[TrainSource], eval_sources: Mapping[str, EvalSource],
                    probe: Batch, data_hashes: Mapping[str, str] = MappingProxyType({})) -> Task:
  """The task of one run on any images; see `image_classification_task`.

  Args:
    config: the experiment.
    attention: the attention's name.
    train_source, eval_sources: batches as described above.
    probe: a batch on which the adaptivity of the generated metrics is recorded during training.
    data_hashes: as in `Task`.

  Raises:
    ConfigError: the model cannot be built.
  """
  model = make_vit(config, attention)
  eval_model = make_vit(config, attention, evaluation=True)
  size = config.model.image_size
  return Task(
      name=attention,
      model=model,
      init_params=lambda rng: init_params(model, rng, np.zeros((1, size, size, 3), np.uint8)),
      loss_fn=functools.partial(loss_and_sums, model, config.augmentation),
      eval_loss_fn=functools.partial(sums_per_row, eval_model),
      train_source=train_source,
      eval_sources=eval_sources,
      metrics_of=metrics_of,
      selection_metric="nats_per_image",
      parameter_groups=(ParameterGroup(r"(^|/)class$", decay=False), *parameter_groups(config)),
      diagnostics=lambda params: adaptivity_on(model, params, probe),
      ema_decay=config.ema_decay,
      unit="images",
      data_hashes=data_hashes,
  )


def init_params(model: VisionTransformer, rng: jax.Array, images: jax.Array) -> PyTree:
  """Initial parameters; a scanned model gets exactly the numbers of the unrolled one, stacked."""
  unrolled = model.copy(stack=functools.partial(model.stack, scan_layers=False))
  params = unrolled.init(rng, images)["params"]
  return stack_layers(params) if model.stack.keywords["scan_layers"] else params


def loss_and_sums(model: VisionTransformer, augmentation: AugmentationConfig, params: PyTree,
                  batch: Mapping[str, jax.Array],
                  rng: Optional[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`sum_b w_b CE(y_b, p_b) + w A`, w the total weight and A the model's auxiliary losses.

    y = (1 - s) onehot(target) + s / num_classes
    mixup (Zhang et al. 2018): x_b, y_b -> l x_b + (1 - l) x_b', l y_b + (1 - l) y_b'

  One l ~ Beta(alpha, alpha) for the batch, and b' the row before. The sums are w, the
  cross-entropies', how many targets are the likeliest class and among the five likeliest, and those
  of `auxiliary_sums`. Where `rng` is None there is neither mixup nor dropout.
  """
  images = scaled(batch["inputs"])
  targets_BC = optax.smooth_labels(
      jax.nn.one_hot(batch["targets"], model.num_classes), augmentation.label_smoothing)
  rngs = {}
  if rng is not None:
    mixing, rngs["dropout"] = jax.random.split(rng)
    if augmentation.mixup_alpha:
      weight = jax.random.beta(mixing, augmentation.mixup_alpha, augmentation.mixup_alpha)
      mix = lambda rows: weight * rows + (1 - weight) * jnp.roll(rows, 1, axis=0)
      images, targets_BC = mix(images), mix(targets_BC)
  logits_BC, sown = model.apply({"params": params}, images, deterministic=rng is None, rngs=rngs,
                                mutable=["losses"])
  nats_B = optax.softmax_cross_entropy(logits_BC, targets_BC)
  sums = {name: rows_B.sum() for name, rows_B in _sums(logits_BC, nats_B, batch).items()}
  auxiliary = auxiliary_sums(sown, sums["weight"])
  return sums["nats"] + sum(auxiliary.values()), {**sums, **auxiliary}


def sums_per_row(model: VisionTransformer, params: PyTree,
                 batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """`weight`, `nats` and whether the target is the likeliest, or among five, of each row, [B]."""
  logits_BC = model.apply({"params": params}, batch["inputs"])
  return _sums(logits_BC, cross_entropy(logits_BC, batch["targets"]), batch)


def _sums(logits_BC: jax.Array, nats_B: jax.Array,
          batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Classes as likely as the target count as likelier: equal logits are not called right."""
  weights_B = batch["weights"]
  target_B1 = jnp.take_along_axis(logits_BC, batch["targets"][:, None], axis=-1)
  rank_B = (logits_BC >= target_B1).sum(-1)
  return {"weight": weights_B, "nats": weights_B * nats_B,
          "top1": weights_B * (rank_B <= 1), "top5": weights_B * (rank_B <= TOP)}


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
  """Nats per image, and accuracies in percent.

  In training the former has smoothed labels, and with mixup the others count the first of two
  labels. Auxiliary losses, which training has, come under their own names as what they add.
  """
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  return {"nats_per_image": means.pop("nats"), "top1": 100 * means.pop("top1"),
          "top5": 100 * means.pop("top5"), **means}
