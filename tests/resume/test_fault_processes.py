"""Faults from outside: real kills at random moments, rivals for one workdir."""

from __future__ import annotations

from pathlib import Path
import signal
import time

import numpy as np
import pytest

from tests.resume import faults
import tiny_run
from tiny_task import start_script

pytestmark = pytest.mark.slow
SCRIPT = Path(tiny_run.__file__)
LIVES = 5


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("undisturbed")
  process = start_script(SCRIPT, workdir)
  errors = process.communicate(timeout=300)[1]
  assert process.returncode == 0, errors
  return faults.Whole(workdir)


def _start(workdir):
  """A process that has begun, and the line that says where."""
  process = start_script(SCRIPT, workdir)
  line = process.stderr.readline()
  while "since this run began" in line:  # other versions, as after a commit
    line = process.stderr.readline()
  return process, line


@pytest.mark.parametrize("chain", range(6))
def test_real_kills_at_random_moments(fault, undisturbed, tmp_path, chain):
  """Each chain is one run that is ended five times before it is left alone."""
  rng, kept = np.random.default_rng(chain), []
  for life in range(LIVES + 1):
    process, began = _start(tmp_path)
    with process:
      if life < LIVES:
        number = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT][(life + chain) % 3]
        time.sleep(rng.uniform(0, 1))
        process.send_signal(number)
      errors = began + process.communicate(timeout=300)[1]
    assert "Traceback" not in errors, errors
    assert not kept or f"resuming at step {max(kept)} of" in began, errors
    if life == LIVES:
      assert process.returncode == 0, errors
      break
    if number == signal.SIGKILL:
      assert process.returncode == -number, errors
    else:
      assert process.returncode == 1 and errors.splitlines()[-1].startswith("error: "), errors
    kept = faults.completed(tmp_path)
    fault(f"{number.name} from outside", "resumed at the newest checkpoint, ended the same")
  undisturbed.check(tmp_path)


@pytest.mark.parametrize("attempt", range(3))
def test_two_processes_at_the_same_instant(fault, undisturbed, tmp_path, attempt):
  """Whoever is second says so; what is trained is what one alone trains."""
  both = [start_script(SCRIPT, tmp_path) for _ in range(2)]
  errors = [process.communicate(timeout=300)[1] for process in both]
  assert sorted(process.returncode for process in both) == [0, 1], errors
  (refused,) = [text for text in errors if text.splitlines()[-1].startswith("error: ")]
  assert "is in use by another process" in refused and "Traceback" not in "".join(errors)
  undisturbed.check(tmp_path)
  fault("two processes at the same instant", "the second refused")
