"""Sets of (source, references) texts, such as sentences and translations, and their format.

A set is a folder with `train.tsv.xz`, `validation.tsv.xz` and `test.tsv.xz` (a split may be
missing). A line is an example: the source, a tab, and the references with tabs between them.
The sets that ship with the package, those that `prepare` makes of published ones, and one's own
have this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import hashlib
import io
import json
import lzma
from pathlib import Path
import re
from types import MappingProxyType
from typing import NamedTuple, Optional

from damcha_jax.config import ConfigError
from damcha_jax.errors import DataError
from damcha_jax.files import expanded, file_hash

SAMPLES_DIR = Path(__file__).parent / "samples"
SAMPLES = {"sample_pairs": SAMPLES_DIR / "sentence_pairs",
           "sample_concepts": SAMPLES_DIR / "concept_sets"}
SPLITS = ("train", "validation", "test")
FORMAT = 1


class Published(NamedTuple):
  """A published set: its catalogue name, and how many examples its splits have there."""

  catalogue_name: str
  num_examples: dict[str, int]


PUBLISHED = {
    "wmt14": Published("wmt14_translate/de-en",
                       {"train": 4_508_785, "validation": 3_000, "test": 3_003}),
    "commongen": Published("gem/common_gen", {"train": 67_389, "validation": 993}),
}
# CommonGen's test split has no references. What is published as its validation split is our test
# split, and our validation split are concept sets held out from its training split.
HELD_OUT_CONCEPT_SETS = 1_000
METADATA = "metadata.json"
_LINE_BREAKS = re.compile(r"[\t\r\n]+")


class Example(NamedTuple):
  source: str
  references: tuple[str, ...]


def encode(examples: Iterable[Example]) -> bytes:
  """The lines of a split; tabs and line breaks within a text become spaces."""
  clean = lambda text: _LINE_BREAKS.sub(" ", text)
  return "".join("\t".join(map(clean, (one.source, *one.references))) + "\n"
                 for one in examples).encode()


def decode(lines: Iterable[str]) -> Iterator[Example]:
  """Raises ValueError, with the line's number, for a line without a reference.

  Lines may end as they do on Windows.
  """
  for number, line in enumerate(lines, 1):
    source, *references = line.rstrip("\r\n").split("\t")
    if not source or not references or not all(references):
      raise ValueError(f"line {number} is not a source, a tab and references")
    yield Example(source, tuple(references))


def compress(data: bytes, preset: int = 9 | lzma.PRESET_EXTREME) -> bytes:
  """Equal data gives equal bytes: there is no time stamp or name in them."""
  return lzma.compress(data, check=lzma.CHECK_CRC32, preset=preset)


class PairSet:
  """A set of texts on disk; its splits are read when they are asked for."""

  def __init__(self, name: str, folder: Path, direction: Optional[str] = None,
               recorded: Mapping[str, str] = MappingProxyType({})):
    """Creates a set.

    Args:
      name: what messages call it.
      folder: where its files are.
      direction: 'en-de' or 'de-en', for files with English first; None: as the files have it.
      recorded: hashes of splits that `prepare` wrote down, which need not be read for one.
    """
    self.name, self.folder, self._reverse = name, folder, direction == "de-en"
    self._recorded = recorded

  @property
  def splits(self) -> tuple[str, ...]:
    return tuple(split for split in SPLITS if self._path(split).is_file())

  def examples(self, split: str) -> tuple[Example, ...]:
    """All examples of a split.

    Raises:
      DataError: the file is missing, damaged or empty.
    """
    examples = _read(self._path(split), _stamp(self._path(split)))
    if self._reverse:
      return tuple(Example(one.references[0], (one.source, *one.references[1:]))
                   for one in examples)
    return examples

  def file_hash(self, split: str) -> str:
    """SHA-256 of the compressed file, or its recorded hash, and of the direction it is read in."""
    direction = b"reversed" if self._reverse else b""
    if split in self._recorded:
      return hashlib.sha256(direction + self._recorded[split].encode()).hexdigest()
    try:
      return file_hash(self._path(split), direction)
    except OSError as error:
      raise DataError(f"{self._path(split)} cannot be read: {error.strerror}") from error

  @property
  def hashes(self) -> dict[str, str]:
    """`file_hash` of every split by its file's name."""
    return {self._path(split).name: self.file_hash(split) for split in self.splits}

  @property
  def stamp(self) -> tuple[tuple[int, int], ...]:
    """Changes when a file is replaced while the program runs."""
    return tuple(_stamp(self._path(split)) for split in self.splits)

  def _path(self, split: str) -> Path:
    return self.folder / f"{split}.tsv.xz"


