"""The ablations as a user runs them: whole, again, killed, evaluated later, misused."""

import dataclasses
import json
from pathlib import Path
import re
import signal
import subprocess
import sys

import pytest

from configs import table3
from configs import table4
from damcha_jax.config import AblationsConfig, freeze
from damcha_jax.errors import WorkdirError
from damcha_jax.training.workdir import Workdir
from experiments import ablations
from experiments import ablations_report
from experiments import command_line
from experiments import common
from experiments import evaluate
from experiments import plan

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.ablations")
PAPER = json.loads(common.PAPER.read_text(encoding="utf-8"))


def _rows(workdir):
  rows = json.loads((workdir / "summary.json").read_text())["rows"]
  keys = ("attention", "dataset", "split", "variant", "metric")
  by_key = {tuple(row[key] for key in keys): row for row in rows}
  assert len(by_key) == len(rows)
  return by_key


def _values(rows, dataset, metric, split="test"):
  """By variant."""
  return {key[3]: row["value"] for key, row in rows.items()
          if key[:3] == ("damcha", dataset, split) and key[4] == metric}


def _check_drift(rows, dataset, variants):
  drift, largest_spread, difference = (_values(rows, dataset, metric, "train") for metric in (
      "block_drift", "block_spread_max", "block_difference"))
  assert set(drift) == set(variants)
  for variant in variants:
    assert largest_spread[variant] < 1e-4 * drift[variant]
    assert min(drift[variant], difference[variant]) > 1e-3


def _cells(name, size="paper"):
  config = freeze({"table3": table3, "table4": table4}[name].get_config(size), AblationsConfig)
  return ablations._cells(config, Path("w"))


def test_every_figure_of_tables_3_and_4_stands_beside_its_cell():
  found, directories = [], set()
  for name in ("table3", "table4"):
    for cells in _cells(name).values():
      for cell in cells:
        directories.add((name, cell.directory))
        found += [figure for metric in ablations.COLUMNS
                  if (figure := ablations._figure(cell, metric, PAPER)) is not None
                  and metric.startswith("fid") == (cell.config.experiment == "image_generation")]
  assert len(directories) == 60 + 20 + 20  # and those of the control
  table3_figures = [figure for datasets in PAPER["table3"].values() for columns in datasets.values()
                    for figures in columns.values() for figure in figures.values()]
  table4_figures = [figure for variants in PAPER["table4"].values()
                    for columns in variants.values() for figure in columns.values()]
  assert sorted(found) == sorted(table3_figures + table4_figures)
  cells = {cell.name: cell for cell in _cells("table3")["wmt14"]}
  assert ablations._figure(cells["depth7-off_diagonal"], "bartscore_top50", PAPER) == -5.997
  assert ablations._figure(cells["depth7"], "nll_mean", PAPER) is None
  assert cells["depth7-off_diagonal"].directory == Path("w/wmt14/depth7-off_diagonal")


_ROW = dict(attention="damcha", dataset="x", split="train", variant="full", paper=None,
            comparable=False, spread=None, unit="1")


def _report(config, *rows):
  return ablations_report.report(config, [{**_ROW, **row} for row in rows])


def test_the_report_says_what_leaving_out_blocks_can_show_and_not_more_than_was_measured():
  config = freeze(table3.get_config("smoke"), AblationsConfig)
  drifts = {"block_drift": 0.25, "block_spread": 1e-9, "block_spread_max": 1e-8,
            "block_difference": 0.125}
  report = lambda **more: " ".join(_report(config, *(
      dict(metric=metric, value=value) for metric, value in {**drifts, **more}.items())).split())
  assert "moved the blocks by 0.25 (" in report() and "at most 1e-08" in report()
  assert "which is rounding" in report() and "up to 0.12 apart" in report()
  assert "more than float32's rounding: weight decay" in report(block_spread=1e-3)
  assert "What leaving out blocks" not in _report(config, dict(metric="num_params", value=1.0))


