"""Tensors of .pt, .npz and .safetensors files, and the files that must be refused."""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.interop.tensor_files import read_safetensors_metadata
from damcha_jax.interop.tensor_files import read_tensors
from damcha_jax.interop.tensor_files import TensorFileError
from damcha_jax.interop.tensor_files import write_safetensors

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("name", ["tensors.pt", "tensors_stream.pt"])
def test_torch_dtypes_views_and_wrappings_are_read(name: str) -> None:
  actual = read_tensors(FIXTURES / name)  # under 'state_dict', with 'module.' prefixes
  with np.load(FIXTURES / "tensors.npz") as archive:
    expected = {name: archive[name] for name in archive.files}
  assert set(actual) == set(expected)
  for name, array in expected.items():
    if name == "brain":
      assert actual[name].dtype == jnp.bfloat16
    else:
      assert actual[name].dtype == array.dtype
    np.testing.assert_array_equal(actual[name].astype(array.dtype), array, err_msg=name)


def test_a_stream_that_is_cut_short_or_forged_is_refused(tmp_path: pathlib.Path) -> None:
  whole = (FIXTURES / "tensors_stream.pt").read_bytes()
  path = tmp_path / "x.pt"
  for size in (1, 40, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(TensorFileError):
      read_tensors(path)
  parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {"a": pathlib.PurePosixPath("b")})
  path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
  with pytest.raises(TensorFileError, match="pathlib"):
    read_tensors(path)


def test_npz_holds_the_same_names() -> None:
  arrays = read_tensors(FIXTURES / "tensors.npz")
  assert arrays["transposed"].shape == (6, 4) and arrays["long"].dtype == np.int64


def _safetensors(path: pathlib.Path, header: dict, data: bytes) -> pathlib.Path:
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)
  return path


def test_safetensors(tmp_path: pathlib.Path) -> None:
  a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1.5, -2], jnp.bfloat16)
  header = {
      "__metadata__": {"format": "pt"},
      "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
      "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
  }
  path = _safetensors(tmp_path / "x.safetensors", header, a.tobytes() + b.tobytes())
  arrays = read_tensors(path)
  assert set(arrays) == {"a", "b"}
  np.testing.assert_array_equal(arrays["a"], a)
  np.testing.assert_array_equal(arrays["b"], b)


