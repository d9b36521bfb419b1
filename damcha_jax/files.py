"""Paths that a user gives, and files that are replaced whole."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import hashlib
import os
from pathlib import Path
import uuid

from damcha_jax.errors import UserError


def expanded(path: str | Path) -> Path:
  """The path, its `~` replaced by the folder that it stands for.

  Raises:
    UserError: there is no such user.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError as error:
    raise UserError(f"{path} cannot be read or written: {error}; write the path out") from error


def file_hash(path: Path, salt: bytes = b"") -> str:
  """The SHA-256 of `salt` and a file's bytes.

  Raises:
    OSError: it cannot be read.
  """
  digest = hashlib.sha256(salt)
  with open(path, "rb") as file:
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Where to write what then takes the place of `path`: whoever reads sees the old or the new file.

  The name is nobody else's, so that processes which write the same file do not disturb each other.
  A failure leaves nothing behind.

  Raises:
    OSError: the file cannot be replaced.
  """
  partial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:16]}{path.suffix}")
  try:
    yield partial
    os.replace(partial, path)
  finally:
    with contextlib.suppress(OSError):
      partial.unlink()
