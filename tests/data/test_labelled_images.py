"""Batches for classifiers: functions of the step, also from workers; every image counts once."""

import dataclasses
import json
import os
from pathlib import Path
import signal
import sys

import numpy as np
import pytest

from configs import vit_s16
from damcha_jax.config import AugmentationConfig, ConfigError, freeze, ImageClassificationConfig
from damcha_jax.data import augmentation, imagenet
from damcha_jax.data.labelled_images import (ArrayImages, AugmentedBatches, EvalLabelledImages,
                                             load_labelled_images, TrainLabelledImages)
from damcha_jax.data.shuffling import ShuffledEpochs
from damcha_jax.errors import DataError
import eight_devices_images
import labelled_records
from tiny_task import run_script

CONFIG = freeze(vit_s16.get_config("smoke"), ImageClassificationConfig)
DATA, SIZE = CONFIG.data, 8
RANDOM = AugmentationConfig(crop_scale=(0.2, 1.0), crop_ratio=(0.75, 4 / 3), flip=True,
                            randaugment_layers=2, randaugment_magnitude=9.0, mixup_alpha=0.0,
                            label_smoothing=0.0)


def _images(count=20):
  pixels = np.random.default_rng(0).integers(0, 256, (count, 12, 12, 3)).astype(np.uint8)
  return ArrayImages(pixels, np.arange(count))


def _source(seed=3, batch_size=6, process=(0, 1), images=None, num_workers=0, num_steps=9):
  images = images or _images()
  order = ShuffledEpochs(len(images), batch_size, seed, *process)
  return TrainLabelledImages(AugmentedBatches(images, order, seed, SIZE, RANDOM), num_steps,
                             num_workers)


def _assert_same(left, right):
  assert left.keys() == right.keys()
  for name in left:
    np.testing.assert_array_equal(left[name], right[name])
    assert left[name].dtype == right[name].dtype


@pytest.fixture(name="records", scope="module")
def _records(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  labelled_records.write_records(folder)
  return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch):
  monkeypatch.setattr(imagenet, "NUM_IMAGES", labelled_records.NUM_IMAGES)
  load_labelled_images.cache_clear()


def test_a_batch_depends_on_seed_and_step_alone():
  forwards, backwards = _source(), _source()
  batches = {step: forwards.batch_at(step) for step in range(9)}
  for step in reversed(range(9)):
    _assert_same(backwards.batch_at(step), batches[step])
  assert batches[0]["inputs"].shape == (6, SIZE, SIZE, 3)
  assert batches[0]["inputs"].dtype == np.uint8 and batches[0]["targets"].dtype == np.int32
  other = _source(seed=4).batch_at(0)
  assert not np.array_equal(other["targets"], batches[0]["targets"])


def test_every_image_comes_once_an_epoch_and_each_time_another_way():
  source = _source(batch_size=10)
  epochs = [[source.batch_at(2 * epoch + half) for half in range(2)] for epoch in range(2)]
  shown = []
  for epoch in epochs:
    targets = np.concatenate([batch["targets"] for batch in epoch])
    assert sorted(targets) == list(range(20))
    images = np.concatenate([batch["inputs"] for batch in epoch])
    shown.append(images[np.argsort(targets)])
  same = (shown[0] == shown[1]).all((1, 2, 3))
  assert same.sum() < 3


