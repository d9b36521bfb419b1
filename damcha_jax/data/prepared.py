"""Prepared corpora on disk: one memory-mapped array per split, and what they must contain.

`<data_dir>/bytes/<name>/` holds train.npy, validation.npy, test.npy (uint8) and metadata.json
with each split's size and md5. The folder appears whole, by one rename, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
import shutil
import tempfile
from typing import Any

import numpy as np

from damcha_jax.data import corpora
from damcha_jax.data.arrays import map_array
from damcha_jax.errors import DataError
from damcha_jax.files import expanded

FORMAT = 1
DEFAULT_DATA_DIR = "~/.cache/damcha_jax"  # as in configs/


def prepared_dir(name: str, data_dir: str | Path) -> Path:
  return expanded(data_dir) / "bytes" / name


def load_prepared(name: str, data_dir: str | Path) -> dict[str, np.ndarray]:
  """Maps the splits of corpus `name` into memory, checking formats and counts, not contents.

  Raises:
    DataError: the corpus is not prepared, or a file is incomplete.
  """
  folder = prepared_dir(name, data_dir)
  metadata = read_metadata(name, data_dir)
  splits = {}
  for split in corpora.SPLITS:
    path = folder / f"{split}.npy"
    expected = metadata["splits"][split]["num_bytes"]
    try:
      array = map_array(path)
    except (OSError, ValueError) as error:
      raise _damaged(name, data_dir, f"{path} cannot be read: {error}") from error
    if array.dtype != np.uint8 or array.shape != (expected,):
      raise _damaged(name, data_dir,
                     f"{path} holds {array.dtype}{list(array.shape)}, not uint8[{expected}]")
    splits[split] = array
  return splits


def read_metadata(name: str, data_dir: str | Path) -> dict[str, Any]:
  """The prepared corpus's metadata.json, checked against the corpus's published size and hash."""
  folder = prepared_dir(name, data_dir)
  if not folder.exists():
    raise DataError(f"dataset '{name}' is not prepared in {folder}; run 'python -m "
                    f"damcha_jax.data.prepare {name} --data_dir={data_dir}'; without a network, "
                    + corpora.how_to_get(name, str(data_dir)))
  try:
    metadata = json.loads((folder / "metadata.json").read_text())
    found = {split: metadata["splits"][split]["num_bytes"] for split in corpora.SPLITS}
    identity = (metadata["format"], metadata["md5"])
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise _damaged(name, data_dir, f"metadata.json cannot be read: {error}") from error
  corpus = corpora.CORPORA[name]
  expected = {split: b - a for split, (a, b) in corpora.split_bounds(corpus.num_bytes).items()}
  if found != expected or identity != (FORMAT, corpus.md5):
    raise _damaged(name, data_dir, f"metadata.json says {found}, md5 {identity[1]}, format "
                   f"{identity[0]}, not {expected}, md5 {corpus.md5}, format {FORMAT}")
  return metadata


def verify_prepared(name: str, data_dir: str | Path) -> None:
  """Hashes every prepared byte.

  Raises:
    DataError: a split, or the whole, is not what its md5 says.
  """
  metadata = read_metadata(name, data_dir)
  whole = hashlib.md5()
  for split, array in load_prepared(name, data_dir).items():
    whole.update(array)
    found, expected = hashlib.md5(array).hexdigest(), metadata["splits"][split]["md5"]
    if found != expected:
      raise _damaged(name, data_dir, f"{split}.npy has md5 {found}, not {expected}")
  if whole.hexdigest() != corpora.CORPORA[name].md5:
    raise _damaged(name, data_dir, f"all splits together have md5 {whole.hexdigest()}, not "
                   f"{corpora.CORPORA[name].md5}")


def write_prepared(name: str, data_dir: str | Path, data: bytes) -> None:
  """Writes the splits of `data`, whose hash the caller has verified, replacing what is there."""
  arrays = {split: np.frombuffer(data, np.uint8)[a:b]
            for split, (a, b) in corpora.split_bounds(len(data)).items()}
  splits = {split: {"num_bytes": len(array), "md5": hashlib.md5(array).hexdigest()}
            for split, array in arrays.items()}
  write_folder(prepared_dir(name, data_dir), arrays,
               {"format": FORMAT, "name": name, "md5": corpora.CORPORA[name].md5,
                "splits": splits})


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray], metadata: Any) -> None:
  """Writes `<name>.npy` for every array and metadata.json, whole or not at all.

  Raises:
    DataError: the folder cannot be written.
  """
  folder.parent.mkdir(parents=True, exist_ok=True)
  for stale in folder.parent.glob(f".{folder.name}.*.partial"):  # of a preparation that was killed
    shutil.rmtree(stale, ignore_errors=True)
  partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
  try:
    os.chmod(partial, 0o755)
    for name, array in arrays.items():
      with open(partial / f"{name}.npy", "wb") as file:
        np.save(file, array)
        _sync(file)
    with open(partial / "metadata.json", "w") as file:
      json.dump(metadata, file, indent=2)
      _sync(file)
    if folder.exists():
      # Gone for a moment rather than half old and half new.
      os.rename(folder, partial / "replaced")
    os.rename(partial, folder)
    shutil.rmtree(folder / "replaced", ignore_errors=True)
  except OSError as error:
    shutil.rmtree(partial, ignore_errors=True)
    raise DataError(f"cannot write {folder}: {error}; free some space or choose another "
                    "--data_dir") from error


def _sync(file) -> None:
  file.flush()
  os.fsync(file.fileno())


def _damaged(name: str, data_dir: str | Path, what: str) -> DataError:
  return DataError(f"dataset '{name}' in {prepared_dir(name, data_dir)} is damaged: {what}; run "
                   f"'python -m damcha_jax.data.prepare {name} --data_dir={data_dir} --verify' "
                   "to prepare it again")
