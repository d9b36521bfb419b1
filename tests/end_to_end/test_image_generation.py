"""The image-generation experiment as a user runs it: whole, again, killed, misused."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys

import numpy as np
import pytest

from damcha_jax.config import ConfigError, ImageMetricsConfig
from damcha_jax.errors import WorkdirError
from experiments import command_line
from experiments import evaluate
from experiments import image_generation

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.image_generation")
SMOKE = "--config=configs/cifar10.py:smoke"
# What stands in Table 1, and the likelihoods and controls beside it.
TABLE1_ROWS = {"mse_unpaired_mean", "mse_unpaired_q25", "mse_unpaired_q75", "mse_completion_mean",
               "fid_group_mean", "fid_group_q25", "fid_group_q75", "fid_top50", "fid", "kid",
               "feature_distance_mean", "nats_per_token", "bits_per_token", "nats_per_image"}


def _run(capsys, *arguments):
  """Runs the command in this process: exit status, stdout, stderr."""
  status = 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["image_generation", *map(str, arguments)])
    patch.chdir(ROOT)
    try:
      command_line.launch(image_generation.train_and_evaluate, "image_generation")
    except SystemExit as error:
      status = error.code
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _rows(workdir):
  rows = json.loads((workdir / "summary.json").read_text())["rows"]
  by_key = {(row["attention"], row["split"], row["metric"]): row for row in rows}
  assert len(by_key) == len(rows) and all(row["variant"] is None for row in rows)
  return by_key


def _check_summary(workdir, attentions):
  rows = _rows(workdir)
  for attention in attentions:
    found = {metric for name, split, metric in rows if (name, split) == (attention, "test")}
    assert TABLE1_ROWS <= found
    nats = rows[attention, "test", "nats_per_token"]["value"]
    assert nats < 5.5  # a uniform guess costs 5.55
    assert rows[attention, "test", "nats_per_image"]["value"] == pytest.approx(64 * nats)
    assert rows[attention, "test", "bits_per_token"]["value"] == pytest.approx(nats / np.log(2))
    assert 0 < rows[attention, "test", "mse_completion_mean"]["value"] < 0.5
    fid = rows[attention, "test", "fid_top50"]
    assert fid["value"] is None and "Inception" in fid["note"] and not fid["comparable"]
    run = workdir / attention / "seed0"
    with np.load(run / "samples.npz") as samples, np.load(run / "scores.npz") as scores:
      assert samples["images"].shape == (64, 8, 8) and samples["completed"].shape == (64, 8, 8)
      assert scores["mse_completion"].mean() == pytest.approx(
          rows[attention, "test", "mse_completion_mean"]["value"])
    for figure in ("samples", "completions"):
      path = workdir / "figures" / f"{figure}-{attention}-seed0.png"
      assert path.read_bytes().startswith(b"\x89PNG")
  for score in ("mse_unpaired", "mse_completion"):
    svg = (workdir / "figures" / f"distribution-{score}.svg").read_text()
    assert all(f"<!-- {attention} -->" in svg for attention in attentions)
  assert rows[image_generation.REAL, "test", "mse_unrelated"]["value"] > 0.02
  return rows


class _Features:
  """In the place of Inception: means of quarters of the image."""

  weights_sha256, mode = "none", "pytorch-fid"

  def __call__(self, images):
    return images.reshape(len(images), 2, 4, 2, 4).mean((2, 4)).reshape(len(images), 4) / 255


@pytest.mark.families
def test_a_run_is_evaluated_and_a_rerun_draws_nothing_again(capsys, tmp_path, monkeypatch):
  arguments = (SMOKE, f"--workdir={tmp_path}", "--config.attentions=mha", "--config.num_steps=12",
               "--config.model.num_layers=1")
  status, output, errors = _run(capsys, *arguments)
  assert status == 0 and "64 of 64 drawn" in errors and "Inception's weights are not" in errors
  rows = _check_summary(tmp_path, ["mha"])
  assert rows["mha", "test", "mse_unpaired_mean"]["paper"] == 0.126
  assert rows["mha", "test", "fid_top50"]["paper"] == 91.432
  assert f"{rows['mha', 'test', 'nats_per_token']['value']:.4g}" in output

  status, _, errors = _run(capsys, *arguments)
  assert status == 0 and "drawn" not in errors and _rows(tmp_path) == rows
  assert not list(tmp_path.glob("figures/distribution-fid*"))

  given = []
  monkeypatch.setitem(evaluate.FAMILIES, "image_generation", (
      lambda metrics: given.append(metrics) or (_Features(), ""), image_generation.summarize))
  evaluate.main(["evaluate", f"--workdir={tmp_path}", "--metrics.inception_weights=later.pth",
                 "--metrics.allow_other_weights=True"])
  assert "drawn" not in capsys.readouterr().err
  assert (given[0].inception_weights, given[0].allow_other_weights) == ("later.pth", True)
  for score in ("fid_group", "feature_distance"):
    assert (tmp_path / "figures" / f"distribution-{score}.png").is_file()
  again = _rows(tmp_path)
  for metric in ("fid", "fid_group_mean", "fid_top50", "kid", "feature_distance_mean"):
    assert again["mha", "test", metric]["value"] is not None
  assert again["mha", "test", "fid"]["value"] > again["real_images", "test", "fid_real"]["value"]
  assert {key: row for key, row in again.items() if row["value"] == rows[key]["value"]}.keys() >= {
      key for key, row in rows.items() if row["value"] is not None}


@pytest.mark.parametrize("arguments, error, message", [
    ((), ConfigError, "--workdir is missing"),
    (("--wrkdir=x",), ConfigError, "unexpected argument"),
    (("--workdir=x", "--metrics.inception_weight=x"), WorkdirError, "holds no runs of image_gen"),
])
def test_what_cannot_be_evaluated_is_named(tmp_path, monkeypatch, arguments, error, message):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(error, match=message):
    evaluate.main(["evaluate", *arguments])


def test_weights_that_are_none_are_named(tmp_path):
  (tmp_path / "weights.pth").write_bytes(b"no weights")
  metrics = ImageMetricsConfig(str(tmp_path / "weights.pth"), "pytorch-fid", False)
  features_fn, why = image_generation.inception_features(metrics)
  assert features_fn is None and "weights.pth" in why


@pytest.mark.parametrize("arguments, status, message", [
    ((SMOKE, "--config.data.colour=rgb"), 2, "context_length=64 must be the 192 tokens"),
    ((SMOKE, "--config.dataset=cifar"), 2, "unknown dataset 'cifar'"),
    ((SMOKE, "--config.data.class_conditional=True"), 2, "set it to 265"),
    ((SMOKE, "--config.attentions=mah"), 2, "unknown attention 'mah'"),
    (("--config=configs/cifar100.py", "--config.data.data_dir=nowhere"), 1,
     "damcha_jax.data.prepare cifar100"),
])
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, arguments, status, message):
  workdir = tmp_path / "run"
  found, output, errors = _run(capsys, f"--workdir={workdir}", *arguments)
  (line,) = [line for line in errors.splitlines() if not line.startswith("note: ")]
  assert (found, output) == (status, "") and line.startswith("error: ") and message in line
  assert not workdir.exists()


@pytest.mark.families
def test_a_killed_run_resumes_training_and_drawing(tmp_path):
  command = [*COMMAND, SMOKE, f"--workdir={tmp_path}", "--config.attentions=damcha",
             "--config.sampling.batch_size=16"]
  for until in ("step 22/30", "images: 32 of 64 drawn"):
    killed = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in killed.stderr:
      if until in line:
        killed.send_signal(signal.SIGKILL)
        break
    killed.stderr.close()
    assert killed.wait() == -signal.SIGKILL
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "images: 64 of 64 drawn" in done.stderr and "images: 16 of 64 drawn" not in done.stderr
  _check_summary(tmp_path, ["damcha"])

  whole = tmp_path / "whole"
  done = subprocess.run([*command[:-3], f"--workdir={whole}", *command[-2:]], cwd=ROOT,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  names = ("images", "completed", "log_likelihoods")
  with np.load(tmp_path / "damcha/seed0/samples.npz") as resumed, np.load(
      whole / "damcha/seed0/samples.npz") as uninterrupted:
    for name in names:
      assert np.array_equal(resumed[name], uninterrupted[name])


@pytest.mark.families
@pytest.mark.parametrize("config, more", [
    (SMOKE, ()),
    ("--config=configs/cifar100.py:smoke", (
        "--config.attentions=damcha", "--config.data.colour=rgb", "--config.context_length=192")),
    ("--config=configs/cifar100.py:smoke", (
        "--config.attentions=mha", "--config.data.class_conditional=True",
        "--config.model.vocab_size=265", "--config.data.colour=palette")),
])
def test_every_row_of_table_1_at_smoke_size(tmp_path, config, more):
  more = (*more, f"--config.data.data_dir={tmp_path / 'data'}")
  done = subprocess.run([*COMMAND, config, f"--workdir={tmp_path / 'run'}", *more], cwd=ROOT,
                        env=os.environ, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  rows = _rows(tmp_path / "run")
  attentions = {name for name, *_ in rows} - {image_generation.REAL}
  assert len(attentions) == (1 if more[:-1] else 7)
  for attention in attentions:
    assert TABLE1_ROWS <= {metric for name, split, metric in rows
                           if (name, split) == (attention, "test")}


PLAN = """
import json, sys
import jax
jax.config.update('jax_num_cpu_devices', 8)
from configs import cifar10
from damcha_jax.config import ImageGenerationConfig, freeze
from damcha_jax.training.plan import plan_run
config = cifar10.get_config()
with config.unlocked():
  config.mesh.update(data=1, fsdp=4, tensor=2)