def test_rows_of_several_processes_are_those_of_one():
  whole = _source().batch_at(4)
  parts = [_source(process=(index, 3)).batch_at(4) for index in range(3)]
  _assert_same({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)
  with pytest.raises(ConfigError, match="batch_size 6 is not divisible by the 4 processes"):
    _source(process=(0, 4))


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
def test_held_out_images_are_read_in_order_each_once(batch_size):
  source = EvalLabelledImages(_images(9), SIZE, DATA, None)
  batches = [source.batch(start, batch_size) for start in range(0, len(source), batch_size)]
  weights = np.concatenate([batch["weights"] for batch in batches])
  targets = np.concatenate([batch["targets"] for batch in batches])
  assert targets[weights > 0].tolist() == list(range(9)) and weights.sum() == 9
  assert all(len(batch["inputs"]) == batch_size for batch in batches)
  expected = augmentation.held_out_image(_images(9)[5][0], SIZE, DATA.resize)
  np.testing.assert_array_equal(np.concatenate([one["inputs"] for one in batches])[5], expected)


def test_a_limit_keeps_the_first_images():
  source = EvalLabelledImages(_images(9), SIZE, DATA, 4)
  assert len(source) == 4 and source.batch(0, 8)["weights"].sum() == 4
  with pytest.raises(ValueError, match="batches of 3 images do not begin at image 2"):
    source.batch(2, 3)
  with pytest.raises(DataError, match="a split that is evaluated holds no image"):
    EvalLabelledImages(_images(0), SIZE, DATA, None)


def test_records_are_read_as_they_were_written_without_tensorflow(records):
  data = load_labelled_images("imagenet2012", str(records))
  assert data.num_classes == 1000 and (len(data.train), len(data.validation)) == (22, 9)
  assert data.class_name(97) == "class 97"  # for which TFDS has but numbers of WordNet
  seen = {}
  for index in range(len(data.train)):
    image, label = data.train[index]
    assert data.train.record(index)["image"] == labelled_records.jpeg(label)
    assert image.mode == "RGB" and image.size == (40 + label % 7, 30 + label % 5)
    seen[label] = index
  assert sorted(seen) == list(range(22)) and "tensorflow" not in sys.modules
  source = _source(images=data.train, batch_size=4)
  _assert_same(source.batch_at(3), _source(images=data.train, batch_size=4).batch_at(3))


def test_the_samples_have_99_classes():
  data = load_labelled_images("sample_images", "nowhere")
  assert data.num_classes == 99 and (len(data.train), len(data.validation)) == (2924, 365)
  assert data.class_name(0) == "face-smiling" and data.class_name(98) == "subdivision-flag"
  with pytest.raises(ConfigError, match="unknown dataset 'imagenet'; use one of imagenet2012, sam"):
    load_labelled_images("imagenet", "nowhere")


def test_what_is_missing_or_damaged_is_said(tmp_path, records, monkeypatch):
  with pytest.raises(DataError, match="is not prepared in .*; register at https://image-net.org"):
    load_labelled_images("imagenet2012", str(tmp_path))
  labelled_records.write_records(tmp_path, damaged=104)
  split = load_labelled_images("imagenet2012", str(tmp_path)).validation
  with pytest.raises(DataError) as error:
    [split[index] for index in range(len(split))]
  for part in ("image n104.JPEG (record ", "of 'validation') cannot be decoded: ", "truncated",
               "--verify"):
    assert part in str(error.value)
  monkeypatch.setitem(imagenet.NUM_IMAGES, "validation", 10)
  load_labelled_images.cache_clear()
  with pytest.raises(DataError, match="'validation' holds 9 images, not the 10 published"):
    load_labelled_images("imagenet2012", str(records))
  monkeypatch.undo()
  (folder,) = (tmp_path / "imagenet2012").iterdir()
  next(folder.glob("*validation*")).write_bytes(b"none")
  monkeypatch.setattr(imagenet, "NUM_IMAGES", labelled_records.NUM_IMAGES)
  load_labelled_images.cache_clear()
  with pytest.raises(DataError, match="'validation' cannot be read|record 0 of 'validation'"):
    load_labelled_images("imagenet2012", str(tmp_path)).validation[0]


@pytest.mark.families
def test_workers_make_the_same_batches_from_any_step_on(records):
  images = imagenet.ImageRecords(str(records), "train")
  alone = _source(images=images)
  ahead = _source(images=images, num_workers=2)
  # Twice as when compiling, a leap as when resuming, and past the end.
  for step in (0, 0, 1, 2, 3, 6, 7, 8, 9):
    _assert_same(ahead.batch_at(step), alone.batch_at(step))
  data = dataclasses.replace(DATA, num_workers=2)
  sources = [EvalLabelledImages(images, SIZE, one, None) for one in (DATA, data)]
  for start in (0, 5, 10, 15, 20, 0, 5):  # a second time, as by the next evaluation
    _assert_same(*(source.batch(start, 5) for source in sources))


@pytest.mark.families
def test_an_image_that_a_worker_cannot_decode_is_named(tmp_path):
  labelled_records.write_records(tmp_path, damaged=104)
  images = imagenet.ImageRecords(str(tmp_path), "validation")
  source = EvalLabelledImages(images, SIZE, dataclasses.replace(DATA, num_workers=2), None)
  with pytest.raises(DataError, match="image n104.JPEG .* cannot be decoded") as error:
    for index in range(9):
      source.batch(index, 1)
  assert "\n" not in str(error.value)


class _Fatal(ArrayImages):
  """Ends the process that reads image 5."""

  def __getitem__(self, index):
    if index == 5:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().__getitem__(index)


@pytest.mark.families
def test_a_worker_that_is_killed_is_an_error_and_no_wait():
  images = _Fatal(np.zeros((9, SIZE, SIZE, 3), np.uint8), np.arange(9))
  source = EvalLabelledImages(images, SIZE, dataclasses.replace(DATA, num_workers=2), None)
  with pytest.raises(DataError, match="a process that makes batches ended .* data.num_workers=2"):
    for index in range(9):
      source.batch(index, 1)


@pytest.mark.families
def test_every_image_counts_once_on_one_and_on_eight_devices(tmp_path):
  done = run_script(Path(eight_devices_images.__file__), tmp_path, num_devices=8)
  assert done.returncode == 0, done.stderr
  report = json.loads((tmp_path / "report.json").read_text())
  assert len(report) == 6
  for name, sums in report.items():
    assert sums["weight"] == 64, name
    assert sums["top1"] == report["1 device, 7"]["top1"], name
    np.testing.assert_allclose(sums["nats"], report["1 device, 7"]["nats"], rtol=1e-6, err_msg=name)
