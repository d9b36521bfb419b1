"""Appendix C.2: no static metric is below the bound, and what its assumptions are worth."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from damcha_jax.theory import growth
from damcha_jax.theory import metric_risk
from damcha_jax.theory.trained_generator import trained_excess
from damcha_jax.theory.trained_generator import Training

D, H = 6, 2


def _problem(num_contexts: int = 3, condition: float = 3.0, seed: int = 0,
             heterogeneity: float = 0.7) -> metric_risk.Problem:
  return metric_risk.make_problem(num_contexts, D, H, heterogeneity, condition, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("condition", [1.0, 5.0])
@pytest.mark.parametrize("num_contexts", [1, 2, 5])
def test_no_best_metric_is_below_its_bound(num_contexts: int, condition: float, seed: int) -> None:
  problem = _problem(num_contexts, condition, seed)
  for rank in (1, 3, D):
    static = metric_risk.excess_risk(problem, metric_risk.best_static(problem, rank))
    adaptive = metric_risk.excess_risk(problem, metric_risk.best_adaptive(problem, rank))
    bounds = metric_risk.static_bound(problem, rank), metric_risk.adaptive_bound(problem, rank)
    assert static >= bounds[0] - 1e-9 and adaptive >= bounds[1] - 1e-9
    assert adaptive <= static + 1e-9
    if condition == 1.0:  # mu is also the largest curvature: the bound is attained
      assert (static, adaptive) == pytest.approx(bounds, abs=1e-9)
  assert metric_risk.excess_risk(problem, problem.metric_CHDD) == 0.0


def test_other_static_metrics_are_worse_than_the_best() -> None:
  problem, rng = _problem(), np.random.default_rng(1)
  for rank in (2, D):
    best = metric_risk.best_static(problem, rank)
    assert np.linalg.matrix_rank(best, tol=1e-8).max() == rank
    risk = metric_risk.excess_risk(problem, best)
    left, size, right = np.linalg.svd(best)
    for scale in (1e-3, 0.1, 1.0):
      move = lambda: scale * rng.normal(size=(H, D, rank))
      other = (left[..., :rank] * size[:, None, :rank] + move()) @ (
          right[:, :rank] + np.swapaxes(move(), 1, 2))
      assert metric_risk.excess_risk(problem, other) > risk


def test_the_closed_form_is_the_mean_over_tokens() -> None:
  problem, rng = _problem(), np.random.default_rng(0)
  metric_HDD = rng.normal(size=(H, D, D))
  num_pairs = 20_000
  for context, excess in enumerate(metric_risk.context_excess(problem, metric_HDD)):
    root = np.linalg.cholesky(problem.moment_CDD[context])
    x, y = rng.normal(size=(2, num_pairs, D)) @ root.T
    rest = metric_HDD - problem.metric_CHDD[context]
    losses = 0.5 * np.sum(np.einsum("nd,hde,ne->nh", x, rest, y, optimize=True) ** 2, -1)
    error = losses.std() / num_pairs**0.5
    assert losses.mean() == pytest.approx(excess, abs=4 * error) and error < 0.05 * excess


def test_the_growth_is_the_largest_that_assumption_3_allows() -> None:
  problem, rng = _problem(), np.random.default_rng(0)
  for _ in range(20):
    rest = rng.normal(size=(H, D, D))
    excess = metric_risk.context_excess(problem, problem.metric_CHDD + rest)
    assert (excess >= 0.5 * problem.growth * np.sum(rest**2)).all()
  size, axes = np.linalg.eigh(problem.moment_CDD)
  context = size[:, 0].argmin()
  least = np.broadcast_to(np.outer(*[axes[context, :, 0]] * 2), (H, D, D))
  excess = metric_risk.context_excess(problem, problem.metric_CHDD + least)[context]
  assert excess == pytest.approx(0.5 * problem.growth * H)


def test_the_bound_is_rank_alone_with_one_context_and_adaptivity_alone_at_full_rank() -> None:
  one, many = _problem(1), _problem(4)
  assert metric_risk.adaptivity_bound(one) == pytest.approx(0, abs=1e-12)
  assert metric_risk.static_bound(one, 2) == metric_risk.rank_bound(one, 2) > 0.1
  assert metric_risk.rank_bound(many, D) == 0.0
  assert metric_risk.static_bound(many, D) == metric_risk.adaptivity_bound(many) > 0.1


def test_head_slices_that_adapt_can_be_worse_than_static_metrics_of_a_heads_rank() -> None:
  """The theorem's DAMCHA <= MHA is about the full-width form."""
  problem = _problem(heterogeneity=0.0)
  slices = metric_risk.best_head_slice(problem)
  assert np.count_nonzero(slices) == 3 * H * (D // H) ** 2
  risk = metric_risk.excess_risk(problem, slices)
  static = metric_risk.best_static(problem, D // H)
  assert risk > 1.5 * metric_risk.excess_risk(problem, static)
  moved = slices + 1e-2 * (slices != 0) * np.random.default_rng(0).normal(size=slices.shape)
  assert metric_risk.excess_risk(problem, moved) > risk


def test_head_slices_have_the_metrics_that_lie_in_their_slices() -> None:
  problem = _problem()
  in_slices = np.kron(np.eye(H), np.ones((D // H, D // H))).reshape(H, D // H, D)
  inside = np.zeros((H, D, D))
  for head in range(H):
    inside[head, head * D // H:(head + 1) * D // H] = in_slices[head]
  problem = dataclasses.replace(problem, metric_CHDD=problem.metric_CHDD * inside)
  assert metric_risk.excess_risk(problem, metric_risk.best_head_slice(problem)) < 1e-20
  assert metric_risk.excess_risk(problem, metric_risk.best_static(problem, D // H)) > 0.1


@pytest.mark.families
def test_a_trained_generator_comes_near_the_best_if_it_sees_the_context() -> None:
  problem = _problem(2, condition=1.0)
  training = Training(length=8, noise=0.5, widths=(16,), num_steps=600, batch_size=16,
                      learning_rate=0.02)
  bound = metric_risk.static_bound(problem, D)
  seeing, blind = (trained_excess(problem, signal, training, 500, 0) for signal in (2.0, 0.0))
  assert seeing.mean + 3 * seeing.standard_error < 0.2 * bound
  # The same contexts, but nothing of them in the mean: as bad as static, and no better.
  assert blind.mean + 3 * blind.standard_error > bound
  assert blind.mean < 1.5 * bound


def test_no_quadratic_grows_below_the_excess_of_a_softmax() -> None:
  radii = (0.1, 1.0, 10.0, 100.0, 1000.0)
  excess = growth.softmax_excess(growth.random_directions(6, D, 0), radii, 8, 200, False, 0)
  constants = 2 * excess / np.square(radii)
  assert (np.diff(constants) < 0).all()
  np.testing.assert_allclose(constants[:, -1] / constants[:, -2], 0.1, rtol=0.1)
  # Convex, so at least linear; not quadratic.
  assert (excess[:, 1:] / excess[:, :-1] >= 10 * (1 - 1e-9)).all()


def test_normalised_tokens_leave_a_direction_unseen() -> None:
  excess = lambda normalised: growth.softmax_excess(
      growth.unseen_direction(D, 0), (10.0,), 8, 200, normalised, 0)
  assert abs(excess(True)) < 1e-12 and excess(False) > 1.0


def test_probabilities_and_moments_are_as_described() -> None:
  problem = _problem(4, condition=9.0)
  assert problem.prior_C.sum() == pytest.approx(1) and (np.diff(problem.prior_C) > 0).all()
  size = np.linalg.eigvalsh(problem.moment_CDD)
  np.testing.assert_allclose(size[:, -1] / size[:, 0], 9.0)
  assert problem.growth == pytest.approx(1.0)
  scaled = dataclasses.replace(problem, moment_CDD=2 * problem.moment_CDD)
  assert scaled.growth == pytest.approx(4.0)
