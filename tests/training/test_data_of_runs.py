"""A run goes on with the data it began with, and its best checkpoint is the reported one."""

import dataclasses
import json
import lzma

from lm_run import tiny_language_model, write_corpus
import pytest

from configs import cifar10, commongen
from damcha_jax.config import CheckpointConfig, freeze, ImageGenerationConfig, TextGenerationConfig
from damcha_jax.data.images import load_image_data
from damcha_jax.errors import CheckpointError, WorkdirError
from damcha_jax.training import image_generation, loop
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.restore import one_device_targets, restore_params
from damcha_jax.training.result import read_result
from damcha_jax.training.text_generation import load_texts
from damcha_jax.training.workdir import Workdir
from tiny_task import TinyConfig, tiny_task


def _with_hashes(**hashes):
  return dataclasses.replace(tiny_task(), data_hashes=hashes)


def test_a_run_is_refused_with_other_data(tmp_path):
  loop.train(_with_hashes(a="1", b="2"), TinyConfig(num_steps=3), tmp_path, seed=0)
  loop.train(_with_hashes(b="2", a="1"), TinyConfig(num_steps=3), tmp_path, seed=0)
  for hashes, message in (({"a": "1", "b": "3"}, "another b .hash 2, now 3"),
                          ({"a": "1"}, "another b .hash 2, now absent"),
                          ({"a": "1", "b": "2", "c": "4"}, "another c .hash absent, now 4")):
    with pytest.raises(WorkdirError, match=message):
      loop.train(_with_hashes(**hashes), TinyConfig(num_steps=3), tmp_path, seed=0)


def _text_config(folder, data_dir):
  config = commongen.get_config("smoke")
  config.dataset = str(folder)
  config.data.update(data_dir=str(data_dir), tokenizer="bytes")
  return freeze(config, TextGenerationConfig)


def test_every_file_of_a_set_of_texts_counts(tmp_path):
  for split in ("train", "validation", "test"):
    (tmp_path / f"{split}.tsv.xz").write_bytes(lzma.compress(b"a\tb\n"))
  config = _text_config(tmp_path, tmp_path / "data")
  first = load_texts(config).hashes
  assert set(first) == {"train.tsv.xz", "validation.tsv.xz", "test.tsv.xz", "tokenizer"}
  for split in ("train", "validation", "test"):
    path = tmp_path / f"{split}.tsv.xz"
    path.write_bytes(lzma.compress(f"{split}\tb\n".encode()))  # in the same process
    changed = load_texts(config)
    assert [name for name in first if first[name] != changed.hashes[name]] == [path.name]
    first = changed.hashes
  assert changed.held_out["test"][0].source == "test"


def test_a_text_file_and_images_count(tmp_path):
  config = tiny_language_model(write_corpus(tmp_path / "text.txt"), scan_layers=False)
  before = language_model_task(config, "mha", seed=0).data_hashes
  (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text() + "more")
  after = language_model_task(config, "mha", seed=0).data_hashes
  assert set(before) == set(after) == {"text.txt"} and before != after

  images = freeze(cifar10.get_config("smoke"), ImageGenerationConfig)
  plain = load_image_data(images.dataset, images.data).hashes
  coloured = load_image_data(images.dataset, dataclasses.replace(
      images.data, colour="palette", data_dir=str(tmp_path))).hashes
  assert set(plain) == {"noto_emoji.npz.xz"} and set(coloured) == {*plain, "palette"}


def test_adaptivity_is_recorded_on_images_alone(monkeypatch):
  monkeypatch.setattr(image_generation, "decoder_task", lambda *unused, probe, **also: probe)
  config = freeze(cifar10.get_config("smoke"), ImageGenerationConfig)
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, max_held_out_images=3))
  probe = image_generation.image_generation_task(config, "mha", seed=0)
  assert probe["weights"].shape[0] == 3 and probe["weights"].all()


# The best checkpoint -------------------------------------------------------------------------------


def _train(directory, **checkpoint):
  task = tiny_task()
  config = TinyConfig(num_steps=6, checkpoint=CheckpointConfig(
      **{"every_steps": 1, "keep_last": 9, "keep_best": 1, **checkpoint}))
  return task, config, loop.train(task, config, directory, seed=0)


def _restore(task, directory, which):
  notes = []
  step, _ = restore_params(directory, one_device_targets(task.init_params), which,
                           task.selection_metric, notes.append)
  return step, notes


def _set_scores(directory, metric, scores):
  (directory / "metrics.jsonl").write_text("".join(
      json.dumps({"step": step, "split": "validation", metric: score}) + "\n"
      for step, score in scores.items()))


def test_the_reported_step_is_the_best_whatever_the_records_say(tmp_path):
  task, _, result = _train(tmp_path, keep_best=0)
  assert result["best"]["step"] == 6
  _set_scores(tmp_path, task.selection_metric, {3: 0.1, 6: 0.2})
  assert _restore(task, tmp_path, "best") == (6, [])


def test_of_equals_the_first_is_best(tmp_path):
  task, *_ = _train(tmp_path)
  (tmp_path / "result.json").unlink()
  _set_scores(tmp_path, task.selection_metric, {2: 0.2, 3: 0.1, 4: 0.1, 6: 0.3})
  assert _restore(task, tmp_path, "best") == (3, [])


def test_a_reported_step_that_cannot_be_read_is_named(tmp_path):
  task, config, result = _train(tmp_path)
  step = result["best"]["step"]
  for path in (tmp_path / "checkpoints" / str(step)).rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  with pytest.raises(CheckpointError, match=f"reports step {step}; .* remove result.json"):
    _restore(task, tmp_path, step)
  other, notes = _restore(task, tmp_path, "best")
  assert other != step and len(notes) == 1 and "trying the next" in notes[0]

  # The remedy.
  (tmp_path / "result.json").unlink()
  result = loop.train(task, config, tmp_path, seed=0)
  assert _restore(task, tmp_path, result["best"]["step"])[0] == result["best"]["step"]
  assert read_result(Workdir(tmp_path)) == result
