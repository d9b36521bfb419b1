"""Named tensors from the files of other frameworks, as numpy arrays: .pt, .npz and .safetensors.

A .pt file is a pickle, which can run any program when it is opened in the usual way. Here only
tensors and plain containers are admitted, and a view may only show what its storage holds. Both
layouts of torch.save are read: the zip file of today and the plain stream before version 1.6.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import json
import math
import os
from pathlib import Path
import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, Optional
import zipfile

import jax.numpy as jnp
import numpy as np

from damcha_jax.errors import UserError
from damcha_jax.files import expanded, replacing

# Keys under which training programs put a state dict beside other things.
_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state", "params")
# How the plain stream of torch.save begins.
_STREAM_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
# Prefixes of the wrappers of data-parallel and compiled modules.
_PREFIXES = ("module.", "_orig_mod.")

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_SAFETENSORS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class TensorFileError(UserError):
  """A file that cannot be read, or that holds something else than named tensors."""


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
  """The named tensors of a .pt, .pth, .bin, .npz or .safetensors file.

  A state dict may be wrapped in another dict ({'state_dict': ..}, {'model': ..}), and its names may
  start with what data-parallel or compiled modules put before them.

  Raises:
    TensorFileError: the file is missing, damaged, of another kind, or holds more than tensors.
  """
  path = expanded(path)
  readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
  readers.update(dict.fromkeys((".pt", ".pth", ".bin"), _read_torch))
  if path.suffix not in readers:
    raise TensorFileError(f"{path}: unknown kind of file; name one of {', '.join(readers)}")
  try:
    arrays = readers[path.suffix](path)
  except TensorFileError:
    raise
  except OSError as error:
    raise TensorFileError(f"{path} cannot be read: {error.strerror or error}") from error
  except Exception as error:  # a damaged file can make its decoder raise anything
    first = (str(error).strip().splitlines() or [""])[0]
    raise TensorFileError(
        f"{path} is damaged or of another kind ({type(error).__name__}: {first})"
    ) from error
  if not arrays:
    raise TensorFileError(f"{path} holds no tensors")
  for prefix in _PREFIXES:
    if all(name.startswith(prefix) for name in arrays):
      arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
  return arrays


def _read_npz(path: Path) -> dict[str, np.ndarray]:
  with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
    return {name: archive[name] for name in archive.files}


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
  """Length of the header (8 bytes), the header as JSON, then the tensors' bytes."""
  data = np.memmap(path, np.uint8, mode="r")
  start = 8 + int.from_bytes(data[:8].tobytes(), "little")
  if len(data) < start:
    raise TensorFileError(f"{path} is damaged: its header is longer than the file")
  header = json.loads(data[8:start].tobytes())
  arrays = {}
  for name, entry in header.items():
    if name == "__metadata__":
      continue
    if entry["dtype"] not in _SAFETENSORS:
      raise TensorFileError(f"{path}: '{name}' has the unsupported dtype {entry['dtype']}")
    dtype, shape = _SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
    begin, end = (start + offset for offset in entry["data_offsets"])
    if not (start <= begin <= end <= len(data)) or end - begin != math.prod(shape) * dtype.itemsize:
      raise TensorFileError(f"{path} is damaged: '{name}' does not fit its {end - begin} bytes")
    arrays[name] = np.frombuffer(data[begin:end].tobytes(), dtype).reshape(shape)
  return arrays


def write_safetensors(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Optional[Mapping[str, str]] = None
) -> None:
  """Writes named arrays, and texts that `read_safetensors_metadata` gives back.

  A failure leaves nothing behind under `path`.

  Raises:
    TensorFileError: it cannot be written.
  """
  path = expanded(path)
  codes = {dtype: code for code, dtype in _SAFETENSORS.items()}
  header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
  offset = 0
  for name, array in arrays.items():
    header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape),
                    "data_offsets": [offset, offset + array.nbytes]}
    offset += array.nbytes
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
  try:
    with replacing(path) as partial, open(partial, "wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      for array in arrays.values():
        file.write(np.ascontiguousarray(array).tobytes())
  except OSError as error:
    raise TensorFileError(f"{path} cannot be written: {error.strerror or error}") from error


def read_safetensors_metadata(path: str | Path) -> dict[str, str]:
  """The texts that a .safetensors file holds beside its tensors.

  Raises:
    TensorFileError: the file is missing or damaged.
  """
  try:
    with open(expanded(path), "rb") as file:
      size = int.from_bytes(file.read(8), "little")
      if size > os.fstat(file.fileno()).st_size:
        raise ValueError("its header is longer than the file")
      metadata = json.loads(file.read(size)).get("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(one, str) for one in metadata.values())):
      raise ValueError("its metadata are no texts by name")
    return metadata
  except OSError as error:
    raise TensorFileError(f"{path} cannot be read: {error.strerror or error}") from error
  except (AttributeError, RecursionError, ValueError) as error:
    raise TensorFileError(f"{path} is damaged: {error}") from error


class _Storage(NamedTuple):
  key: str
  dtype: np.dtype
  num_elements: int


class _Tensor(NamedTuple):
  """A view of a storage, all as the pickle has it: checked before use."""

  storage: Any
  offset: Any
  shape: Any
  strides: Any


class _Constructor(NamedTuple):
  """Stands in for a function of torch; immutable, so that a pickle cannot change it."""

  name: str

  def __call__(self, *args: Any) -> Any:
    if self.name == "_rebuild_parameter":
      return args[0]
    if self.name == "Size":
      return tuple(*args)
    return _Tensor(*args[:4])


_ADMITTED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): _Constructor("Size"),
    ("torch._utils", "_rebuild_tensor_v2"): _Constructor("_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"): _Constructor("_rebuild_parameter"),
    **{("torch", name): _Storage(name, dtype, 0) for name, dtype in _STORAGES.items()},
}


