"""The guide to adding an attention, followed to the letter in a copy of the tree."""

import json
from pathlib import Path
import re
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
LINES, OPTIONS = documents.blocks("diff", GUIDE)[:2], documents.blocks("diff", GUIDE)[2:]


def _run(tree: Path, *arguments: str) -> str:
  done = subprocess.run([sys.executable, *arguments], cwd=tree, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _add(tree: Path, diff: str) -> None:
  """Adds to a file of `tree` what a diff has between the two lines that it shows as they are."""
  header, before, *added, after = diff.splitlines()
  assert before[0] == after[0] == " " and {line[0] for line in added} == {"+"}
  path = tree / header.removeprefix("+++ ")
  text, found = path.read_text(encoding="utf-8"), f"{before[1:]}\n{after[1:]}\n"
  assert text.count(found) == 1, f"the guide shows lines that are not in {path}: {found}"
  lines = "\n".join(line[1:] for line in (before, *added, after)) + "\n"
  path.write_text(text.replace(found, lines), encoding="utf-8")


@pytest.fixture(scope="module", name="tree")
def _tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
  tree = tmp_path_factory.mktemp("tree")
  for folder in ("damcha_jax", "configs", "docs", "experiments", "tests", "results"):
    shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
  shutil.copy(ROOT / "setup.cfg", tree)
  (code,) = documents.blocks("python", GUIDE)
  assert len(code.splitlines()) < 100
  (tree / "damcha_jax/attention/cosine.py").write_text(code, encoding="utf-8")
  for diff in LINES:
    _add(tree, diff)
  return tree


@pytest.fixture(scope="module", name="tree_with_options")
def _tree_with_options(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp("options")
  shutil.copytree(tree, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
  for diff in OPTIONS:
    _add(path, diff)
  return path


@pytest.mark.families
def test_following_the_guide_adds_an_attention(tree):
  train, sample, cost, plan = COMMANDS
  _run(tree, *train[1:])
  rows = json.loads((tree / "runs/cosine/summary.json").read_text(encoding="utf-8"))["rows"]
  losses = {row["attention"]: row["value"] for row in rows
            if row["split"] == "validation" and row["metric"] == "nats_per_token"}
  assert set(losses) >= {"mha", "cosine"} and losses["cosine"] < 5.0  # ln 256 = 5.55 at first
  assert "The " in _run(tree, *sample[1:])
  assert "cosine" in _run(tree, *cost[1:])
  rows = json.loads((tree / "runs/cosine-costs/summary.json").read_text(encoding="utf-8"))["rows"]
  gflops = {row["attention"]: row["value"] for row in rows if row["metric"] == "gflops"}
  assert gflops["cosine"] == gflops["mha"] > 0
  lines = {line.split()[0]: line.split() for line in _run(tree, *plan[1:]).splitlines()}
  count = lambda name: int(lines[name][1].replace(",", ""))
  assert count("cosine") - count("mha") == 12 * 12  # a scale for each head of each layer
  _run(tree, "docs/make_api.py")
  assert "### CosineAttention" in (tree / "docs/api.md").read_text(encoding="utf-8")


@pytest.mark.families
def test_what_holds_for_every_attention_is_tested_for_it(tree):
  output = _run(tree, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                "tests/attention", "tests/models", "-m", "not slow", "-k", "cosine")
  assert int(output.split(" passed")[0].split()[-1]) >= 30


@pytest.mark.families
def test_options_reach_the_attention_from_every_config(tree_with_options):
  _run(tree_with_options, "-c", """
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from configs import mix, synthetic, table2
from damcha_jax.config import freeze
from damcha_jax.config.efficiency import EfficiencyConfig
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.models.attentions import attention_factory

config = mix.get_config("smoke")
config.cosine.initial_scale = 5.0
config.model.initializer = "gpt2"
config = freeze(config)
params = {}
for name in ("cosine", "mha"):
  attention = attention_factory(config, name, config.model).attention(parent=None)
  params[name] = nn.unbox(attention.init(jax.random.key(0), jnp.zeros((1, 2, 16)))["params"])
assert (params["cosine"]["scale"] == 5.0).all()
np.testing.assert_array_equal(*(of["query"]["kernel"] for of in params.values()))
for module, cls in ((synthetic, SyntheticConfig), (table2, EfficiencyConfig)):
  assert freeze(module.get_config(), cls).cosine.initial_scale == 10.0
""")
  # Runs that began before are today's.
  _run(tree_with_options, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
       "tests/configs/test_upgrade.py", "tests/static/test_tree.py", "-k", "upgrade or is_read")


def test_the_guide_is_about_what_there_is(tmp_path):
  for diff in (*LINES, *OPTIONS):
    name = diff.splitlines()[0].removeprefix("+++ ")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, tmp_path / name)
    _add(tmp_path, diff)
  files = (ROOT / "tests").rglob("test_*.py")
  tests = "\n".join(path.read_text(encoding="utf-8") for path in files)
  named = re.findall(r"`(test_\w+)`", documents.TEXTS[GUIDE])
  assert len(named) > 5 and [name for name in named if f"def {name}(" not in tests] == []
