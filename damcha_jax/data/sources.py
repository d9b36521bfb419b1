"""Corpora as byte arrays, and the windows that training and evaluation read from them.

A batch is a pure function of (seed, step): a run that resumes at step n asks for `batch_at(n)`
and sees what it would have seen, with no iterator state to save, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import lzma
from pathlib import Path

import numpy as np

from damcha_jax.config import ConfigError, DataConfig
from damcha_jax.data import corpora
from damcha_jax.data.decontamination import drop_overlap
from damcha_jax.data.prepared import load_prepared, read_metadata
from damcha_jax.data.text8 import clean_rst, clean_wikitext, normalize
from damcha_jax.errors import DataError
from damcha_jax.files import expanded, file_hash

# The NUL byte begins every window: the vocabulary stays at 256, and no corpus contains it.
BOS = 0
SAMPLE_FILE = Path(__file__).parent / "samples" / "python_docs.rst.xz"
DATASETS = ("enwik8", "text8", "mix", "sample_text", "sample_text8", "sample_mix")
CLEANED, MIXED = "text8:", "mix:"  # before the path of a file of one's own

Batch = dict[str, np.ndarray]
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The splits of a dataset, each a mapping from source name to uint8 [num_bytes].

  Mix has two sources, the others one. `notes` are lines worth logging, such as what
  decontamination dropped.
  """

  name: str
  train: Arrays
  validation: Arrays
  test: Arrays
  notes: tuple[str, ...] = ()
  hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its files by name


def load_corpus(dataset: str, data: DataConfig) -> Corpus:
  """Loads a dataset by name, or a text file of one's own by path (split 90/5/5).

  Args:
    dataset: 'enwik8', 'text8', 'mix' (prepared under `data.data_dir`), 'sample_text',
      'sample_text8', 'sample_mix' (shipped), the path of a file, 'text8:' and a path for what
      `text8.normalize` leaves of that file, or 'mix:' and a path for both of these mixed.
    data: where prepared corpora live, whether Mix is decontaminated (text8's training part covers
      the articles of enwik8's validation and test parts), and how much of each held-out source is
      kept.

  Raises:
    DataError: the data is missing, incomplete or not text; the message says what to do.
    ConfigError: `dataset` is neither a known name nor a path.
  """
  corpus = _whole_corpus(dataset, data)
  first = lambda arrays: {name: array[:data.max_held_out_bytes] for name, array in arrays.items()}
  return dataclasses.replace(corpus, validation=first(corpus.validation), test=first(corpus.test))


def _whole_corpus(dataset: str, data: DataConfig) -> Corpus:
  if dataset in ("mix", "sample_mix") or dataset.startswith(MIXED):
    raw, cleaned = _parts_of(dataset, data)
    return _mix(dataset, raw, cleaned, data.decontaminate)
  if dataset in corpora.CORPORA:
    splits = load_prepared(dataset, data.data_dir)
    recorded = read_metadata(dataset, data.data_dir)["splits"]
    hashes = {f"{dataset}/{split}.npy": str(facts["md5"]) for split, facts in recorded.items()}
  elif dataset in ("sample_text", "sample_text8"):
    splits, hashes = _sample(dataset), {SAMPLE_FILE.name: file_hash(SAMPLE_FILE)}
  else:
    return _own_corpus(dataset)
  return _single(dataset, splits, hashes)


def _own_corpus(dataset: str) -> Corpus:
  """Of a path, or of `CLEANED` and a path."""
  path = dataset.removeprefix(CLEANED)
  splits = _own_file(path)
  hashes = {Path(path).name: file_hash(expanded(path))}
  return _single(dataset, splits if path == dataset else _cleaned(path, *hashes.values()), hashes)


def _single(name: str, splits: Arrays, hashes: Mapping[str, str]) -> Corpus:
  return Corpus(name, **{split: {name: array} for split, array in splits.items()}, hashes=hashes)


