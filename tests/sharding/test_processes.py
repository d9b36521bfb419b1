"""Several processes of one run: the same numbers, and an end for all when one is lost."""

import json
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from damcha_jax.config import ConfigError
from damcha_jax.errors import UserError
from damcha_jax.training import processes as processes_lib
from damcha_jax.training.processes import Beats

ROOT = Path(__file__).parents[2]
TIMEOUT = 20  # seconds


# Beats --------------------------------------------------------------------------------------------


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture(name="clock")
def _clock():
  return Clock()


def _processes(folder, clock, number=3):
  return [Beats(folder, number, index, timeout=10, clock=clock) for index in range(number)]


def test_who_never_starts_is_named(tmp_path, clock):
  first, second, _ = _processes(tmp_path, clock)
  second.beat()
  first.listen()
  assert first.not_started() == ["process 2"] and first.silent() == []
  clock.now = 11
  second.beat()
  first.listen()
  assert first.silent() == ["process 2"]


def test_who_stops_beating_is_named_with_host_and_pid(tmp_path, clock):
  first, second = _processes(tmp_path, clock, 2)
  for clock.now in range(0, 50, 5):
    second.beat()
    first.listen()
    assert first.silent() == []
  clock.now += 11
  first.listen()
  assert first.silent() == [f"process 1 ({socket.gethostname()}:{os.getpid()})"]


def test_who_is_done_is_not_missed(tmp_path, clock):
  first, second = _processes(tmp_path, clock, 2)
  second.beat(done=True)
  first.listen()
  clock.now = 100
  assert first.silent() == []


def test_the_beats_of_an_earlier_run_do_not_count(tmp_path, clock):
  for process in _processes(tmp_path, clock, 2):
    process.beat(done=True)
  first, _ = _processes(tmp_path, clock, 2)
  first.listen()
  assert first.not_started() == ["process 1"]
  clock.now = 11
  assert first.silent() == ["process 1"]


def test_files_that_cannot_be_read_are_silence(tmp_path, clock):
  (tmp_path / "1").mkdir(parents=True)
  first = Beats(tmp_path, 2, 0, timeout=10, clock=clock)
  first.listen()
  assert first.not_started() == ["process 1"]


@pytest.mark.parametrize("arguments, message", [
    (("--process_id=2", "--num_processes=2"), "--process_id=2 must be from 0 to 1"),
    (("--num_processes=0",), "num_processes"),
    (("--num_processes=2", "--process_id=0", "--coordinator_address=host"), "host is no HOST:PORT"),
    (("--distributed",), "give --coordinator_address, --num_processes and --process_id"),
])
def test_processes_that_cannot_be_told_are_one_line(tmp_path, arguments, message):
  done = subprocess.run(_command(tmp_path / "run", *arguments), cwd=ROOT, capture_output=True,
                        text=True, check=False, env=_environment(1))
  assert done.returncode == 2
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert message in done.stderr


@pytest.mark.parametrize("address", ["", "host", "host:", ":1234", "host:port", "host:65536"])
def test_an_address_is_a_host_and_a_port(tmp_path, address):
  with pytest.raises(ConfigError, match=f"^--coordinator_address={address} is no HOST:PORT"):
    with processes_lib.connected(tmp_path, address, 2, 0, timeout=1):
      pass


def test_a_host_that_nobody_knows_and_a_port_that_is_taken_are_named(tmp_path):
  with pytest.raises(UserError, match="no host of this name is found .* in 0.1 s; give the name"):
    with processes_lib.connected(tmp_path, "nowhere.invalid:1234", 1, 0, timeout=0.1):
      pass
  with socket.create_server(("127.0.0.1", 0)) as server:
    address = "127.0.0.1:%d" % server.getsockname()[1]
    with pytest.raises(UserError, match=f"{address}: process 0 cannot listen .*another port"):
      with processes_lib.connected(tmp_path, address, 1, 0, timeout=1):
        pass


def test_who_listens_at_an_x_is_heard():
  try:
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
  except OSError:
    pytest.skip("there is no IPv6 here")
  with server:
    assert processes_lib._listens("[::1]:%d" % server.getsockname()[1])


_WAITING = """
import os, pathlib, sys, time
from damcha_jax.errors import DataError
from damcha_jax.training.processes import connected
from experiments.command_line import user_errors
workdir, address, num_processes, process_id, timeout, then = sys.argv[1:]
with user_errors(), connected(pathlib.Path(workdir), address, int(num_processes), int(process_id),
                              int(timeout)):
  pathlib.Path(workdir, f"connected{process_id}").touch()
  exec(then)
"""


