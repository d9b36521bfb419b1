"""Prepares ImageNet-1K from TFDS's catalogue, as ArrayRecord files that training reads.

TFDS's builder needs TensorFlow, which is why nothing but this module makes them.
"""

from __future__ import annotations

import collections
import importlib.util
from pathlib import Path
import shutil
import sys
from typing import Optional

from damcha_jax.data import imagenet
from damcha_jax.errors import DataError
from damcha_jax.files import expanded

_IMAGES_OF_A_CLASS = 50  # in the validation split


def prepare(name: str, data_dir: str, manual_dir: Optional[str] = None,
            verify: bool = False) -> None:
  """Prepares ImageNet unless it is there already, and prints what is there.

  Args:
    name: 'imagenet2012'.
    data_dir: where prepared data goes.
    manual_dir: holds the two archives.
    verify: decode every image that is there.

  Raises:
    DataError: the data is missing, or not what was published, or cannot be written.
  """
  folder = imagenet.prepared_dir(data_dir)
  if (folder / "dataset_info.json").is_file() and _is_sound(data_dir, verify):
    print(f"{name}: already prepared" + (", every image verified" if verify else ""))
  else:
    # Only once what replaces it can be made is what is damaged deleted.
    _check_archives(data_dir, manual_dir)
    _write_records(folder, data_dir, manual_dir)
    _check(data_dir, contents=False)
  for split, count in imagenet.NUM_IMAGES.items():
    print(f"{name}/{split}: {count:,} images, in {imagenet.prepared_dir(data_dir)}")


def _is_sound(data_dir: str, contents: bool) -> bool:
  try:
    _check(data_dir, contents)
  except DataError as error:
    print(f"{error.args[0].split('; run ')[0]}; preparing it again", file=sys.stderr)
    return False
  return True


def _check(data_dir: str, contents: bool) -> None:
  """Raises DataError unless as many images as published are there and, on request, can be read."""
  for split in imagenet.NUM_IMAGES:
    records = imagenet.ImageRecords(data_dir, split)
    num_images, num_of_class = len(records), collections.Counter()
    for index in range(num_images if contents else 0):
      num_of_class[records[index][1]] += 1
    of_a_class = set(num_of_class.values())
    if contents and split == "validation" and (
        len(num_of_class) != imagenet.NUM_CLASSES or of_a_class != {_IMAGES_OF_A_CLASS}):
      raise DataError(f"dataset '{imagenet.NAME}' in {imagenet.prepared_dir(data_dir)} has other "
                      f"than {_IMAGES_OF_A_CLASS} {split} images of some class")


def _check_archives(data_dir: str, manual_dir: Optional[str]) -> None:
  folder = expanded(manual_dir or data_dir)
  for name, size in imagenet.ARCHIVES.items():
    path = folder / name
    if manual_dir is None or not path.is_file():
      raise DataError(f"ImageNet cannot be downloaded without an account, and {name} is not in "
                      f"{manual_dir or 'any --manual_dir'}; "
                      + imagenet.how_to_get(data_dir, manual_dir))
    if path.stat().st_size != size:
      raise DataError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}; fetch it again; "
                      + imagenet.how_to_get(data_dir, manual_dir))


def _write_records(damaged: Path, data_dir: str, manual_dir: Optional[str]) -> None:
  if importlib.util.find_spec("tensorflow") is None:
    raise DataError(f"preparing '{imagenet.NAME}' needs TensorFlow, which is not installed; run "
                    "pip install 'damcha-jax[prepare]'")
  try:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    builder = tfds.builder(imagenet.NAME, file_format="array_record",
                           data_dir=str(expanded(data_dir)))
    shutil.rmtree(damaged, ignore_errors=True)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(
        manual_dir=str(expanded(manual_dir))))
  except Exception as error:  # TFDS and file formats have many kinds
    raise DataError(f"TFDS cannot prepare '{imagenet.NAME}': {error}; free some space (it takes "
                    "300 GB beside the archives) or choose another --data_dir") from error
