"""Planted overlaps are found, bounded and gone; what is not shared stays."""

import numpy as np
import pytest

from damcha_jax.data import decontamination
from damcha_jax.data.decontamination import MARGIN, drop_overlap, find_overlap


def _prose(seed, num_words):
  rng = np.random.default_rng(seed)
  words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 9)))
           for _ in range(2000)]
  return " ".join(words[i] for i in rng.integers(0, 2000, num_words)).encode()


HELD_OUT = _prose(1, 8000)
BEFORE, AFTER = _prose(2, 20000), _prose(3, 10000)


def _array(*parts):
  return np.frombuffer(b"".join(parts), np.uint8)


def test_a_copy_is_cut_out_with_its_margins():
  kept, dropped = drop_overlap(_array(BEFORE, HELD_OUT, AFTER), [HELD_OUT])
  ((start, end),) = dropped.ranges
  first, last = len(BEFORE), len(BEFORE) + len(HELD_OUT)
  assert first - MARGIN - decontamination.GRAM <= start <= first
  assert last <= end <= last + MARGIN + decontamination.GRAM
  assert kept.tobytes() == BEFORE[:start] + AFTER[end - last:]
  assert dropped.num_bytes == end - start == dropped.total - len(kept)
  assert f"dropped {end - start:,} of {dropped.total:,} bytes" in dropped.describe()


@pytest.mark.parametrize("every", [30, 60])
def test_the_copy_need_not_be_exact(every):
  words = HELD_OUT.split()
  words[::every] = [b"changed"] * len(words[::every])  # as if cleaned by other rules
  copy = b" ".join(words)
  kept, dropped = drop_overlap(_array(BEFORE, copy, AFTER), [HELD_OUT])
  start, end = dropped.ranges[0]
  assert len(dropped.ranges) == 1
  assert start <= len(BEFORE) and end >= len(BEFORE) + len(copy)
  assert len(kept) >= len(BEFORE) + len(AFTER) - 2 * (MARGIN + decontamination.GRAM)


def test_several_copies_of_several_texts_at_the_ends():
  other = _prose(4, 3000)
  kept, dropped = drop_overlap(_array(other, BEFORE, HELD_OUT, AFTER, other), [HELD_OUT, other])
  assert len(dropped.ranges) == 3
  assert dropped.ranges[0][0] == 0 and dropped.ranges[-1][1] == dropped.total
  assert find_overlap(kept, [HELD_OUT, other]) == []
  for text in (HELD_OUT, other):
    for i in range(0, len(text) - 64, 997):
      assert text[i:i + 64] not in kept.tobytes()


def test_neighbouring_copies_become_one_range():
  ranges = find_overlap(_array(BEFORE, HELD_OUT, BEFORE[:1500], HELD_OUT, AFTER), [HELD_OUT])
  assert len(ranges) == 1


def test_quotations_and_unrelated_text_stay():
  train = _array(BEFORE, HELD_OUT[1000:1300], AFTER)
  kept, dropped = drop_overlap(train, [HELD_OUT])
  assert kept is train and dropped.ranges == () and dropped.num_bytes == 0
  assert find_overlap(train, []) == find_overlap(train, [b"short"]) == []
  assert find_overlap(train[:10], [HELD_OUT]) == []


def test_chunk_borders_change_nothing(monkeypatch):
  train = _array(BEFORE, HELD_OUT, AFTER)
  expected = find_overlap(train, [HELD_OUT])
  monkeypatch.setattr(decontamination, "_CHUNK", 1024)
  assert find_overlap(train, [HELD_OUT]) == expected
