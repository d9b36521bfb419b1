"""`result.json`: what a finished run says of itself, and what every summary is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from damcha_jax.errors import WorkdirError
from damcha_jax.training.workdir import Workdir, is_number

NUMBERS = ("num_steps", "num_params", "model_flops_per_step", "train_seconds")


def read_result(workdir: Workdir) -> Optional[dict[str, Any]]:
  """The `result.json` of a run's directory, or None where the run is not finished.

  It holds the numbers NUMBERS and, under 'best', the metrics of the best checkpoint by split.

  Raises:
    WorkdirError: the file cannot be read, or lacks one of these.
  """
  result = workdir.read_json("result.json")
  problem = result and next(_problems(result), None)
  if problem:
    raise WorkdirError(f"{workdir.path / 'result.json'} {problem}; remove it, and the command that trained "
                       "the run makes it again from the last checkpoint")
  return result


def _problems(result: dict[str, Any]) -> Iterator[str]:
  for name in NUMBERS:
    if not is_number(result.get(name)):
      yield f"has {name}={result.get(name)!r}, which is no number"
  best = result.get("best")
  metrics_by_split = best.get("metrics") if isinstance(best, dict) else None
  if not isinstance(metrics_by_split, dict):
    yield "has no metrics of the best checkpoint"
    return
  if "validation" not in metrics_by_split:
    yield "has no metrics of the best checkpoint on the validation split"
  for split, metrics in metrics_by_split.items():
    if not isinstance(metrics, dict):
      yield f"has {metrics!r} for the metrics on '{split}'"
      return
    for name, value in metrics.items():
      if value is not None and not is_number(value):
        yield f"has {name}={value!r} on '{split}', which is no number"
