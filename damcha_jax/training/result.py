"""`result.json`: what a finished run says of itself, and what every summary is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from damcha_jax.errors import WorkdirError
from damcha_jax.training.workdir import Workdir, is_number

NUMBERS = ("num_steps", "num_params", "model_flops_per_step", "train_seconds")


def read_result(workdir: Workdir, **expected: Any) -> Optional[dict[str, Any]]:
  """The `result.json` of a run's directory, or None where the run is not finished.

  It holds the numbers NUMBERS and, under 'best', the metrics of the best checkpoint by split.

  Args:
    workdir: the run's.
    **expected: values that the file must have, such as name='mha'.

  Raises:
    WorkdirError: the file cannot be read, lacks one of these, or is another run's.
  """
  result = workdir.read_json("result.json")
  if result is None:
    return None
  problem = next(_problems(result, expected), None)
  if problem:
    raise WorkdirError(f"{workdir.path / 'result.json'} {problem}; remove it, and the command that trained "
                       "the run makes it again from the last checkpoint")
  return result


def _problems(result: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
  for name, value in expected.items():
    if result.get(name) != value:
      yield f"has {name}={result.get(name)!r}, not {value!r}"
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
      # MFU, of training, is not known everywhere.
      if not is_number(value) and not (value is None and split == "train"):
        yield f"has {name}={value!r} on '{split}', which is no number"
  selection_metric = result.get("selection_metric")
  if selection_metric not in metrics_by_split["validation"]:
    yield f"has no {selection_metric} on 'validation'"
  if type(best.get("step")) is not int:
    yield "has no step of the best checkpoint"
