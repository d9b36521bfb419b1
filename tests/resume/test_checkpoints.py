"""Checkpoints under fire: corruption, full disks, restores, what is kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
from pathlib import Path
import resource
import shutil
import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.config import CheckpointConfig
from damcha_jax.errors import CheckpointError, Interrupted, WorkdirError
from damcha_jax.training import loop
from damcha_jax.training.checkpoint import Checkpointer, checksums
from damcha_jax.training.state import TrainState
from tests.resume import faults
from tiny_task import TinyConfig, assert_trees_equal, run_script, tiny_task


def _state(step):
  rng = np.random.default_rng(step)
  params = {"a": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=7), jnp.bfloat16)}
  return TrainState(step=jnp.int32(step), params=params, opt_state=(jax.tree.map(jnp.ones_like,
                                                                                 params), ()))


TARGETS = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    _state(0))


def _open(directory, keep_last=2, keep_best=1, notes=None):
  notes = [] if notes is None else notes
  return Checkpointer(directory, CheckpointConfig(1, keep_last, keep_best), TARGETS, notes.append)


def _fill(directory, steps=(1, 2, 3), **options):
  checkpointer = _open(directory, **options)
  for step in steps:
    checkpointer.save(step, _state(step))
  checkpointer.wait()
  checkpointer.close()


def _damage(checkpoint, change):
  """Applies `change(bytes)` to every file that holds arrays."""
  for path in (checkpoint / "state").rglob("*"):
    if path.parent.name == "d":
      path.write_bytes(change(path.read_bytes()))


def _truncate(checkpoint):
  _damage(checkpoint, lambda content: content[:40])


def _flip(checkpoint):
  middle = lambda content: len(content) // 2
  _damage(checkpoint, lambda content: content[:middle(content)]
          + bytes([content[middle(content)] ^ 1]) + content[middle(content) + 1:])


def _empty(checkpoint):
  shutil.rmtree(checkpoint)
  checkpoint.mkdir()


def test_saves_restores_and_reads_back(tmp_path):
  directory = tmp_path / "checkpoints"
  _fill(directory)
  checkpointer = _open(directory)
  assert checkpointer.steps == [2, 3]
  assert_trees_equal(checkpointer.restore_latest(), _state(3))
  checkpointer.read_back(3, _state(3))
  with pytest.raises(CheckpointError, match="checksum of '(step|params/a)' differs"):
    checkpointer.read_back(3, _state(4))
  checkpointer.close()


def test_keeps_the_newest_and_the_best(tmp_path):
  directory = tmp_path / "checkpoints"
  checkpointer = _open(directory, keep_last=1, keep_best=2)
  for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 9.0), (6, None)):
    if score is not None:
      checkpointer.scores[step] = score
    checkpointer.save(step, _state(step))
  checkpointer.wait()
  assert checkpointer.steps == [2, 3, 6]
  checkpointer.close()


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty])
def test_a_corrupt_newest_checkpoint_falls_back_and_says_so(tmp_path, damage):
  directory = tmp_path / "checkpoints"
  _fill(directory)
  damage(directory / "3")
  notes = []
  checkpointer = _open(directory, notes=notes)
  assert_trees_equal(checkpointer.restore_latest(), _state(2))
  (note,) = notes
  assert str(directory / "3") in note and "going on from step 2" in note and "\n" not in note
  assert (tmp_path / "corrupt_checkpoints" / "3").is_dir()
  checkpointer.save(3, _state(30))  # the step can be written again
  checkpointer.wait()
  assert_trees_equal(checkpointer.restore(3), _state(30))
  checkpointer.close()


def test_a_checkpoint_under_another_name_is_not_taken_for_that_step(tmp_path):
  directory = tmp_path / "checkpoints"
  _fill(directory)
  (directory / "3").rename(directory / "5")
  notes = []
  checkpointer = _open(directory, notes=notes)
  assert_trees_equal(checkpointer.restore_latest(), _state(2))
  assert "checkpoints/5 is that of step 3, renamed" in notes[0]
  checkpointer.close()


def test_a_wrong_checksum_counts_as_corrupt(tmp_path):
  """Damage that still reads as arrays, which the storage layer cannot notice."""
  directory = tmp_path / "checkpoints"
  _fill(directory)
  (meta,) = (directory / "3" / "meta").glob("metadata")
  content = json.loads(meta.read_text())
  content["checksums"]["params/b"] ^= 1
  meta.write_text(json.dumps(content))
  notes = []
  checkpointer = _open(directory, notes=notes)
  assert_trees_equal(checkpointer.restore_latest(), _state(2))
  assert "checksum of 'params/b' differs" in notes[0]
  checkpointer.close()


def test_all_corrupt_is_an_error_and_moves_nothing(tmp_path):
  directory = tmp_path / "checkpoints"
  _fill(directory)
  for step in "23":
    _truncate(directory / step)
  checkpointer = _open(directory)
  with pytest.raises(CheckpointError, match="no checkpoint in .* is readable") as caught:
    checkpointer.restore_latest()
  assert "\n" not in str(caught.value)
  assert sorted(path.name for path in directory.iterdir()) == ["2", "3"]
  checkpointer.close()


def test_checksums_see_values_and_places():
  base = {"x": jnp.arange(6.0).reshape(2, 3)}
  (value,) = checksums(base)
  for other in (base["x"].at[1, 2].set(5.0000005), base["x"][::-1], base["x"][:, ::-1]):
    assert int(checksums([other])[0]) != int(value)
  assert int(checksums([jnp.array(base["x"])])[0]) == int(value)


def test_a_resumed_run_falls_back_too_and_ends_the_same(tmp_path, capsys):
  config = TinyConfig()
  loop.train(tiny_task(), config, tmp_path / "whole", seed=0)

  def stop(step, batch):
    del batch
    if step == 6:
      raise KeyboardInterrupt
  with pytest.raises(KeyboardInterrupt):
    loop.train(tiny_task(on_batch=stop), config, tmp_path / "hurt", seed=0)
  assert (tmp_path / "hurt" / "checkpoints" / "6").is_dir()
  _flip(tmp_path / "hurt" / "checkpoints" / "6")
  with open(tmp_path / "hurt" / "metrics.jsonl", "a", encoding="utf-8") as file:
    file.write('{"step": 6, "spl')
  loop.train(tiny_task(), config, tmp_path / "hurt", seed=0)
  messages = capsys.readouterr().err
  assert "checkpoints/6 is unreadable" in messages and "going on from step 4" in messages
  assert_trees_equal(_final(tmp_path / "hurt"), _final(tmp_path / "whole"))
  steps = [[json.loads(line)["step"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
           for name in ("hurt", "whole")]
  assert steps[0] == steps[1]


def _final(workdir):
  import orbax.checkpoint as ocp  # pylint: disable=import-outside-toplevel
  with ocp.CheckpointManager(workdir / "checkpoints") as manager:
    return manager.restore(8, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state


def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(tmp_path):
  """The operating system refuses to write after step 4, as on a full disk; then there is space."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def fill_disk(step, batch):
    del batch
    if step == 5:
      resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))

  config = TinyConfig()
  try:
    with pytest.raises((CheckpointError, WorkdirError)) as caught:
      loop.train(tiny_task(on_batch=fill_disk), config, tmp_path, seed=0)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert "\n" not in str(caught.value) and "then run the same command again" in str(caught.value)
  # 4 may have been in flight; whatever was complete is still there.
  assert (tmp_path / "checkpoints" / "2").is_dir()
  result = loop.train(tiny_task(), config, tmp_path, seed=0)
  assert result["num_steps"] == 8


