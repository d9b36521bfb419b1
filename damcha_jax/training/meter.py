"""Speed: tokens per second, model FLOPs utilisation and time left."""

from __future__ import annotations

from collections.abc import Callable
import time
from typing import Optional

import jax

from damcha_jax.training.flops import peak_flops


class Meter:
  """Counts steps and the seconds spent on them.

  Evaluations and saves are left out by `pause` and `resume`.
  """

  def __init__(self, steps_left: int, model_flops_per_step: int, train_seconds: float = 0.0,
               unit: str = "tokens", clock: Callable[[], float] = time.monotonic):
    """Creates a meter.

    Args:
      steps_left: updates that this process has to do.
      model_flops_per_step: see `flops.model_flops_per_step`.
      train_seconds: what earlier processes of the run spent.
      unit: what is counted.
      clock: seconds, monotonic.
    """
    self.train_seconds = train_seconds
    self._steps_left = steps_left
    self._unit = unit
    self._flops_per_step = model_flops_per_step
    self._clock = clock
    self._started = self._since = clock()
    self._steps = self._interval_steps = 0
    self._interval_seconds = self._interval_units = 0.0

  def count_step(self, num_units: float) -> None:
    """One more update is complete."""
    self.pause()
    self._steps += 1
    self._interval_steps += 1
    self._interval_units += num_units
    self._steps_left -= 1

  def pause(self) -> None:
    """Books the time up to now as training."""
    now = self._clock()
    self.train_seconds += now - self._since
    self._interval_seconds += now - self._since
    self._since = now

  def resume(self) -> None:
    """Leaves out the time since `pause`."""
    self._since = self._clock()

  def read(self) -> dict[str, Optional[float]]:
    """Speed since the last reading: `<unit>_per_second`, `mfu` (None where the device's peak is not
    known) and `train_seconds` of the whole run."""
    seconds = max(self._interval_seconds, 1e-9)
    peak = peak_flops(jax.devices()[0])
    mfu = peak and (self._interval_steps * self._flops_per_step
                    / (seconds * peak * jax.device_count()))
    units_per_second = self._interval_units / seconds
    self._interval_steps, self._interval_seconds, self._interval_units = 0, 0.0, 0.0
    return {f"{self._unit}_per_second": units_per_second, "mfu": mfu,
            "train_seconds": self.train_seconds}

  def seconds_left(self) -> float:
    """An estimate from all that this process did, evaluations and saves included."""
    return (self._clock() - self._started) / max(self._steps, 1) * self._steps_left
