"""`python -m experiments.synthetic` as a user runs it: rows, figures, resuming, refusals."""

from __future__ import annotations

import json
import sys

import pytest

from configs import synthetic as synthetic_config
from damcha_jax.errors import Interrupted, WorkdirError
from damcha_jax.training import loop
from experiments import command_line
from experiments import synthetic


def _config(**changes):
  config = synthetic_config.get_config("smoke")
  with config.unlocked():
    config.update({"attentions": "mha,told", "tasks": "classification", "num_steps": 4,
                   "dimensions": (8,), **changes})
    config.optimizer.warmup_steps = 1
    config.checkpoint.every_steps = 2
  return config


def _rows(workdir):
  summary = json.loads((workdir / "summary.json").read_text())
  rows = {(row["attention"], row["dataset"], row["variant"], row["metric"]): row
          for row in summary["rows"]}
  assert len(rows) == len(summary["rows"]) and summary["status"] == "ok"
  return rows


def _run(monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["experiments.synthetic", *arguments])
  command_line.launch(synthetic.train_and_evaluate, "synthetic")


@pytest.mark.families
def test_rows_say_gaps_intervals_and_the_optimum(tmp_path):
  synthetic.train_and_evaluate(_config(), tmp_path)
  rows = _rows(tmp_path)
  row = lambda *key: rows[key[0], "classification", *key[1:]]
  accuracy = {name: row(name, "e1_d8", "accuracy") for name in ("mha", "told", "optimum")}
  gap = row("told", "e1_d8", "gap_to_mha")
  assert gap["value"] == pytest.approx(accuracy["told"]["value"] - accuracy["mha"]["value"])
  assert gap["seeds"] == [0, 1] and gap["comparable"] is False and gap["paper"] is None
  # Student's 12.7 for two seeds, over their root.
  half_width = row("told", "e1_d8", "gap_to_mha_ci95")["value"]
  assert half_width == pytest.approx(12.706 * gap["spread"] / 2**0.5, rel=1e-3)
  slope = row("told", "trend", "gap_slope_entanglement")["value"]
  assert slope == pytest.approx(gap["value"] - row("told", "e0_d8", "gap_to_mha")["value"])
  assert abs(accuracy["told"]["value"] - accuracy["optimum"]["value"]) < 0.1
  assert ("mha", "classification", "e1_d8", "gap_to_mha") not in rows
  # 8 features and 8 of the symbols: 4 (16^2 + 16) of attention, 65 * 16 + 64 of feed-forward, ...
  assert row("mha", "d8", "num_params")["value"] == 4 * 272 + (2 * 32 + 1) * 16 + 32 + 3 * 32 + (
      3 * 8) + 17 * 2
  run = tmp_path / "classification" / "d8" / "mha"
  assert {"config.json", "versions.json", "metrics.jsonl", "result.json"} <= {
      path.name for path in run.iterdir()}
  assert {"config.json", "versions.json", "summary.json"} <= {
      path.name for path in tmp_path.iterdir()}
  for suffix in ("png", "svg"):
    for name in ("accuracy", "gap_to_mha"):
      assert (tmp_path / "figures" / f"classification-{name}-entanglement.{suffix}").is_file()


@pytest.mark.families
def test_an_interrupted_study_goes_on_in_the_middle_of_a_cell_with_the_same_numbers(
    tmp_path, monkeypatch):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  synthetic.train_and_evaluate(_config(), whole)

  def stop_at_two(run, original=loop._Run._save_if_due):  # pylint: disable=protected-access
    if run.step == 2:
      run.stop.signal_name = "SIGTERM"
    original(run)

  with monkeypatch.context() as patch:
    patch.setattr(loop._Run, "_save_if_due", stop_at_two)  # pylint: disable=protected-access
    with pytest.raises(Interrupted, match="stopped by SIGTERM at step 2 of 4"):
      synthetic.train_and_evaluate(_config(), parts)
  assert not (parts / "summary.json").exists()
  synthetic.train_and_evaluate(_config(), parts)
  assert _rows(parts) == _rows(whole)


