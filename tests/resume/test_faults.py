"""200 faults: none loses a completed checkpoint, none leaves a silent wrong result.

`pytest -m slow tests/resume` prints a table of what came of each kind.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.training import loop
from damcha_jax.training.checkpoint import Checkpointer
from tests.resume import faults
from tests.resume.faults import CONFIG, DAMAGES
from tiny_task import tiny_task

pytestmark = pytest.mark.slow
NUM_STEPS = CONFIG.num_steps


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  assert faults.attempt(workdir) == "ended"
  return faults.Whole(workdir)


@pytest.fixture(name="stopped", scope="module")
def _stopped(tmp_path_factory):
  """A run that crashed at step 7: checkpoints 4 and 6."""
  workdir = tmp_path_factory.mktemp("stopped")
  faults.interrupt(workdir, 7)
  assert faults.completed(workdir) == [4, 6]
  return workdir


# Files --------------------------------------------------------------------------------------------


def _files(checkpoint):
  """One file of each kind."""
  kinds = {}
  for path in sorted(checkpoint.rglob("*")):
    if path.is_file():
      name = path.relative_to(checkpoint)
      kinds.setdefault(name.parent if name.parent.name == "d" else name, name)
  return list(kinds.values())


@pytest.mark.parametrize("how", DAMAGES)
def test_each_file_of_the_newest_checkpoint_damaged(fault, whole, stopped, tmp_path, how, capsys):
  rng = np.random.default_rng(list(DAMAGES).index(how))
  files = _files(stopped / "checkpoints" / "6")
  assert len(files) >= 7
  for number, name in enumerate(files):
    workdir = faults.copy(stopped, tmp_path / str(number))
    faults.damage(workdir / "checkpoints" / "6" / name, how, rng)
    assert faults.attempt(workdir) == "ended", name
    whole.check(workdir)
    assert (workdir / "checkpoints" / "4").is_dir() or len(faults.completed(workdir)) == 2
    fell_back = "going on from step 4" in capsys.readouterr().err
    assert fell_back == (workdir / "corrupt_checkpoints" / "6").is_dir()
    fault(f"a file of the newest checkpoint {how}",
               "fell back to the one before" if fell_back else "not needed")
    shutil.rmtree(workdir)


@pytest.mark.parametrize("how", DAMAGES)
def test_all_checkpoints_damaged(fault, stopped, tmp_path, how):
  """Refused, and everything stays for whoever can mend it."""
  rng = np.random.default_rng(7)
  workdir = faults.copy(stopped, tmp_path / "run")
  for step in "46":
    for path in (workdir / "checkpoints" / step / "state").rglob("d/*"):
      faults.damage(path, how, rng)
  assert faults.attempt(workdir) == "CheckpointError"
  assert faults.completed(workdir) == [4, 6] and not (workdir / "result.json").exists()
  fault("all checkpoints damaged", "refused in one line")


@pytest.mark.parametrize("name", ["config.json", "versions.json", "metrics.jsonl"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_record_of_an_interrupted_run_damaged(fault, whole, stopped, tmp_path, name, how, capsys):
  rng = np.random.default_rng(3)
  for number in range(3):
    workdir = faults.copy(stopped, tmp_path / f"run{number}")
    faults.damage(workdir / name, how, rng)
    before = (workdir / name).read_bytes() if how != "deleted" else None
    outcome = faults.attempt(workdir)
    told = capsys.readouterr().err
    if outcome == "ended":
      whole.check(workdir, with_records=name != "metrics.jsonl")
      if name == "metrics.jsonl" and faults.records(workdir) != whole.records:
        assert "their scores are lost" in told
        outcome = "ended the same, records lost and said"
      else:
        outcome = "ended the same"
    else:
      assert outcome == "WorkdirError" and faults.completed(workdir) == [4, 6]
      assert before is None or (workdir / name).read_bytes() == before
      outcome = "refused in one line"
    fault(f"{name} {how}", outcome)


@pytest.mark.parametrize("how", DAMAGES)
def test_the_result_of_a_finished_run_damaged(fault, whole, stopped, tmp_path, how):
  workdir = faults.copy(stopped, tmp_path / "run")
  assert faults.attempt(workdir) == "ended"
  for seed in range(3):
    copy = faults.copy(workdir, tmp_path / str(seed))
    faults.damage(copy / "result.json", how, np.random.default_rng(seed))
    outcome = faults.attempt(copy)
    if outcome == "WorkdirError":
      (copy / "result.json").unlink()  # as the message says
      assert faults.attempt(copy) == "ended"
    whole.check(copy)
    fault(f"result.json {how}", "refused, then made again" if outcome == "WorkdirError"
               else "ended the same")


@pytest.mark.parametrize("place", ["config.json", "versions.json", "metrics.jsonl", ".lock",
                                   "checkpoints", "result.json", "config.json.tmp", "."])
def test_something_in_the_way(fault, whole, tmp_path, place):
  workdir = tmp_path / "run"
  path = workdir / place
  path.parent.mkdir(exist_ok=True, parents=True)
  if place in ("checkpoints", "."):
    path.write_text("not a folder")
  else:
    path.mkdir()
  assert faults.attempt(workdir) in ("WorkdirError", "CheckpointError")
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  assert faults.attempt(workdir) == "ended"
  whole.check(workdir)
  fault("a folder for a file, a file for a folder", "refused in one line, then ended the same")


@pytest.mark.parametrize("junk", ["9.orbax-checkpoint-tmp-1", "6.orbax-checkpoint-tmp-2/state/d",
                                  "lost+found", "notes", "7/state", "12"])
def test_strange_folders_among_checkpoints(fault, whole, stopped, tmp_path, junk):
  workdir = faults.copy(stopped, tmp_path / "run")
  (workdir / "checkpoints" / junk).mkdir(parents=True)
  assert faults.attempt(workdir) == "ended"
  whole.check(workdir)
  fault("a strange folder among checkpoints", "ended the same")


# Disks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_file_larger_than(num_bytes):
  """What the operating system refuses to write, as on a full disk."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("num_bytes", [0, 1500])
