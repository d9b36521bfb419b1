"""What a run writes: atomic files, metrics that survive a crash, progress, speed."""

from __future__ import annotations

import io
import json
import os
from types import SimpleNamespace

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from damcha_jax.errors import WorkdirError
from damcha_jax.training import flops as flops_lib
from damcha_jax.training import meter as meter_lib
from damcha_jax.training import workdir as workdir_lib
from damcha_jax.training import writer as writer_lib
from damcha_jax.training.result import read_result
from tiny_task import LENGTH, VOCAB, tiny_task


def _line(step, split="train", **values):
  return json.dumps({"step": step, "split": split, **values}) + "\n"


def test_resuming_drops_later_records_the_torn_line_and_test_records(tmp_path):
  path = tmp_path / "metrics.jsonl"
  kept = _line(1, loss=3.0) + _line(2, loss=2.0) + _line(2, "validation", loss=2.5)
  path.write_text(kept + _line(2, "test/a", loss=2.5) + _line(3, loss=1.0) + '{"step": 4, "spl')
  writer = writer_lib.MetricsWriter(path, last_step=2)
  assert path.read_text() == kept
  writer.write({"step": 3, "split": "train", "loss": 1.5})
  writer.close()
  assert path.read_text() == kept + _line(3, loss=1.5)
  assert [record["step"] for record in writer.records] == [1, 2, 2, 3]


