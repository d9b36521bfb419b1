"""`python -m experiments.theory`: what it finds, that it resumes, what its document says."""

from __future__ import annotations

import json
from pathlib import Path
import re
import subprocess
import sys
from typing import Any

import pytest

from configs import theory as theory_config
from damcha_jax.config import freeze
from damcha_jax.config.theory import TheoryConfig
from experiments import command_line
from experiments import common
from experiments import theory
from experiments import theory_findings

ROOT = common.PAPER.parents[1]
DOCUMENT = ROOT / "docs" / "theory.md"
FIGURES = ("strictness", "head_slice", "excess_risk", "heterogeneity", "generator", "growth",
           "costs")


def _rows(workdir: Path) -> dict[tuple, dict[str, Any]]:
  summary = json.loads((workdir / "summary.json").read_text())
  rows = {(row["dataset"], row["attention"], row["metric"], row["variant"]): row
          for row in summary["rows"]}
  assert len(rows) == len(summary["rows"]) and summary["status"] == "ok"
  return rows


NUMPY_IS_LOADED = """
import os, sys
class Watch:
  def find_spec(self, name, path=None, target=None):
    if name == "numpy":
      print(os.environ["OPENBLAS_NUM_THREADS"])
sys.meta_path.insert(0, Watch())
import experiments.theory
"""


@pytest.mark.families
def test_numpy_is_loaded_with_one_thread(monkeypatch):
  """Two that wait for each other took minutes for seconds of work on a machine that was busy."""
  monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
  done = subprocess.run([sys.executable, "-c", NUMPY_IS_LOADED], check=True, capture_output=True,
                        text=True, cwd=ROOT)
  assert done.stdout == "1\n"


def test_risks_are_found_beside_bounds_that_they_are_not_below():
  config = freeze(theory_config.get_config("smoke"), TheoryConfig)
  findings = {(one.dataset, one.attention, one.metric, one.variant): one.value
              for one, _ in theory_findings.contexts(config, seed=0)}
  value = lambda attention, metric: findings[
      "c2_contexts", attention, metric, "K=2, rank=2, condition=4"]
  for attention in ("static", "adaptive_low_rank"):
    assert value(attention, "excess_risk") > value(attention, "lower_bound") > 0
    assert value(attention, "below_bound") == 0
  assert value("static", "lower_bound") > value("static", "bound_from_rank") > 0
  alike = lambda attention: findings["c2_heterogeneity", attention, "excess_risk",
                                     "heterogeneity=0"]
  assert alike("static_full_rank") < 1e-9 < alike("static") < alike("adaptive_head_slice")


def test_a_risk_below_its_bound_is_counted(monkeypatch):
  config = freeze(theory_config.get_config("smoke"), TheoryConfig)
  bound = theory_findings.metric_risk.static_bound
  monkeypatch.setattr(theory_findings.metric_risk, "static_bound",
                      lambda problem, rank: 100 * bound(problem, rank))
  below = {one.variant for one, _ in theory_findings.contexts(config, seed=0)
           if (one.attention, one.metric, one.value) == ("static", "below_bound", 1.0)}
  assert "K=2, rank=2, condition=4" in below


