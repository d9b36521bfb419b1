"""Makes the sample data that ships with the package, and larger corpora for CPU studies.

Everything comes from Debian packages, fetched with `apt-get download` and unpacked with
`dpkg-deb`, so neither needs root nor installs anything:

  python -m damcha_jax.data.make_samples text                  # rewrites damcha_jax/data/samples/
  python -m damcha_jax.data.make_samples dictionary --out=DIR  # DIR/webster.txt, 40 MB

The second prints the path to give to a run as `--config.dataset=...`. `--debs=DIR` takes the
packages from a folder instead of the network.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import lzma
import os
from pathlib import Path
import subprocess
import sys
import tempfile

from damcha_jax.errors import DataError, UserError

SAMPLES_DIR = Path(__file__).parent / "samples"
TEXT_FILE = "python_docs.rst.xz"
TEXT_LICENSE = "LICENSE.python_docs"
TEXT_PACKAGE = "python3.11-doc"
DICTIONARY_PACKAGE = "dict-gcide"


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m damcha_jax.data.make_samples",
                                   description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("what", choices=["text", "dictionary"])
  parser.add_argument("--out", type=Path, help="folder to write to; default for 'text': the "
                      "package's own samples folder")
  parser.add_argument("--debs", type=Path, help="folder that already holds the .deb files")
  args = parser.parse_args(argv)
  if args.what == "dictionary" and args.out is None:
    parser.error("dictionary needs --out=DIR (the corpus is too large to ship)")
  try:
    if args.what == "text":
      make_text(args.out or SAMPLES_DIR, args.debs)
    else:
      make_dictionary(args.out, args.debs)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_status
  return 0


def make_text(out: Path, debs: Path | None) -> None:
  """The Python documentation's RST sources, in path order, and their licence."""
  with tempfile.TemporaryDirectory() as root:
    unpack(TEXT_PACKAGE, Path(root), debs)
    docs = Path(root, "usr/share/doc")
    data = join_documents(only(docs.glob("python3.11/html/_sources")))
    license_text = only(docs.glob(f"{TEXT_PACKAGE}/copyright")).read_bytes()
  # The CHECK_CRC32 stream has no time stamp or file name: equal text gives an equal file.
  packed = lzma.compress(data, check=lzma.CHECK_CRC32, preset=9 | lzma.PRESET_EXTREME)
  write(out / TEXT_FILE, packed)
  write(out / TEXT_LICENSE, license_text)
  report(out / TEXT_FILE, data, packed_size=len(packed))


def make_dictionary(out: Path, debs: Path | None) -> None:
  """Webster's dictionary (GCIDE) as one text file; dictd's .dz is gzip with an index."""
  with tempfile.TemporaryDirectory() as root:
    unpack(DICTIONARY_PACKAGE, Path(root), debs)
    data = gzip.decompress(only(Path(root).rglob("gcide.dict.dz")).read_bytes())
  write(out / "webster.txt", data)
  report(out / "webster.txt", data)


def join_documents(folder: Path) -> bytes:
  """All files below `folder` in the byte order of their relative paths, each ending a line.

  Path order keeps a manual's chapters together and puts the last manual ("What's New") into the
  held-out tenth, so that validation and test are documents that training has not seen.
  """
  paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.txt")}
  documents = [paths[name].read_bytes() for name in sorted(paths)]
  return b"".join(text if text.endswith(b"\n") else text + b"\n" for text in documents)


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
  """Writes through a temporary name, so that a killed run leaves no half file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  partial.write_bytes(data)
  os.replace(partial, path)


def report(path: Path, data: bytes, packed_size: int | None = None) -> None:
  packed = "" if packed_size is None else f", {packed_size:,} compressed"
  print(f"{path}: {len(data):,} bytes{packed}, md5 {hashlib.md5(data).hexdigest()}")


if __name__ == "__main__":
  sys.exit(main())