# The C unpickler would allocate whatever a forged memo index asks for.
class _TensorUnpickler(pickle._Unpickler):  # pylint: disable=protected-access
  """Builds tensors and plain containers, and nothing else."""

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) not in _ADMITTED:
      raise TensorFileError(
          f"it contains {module}.{name}, and only tensors and plain containers are admitted; save"
          " the model's state_dict() alone"
      )
    return _ADMITTED[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    kind, storage_type, key, _, num_elements, *view = pid
    if view not in ([], [None]):
      raise TensorFileError("a storage is a view of another; save it again with a newer torch")
    if kind != "storage" or not isinstance(storage_type, _Storage):
      raise TensorFileError("it refers to something other than a tensor's storage")
    return _Storage(key, storage_type.dtype, num_elements)


def _read_torch(path: Path) -> dict[str, np.ndarray]:
  """What `torch.save(model.state_dict(), path)` wrote."""
  try:
    if zipfile.is_zipfile(path):
      return _read_torch_zip(path)
    with open(path, "rb") as file:
      return _read_torch_stream(path, file)
  except TensorFileError as error:
    message = str(error)
    raise TensorFileError(message if str(path) in message else f"{path}: {message}") from error


def _read_torch_zip(path: Path) -> dict[str, np.ndarray]:
  """A zip file of a pickle and the storages."""
  with zipfile.ZipFile(path) as archive:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
      raise TensorFileError(f"{path} was not written by torch.save: it has {len(pickles)} data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
      raise TensorFileError(f"{path} was not written by torch.save: its entries are compressed")
    with archive.open(pickles[0]) as file:
      contents = _TensorUnpickler(file, encoding="utf-8").load()
    big_endian = f"{root}byteorder" in archive.namelist() and (
        archive.read(f"{root}byteorder") == b"big"
    )
    read = lambda key: archive.read(f"{root}data/{key}")
    return {
        name: _materialize(path, name, tensor, read, big_endian)
        for name, tensor in _state_dict(path, contents).items()
    }


def _read_torch_stream(path: Path, file: BinaryIO) -> dict[str, np.ndarray]:
  """Pickles of a magic number, the version, the machine, the contents and the storages' keys, then
  each storage: its number of elements (8 bytes) and its bytes."""
  load = lambda: _TensorUnpickler(file, encoding="utf-8").load()
  if file.read(len(_STREAM_START)) != _STREAM_START:
    raise TensorFileError(f"{path} was not written by torch.save")
  _, machine = load(), load()
  big_endian = not machine.get("little_endian", True)
  tensors = _state_dict(path, load())
  dtypes = {tensor.storage.key: tensor.storage.dtype for tensor in tensors.values()
            if type(tensor.storage) is _Storage and type(tensor.storage.key) is str}
  storages, keys, end = {}, load(), os.fstat(file.fileno()).st_size
  for key in keys:
    if key not in dtypes:
      raise TensorFileError(f"{path} holds a storage that no tensor shows; save it again with a"
                            " newer torch")
    (num_elements,) = struct.unpack(">q" if big_endian else "<q", file.read(8))
    num_bytes = num_elements * dtypes[key].itemsize
    if not 0 <= num_bytes <= end - file.tell():
      raise TensorFileError(f"{path} is damaged: a storage is cut short")
    storages[key] = file.read(num_bytes)
  return {name: _materialize(path, name, tensor, storages.__getitem__, big_endian)
          for name, tensor in tensors.items()}


def _state_dict(path: Path, contents: Any) -> Mapping[str, _Tensor]:
  """The one mapping from names to tensors in what a file holds."""
  candidates = [contents]
  if isinstance(contents, Mapping):
    candidates += [contents[key] for key in _WRAPPERS if key in contents]
  for candidate in candidates:
    if isinstance(candidate, Mapping) and candidate:
      if all(isinstance(name, str) and type(value) is _Tensor for name, value in candidate.items()):
        return candidate
  found = sorted(map(str, contents)) if isinstance(contents, Mapping) else type(contents).__name__
  raise TensorFileError(
      f"{path} holds {found}, not a state dict, and none under {', '.join(_WRAPPERS)}; save the"
      " model's state_dict() alone"
  )


def _materialize(
    path: Path, name: str, tensor: _Tensor, read: Callable[[str], bytes], big_endian: bool
) -> np.ndarray:
  """The array that a tensor shows; `read` gives the bytes of a storage by its key."""
  storage, offset, shape, strides = tensor
  is_size = lambda number: type(number) is int and number >= 0
  sizes = lambda value: isinstance(value, tuple) and all(map(is_size, value))
  if not (type(storage) is _Storage and type(storage.key) is str and is_size(offset)
          and is_size(storage.num_elements) and sizes(shape) and sizes(strides)
          and len(shape) == len(strides)):
    raise TensorFileError(f"{path} is damaged: '{name}' is no view of a storage")
  if not math.prod(shape):
    return np.zeros(shape, storage.dtype)
  last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
  if last >= storage.num_elements or math.prod(shape) > storage.num_elements:
    raise TensorFileError(f"{path} is damaged: '{name}' reaches beyond its storage")
  dtype = storage.dtype.newbyteorder(">") if big_endian else storage.dtype
  data = read(storage.key)
  if len(data) < storage.num_elements * dtype.itemsize:
    raise TensorFileError(f"{path} is damaged: the storage of '{name}' is cut short")
  flat = np.frombuffer(data, dtype, storage.num_elements)[offset:]
  view = np.lib.stride_tricks.as_strided(
      flat, shape, [stride * dtype.itemsize for stride in strides], writeable=False
  )
  return view.astype(storage.dtype)