def test_safetensors_are_written_as_they_are_read(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "x.safetensors"
  arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array([1.5], jnp.bfloat16)}
  write_safetensors(path, arrays, {"source": "ä"})
  assert read_safetensors_metadata(path) == {"source": "ä"}
  actual = read_tensors(path)
  assert list(actual) == ["a", "b"] and actual["b"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(actual["a"], arrays["a"])
  with pytest.raises(TensorFileError, match="cannot be written"):
    write_safetensors(tmp_path / "none" / "x.safetensors", arrays)


@pytest.mark.parametrize("entry, message", [
    ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit"),
    ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "does not fit"),
    ({"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}, "does not fit"),
    ({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "unsupported dtype F8_E4M3"),
    ({"shape": [8]}, "damaged"),
])
def test_bad_safetensors(tmp_path: pathlib.Path, entry: dict, message: str) -> None:
  path = _safetensors(tmp_path / "x.safetensors", {"a": entry}, bytes(8))
  with pytest.raises(TensorFileError, match=message):
    read_tensors(path)


class _Global:
  """Pickles as a reference to any name, called with arguments."""

  def __init__(self, module: str, name: str, *args: object):
    self.module, self.name, self.args = module, name, args


class _Reference(str):
  """Pickles as a reference to torch's storage."""


class _Pickler(pickle._Pickler):  # pylint: disable=protected-access
  """Writes references to modules that need not exist here."""

  def save_global_by_name(self, module: str, name: str) -> None:
    self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

  def save(self, obj: object, save_persistent_id: bool = True) -> None:
    if isinstance(obj, _Global):
      self.save_global_by_name(obj.module, obj.name)
      self.save(tuple(obj.args))
      self.write(pickle.REDUCE)
    elif isinstance(obj, _Reference):
      self.write(pickle.MARK)
      self.save("storage")
      self.save_global_by_name("torch", "FloatStorage")
      for part in ("0", "cpu", int(obj)):
        self.save(part)
      self.write(pickle.TUPLE + pickle.BINPERSID)
    else:
      super().save(obj, save_persistent_id)


def _tensor(
    offset: int = 0, shape: object = (2,), strides: object = (1,), storage: object = None
) -> _Global:
  storage = _Reference("4") if storage is None else storage
  return _Global("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, strides, False, {})


def _torch_file(
    path: pathlib.Path, contents: object, *, raw: bytes | None = None, storage: int = 16,
    compression: int = zipfile.ZIP_STORED,
) -> pathlib.Path:
  buffer = io.BytesIO()
  _Pickler(buffer, protocol=2).dump(contents)
  with zipfile.ZipFile(path, "w", compression) as archive:
    archive.writestr("x/data.pkl", buffer.getvalue() if raw is None else raw)
    archive.writestr("x/data/0", np.arange(storage // 4, dtype=np.float32).tobytes())
  return path


def test_the_forged_files_differ_from_good_ones_in_one_thing(tmp_path: pathlib.Path) -> None:
  path = _torch_file(tmp_path / "x.pt", {"a": _tensor(1)})
  np.testing.assert_array_equal(read_tensors(path)["a"], [1, 2])


MARKER = "damcha_marker"


@pytest.mark.parametrize("contents, message", [
    ({"a": _Global("os", "mkdir", MARKER)}, "os.mkdir"),
    ({"a": _Global("builtins", "exec", f"open('{MARKER}', 'w')")}, "builtins.exec"),
    ({"a": _Global("numpy", "load", MARKER)}, "numpy.load"),
    ({"a": _Global("torch", "load", MARKER)}, "torch.load"),
    ({"a": _Global("collections", "OrderedDict.fromkeys", "b")}, "OrderedDict.fromkeys"),
    ({"a": _tensor(), "b": 3}, "not a state dict"),
    ([1, 2], "holds list"),
    ({"model": {"a": [_tensor()]}}, "not a state dict"),
    ({"a": _tensor(offset=3)}, "reaches beyond its storage"),
    ({"a": _tensor(offset=-1)}, "no view of a storage"),
    ({"a": _tensor(strides=(-1,))}, "no view of a storage"),
    ({"a": _tensor(shape=(10**12,), strides=(0,))}, "reaches beyond its storage"),
    ({"a": _tensor(shape=(2, 2), strides=(1,))}, "no view of a storage"),
    ({"a": _tensor(shape=(2.0,))}, "no view of a storage"),
    ({"a": _tensor(storage="0")}, "no view of a storage"),
    ({"a": _tensor(storage=_Reference("400"))}, "cut short"),
])
def test_hostile_or_wrong_pickles_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, contents: object, message: str
) -> None:
  monkeypatch.chdir(tmp_path)
  path = _torch_file(tmp_path / "x.pt", contents)
  with pytest.raises(TensorFileError, match=message) as caught:
    read_tensors(path)
  assert "\n" not in str(caught.value)
  assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("raw", [
    b"\x80\x02}q\x00r\xff\xff\xff\x7f.",  # a memo index of 2^31 - 1
    b"\x80\x02",
    b"not a pickle",
    # setattr on what stands for torch's function
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}U\x04nameU\x04evilsb.",
], ids=["memo", "empty", "text", "setattr"])
def test_damaged_pickles_are_refused(tmp_path: pathlib.Path, raw: bytes) -> None:
  with pytest.raises(TensorFileError):
    read_tensors(_torch_file(tmp_path / "x.pt", {}, raw=raw))
  # and leave nothing behind that would spoil the next file
  assert set(read_tensors(_torch_file(tmp_path / "y.pt", {"a": _tensor()}))) == {"a"}


def test_other_files_are_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(TensorFileError, match="No such file"):
    read_tensors(tmp_path / "none.pt")
  with pytest.raises(TensorFileError, match="cannot be read"):
    read_tensors(tmp_path / "none.npz")
  (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
  with pytest.raises(TensorFileError, match="not written by torch.save"):
    read_tensors(tmp_path / "old.pt")
  with pytest.raises(TensorFileError, match="unknown kind"):
    read_tensors(tmp_path / "x.h5")
  path = _torch_file(tmp_path / "x.pt", {"a": _tensor()}, compression=zipfile.ZIP_DEFLATED)
  with pytest.raises(TensorFileError, match="compressed"):
    read_tensors(path)
  np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
  with pytest.raises(TensorFileError, match="damaged or of another kind"):
    read_tensors(tmp_path / "objects.npz")
