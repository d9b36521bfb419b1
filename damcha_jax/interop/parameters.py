"""Parameters of this suite's models as .safetensors files, under their own paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from flax import traverse_util
import jax
import numpy as np

from damcha_jax.interop.tensor_files import read_tensors, TensorFileError, write_safetensors

PyTree = Any


def write_params(path: str | Path, params: PyTree,
                 metadata: Optional[Mapping[str, str]] = None) -> None:
  """Writes nested parameters as tensors named like `stack/layer_0/attention/value/kernel`.

  Args:
    path: ends in .safetensors.
    params: nested dicts of arrays, unboxed.
    metadata: texts to keep beside them; see `tensor_files.read_safetensors_metadata`.

  Raises:
    TensorFileError: the file cannot be written, or would not be read for what it is.
  """
  if Path(path).suffix != ".safetensors":
    raise TensorFileError(f"{path}: name a file that ends in .safetensors")
  flat = traverse_util.flatten_dict(params, sep="/")
  write_safetensors(path, {name: np.asarray(leaf) for name, leaf in flat.items()}, metadata)


def read_params(path: str | Path, like: Optional[PyTree] = None) -> PyTree:
  """What `write_params` wrote, as nested dicts.

  Args:
    path: the file.
    like: parameters, or their shapes, whose names, shapes and dtypes it must have.

  Raises:
    TensorFileError: the file cannot be read, or holds other parameters.
  """
  flat = read_tensors(path)
  if like is not None:
    wanted = traverse_util.flatten_dict(like, sep="/")
    for name in sorted(wanted.keys() ^ flat.keys()):
      where = "is missing" if name in wanted else "is not the model's"
      raise TensorFileError(f"{path}: parameter '{name}' {where}; use the config of the file")
    for name, leaf in wanted.items():
      found = (flat[name].shape, flat[name].dtype)
      if found != (leaf.shape, leaf.dtype):
        raise TensorFileError(f"{path}: parameter '{name}' is {found[1]}{list(found[0])}, not "
                              f"{leaf.dtype}{list(leaf.shape)}; use the config it was written with")
  return jax.tree.map(np.asarray, traverse_util.unflatten_dict(flat, sep="/"))