def test_the_report_can_be_read_alone():
  config = freeze(table4.get_config("smoke"), AblationsConfig)
  fid = dict(metric="fid_top50", split="test", value=None, note="no weights", unit="distance")
  loss = dict(metric="nats_per_token", split="test", unit="nats/token")
  rows = [dict(metric="num_params", value=12_345.0, variant="static"),
          dict(metric="num_params", value=23_456.0), dict(metric="adaptivity", value=0.25),
          {**loss, "value": 1.5}, {**loss, "value": 1.25, "variant": "full, held_out"},
          dict(metric="mse_unrelated", split="test", value=0.5, variant=None, unit="1"),
          {**fid, "variant": "static", "paper": 76.55}, {**fid, "variant": "rowsum"},
          dict(metric="block_drift", value=0.1)]
  text = _report(config, *rows)
  cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
           if line.startswith("|")]
  assert ["", "loss, test [nats/token]", "loss, test, held_out [nats/token]",
          "MSE to unrelated image, test [1]"] in cells
  assert ["full", "1.5", "1.25", ""] in cells and ["real images", "", "", "0.5"] in cells
  assert ["static", "(a)", "76.55"] in cells and ["rowsum", "(a)", ""] in cells
  assert "(a) no weights" in text and "`rowsum` stores only the sums" in text
  assert ["static", "12,345", "0 (a)"] in cells and ["full", "23,456", "0.25"] in cells
  assert "(a) by definition: a static metric reads no context" in text
  flat = " ".join(text.split())
  assert "What leaving out blocks" not in flat and "With one seed there is no spread" in flat
  assert "(parameters: static 12,345, full 23,456)" in flat
  several = dataclasses.replace(config, seeds=(0, 1))
  text = _report(several, {**loss, "value": 1.5, "spread": 0.125})
  assert "1.5 ± 0.12" in text and "over 2 seeds" in " ".join(text.split())


def test_sets_that_stand_on_one_sample_have_tables_of_their_own():
  config = freeze(table4.get_config("smoke"), AblationsConfig)
  text = _report(config, *(dict(metric="num_params", value=value, section=section)
                           for section, value in (("cifar10", 11.0), ("cifar100", 12.0))))
  assert text.index("## cifar10 on x") < text.index(" 11 ") < text.index("## cifar100 on x")
  assert text.index("## cifar100 on x") < text.index(" 12 ")


@pytest.mark.parametrize("arguments, status, message", [
    (("--config.variants=depth",), 2, "unknown entry 'depth' in config key 'variants'"),
    (("--config.cifar10.damcha.stride=0",), 2, "'damcha.stride' must be positive"),
    (("--config.cifar10.num_stps=3",), 2, "the nearest valid key is 'cifar10.num_steps'"),
    (("--config.cifar10.dataset=cifar10", "--config.cifar10.data.data_dir=nowhere"), 1,
     "damcha_jax.data.prepare cifar10"),
])
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, monkeypatch, arguments, status,
                                                  message):
  workdir = tmp_path / "run"
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, "argv", ["ablations", "--config=configs/table4.py:smoke",
                                    f"--workdir={workdir}", *arguments])
  with pytest.raises(SystemExit) as stopped:
    command_line.launch(ablations.train_and_evaluate, "ablations")
  captured = capsys.readouterr()
  assert (stopped.value.code, captured.out) == (status, "")
  assert captured.err.startswith("error: ") and message in captured.err
  assert captured.err.count("\n") == 1 and not workdir.exists()


def test_a_workdir_may_gain_data_sets_variants_inference_and_seeds_and_nothing_else(tmp_path):
  config = freeze(table4.get_config("smoke"), AblationsConfig)
  claim = lambda **changes: common.claim(
      Workdir(tmp_path), dataclasses.replace(config, **changes), ablations.EXTENSIBLE)
  claim(variants="static,full")
  more = dict(datasets="wmt14,cifar10", variants="full,depth2,static", inference="full,diagonal",
              seeds=(1, 0))
  claim(**more)
  with pytest.raises(WorkdirError, match="also holds wmt14, static, diagonal, seed 1; name all"
                     ) as error:
    claim(datasets="cifar10", variants="full,depth2", inference="full")
  options = dict(re.findall(r"--config\.(\w+)=(\S+?),? ", str(error.value)))
  assert options == {"datasets": "wmt14,cifar10", "variants": "full,depth2,static",
                     "inference": "full,diagonal", "seeds": "1,0"}
  with pytest.raises(WorkdirError, match="depth_reading='hidden', not 'linear'"):
    claim(**more, depth_reading="linear")


def test_every_variant_is_planned():
  config, _ = plan.parse(["plan", f"--config={ROOT}/configs/table4.py"])
  models = plan._models(config)
  assert len(models) == 20 and models["cifar100/static"][0].damcha.metric == "static"
  assert models["wmt14/rowsum"][0].dataset == "wmt14"


