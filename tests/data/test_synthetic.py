"""The generated look-ups: what entanglement does, and that their optimum is one."""

import dataclasses

import numpy as np
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.data.synthetic import HeldOut, Lookup, Lookups

STRENGTHS = (0.0, 0.5, 1.0)
CLASSIFICATION = Lookup("classification", num_heads=4, dimension=16, num_items=8, num_queries=3,
                        num_classes=3, separation=12.0)
RETRIEVAL = Lookup("retrieval", num_heads=3, dimension=12, num_items=8, num_queries=3,
                   num_classes=3, separation=10.0)
LOOKUPS = pytest.mark.parametrize("lookup", [CLASSIFICATION, RETRIEVAL], ids=lambda one: one.name)


def _draw(lookup, num_examples=50, seed=0):
  return lookup.draw(np.random.default_rng(seed), num_examples, STRENGTHS)


def _blocks(lookup, entanglement):
  """Squared norms of M's blocks, [H, H]."""
  head_features = lookup.dimension // lookup.num_heads
  shape = (lookup.num_heads, head_features) * 2
  return np.square(lookup.metric(entanglement).reshape(shape)).sum((1, 3))


def test_classification_takes_one_subspace_without_entanglement_and_all_with_it():
  expected = np.zeros((4, 4))
  expected[0, 0] = 4.0
  np.testing.assert_allclose(_blocks(CLASSIFICATION, 0.0), expected, atol=1e-12)
  np.testing.assert_allclose(_blocks(CLASSIFICATION, 1.0), np.full((4, 4), 0.25))
  half = _blocks(CLASSIFICATION, 0.5)
  assert 0 < half.sum() - np.trace(half) < 3.0  # energy off the diagonal; 3 of 4 at the end
  for strength in STRENGTHS:  # a projection on 4 directions
    metric = CLASSIFICATION.metric(strength)
    np.testing.assert_allclose(metric @ metric, metric, atol=1e-12)
    assert np.trace(metric) == pytest.approx(4)


def test_classification_has_the_same_examples_in_other_axes_at_every_entanglement():
  features = _draw(CLASSIFICATION)["features"].astype(np.float64)
  grams = np.einsum("betd,besd->bets", features, features)
  np.testing.assert_allclose(grams[:, 0], grams[:, 1], atol=1e-4)
  np.testing.assert_allclose(grams[:, 0], grams[:, 2], atol=1e-4)
  assert np.abs(features[:, 0] - features[:, 2]).max() > 0.1
  optimum = HeldOut(CLASSIFICATION, STRENGTHS, 1, 200, "test").optimum()
  np.testing.assert_allclose(optimum["nats_per_query"], optimum["nats_per_query"][0], rtol=1e-4)


def test_retrieval_takes_every_subspace_at_full_entanglement_and_any_without():
  keys = _draw(RETRIEVAL)["features"][:, :, :8].reshape(50, 3, 8, 3, 4)
  distinct = lambda rows: len(np.unique(rows.reshape(8, -1).round(4), axis=0))
  for example in range(50):
    for head in range(3):
      assert distinct(keys[example, 0, :, head]) == 8
      assert distinct(keys[example, 1, :, head]) in (2, 8)
      assert distinct(keys[example, 2, :, head]) == 2
      others = [other for other in range(3) if other != head]
      assert distinct(keys[example, 2][:, others]) == 4
    assert distinct(keys[example, 2]) == 8
  shared = [distinct(keys[example, 1, :, head]) == 2 for example in range(50) for head in range(3)]
  assert 0.35 < np.mean(shared) < 0.65


@LOOKUPS
def test_a_query_is_of_the_item_that_it_is_nearest_to_but_for_noise(lookup):
  quiet = dataclasses.replace(lookup, separation=1e6)
  batch = _draw(quiet)
  posterior = quiet.posterior(batch["features"], batch["symbols"], STRENGTHS)
  expected = np.broadcast_to(batch["answers"][:, None], posterior.shape[:3])
  assert np.array_equal(posterior.argmax(-1), expected)
  assert posterior.max(-1).min() > 0.99


