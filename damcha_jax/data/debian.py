"""Files out of Debian packages, which need neither root nor an installation to be read."""

from __future__ import annotations

import hashlib
from pathlib import Path
import subprocess

from damcha_jax.errors import DataError
from damcha_jax.files import replacing


def unpack(package: str, root: Path, debs: Path | None) -> None:
  """Unpacks a Debian package into `root`, fetching it first unless it lies in `debs`."""
  folder = debs or root
  if debs is None:
    run(["apt-get", "download", package], cwd=root,
        remedy=f"run 'apt-get update', or put {package}_*.deb into a folder and pass --debs")
  found = sorted(folder.glob(f"{package}_*.deb"))
  if not found:
    raise DataError(f"no {package}_*.deb in {folder}")
  run(["dpkg-deb", "-x", str(found[-1].resolve()), str(root)], cwd=root,
      remedy=f"the file {found[-1]} may be incomplete; fetch it again")


def run(command: list[str], cwd: Path, remedy: str) -> None:
  try:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
  except FileNotFoundError as error:
    raise DataError(f"'{command[0]}' is not installed; run this on Debian or Ubuntu") from error
  except subprocess.CalledProcessError as error:
    last = (error.stderr.strip().splitlines() or ["no message"])[-1]
    raise DataError(f"'{' '.join(command)}' failed ({last}); {remedy}") from error


def only(paths) -> Path:
  paths = list(paths)
  if len(paths) != 1:
    raise DataError(f"the package's layout has changed: expected one path, found {paths}")
  return paths[0]


def write(path: Path, data: bytes) -> None:
  """Writes the file whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as partial:
    partial.write_bytes(data)


def report(path: Path, data: bytes, packed_size: int | None = None) -> None:
  packed = "" if packed_size is None else f", {packed_size:,} compressed"
  print(f"{path}: {len(data):,} bytes{packed}, md5 {hashlib.md5(data).hexdigest()}")