def _parts_of(mix: str, data: DataConfig) -> tuple[Corpus, ...]:
  if mix == "sample_mix":
    return _whole_corpus("sample_text", data), _whole_corpus("sample_text8", data)
  if mix.startswith(MIXED):
    path = mix.removeprefix(MIXED)
    return _own_corpus(path), _own_corpus(CLEANED + path)
  try:
    return tuple(_whole_corpus(source, data) for source in corpora.MIX)
  except DataError as error:
    raise DataError(f"dataset 'mix' needs {' and '.join(corpora.MIX)}, which 'python -m "
                    f"damcha_jax.data.prepare mix --data_dir={data.data_dir}' prepares, or use "
                    f"--config=configs/mix.py:cpu: {error}") from error


def _mix(name: str, raw: Corpus, cleaned: Corpus, decontaminate: bool) -> Corpus:
  train = {**raw.train, **cleaned.train}
  notes = ()
  if decontaminate:
    clean = {"mix": clean_wikitext, "sample_mix": clean_rst}.get(name, normalize)
    held_out = [clean(array.tobytes()) for split in (raw.validation, raw.test)
                for array in split.values()]
    (source,) = cleaned.train
    train[source], dropped = drop_overlap(cleaned.train[source], held_out)
    notes = (f"decontaminated {source}: {dropped.describe()}",)
  return Corpus(name, train, {**raw.validation, **cleaned.validation},
                {**raw.test, **cleaned.test}, notes, {**raw.hashes, **cleaned.hashes})


def split_bytes(array: np.ndarray) -> dict[str, np.ndarray]:
  """Cuts [num_bytes] into train, validation and test, 90/5/5, without a copy."""
  return {split: array[a:b] for split, (a, b) in corpora.split_bounds(len(array)).items()}


@functools.cache
def _sample(dataset: str) -> dict[str, np.ndarray]:
  # Each split is cleaned by itself: cutting the cleaned whole at 90% would put cleaned
  # documents into training whose originals are held out.
  if dataset == "sample_text8":
    return {split: np.frombuffer(clean_rst(array.tobytes()), np.uint8)
            for split, array in _sample("sample_text").items()}
  try:
    text = lzma.decompress(SAMPLE_FILE.read_bytes())
  except (OSError, lzma.LZMAError) as error:
    raise DataError(f"the sample text {SAMPLE_FILE} cannot be read ({error}); "
                    "reinstall the package") from error
  return split_bytes(np.frombuffer(text, np.uint8))


@functools.lru_cache(maxsize=2)
def _cleaned(path: str, content_hash: str) -> dict[str, np.ndarray]:
  del content_hash  # a file that has changed is cleaned anew
  splits = {split: np.frombuffer(normalize(array.tobytes()), np.uint8)
            for split, array in _own_file(path).items()}
  for split, array in splits.items():
    if not len(array):
      raise DataError(f"cleaning leaves nothing of the {split} part of the text file "
                      f"{expanded(path)}: it has no letter a-z and no digit; use '{path}' as it is")
  return splits


def _own_file(dataset: str) -> dict[str, np.ndarray]:
  path = expanded(dataset)
  if not dataset:
    raise ConfigError(f"what comes after '{CLEANED}' or '{MIXED}' is the path of a text file; add it")
  if dataset in DATASETS and not path.exists():
    raise ConfigError(f"what comes after '{CLEANED}' or '{MIXED}' is the path of a text file, not "
                      f"the dataset '{dataset}'; use '{dataset}' alone")
  if not (path.exists() or "/" in dataset or "." in dataset):
    raise ConfigError(f"unknown dataset '{dataset}'; use one of {', '.join(DATASETS)}, or the "
                      f"path of a text file, alone or after '{CLEANED}' or '{MIXED}'")
  try:
    if path.exists() and not path.is_file():
      raise DataError(f"{path} cannot be read as a text file: it is a folder, pipe or device; "
                      "name a file")
    if path.stat().st_size == 0:
      raise DataError(f"the text file {path} is empty; name another")
    array = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
  except (OSError, ValueError) as error:
    raise DataError(f"the text file {path} cannot be read: {error}; name another") from error
  splits = split_bytes(array)
  if not all(len(split) for split in splits.values()):
    raise DataError(f"the text file {path} has only {len(array)} bytes; a 90/5/5 split needs "
                    "at least one window of text in each part")
  nul = np.flatnonzero(array == BOS)
  if nul.size:
    raise DataError(f"the text file {path} contains a NUL byte at offset {nul[0]}, which is the "
                    "begin symbol here; save the text as UTF-8, unpacked")
  return splits