def _waiting(workdir, address, num_processes, process_id, then="time.sleep(300)", timeout=30):
  return subprocess.Popen(
      [sys.executable, "-c", _WAITING, str(workdir), address, str(num_processes), str(process_id),
       str(timeout), then], cwd=ROOT, env=_environment(1), text=True, stderr=subprocess.PIPE)


def _until_connected(workdir, *processes):
  deadline = time.monotonic() + 120
  while not all((workdir / f"connected{index}").exists() for index in range(len(processes))):
    assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
    time.sleep(0.1)


def test_who_does_not_talk_to_a_lost_process_0_ends_with_its_name_too(tmp_path):
  """It learns of the loss from JAX alone, which aborts it."""
  address = _free_address()
  lost, other = (_waiting(tmp_path, address, 2, index) for index in range(2))
  with lost, other:
    _until_connected(tmp_path, lost, other)
    lost.kill()
    errors = other.communicate(timeout=60)[1]
  assert other.returncode == 1
  named = rf"process 0( \({socket.gethostname()}:{lost.pid}\))?"  # once it has beaten
  assert re.match(f"error: {named} was lost: process 1 of 2 cannot reach it",
                  errors.splitlines()[-1])


@pytest.mark.families
@pytest.mark.parametrize("failing", [0, 1])
def test_who_fails_alone_ends_and_so_do_the_others(tmp_path, failing):
  """JAX waits at exit for processes that have not ended."""
  address = _free_address()
  fail = "time.sleep(5); raise DataError('here alone it is missing')"
  processes = [_waiting(tmp_path, address, 2, index, fail if index == failing else
                        "time.sleep(300)", timeout=10) for index in range(2)]
  with processes[0], processes[1]:
    errors = [process.communicate(timeout=90)[1] for process in processes]
  assert [process.returncode for process in processes] == [1, 1]
  assert errors[failing] == "error: here alone it is missing\n"
  last = errors[1 - failing].splitlines()[-1]
  assert last.startswith(f"error: process {failing} (") and "was lost" in last


def test_a_number_that_another_process_has_is_one_line(tmp_path):
  address = _free_address()
  with _waiting(tmp_path, address, 2, 1) as first:
    try:
      while not (tmp_path / ".processes" / "1").exists():
        assert first.poll() is None
        time.sleep(0.1)
      with _waiting(tmp_path, address, 2, 1) as second:
        errors = second.communicate(timeout=120)[1]
    finally:
      first.kill()
  assert second.returncode == 1
  assert errors.count("\n") == 1
  assert errors.startswith("error: process 1 of 2 is there already in ")


def test_an_abort_that_no_lost_process_causes_stays_one(tmp_path):
  with _waiting(tmp_path, _free_address(), 1, 0, "os.abort()") as process:
    errors = process.communicate(timeout=120)[1]
  assert process.returncode == -signal.SIGABRT
  assert "error:" not in errors


# Runs ---------------------------------------------------------------------------------------------


def _free_address():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return "127.0.0.1:%d" % free.getsockname()[1]


def _environment(num_devices):
  return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
          "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"
                       " --xla_cpu_collective_call_terminate_timeout_seconds=600"}


def _command(workdir, *more):
  return [sys.executable, "-m", "experiments.gpt2_enwik8", "--config=configs/mix.py:smoke",
          f"--workdir={workdir}", "--config.attentions=damcha", "--config.num_steps=12",
          "--config.evaluation.every_steps=4", "--config.checkpoint.every_steps=4",
          "--config.logging.every_steps=1", "--config.optimizer.warmup_steps=2",
          "--config.mesh.fsdp=2", "--config.data.max_held_out_bytes=3000", *more]


def _start_two(workdir, options=((), ())):
  """Starts them, each with options of its own besides."""
  address = _free_address()
  processes = []
  for index in range(2):
    with (workdir.parent / f"{workdir.name}-{index}.log").open("w") as log:
      processes.append(subprocess.Popen(
          _command(workdir, f"--coordinator_address={address}", "--num_processes=2",
                   f"--process_id={index}", f"--process_timeout={TIMEOUT}", *options[index]),
          cwd=ROOT, env=_environment(4), stdout=subprocess.DEVNULL, stderr=log))
  return processes


def _losses(workdir):
  lines = (workdir / "damcha" / "seed0" / "metrics.jsonl").read_text().splitlines()
  records = map(json.loads, lines)
  return {(record["step"], record["split"]): record["nats_per_token"]
          for record in records if "nats_per_token" in record}


