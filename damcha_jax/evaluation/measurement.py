"""What a metric gives: a number, or none and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np

from damcha_jax.errors import UserError


class MetricError(UserError):
  """A metric that has no value for these samples."""


class Measurement(NamedTuple):
  """The value of a metric.

  Attributes:
    value: a finite number, or None where there is none.
    note: why there is none, or what the number must be read with.
  """

  value: Optional[float]
  note: Optional[str] = None


def measure(compute: Callable[[], float | Measurement]) -> Measurement:
  """`compute()` as a measurement; what the user can mend becomes the note, other errors pass.

  So one metric that cannot be computed does not stop the others.
  """
  try:
    result = compute()
    if not isinstance(result, Measurement):
      result = Measurement(float(result))
    if result.value is not None and not np.isfinite(result.value):
      return Measurement(None, f"the value is {result.value}")
    return result
  except UserError as error:
    return Measurement(None, str(error))


def require_finite(name: str, values: np.ndarray) -> np.ndarray:
  """`values` in float64.

  Raises:
    MetricError: some are NaN or infinite.
  """
  values = np.asarray(values, np.float64)
  finite = np.isfinite(values)
  if not finite.all():
    bad = np.unique(np.argwhere(~finite)[:, 0]) if values.ndim else np.zeros(1, int)
    raise MetricError(
        f"{name} holds NaN or infinite numbers in {len(bad)} of {len(values) if values.ndim else 1}"
        f" samples, first in sample {bad[0]}"
    )
  return values
