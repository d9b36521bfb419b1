"""The image-generation task of Section 5.1: next-pixel prediction with any of the attentions."""

from __future__ import annotations

from collections.abc import Mapping
import functools
import math

import jax

from damcha_jax.config import ConfigError, ImageGenerationConfig
from damcha_jax.config.image_generation import PIXEL_TOKENS
from damcha_jax.data.images import EvalImages, ImageData, TrainImages, load_image_data
from damcha_jax.training.decoder import decoder_task
from damcha_jax.training.task import Task

NUM_PROBES = 8  # images on which adaptivity is recorded


def image_generation_task(config: ImageGenerationConfig, attention: str, seed: int) -> Task:
  """The task of one run. Losses are in nats per token; a token is a pixel, or one of its channels.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the order of the images; the parameters' and dropout's goes to `loop.train`.

  Raises:
    ConfigError: the model cannot be built, or its vocabulary does not hold every class.
    DataError: the images are missing or damaged.
  """
  data = load_image_data(config.dataset, config.data)
  _check_vocabulary(config, data)
  begin = {split: data.begin_tokens(split, config.data.class_conditional)
           for split in ("train", "validation", "test")}
  eval_sources = {split: EvalImages(data.tokens[split], begin[split])
                  for split in ("validation", "test")}
  validation = eval_sources["validation"]
  return decoder_task(
      config, attention,
      train_source=TrainImages(data.tokens["train"], begin["train"], config.batch_size, seed,
                               jax.process_index(), jax.process_count()),
      eval_sources=eval_sources,
      metrics_of=functools.partial(metrics_of, config.context_length),
      data_hashes=data.hashes,
      probe=validation.batch(0, min(NUM_PROBES, len(validation))))


def _check_vocabulary(config: ImageGenerationConfig, data: ImageData) -> None:
  needed = PIXEL_TOKENS + (data.num_classes if config.data.class_conditional else 0)
  if config.model.vocab_size < needed:
    raise ConfigError(f"model.vocab_size {config.model.vocab_size} does not hold {PIXEL_TOKENS} "
                      f"pixel values and the {data.num_classes} classes of '{config.dataset}'; set "
                      f"it to {needed}, or data.class_conditional=False")


def metrics_of(tokens_per_image: int, sums: Mapping[str, float]) -> dict[str, float]:
  """Nats per token, bits per token = nats / ln 2, and nats per image, summed over its tokens.

  Auxiliary losses, which training has, come under their own names as what they add to the loss.
  """
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  nats = means.pop("nats")
  return {"nats_per_token": nats, "bits_per_token": nats / math.log(2),
          "nats_per_image": nats * tokens_per_image, **means}
