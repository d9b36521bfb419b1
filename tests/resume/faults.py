"""What fault injections share: damage to files, attempts to train, what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import shutil
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.errors import UserError
from damcha_jax.training import loop
from tiny_task import TinyConfig, assert_trees_equal, tiny_task

CONFIG = TinyConfig()
TIMED = ("tokens_per_second", "train_seconds", "crc32")


def _flip(content: bytes, rng: np.random.Generator) -> bytes:
  changed = bytearray(content)
  changed[rng.integers(len(changed))] ^= 1 << rng.integers(8)
  return bytes(changed)


DAMAGES: dict[str, Callable[[bytes, np.random.Generator], bytes | None]] = {
    "truncated": lambda content, rng: content[:rng.integers(len(content))],
    "emptied": lambda content, rng: b"",
    "with a bit flipped": _flip,
    "overwritten": lambda content, rng: rng.bytes(len(content)),
    "deleted": lambda content, rng: None,
}


def damage(path: Path, how: str, rng: np.random.Generator) -> None:
  changed = DAMAGES[how](path.read_bytes(), rng)
  if changed is None:
    path.unlink()
  else:
    path.write_bytes(changed)


def one_line(error: Exception) -> None:
  assert str(error) and "\n" not in str(error)


def attempt(workdir: Path, **options: Any) -> str:
  """Trains in this process: 'ended', or the kind of the one-line error."""
  try:
    loop.train(tiny_task(**options), CONFIG, workdir, seed=0)
  except (UserError, ConfigError) as error:
    one_line(error)
    return type(error).__name__
  return "ended"


def interrupt(workdir: Path, step: int) -> None:
  """Trains until batch `step`, and stops as a crash does."""
  def stop(number, batch):
    del batch
    if number == step:
      raise ZeroDivisionError
  with pytest.raises(ZeroDivisionError):
    loop.train(tiny_task(on_batch=stop), CONFIG, workdir, seed=0)


def completed(workdir: Path) -> list[int]:
  """Steps whose checkpoint is in its place."""
  folder = workdir / "checkpoints"
  return sorted(int(path.name) for path in (folder.iterdir() if folder.is_dir() else ())
                if path.name.isdigit())


def final_state(workdir: Path) -> Any:
  with ocp.CheckpointManager(workdir / "checkpoints") as manager:
    return manager.restore(manager.latest_step(),
                           args=ocp.args.Composite(state=ocp.args.StandardRestore())).state


def records(workdir: Path) -> list[dict[str, Any]]:
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [{key: value for key, value in json.loads(line).items() if key not in TIMED}
          for line in lines]


def _untimed(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _untimed(entry) for key, entry in value.items() if key not in TIMED}
  return value


class Whole:
  """The undisturbed run, to which every other one must come."""

  def __init__(self, workdir: Path):
    self.state, self.records = final_state(workdir), records(workdir)
    self.result = _untimed(json.loads((workdir / "result.json").read_text()))

  def check(self, workdir: Path, *, with_records: bool = True) -> None:
    """The same parameters, optimizer, result and, unless they were lost, records; bitwise."""
    assert_trees_equal(final_state(workdir), self.state)
    if with_records:
      assert records(workdir) == self.records
      assert _untimed(json.loads((workdir / "result.json").read_text())) == self.result


def copy(workdir: Path, to: Path) -> Path:
  shutil.copytree(workdir, to)
  return to
