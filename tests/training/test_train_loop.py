"""The loop's promises: how many updates, in which order, what is recorded, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from damcha_jax.config import ConfigError, MeshConfig
from damcha_jax.errors import Interrupted, NonFiniteError, WorkdirError
from damcha_jax.training import loop
from damcha_jax.training.signals import StopRequest
from damcha_jax.training.workdir import Workdir
from tiny_task import TinyConfig, tiny_task


def records(workdir, split=None):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  parsed = [json.loads(line) for line in lines]
  return [record for record in parsed if split in (None, record["split"])]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """One uninterrupted run: task, config, workdir, result."""
  workdir = tmp_path_factory.mktemp("finished")
  task, config = tiny_task(), TinyConfig()
  return task, config, workdir, loop.train(task, config, workdir, seed=0)


def test_does_exactly_num_steps_updates_on_batches_in_order(finished):
  task, config, workdir, result = finished
  # The first request shapes the compiled step; then each batch is consumed once.
  assert task.train_source.asked == [0, *range(config.num_steps)]
  assert [record["step"] for record in records(workdir, "train")] == list(range(1, 9))
  assert result["num_steps"] == config.num_steps


def test_records_and_result_agree(finished):
  task, _, workdir, result = finished
  assert result == Workdir(workdir).read_json("result.json")
  validation = {record["step"]: record["nats_per_token"]
                for record in records(workdir, "validation")}
  assert list(validation) == [4, 8]
  assert result["final"]["metrics"]["validation"]["nats_per_token"] == validation[8]
  best = min(validation, key=validation.get)
  assert result["best"]["step"] == best
  assert result["num_params"] == 16 * 8 + 8 * 16 + 16 + 16 * 16 + 16
  tests = result["best"]["metrics"]
  weights = {part: task.eval_sources[f"test/{part}"].rows["weights"].sum() for part in "ab"}
  pooled = sum(tests[f"test/{part}"]["nats_per_token"] * weights[part] for part in "ab")
  assert tests["test"]["nats_per_token"] == pytest.approx(pooled / sum(weights.values()), rel=1e-6)
  first = records(workdir, "train")[0]
  assert first["mfu"] is None and first["tokens_per_second"] > 0 and first["grad_norm"] > 0


def test_what_belongs_to_no_known_configuration_or_lost_its_record_is_told(tmp_path, capsys):
  config = TinyConfig(num_steps=4)
  loop.train(tiny_task(), config, tmp_path, seed=0)
  for name in ("result.json", "metrics.jsonl"):
    (tmp_path / name).unlink()
  loop.train(tiny_task(), config, tmp_path, seed=0)
  assert "metrics.jsonl has no record of these steps" in capsys.readouterr().err
  for name in ("result.json", "config.json"):
    (tmp_path / name).unlink()
  with pytest.raises(WorkdirError, match="has checkpoints, but no config.json"):
    loop.train(tiny_task(), config, tmp_path, seed=0)
  assert not (tmp_path / "config.json").exists()


def test_records_that_are_not_those_of_the_checkpoint_are_told(tmp_path, capsys):
  config = TinyConfig(num_steps=4)
  loop.train(tiny_task(), config, tmp_path, seed=0)
  path, whole = tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_text()
  lines = whole.splitlines(keepends=True)
  changed = {"": False, "fewer": True, "another": True}
  path.write_text(whole)
  for what, told in changed.items():
    (tmp_path / "result.json").unlink()
    path.write_text({"": whole, "fewer": "".join(lines[:2]),
                     "another": whole.replace('"loss": 2', '"loss": 3', 1)}[what])
    loop.train(tiny_task(), config, tmp_path, seed=0)
    assert ("lacks records that it had at step 4" in capsys.readouterr().err) == told


def test_the_result_of_another_run_is_refused(tmp_path):
  config = TinyConfig(num_steps=4)
  loop.train(tiny_task(), config, tmp_path, seed=0)
  path = tmp_path / "result.json"
  Workdir(tmp_path).write_json(path.name, {**json.loads(path.read_text()), "name": "other"})
  with pytest.raises(WorkdirError, match="result.json was changed after it was written; remove it"):
    loop.train(tiny_task(), config, tmp_path, seed=0)
  result = {**json.loads(path.read_text()), "name": "other"}
  del result["crc32"]
  path.write_text(json.dumps(result))
  with pytest.raises(WorkdirError, match="has name='other', not 'tiny'"):
    loop.train(tiny_task(), config, tmp_path, seed=0)


def test_learns(finished):
  losses = [record["loss"] for record in records(finished[2], "train")]
  assert losses[-1] < losses[0] - 0.3


def test_running_a_finished_run_again_only_reads_it(finished, capsys):
  _, config, workdir, result = finished
  before = (workdir / "metrics.jsonl").read_bytes()
  task = tiny_task()
  assert loop.train(task, config, workdir, seed=0) == result
  assert task.train_source.asked == []
  assert (workdir / "metrics.jsonl").read_bytes() == before
  assert "complete after 8 steps" in capsys.readouterr().err


def test_workdir_of_another_configuration_names_the_first_differing_key(finished):
  task, config, workdir, _ = finished
  changed = dataclasses.replace(
      config, optimizer=dataclasses.replace(config.optimizer, weight_decay=0.2), prng_impl="rbg")
  with pytest.raises(WorkdirError, match=r"prng_impl='threefry2x32', not 'rbg'"):
    loop.train(task, changed, workdir, seed=0)
  changed = dataclasses.replace(changed, prng_impl=config.prng_impl)
  with pytest.raises(WorkdirError, match=r"optimizer\.weight_decay=0\.1, not 0\.2"):
    loop.train(task, changed, workdir, seed=0)
  with pytest.raises(WorkdirError, match=r"run\.seed=0, not 1"):
    loop.train(task, config, workdir, seed=1)


def test_a_second_process_is_refused(finished):
  task, config, workdir, _ = finished
  code = ("import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
          "print('held', flush=True); sys.stdin.read()")
  with subprocess.Popen([sys.executable, "-c", code, str(workdir / ".lock")], text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(WorkdirError, match="in use by another process"):
      loop.train(task, config, workdir, seed=0)
    holder.communicate("")
  loop.train(task, config, workdir, seed=0)


def test_the_best_checkpoint_survives_and_is_what_is_tested(tmp_path):
  """After step 4 it learns what is wrong: the best is step 4, though newer ones push it out."""
  def mislead(step, batch):
    if step >= 4:
      batch["targets"][:] = 0

  config = TinyConfig(num_steps=12)
  config = dataclasses.replace(
      config, optimizer=dataclasses.replace(config.optimizer, learning_rate=0.3, b1=0.5))
  result = loop.train(tiny_task(on_batch=mislead), config, tmp_path, seed=0)
  assert result["best"]["step"] == 4
  assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 10, 12]
  assert result["best"]["metrics"]["test"]["nats_per_token"] < 2.9
  assert "test" not in result["final"]["metrics"]
  assert [record["step"] for record in records(tmp_path, "test")] == [4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_run_equals_an_uninterrupted_one(finished, tmp_path, number):
  task, config, workdir, result = finished
  stopping = tiny_task(on_batch=lambda step, _: os.kill(os.getpid(), number) if step == 5 else None)
  previous = signal.getsignal(number)
  with pytest.raises(Interrupted, match=f"stopped by {number.name} at step 6 of 8; .*to resume"):
    loop.train(stopping, config, tmp_path, seed=0)
  assert signal.getsignal(number) is previous
  assert (tmp_path / "checkpoints" / "6").is_dir() and not (tmp_path / "result.json").exists()
  resumed = tiny_task()
  again = loop.train(resumed, config, tmp_path, seed=0)
  assert resumed.train_source.asked == [6, 6, 7]
  assert again["best"] == {**result["best"], "metrics": again["best"]["metrics"]}
  timed = ("tokens_per_second", "train_seconds")
  strip = lambda record: {key: value for key, value in record.items() if key not in timed}
  assert list(map(strip, records(tmp_path))) == list(map(strip, records(workdir)))


def test_a_signal_of_the_other_kind_is_noted_too(capfd):
  previous = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  with StopRequest() as stop:
    signal.raise_signal(signal.SIGINT)
    assert "note: SIGINT: saves and stops once" in capfd.readouterr().err
    signal.raise_signal(signal.SIGTERM)  # by default, this would end the process
    assert stop.requested(1)
    assert signal.getsignal(signal.SIGINT) is previous[0]
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == previous


def test_a_non_finite_loss_stops_naming_step_and_leaf_and_keeps_the_last_good(tmp_path):
  def poison(step, batch):
    if step == 4:
      batch["weights"][0, 0] = np.nan

  with pytest.raises(NonFiniteError) as caught:
    loop.train(tiny_task(on_batch=poison), TinyConfig(), tmp_path, seed=0)
  message = str(caught.value)
  assert "loss nan at update 5 (batch 4)" in message
  assert "first bad gradient is 'Dense_0/bias'" in message
  assert "last good checkpoint is step 4" in message and "\n" not in message
  assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]
  assert max(record["step"] for record in records(tmp_path)) == 4


def test_bad_configurations_are_one_line_and_claim_nothing(tmp_path):
  config = TinyConfig()
  optimizer = config.optimizer
  cases = [
      (dict(optimizer=dataclasses.replace(optimizer, accumulation_steps=3)),
       r"batch_size 8 is not a multiple of 3 .*accumulation_steps 3\); use batch_size 9"),
      (dict(mesh=MeshConfig(data=-1, fsdp=-1, tensor=1)), "only one axis may be -1"),
      (dict(mesh=MeshConfig(data=jax.device_count() * 3, fsdp=1, tensor=1)),
       f"there are {jax.device_count()}"),
      (dict(mesh=MeshConfig(data=0, fsdp=1, tensor=1)), "a positive number"),
      (dict(optimizer=dataclasses.replace(optimizer, warmup_steps=8)), "less than num_steps 8"),
      (dict(logging=dataclasses.replace(config.logging, every_steps=0)), "logging.every_steps"),
      (dict(logical_rules=(("embed", "model"),)), "'model', which is no mesh axis"),
      (dict(logical_rules=(("embed", None),)), r"no entry; add \('(vocab|mlp)', None\)"),
  ]
  for changes, message in cases:
    with pytest.raises(ConfigError, match=message) as caught:
      loop.train(tiny_task(), dataclasses.replace(config, **changes), tmp_path / "run", seed=0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_dropout_streams_depend_on_the_step_and_not_on_the_process(tmp_path):
  config = TinyConfig(num_steps=4)
  losses = []
  for name in "ab":
    task = tiny_task(dropout_rate=0.5)
    loop.train(task, config, tmp_path / name, seed=3)
    losses.append([record["loss"] for record in records(tmp_path / name, "train")])
  assert losses[0] == losses[1]
