"""Makes the sample data that ships with the package, and larger corpora for CPU studies.

Everything comes from Debian packages, fetched with `apt-get download` and unpacked with
`dpkg-deb`, so neither needs root nor installs anything:

  python -m damcha_jax.data.make_samples text                  # rewrites damcha_jax/data/samples/
  python -m damcha_jax.data.make_samples images                # needs fonttools and Pillow
  python -m damcha_jax.data.make_samples pairs                 # English-German sentence pairs
  python -m damcha_jax.data.make_samples concepts              # concept sets and sentences
  python -m damcha_jax.data.make_samples more_pairs --out=DIR  # with 18,500 of a GPL dictionary
  python -m damcha_jax.data.make_samples dictionary --out=DIR  # DIR/webster.txt, 40 MB

The file or, of pairs, the folder that the last two make is given to a run as
`--config.dataset=...`. `--debs=DIR` takes the packages from a folder instead of the network.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
from pathlib import Path
import sys
import tempfile

from damcha_jax.data import concept_sets, emoji, sentence_pairs
from damcha_jax.data.debian import only, report, unpack, write
from damcha_jax.errors import until_nobody_reads, UserError

SAMPLES_DIR = Path(__file__).parent / "samples"
TEXT_FILE = "python_docs.rst.xz"
TEXT_LICENSE = "LICENSE.python_docs"
TEXT_PACKAGE = "python3.11-doc"
DICTIONARY_PACKAGE = "dict-gcide"
TOO_LARGE = ("dictionary", "more_pairs")


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m damcha_jax.data.make_samples",
                                   description=__doc__.split("\n", maxsplit=1)[0])
  makers = {"text": make_text, "images": emoji.make_images, "pairs": sentence_pairs.make_pairs,
            "concepts": concept_sets.make_concepts, "dictionary": make_dictionary,
            "more_pairs": sentence_pairs.make_more_pairs}
  parser.add_argument("what", choices=makers)
  parser.add_argument("--out", type=Path, help="folder to write to; by default the package's own "
                      f"samples folder, except for {' and '.join(TOO_LARGE)}")
  parser.add_argument("--debs", type=Path, help="folder that already holds the .deb files")
  args = parser.parse_args(argv)
  if args.what in TOO_LARGE and args.out is None:
    parser.error(f"{args.what} needs --out=DIR (it is not for shipping)")
  try:
    makers[args.what](args.out or SAMPLES_DIR, args.debs)
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


if __name__ == "__main__":
  with until_nobody_reads():
    sys.exit(main())
