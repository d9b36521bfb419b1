"""ImageNet-1K as `damcha_jax.data.prepare imagenet2012` leaves it: TFDS's ArrayRecord files.

`<data_dir>/imagenet2012/<version>/` holds records of a JPEG, a label and a file name, in an order
that TFDS shuffled once, so that the first of a split are a fair sample of it.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any, Optional

from PIL import Image

from damcha_jax.errors import DataError
from damcha_jax.files import expanded, file_hash

NAME = "imagenet2012"
NUM_CLASSES = 1000
NUM_IMAGES = {"train": 1_281_167, "validation": 50_000}
# Of the archives that a manual folder must hold.
ARCHIVES = {"ILSVRC2012_img_train.tar": 147_897_477_120, "ILSVRC2012_img_val.tar": 6_744_924_160}
_HOMEPAGE = "https://image-net.org/download-images"


def how_to_get(data_dir: str | Path, manual_dir: Optional[str] = None) -> str:
  """What to fetch, where to put it, and what runs without it; one line."""
  folder = manual_dir or "DIR"
  files = " and ".join(f"{name} ({size:,} bytes)" for name, size in ARCHIVES.items())
  return (f"register at {_HOMEPAGE}, fetch {files}, put them into {folder} and run 'python -m "
          f"damcha_jax.data.prepare {NAME} --data_dir={data_dir} --manual_dir={folder}', for which "
          "TensorFlow must be installed; or use the sample images that ship with the package: "
          "--config=configs/vit_s16.py:cpu")


def prepared_dir(data_dir: str | Path) -> Path:
  """The folder of the only or newest version that is there; it may not exist."""
  root = expanded(data_dir) / NAME
  versions = sorted(root.glob("*.*.*"), key=_version) if root.is_dir() else []
  return versions[-1] if versions else root


def hashes(data_dir: str | Path) -> dict[str, str]:
  """The hash of the file in which TFDS says what it wrote."""
  path = prepared_dir(data_dir) / "dataset_info.json"
  return {path.name: file_hash(path)} if path.is_file() else {}


def _version(folder: Path) -> tuple[int, ...]:
  return tuple(int(part) if part.isdigit() else -1 for part in folder.name.split("."))


class ImageRecords:
  """The images of one split; opened by each process that reads it."""

  def __init__(self, data_dir: str, split: str):
    self._data_dir, self._split = data_dir, split
    self._folder, self._num_images = prepared_dir(data_dir), NUM_IMAGES[split]

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> tuple[Image.Image, int]:
    """An image in RGB, and its class.

    Raises:
      DataError: the record or its JPEG cannot be read.
    """
    record = self.record(index)
    try:
      return Image.open(io.BytesIO(record["image"])).convert("RGB"), int(record["label"])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
      name = record["file_name"].decode(errors="replace")
      raise self._damaged(f"image {name} (record {index} of '{self._split}') cannot be decoded: "
                          f"{error}") from error

  def record(self, index: int) -> dict[str, Any]:
    """`image`, a JPEG, `label` and `file_name`.

    Raises:
      DataError: the record cannot be read.
    """
    records = self._records
    try:
      return records[index]
    except Exception as error:  # the file format and TFDS have errors of their own
      raise self._damaged(f"record {index} of '{self._split}' cannot be read: {error}") from error

  @functools.cached_property
  def _records(self) -> Any:
    try:
      import tensorflow_datasets as tfds
      import array_record.python.array_record_module  # pylint: disable=unused-import
    except ImportError as error:
      raise DataError(f"reading ImageNet needs a package that is not installed ({error}); run "
                      "pip install 'damcha-jax[imagenet]'") from error
    if not (self._folder / "dataset_info.json").is_file():
      raise DataError(f"dataset '{NAME}' is not prepared in {self._folder}; "
                      + how_to_get(self._data_dir))
    try:
      records = tfds.builder_from_directory(self._folder).as_data_source(
          split=self._split, decoders={"image": tfds.decode.SkipDecoding()})
      found = len(records)
    except Exception as error:  # as above
      raise self._damaged(f"'{self._split}' cannot be read: {error}") from error
    if found != self._num_images:
      raise self._damaged(f"'{self._split}' holds {found:,} images, not the "
                          f"{self._num_images:,} published")
    return records

  def _damaged(self, what: str) -> DataError:
    return DataError(f"dataset '{NAME}' in {self._folder} is damaged: {what}; run 'python -m "
                     f"damcha_jax.data.prepare {NAME} --data_dir={self._data_dir} --verify' with "
                     "the --manual_dir that holds the archives, to prepare it again")

  def __getstate__(self) -> dict[str, Any]:
    return {key: value for key, value in self.__dict__.items() if key != "_records"}
