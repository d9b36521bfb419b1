"""The GPT-2 experiment as a user runs it: killed, resumed, extended, misused."""

import errno
import itertools
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from damcha_jax.config import ConfigError
from experiments import command_line
from experiments import gpt2_enwik8

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.gpt2_enwik8")
ROW_KEYS = {"name", "metric", "value", "unit", "seeds", "paper", "attention", "dataset", "split",
            "variant", "spread", "comparable"}


@pytest.fixture(name="text", scope="module")
def _text(tmp_path_factory):
  """A small text of one's own: evaluation reads whole splits, and these tests need no long one."""
  path = tmp_path_factory.mktemp("text") / "numbers.txt"
  path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
  return path


@pytest.fixture(name="compiled", scope="module", autouse=True)
def _compiled(tmp_path_factory):
  """Keeps compiled programs for these tests, here and in the processes they start."""
  settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
              "jax_persistent_cache_min_compile_time_secs": 0.0}
  before = {name: getattr(jax.config, name) for name in settings}
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield {**os.environ, **{name.upper(): str(value) for name, value in settings.items()}}
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def _arguments(workdir, text, *more):
  return ("--config=configs/mix.py:smoke", f"--workdir={workdir}", f"--config.dataset={text}",
          *more)


def _run(capsys, *arguments):
  """Runs the command in this process: exit status, stdout, stderr."""
  status = 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["gpt2_enwik8", *arguments])
    patch.chdir(ROOT)
    try:
      command_line.launch(gpt2_enwik8.train_and_evaluate, "gpt2_enwik8")
    except SystemExit as error:
      status = error.code
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _records(run):
  return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _summary(workdir):
  """The summary without its rows, and the rows by what identifies them."""
  summary = json.loads((workdir / "summary.json").read_text())
  rows = summary.pop("rows")
  by_key = {(r["attention"], r["split"], r["variant"], r["metric"]): r for r in rows}
  assert len(by_key) == len(rows)
  return summary, by_key


