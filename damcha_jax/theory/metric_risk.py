"""Static against adaptive metrics where contexts need different ones: Appendix C.2, in closed form.

A context c of probability pi_c has metrics M*_{i,c} [D, D] of heads i. A pair of tokens x, y, drawn
independently with second moments S_c = E[x x^T | c], has a score, and a metric is judged by

    r_c(M) = 1/2 sum_i E[(x^T M_i y - x^T M*_{i,c} y)^2 | c] + noise
           = 1/2 sum_i tr(S_c D_i S_c D_i^T) + noise,    D_i = M_i - M*_{i,c}

which satisfies Assumptions 2 and 3 with mu = min_c lambda_min(S_c)^2. The theorem bounds from below
the risk of any metric of rank at most r that is the same in all contexts, above that of M*_c:

    sum_c pi_c r_c(M) - sum_c pi_c r_c(M*_c)
        >= mu/2 sum_i min_{rank M_i <= r} sum_c pi_c ||M_i - M*_{i,c}||_F^2
         = mu/2 sum_i (sum_c pi_c ||M*_{i,c} - mean_i||_F^2 + sum_{j > r} sigma_j(mean_i)^2)

with mean_i = sum_c pi_c M*_{i,c}. The first term is what adapting gains at full rank, the second
what rank gains without adapting; C.2 adds them up.

Axes: C contexts, H heads, D width, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from damcha_jax.theory.low_rank import truncate
from damcha_jax.theory.low_rank import truncation_error

_TOLERANCE = 1e-10  # relative decrease of the risk at which alternating ends
_MAX_ROUNDS = 500


@dataclasses.dataclass(frozen=True)
class Problem:
  """Contexts that need different metrics."""

  prior_C: np.ndarray
  metric_CHDD: np.ndarray  # M*
  moment_CDD: np.ndarray  # S

  @property
  def growth(self) -> float:
    """mu of Assumption 3, min_c lambda_min(S_c)^2: the largest that holds."""
    return float(np.linalg.eigvalsh(self.moment_CDD).min() ** 2)

  @property
  def mean_HDD(self) -> np.ndarray:
    return np.einsum("c,chde->hde", self.prior_C, self.metric_CHDD)


def make_problem(
    num_contexts: int, features: int, num_heads: int, heterogeneity: float, condition: float,
    seed: int,
) -> Problem:
  """A problem with M*_{i,c} = common_i + heterogeneity * own_{i,c}, entries N(0, 1 / D).

  Args:
    num_contexts: C; context c has a probability proportional to c + 1.
    features, num_heads: D and H.
    heterogeneity: how much contexts differ.
    condition: of every S_c, with eigenvalues from 1 to `condition` in directions of its own; 1 for
      S_c = I.
    seed: of all that is drawn.
  """
  rng = np.random.default_rng(seed)
  prior_C = np.arange(1, num_contexts + 1) / (num_contexts * (num_contexts + 1) / 2)
  draw = lambda count: rng.normal(size=(count, num_heads, features, features)) / features**0.5
  metric_CHDD = draw(1) + heterogeneity * draw(num_contexts)
  axes_CDD, _ = np.linalg.qr(rng.normal(size=(num_contexts, features, features)))
  moment_CDD = (axes_CDD * np.geomspace(1, condition, features)) @ np.swapaxes(axes_CDD, 1, 2)
  return Problem(prior_C, metric_CHDD, moment_CDD)


def excess_risk(problem: Problem, metric: np.ndarray) -> float:
  """sum_c pi_c (r_c(M_c) - r_c(M*_c)) of metrics [C, H, D, D], or [H, D, D] the same for all."""
  return float(problem.prior_C @ context_excess(problem, metric))


def context_excess(problem: Problem, metric: np.ndarray) -> np.ndarray:
  """r_c(M_c) - r_c(M*_c) by context, [C]."""
  rest = metric - problem.metric_CHDD
  weighted = problem.moment_CDD[:, None] @ rest @ problem.moment_CDD[:, None]
  return 0.5 * np.sum(rest * weighted, axis=(1, 2, 3))


def adaptivity_bound(problem: Problem) -> float:
  """mu/2 sum_i sum_c pi_c ||M*_{i,c} - mean_i||_F^2: of a static metric of any rank."""
  rest = problem.metric_CHDD - problem.mean_HDD
  return 0.5 * problem.growth * float(problem.prior_C @ np.sum(rest**2, axis=(1, 2, 3)))


def rank_bound(problem: Problem, rank: int) -> float:
  """mu/2 sum_i sum_{j > r} sigma_j(mean_i)^2: what the rank adds to that."""
  return 0.5 * problem.growth * float(np.sum(truncation_error(problem.mean_HDD, rank) ** 2))


def static_bound(problem: Problem, rank: int) -> float:
  """The theorem's: no static metric of this rank has a smaller excess risk."""
  return adaptivity_bound(problem) + rank_bound(problem, rank)


