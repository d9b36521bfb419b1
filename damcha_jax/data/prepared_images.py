"""Prepared image sets on disk: memory-mapped arrays, and what they must contain.

`<data_dir>/images/<name>/` holds `<split>_images.npy` [N, 32, 32, 3] and `<split>_labels.npy` [N],
uint8, of the published splits `train` and `test`, and metadata.json with each file's md5. The
folder appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from damcha_jax.data import image_sets
from damcha_jax.data.arrays import map_array
from damcha_jax.data.image_sets import IMAGE_SIZE, Labelled
from damcha_jax.data.prepared import write_folder
from damcha_jax.errors import DataError
from damcha_jax.files import expanded

FORMAT = 1


def prepared_dir(name: str, data_dir: str | Path) -> Path:
  return expanded(data_dir) / "images" / name


def write_images(name: str, data_dir: str | Path, splits: Mapping[str, Labelled]) -> None:
  """Writes what was read from the verified archive, replacing what is there."""
  arrays = {}
  for split, labelled in splits.items():
    arrays[f"{split}_images"] = labelled.images
    arrays[f"{split}_labels"] = np.ascontiguousarray(labelled.labels["label"])
  write_folder(prepared_dir(name, data_dir), arrays, {
      "format": FORMAT, "name": name, "md5": image_sets.IMAGE_SETS[name].md5,
      "files": {file: hashlib.md5(array).hexdigest() for file, array in arrays.items()}})


def load_images(name: str, data_dir: str | Path) -> dict[str, Labelled]:
  """Maps the published splits into memory, checking formats and counts, not contents.

  Raises:
    DataError: the set is not prepared, or a file is incomplete.
  """
  read_metadata(name, data_dir)
  splits = {}
  for split, count in image_sets.IMAGE_SETS[name].num_images.items():
    images = _load(name, data_dir, f"{split}_images", (count, IMAGE_SIZE, IMAGE_SIZE, 3))
    labels = _load(name, data_dir, f"{split}_labels", (count,))
    splits[split] = Labelled(images, {"label": labels})
  return splits


def _load(name: str, data_dir: str | Path, file: str, shape: tuple[int, ...]) -> np.ndarray:
  path = prepared_dir(name, data_dir) / f"{file}.npy"
  try:
    array = map_array(path)
  except (OSError, ValueError) as error:
    raise _damaged(name, data_dir, f"{path} cannot be read: {error}") from error
  if array.dtype != np.uint8 or array.shape != shape:
    raise _damaged(name, data_dir,
                   f"{path} holds {array.dtype}{list(array.shape)}, not uint8{list(shape)}")
  return array


def read_metadata(name: str, data_dir: str | Path) -> dict[str, Any]:
  """The prepared set's metadata.json, checked against the published archive's hash."""
  folder = prepared_dir(name, data_dir)
  if not folder.exists():
    raise DataError(f"dataset '{name}' is not prepared in {folder}; run 'python -m "
                    f"damcha_jax.data.prepare {name} --data_dir={data_dir}'; without a network, "
                    + image_sets.how_to_get(name, str(data_dir)))
  try:
    metadata = json.loads((folder / "metadata.json").read_text())
    identity, files = (metadata["format"], metadata["md5"]), dict(metadata["files"])
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise _damaged(name, data_dir, f"metadata.json cannot be read: {error}") from error
  image_set = image_sets.IMAGE_SETS[name]
  expected = {f"{split}_{kind}" for split in image_set.num_images for kind in ("images", "labels")}
  if identity != (FORMAT, image_set.md5) or set(files) != expected:
    raise _damaged(name, data_dir, f"metadata.json says md5 {identity[1]}, format {identity[0]}, "
                   f"not md5 {image_set.md5}, format {FORMAT}")
  return metadata


def verify_images(name: str, data_dir: str | Path) -> None:
  """Hashes every prepared byte.

  Raises:
    DataError: a file is not what its md5 says.
  """
  files = read_metadata(name, data_dir)["files"]
  for split, labelled in load_images(name, data_dir).items():
    for kind, array in (("images", labelled.images), ("labels", labelled.labels["label"])):
      found, expected = hashlib.md5(array).hexdigest(), files[f"{split}_{kind}"]
      if found != expected:
        raise _damaged(name, data_dir, f"{split}_{kind}.npy has md5 {found}, not {expected}")


def _damaged(name: str, data_dir: str | Path, what: str) -> DataError:
  return DataError(f"dataset '{name}' in {prepared_dir(name, data_dir)} is damaged: {what}; run "
                   f"'python -m damcha_jax.data.prepare {name} --data_dir={data_dir} --verify' "
                   "to prepare it again")
