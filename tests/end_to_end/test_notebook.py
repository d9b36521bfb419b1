"""The notebook's cells, run in order."""

import subprocess
import sys
import os
import re

import pytest

import notebook


def _run(folder, **parameters):
  path = folder / "cells.py"
  path.write_text(notebook.program(**parameters))
  return subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True,
                        check=False, env={**os.environ, "MPLBACKEND": "agg"})


@pytest.mark.families
def test_every_cell_runs(tmp_path):
  done = _run(tmp_path, SOURCE=str(notebook.ROOT), SIZE="smoke", WORKDIR="results")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "results" / "summary.json").is_file()
  assert "validation" in done.stdout and "TensorBoard" in done.stdout
  losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats\n", done.stdout)]
  assert losses[0] > 0.6 and losses[-1] < 0.4
  (accuracy,) = re.findall(r"(\d+)% of new sequences are told right", done.stdout)
  assert int(accuracy) > 80


def test_without_the_project_it_says_what_to_set(tmp_path):
  done = _run(tmp_path)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1].startswith("RuntimeError: set SOURCE to the project's address")