@pytest.mark.families
def test_finished_cells_are_only_read_and_attentions_may_be_added(tmp_path, monkeypatch):
  synthetic.train_and_evaluate(_config(attentions="mha"), tmp_path)
  stamp = lambda: (tmp_path / "classification/d8/mha/metrics.jsonl").stat().st_mtime_ns
  before = stamp()
  synthetic.train_and_evaluate(_config(), tmp_path)
  assert stamp() == before and ("told", "classification", "e0_d8", "accuracy") in _rows(tmp_path)
  for change, message in (({"attentions": "mha"}, "also holds told"),
                          ({"seeds": (0, 1, 2)}, "seeds="), ({"num_steps": 5}, "num_steps=4")):
    with pytest.raises(WorkdirError, match=message):
      synthetic.train_and_evaluate(_config(**change), tmp_path)
  with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_info:
    _run(patch, "--config=configs/synthetic.py:smoke", f"--workdir={tmp_path}")
  assert exit_info.value.code == 1


@pytest.mark.parametrize("argument, message", [
    ("--config.entanglement=1", "unknown config key 'entanglement'; the nearest valid key is "
     "'entanglements'"),
    ("--config.attentions=damcha", "gaps are to mha; add it to config key 'attentions'"),
    ("--config.attentions=mha,mah", "unknown attention 'mah' in config key 'attentions'"),
    ("--config.retrieval.num_items=6", "retrieval.num_items=6 must be a power of 2"),
    ("--config.retrieval.damcha_context=sequence", "leaks the future"),
])
def test_a_users_mistake_is_one_line_and_claims_nothing(
    argument, message, tmp_path, monkeypatch, capsys):
  with pytest.raises(SystemExit) as exit_info:
    _run(monkeypatch, "--config=configs/synthetic.py:smoke", f"--workdir={tmp_path / 'run'}",
         argument)
  error = capsys.readouterr().err.strip()
  assert exit_info.value.code == 2 and not (tmp_path / "run").exists()
  assert error.startswith("error: ") and message in error and "\n" not in error


@pytest.mark.families
def test_the_smoke_study_with_every_attention(tmp_path):
  config = synthetic_config.get_config("smoke")
  with config.unlocked():
    config.attentions = synthetic_config.ATTENTIONS
    # mma has four groups of heads; the small generator leaves something to the others' MLP.
    config.model.update(num_heads=4, mlp_features=64)
    config.update(dimensions=(8, 16))
  synthetic.train_and_evaluate(config, tmp_path)
  rows = _rows(tmp_path)
  for task in ("classification", "retrieval"):
    params = [row["value"] for (_, dataset, variant, metric), row in rows.items()
              if (dataset, variant, metric) == (task, "d8", "num_params") and row["value"] > 1]
    assert len(params) == len(synthetic_config.ATTENTIONS.split(",")) - 1
    assert max(params) - min(params) < 0.02 * max(params)
    for attention in synthetic_config.ATTENTIONS.split(",")[1:]:
      for metric in synthetic.SLOPES:
        assert rows[attention, task, "trend", metric]["value"] is not None
    for axis in ("entanglement", "dimension"):
      assert (tmp_path / "figures" / f"{task}-gap_to_mha-{axis}.svg").is_file()


@pytest.mark.families
def test_mha_learns_both_tasks_and_damcha_their_control(tmp_path):
  config = synthetic_config.get_config("cpu")
  with config.unlocked():
    config.update(attentions="mha,damcha", seeds=(0, 1), entanglements=(0.0, 1.0),
                  dimensions=(32,), num_held_out=256)
  synthetic.train_and_evaluate(config, tmp_path)
  rows = _rows(tmp_path)
  for task, least in (("classification", 0.8), ("retrieval", 0.55)):
    accuracy = lambda name, entanglement: rows[name, task, f"e{entanglement}_d32",
                                               "accuracy"]["value"]
    assert accuracy("mha", 1) > least
    assert abs(accuracy("damcha", 0) - accuracy("mha", 0)) < 0.03
    assert max(accuracy("mha", 0), accuracy("damcha", 0)) < accuracy("optimum", 0) + 0.01