@pytest.mark.parametrize("override, message", [
    ("--config.seeds=0,0", "'seeds' must name at least one seed and none twice"),
    ("--config.contexts.ranks=2,99", "'contexts.ranks' has 99, more than contexts.features=4"),
    ("--config.strictness.ranks=2,8", "'strictness.ranks' lacks 4, the width of a head"),
    ("--config.strictness.num_heads=3", "'strictness' has T=6, D=8, H=3"),
    ("--config.generator.signals=-1.0,0.0", "'generator.signals' must be at least 0"),
    ("--config.contexts.heterogeneity=inf", "'contexts.heterogeneity' must be at least 0"),
    ("--config.growth.num_samples=10000000000000", "'growth.num_samples' must be positive"),
    ("--config.generator.signals=0.5,0.50000001", "differ by less than rows tell"),
    ("--config.seeds=-1,0", "'seeds' must hold numbers from 0"),
    ("--config.costs.attentions=mhaa", "unknown attention 'mhaa'"),
    ("--config.costs.damcha.sharing=static", "'costs.damcha.sharing' must be one of"),
    ("--config.costs.scaling.shape.attention_dropout_rate=nan", "attention_dropout_rate=nan"),
    ("--config.costs.scaling.shape.damcha_widths=0,4", "'scaling.shape.damcha_widths' must hold"),
    ("--config.costs.tha.query_chunk=0", "tha.query_chunk=0 must be positive"),
    ("--config.costs.moa.z_coefficient=nan", "moa.z_coefficient=nan must be at least 0"),
    ("--config.growth.radii=1.0,0.1", "'growth.radii' must ascend"),
    ("--config.contexts.conditions=0.5,1.0", "none below 1"),
    ("--config.generator.sgnals=1.0", "nearest valid key is 'generator.signals'"),
])
def test_a_bad_config_is_one_line(tmp_path, override, message, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["theory", "--config=configs/theory.py:smoke",
                                    f"--workdir={tmp_path / 'run'}", override])
  monkeypatch.chdir(ROOT)
  with pytest.raises(SystemExit) as stopped:
    command_line.launch(theory.train_and_evaluate, "theory")
  error = capsys.readouterr().err
  assert stopped.value.code == 2 and message in error and error.count("\n") == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.families
def test_all_of_it_runs_resumes_and_is_documented(tmp_path, monkeypatch):
  workdir, config = tmp_path / "run", theory_config.get_config("smoke")
  with monkeypatch.context() as patched:
    def fail(*_):
      raise KeyboardInterrupt
    patched.setitem(theory.PARTS, "growth", fail)
    with pytest.raises(KeyboardInterrupt):
      theory.train_and_evaluate(config, workdir)
  with monkeypatch.context() as patched:  # what is there is not found again
    for part in ("embedding", "strictness", "contexts", "generator"):
      patched.setitem(theory.PARTS, part, fail)
    theory.train_and_evaluate(config, workdir)

  rows = _rows(workdir)
  errors = {key: row["value"] for key, row in rows.items() if key[0] == "c1_embedding"}
  assert errors and all(
      value < (1e-5 if "float32" in key[3] else 1e-12) for key, value in errors.items())
  assert {row["value"] for key, row in rows.items() if key[2] == "below_bound"} == {0.0}
  best = rows["c1_strictness", "low_rank_metric", "best_error", "rank=4"]["value"]
  assert rows["c1_strictness", "low_rank_metric", "trained_error", "rank=4"]["value"] > 0.999 * best
  assert rows["synthetic", "mha", "table7_residual", "table7 total"]["value"] < 1e-12
  full = rows["d_forms", "damcha_full_width", "gflops", "T=8, D=8, H=4"]["value"]
  assert full > rows["d_forms", "mha", "gflops", "T=8, D=8, H=4"]["value"]
  for row in rows.values():
    assert {"name", "metric", "value", "unit", "seeds", "paper"} <= set(row)
  for figure in FIGURES:
    for suffix in (".png", ".svg"):
      assert (workdir / "figures" / (figure + suffix)).stat().st_size > 1000
  assert (workdir / "config.json").is_file() and (workdir / "versions.json").is_file()

  documented = re.findall(r"`(\w+) · (\w+) · (\w+)`", DOCUMENT.read_text(encoding="utf-8"))
  assert len(documented) > 15
  assert set(documented) <= {key[:3] for key in rows}

  config = theory_config.get_config("smoke")
  with config.unlocked():
    config.seeds = (0, 1, 2)
  theory.train_and_evaluate(config, workdir)  # a seed more
  assert _rows(workdir)["c2_contexts", "static", "excess_risk",
                        "K=2, rank=2, condition=4"]["seeds"] == [0, 1, 2]
