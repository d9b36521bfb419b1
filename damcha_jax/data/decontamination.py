"""Finds and drops the stretches of a training text that a held-out text also contains.

Mix needs it: enwik8 and text8 come from one dump, and text8's training part covers the articles
of enwik8's validation and test parts. The held-out text is cleaned as text8 was, n-grams of it
(anchors) are looked up at every position of the training text, and where they lie densely the
training text is a copy. Exact agreement of the two cleanings is not needed: one match in four is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses

import numpy as np

GRAM = 64  # bytes in an anchor, a power of two; chance or set phrases rarely agree on so many
STRIDE = 32  # bytes between anchors of the held-out text
MAX_GAP = 2048  # a longer stretch without a match ends a range
MIN_MATCHES = 16  # fewer (about half a kilobyte) are a quotation, not an article
MIN_DENSITY = 0.25  # share of the anchors in a range that match
MARGIN = 1024  # dropped on either side, where the cleanings may differ
_CHUNK = 1 << 21  # positions hashed at a time, a multiple of STRIDE
_TABLE_BITS = 24


@dataclasses.dataclass(frozen=True)
class Dropped:
  """What was cut out: [start, end) byte ranges of the training text, in order."""

  ranges: tuple[tuple[int, int], ...]
  total: int  # bytes before

  @property
  def num_bytes(self) -> int:
    return sum(end - start for start, end in self.ranges)

  def describe(self) -> str:
    shown = ", ".join(f"[{start:,}, {end:,})" for start, end in self.ranges[:3])
    if len(self.ranges) > 3:
      shown += f" and {len(self.ranges) - 3} more"
    return (f"dropped {self.num_bytes:,} of {self.total:,} bytes "
            f"({100 * self.num_bytes / max(self.total, 1):.2f}%) in {len(self.ranges)} range(s)"
            + (f": {shown}" if shown else ""))


def drop_overlap(train: np.ndarray, held_out: Iterable[bytes]) -> tuple[np.ndarray, Dropped]:
  """Cuts what `held_out` shares with `train` [num_bytes] uint8; the rest is joined in order."""
  dropped = Dropped(tuple(find_overlap(train, held_out)), len(train))
  if not dropped.ranges:
    return train, dropped
  edges = [0, *(edge for bounds in dropped.ranges for edge in bounds), len(train)]
  kept = [train[a:b] for a, b in zip(edges[::2], edges[1::2])]
  return np.concatenate(kept), dropped


def find_overlap(train: np.ndarray, held_out: Iterable[bytes]) -> list[tuple[int, int]]:
  """The [start, end) ranges of `train` that are copies of held-out text, margins included."""
  matches = _matches(train, _anchors(held_out))
  if not matches.size:
    return []
  ranges = []
  for run in np.split(matches, np.flatnonzero(np.diff(matches) > MAX_GAP) + 1):
    start, end = int(run[0]), int(run[-1]) + GRAM
    if len(run) < MIN_MATCHES or len(run) * STRIDE < MIN_DENSITY * (end - start):
      continue
    start, end = max(start - MARGIN, 0), min(end + MARGIN, len(train))
    if ranges and start <= ranges[-1][1]:
      start = ranges.pop()[0]
    ranges.append((start, end))
  return ranges


def _anchors(held_out: Iterable[bytes]) -> np.ndarray:
  """Sorted hashes of the held-out text's n-grams, one every STRIDE bytes."""
  hashes = [np.zeros(0, np.uint64)]
  for text in held_out:
    hashes += [chunk[::STRIDE] for _, chunk in _gram_hashes(np.frombuffer(text, np.uint8))]
  return np.unique(np.concatenate(hashes))


def _matches(train: np.ndarray, anchors: np.ndarray) -> np.ndarray:
  """Sorted positions of `train` at which an anchor begins."""
  # Most positions match nothing; a table of the leading bits rules them out before the search.
  shift = np.uint64(64 - _TABLE_BITS)
  table = np.zeros(1 << _TABLE_BITS, np.bool_)
  table[anchors >> shift] = True
  found = [np.zeros(0, np.int64)]
  for start, hashes in _gram_hashes(train):
    candidates = np.flatnonzero(table[hashes >> shift])
    found.append(start + candidates[np.isin(hashes[candidates], anchors)])
  return np.concatenate(found)


def _gram_hashes(text: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (position, uint64 hashes of the n-grams that begin there and after), in chunks.

  The hash is sum_k text[i + k] * q^(GRAM - 1 - k) mod 2^64, built by doubling: the hash of 2n
  bytes is that of the first n times q^n plus that of the next n.
  """
  for start in range(0, len(text) - GRAM + 1, _CHUNK):
    hashes = text[start:start + _CHUNK + GRAM - 1].astype(np.uint64)
    factor, width = 0x9E3779B97F4A7C15, 1
    while width < GRAM:
      hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
      factor, width = factor * factor % (1 << 64), 2 * width
    yield start, hashes
