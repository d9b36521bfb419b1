"""Confidence intervals of a mean over seeds."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math
import statistics

import jax
import numpy as np

def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
  """t s / sqrt(n): the mean is within this of the expectation with the given confidence.

  s is the sample standard deviation and t the quantile of Student's distribution with n - 1
  degrees of freedom; values are taken to be normal and independent.

  Raises:
    ValueError: fewer than two values, which have no spread.
  """
  if len(values) < 2:
    raise ValueError(f"{len(values)} values have no spread; use at least two seeds")
  t = student_quantile(len(values) - 1, confidence)
  return t * statistics.stdev(values) / math.sqrt(len(values))


def bootstrap(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
  """The percentile interval of the mean over resamplings with replacement.

  Few values have few resamplings, so it is rough then: of three, their least and largest.

  Raises:
    ValueError: fewer than two values, which have no spread.
  """
  if len(values) < 2:
    raise ValueError(f"{len(values)} values have no spread; use at least two seeds")
  # Only a finished study needs it, and it takes half a second to import.
  from scipy import stats  # pylint: disable=import-outside-toplevel

  interval = stats.bootstrap((np.asarray(values),), np.mean, confidence_level=confidence,
                             method="percentile", rng=np.random.default_rng(0)).confidence_interval
  return float(interval.low), float(interval.high)


@functools.cache
def student_quantile(degrees: int, confidence: float) -> float:
  """The t with P(|T| < t) = confidence, T Student-distributed.

  P(|T| < t) = 1 - I_x(degrees / 2, 1 / 2), x = degrees / (degrees + t^2), I the regularised
  incomplete beta function; found by bisection.
  """
  low, high = 0.0, 1e4
  for _ in range(60):
    t = (low + high) / 2
    outside = float(jax.scipy.special.betainc(degrees / 2, 0.5, degrees / (degrees + t * t)))
    low, high = (t, high) if outside > 1 - confidence else (low, t)
  return low
