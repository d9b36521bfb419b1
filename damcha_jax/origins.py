"""Whose draws a file holds, so that it is not taken for those of another run, step or rule."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from damcha_jax.training.workdir import checksum

Origin = dict[str, Any]


def origin_of(attention: str, seed: int, result: Mapping[str, Any], rule: Any) -> Origin:
  """Of what is drawn of a run's best checkpoint.

  Args:
    attention, seed: the run's.
    result: its `result.json`; the validation metric tells apart evaluations of one checkpoint.
    rule: a dataclass of how much is drawn, and how.
  """
  best = result["best"]
  return {"attention": attention, "seed": seed, "step": best["step"],
          "validation": best["metrics"]["validation"][result["selection_metric"]],
          "rule": dataclasses.asdict(rule)}


def seal(origin: Origin, contents: Any) -> int:
  """The checksum that holds contents, as JSON has them, and their origin together."""
  return checksum([origin, contents])
