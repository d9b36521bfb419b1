"""A run's directory: who holds it, which configuration it belongs to, and its atomic JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
from pathlib import Path
import platform
import subprocess
from typing import Any, Optional, TextIO
import zlib

import jax

from damcha_jax.config import to_dict, upgraded
from damcha_jax.data.arrays import save_arrays
from damcha_jax.errors import WorkdirError
from damcha_jax.files import replacing

# A summary over several runs may gain attentions and seeds; one run has exactly one of each.
_KEYS_OF_THE_SUITE = ("attentions", "seeds")
_SEAL = "crc32"
_DATA = "data.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_JAX_FLAGS = ("jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64",
              "jax_default_matmul_precision")


class Workdir:
  """The directory of one run. The path is made absolute once, so a later `chdir` changes nothing.

  Only the first process writes; in the others every writing method does nothing.
  """

  def __init__(self, path: str | Path):
    self.path = Path(path).absolute()
    self.is_primary = jax.process_index() == 0

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Holds the directory; the lock ends with the process, also when it is killed.

    Raises:
      WorkdirError: another process holds it, or it cannot be created.
    """
    if not self.is_primary:
      yield
      return
    lock = lock_file(self.path / ".lock")
    if lock is None:
      raise WorkdirError(f"workdir {self.path} is in use by another process; wait for it to end or "
                         "choose another workdir")
    with lock:
      yield

  def check_config(self, config: Any, name: str, seed: int, ignored: Sequence[str] = ()) -> None:
    """Raises `WorkdirError`, naming the first differing key, if another configuration ran here.

    The keys `ignored` may differ.
    """
    present = self.read_config()
    if present is None:
      checkpoints = self.path / "checkpoints"
      if checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise WorkdirError(f"{checkpoints} has checkpoints, but no config.json beside it tells of "
                           "which configuration; restore the file or choose another workdir")
      return
    wanted = _description(config, name, seed)
    difference = first_difference({**present, **{key: wanted.get(key) for key in ignored}}, wanted)
    if difference:
      key, old, new = difference
      raise WorkdirError(f"workdir {self.path} holds a run with {key}={old!r}, not {new!r}; choose "
                         "another workdir, or use the same value to resume")

  def claim(self, config: Any, name: str, seed: int) -> None:
    """Writes `config.json`: from now on the directory belongs to this configuration."""
    self.write_json("config.json", _description(config, name, seed))

  def check_data(self, hashes: Mapping[str, str]) -> None:
    """Raises `WorkdirError`, naming the first file, if what ran here had other data.

    Args:
      hashes: as `Task.data_hashes`.
    """
    present = self.read_json(_DATA)
    for name in () if present is None else sorted({*present, *hashes}):
      old, new = present.get(name, "absent"), hashes.get(name, "absent")
      if old != new:
        raise WorkdirError(f"workdir {self.path} holds a run on another {name} (hash {old:.12}, now "
                           f"{new:.12}); restore the data as they were, or choose another workdir")

  def claim_data(self, hashes: Mapping[str, str]) -> None:
    """Writes `data.json`: from now on the directory belongs to these data."""
    if hashes:
      self.write_json(_DATA, dict(hashes), sealed=True)

  def record_versions(self) -> list[str]:
    """Writes `versions.json`; returns `name old -> new` for what changed since the last process."""
    old, new = self.read_json("versions.json"), versions()
    self.write_json("versions.json", new)
    if old is None:
      return []
    return [f"{key} {old.get(key)} -> {value}" for key, value in new.items()
            if old.get(key) != value]

  def read_config(self) -> Optional[dict[str, Any]]:
    """The `config.json`, with today's keys whatever version wrote it, or None where there is none.

    Raises:
      WorkdirError: as `read_json`.
    """
    contents = self.read_json("config.json")
    return None if contents is None else upgraded(contents)

  def read_json(self, name: str, keys: Iterable[str] = ()) -> Optional[dict[str, Any]]:
    """The contents of a JSON file in the directory, or None where there is none.

    Raises:
      WorkdirError: it cannot be read, is not a JSON object, lacks one of `keys`, or was sealed and
        is no longer what was written.
    """
    path = self.path / name
    try:
      text = read_text(path)
      if text is None:
        return None
      value = json.loads(text)
    except (RecursionError, ValueError) as error:
      raise WorkdirError(f"{path} is not valid JSON ({error}); remove it or choose another "
                         "workdir") from error
    if not isinstance(value, dict):
      raise WorkdirError(f"{path} is not a JSON object; remove it or choose another workdir")
    for key in keys:
      if key not in value:
        raise WorkdirError(f"{path} has no '{key}'; remove it or choose another workdir")
    if value.pop(_SEAL, None) not in (None, checksum(value)):
      raise WorkdirError(f"{path} was changed after it was written; remove it, and the same "
                         "command makes it again")
    return value

  def write_json(self, name: str, value: Any, sealed: bool = False) -> None:
    """Replaces a file; `sealed`: with a checksum, which `read_json` compares."""
    if self.is_primary:
      contents = {**value, _SEAL: checksum(value)} if sealed else value
      write_atomically(self.path / name, json.dumps(contents, indent=2) + "\n")