def _stamp(path: Path) -> tuple[int, int]:
  """When a file was written and its size; whether it is there is told when it is read."""
  try:
    status = path.stat()
  except OSError:
    return (0, 0)
  return (status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read(path: Path, stamp: tuple[int, int]) -> tuple[Example, ...]:
  del stamp  # a file that was replaced is read again
  try:
    with lzma.open(path) as file:
      # Not the universal newlines of text files: only \n ends a line.
      # A byte order mark is no part of the first source.
      examples = tuple(decode(io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")))
  except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
    raise DataError(f"{path} cannot be read: {error}; make or fetch it again") from error
  if not examples:
    raise DataError(f"{path} holds no example")
  return examples


def prepared_dir(name: str, data_dir: str | Path) -> Path:
  return expanded(data_dir) / "text" / name


def load_pairs(dataset: str, data_dir: str, direction: Optional[str] = None) -> PairSet:
  """A set by name ('wmt14', 'commongen', 'sample_pairs', 'sample_concepts') or folder.

  Raises:
    DataError: it is not there, or not complete.
    ConfigError: `dataset` is neither a name nor a path.
  """
  if dataset in SAMPLES:
    return PairSet(dataset, SAMPLES[dataset], direction)
  if dataset in PUBLISHED:
    folder = prepared_dir(dataset, data_dir)
    return PairSet(dataset, folder, direction, check_prepared(dataset, folder, data_dir))
  folder = expanded(dataset)
  if "/" not in dataset and not folder.exists():
    raise ConfigError(f"unknown dataset '{dataset}'; use one of "
                      f"{', '.join((*PUBLISHED, *SAMPLES))}, or a folder with train.tsv.xz, "
                      "validation.tsv.xz and test.tsv.xz")
  pairs = PairSet(dataset, folder, direction)
  missing = {"train", "validation"} - set(pairs.splits)
  if missing:
    names = " and no ".join(f"{split}.tsv.xz" for split in sorted(missing))
    raise DataError(f"{folder} has no {names}: lines of a source, a tab and references, compressed "
                    "by xz")
  return pairs


def published_split(dataset: str, split: str) -> tuple[str, Optional[str]]:
  """The split that its publisher calls it, and of which part of it `split` is."""
  if dataset == "commongen":
    return {"train": ("train", None), "validation": ("train", "held_out"),
            "test": ("validation", None)}[split]
  return split, None


def check_prepared(name: str, folder: Path, data_dir: str,
                   contents: bool = False) -> dict[str, str]:
  """The recorded hashes of the splits of a prepared set; `contents` hashes every byte as well.

  Raises:
    DataError: the set is not whole.
  """
  command = f"python -m damcha_jax.data.prepare {name} --data_dir={data_dir}"
  if not folder.exists():
    raise DataError(f"dataset '{name}' is not prepared in {folder}; run '{command}' where "
                    "tensorflow and a network are, or use the sample that ships with the package: "
                    f"--config=configs/{name}.py:cpu")
  try:
    metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    whole = metadata["format"] == FORMAT and all(
        (folder / f"{split}.tsv.xz").stat().st_size == facts["compressed_bytes"]
        for split, facts in metadata["splits"].items())
    recorded = {split: str(facts["md5"]) for split, facts in metadata["splits"].items()}
    if whole and contents:
      whole = all(_content_md5(folder / f"{split}.tsv.xz") == facts["md5"]
                  for split, facts in metadata["splits"].items())
  except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
    raise DataError(f"dataset '{name}' in {folder} cannot be read: {error}; run '{command} "
                    "--verify'") from error
  if not whole:
    raise DataError(f"dataset '{name}' in {folder} is not what its {METADATA} says; run "
                    f"'{command} --verify'")
  return recorded


def _content_md5(path: Path) -> str:
  digest = hashlib.md5()
  with lzma.open(path) as file:
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()


def hold_out_concept_sets(
    examples: Sequence[Example],
    count: int = HELD_OUT_CONCEPT_SETS) -> tuple[list[Example], list[Example]]:
  """Training examples without, and those of, the `count` concept sets of the smallest hashes.

  A concept set is a source, whatever the order of its words; the held-out ones come once each with
  all their sentences as references.
  """
  key = lambda one: " ".join(sorted(one.source.split()))
  hashes = {name: hashlib.md5(name.encode()).digest() for name in map(key, examples)}
  held = set(sorted(hashes, key=hashes.get)[:count])
  groups: dict[str, list[Example]] = {name: [] for name in sorted(held)}
  train = []
  for one in examples:
    groups[key(one)].append(one) if key(one) in held else train.append(one)
  merged = [Example(members[0].source, tuple(dict.fromkeys(
      text for one in members for text in one.references))) for members in groups.values()]
  return train, merged