def test_a_killed_run_resumes_and_learns(tmp_path, text, compiled):
  command = [*COMMAND, *_arguments(tmp_path, text, "--config.attentions=damcha")]
  killed = subprocess.Popen(command, cwd=ROOT, env=compiled, stderr=subprocess.PIPE, text=True)
  for line in killed.stderr:
    if "step 22/30" in line:  # the checkpoint of step 10 is then complete, that of 20 perhaps
      killed.send_signal(signal.SIGKILL)
      break
  killed.stderr.close()
  assert killed.wait() == -signal.SIGKILL
  assert not (tmp_path / "summary.json").exists()

  done = subprocess.run(command, cwd=ROOT, env=compiled, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 0, done.stderr
  assert re.search("resuming at step (10|20) of 30", done.stderr)
  records = _records(tmp_path / "damcha" / "seed0")
  assert len([r for r in records if r["split"] == "train"]) >= 10
  assert [r["step"] for r in records if r["split"] == "validation"] == [10, 20, 30]

  summary, rows = _summary(tmp_path)
  assert summary == {"experiment": "gpt2_enwik8", "config": "mix:smoke", "status": "ok"}
  for split in ("validation", "test"):
    row = rows["damcha", split, None, "bits_per_byte"]
    assert set(row) == ROW_KEYS
    assert row["name"] == f"damcha/{split}" and row["seeds"] == [0]
    assert row["value"] < 7.0  # a uniform guess costs 8
    assert f"{row['value']:.4g}" in done.stdout
  assert (tmp_path / "figures" / "validation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.families
def test_smoke_size_reports_each_source_of_mix(tmp_path, compiled):
  done = subprocess.run([*COMMAND, "--config=configs/mix.py:smoke", f"--workdir={tmp_path}"],
                        cwd=ROOT, env=compiled, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  _, rows = _summary(tmp_path)
  for attention, split in itertools.product(("mha", "damcha"), ("validation", "test")):
    values = {source: rows[attention, split, source, "bits_per_byte"]["value"]
              for source in (None, "sample_text", "sample_text8")}
    assert values["sample_text8"] < values[None] < values["sample_text"] < 7.5


@pytest.mark.families
def test_a_rerun_skips_what_is_complete_and_adds_seeds(capsys, tmp_path, text):
  arguments = _arguments(tmp_path, text, "--config.num_steps=10", "--config.attentions=mha")
  assert _run(capsys, *arguments)[0] == 0
  before = (tmp_path / "mha" / "seed0" / "metrics.jsonl").read_text()

  status, _, errors = _run(capsys, *arguments, "--config.seeds=0,1")
  assert status == 0 and "[mha seed 0] complete after 10 steps" in errors
  assert (tmp_path / "mha" / "seed0" / "metrics.jsonl").read_text() == before
  rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
  (row,) = [r for r in rows if r["name"] == "mha/test" and r["metric"] == "nats_per_token"]
  each = [json.loads((tmp_path / "mha" / f"seed{seed}" / "result.json").read_text())["best"]
          ["metrics"]["test"]["nats_per_token"] for seed in (0, 1)]
  assert row["seeds"] == [0, 1]
  assert row["value"] == pytest.approx(sum(each) / 2)
  assert row["spread"] == pytest.approx(abs(each[0] - each[1]) / 2**0.5)

  # A curve that was lost is missing from the figure, no more.
  (tmp_path / "mha" / "seed1" / "metrics.jsonl").unlink()
  with (tmp_path / "mha" / "seed0" / "metrics.jsonl").open("a") as file:
    file.write('{"step": 3')
  assert _run(capsys, *arguments, "--config.seeds=0,1")[0] == 0

  _assert_a_disk_that_is_full_only_for_the_summary_leaves_the_old_one(capsys, tmp_path, arguments)
  status, _, errors = _run(capsys, *arguments, f"--workdir={tmp_path / 'mha' / 'seed0'}")
  assert status == 1 and "is that of a single run" in errors
  _assert_names_what_is_damaged(capsys, tmp_path, arguments)
  status, _, errors = _run(capsys, *arguments, "--config.seeds=1,2")
  assert status == 1 and "also holds seed 0" in errors
  status, _, errors = _run(capsys, *arguments, "--config.batch_size=16", "--config.seeds=0,1")
  assert status == 1 and "batch_size=8, not 16" in errors and errors.count("\n") == 1
  assert json.loads((tmp_path / "config.json").read_text())["seeds"] == [0, 1]
  assert json.loads((tmp_path / "summary.json").read_text())["rows"] == rows
  _assert_is_summarised_without_the_devices_that_trained_it(capsys, tmp_path, arguments)


def _assert_is_summarised_without_the_devices_that_trained_it(capsys, workdir, arguments):
  for path in workdir.rglob("config.json"):
    config = json.loads(path.read_text())
    config["model"].update(attention_implementation="cudnn", dtype="bfloat16")
    config["mesh"]["fsdp"] = 64
    path.write_text(json.dumps(config))
  before = _summary(workdir)
  (workdir / "summary.json").unlink()
  arguments = [*arguments, "--config.model.attention_implementation=cudnn",
               "--config.model.dtype=bfloat16", "--config.mesh.fsdp=64"]
  status, _, errors = _run(capsys, *arguments, "--config.seeds=0,1")
  assert (status, _summary(workdir)) == (0, before), errors
  status, _, errors = _run(capsys, *arguments, "--config.seeds=0,1,2")
  assert status == 2 and "'cudnn' needs a GPU" in errors


def _assert_a_disk_that_is_full_only_for_the_summary_leaves_the_old_one(capsys, workdir, arguments):
  path, replace = workdir / "summary.json", os.replace

  def full(source, target):
    if Path(target) == path:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    replace(source, target)
  before = path.read_text()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, "replace", full)
    status, _, errors = _run(capsys, *arguments, "--config.seeds=0,1")
  assert status == 1
  assert errors.splitlines()[-1].startswith(f"error: cannot write {path}: No space left on device")
  assert path.read_text() == before


def _assert_names_what_is_damaged(capsys, workdir, arguments):
  """A suite's or a run's record that no longer holds what it must is one line, and stays."""
  for path, damage, message in (
      (workdir / "config.json", "{}", "names no attentions and seeds"),
      (workdir / "mha" / "seed0" / "result.json", "{}", "name=None, not 'mha'")):
    whole = path.read_text()
    path.write_text(damage)
    status, _, errors = _run(capsys, *arguments, "--config.seeds=0,1")
    assert status == 1 and message in errors and errors.count("\n") == 1
    assert path.read_text() == damage
    path.write_text(whole)


@pytest.mark.parametrize("arguments, status, message", [
    ((), 2, "--config is missing"),
    (("--config",), 2, "config file '' is not there"),
    (("--config=configs/none.py",), 2, "config file 'configs/none.py' is not there"),
    (("--config=configs/mix.py:tpu",), 2, "unknown size 'tpu'; choose one of paper, wide, cpu, smoke"),
    (("--config=setup.cfg",), 2, "config file 'setup.cfg'"),
    (("--config=configs/cifar10.py:smoke",), 2, "python -m experiments.image_generation"),
    (("--config=configs/mix.py:smoke", "--steps=3"), 2, "Unknown command line flag 'steps'"),
    (("--config=configs/mix.py:smoke", "now"), 2, "unexpected argument 'now'"),
    (("--config=configs/mix.py:smoke", "--config.dataset=\udcff.txt"), 2, "is no UTF-8; rename"),
    (("--config=configs/mix.py:smoke", "--config.batchsize=3"), 2,
     "unknown config key 'batchsize'; the nearest valid key is 'batch_size'"),
    (("--config=configs/mix.py:smoke", "--config.damcha.strid=3"), 2,
     "unknown config key 'damcha.strid'; the nearest valid key is 'damcha.stride'"),
    (("--config=configs/mix.py:smoke", "--config.batch_size.x=3"), 2,
     "unknown config key 'batch_size.x'"),
    (("--config=configs/mix.py:smoke", "--config.batch_size=many"), 2, "--config.batch_size=many"),
    (("--config=configs/mix.py:smoke", "--config.seeds=one"), 2, "'seeds' must be int, not 'one'"),
    (("--config=configs/mix.py:smoke", "--config.attentions=mha,dcmah"), 2,
     "unknown attention 'dcmah'"),
    (("--config=configs/mix.py:smoke", "--config.model.num_heads=3"), 2,
     "model.features=16 is not divisible by model.num_heads=3"),
    (("--config=configs/mix.py:smoke", "--config.mesh.fsdp=3"), 2, "fsdp 3"),
    (("--config=configs/mix.py:smoke", "--config.attentions=tha", "--config.tha.num_key_heads=3"),
     2, "tha cannot be built: num_heads 3 does not divide the attention width 16"),
    (("--config=configs/mix.py:smoke", "--config.attentions=moa", "--config.moa.num_experts=1",
      "--config.moa.experts_per_token=1", "--config.moa.cv_coefficient=0.1"), 2,
     "use cv_coefficient=0"),
    (("--config=configs/mix.py:smoke", "--config.optimizer.accumulation_steps=3"), 2,
     "batch_size 8 is not a multiple of 3"),
    (("--config=configs/mix.py:smoke", "--config.optimizer.warmup_steps=30"), 2, "warmup_steps 30"),
    (("--config=configs/mix.py:smoke", "--config.dataset=enwki8"), 2, "unknown dataset 'enwki8'"),
    (("--config=configs/mix.py:smoke", "--config.dataset=README.md",
      "--config.model.vocab_size=100"), 2, "model.vocab_size 100"),
    (("--config=configs/mix.py:smoke", "--config.dataset=README.md",
      "--config.logical_rules=()"), 2, "logical"),
    (("--config=configs/mix.py", "--config.data.data_dir=nowhere"), 1, "enwik8"),
    (("--config=configs/mix.py:smoke", "--config.dataset=./missing.txt"), 1, "missing.txt"),
    (("--config=configs/mix.py:smoke", "--config.dataset=./" + "x" * 300), 1, "File name too long"),
])
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, arguments, status, message):
  workdir = tmp_path / "run"
  found, output, errors = _run(capsys, f"--workdir={workdir}", *arguments)
  assert (found, output) == (status, "")
  assert errors.startswith("error: ") and errors.count("\n") == 1 and message in errors
  assert not workdir.exists()


def test_an_interrupt_outside_training_is_one_line(capsys):
  def interrupted(*unused):
    raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
    patch.setattr(sys, "argv", ["x", f"--config={ROOT / 'configs/mix.py'}:smoke"])
    command_line.launch(interrupted, "gpt2_enwik8")
  assert error.value.code == 1
  assert capsys.readouterr().err == "error: interrupted; run the same command again to go on\n"


def test_workdir_defaults_to_experiment_and_config(monkeypatch, tmp_path):
  config = ROOT / "configs" / "text8.py"
  monkeypatch.chdir(tmp_path)
  _, workdir = command_line.parse(["x", f"--config={config}:cpu", "--config.batch_size=4"])
  assert workdir == tmp_path / "runs" / "gpt2_enwik8" / "text8-cpu"


def test_overrides_reach_the_config():
  config, workdir = command_line.parse([
      "x", f"--config={ROOT / 'configs/mix.py'}:cpu", "--config.attentions=mha,damcha",
      "--config.seeds=0,1", "--config.batch_size=64", "--config.damcha.widths=8,8",
      "--noconfig.logging.tensorboard", "--workdir=somewhere"])
  assert (config.attentions, config.seeds, config.batch_size) == ("mha,damcha", (0, 1), 64)
  assert config.damcha.widths == (8, 8) and config.logging.tensorboard is False
  assert workdir == Path.cwd() / "somewhere"


@pytest.mark.parametrize("source, message", [
    ("", r"no get_config\(\)"),
    ("def get_config(size, dataset): pass", "missing 2 required positional arguments: 'size'"),
    ("def get_config(): pass", "gives no ConfigDict with experiment, name and size"),
    ("from ml_collections import ConfigDict as get_config", "gives no ConfigDict with experiment"),
])
def test_a_file_that_is_no_experiment_says_so(source, message, tmp_path):
  (tmp_path / "own.py").write_text(source)
  with pytest.raises(ConfigError, match=f"own.py': .*{message}.*; name an experiment's file"):
    command_line.parse(["gpt2_enwik8", f"--config={tmp_path}/own.py"])


def test_help_lists_the_flags(capsys):
  with pytest.raises(SystemExit) as error:
    command_line.parse(["gpt2_enwik8", "--help"])
  assert error.value.code == 0
  output = capsys.readouterr().out
  assert "--config" in output and "--workdir" in output