def checksum(value: Any) -> int:
  """The CRC-32 of a value as JSON."""
  return zlib.crc32(json.dumps(value).encode())


def _description(config: Any, name: str, seed: int) -> dict[str, Any]:
  values = {key: value for key, value in to_dict(config).items() if key not in _KEYS_OF_THE_SUITE}
  # Through JSON and back, so that tuples compare equal to the lists in the file.
  return json.loads(json.dumps({"run": {"name": name, "seed": seed}, **values}))


def write_atomically(path: Path, text: str) -> None:
  """Replaces a file by a complete new one: a reader or a crash sees the old or the new, no mixture.

  Raises:
    WorkdirError: the file cannot be written.
  """
  with writing(path), replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
  """`save_arrays`, for a workdir.

  Raises:
    WorkdirError: the file cannot be written.
  """
  with writing(path):
    save_arrays(path, arrays)


def read_text(path: Path, errors: str = "strict") -> Optional[str]:
  """The text of a file, or None where there is none; `errors` as in `open`.

  Raises:
    WorkdirError: it cannot be read.
    UnicodeDecodeError: it is no UTF-8, and `errors` is 'strict'.
  """
  try:
    return path.read_text(encoding="utf-8", errors=errors)
  except FileNotFoundError:
    return None
  except OSError as error:
    raise WorkdirError(f"cannot read {path}: {error.strerror}; check its permissions, remove it "
                       "or choose another workdir") from error


def is_number(value: Any) -> bool:
  """Whether a value of a JSON file is a number in range; a bool is none."""
  if type(value) is int:
    return abs(value) < 2**63
  return type(value) is float and math.isfinite(value)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
  """Turns the operating system's errors, such as a full disk, into one line that names the file."""
  try:
    yield
  except OSError as error:
    raise WorkdirError(f"cannot write {path}: {error.strerror}; free space or check permissions, "
                       "then run the same command again") from error


def lock_file(path: Path) -> Optional[TextIO]:
  """Holds `path`, made if it is missing, until what is returned is closed or the process ends.

  Returns:
    None where another process holds it.
  """
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path, "a", encoding="utf-8")  # pylint: disable=consider-using-with
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.close()
    return None
  return lock


def first_difference(old: Any, new: Any, prefix: str = "") -> Optional[tuple[str, Any, Any]]:
  """The first `(dotted key, old value, new value)` in which two JSON values differ, else None."""
  if not (isinstance(old, dict) and isinstance(new, dict)):
    return None if old == new else (prefix, old, new)
  for key in [*new, *(key for key in old if key not in new)]:
    name = f"{prefix}.{key}" if prefix else key
    difference = first_difference(old.get(key), new.get(key), name)
    if difference:
      return difference
  return None


def versions() -> dict[str, Any]:
  """Everything outside the configuration that numbers may depend on."""
  return {
      "python": platform.python_version(),
      "platform": platform.platform(),
      **{package: importlib.metadata.version(package) for package in _PACKAGES},
      "backend": jax.default_backend(),
      "device_kind": jax.devices()[0].device_kind,
      "num_devices": jax.device_count(),
      "num_processes": jax.process_count(),
      **{flag: getattr(jax.config, flag) for flag in _JAX_FLAGS},
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
      "git_commit": _git_commit(),
  }


def _git_commit() -> Optional[str]:
  """The commit of the source tree, `-dirty` if changed, or None where it is not under git."""
  def git(*arguments):
    return subprocess.run(["git", "-C", str(Path(__file__).parent), *arguments], text=True,
                          capture_output=True, check=True, timeout=10).stdout.strip()
  try:
    # An installed copy may lie below some other project's repository.
    git("ls-files", "--error-unmatch", Path(__file__).name)
    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
  except (OSError, subprocess.SubprocessError):
    return None
