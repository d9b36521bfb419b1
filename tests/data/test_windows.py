"""Batches: what is drawn, what is scored, and that nothing depends on processes or history."""

import hashlib
import time

import numpy as np
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.data.sources import BOS, EvalWindows, TrainWindows
from damcha_jax.errors import DataError

TEXT = (np.arange(5000) ** 2 // 7 % 255 + 1).astype(np.uint8)  # no NUL


def _equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 17, 333])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_evaluation_scores_each_byte_once(num_bytes, batch_size):
  array = TEXT[:num_bytes]
  windows = EvalWindows(array, context_length=16)
  scored = []
  for start in range(0, len(windows), batch_size):
    batch = windows.batch(start, batch_size)
    assert batch["targets"].shape == (batch_size, 16)
    assert batch["targets"].dtype == batch["inputs"].dtype == np.int32
    assert batch["weights"].dtype == np.float32
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    assert (batch["inputs"][:, 0] == BOS).all()
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    scored.append(batch["targets"][batch["weights"] > 0])
  assert np.array_equal(np.concatenate(scored), array)
  assert not windows.batch(len(windows), 3)["weights"].any()


def test_training_windows_are_slices_begun_with_bos():
  batch = TrainWindows({"a": TEXT}, 8, 32, seed=3).batch_at(5)
  text = TEXT.tobytes()
  for inputs, targets in zip(batch["inputs"], batch["targets"]):
    assert text.count(bytes(targets.astype(np.uint8))) >= 1
    assert inputs[0] == BOS and np.array_equal(inputs[1:], targets[:-1])
  assert batch["weights"].shape == (8, 32) and (batch["weights"] == 1).all()


@pytest.mark.parametrize("process_count", [2, 4, 8])
def test_processes_share_the_global_batch(process_count):
  arrays = {"a": TEXT, "b": TEXT[::-1].copy()}
  whole = TrainWindows(arrays, 8, 32, seed=1)
  parts = [TrainWindows(arrays, 8, 32, 1, i, process_count) for i in range(process_count)]
  for step in (0, 1, 1000):
    batches = [part.batch_at(step) for part in parts]
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    assert _equal(joined, whole.batch_at(step))


def test_a_batch_depends_on_seed_and_step_alone():
  first = TrainWindows({"a": TEXT}, 4, 64, seed=0)
  for step in range(7):
    first.batch_at(step)
  resumed = TrainWindows({"a": TEXT}, 4, 64, seed=0)
  assert _equal(first.batch_at(7), resumed.batch_at(7))
  assert not _equal(resumed.batch_at(7), resumed.batch_at(8))
  assert not _equal(resumed.batch_at(7), TrainWindows({"a": TEXT}, 4, 64, 1).batch_at(7))
  large = [TrainWindows({"a": TEXT}, 4, 64, seed).batch_at(0) for seed in (-1, 2**63, 2**63 + 1)]
  assert not _equal(large[0], large[1]) and not _equal(large[1], large[2])


def test_golden_batch():
  """A change of the data order is a change of every published curve: make it knowingly."""
  windows = TrainWindows({"a": TEXT, "b": 255 - TEXT}, 6, 48, seed=42)
  batch = windows.batch_at(123)
  assert batch["targets"][:, :4].tolist() == [
      [176, 185, 194, 202], [2, 1, 1, 1], [232, 239, 246, 252],
      [218, 120, 22, 180], [227, 134, 41, 202], [117, 216, 61, 161]]
  digest = hashlib.md5(batch["inputs"].astype("<i4").tobytes()).hexdigest()
  assert digest == "a8bbae6087d58e7c7a4c2cbf06eb42e1"


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_mix_is_half_and_half(batch_size):
  arrays = {"a": np.full(100, 1, np.uint8), "b": np.full(50, 2, np.uint8)}
  windows = TrainWindows(arrays, batch_size, 10, seed=0)
  counts = np.array([(windows.batch_at(step)["targets"][:, 0] == 1).sum() for step in range(6)])
  assert (np.abs(2 * counts - batch_size) <= batch_size % 2).all()
  assert (counts[::2] + counts[1::2] == batch_size).all()


def test_every_start_is_reachable():
  windows = TrainWindows({"a": TEXT[:18]}, 64, 16, seed=0)
  starts = {bytes(row.astype(np.uint8)) for row in windows.batch_at(0)["targets"]}
  assert starts == {TEXT[i:i + 16].tobytes() for i in range(3)}


def test_lengths_that_cannot_work():
  assert TrainWindows({"a": TEXT[:16]}, 1, 16, 0).batch_at(0)["targets"].tolist() == [
      TEXT[:16].tolist()]
  with pytest.raises(DataError, match="'a' has 15 bytes.*context_length 16"):
    TrainWindows({"a": TEXT[:15]}, 1, 16, 0)
  with pytest.raises(ConfigError, match="batch_size 6 is not divisible by the 4 processes"):
    TrainWindows({"a": TEXT}, 6, 16, 0, 0, 4)
  with pytest.raises(DataError, match="empty"):
    EvalWindows(TEXT[:0], 16)


def test_batches_come_fast_enough():
  windows = TrainWindows({"a": np.resize(TEXT, 10**7)}, 64, 512, seed=0)
  best = 0.0
  for attempt in range(3):
    begin = time.perf_counter()
    for step in range(50):
      windows.batch_at(50 * attempt + step)
    best = max(best, 50 / (time.perf_counter() - begin))
  print(f"{best:.0f} batches/s of 64x512")
  assert best > 200
