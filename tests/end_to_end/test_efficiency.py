"""The efficiency experiment: Table 2 to its last decimal, and the program as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from configs import costs
from configs import table2
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import freeze
from damcha_jax.config.efficiency import EfficiencyConfig
from experiments import command_line
from experiments import common
from experiments import efficiency
from experiments.contender import Contender

PAPER = json.loads(common.PAPER.read_text(encoding="utf-8"))["table2"]


def _config(module, size="smoke", **changes):
  config = module.get_config(size)
  with config.unlocked():
    config.update(changes)
  return config


def _rows(workdir):
  summary = json.loads((workdir / "summary.json").read_text())
  rows = {(row["attention"], row["dataset"], row["variant"], row["metric"]): row
          for row in summary["rows"]}
  assert len(rows) == len(summary["rows"]) and summary["status"] == "ok"
  return rows


@pytest.mark.parametrize("attention", efficiency.TABLE2_METHODS)
def test_counted_gflops_are_those_of_table_2(attention):
  config = freeze(table2.get_config(), EfficiencyConfig)
  assert {shape.dataset for shape in config.shapes if efficiency.is_table2s(shape)} == set(
      efficiency.TABLE2_DATASETS)
  counted = {}  # the two CIFAR sets have the same shape
  for shape in config.shapes:
    if efficiency.is_table2s(shape):
      key = dataclasses.replace(shape, dataset="")
      if key not in counted:
        counted[key] = Contender(config, shape, attention).costs.total.matmul / 1e9
      method = efficiency.TABLE2_METHODS[attention]
      figure = PAPER[efficiency.TABLE2_DATASETS[shape.dataset]][method]["gflops"]
      assert round(counted[key], 4) == figure
  assert len(counted) == 3


@pytest.fixture(name="small", scope="module")
def _small(tmp_path_factory):
  """A workdir with the rows of a small Table 2."""
  workdir = tmp_path_factory.mktemp("table2")
  config = _config(table2, attentions="mha,damcha")
  table, model = config.shapes
  with config.unlocked():  # as if it had the sizes of the table
    config.shapes = ({**table, "variant": None}, model)
  efficiency.train_and_evaluate(config, workdir)
  return workdir, config


def test_rows_hold_counts_and_measurements(small):
  rows = _rows(small[0])
  row = rows["damcha", "cifar10", None, "gflops"]
  assert row["paper"] == PAPER["CIFAR-10"]["DAMCHA"]["gflops"] and not row["comparable"]
  assert rows["damcha", "cifar10", "section_5_1_reduced", "gflops"]["paper"] is None
  latency = rows["mha", "cifar10", None, "latency"]
  assert latency["value"] > 0 and latency["seeds"] == [0] and not latency["comparable"]
  params = rows["mha", "cifar10", None, "num_params"]["value"]
  assert rows["mha", "cifar10", None, "peak_memory"]["value"] > 4 * params / 1e6


def test_complete_shapes_are_only_read_and_lost_ones_are_measured_again(small, capsys):
  workdir, config = small
  before = (workdir / "cifar10" / "result.json").read_text()
  (workdir / "cifar10-section_5_1_reduced" / "result.json").unlink()
  rows = _rows(workdir)
  efficiency.train_and_evaluate(config, workdir)
  assert (workdir / "cifar10" / "result.json").read_text() == before
  assert _rows(workdir) == rows
  assert "paper's gflops" in capsys.readouterr().out


@pytest.mark.families
def test_scaling_agrees_with_the_formulas(tmp_path):
  config = _config(costs, attentions="mha", shapes=())
  config.damcha.metric = "static"  # which has no generator; what is said of it is said nonetheless
  efficiency.train_and_evaluate(config, tmp_path)
  rows = _rows(tmp_path)
  residuals = {key[2]: row["value"] for key, row in rows.items() if key[3] == "table7_residual"}
  assert residuals["table7 total"] < 1e-12 and residuals["table7 scores"] < 1e-12
  for attention, metric in (("mha", "params_per_layer"), ("damcha", "params_per_layer"),
                            ("damcha", "params_saved")):
    row = rows[attention, "synthetic", "d4", metric]
    assert row["value"] == row["paper"]
  exponent = lambda sharing: rows["damcha", "synthetic", f"in N, sharing {sharing}",
                                  "generator_gflops_exponent"]["value"]
  assert exponent("stack") == pytest.approx(0, abs=1e-9)
  assert exponent("generator") == pytest.approx(1)
  assert rows["mha", "synthetic", "in N", "gflops_exponent"]["value"] == pytest.approx(1)
  assert (tmp_path / "figures" / "gflops_T.png").stat().st_size > 0


@pytest.mark.families
def test_every_attention_is_counted_and_measured(tmp_path):
  efficiency.train_and_evaluate(_config(costs), tmp_path)
  rows = _rows(tmp_path)
  for attention in ATTENTIONS:
    assert rows[attention, "synthetic", "d128_t64_reduced", "step_time_ratio"]["value"] > 0
    assert rows[attention, "synthetic", "in N", "gflops_exponent"]["value"] == pytest.approx(1)
    assert rows[attention, "synthetic", "vit_s16_reduced", "latency"]["value"] > 0


@pytest.mark.parametrize("module", [costs, table2])
def test_small_shapes_do_not_pass_for_the_models_they_are_made_of(module):
  whole, small = (module.get_config(size).shapes for size in ("paper", "smoke"))
  assert all(shape["variant"].endswith("reduced") for shape in small)
  assert not any((shape["variant"] or "").endswith("reduced") for shape in whole)


def test_an_attention_that_is_left_out_has_a_row_that_says_why(tmp_path):
  shape = {**costs.get_config("smoke").shapes[0], "omitted": ("mma",), "measured": "nothing"}
  config = _config(table2, attentions="mha,mma", shapes=(
      {**shape, "variant": "six_heads", "num_heads": 6, "features": 24},
      {**shape, "variant": "four_heads"}))
  efficiency.train_and_evaluate(config, tmp_path)
  rows = _rows(tmp_path)
  six, four = (rows["mma", "synthetic", name, "gflops"] for name in ("six_heads", "four_heads"))
  assert six["value"] is four["value"] is None
  assert "num_heads 6 is not a multiple of the 4 groups" in six["note"]
  assert "left out by config key 'shapes'" in four["note"]
  assert rows["mha", "synthetic", "six_heads", "gflops"]["value"] > 0


@pytest.mark.parametrize("override, message", [
    ("--config.attentions=mha,mah", "unknown attention 'mah'"),
    ("--config.attentions=damcha", "relative to mha"),
    ("--config.num_rounds=0", "'num_rounds' must be positive"),
    ("--config.seeds=(-1,)", "'seeds' must hold numbers from 0 to 2^63 - 1, not (-1,)"),
    ("--config.scaling.features=(8,)", "at least two positive sizes, each once, not (8,)"),
    ("--config.scaling.context_lengths=(8,10000000)", "'scaling.context_lengths' holds 10000000"),
    ("--config.scaling.context_lengths=(8,8)", "each once, not (8, 8)"),
    ("--config.optimizer.b1=2.0", "optimizer.b1=2.0 must be at least 0 and below 1"),
    ("--config.optimizer.clip_norm=-1.0", "optimizer.clip_norm=-1.0 must be at least 0"),
    ("--config.damcha.form=full_width", "rowsum"),
])
def test_a_bad_config_is_one_line(tmp_path, override, message, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["efficiency", "--config=configs/costs.py:smoke",
                                    f"--workdir={tmp_path / 'run'}",
                                    "--config.attentions=mha,damcha", override])
  monkeypatch.chdir(common.PAPER.parents[1])
  with pytest.raises(SystemExit) as stopped:
    command_line.launch(efficiency.train_and_evaluate, "efficiency")
  error = capsys.readouterr().err
  assert stopped.value.code == 2 and message in error and error.count("\n") == 1
  assert not (tmp_path / "run").exists()