def _checksums(workdir):
  """Of every leaf of the last state."""
  meta = workdir / "damcha" / "seed0" / "checkpoints" / "12" / "meta" / "metadata"
  return json.loads(meta.read_text())["checksums"]


@pytest.fixture(name="two", scope="module")
def _two(tmp_path_factory):
  """A run of two processes with four devices each."""
  workdir = tmp_path_factory.mktemp("two") / "run"
  assert [process.wait(600) for process in _start_two(workdir)] == [0, 0]
  return workdir


@pytest.mark.families
def test_two_processes_of_four_devices_train_as_one_of_eight(two, tmp_path):
  workdir = tmp_path / "one"
  subprocess.run(_command(workdir), cwd=ROOT, check=True, env=_environment(8), capture_output=True)
  expected = _losses(workdir)
  assert len(expected) == 12 + 3 * 3 + 3  # steps, validation, test
  found = _losses(two)
  assert found.keys() == expected.keys()
  for key, loss in expected.items():
    assert found[key] == pytest.approx(loss, abs=1e-5)


@pytest.mark.families
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other_and_a_restart_resumes_bitwise(two, tmp_path, fault, lost):
  workdir = tmp_path / "run"
  processes = _start_two(workdir)
  other = processes[1 - lost]
  deadline = time.monotonic() + 300
  metrics = workdir / "damcha" / "seed0" / "metrics.jsonl"
  while not (metrics.exists() and '"step": 6, "split": "train"' in metrics.read_text()):
    assert time.monotonic() < deadline and other.poll() is None
    time.sleep(0.1)
  processes[lost].send_signal(signal.SIGKILL)
  processes[lost].wait()
  killed_at = time.monotonic()
  assert other.wait(600) == 1
  assert time.monotonic() - killed_at < 2 * TIMEOUT
  log = (tmp_path / f"run-{1 - lost}.log").read_text()
  last_line = log.splitlines()[-1]
  assert last_line.startswith(f"error: process {lost} (") and "was lost" in last_line
  assert "Traceback" not in log
  assert [process.wait(600) for process in _start_two(workdir)] == [0, 0]
  assert "resuming at step" in (tmp_path / "run-0.log").read_text()
  assert len(_checksums(two)) > 30
  assert _checksums(workdir) == _checksums(two)
  fault("a host lost", "named by the other, then ended the same")


@pytest.mark.families
def test_data_that_one_host_lacks_ends_both(tmp_path):
  """The other waits for it in an operation on a checkpoint, whose failure is no full disk."""
  (tmp_path / "here.txt").write_text("Enough text for windows. " * 20_000)
  processes = _start_two(tmp_path / "run", [
      [f"--config.dataset={tmp_path / name}"] for name in ("here.txt", "missing.txt")])
  assert [process.wait(300) for process in processes] == [1, 1]
  last = [(tmp_path / f"run-{index}.log").read_text().splitlines()[-1] for index in range(2)]
  assert last[0].startswith("error: process 1 (") and "was lost" in last[0]
  assert last[1].startswith("error: the text file ") and "missing.txt cannot be read" in last[1]


@pytest.mark.families
def test_an_interrupt_of_one_stops_and_saves_all(two, tmp_path):
  workdir = tmp_path / "run"
  processes = _start_two(workdir)
  deadline = time.monotonic() + 300
  metrics = workdir / "damcha" / "seed0" / "metrics.jsonl"
  while not (metrics.exists() and '"step": 2, "split": "train"' in metrics.read_text()):
    assert time.monotonic() < deadline and processes[1].poll() is None
    time.sleep(0.1)
  processes[1].send_signal(signal.SIGINT)
  assert [process.wait(600) for process in processes] == [1, 1]
  for index in range(2):
    log = (tmp_path / f"run-{index}.log").read_text()
    assert re.search(r"^error: stopped by a signal at step \d+ of 12; saved in", log, re.MULTILINE)
  assert [process.wait(600) for process in _start_two(workdir)] == [0, 0]
  assert _checksums(workdir) == _checksums(two)


@pytest.mark.families
def test_a_process_that_never_starts_is_named(tmp_path):
  with subprocess.Popen(
      _command(tmp_path / "run", "--coordinator_address=127.0.0.1:1", "--num_processes=2",
               "--process_id=1", "--process_timeout=12"), cwd=ROOT, env=_environment(1), text=True,
      stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
    errors = process.stderr.read()
  assert process.returncode == 1
  assert errors.splitlines()[-1].startswith("error: process 0 did not start: process 1 of 2")
