"""Distances between two sets of feature vectors: Frechet, kernel, per pair, and within one set.

All in float64 on the host, exact for any number of samples.

Axes: N samples of one set, M of the other, F features, R rows of a factor of the covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.report import require_finite
from damcha_jax.files import expanded, replacing

GROUP_SIZE = 50  # the paper's FID@Top-50 is of this many samples
_BLOCK = 1024  # rows of a kernel matrix at a time


class Statistics(NamedTuple):
  """Mean and covariance of a set of features.

  Attributes:
    num_samples: N; 0 if unknown.
    mean_F: the mean.
    factor_RF: R^T R is the unbiased covariance, R <= F.
  """

  num_samples: int
  mean_F: np.ndarray
  factor_RF: np.ndarray


def statistics(features_NF: np.ndarray) -> Statistics:
  """Mean and covariance of features.

  Raises:
    MetricError: fewer than two samples, or some are not finite.
  """
  features_NF = _features("features", features_NF, at_least=2)
  mean_F = features_NF.mean(0)
  factor_NF = (features_NF - mean_F) / np.sqrt(len(features_NF) - 1)
  if factor_NF.shape[0] > factor_NF.shape[1]:
    factor_NF = np.linalg.qr(factor_NF, mode="r")
  return Statistics(len(features_NF), mean_F, factor_NF)


def statistics_from_covariance(
    mean_F: np.ndarray, covariance_FF: np.ndarray, num_samples: int = 0
) -> Statistics:
  """Statistics that were published as mean and covariance.

  Raises:
    MetricError: they do not fit, or the covariance is none.
  """
  mean_F = require_finite("mean", mean_F)
  covariance_FF = require_finite("covariance", covariance_FF)
  if covariance_FF.shape != 2 * mean_F.shape or not np.allclose(covariance_FF, covariance_FF.T):
    raise MetricError(f"a covariance of shape {covariance_FF.shape}, or one that is not symmetric,"
                      f" does not fit a mean of shape {mean_F.shape}")
  values_F, vectors_FF = np.linalg.eigh(covariance_FF)
  if values_F[0] < -1e-6 * max(values_F[-1], 0):
    raise MetricError(f"the covariance has the negative eigenvalue {values_F[0]:.3g}")
  return Statistics(num_samples, mean_F, (vectors_FF * np.sqrt(values_F.clip(0))).T)


def frechet_distance(x: Statistics, y: Statistics) -> float:
  """Squared Frechet distance between two normal distributions, the FID if of Inception features.

      |m_x - m_y|^2 + tr(C_x) + tr(C_y) - 2 tr((C_x C_y)^(1/2))

  With C = R^T R the last trace is the sum of the singular values of R_x R_y^T: no matrix square
  root, nothing added to the diagonal, and exact for singular covariances, as of 50 samples.

  Raises:
    MetricError: the numbers of features differ.
  """
  if x.mean_F.shape != y.mean_F.shape:
    raise MetricError(f"{x.mean_F.size} features cannot be compared with {y.mean_F.size}")
  trace = np.linalg.svd(x.factor_RF @ y.factor_RF.T, compute_uv=False).sum()
  squared = lambda array: float(np.square(array).sum())
  return (squared(x.mean_F - y.mean_F) + squared(x.factor_RF) + squared(y.factor_RF)
          - 2 * float(trace))


def groups(features_NF: np.ndarray, group_size: int = GROUP_SIZE) -> list[np.ndarray]:
  """Disjoint groups of consecutive samples; those beyond the last whole group are left out.

  Raises:
    MetricError: fewer samples than one group, or some are not finite.
  """
  features_NF = _features("features", features_NF, at_least=group_size)
  return [features_NF[start : start + group_size]
          for start in range(0, len(features_NF) - group_size + 1, group_size)]


def grouped_frechet_distances(
    features_NF: np.ndarray, reference: Statistics, group_size: int = GROUP_SIZE
) -> np.ndarray:
  """The Frechet distance of each of `groups` to a reference, [N / group_size].

  A distance of so few samples is dominated by its bias, so compare it with that of real images in
  groups of the same size only.

  Raises:
    MetricError: fewer samples than one group, or some are not finite.
  """
  return np.array([frechet_distance(statistics(group_NF), reference)
                   for group_NF in groups(features_NF, group_size)])


def kernel_self_similarity(x_NF: np.ndarray) -> float:
  """mean_{i != j} k(x_i, x_j), see `kernel_distance`.

  Raises:
    MetricError: fewer than two samples, or some are not finite.
  """
  x_NF = _features("features", x_NF, at_least=2)
  return (_kernel_sum(x_NF, x_NF) - _kernel_diagonal(x_NF)) / (len(x_NF) * (len(x_NF) - 1))


def kernel_distance(
    x_NF: np.ndarray, y_MF: np.ndarray, y_similarity: Optional[float] = None
) -> float:
  """Unbiased squared maximum mean discrepancy, the KID if of Inception features.

      k(a, b) = (a b / F + 1)^3
      mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

  Its expectation does not depend on the number of samples, and is 0 for equal distributions, so
  single values may be negative.

  Args:
    x_NF: features.
    y_MF: features of the reference.
    y_similarity: `kernel_self_similarity(y_MF)`, where it is known already.

  Raises:
    MetricError: fewer than two samples, other numbers of features, or not finite.
  """
  x_similarity = kernel_self_similarity(x_NF)
  x_NF, y_MF = _features("features", x_NF, 2), _features("reference features", y_MF, 2)
  if x_NF.shape[1] != y_MF.shape[1]:
    raise MetricError(f"{x_NF.shape[1]} features cannot be compared with {y_MF.shape[1]}")
  if y_similarity is None:
    y_similarity = kernel_self_similarity(y_MF)
  across = _kernel_sum(x_NF, y_MF) / (len(x_NF) * len(y_MF))
  return float(x_similarity + y_similarity - 2 * across)


def kernel_distance_of_subsets(
    x_NF: np.ndarray, y_MF: np.ndarray, subset_size: int = 1000, num_subsets: int = 100,
    seed: int = 0,
) -> tuple[float, float]:
  """Mean and standard deviation of `kernel_distance` over random subsets without replacement.

  Raises:
    MetricError: fewer samples than a subset takes, and as `kernel_distance`.
  """
  smaller = min(len(x_NF), len(y_MF))
  if smaller < subset_size:
    raise MetricError(f"subsets of {subset_size} need as many samples, and there are {smaller}")
  rng = np.random.default_rng(seed)
  draw = lambda array: array[rng.choice(len(array), subset_size, replace=False)]
  distances = [kernel_distance(draw(x_NF), draw(y_MF)) for _ in range(num_subsets)]
  return float(np.mean(distances)), float(np.std(distances))


def feature_distance(x_NF: np.ndarray, y_NF: np.ndarray) -> np.ndarray:
  """Squared distance of each pair of samples, |x_i - y_i|^2, [N]: the authors' FID of one image.

  Raises:
    MetricError: no samples, other shapes, or not finite.
  """
  x_NF, y_NF = _features("features", x_NF, 1), _features("reference features", y_NF, 1)
  if x_NF.shape != y_NF.shape:
    raise MetricError(f"pairs need equal shapes, not {x_NF.shape} and {y_NF.shape}")
  return np.square(x_NF - y_NF).sum(1)


def diversity(features_NF: np.ndarray) -> float:
  """Mean distance |x_i - x_j| between two different samples of a set; 0 where all are the same.

  Raises:
    MetricError: fewer than two samples, or not finite.
  """
  features_NF = _features("features", features_NF, at_least=2)
  # Around the mean, so that squares do not cancel.
  features_NF = features_NF - features_NF.mean(0)
  squares_N = np.square(features_NF).sum(1)
  total = 0.0
  for start in range(0, len(features_NF), _BLOCK):
    rows = slice(start, start + _BLOCK)
    squared_BN = squares_N[rows, None] + squares_N - 2 * features_NF[rows] @ features_NF.T
    block = np.sqrt(squared_BN.clip(0))
    block[np.arange(len(block)), np.arange(start, start + len(block))] = 0
    total += block.sum()
  return float(total / (len(features_NF) * (len(features_NF) - 1)))


class Reference(NamedTuple):
  """Features of real images and their statistics."""

  features_MF: np.ndarray
  statistics: Statistics


def cached_reference(
    path: Optional[str | Path], key: Mapping[str, str], compute: Callable[[], np.ndarray]
) -> Reference:
  """The reference of features `compute()`, kept in a .npz file for the next time.

  Args:
    path: the file; None keeps nothing.
    key: what the features depend on (weights, mode, images). A file with another key, or a damaged
      one, is written again.
    compute: gives the features.

  Raises:
    MetricError: as `statistics`, or the file cannot be written.
  """
  text = json.dumps(dict(key), sort_keys=True)
  if path is not None:
    path = expanded(path)
    try:
      with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        if archive["key"].item() == text:
          kept = [archive[name] for name in Statistics._fields]
          return Reference(archive["features_MF"], Statistics(int(kept[0]), *kept[1:]))
    except Exception:  # pylint: disable=broad-except; missing, or damaged in any way
      pass
  features_MF = compute()
  result = Reference(features_MF, statistics(features_MF))
  if path is not None:
    _write(path, key=text, features_MF=features_MF, **result.statistics._asdict())
  return result


def _write(path: Path, **arrays: np.ndarray | str | int) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
      np.savez(partial, **arrays)
  except OSError as error:
    raise MetricError(f"{path} cannot be written: {error.strerror or error}") from error


def _features(name: str, features_NF: np.ndarray, at_least: int) -> np.ndarray:
  features_NF = np.asarray(features_NF)
  if features_NF.ndim != 2:
    raise MetricError(f"{name} must be [samples, features], not {list(features_NF.shape)}")
  if len(features_NF) < at_least:
    raise MetricError(
        f"at least {at_least} samples are needed, and there are {len(features_NF)}; sample more"
    )
  return require_finite(name, features_NF)


def _kernel(x_NF: np.ndarray, y_MF: np.ndarray) -> np.ndarray:
  return (x_NF @ y_MF.T / x_NF.shape[1] + 1) ** 3


def _kernel_sum(x_NF: np.ndarray, y_MF: np.ndarray) -> float:
  return sum(_kernel(x_NF[start : start + _BLOCK], y_MF).sum()
             for start in range(0, len(x_NF), _BLOCK))


def _kernel_diagonal(x_NF: np.ndarray) -> float:
  return float(((np.square(x_NF).sum(1) / x_NF.shape[1] + 1) ** 3).sum())
