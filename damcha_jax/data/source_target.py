"""Rows for a decoder that writes a target given a source.

A row is BOS source SEP target EOS. Inputs are all of it but EOS, and of the tokens predicted only
the target's and EOS have weight:

    inputs   BOS s1 .. sS SEP t1 .. tT
    weights   0  0  .. 0   1  1  .. 1      (predicting t1 .. tT EOS)

Training rows may be packed: examples of a row are segments that do not see each other. Evaluation
has one example a row, so that its likelihood is that of the example alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import itertools
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import numpy as np

from damcha_jax.config import ConfigError
from damcha_jax.data.arrays import kept_arrays
from damcha_jax.data.text_pairs import Example
from damcha_jax.data.tokenizers import BOS, EOS, SEP, Tokenizer
from damcha_jax.errors import DataError

Batch = dict[str, np.ndarray]
_AT_ONCE = 10_000


class Limits(NamedTuple):
  """How long sources and targets may be, in tokens, and what becomes of a longer source.

  An example with a longer target is left out: without its end it would be another target.
  """

  source: int
  target: int
  overlong: Literal["truncate", "skip"]


class Encoded(NamedTuple):
  """Pairs of token sequences: `ids` holds them one after another, `ends` [N, 2] where they end."""

  ids: np.ndarray
  ends_N2: np.ndarray

  def __len__(self) -> int:
    return len(self.ends_N2)

  def source(self, index: int) -> np.ndarray:
    start = self.ends_N2[index - 1, 1] if index else 0
    return self.ids[start:self.ends_N2[index, 0]]

  def target(self, index: int) -> np.ndarray:
    return self.ids[self.ends_N2[index, 0]:self.ends_N2[index, 1]]

  @property
  def lengths_N2(self) -> np.ndarray:
    return np.diff(self.ends_N2.ravel(), prepend=0).reshape(-1, 2)


def encode(examples: Iterable[Example], tokenizer: Tokenizer) -> Encoded:
  """Sources and first references as ids."""
  ids, ends = [], [0]
  dtype = np.uint16 if tokenizer.num_tokens <= 2**16 else np.int32
  examples = iter(examples)
  while chunk := list(itertools.islice(examples, _AT_ONCE)):
    texts = [text for one in chunk for text in (one.source, one.references[0])]
    sequences = tokenizer.encode(texts)
    ids.append(np.fromiter(itertools.chain.from_iterable(sequences), dtype))
    ends += (ends[-1] + np.cumsum([len(one) for one in sequences])).tolist()
  if not ids:
    raise DataError("there are no examples to encode")
  return Encoded(np.concatenate(ids), np.asarray(ends[1:], np.int64).reshape(-1, 2))


def each_reference(examples: Iterable[Example]) -> Iterator[Example]:
  """Training examples: one per reference."""
  for source, references in examples:
    for reference in references:
      yield Example(source, (reference,))


def cached(path: Optional[Path], make: Callable[[], Encoded]) -> Encoded:
  """`make()`, or what it made before, mapped into memory from `path`-*.npy.

  Raises:
    DataError: the files cannot be read or written, or are no longer what was written.
  """
  if path is None:
    return make()
  try:
    return Encoded(*kept_arrays(path, ("ids", "ends"), make))
  except (OSError, ValueError) as error:
    raise DataError(f"the encoded texts {path}-*.npy cannot be kept: {error}; delete them, or "
                    "choose another data.data_dir") from error


class _Rows:
  """The examples that fit, as the tokens of rows."""

  def __init__(self, encoded: Encoded, limits: Limits, context_length: int):
    """Raises ConfigError if a row may be too long, DataError if no example fits."""
    if limits.source + limits.target + 2 > context_length:
      raise ConfigError(f"data.max_source_tokens {limits.source}, data.max_target_tokens "
                        f"{limits.target} and the two symbols around the source do not fit "
                        f"context_length {context_length}; shorten one or lengthen the other")
    self._encoded, self._limits = encoded, limits
    source_N, target_N = encoded.lengths_N2.T
    long_N = source_N > limits.source
    kept_N = target_N <= limits.target
    if limits.overlong == "skip":
      kept_N &= ~long_N
    self.kept = np.flatnonzero(kept_N)
    if not self.kept.size:
      raise DataError(f"none of {len(encoded)} examples fits data.max_source_tokens "
                      f"{limits.source} and data.max_target_tokens {limits.target}; raise them")
    num_cut = int((long_N & kept_N).sum())
    counts = {f"sources cut to {limits.source} tokens": num_cut,
              "examples left out as too long": len(encoded) - self.kept.size}
    self.note = "; ".join(f"{count} of {len(encoded)} {what}" for what, count in counts.items()
                          if count) or None
    self._context_length = context_length
    self.lengths = np.minimum(source_N, limits.source)[self.kept] + target_N[self.kept] + 2

  def prompt(self, number: int) -> list[int]:
    """BOS source SEP of kept example `number`."""
    source = self._encoded.source(self.kept[number])[:self._limits.source]
    return [BOS, *source.tolist(), SEP]

  def _batch(self, num_rows: int, segments: bool) -> Batch:
    shape = (num_rows, self._context_length)
    batch = {"inputs": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32),
             "weights": np.zeros(shape, np.float32), "padding_mask": np.zeros(shape, bool)}
    # A row of nothing but padding would have no token to attend to.
    batch["padding_mask"][:, 0] = True
    return {**batch, "segment_ids": np.zeros(shape, np.int32)} if segments else batch

  def _write(self, batch: Batch, row: int, column: int, number: int) -> int:
    """Writes kept example `number` into a row from a column on; the column after it."""
    prompt = self.prompt(number)
    tokens = [*prompt, *self._encoded.target(self.kept[number]).tolist(), EOS]
    end = column + len(tokens) - 1
    batch["inputs"][row, column:end] = tokens[:-1]
    batch["targets"][row, column:end] = tokens[1:]
    batch["weights"][row, column + len(prompt) - 1:end] = 1.0
    batch["padding_mask"][row, column:end] = True
    return end


class TrainRows(_Rows):
  """Shuffled training rows; batch `step` depends on (seed, step) alone.

  Examples are packed once, in an order drawn from the seed, each into the row that is being filled
  or else the next. Epochs follow one another without a gap, each a permutation of the rows of its
  own, so that every example is seen once in an epoch. Process p of P takes rows
  [p B / P, (p + 1) B / P) of a batch.
  """

  def __init__(self, encoded: Encoded, limits: Limits, batch_size: int, context_length: int,
               seed: int, process_index: int = 0, process_count: int = 1, packing: bool = True):
    """Raises ConfigError if B is not divisible or rows are too short; DataError if none fits."""
    super().__init__(encoded, limits, context_length)
    if batch_size % process_count:
      raise ConfigError(f"batch_size {batch_size} is not divisible by the {process_count} "
                        "processes; choose a multiple")
    self._batch_size, self._packing = batch_size, packing
    rows = batch_size // process_count
    self._rows = range(process_index * rows, (process_index + 1) * rows)
    self._permutation = functools.lru_cache(maxsize=2)(
        functools.partial(_permutation, seed % 2**64))
    # Streams 0, 1, .. belong to the epochs.
    self._order = self._permutation(2**64 - 1, self.kept.size)
    if packing:
      self._starts = _next_fit(self.lengths[self._order], context_length)
    else:
      self._starts = np.arange(self.kept.size + 1)

  @property
  def rows_per_epoch(self) -> int:
    return len(self._starts) - 1

  def batch_at(self, step: int) -> Batch:
    """This process's rows of batch `step`: inputs, targets, weights and what they consist of."""
    batch = self._batch(len(self._rows), segments=self._packing)
    for i, row in enumerate(self._rows):
      epoch, position = divmod(step * self._batch_size + row, self.rows_per_epoch)
      index = self._permutation(epoch, self.rows_per_epoch)[position]
      column = 0
      for segment in range(self._starts[index], self._starts[index + 1]):
        end = self._write(batch, i, column, self._order[segment])
        if self._packing:
          batch["segment_ids"][i, column:end] = segment - self._starts[index] + 1
        column = end
    return batch


class EvalRows(_Rows):
  """The examples of a split in order, one a row, padded on the right; `len()` is their number."""

  def __len__(self) -> int:
    return self.kept.size

  def batch(self, start: int, batch_size: int) -> Batch:
    """Examples start .. start + batch_size - 1; rows past the last one have weight 0."""
    batch = self._batch(batch_size, segments=False)
    for row, number in enumerate(range(start, min(start + batch_size, len(self)))):
      self._write(batch, row, 0, number)
    return batch


def _permutation(seed: int, stream: int, length: int) -> np.ndarray:
  # Raw words, because NumPy promises their stream for ever, and not that of `permutation`.
  words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(length)
  return np.argsort(words, kind="stable")


def _next_fit(lengths: Sequence[int], capacity: int) -> np.ndarray:
  """Where rows begin in a sequence of lengths, and its end: each row as full as its order lets."""
  starts, filled = [0], 0
  for index, length in enumerate(np.asarray(lengths).tolist()):
    if filled + length > capacity:
      starts.append(index)
      filled = 0
    filled += length
  return np.asarray([*starts, len(lengths)])