plan = plan_run(freeze(config, ImageGenerationConfig), 'damcha', jax.devices())
print(json.dumps([plan._asdict(), sum(array.nbytes for array in jax.live_arrays())]))
"""


@pytest.mark.families
def test_the_paper_size_is_planned_on_eight_devices_without_allocating():
  done = subprocess.run([sys.executable, "-c", PLAN], cwd=ROOT, capture_output=True, text=True,
                        env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
  assert done.returncode == 0, done.stderr
  plan, live_bytes = json.loads(done.stdout)
  assert live_bytes < 1_000
  # Embedding and positions, blocks (value and output projections, MLP, norms), f_theta, last norm.
  width, layers, generator = 512, 10, 20
  block = 2 * (width**2 + width) + 8 * width**2 + 5 * width + 4 * width
  metric = (width + 1) * generator + 7 * (generator**2 + generator) + (generator + 1) * width**2
  assert plan["num_params"] == (256 + 1024) * width + layers * block + metric + 2 * width
  # Parameters and two moments in float32; most is split eight ways, vectors are not.
  assert plan["state_bytes"] == pytest.approx(12 * plan["num_params"], rel=1e-5)
  assert 1 / 8 < plan["state_bytes_per_device"] / plan["state_bytes"] < 1 / 4
  # 6 per parameter of a matrix and token, and the attention's own products on top.
  tokens = 128 * 1024
  assert plan["flops_per_step"] > 6 * tokens * layers * 10 * width**2
  assert plan["num_steps"] == 17_578