def test_no_more_space_from_a_step_on(fault, whole, tmp_path, step, num_bytes):
  with _no_file_larger_than(num_bytes) as fill:
    outcome = faults.attempt(tmp_path, on_batch=lambda now, batch: fill() if now == step else None)
  assert outcome in ("CheckpointError", "WorkdirError")
  # Here, not in a new process, Orbax's threads may still be at what failed.
  assert "ended" in (faults.attempt(tmp_path), faults.attempt(tmp_path))
  whole.check(tmp_path)
  fault("writing fails from a step on", "one line, then ended the same")


@contextlib.contextmanager
def _small_disk(path, megabytes, *options):
  """A file system of its own, where this user may make one."""
  path.mkdir()
  arguments = ["-t", "tmpfs", "-o", ",".join([f"size={megabytes}m", *options]), "tmpfs", path]
  if shutil.which("mount") is None or subprocess.run(["mount", *arguments], check=False,
                                                     capture_output=True).returncode:
    pytest.skip("mounting needs rights that this user lacks")
  try:
    yield path
  finally:
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_full_disk(fault, whole, tmp_path, step):
  with _small_disk(tmp_path / "disk", 2) as disk:
    filler = disk / "filler"

    def fill(now, batch):
      del batch
      if now == step:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
          while file.write(bytes(4096)):
            pass
    outcome = faults.attempt(disk / "run", on_batch=fill)
    assert outcome in ("CheckpointError", "WorkdirError")
    kept = faults.completed(disk / "run")
    filler.unlink()
    assert faults.attempt(disk / "run") == "ended"
    assert not kept or max(faults.completed(disk / "run")) >= max(kept)
    whole.check(disk / "run")
  fault("a full disk", "one line, then ended the same")