class _Features:
  """In the place of Inception: means of quarters of the image."""

  weights_sha256, mode = "none", "pytorch-fid"

  def __call__(self, images):
    return images.reshape(len(images), 2, 4, 2, 4).mean((2, 4)).reshape(len(images), 4) / 255


@pytest.mark.families
def test_table_3_after_a_kill_again_and_evaluated_later(tmp_path, monkeypatch):
  command = [*COMMAND, "--config=configs/table3.py:smoke", f"--workdir={tmp_path}",
             "--config.datasets=cifar10"]
  killed = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
  for line in killed.stderr:
    if "depth3" in line and "done in" in line:
      killed.send_signal(signal.SIGKILL)
      break
  killed.stderr.close()
  assert killed.wait() == -signal.SIGKILL
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("complete after") == 2  # neither was trained again
  rows = _rows(tmp_path)
  variants = [f"depth{layers}" for layers in (1, 3)]
  cells = [variant + suffix for variant in variants
           for suffix in ("", "-diagonal", "-off_diagonal", "-shifted")]
  nats = _values(rows, "sample_images", "nats_per_token")
  assert list(nats) == cells and len(set(nats.values())) == len(cells)
  assert set(_values(rows, "sample_images", "mse_completion_mean")) == set(cells)
  assert set(_values(rows, "sample_images", "num_params", "train")) == set(variants)
  _check_drift(rows, "sample_images", variants)
  diagonal = rows["damcha", "sample_images", "test", "depth3-diagonal", "fid_top50"]
  assert (diagonal["value"], diagonal["paper"], diagonal["comparable"]) == (None, 105.05, False)
  controls = [key for key in rows if key[0] == "real_images" and key[4] == "mse_unrelated"]
  assert len(controls) == 1
  report = (tmp_path / "report.md").read_text()
  assert report in done.stdout and "What leaving out blocks can and cannot show" in report
  assert not (tmp_path / "cifar10/depth1-diagonal/damcha/seed0/checkpoints").exists()
  for inference in ("full", "shifted"):
    svg = (tmp_path / f"figures/cifar10/{inference}/distribution-mse_completion.svg").read_text()
    assert all(f"<!-- {variant} -->" in svg for variant in variants)

  changed = subprocess.run([*command, "--config.cifar10.num_steps=11"], cwd=ROOT,
                           capture_output=True, text=True, check=False)
  assert changed.returncode == 1 and "cifar10.num_steps=10, not 11" in changed.stderr
  fewer = subprocess.run([*command, "--config.variants=depth1"], cwd=ROOT, capture_output=True,
                         text=True, check=False)
  assert fewer.returncode == 1 and "also holds depth3" in fewer.stderr

  family = ablations.FAMILIES["image_generation"]
  monkeypatch.setitem(ablations.FAMILIES, "image_generation", family._replace(
      load_weights=lambda metrics: (_Features() if metrics.inception_weights == "x.pth" else None,
                                    "")))
  evaluate.main(["evaluate", f"--workdir={tmp_path}", "--metrics.inception_weights=x.pth"])
  again = _rows(tmp_path)
  assert len(set(_values(again, "sample_images", "fid_top50").values())) == len(cells)
  assert _values(again, "sample_images", "nats_per_token") == nats


@pytest.mark.families
def test_table_4_on_images_and_texts(tmp_path):
  done = subprocess.run(
      [*COMMAND, "--config=configs/table4.py:smoke", f"--workdir={tmp_path}",
       "--config.datasets=cifar10,commongen", f"--config.commongen.data.data_dir={tmp_path}/data"],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  rows = _rows(tmp_path)
  assert {dataset: row["section"] for (_, dataset, *_), row in rows.items()} == {
      "sample_images": "cifar10", "sample_concepts": "commongen"}
  variants = ["static", "unshared", "full", "rowsum", "robust"]
  for dataset, metric in (("sample_images", "mse_unpaired_mean"), ("sample_concepts", "nll_mean")):
    assert list(_values(rows, dataset, metric)) == variants
    _check_drift(rows, dataset, [variant for variant in variants if variant != "rowsum"])
    params = _values(rows, dataset, "num_params", "train")
    assert params["rowsum"] < params["full"] == params["robust"] < params["unshared"]
    adaptivity = _values(rows, dataset, "adaptivity", "validation")
    assert adaptivity["robust"] > 2 * adaptivity["full"] > 0 and "static" not in adaptivity
  score = rows["damcha", "sample_concepts", "test", "unshared", "bartscore_top50"]
  assert (score["value"], score["paper"]) == (None, -4.817) and "BART" in score["note"]