class TrainWindows:
  """Random windows of T bytes; batch `step` depends on (seed, step) alone.

  Row r of the global batch of step n reads source (r + n) mod num_sources, so Mix's batches are
  half and half (an odd batch gives the extra row to each source in turn), and starts at
  u mod (num_bytes - T + 1), u the r-th 64-bit word of Philox keyed by (seed, n). Process p of P
  takes rows [p B / P, (p + 1) B / P).
  """

  def __init__(self, arrays: Arrays, batch_size: int, context_length: int, seed: int,
               process_index: int = 0, process_count: int = 1):
    """Raises DataError if a source is shorter than a window, ConfigError if B is not divisible."""
    if batch_size % process_count:
      raise ConfigError(f"batch_size {batch_size} is not divisible by the {process_count} "
                        "processes; choose a multiple")
    for name, array in arrays.items():
      if len(array) < context_length:
        raise DataError(f"the training part of '{name}' has {len(array)} bytes, fewer than one "
                        f"window of context_length {context_length}; use a longer text")
    # Plain views: slicing a memmap object costs several times what slicing an array does.
    self._arrays = [array.view(np.ndarray) for array in arrays.values()]
    self._batch_size = batch_size
    self._context_length = context_length
    self._seed = seed % 2**64
    rows = batch_size // process_count
    self._rows = range(process_index * rows, (process_index + 1) * rows)

  def batch_at(self, step: int) -> Batch:
    """This process's rows of batch `step`: inputs, targets int32 [b, T], weights float32 [b, T]."""
    # Raw words, because NumPy promises their stream for ever, and not that of `integers`. The
    # bias of the remainder is below num_bytes / 2**64.
    key = np.array([self._seed, step], np.uint64)
    words = np.random.Philox(key=key).random_raw(self._batch_size)
    targets = np.empty((len(self._rows), self._context_length), np.int32)
    for i, row in enumerate(self._rows):
      array = self._arrays[(row + step) % len(self._arrays)]
      start = int(words[row]) % (len(array) - self._context_length + 1)
      targets[i] = array[start:start + self._context_length]
    return _batch(targets, np.ones(targets.shape, np.float32))


class EvalWindows:
  """Consecutive windows of T bytes over a whole split: each byte is a target exactly once.

  The last window is padded; padding has weight 0. `len()` is the number of windows.
  """

  def __init__(self, array: np.ndarray, context_length: int):
    """Raises DataError if the split is empty."""
    if not len(array):
      raise DataError("an evaluation split is empty; use a longer text")
    self._array = array.view(np.ndarray)
    self._context_length = context_length

  def __len__(self) -> int:
    return -(-len(self._array) // self._context_length)

  def batch(self, start: int, batch_size: int) -> Batch:
    """Windows start .. start + batch_size - 1; rows past the last window have weight 0."""
    length = self._context_length
    scored = self._array[start * length:(start + batch_size) * length]
    targets = np.zeros(batch_size * length, np.int32)
    targets[:len(scored)] = scored
    weights = (np.arange(len(targets)) < len(scored)).astype(np.float32)
    return _batch(targets.reshape(batch_size, length), weights.reshape(batch_size, length))


def _batch(targets_BT: np.ndarray, weights_BT: np.ndarray) -> Batch:
  inputs_BT = np.empty_like(targets_BT)
  inputs_BT[:, 0] = BOS
  inputs_BT[:, 1:] = targets_BT[:, :-1]
  return {"inputs": inputs_BT, "targets": targets_BT, "weights": weights_BT}
