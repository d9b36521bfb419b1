"""A small data set in the form of the prepared ImageNet, made without TensorFlow."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
import tensorflow_datasets as tfds

NUM_IMAGES = {"train": 22, "validation": 9}


def jpeg(number: int) -> bytes:
  """A smooth image of its own size, told from the others by its colours."""
  rng = np.random.default_rng(number)
  coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3)).astype(np.uint8))
  data = io.BytesIO()
  coarse.resize((40 + number % 7, 30 + number % 5)).save(data, "JPEG", quality=95)
  return data.getvalue()


class Imagenet2012(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Records with the features and the name of TFDS's own."""

  VERSION = tfds.core.Version("5.1.0")
  name = "imagenet2012"
  damaged = -1  # the image of this number is cut short

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(num_classes=1000),
        "file_name": tfds.features.Text()}))

  def _split_generators(self, dl_manager):
    del dl_manager
    return {split: self._generate_examples(100 * index, count)
            for index, (split, count) in enumerate(NUM_IMAGES.items())}

  def _generate_examples(self, first, count):
    for number in range(first, first + count):
      data = jpeg(number)
      yield number, {"image": data[:-100] if number == self.damaged else data,
                     "label": number, "file_name": f"n{number}.JPEG"}


def write_records(data_dir: Path, damaged: int = -1) -> None:
  """Writes the data set, with `NUM_IMAGES` images."""
  tfds.disable_progress_bar()
  builder = Imagenet2012(data_dir=str(data_dir), file_format="array_record")
  builder.damaged = damaged
  builder.download_and_prepare()
