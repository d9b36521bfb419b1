"""The study as a user runs it: killed, resumed, grown, and summarised from a copy."""

import json
import math
from pathlib import Path
import shutil
import signal
import statistics
import subprocess
import sys
import types

import pytest

from configs import study_cpu
from damcha_jax.config import freeze
from damcha_jax.config.study import StudyConfig, VARIANTS
from damcha_jax.errors import NonFiniteError, WorkdirError
from experiments import analysis_runs, study

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.study", "--config=configs/study_cpu.py:smoke",
           "--config.exploratory=mix/damcha_flops,text/mha,text/damcha")


def _summary(workdir):
  return json.loads((workdir / "summary.json").read_text())


def _value(rows, attention, dataset, metric, split="test", variant=None):
  (row,) = [row for row in rows if (row["attention"], row["dataset"], row["split"], row["metric"],
                                    row["variant"]) == (attention, dataset, split, metric, variant)]
  return row["value"]


def test_differences_are_paired_by_seed():
  losses = {("mix", "mha", "test", None, 0): 1.0, ("mix", "mha", "test", None, 1): 2.0,
            ("mix", "damcha", "test", None, 0): 1.5, ("mix", "damcha", "test", None, 1): 2.25,
            ("mix", "damcha", "test", None, 2): 9.0, ("text", "tha", "test", None, 0): 3.0}
  found = list(study._differences(losses))
  by_seed = {(one.metric, one.attention, one.seed): one.value for one in found}
  assert by_seed["nats_minus_mha", "damcha", 0] == 0.5
  assert by_seed["nats_minus_mha", "damcha", 1] == 0.25
  assert ("nats_minus_mha", "damcha", 2) not in by_seed  # its counterpart is not there
  assert by_seed["nats_minus_damcha", "mha", 1] == -0.25
  assert not [key for key in by_seed if key[1] == "tha"]
  low, high = (by_seed[f"nats_minus_mha_bootstrap_{end}", "damcha", None] for end in ("low", "high"))
  assert (low, high) == (0.25, 0.5)


def test_the_factor_with_the_lowest_loss_wins():
  scores = {("mha", 0.5): 2.0, ("mha", 1.0): 1.0, ("mha", 2.0): 1.5, ("damcha", 0.5): 0.5,
            ("damcha", 1.0): 0.7}
  assert study.winners(scores) == {"mha": 1.0, "damcha": 0.5}


@pytest.mark.parametrize(("losses", "tried"), [
    ({0.5: 2.0, 1.0: 1.0, 2.0: 1.5}, {0.5, 1.0, 2.0}),
    ({0.125: 1.2, 0.25: 1.0, 0.5: 2.0, 1.0: 3.0, 2.0: 4.0}, {0.125, 0.25, 0.5, 1.0, 2.0}),
    ({0.5: 3.0, 1.0: 2.0, 2.0: 1.5, 4.0: None}, {0.5, 1.0, 2.0, 4.0}),
    ({0.125: 2.0, 0.25: 1.5, 0.5: None, 1.0: None, 2.0: None}, {0.125, 0.25, 0.5, 1.0, 2.0}),
    ({0.5: 1.0, 1.0: 1.0, 2.0: 1.0}, {0.5, 1.0, 2.0}),
])
def test_a_grid_goes_on_until_its_best_factor_is_inside(losses, tried, monkeypatch, tmp_path):
  def train(task, config, directory, seed):
    del task, config, seed
    if losses[float(directory.name.partition("-")[2])] is None:
      raise NonFiniteError("diverged")
    directory.mkdir(parents=True)

  def result(run):
    if study.TUNING not in run.directory.parts:
      return None
    loss = losses[float(run.directory.name.partition("-")[2])]
    return run.directory.is_dir() and {
        "train_seconds": 1.0, "best": {"metrics": {"validation": {"nats_per_token": loss}}}} or None

  config = study_cpu.get_config("smoke")
  with config.unlocked():
    config.tuning.factors, config.variants, config.exploratory = (1.0, 2.0, 0.5), "mha", ""
    config.shift = ""
  config = freeze(config, StudyConfig)
  monkeypatch.setattr(study.loop, "train", train)
  monkeypatch.setattr(study.Run, "result", result)
  scores = study.tune(config, tmp_path)
  assert scores == {(("mix", "mha"), factor): math.inf if losses[factor] is None else losses[factor]
                    for factor in tried}
  lost = [one for one in study._of_tuning(config, scores) if one.value is None]
  assert len(lost) == list(losses.values()).count(None)
  assert all(one.note == "diverged" for one in lost)