def test_a_last_line_of_garbage_is_torn_and_an_earlier_one_is_an_error(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(_line(1).encode() + b"\0\xff\0\0")
  writer = writer_lib.MetricsWriter(path, last_step=9)
  writer.close()
  assert writer.records == [{"step": 1, "split": "train"}]
  for line in ("garbage", "{}", "3", '["step", "split"]', '{"step": "a", "split": "train"}'):
    path.write_text(line + "\n" + _line(1))
    with pytest.raises(WorkdirError, match="metrics.jsonl line 1 is not a record"):
      writer_lib.MetricsWriter(path, last_step=9)


@pytest.mark.parametrize("value", ["{}", '"1.5"', "true", "NaN", "1e999", "null", "1" + "0" * 400])
def test_a_record_without_its_number_is_named(tmp_path, value):
  path = tmp_path / "metrics.jsonl"
  path.write_text(_line(1, seconds=1.0) + '{"step": 1, "split": "train", "seconds": %s}\n' % value
                  + _line(1, "other"))
  with pytest.raises(WorkdirError, match="metrics.jsonl line 2 is not a record"):
    writer_lib.MetricsWriter(path, last_step=9, needed={"train": "seconds"})


def test_records_that_are_a_folder_are_named(tmp_path):
  (tmp_path / "metrics.jsonl").mkdir()
  with pytest.raises(WorkdirError, match="cannot read .*metrics.jsonl: Is a directory"):
    writer_lib.MetricsWriter(tmp_path / "metrics.jsonl", last_step=9)


RESULT = {"name": "mha", "num_steps": 8, "num_params": 10, "model_flops_per_step": 3,
          "train_seconds": 1.5, "selection_metric": "nats_per_token",
          "best": {"step": 4, "metrics": {"validation": {"nats_per_token": 1.5},
                                          "train": {"mfu": None}}}}


@pytest.mark.parametrize("damage, message", [
    ({"num_steps": "8"}, "num_steps='8', which is no number"),
    ({"name": "damcha"}, "name='damcha', not 'mha'"),
    ({"best": {"metrics": {"validation": {}}}}, "no nats_per_token on 'validation'"),
    ({"best": {"metrics": {"validation": {"nats_per_token": None}}}}, "nats_per_token=None on"),
    ({"train_seconds": float("nan")}, "train_seconds=nan, which is no number"),
    ({"num_params": None}, "num_params=None, which is no number"),
    ({"best": 3}, "no metrics of the best checkpoint"),
    ({"best": {"metrics": {}}}, "no metrics of the best checkpoint on the validation split"),
    ({"best": {"metrics": {"validation": {"nats_per_token": 1.5}}}}, "no step of the best"),
    ({"best": {"metrics": {"validation": 1.5}}}, "has 1.5 for the metrics on 'validation'"),
    ({"best": {"metrics": {"validation": {"nats_per_token": [1]}}}},
     r"nats_per_token=\[1\] on 'validation', which is no number")])
def test_a_damaged_result_is_named(tmp_path, damage, message):
  directory = workdir_lib.Workdir(tmp_path)
  directory.write_json("result.json", RESULT)
  assert read_result(directory, name="mha") == RESULT
  directory.write_json("result.json", {**RESULT, **damage})
  with pytest.raises(WorkdirError, match=f"result.json .*{message}.*; remove it"):
    read_result(directory, name="mha")
  directory.write_json("result.json", {})
  with pytest.raises(WorkdirError, match="result.json has name=None"):
    read_result(directory, name="mha")


def test_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / "result.json"
  workdir_lib.write_atomically(path, "old")
  def full(_):
    raise OSError(28, "No space left on device")
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(WorkdirError, match="cannot write .*result.json: No space left on device"):
    workdir_lib.write_atomically(path, "new")
  assert path.read_text() == "old"


@pytest.mark.parametrize("content, message", [
    ("{", "is not valid JSON"), ("[1]", "is not a JSON object"), ("{}", "has no 'seed'"),
    (None, "Is a directory")])
def test_a_json_file_that_cannot_be_read_is_named(tmp_path, content, message):
  path = tmp_path / "config.json"
  path.mkdir() if content is None else path.write_text(content)
  with pytest.raises(WorkdirError, match=f"config.json.*{message}"):
    workdir_lib.Workdir(tmp_path).read_json("config.json", keys=["seed"])


def test_first_difference_follows_the_new_order_and_sees_missing_keys():
  old, new = {"a": 1, "b": {"c": 2, "d": [1, 2]}}, {"a": 1, "b": {"c": 2, "d": [1, 2]}}
  assert workdir_lib.first_difference(old, new) is None
  assert workdir_lib.first_difference(old, {**new, "b": {"c": 2, "d": [1]}}) == ("b.d", [1, 2], [1])
  assert workdir_lib.first_difference({**old, "e": 5}, new) == ("e", 5, None)


def test_versions_say_what_numbers_depend_on():
  found = workdir_lib.versions()
  assert found["jax"] == jax.__version__
  assert found["num_devices"] == jax.device_count()
  assert found["jax_threefry_partitionable"] is True
  json.dumps(found)


def test_progress_rewrites_a_terminal_line_and_prints_plain_lines_elsewhere():
  plain = io.StringIO()
  progress = writer_lib.Progress("run", stream=plain)
  progress.update("one")
  progress.note("two")
  progress.close()
  assert plain.getvalue() == "[run] one\n[run] two\n"
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  progress = writer_lib.Progress("run", stream=terminal)
  progress.update("step 10")
  progress.update("end")
  progress.close()
  assert terminal.getvalue() == "[run] step 10\r[run] end    \n"


def test_what_is_throttled_passes_at_most_once_per_interval():
  now, seen = [0.0], []
  throttled = writer_lib.Throttled(seen.append, seconds=5.0, clock=lambda: now[0])
  for second in range(13):
    now[0] = second
    throttled(second)
  assert seen == [5, 10]


def test_durations():
  assert [writer_lib.format_duration(s) for s in (4.6, 75, 3675)] == ["0:05", "1:15", "1:01:15"]


def test_meter_counts_training_time_only(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(meter_lib, "peak_flops", lambda device: 100.0)
  meter = meter_lib.Meter(steps_left=10, model_flops_per_step=50, train_seconds=7.0,
                          clock=lambda: now[0])
  for _ in range(4):
    now[0] += 2.0
    meter.count_step(30)
  meter.pause()
  now[0] += 8.0  # an evaluation
  meter.resume()
  speed = meter.read()
  assert speed["tokens_per_second"] == pytest.approx(4 * 30 / 8)
  assert speed["mfu"] == pytest.approx(4 * 50 / (8 * 100 * jax.device_count()))
  assert speed["train_seconds"] == 15.0
  assert meter.seconds_left() == pytest.approx((8 + 8) / 4 * 6)
  monkeypatch.setattr(meter_lib, "peak_flops", lambda device: None)
  assert meter.read()["mfu"] is None


@pytest.mark.parametrize("kind,platform,peak", [
    ("NVIDIA H200", "gpu", 989e12), ("NVIDIA A100-SXM4-80GB", "gpu", 312e12),
    ("NVIDIA L40S", "gpu", None), ("TPU v4", "tpu", 275e12), ("cpu", "cpu", None)])
def test_peaks(kind, platform, peak):
  assert flops_lib.peak_flops(SimpleNamespace(device_kind=kind, platform=platform)) == peak


def test_flops_count_products_loops_and_nothing_else():
  def fn(a, b):
    body = jax.checkpoint(lambda x, _: (jnp.tanh(x @ b), None))
    return jax.lax.scan(body, a, None, length=5)[0] + jnp.einsum("ij,kj->ik", a, b)
  jaxpr = jax.make_jaxpr(fn)(jnp.ones((3, 4)), jnp.ones((4, 4)))
  assert flops_lib.matmul_flops(jaxpr.jaxpr) == 6 * 2 * 3 * 4 * 4
  conv = jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))(
      jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3)))
  assert flops_lib.matmul_flops(conv.jaxpr) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_model_flops_are_three_forward_passes():
  task = tiny_task()
  params = nn.meta.unbox(task.init_params(jax.random.key(0)))
  flops = flops_lib.model_flops_per_step(task, params, task.train_source.batch_at(0))
  assert flops == 3 * 2 * (8 * LENGTH) * (8 * 16 + 16 * VOCAB)
