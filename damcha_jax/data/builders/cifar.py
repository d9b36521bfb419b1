"""CIFAR-10 and CIFAR-100 as TFDS datasets, made without TensorFlow.

Names, version and features are those of TFDS's own builders, which read what these write:
`tfds.data_source('cifar10', data_dir=...)`. So they are not registered a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
import io
from pathlib import Path
from typing import Any

from PIL import Image
import tensorflow_datasets as tfds

from damcha_jax.data import archives, image_sets


class CifarBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Images of 32x32 pixels, as PNG, with their labels.

  The published archive comes from `manual_dir` or from its URL, and its size, md5 and counts are
  verified. MANUAL_DOWNLOAD_INSTRUCTIONS stays unset, because TFDS would then insist on the manual
  folder.
  """

  VERSION = tfds.core.Version("3.0.2")

  @property
  def image_set(self) -> image_sets.ImageSet:
    return image_sets.IMAGE_SETS[self.name]

  def _info(self) -> tfds.core.DatasetInfo:
    size = image_sets.IMAGE_SIZE
    return tfds.core.DatasetInfo(
        builder=self,
        description=f"60,000 images of {size}x{size} pixels in {self.image_set.num_classes} "
        "classes of equal size.",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        license=self.image_set.license,
        features=tfds.features.FeaturesDict({
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(size, size, 3)),
            **{name: tfds.features.ClassLabel(num_classes=count)
               for name, (_, count) in self.image_set.label_names.items()},
        }),
        supervised_keys=("image", "label"))

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
    # The public `manual_dir` refuses a builder without MANUAL_DOWNLOAD_INSTRUCTIONS.
    manual_dir = dl_manager._manual_dir
    path = archives.find(self.image_set, Path(manual_dir)) if manual_dir else None
    path = path or Path(dl_manager.download(self.image_set.url))
    splits, names = image_sets.read_verified(self.image_set, path)
    for label, classes in names.items():
      self.info.features[label].names = classes
    return {split: self._generate_examples(split, labelled) for split, labelled in splits.items()}

  def _generate_examples(self, split: str, labelled: image_sets.Labelled
                         ) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, image in enumerate(labelled.images):
      png = io.BytesIO()
      Image.fromarray(image).save(png, "PNG")
      yield index, {"id": f"{split}_{index:05d}", "image": png.getvalue(),
                    **{name: int(values[index]) for name, values in labelled.labels.items()}}


class Cifar10(CifarBuilder, skip_registration=True):
  """10 classes of 6,000 images."""


class Cifar100(CifarBuilder, skip_registration=True):
  """100 classes of 600 images, in 20 coarse ones."""
