"""Assumption 3 of Appendix C.2 where scores go through a softmax: it does not hold.

It asks for a mu > 0 with r(M) - r(M*) >= mu/2 ||M - M*||_F^2 for all M. For attention weights
p_M = softmax(x^T M Y^T) that are learned by their log-likelihood, the excess risk at M* + R U, with
||U||_F = 1, is

    e(R) = E KL(p_{M*} || p_{M* + R U})  <=  2 R E max_s |x^T U y_s|

so it grows linearly, and the best mu within a distance R falls like 1 / R. Where tokens have been
normalised, y_s^T 1 = 0, the direction U = v 1^T changes nothing at all: mu = 0, and no minimiser is
unique (Assumption 2).

What does hold: r is convex in M, so e(R) >= (R / R_0) e(R_0) for R >= R_0, and with the mu that
holds within R_0,

    r(M) - r(M*) >= mu/2 min(||M - M*||_F^2, R_0 ||M - M*||_F)

which may stand in for the quadratic in the theorem.
"""

from __future__ import annotations

import numpy as np


def softmax_excess(
    directions_UDD: np.ndarray, radii: tuple[float, ...], length: int, num_samples: int,
    normalised: bool, seed: int,
) -> np.ndarray:
  """e(R) [U, R] in nats, by sampling, of attention from a query to `length` keys.

  Args:
    directions_UDD: U of norm one.
    radii: R.
    length: number of keys.
    num_samples: queries, each with keys of its own, all of unit variance.
    normalised: subtract from each token its mean and divide by its standard deviation.
    seed: of the samples and of M*, whose entries are N(0, 1 / D^2).
  """
  rng = np.random.default_rng(seed)
  features = directions_UDD.shape[-1]
  tokens = rng.normal(size=(num_samples, length + 1, features))
  if normalised:
    tokens -= tokens.mean(-1, keepdims=True)
    tokens /= tokens.std(-1, keepdims=True)
  best_DD = rng.normal(size=(features, features)) / features
  scores = lambda metric: np.einsum(
      "nd,...de,nse->...ns", tokens[:, 0], metric, tokens[:, 1:], optimize=True)
  log_best = _log_softmax(scores(best_DD))
  moves_UNS = scores(directions_UDD)

  def excess(radius: float) -> np.ndarray:
    log_moved = _log_softmax(scores(best_DD) + radius * moves_UNS)
    return np.sum(np.exp(log_best) * (log_best - log_moved), -1).mean(-1)

  return np.stack([excess(radius) for radius in radii], -1)


def random_directions(num_directions: int, features: int, seed: int) -> np.ndarray:
  """U [num_directions, D, D] of norm one, uniform."""
  directions = np.random.default_rng(seed).normal(size=(num_directions, features, features))
  return directions / np.linalg.norm(directions, axis=(1, 2), keepdims=True)


def unseen_direction(features: int, seed: int) -> np.ndarray:
  """U = v 1^T [1, D, D] of norm one."""
  direction = np.outer(np.random.default_rng(seed).normal(size=features), np.ones(features))
  return direction[None] / np.linalg.norm(direction)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
  scores = scores - scores.max(-1, keepdims=True)
  return scores - np.log(np.exp(scores).sum(-1, keepdims=True))