def test_threads_of_a_write_that_failed_do_not_hinder_the_next_run(tmp_path):
  directory = tmp_path / "checkpoints"
  _fill(directory, steps=(1,))
  state = directory / "2.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp"
  state.mkdir(parents=True)
  deadline = time.monotonic() + 0.5

  def go_on_writing(thread):
    with contextlib.suppress(FileNotFoundError):  # the folder is gone at last
      for index in itertools.count():
        (state / f"{thread} {index}").touch()
        if time.monotonic() > deadline:
          return

  with concurrent.futures.ThreadPoolExecutor() as executor:
    threads = [executor.submit(go_on_writing, thread) for thread in range(2)]
    checkpointer = _open(directory)
    for thread in threads:
      thread.result()
  assert checkpointer.steps == [1]
  assert not state.parent.exists()
  checkpointer.close()


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
  directory = tmp_path / "checkpoints"
  checkpointer = _open(directory)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
  with pytest.raises(CheckpointError, match="cannot save .*checkpoints/1: it needs 0.0 MB"):
    checkpointer.save(1, _state(1))
  assert not list(directory.iterdir())
  checkpointer.close()


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
  directory = tmp_path / "checkpoints"
  _fill(directory, steps=(1,))
  checkpointer = _open(directory)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    with pytest.raises(CheckpointError, match="cannot save .* earlier checkpoints are intact"):
      checkpointer.save(2, _state(2))
      checkpointer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  checkpointer.close()
  reopened = _open(directory)
  restored = reopened.restore_latest()
  # Orbax's threads may finish the failed one when there is space again: then it is whole.
  assert int(restored.step) in (1, 2)
  assert_trees_equal(restored, _state(int(restored.step)))
  reopened.close()


def test_a_signal_before_the_first_step_saves_step_zero(tmp_path):
  """The request came during compilation: nothing is trained yet, and nothing is lost."""
  config = dataclasses.replace(TinyConfig(), num_steps=2,
                               optimizer=dataclasses.replace(TinyConfig().optimizer,
                                                             warmup_steps=1))
  first = []

  def terminate(step, batch):
    del step, batch
    if not first:
      first.append(signal.raise_signal(signal.SIGTERM))
  with pytest.raises(Interrupted, match="at step 0 of 2"):
    loop.train(tiny_task(on_batch=terminate), config, tmp_path, seed=0)
  assert (tmp_path / "checkpoints" / "0").is_dir()
  assert loop.train(tiny_task(), config, tmp_path, seed=0)["num_steps"] == 2


@pytest.mark.families
def test_a_reader_tells_of_a_damaged_checkpoint_in_one_line(tmp_path):
  """Orbax's threads would add the tracebacks of callbacks that find their event loop closed."""
  loop.train(tiny_task(), TinyConfig(), tmp_path, seed=0)
  *_, before, last = faults.completed(tmp_path)
  manifest = tmp_path / "checkpoints" / str(last) / "state" / "manifest.ocdbt"
  manifest.write_bytes(manifest.read_bytes()[:-9])
  process = run_script(Path(__file__).with_name("read_params.py"), tmp_path)
  note, step = process.stdout.splitlines()
  assert f"{last} is unreadable" in note and step == str(before)
  assert not process.stderr