def test_a_disk_that_can_only_be_read(fault, whole, stopped, tmp_path):
  with _small_disk(tmp_path / "disk", 2) as disk:
    faults.copy(stopped, disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for workdir in (disk / "run", disk / "other"):
      assert faults.attempt(workdir) == "WorkdirError"
      fault("a disk that can only be read", "refused in one line")
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert faults.attempt(disk / "run") == "ended"
    whole.check(disk / "run")


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_signal_at_a_batch(fault, whole, tmp_path, number, step):
  raised = []

  def on_batch(now, batch):
    del batch
    if now == step and not raised:
      raised.append(signal.raise_signal(number))
  assert faults.attempt(tmp_path, on_batch=on_batch) == "Interrupted"
  assert faults.attempt(tmp_path) == "ended"
  whole.check(tmp_path)
  fault(f"{signal.Signals(number).name} at a batch", "saved, then ended the same")


@pytest.mark.parametrize("name", ["save", "wait", "read_back", "restore_latest"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_amid_a_checkpoint(fault, whole, tmp_path, monkeypatch, name, number):
  faults.interrupt(tmp_path, 5)
  real = getattr(Checkpointer, name)

  def signalled(self, *arguments, **options):
    monkeypatch.undo()
    signal.raise_signal(number)
    return real(self, *arguments, **options)
  monkeypatch.setattr(Checkpointer, name, signalled)
  outcome = faults.attempt(tmp_path)
  assert outcome == "Interrupted"
  assert faults.attempt(tmp_path) == "ended"
  whole.check(tmp_path)
  fault("a signal amid a checkpoint", "saved, then ended the same")


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_crash_at_a_batch(fault, whole, tmp_path, step):
  if step == 0:  # the first batch is only looked at for its shapes, and asked for again
    with pytest.raises(ZeroDivisionError):
      loop.train(tiny_task(on_batch=lambda *unused: 1 / 0), CONFIG, tmp_path, seed=0)
  else:
    faults.interrupt(tmp_path, step)
  kept = faults.completed(tmp_path)
  assert not kept or max(kept) >= step - 3
  assert faults.attempt(tmp_path) == "ended"
  whole.check(tmp_path)
  fault("a crash at a batch", "ended the same")


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_second_run_in_a_workdir_that_is_held(fault, whole, tmp_path, step):
  refused = []

  def on_batch(now, batch):
    del batch
    if now == step and not refused:
      refused.append(faults.attempt(tmp_path))
  assert faults.attempt(tmp_path, on_batch=on_batch) == "ended"
  assert refused == ["WorkdirError"]
  whole.check(tmp_path)
  fault("a second run in the same workdir", "refused, and the first ended the same")


# Numbers and clocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_a_batch_that_is_not_finite(fault, whole, tmp_path, step, value):
  def spoil(now, batch):
    if now == step:
      batch["weights"][0, 0] = value
  assert faults.attempt(tmp_path, on_batch=spoil) == "NonFiniteError"
  kept = faults.completed(tmp_path)
  assert not kept or max(kept) <= step
  assert faults.attempt(tmp_path) == "ended"
  whole.check(tmp_path)
  fault("a batch that is not finite", "stopped, then ended the same")


@pytest.mark.parametrize("leaf", range(5))
def test_a_parameter_that_is_not_finite(fault, whole, stopped, tmp_path, monkeypatch, leaf):
  """It comes after the checksum was compared, as from faulty memory."""
  workdir = faults.copy(stopped, tmp_path / "run")
  real = Checkpointer.restore_latest

  def spoilt(self):
    monkeypatch.undo()
    state = real(self)
    leaves, tree = jax.tree.flatten(state.params)
    leaves[leaf] = jax.device_put(leaves[leaf].at[(0,) * leaves[leaf].ndim].set(jnp.nan),
                                  leaves[leaf].sharding)
    return state.replace(params=jax.tree.unflatten(tree, leaves))
  monkeypatch.setattr(Checkpointer, "restore_latest", spoilt)
  assert faults.attempt(workdir) == "NonFiniteError"
  assert faults.completed(workdir) == [4, 6]
  assert faults.attempt(workdir) == "ended"
  whole.check(workdir)
  fault("a parameter that is not finite", "stopped, then ended the same")


@pytest.mark.parametrize("jump", [1e9, -1e9, 3600.0, -3600.0])
@pytest.mark.parametrize("clock", ["time", "time_ns"])
def test_a_clock_that_jumps(fault, whole, tmp_path, monkeypatch, clock, jump):
  real = getattr(time, clock)

  def on_batch(now, batch):
    del batch
    if now == 3:
      monkeypatch.setattr(time, clock, lambda: type(real())(real() + jump))
  outcome = faults.attempt(tmp_path, on_batch=on_batch)
  monkeypatch.undo()
  if outcome == "CheckpointError":  # Orbax takes what is in flight for overdue by that much
    assert jump > 0 and faults.attempt(tmp_path) == "ended"
    outcome = "one line, then ended"
  whole.check(tmp_path)
  fault("a clock that jumps", f"{outcome} the same")
