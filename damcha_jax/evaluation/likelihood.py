"""Exact evaluation: masked sums over whole splits, the same at any batch size and device count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any, Optional

import jax
import numpy as np

PyTree = Any
Sums = dict[str, float]


class Evaluator:
  """Adds up a task's per-example sums over whole splits.

  Each example contributes one number per entry, computed on the devices; the total is taken on the
  host in float64 in the split's order. A batch is completed by zero-weight rows up to the multiple
  that the devices need, so nothing is dropped or counted twice.
  """

  def __init__(self, eval_loss_fn: Callable[[PyTree, PyTree], dict[str, jax.Array]],
               place: Callable[[Mapping[str, np.ndarray]], PyTree], batch_size: int,
               batch_multiple: int = 1, out_shardings: Optional[Any] = None):
    """Creates an evaluator.

    Args:
      eval_loss_fn: `(params, batch) -> {name: [B] sums per example}`; must include `weight`.
      place: puts a host batch of all rows on the devices.
      batch_size: examples per call, rounded up to a multiple of `batch_multiple`.
      batch_multiple: how many devices share the rows.
      out_shardings: replicated, where several processes read the sums.
    """
    self._sums_fn = jax.jit(eval_loss_fn, out_shardings=out_shardings)
    self._place = place
    self._batch_size = -(-batch_size // batch_multiple) * batch_multiple

  def split_sums(self, params: PyTree, source: Any,
                 should_stop: Callable[[], bool] = lambda: False,
                 progress: Callable[[float], None] = lambda fraction: None) -> Optional[Sums]:
    """The sums over every example of `source`, or None if `should_stop()` became true.

    `progress` is told the fraction done before every batch.
    """
    totals, pending = {}, None
    for start in range(0, len(source), self._batch_size):
      if should_stop():
        return None
      progress(start / len(source))
      ahead = self._sums_fn(params, self._place(source.batch(start, self._batch_size)))
      # The previous batch is read while this one computes.
      totals = _add(totals, pending)
      pending = ahead
    return {name: float(total) for name, total in _add(totals, pending).items()}

  def evaluate(self, params: PyTree, sources: Mapping[str, Any],
               should_stop: Callable[[], bool] = lambda: False,
               progress: Callable[[str, float], None] = lambda name, fraction: None,
               ) -> Optional[dict[str, Sums]]:
    """Sums per source, and for names `split/part` also of the pooled `split`."""
    results = {}
    for name, source in sources.items():
      sums = self.split_sums(params, source, should_stop, functools.partial(progress, name))
      if sums is None:
        return None
      pool = name.split("/")[0]
      if pool != name:
        pooled = results.setdefault(pool, dict.fromkeys(sums, 0.0))
        results[pool] = {key: pooled[key] + value for key, value in sums.items()}
      results[name] = sums
    return results


def _add(totals: dict[str, np.float64], pending: Optional[dict[str, jax.Array]]):
  if pending is None:
    return totals
  # One number after another: a pairwise sum would depend on where batches end.
  return {name: np.add.accumulate(np.concatenate(
      [[totals.get(name, 0.0)], np.asarray(sums_B, np.float64)]))[-1]
          for name, sums_B in pending.items()}