def adaptive_bound(problem: Problem, rank: int) -> float:
  """mu/2 sum_c pi_c sum_i sum_{j > r} sigma_j(M*_{i,c})^2: of a metric per context of this rank."""
  missed = np.sum(truncation_error(problem.metric_CHDD, rank) ** 2, -1)
  return 0.5 * problem.growth * float(problem.prior_C @ missed)


def best_static(problem: Problem, rank: int) -> np.ndarray:
  """The static metrics [H, D, D] of least risk among those of rank at most `rank`.

  Exactly so where the rank is D, or all S_c are the same (Eckart and Young, in the whitened
  coordinates S^(1/2) M S^(1/2)). Else the risk is not convex and this is a point where alternating
  least squares over the two factors, from there, stops: no less than the minimum.
  """
  metric_HDD = _best_full(problem)
  if rank >= metric_HDD.shape[-1]:
    return metric_HDD
  size, axes = np.linalg.eigh(np.einsum("c,cde->de", problem.prior_C, problem.moment_CDD))
  root, unroot = ((axes * size**power) @ axes.T for power in (0.5, -0.5))
  left, right = truncate(root @ metric_HDD @ root, rank)
  return _alternate(problem, unroot @ left, unroot @ right)


def best_adaptive(problem: Problem, rank: int) -> np.ndarray:
  """The metrics per context [C, H, D, D] of least risk among those of rank at most `rank`."""
  return np.stack([best_static(part, rank) for part in _contexts(problem)])


def best_head_slice(problem: Problem) -> np.ndarray:
  """The metrics per context [C, H, D, D] of least risk with only the block (i, i) of head i.

  What the head-slice form can do at best. With X_i slice i, the block m solves
  (S_c)_ii m (S_c)_ii = (S_c M*_{i,c} S_c)_ii.
  """
  num_contexts, num_heads, features, _ = problem.metric_CHDD.shape
  target = problem.moment_CDD[:, None] @ problem.metric_CHDD @ problem.moment_CDD[:, None]
  metric = np.zeros((num_contexts, num_heads, features, features))
  for head, part in enumerate(np.split(np.arange(features), num_heads)):
    moment = problem.moment_CDD[:, part[:, None], part]
    block = np.linalg.solve(moment, target[:, head, part[:, None], part])
    block = np.swapaxes(np.linalg.solve(moment, np.swapaxes(block, 1, 2)), 1, 2)
    metric[:, head, part[:, None], part] = block
  return metric


def _contexts(problem: Problem) -> Iterator[Problem]:
  for metric_HDD, moment_DD in zip(problem.metric_CHDD, problem.moment_CDD, strict=True):
    yield Problem(np.ones(1), metric_HDD[None], moment_DD[None])


def _best_full(problem: Problem) -> np.ndarray:
  """sum_c pi_c S_c M S_c = sum_c pi_c S_c M*_c S_c, solved for M."""
  identity = np.broadcast_to(np.eye(problem.moment_CDD.shape[-1]), (1, *problem.mean_HDD.shape[1:]))
  return _solve(problem, identity)


def _solve(problem: Problem, right_HDR: np.ndarray) -> np.ndarray:
  """The A of least risk in M = A B^T given B: sum_c pi_c S_c (A B^T - M*_c) S_c B = 0, [H, D, R].

  On A row by row this has the matrix sum_c pi_c S_c (x) (B^T S_c B).
  """
  prior_C, metric_CHDD, moment_CDD = dataclasses.astuple(problem)
  moved = moment_CDD[:, None] @ right_HDR
  gram = np.swapaxes(right_HDR, -1, -2) @ moved
  matrix = np.einsum("c,cde,chrs->hdres", prior_C, moment_CDD, gram, optimize=True)
  target = np.einsum("c,cde,chef,chfr->hdr", prior_C, moment_CDD, metric_CHDD,
                     np.broadcast_to(moved, (*metric_CHDD.shape[:2], *moved.shape[2:])),
                     optimize=True)
  num_unknowns = target[0].size
  solved = np.linalg.solve(matrix.reshape(-1, num_unknowns, num_unknowns),
                           target.reshape(-1, num_unknowns, 1))
  return solved.reshape(target.shape)


def _alternate(problem: Problem, left: np.ndarray, right: np.ndarray) -> np.ndarray:
  transposed = dataclasses.replace(problem, metric_CHDD=np.swapaxes(problem.metric_CHDD, -1, -2))
  metric = left @ np.swapaxes(right, -1, -2)
  risk = excess_risk(problem, metric)
  for _ in range(_MAX_ROUNDS):
    left = np.linalg.qr(_solve(problem, right))[0]  # only its span matters to what follows
    right = _solve(transposed, left)
    metric, last = left @ np.swapaxes(right, -1, -2), risk
    risk = excess_risk(problem, metric)
    if last - risk <= _TOLERANCE * last:
      break
  return metric