def test_what_is_left_counts_what_is_not_trained_alone(monkeypatch, tmp_path, capsys):
  done = set()
  monkeypatch.setattr(study.loop, "train", lambda task, config, directory, seed: done.add(directory))
  monkeypatch.setattr(study.Run, "task", lambda run: None)
  monkeypatch.setattr(study.Run, "result", lambda run: {"train_seconds": 60.0, "best": {
      "metrics": {"validation": {"nats_per_token": 1.0}}}} if run.directory in done else None)
  monkeypatch.setattr(study.Run, "is_complete", lambda run: run.directory in done)
  config = freeze(study_cpu.get_config("smoke"), StudyConfig)
  study.tune(config, tmp_path)
  tuning, runs = set(done), list(study._runs(config, tmp_path, {}))
  left = lambda: [int(line.partition("runs left: ")[2].partition(",")[0])
                  for line in capsys.readouterr().err.splitlines()]
  assert left() == list(range(len(tuning) + len(runs), len(runs), -1))
  done.clear()
  done |= {run.directory for run in runs[:-1]} | set(list(tuning)[1:])
  study.tune(config, tmp_path)
  study._train(runs)
  assert left() == [2, 1]


def _trained(folder, logged):
  """A run of four steps as its files tell of it, of which the losses of the steps `logged` are left.
  """
  config = types.SimpleNamespace(
      experiment="image_generation", attentions="mha", dataset="sample", num_steps=4,
      optimizer=types.SimpleNamespace(learning_rate=0.1))
  losses = {"nats_per_token": 2.0, "bits_per_token": 3.0}
  result = {"name": "mha", "seed": 0, "num_steps": 4, "num_params": 1, "model_flops_per_step": 1,
            "train_seconds": 1.0, "selection_metric": "nats_per_token", "final": {"step": 4},
            "best": {"step": 4, "metrics": {"validation": losses, "test": losses}}}
  (folder / "result.json").write_text(json.dumps(result))
  (folder / "metrics.jsonl").write_text("".join(
      json.dumps({"step": step, "split": "train", "nats_per_token": 5.0 - step}) + "\n"
      for step in logged))
  return study.Run("images", "mha", config, 0, folder)


def test_losses_that_are_lost_are_not_replaced_by_earlier_ones(tmp_path, capsys):
  found = lambda run: {one.metric: one.value for one in study._measurements(run)}
  whole = found(_trained(tmp_path, range(1, 5)))
  assert whole["training_nats_per_token"] == 1.0 and not capsys.readouterr().err
  run = _trained(tmp_path, range(1, 5))
  curve = run.directory / "metrics.jsonl"
  lines = curve.read_text().splitlines(keepends=True)
  for left in (lines[:2], [], [*lines[:2], lines[2][:20] + "\n", lines[3]], ["[]\n", *lines]):
    curve.write_text("".join(left))
    torn = found(run)
    assert torn == {metric: value for metric, value in whole.items()
                    if metric not in ("training_nats_per_token", "generalization_gap")}
    assert "metrics.jsonl is damaged or ends before the last step" in capsys.readouterr().err


def test_a_first_seed_that_would_change_is_refused_and_nothing_written(tmp_path):
  (tmp_path / "config.json").write_text('{"seeds": [0], "exploratory": "mix/damcha_flops"}')
  before = (tmp_path / "config.json").read_bytes()
  config = study_cpu.get_config("smoke")
  with config.unlocked():
    config.seeds, config.sets, config.exploratory, config.shift = (1, 0), "mix", "", ""
    config.variants = "mha"
  with pytest.raises(WorkdirError, match="have its first seed, 0; .*--config.seeds=0,1"):
    study.train_and_evaluate(config, tmp_path)
  assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("factor, message", [(1.0, None), (2.0, "optimizer.learning_rate")])
