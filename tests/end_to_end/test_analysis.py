"""The analysis of runs of every family, and one line for a mistake."""

import json
from pathlib import Path
import re
import shutil
import sys

import numpy as np
import pytest

from configs import mix
from damcha_jax.analysis.gradient_flow import GradientNorms
from damcha_jax.analysis.geometry import layer_geometry
from damcha_jax.config import freeze
from damcha_jax.errors import CheckpointError
from damcha_jax.training.restore import recorded
from damcha_jax.training.workdir import Workdir
from experiments import ablations
from experiments import analysis
from experiments import analysis_figures
from experiments import analysis_runs
from experiments import command_line
from experiments import common
from experiments import gpt2_enwik8
from experiments import image_generation
from experiments import synthetic
from experiments import text_generation
from experiments import vit_imagenet
from experiments.findings import Findings, Snapshot

ROOT = Path(__file__).parents[2]
METRIC_FIGURES = {"metric-evolution", "metric-change", "metric-movement", "metric-geometry",
                  "metric-spectrum", "metric-heads"}
SHARED_FIGURES = {"gradient-sharing", "gradient-cosine"}
ALWAYS = {"gradient-flow", "attention"}


def _command(capsys, *arguments):
  """Exit status, stdout and stderr."""
  status = 0
  try:
    with command_line.user_errors():
      analysis.main(["analysis", *map(str, arguments)])
  except SystemExit as error:
    status = error.code
  return status, *capsys.readouterr()


def _train(family, *arguments):
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [family.__name__, *map(str, arguments)])
    command_line.launch(family.train_and_evaluate, family.__name__.rpartition(".")[2])


def _figures(directory, name):
  """Of one run, each in both formats."""
  files = {path.name for path in (directory / "figures").glob(f"{name}-*")}
  kinds = {file.removeprefix(f"{name}-").partition(".")[0] for file in files}
  assert files == {f"{name}-{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")}
  return kinds


def _check(workdir, figures, num_layers):
  """Figures by run, and rows whose keys are unique; returns the rows by key."""
  directory = workdir / "analysis"
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["experiment"] == "analysis" and summary["status"] == "ok"
  keys = ("attention", "dataset", "split", "variant", "metric")
  rows = {tuple(row[key] for key in keys): row for row in summary["rows"]}
  assert len(rows) == len(summary["rows"])
  numbers = json.loads((directory / "analysis.json").read_text())
  assert set(numbers) == set(figures)
  report = (directory / "report.md").read_text()
  captions = re.findall(r"!\[(.+?)\]\(figures", report)
  assert captions and all(report.count(caption) == captions.count(caption) for caption in captions)
  for name, kinds in figures.items():
    assert _figures(directory, name) == kinds
    assert all(f"figures/{name}-{kind}.png" in report for kind in kinds)
    for snapshot in numbers[name]["snapshots"]:
      assert len(snapshot["gradients"]["by_layer"]) == num_layers
      assert all(np.isfinite(value) and value >= 0 for norms in
                 snapshot["gradients"]["by_layer"].values() for value in norms.values())
    with np.load(directory / f"{name}.npz") as arrays:
      weights = [arrays[key] for key in arrays if key.startswith("attention_weights")]
      assert bool(weights) == ("attention" in kinds)
      assert all(one.ndim == 3 for one in weights)
      if "damcha" in name:
        for sums in (one.sum(-1) for one in weights):  # 0 where a query is padding
          assert np.all((abs(sums - 1) < 1e-4) | (sums == 0)) and sums.max() > 0.9
  return rows


