"""Collects metrics: each has a value, or none and the reason, and none stops the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from damcha_jax.errors import UserError


T = TypeVar("T")


class MetricError(UserError):
  """A metric that has no value for these samples."""


class MetricValue(NamedTuple):
  """The value of a metric.

  Attributes:
    value: a finite number, or None where there is none.
    unit: of the value.
    note: why there is none, or what the number must be read with.
  """

  value: Optional[float]
  unit: str
  note: Optional[str] = None


Note = Optional[str | Callable[[], str]]  # a function is called once there is a value


class Report:
  """Metrics by name, and the values per sample that some are means of, for figures."""

  def __init__(self):
    self.metrics: dict[str, MetricValue] = {}
    self.samples: dict[str, np.ndarray] = {}

  def number(self, name: str, unit: str, compute: Callable[[], float],
             note: Note = None) -> None:
    """Adds `compute()`; what the user can mend becomes the note, other errors pass."""
    try:
      value = float(compute())
      if not np.isfinite(value):
        raise MetricError(f"the value is {value}")
      self.metrics[name] = MetricValue(value, unit, note() if callable(note) else note)
    except UserError as error:
      self.metrics[name] = MetricValue(None, unit, str(error))

  def distribution(self, name: str, unit: str, compute: Callable[[], np.ndarray],
                   note: Note = None) -> None:
    """Adds mean and quartiles of the values per sample, as `name_mean`, `name_q25`, `name_q75`."""
    try:
      values = require_finite(name, compute())
      if not values.size:
        raise MetricError("there are no samples")
      q25, q75 = np.quantile(values, (0.25, 0.75))
      results = {"mean": values.mean(), "q25": q25, "q75": q75}
      text = note() if callable(note) else note
      self.samples[name] = values
    except UserError as error:
      results, text = dict.fromkeys(("mean", "q25", "q75")), str(error)
    for statistic, value in results.items():
      self.metrics[f"{name}_{statistic}"] = MetricValue(
          None if value is None else float(value), unit, text)


def optional(load: Callable[[], T]) -> tuple[Optional[T], str]:
  """`load()` and no reason, or None and the reason why it cannot be had, such as absent weights."""
  try:
    return load(), ""
  except UserError as error:
    return None, str(error)


def require_finite(name: str, values: np.ndarray) -> np.ndarray:
  """`values` in float64.

  Raises:
    MetricError: some samples, along the first axis, hold NaN or infinite numbers.
  """
  values = np.asarray(values, np.float64)
  bad = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
  if bad.size:
    raise MetricError(f"{name} holds NaN or infinite numbers in {bad.size} of {len(values)}"
                      f" samples, first in sample {bad[0]}")
  return values
