"""Arrays in files, which are data and never code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
import zlib

import numpy as np

from damcha_jax.files import replacing


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
  """Writes a compressed .npz file whole or not at all, and its folder.

  Raises:
    OSError: it cannot be written.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as partial:
    np.savez_compressed(partial, **arrays)


def map_array(path: Path) -> np.ndarray:
  """The array of a .npy file, mapped into memory.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is damaged, or holds anything but numbers.
  """
  try:
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
  except OSError:
    raise
  except Exception as error:  # a damaged header raises many kinds
    raise ValueError(f"{path.name} is damaged ({' '.join(str(error).split())})") from error


def kept_arrays(path: Path, names: Sequence[str],
                make: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
  """`make()`, or what it made before, mapped into memory from `path`-<name>.npy.

  Raises:
    OSError: a file cannot be read or written.
    ValueError: one is damaged, or they are no longer what was written.
  """
  files = [path.with_name(f"{path.name}-{name}.npy") for name in (*names, "crc32")]
  if not all(file.is_file() for file in files):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    for file, array in zip(files, (*made, _checksums(made)), strict=True):
      with replacing(file) as partial:
        np.save(partial, array)
  *arrays, expected = map(map_array, files)
  if not np.array_equal(_checksums(arrays), expected):
    raise ValueError("they were changed after they were written")
  return arrays


def _checksums(arrays: Sequence[np.ndarray]) -> np.ndarray:
  return np.array([zlib.crc32(np.ascontiguousarray(array)) for array in arrays], np.uint32)