@pytest.mark.families
def test_a_language_model_interrupted_or_not(tmp_path, capsys, monkeypatch):
  done = tmp_path / "done"
  _train(gpt2_enwik8, "--config=configs/mix.py:smoke", f"--workdir={done}",
         "--config.attentions=mha,damcha", "--config.model.scan_layers=True",
         "--config.damcha.parameterization=blocks", "--config.checkpoint.keep_last=3",
         "--config.optimizer.weight_decay=0.0")  # which would tell blocks of a row apart
  summary = (done / "summary.json").read_bytes()
  status, out, _ = _command(capsys, f"--workdir={done}", "--num_examples=4")
  assert status == 0 and "adaptivity" in out and "layer" not in out
  assert (done / "summary.json").read_bytes() == summary
  rows = _check(done, {"mha-seed0": ALWAYS,
                       "damcha-seed0": ALWAYS | METRIC_FIGURES | SHARED_FIGURES | {"block-energy"}},
                num_layers=2)
  row = lambda *key: rows["damcha", "sample_mix", *key]["value"]
  assert row("validation", "step 0", "metric_distance") == 0
  assert row("validation", "step 30, layer 1", "metric_distance") > 0.01
  assert row("validation", "step 30", "rank_max") <= 4  # K
  drift = row("train", "step 30", "block_drift")
  assert row("train", "step 0", "block_drift") == 0 < drift
  assert row("train", "step 30", "block_spread_max") < 1e-3 * drift
  missing = rows["mha", "sample_mix", "validation", "step 30", "effective_rank"]
  assert missing["value"] is None and "mha compares tokens by no metric" in missing["note"]
  # On the same examples as the training loop.
  logged = recorded(done / "damcha" / "seed0" / "metrics.jsonl", "adaptivity", "diagnostics")
  assert row("validation", "step 0", "adaptivity") == pytest.approx(logged[0], rel=1e-4)

  cut = tmp_path / "cut"
  shutil.copytree(done, cut, ignore=shutil.ignore_patterns("mha", "summary.json", "result.json",
                                                           "analysis"))
  status, _, err = _command(capsys, f"--workdir={cut}", "--steps=20", "--layers=1", "--heads=0,3")
  assert status == 0 and "mha/seed0 has no checkpoint: nothing to analyse there yet" in err
  numbers = json.loads((cut / "analysis" / "analysis.json").read_text())
  assert [one["step"] for one in numbers["damcha-seed0"]["snapshots"]] == [0, 20]
  assert not (cut / "summary.json").exists()
  with monkeypatch.context() as context:  # refused before anything is read that takes its time
    context.setattr(analysis_runs.Run, "checkpoints", None)
    for argument, message in (("--layers=2", "--layers=2 is not there: they are 0 to 1"),
                              ("--heads=4", "--heads=4 is not there: they are 0 to 3"),
                              ("--heads=", "--heads= names none; leave it out, or name some"),
                              ("--steps=", "--steps= names none")):
      status, _, err = _command(capsys, f"--workdir={cut}", "--steps=0", argument)
      assert status == 2 and message in err

  shutil.rmtree(cut / "damcha" / "seed0" / "checkpoints" / "30" / "state")
  status, _, err = _command(capsys, f"--workdir={cut}", "--num_examples=1")
  assert status == 0 and "30 is unreadable" in err and "going on without it" in err


@pytest.mark.families
def test_images(tmp_path, capsys):
  _train(image_generation, "--config=configs/cifar10.py:smoke", f"--workdir={tmp_path}",
         "--config.attentions=moa,damcha", "--config.damcha.sharing=stack")
  assert _command(capsys, f"--workdir={tmp_path}", "--num_examples=2")[0] == 0
  config = json.loads((tmp_path / "config.json").read_text())
  blocks = {"block-energy"} if config["damcha"]["parameterization"] == "blocks" else set()
  _check(tmp_path, {"moa-seed0": ALWAYS, "damcha-seed0": ALWAYS | METRIC_FIGURES | SHARED_FIGURES
                    | blocks}, config["model"]["num_layers"])


@pytest.mark.families
def test_texts(tmp_path, capsys):
  _train(text_generation, "--config=configs/commongen.py:smoke", f"--workdir={tmp_path}",
         "--config.attentions=dcmha,damcha", f"--config.data.data_dir={tmp_path / 'data'}")
  assert _command(capsys, f"--workdir={tmp_path}", "--num_examples=2")[0] == 0
  config = json.loads((tmp_path / "config.json").read_text())
  blocks = {"block-energy"} if config["damcha"]["parameterization"] == "blocks" else set()
  _check(tmp_path, {"dcmha-seed0": ALWAYS, "damcha-seed0": ALWAYS | METRIC_FIGURES
                    | SHARED_FIGURES | blocks}, config["model"]["num_layers"])


@pytest.mark.families
def test_a_classifier(tmp_path, capsys):
  _train(vit_imagenet, "--config=configs/vit_s16.py:smoke", f"--workdir={tmp_path}",
         "--config.attentions=damcha")
  assert _command(capsys, f"--workdir={tmp_path}", "--num_examples=2")[0] == 0
  config = json.loads((tmp_path / "config.json").read_text())
  blocks = {"block-energy"} if config["damcha"]["parameterization"] == "blocks" else set()
  _check(tmp_path, {"damcha-seed0": ALWAYS | METRIC_FIGURES | SHARED_FIGURES | blocks},
         config["model"]["num_layers"])


@pytest.mark.families
def test_synthetic_tasks(tmp_path, capsys):
  _train(synthetic, "--config=configs/synthetic.py:smoke", f"--workdir={tmp_path}",
         "--config.attentions=mha,damcha,damcha_full_width,told", "--config.tasks=classification")
  assert _command(capsys, f"--workdir={tmp_path}", "--num_examples=4", "--seeds=0")[0] == 0
  config = json.loads((tmp_path / "config.json").read_text())
  name = f"classification-e{config['entanglements'][-1]:g}_d{config['dimension']}"
  summary = json.loads((tmp_path / "analysis" / "summary.json").read_text())["rows"]
  notes = {row["attention"]: row["note"] for row in summary if row["metric"] == "effective_rank"
           and row["value"] is None}
  assert "in factors" in notes["damcha_full_width"] and "no metric" in notes["told"]
  kinds = {one: _figures(tmp_path / "analysis", f"{name}-{one}-seed0")
           for one in ("mha", "damcha", "damcha_full_width", "told")}
  assert kinds["mha"] == ALWAYS and kinds["told"] == set()
  assert kinds["damcha"] >= ALWAYS | METRIC_FIGURES
  assert ALWAYS <= kinds["damcha_full_width"] and not METRIC_FIGURES & kinds["damcha_full_width"]