def test_a_run_of_another_configuration_is_no_result(tmp_path, factor, message):
  trained = ROOT / "results/cpu/mix/damcha/damcha/seed0"
  shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
  config = freeze(study_cpu.get_config(), StudyConfig)
  rate = json.loads((trained / "config.json").read_text())["optimizer"]["learning_rate"]
  factor *= rate / config.family_config("mix", "damcha").optimizer.learning_rate
  run = study.Run("mix", "damcha", config.family_config("mix", "damcha", factor), 0, tmp_path)
  if message is None:
    assert run.result()["name"] == "damcha"
  else:
    with pytest.raises(WorkdirError, match=message):
      run.result()


@pytest.mark.families
def test_every_variant_can_be_trained():
  config = study_cpu.get_config("smoke")
  with config.unlocked():
    config.exploratory = ",".join(f"text/{name}" for name in VARIANTS)
  study.check(freeze(config, StudyConfig))


@pytest.mark.families
def test_a_killed_study_resumes_grows_and_is_summarised_from_a_copy(tmp_path):
  workdir = tmp_path / "study"
  command = [*COMMAND, f"--workdir={workdir}"]
  with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
    for line in process.stderr:
      if "runs left: 6" in line:  # in the midst of the cells, after tuning
        process.send_signal(signal.SIGKILL)
        break
  assert not (workdir / "summary.json").exists()
  done = sorted(workdir.glob("**/result.json"))
  assert done
  resumed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert resumed.returncode == 0, resumed.stderr
  assert "about" in resumed.stderr  # how long what is left will take
  assert all(str(path.parent) not in resumed.stderr for path in done)  # nothing is trained twice

  rows = _summary(workdir)["rows"]
  keys = [tuple(row[key] for key in ("attention", "dataset", "split", "variant", "metric"))
          for row in rows]
  assert len(set(keys)) == len(keys)
  results = {(variant, seed): json.loads(
      (workdir / f"concepts/{variant}/{variant}/seed{seed}/result.json").read_text())
             for variant in ("mha", "damcha") for seed in (0, 1)}
  losses = {key: result["best"]["metrics"]["test"]["nats_per_token"]
            for key, result in results.items()}
  assert _value(rows, "damcha", "concepts", "nats_minus_mha") == pytest.approx(
      statistics.fmean(losses["damcha", seed] - losses["mha", seed] for seed in (0, 1)))
  tuned = {factor: _value(rows, "mha", "mix", "tuning_nats_per_token", "validation",
                          f"learning rate x {factor}") for factor in ("0.5", "1")}
  assert _value(rows, "mha", "mix", "learning_rate", "train") == (
      0.01 * float(min(tuned, key=tuned.get)))
  assert _value(rows, "mha", "concepts", "learning_rate", "train") == 0.01  # which is not tuned
  # As many FLOPs as MHA takes, to within half a step.
  budget, cost = ({name: _value(rows, variant, "mix", name, "train")
                   for name in ("num_steps", "model_flops_per_step")}
                  for variant in ("mha", "damcha_flops"))
  assert abs(budget["num_steps"] * budget["model_flops_per_step"] / cost["model_flops_per_step"]
             - cost["num_steps"]) <= 0.5
  # Tested on another set than the one that it was trained on.
  assert _value(rows, "mha", "text to text8", "nats_per_token") != _value(
      rows, "mha", "text", "nats_per_token")
  for name in ("mix-minus-mha", "question-baselines", "question-flops"):
    assert (workdir / "figures" / f"{name}.svg").is_file()

  # What looks into runs takes a cell as it takes any workdir.
  _, analysed = analysis_runs.find_runs(workdir / "concepts" / "damcha", analysis_runs.Choice())
  assert [(run.attention, run.seed) for run in analysed] == [("damcha", 0), ("damcha", 1)]

  # Without checkpoints, as results are published, the same tables come from what is recorded.
  copy = tmp_path / "copy"
  shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
  again = subprocess.run([*COMMAND, f"--workdir={copy}"], cwd=ROOT, capture_output=True, text=True,
                         check=False)
  assert again.returncode == 0, again.stderr
  assert _summary(copy) == _summary(workdir)
  refused = subprocess.run([*COMMAND, f"--workdir={copy}", "--config.exploratory="], cwd=ROOT,
                           capture_output=True, text=True, check=False)
  assert refused.returncode == 1 and "also holds" in refused.stderr
