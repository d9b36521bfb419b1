"""How many images a second the pipeline of Section 5.5's Vision Transformer makes.

  python -m experiments.image_pipeline --config=configs/vit_s16.py
  python -m experiments.image_pipeline --config=configs/vit_s16.py --config.data.num_workers=2 --config.batch_size=256

On JPEGs of 500x375 pixels that are made for it, about as large as those of ImageNet: one process,
by the seconds that its core spends, of decoding, of decoding and cropping, and of all that training
does; then worker processes, by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import io
import os
from pathlib import Path
import time
from typing import Any

from ml_collections import ConfigDict
import numpy as np
from PIL import Image

from damcha_jax import reporting
from damcha_jax.config import freeze, ImageClassificationConfig
from damcha_jax.data import augmentation
from damcha_jax.data.labelled_images import AugmentedBatches, TrainLabelledImages
from damcha_jax.data.shuffling import ShuffledEpochs
from damcha_jax.reporting import Measurement
from experiments import command_line

NUM_IMAGES = 64
NUM_TIMED = 512  # images in one process
NUM_BATCHES = 8  # from workers


class JpegImages:
  """Smooth shapes with noise, as JPEGs in memory."""

  def __init__(self):
    rng = np.random.default_rng(0)
    self._jpegs = [_jpeg(rng) for _ in range(NUM_IMAGES)]

  def __len__(self) -> int:
    return NUM_IMAGES

  def __getitem__(self, index: int) -> tuple[Image.Image, int]:
    return Image.open(io.BytesIO(self._jpegs[index])).convert("RGB"), index

  @property
  def mean_bytes(self) -> float:
    return float(np.mean([len(jpeg) for jpeg in self._jpegs]))


def _jpeg(rng: np.random.Generator) -> bytes:
  coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3)).astype(np.uint8))
  smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(int)
  noisy = np.clip(smooth + rng.normal(0, 14, smooth.shape), 0, 255).astype(np.uint8)
  data = io.BytesIO()
  Image.fromarray(noisy).save(data, "JPEG", quality=90)
  return data.getvalue()


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Writes `summary.json` with images per second."""
  config = freeze(config, ImageClassificationConfig)
  rows = reporting.summary_rows(_measurements(config, JpegImages()), comparable=False,
                                paper=lambda _: None)
  workdir.mkdir(parents=True, exist_ok=True)
  reporting.write_summary(workdir / "summary.json", "image_pipeline",
                          f"{config.name}:{config.size}", rows)
  print(reporting.format_table(rows))
  print(f"\nResults are in {workdir}")
  return rows


def _measurements(config: ImageClassificationConfig, images: JpegImages) -> Iterator[Measurement]:
  size, chosen = config.model.image_size, config.augmentation
  cropping = dataclasses.replace(chosen, flip=False, randaugment_layers=0)
  draws = lambda number: augmentation.Draws(0, number)
  stages: dict[str, Callable[[int], Any]] = {
      "decoded": lambda number: images[number % NUM_IMAGES],
      "decoded and cropped": lambda number: augmentation.training_image(
          images[number % NUM_IMAGES][0], size, cropping, draws(number)),
      "augmented": lambda number: augmentation.training_image(
          images[number % NUM_IMAGES][0], size, chosen, draws(number)),
  }
  note = f"JPEGs of 500x375 pixels and {images.mean_bytes / 1e3:.0f} kB"
  for variant, make in stages.items():
    start = time.process_time()
    for number in range(NUM_TIMED):
      make(number)
    yield Measurement("pipeline", "synthetic", "train", "images_per_core_second",
                      NUM_TIMED / (time.process_time() - start), "images/s", variant=variant,
                      note=note)
  num_workers = min(config.data.num_workers, os.cpu_count() or 1)
  if num_workers:
    order = ShuffledEpochs(NUM_IMAGES, config.batch_size, 0)
    # What they do first is to start, which is not timed.
    ready = 1 + 2 * num_workers
    source = TrainLabelledImages(AugmentedBatches(images, order, 0, size, chosen),
                                 ready + NUM_BATCHES, num_workers)
    for step in range(ready):
      source.batch_at(step)
    start = time.perf_counter()
    for step in range(ready, ready + NUM_BATCHES):
      source.batch_at(step)
    yield Measurement("pipeline", "synthetic", "train", "images_per_second",
                      NUM_BATCHES * config.batch_size / (time.perf_counter() - start), "images/s",
                      variant=f"{num_workers} workers", note=note)


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "image_pipeline", reads="vit_imagenet")
