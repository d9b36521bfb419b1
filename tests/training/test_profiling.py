"""Traces hold the updates that are asked for, and a resumed run traces what is left of them."""

from types import SimpleNamespace

import jax
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.training import loop
from damcha_jax.training.profiling import parse_updates, profiled, Profiler
from experiments import command_line
from tiny_task import TinyConfig, tiny_task


@pytest.fixture(name="switches")
def _switches(monkeypatch):
  """What is started and stopped, in place of a profiler."""
  seen = []
  monkeypatch.setattr(jax, "profiler", SimpleNamespace(
      start_trace=lambda directory: seen.append("start"), stop_trace=lambda: seen.append("stop")))
  return seen


def _trace(updates, seen, num_updates=6, start=1):
  """Goes through updates; returns what was done between `start` and `stop`."""
  seen.clear()
  with profiled(updates):
    profiler = Profiler("unused")
    for update in range(start, num_updates + 1):
      profiler.before(update, ())
      seen.append(update)
    profiler.before(num_updates + 1, ())
  profiler.close()
  if "start" not in seen:
    return []
  assert seen.count("start") == seen.count("stop") == 1
  return seen[seen.index("start") + 1:seen.index("stop")]


def test_the_updates_that_are_asked_for_are_traced(switches):
  assert _trace(range(2, 5), switches) == [2, 3, 4]
  assert _trace(range(5, 9), switches) == [5, 6]
  assert _trace(range(2, 5), switches, start=4) == [4]
  assert _trace(range(2, 5), switches, start=5) == _trace(None, switches) == []


@pytest.mark.parametrize("updates, start, note", [
    (range(8, 10), 1, "no run had updates 8 to 9 left to make"),
    (range(2, 4), 5, "no run had updates 2 to 3 left"), (range(2, 9), 1, ""), (None, 1, "")])
def test_a_trace_that_never_began_is_told(switches, capsys, updates, start, note):
  _trace(updates, switches, start=start)
  assert note in capsys.readouterr().err if note else not capsys.readouterr().err


def test_a_trace_that_an_error_cuts_short_is_kept(switches):
  with profiled(range(1, 9)):
    profiler = Profiler("unused")
  profiler.before(1, ())
  profiler.close()
  assert switches == ["start", "stop"]


@pytest.mark.parametrize("text", ["10", "12-10", "0-3", "a-b", "-3"])
def test_other_updates_are_an_error(text):
  with pytest.raises(ConfigError, match="give the first and the last, such as 10-12"):
    parse_updates(text)


def test_a_run_keeps_its_trace(tmp_path):
  argv = ["x", "--config=configs/mix.py:smoke", f"--workdir={tmp_path}", "--profile=2-3"]
  _, _, run = command_line.parse_all(argv)
  with run:
    loop.train(tiny_task(), TinyConfig(num_steps=4), tmp_path / "run", seed=0)
  (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
  # The names of the programs that ran, of which the update is one.
  assert b"train_step" in trace.read_bytes()