@pytest.mark.families
def test_a_variant_of_the_ablations(tmp_path, capsys):
  _train(ablations, "--config=configs/table4.py:smoke", f"--workdir={tmp_path}",
         "--config.datasets=cifar10", "--config.variants=static,unshared")
  status, _, err = _command(capsys, f"--workdir={tmp_path}")
  assert status == 1 and "name the folder of one" in err
  for variant, absent in (("static", {"adaptivity": 0.0}), ("unshared", {})):
    workdir = tmp_path / "cifar10" / variant
    assert _command(capsys, f"--workdir={workdir}", "--num_examples=2")[0] == 0
    config = json.loads((workdir / "config.json").read_text())
    rows = _check(workdir, {"damcha-seed0": ALWAYS | METRIC_FIGURES | {"block-energy"}},
                  config["model"]["num_layers"])
    for metric, value in absent.items():
      assert {row["value"] for key, row in rows.items() if key[4] == metric} == {value}


@pytest.fixture(name="claimed")
def _claimed(tmp_path):
  """A workdir that training has claimed, without any checkpoint."""
  workdir = tmp_path / "run"
  common.claim(Workdir(workdir), freeze(mix.get_config("smoke")))
  return workdir


@pytest.mark.parametrize("arguments, status, message", [
    ((), 2, "--workdir is missing"),
    (("--workdir={root}",), 1, "holds no runs of gpt2_enwik8"),
    (("--workdir={workdir}",), 1, "no checkpoint in"),
    (("--workdir={workdir}", "--attentions=tha"), 2, "--attentions=tha is none of the workdir's, "
     "which are mha, damcha"),
    (("--workdir={workdir}", "--seeds=3"), 2, "--seeds=3 is none of the workdir's, which are 0"),
    (("--workdir={workdir}", "--seeds=x"), 2, "--seeds=x must hold whole numbers"),
    (("--workdir={workdir}", "--num_examples=0"), 2, "num_examples"),
    (("--workdir={workdir}", "--step=1"), 2, "step"),
])
def test_a_mistake_is_one_line_and_writes_nothing(claimed, capsys, arguments, status, message):
  arguments = [one.format(workdir=claimed, root=claimed.parent) for one in arguments]
  actual, out, err = _command(capsys, *arguments)
  errors = [line for line in err.splitlines() if not line.startswith("note: ")]
  assert (actual, out) == (status, "") and not (claimed / "analysis").exists()
  assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]


def test_a_step_that_is_not_kept_is_answered_with_those_that_are(tmp_path):
  for step in (5, 20, 100):
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
  (tmp_path / "checkpoints" / "7.tmp").mkdir()
  run = analysis.Run("mha", 0, "x", None, tmp_path, None, lambda: "first", None, None)
  with pytest.raises(analysis.ConfigError, match="--steps=7 .* it has 0, 5, 20, 100"):
    list(run.checkpoints([0, 7]))
  assert list(run.checkpoints([0])) == [(0, "first")]
  with pytest.raises(CheckpointError, match="no readable checkpoint"):
    list(run.checkpoints([5]))


def _findings(scale):
  """Two snapshots of one layer; the second's metrics are `scale` times the first's."""
  m = np.random.default_rng(0).normal(size=(5, 2, 3, 3))
  gradients = GradientNorms(1.0, {0: {"norms": 1.0}}, {})
  snapshots = [Snapshot(step, {0: layer_geometry(factor * m)}, {0: np.eye(2) + 1}, {}, gradients,
                        None) for step, factor in ((0, 1.0), (9, scale))]
  return Findings("x-damcha-seed0", "damcha", 0, "x", "e1", snapshots, {}, (), {})


def test_distances_are_from_the_initial_metric_and_shares_of_all_blocks():
  found = _findings(3.0)
  assert found.distance(found.last)[0] == pytest.approx([2, 2], rel=1e-5)
  numbers = found.geometry_numbers(found.last)[0]
  assert numbers["metric_distance"] == pytest.approx(2, rel=1e-5)
  assert numbers["diagonal_share"] == pytest.approx(4 / 6) and numbers["rank_max"] == 3
  assert found.title == "damcha on x e1, seed 0" and found.at(found.last) == "e1, step 9"


def test_maps_of_heads_name_the_layers_once():
  """Repeated, the label runs into the colour bar before it."""
  (row,) = analysis_figures.FIGURES["metric-heads"](_findings(3.0)).rows
  assert [bool(panel.y_label) for panel in row] == [True, False, False]
  assert row[1].unit == "effective rank [of 3]"


def test_panels_are_chosen_from_all_over():
  assert analysis_figures.spread(range(3), 4) == [0, 1, 2]
  assert analysis_figures.spread(range(10), 4) == [0, 3, 6, 9]
