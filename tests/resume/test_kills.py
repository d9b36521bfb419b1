"""`kill -9` in the middle of a run, in new processes: the resumed run ends bitwise the same."""

from __future__ import annotations

import json
from pathlib import Path
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import lm_run
from tiny_task import run_script

NEVER = 10**9


def _run(workdir, corpus, kill_at):
  return run_script(Path(lm_run.__file__), workdir, corpus, kill_at)


def _records(workdir):
  timed = ("tokens_per_second", "train_seconds")
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [{key: value for key, value in json.loads(line).items() if key not in timed}
          for line in lines]


def _final_state(workdir):
  with ocp.CheckpointManager(workdir / "checkpoints") as manager:
    step = manager.latest_step()
    return step, manager.restore(
        step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state


@pytest.mark.families
def test_killed_ends_bitwise_like_the_uninterrupted_run(tmp_path):
  """With accumulation, layer scan and dropout; the kill comes beside a save in flight."""
  corpus = lm_run.write_corpus(tmp_path / "corpus.txt")
  whole = _run(tmp_path / "whole", corpus, NEVER)
  assert whole.returncode == 0, whole.stderr
  killed = _run(tmp_path / "killed", corpus, 6)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert not (tmp_path / "killed" / "result.json").exists()
  resumed = _run(tmp_path / "killed", corpus, NEVER)
  assert resumed.returncode == 0, resumed.stderr
  assert "resuming at step" in resumed.stderr
  states = [_final_state(tmp_path / name) for name in ("whole", "killed")]
  assert [step for step, _ in states] == [12, 12]
  jax.tree.map(np.testing.assert_array_equal, states[0][1], states[1][1])
  assert _records(tmp_path / "whole") == _records(tmp_path / "killed")
  assert len(jax.tree.leaves(states[0][1])) > 30
