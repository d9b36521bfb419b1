"""The facts about the real image sets, and their published archives as arrays."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
from pathlib import Path
import tarfile
from typing import NamedTuple, Optional
import zlib

import numpy as np

from damcha_jax.errors import DataError

IMAGE_SIZE = 32
_PIXELS = 3 * IMAGE_SIZE**2


@dataclasses.dataclass(frozen=True)
class ImageSet:
  """Images of 32x32 pixels as they are published: records of label bytes and three planes."""

  name: str
  url: str  # of the archive
  num_bytes: int  # of the archive
  md5: str  # of the archive
  files: Mapping[str, tuple[str, ...]]  # split -> files in the archive
  num_images: Mapping[str, int]  # by split; every class has as many
  label_names: Mapping[str, tuple[str, int]]  # label byte -> file of names, number of classes
  license: str = "Krizhevsky, 2009; no licence is stated"

  @property
  def archive(self) -> str:
    return self.url.rpartition("/")[2]

  @property
  def num_classes(self) -> int:
    return self.label_names["label"][1]


class Labelled(NamedTuple):
  """Images [N, 32, 32, 3] and, by name, labels [N], all uint8."""

  images: np.ndarray
  labels: dict[str, np.ndarray]


_NUM_IMAGES = {"train": 50_000, "test": 10_000}
IMAGE_SETS = {
    image_set.name: image_set for image_set in (
        ImageSet(
            "cifar10", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            {"train": tuple(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)),
             "test": ("cifar-10-batches-bin/test_batch.bin",)},
            _NUM_IMAGES, {"label": ("cifar-10-batches-bin/batches.meta.txt", 10)}),
        ImageSet(
            "cifar100", "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", 168_513_733,
            "03b5dce01913d631647c71ecec9e9cb8",
            {"train": ("cifar-100-binary/train.bin",), "test": ("cifar-100-binary/test.bin",)},
            _NUM_IMAGES, {"coarse_label": ("cifar-100-binary/coarse_label_names.txt", 20),
                          "label": ("cifar-100-binary/fine_label_names.txt", 100)}),
    )
}


def how_to_get(name: str, data_dir: str, manual_dir: Optional[str] = None) -> str:
  """What to fetch, its hash, where to put it, and what runs without it; one line."""
  image_set = IMAGE_SETS[name]
  folder = manual_dir or "DIR"
  return (f"fetch {image_set.url} on a machine with a network ({image_set.num_bytes:,} bytes, md5 "
          f"{image_set.md5}), put {image_set.archive} into {folder} and run 'python -m "
          f"damcha_jax.data.prepare {name} --data_dir={data_dir} --manual_dir={folder}'; or use "
          f"the sample images that ship with the package: --config=configs/{name}.py:cpu")


def read_verified(image_set: ImageSet, path: Path) -> tuple[dict[str, Labelled],
                                                            dict[str, list[str]]]:
  """Every split of the archive, and the names of the classes of each label.

  Raises:
    DataError: the archive's size, md5 or content is not what it should be.
  """
  again = f"delete it and fetch {image_set.url} again (md5 {image_set.md5})"
  try:
    if path.stat().st_size != image_set.num_bytes:
      raise DataError(f"{path} has {path.stat().st_size:,} bytes, not {image_set.num_bytes:,}; "
                      + again)
    with open(path, "rb") as file:
      md5 = hashlib.file_digest(file, "md5").hexdigest()
    if md5 != image_set.md5:
      raise DataError(f"{path} has md5 {md5}, not {image_set.md5}; {again}")
    with tarfile.open(path) as archive:
      read = lambda name: archive.extractfile(name).read()
      splits = {split: _decode(image_set, split, b"".join(map(read, names)))
                for split, names in image_set.files.items()}
      names = {label: read(file).decode().split() for label, (file, _)
               in image_set.label_names.items()}
  except (OSError, KeyError, EOFError, tarfile.TarError, zlib.error) as error:
    raise DataError(f"{path} cannot be read: {error}; {again}") from error
  return splits, names


def _decode(image_set: ImageSet, split: str, data: bytes) -> Labelled:
  """The records of one split, checked: as many as there should be, and as many of every class."""
  num_labels, expected = len(image_set.label_names), image_set.num_images[split]
  if len(data) != expected * (num_labels + _PIXELS):
    raise DataError(f"'{image_set.name}' has {len(data):,} bytes of {split} records, not "
                    f"{expected:,} records of {num_labels + _PIXELS:,}")
  records = np.frombuffer(data, np.uint8).reshape(expected, num_labels + _PIXELS)
  images = records[:, num_labels:].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).transpose(0, 2, 3, 1)
  labels = dict(zip(image_set.label_names, records[:, :num_labels].T))
  for name, (_, num_classes) in image_set.label_names.items():
    counts = np.bincount(labels[name], minlength=num_classes)
    if counts.tolist() != [expected // num_classes] * num_classes:
      raise DataError(f"'{image_set.name}' has other than {expected // num_classes} {split} images "
                      f"of some {name}")
  return Labelled(np.ascontiguousarray(images), labels)
