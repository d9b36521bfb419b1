"""The guide to adding an attention, followed to the letter in a copy of the tree."""

import json
from pathlib import Path
import shlex
import shutil
import subprocess
import sys

import pytest

from tests import documents
from tests.documents import ROOT

GUIDE = "contributing.md"
COMMANDS = [shlex.split(line) for block in documents.blocks("bash", GUIDE)
            for line in block.splitlines() if line.startswith("python -m experiments.")]


def _run(tree: Path, *arguments: str) -> str:
  done = subprocess.run([sys.executable, *arguments], cwd=tree, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _add(lines: str, diff: str) -> str:
  """`lines` with what a diff adds between the two that it shows as they are."""
  before, added, after = diff.splitlines()
  assert added[0] == "+" and before[0] == after[0] == " "
  found = f"{before[1:]}\n{after[1:]}\n"
  assert lines.count(found) == 1, f"the guide shows lines that are not there: {found}"
  return lines.replace(found, f"{before[1:]}\n{added[1:]}\n{after[1:]}\n")


@pytest.fixture(scope="module", name="tree")
def _tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
  tree = tmp_path_factory.mktemp("tree")
  for folder in ("damcha_jax", "configs", "experiments", "tests", "results"):
    shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
  shutil.copy(ROOT / "setup.cfg", tree)
  (code,) = documents.blocks("python", GUIDE)
  assert len(code.splitlines()) < 100
  (tree / "damcha_jax/attention/cosine.py").write_text(code, encoding="utf-8")
  registry = tree / "damcha_jax/attention/__init__.py"
  text = registry.read_text(encoding="utf-8")
  for diff in documents.blocks("diff", GUIDE):
    text = _add(text, diff)
  registry.write_text(text, encoding="utf-8")
  return tree


@pytest.mark.families
def test_following_the_guide_adds_an_attention(tree):
  train, cost, plan = COMMANDS
  _run(tree, *train[1:])
  rows = json.loads((tree / "runs/cosine/summary.json").read_text(encoding="utf-8"))["rows"]
  losses = {row["attention"]: row["value"] for row in rows
            if row["split"] == "validation" and row["metric"] == "nats_per_token"}
  assert set(losses) >= {"mha", "cosine"} and losses["cosine"] < 5.0  # ln 256 = 5.55 at first
  assert "cosine" in _run(tree, *cost[1:])
  rows = json.loads((tree / "runs/cosine-costs/summary.json").read_text(encoding="utf-8"))["rows"]
  gflops = {row["attention"]: row["value"] for row in rows if row["metric"] == "gflops"}
  assert gflops["cosine"] == gflops["mha"] > 0
  lines = {line.split()[0]: line.split() for line in _run(tree, *plan[1:]).splitlines()}
  count = lambda name: int(lines[name][1].replace(",", ""))
  assert count("cosine") - count("mha") == 12 * 12  # a scale for each head of each layer


@pytest.mark.families
def test_what_holds_for_every_attention_is_tested_for_it(tree):
  output = _run(tree, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                "tests/attention", "-k", "cosine")
  assert int(output.split(" passed")[0].split()[-1]) >= 20


def test_the_guide_is_about_the_registry_as_it_is():
  text = (ROOT / "damcha_jax/attention/__init__.py").read_text(encoding="utf-8")
  for diff in documents.blocks("diff", GUIDE):
    text = _add(text, diff)
  assert text.count("osine") == 4
