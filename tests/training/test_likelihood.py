"""Whole-split evaluation: every example counts once, whatever the batch size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.evaluation.likelihood import Evaluator
from tiny_task import TinySplit


def _per_row(params, batch):
  values_BT = params * jnp.sin(batch["inputs"].astype(jnp.float32)) * 1e-3 + 7.0
  return {"weight": batch["weights"].sum(-1), "nats": (batch["weights"] * values_BT).sum(-1)}


def _reference(split):
  values = 3.0 * np.sin(split.rows["inputs"].astype(np.float64)) * 1e-3 + 7.0
  return np.sum(split.rows["weights"] * values), split.rows["weights"].sum(dtype=np.float64)


@pytest.mark.parametrize("batch_size,multiple", [(1, 1), (7, 1), (64, 1), (7, 8), (1000, 1)])
def test_exact_for_any_batch_size(batch_size, multiple):
  split = TinySplit(301, seed=0)
  evaluator = Evaluator(_per_row, lambda batch: batch, batch_size, multiple)
  sums = evaluator.split_sums(jnp.float32(3.0), split)
  nats, weight = _reference(split)
  assert sums["weight"] == weight
  assert sums["nats"] == pytest.approx(nats, rel=1e-6)


def test_float64_totals_do_not_lose_small_terms():
  """2^24 + 1 is not a float32; a float32 total would miss every example after the first."""
  class Split:
    def __len__(self):
      return 100

    def batch(self, start, batch_size):
      index = np.arange(start, start + batch_size)
      return {"x": np.where(index == 0, 2.0**24, index < 100).astype(np.float32)}

  evaluator = Evaluator(lambda params, batch: {"weight": batch["x"]}, lambda batch: batch, 30)
  assert evaluator.split_sums(None, Split()) == {"weight": 2.0**24 + 99}


def test_parts_are_pooled_by_adding_their_sums():
  parts = {"test/a": TinySplit(11, 1), "test/b": TinySplit(5, 2), "validation": TinySplit(3, 3)}
  sums = Evaluator(_per_row, lambda batch: batch, 4).evaluate(jnp.float32(3.0), parts)
  assert list(sums) == ["test", "test/a", "test/b", "validation"]
  for key in ("weight", "nats"):
    assert sums["test"][key] == pytest.approx(sums["test/a"][key] + sums["test/b"][key])


def test_progress_names_the_split_and_the_fraction_done():
  seen = []
  parts = {"test/a": TinySplit(8, 1), "validation": TinySplit(3, 3)}
  Evaluator(_per_row, lambda batch: batch, 4).evaluate(
      jnp.float32(3.0), parts, progress=lambda *what: seen.append(what))
  assert seen == [("test/a", 0.0), ("test/a", 0.5), ("validation", 0.0)]


def test_a_signal_abandons_the_evaluation():
  calls = []
  stop = lambda: len(calls) >= 2
  place = lambda batch: calls.append(0) or jax.tree.map(jnp.asarray, batch)
  evaluator = Evaluator(_per_row, place, 4)
  assert evaluator.evaluate(jnp.float32(3.0), {"test": TinySplit(30, 1)}, stop) is None
  assert len(calls) == 2