@LOOKUPS
def test_the_posterior_is_calibrated_and_no_other_sharpness_scores_better(lookup):
  """Its mean confidence is its accuracy, and its own noise the best of several."""
  held_out = HeldOut(lookup, STRENGTHS, 1, 4_000, "test")
  optimum = held_out.optimum()
  np.testing.assert_allclose(optimum["accuracy"], optimum["expected_accuracy"], atol=0.015)
  assert np.all(optimum["accuracy"] < 1.0 + 1e-9) and optimum["accuracy"][-1] > 0.6
  batch = held_out.examples
  answers = np.broadcast_to(batch["answers"][:, None, :, None], (4_000, 3, 3, 1))
  for factor in (0.5, 2.0):
    other = dataclasses.replace(lookup, separation=factor * lookup.separation)
    posterior = other.posterior(batch["features"], batch["symbols"], STRENGTHS)
    nats = -np.log(np.take_along_axis(posterior, answers, -1)).mean((0, 2, 3))
    assert np.all(nats > optimum["nats_per_query"])


@LOOKUPS
def test_features_have_about_unit_variance_whatever_the_entanglement(lookup):
  keys = _draw(lookup, 500)["features"][:, :, :8]
  np.testing.assert_allclose(np.square(keys).mean((0, 2, 3)), 1.0, atol=0.05)


@LOOKUPS
def test_batches_depend_on_seed_and_step_alone_and_lanes_of_a_seed_share_draws(lookup):
  source = Lookups(lookup, STRENGTHS, (7, 9), batch_size=4)
  first, again, other = source.batch_at(3), source.batch_at(3), source.batch_at(4)
  num_tokens = lookup.num_items + lookup.num_queries
  assert first["features"].shape == (4, 6, num_tokens, lookup.dimension)
  assert first["weights"].sum() == 4
  for name, rows in first.items():
    assert np.array_equal(rows, again[name])
  assert not np.array_equal(first["features"], other["features"])
  alone = Lookups(lookup, STRENGTHS, (9,), batch_size=4).batch_at(3)
  for name in ("features", "symbols", "answers"):
    assert np.array_equal(alone[name], first[name][:, 1::2])  # entanglements first, then seeds
  assert not np.array_equal(first["symbols"][:, 0], first["symbols"][:, 1])
  halves = [Lookups(lookup, STRENGTHS, (7, 9), 4, process, 2).batch_at(3) for process in (0, 1)]
  for name, rows in first.items():
    assert np.array_equal(np.concatenate([half[name] for half in halves]), rows)


@LOOKUPS
def test_held_out_examples_are_the_same_for_each_seed_and_padded_with_nothing(lookup):
  held_out = HeldOut(lookup, STRENGTHS, 2, 5, "test")
  batch = held_out.batch(3, 4)
  assert len(held_out) == 5 and batch["weights"].tolist() == [1, 1, 0, 0]
  assert np.array_equal(batch["features"][:, 0], batch["features"][:, 1])
  assert np.array_equal(batch["features"][:2, 2], held_out.examples["features"][3:, 1])
  assert np.array_equal(batch["answers"][:2, 5], held_out.examples["answers"][3:])
  validation = HeldOut(lookup, STRENGTHS, 2, 5, "validation")
  assert not np.array_equal(validation.examples["features"], held_out.examples["features"])


@pytest.mark.parametrize("change, message", [
    ({"name": "sorting"}, "unknown task 'sorting'; choose from classification, retrieval"),
    ({"dimension": 13}, "dimension 13 is not cut into subspaces by 3 heads"),
    ({"num_items": 6}, "retrieval.num_items=6 must be a power of 2 from 2 to 2^3"),
    ({"num_items": 16}, "retrieval.num_items=16 must be a power of 2 from 2 to 2^3"),
])
def test_sizes_that_do_not_go_together_are_refused(change, message):
  with pytest.raises(ConfigError) as error:
    dataclasses.replace(RETRIEVAL, **change)
  assert message in str(error.value)
