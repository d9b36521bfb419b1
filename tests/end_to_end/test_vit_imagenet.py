"""The classification experiment as a user runs it: whole, again, killed, misused."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from PIL import Image
import pytest

from configs import vit_s16
from damcha_jax.config import ConfigError
from damcha_jax.data.images import sample_class_names
from damcha_jax.errors import DataError
from experiments import command_line
from experiments import common
from experiments import image_pipeline
from experiments import vit_imagenet
from experiments import vit_picture

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.vit_imagenet")
SMOKE = "--config=configs/vit_s16.py:smoke"
LAST = "epoch0.03"  # 12 of 365 steps


def _rows(workdir):
  rows = json.loads((workdir / "summary.json").read_text())["rows"]
  by_key = {(row["attention"], row["split"], row["variant"], row["metric"]): row for row in rows}
  assert len(by_key) == len(rows)
  return by_key


def _check_summary(workdir, attentions):
  rows = _rows(workdir)
  assert {name for name, *_ in rows} == set(attentions)
  for attention in attentions:
    value = lambda split, metric: rows[attention, split, LAST, metric]["value"]
    assert value("validation", "nats_per_image") < 5.5  # a uniform guess costs 4.6
    assert 0 <= value("validation", "top1") <= value("validation", "top5") <= 100
    assert value("validation", "top5_gap") == pytest.approx(
        value("validation", "top5") - value("train", "top5"))
    row = rows[attention, "validation", LAST, "top1"]
    assert not row["comparable"] and row["note"] == "of weights averaged with ema_decay=0.5"
    assert ((attention, "validation", LAST, "adaptivity") in rows) == (attention == "damcha")
    for metric in common.COSTS:
      assert rows[attention, "train", None, metric]["value"] > 0
  for metric in ("top1", "nats_per_image"):
    figure = workdir / "figures" / f"validation-{metric}.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
  return rows


@pytest.mark.families
def test_every_attention_at_smoke_size(tmp_path):
  done = subprocess.run([*COMMAND, SMOKE, f"--workdir={tmp_path}"], cwd=ROOT, env=os.environ,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  rows = _check_summary(tmp_path, vit_s16.get_config("smoke").attentions.split(","))
  assert rows["damcha", "validation", LAST, "top1"]["paper"] == 82.1
  assert rows["mha", "validation", LAST, "top5"]["paper"] == 94.68
  assert "paper's top1" in done.stdout
  for attention in ("mha", "damcha"):
    run = (tmp_path / attention / "seed0" / "metrics.jsonl").read_text().splitlines()
    nats = [record["nats_per_image"] for record in map(json.loads, run)
            if record["split"] == "validation"]
    assert nats[-1] < nats[0]
  again = subprocess.run([*COMMAND, SMOKE, f"--workdir={tmp_path}"], cwd=ROOT, env=os.environ,
                         capture_output=True, text=True, check=False)
  assert again.returncode == 0 and "compiling" not in again.stderr and _rows(tmp_path) == rows


@pytest.mark.families
def test_a_killed_run_ends_bitwise_like_one_that_was_not(tmp_path):
  """The `:cpu` experiment, shortened, in which two processes decode."""
  arguments = ["--config=configs/vit_s16.py:cpu", "--config.attentions=damcha",
               "--config.num_steps=12", "--config.batch_size=16", "--config.steps_per_epoch=182",
               "--config.model.num_layers=2", "--config.model.features=16",
               "--config.model.mlp_features=32", "--config.model.stochastic_depth_rate=0.2",
               "--config.augmentation.mixup_alpha=0.2", "--config.optimizer.warmup_steps=2",
               "--config.data.num_workers=2", "--config.data.max_held_out_images=50",
               "--config.data.num_probed_images=50", "--config.evaluation.every_steps=4",
               "--config.checkpoint.every_steps=2", "--config.logging.every_steps=1"]
  command = lambda name: [*COMMAND, *arguments, f"--workdir={tmp_path / name}"]
  killed = subprocess.Popen(command("killed"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
  for line in killed.stderr:
    if "step 7/12" in line:
      killed.send_signal(signal.SIGKILL)
      break
  killed.stderr.close()
  assert killed.wait() == -signal.SIGKILL
  for name in ("killed", "whole"):
    done = subprocess.run(command(name), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("resuming at step" in done.stderr) == (name == "killed")
    assert "Traceback" not in done.stderr
  states, scores = [], []
  for name in ("killed", "whole"):
    run = tmp_path / name / "damcha" / "seed0"
    with ocp.CheckpointManager(run / "checkpoints") as manager:
      assert manager.latest_step() == 12
      states.append(manager.restore(
          12, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    scores.append([record for record in records if record["split"] != "train"])
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert scores[0] == scores[1] and len(scores[0]) > 8


@pytest.mark.parametrize("arguments, status, message", [
    ((SMOKE, "--config.batch_size=16"), 2, "steps_per_epoch=365 is not what 2,924 images take"),
    ((SMOKE, "--config.dataset=cifar10"), 2, "unknown dataset 'cifar10'"),
    ((SMOKE, "--config.attentions=mah"), 2, "unknown attention 'mah'"),
    ((SMOKE, "--config.model.patch_size=3"), 2, "does not tile images of 16 pixels"),
    (("--config=configs/vit_s16.py", "--config.data.data_dir=nowhere"), 1,
     "damcha_jax.data.prepare imagenet2012"),
])
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, monkeypatch, arguments, status,
                                                  message):
  workdir = tmp_path / "run"
  monkeypatch.setattr(sys, "argv", ["vit_imagenet", f"--workdir={workdir}", *arguments])
  monkeypatch.chdir(ROOT)
  with pytest.raises(SystemExit) as stopped:
    command_line.launch(vit_imagenet.train_and_evaluate, "vit_imagenet")
  captured = capsys.readouterr()
  (line,) = captured.err.splitlines()
  assert (stopped.value.code, captured.out) == (status, "")
  assert line.startswith("error: ") and message in line and not workdir.exists()


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
  """Two runs of one update."""
  workdir = tmp_path_factory.mktemp("trained")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [
        "vit_imagenet", SMOKE, f"--workdir={workdir}", "--config.attentions=mha,damcha",
        "--config.num_steps=1", "--config.optimizer.warmup_steps=0"])
    command_line.launch(vit_imagenet.train_and_evaluate, "vit_imagenet")
  return workdir


@pytest.mark.families
def test_a_picture_of_one_s_own_is_drawn_with_attention_and_metric(trained, tmp_path, capsys):
  photo = tmp_path / "photo.png"
  pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3)).astype(np.uint8)
  Image.fromarray(pixels).save(photo)
  found = vit_picture.main(["vit_picture", f"--workdir={trained}", f"--image={photo}"])
  printed = capsys.readouterr().out
  assert set(found) == {"mha-seed0", "damcha-seed0"}
  for name, seen in found.items():
    assert seen["step"] == 1 and len(seen["likeliest"]) == 5
    likeliest = seen["likeliest"][0]
    assert likeliest["name"] == sample_class_names("subgroup")[likeliest["class"]]
    assert f"{name}: {likeliest['name']} {likeliest['probability']:.1%}, " in printed
    drawn = trained / "analysis" / "figures" / f"picture-photo-{name}.svg"
    assert f"step 1: {likeliest['name']} with" in drawn.read_text()
    for suffix in ("png", "svg"):
      assert (trained / "analysis" / "figures" / f"picture-photo-{name}.{suffix}").is_file()
    with np.load(trained / "analysis" / f"picture-photo-{name}.npz") as arrays:
      heads = arrays["attention-layer_1"]
      assert heads.shape == (4, 4, 4) and (heads >= 0).all() and (heads.sum((1, 2)) < 1).all()
      metrics = [key for key in arrays if key.startswith("metric")]
    assert len(metrics) == (2 if name == "damcha-seed0" else 0)
  held_out = vit_picture.main(["vit_picture", f"--workdir={trained}", "--index=3"])
  assert held_out["mha-seed0"] != found["mha-seed0"]


@pytest.mark.families
@pytest.mark.parametrize("arguments, message", [
    (("--index=64",), "--index=64 is not below 64"),
    (("--image=README.md",), "README.md cannot be read as a picture"),
    (("--image=BOMB",), "cannot be read as a picture: Image size"),
    (("--attentions=",), "--attentions= names none; the workdir has mha, damcha"),
    (("--seeds=one",), "--seeds=one must hold whole numbers"),
])
def test_what_is_no_picture_is_named(trained, monkeypatch, tmp_path, arguments, message):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
  bomb = tmp_path / "bomb.png"
  Image.new("RGB", (30, 30)).save(bomb)
  arguments = [argument.replace("BOMB", str(bomb)) for argument in arguments]
  with pytest.raises((ConfigError, DataError), match=message):
    vit_picture.main(["vit_picture", f"--workdir={trained}", *arguments])


@pytest.mark.families
def test_the_pipeline_is_measured_with_and_without_workers(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(image_pipeline, "NUM_TIMED", 8)
  monkeypatch.setattr(sys, "argv", [
      "image_pipeline", SMOKE, f"--workdir={tmp_path}", "--config.data.num_workers=1"])
  command_line.launch(image_pipeline.train_and_evaluate, "image_pipeline", reads="vit_imagenet")
  rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
  assert [row["variant"] for row in rows] == ["decoded", "decoded and cropped", "augmented",
                                              "1 workers"]
  assert all(row["value"] > 0 for row in rows) and "1 workers" in capsys.readouterr().out
