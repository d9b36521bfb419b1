"""Images as tokens: what ships, how it is converted, which batches a step gets."""

import hashlib
import io
import lzma

import numpy as np
import pytest

from damcha_jax.config import ConfigError, ImageDataConfig
from damcha_jax.data import emoji, images, palette
from damcha_jax.data.image_sets import Labelled
from damcha_jax.data.images import EvalImages, ImageData, TrainImages, load_image_data
from damcha_jax.data.sources import BOS
from damcha_jax.errors import DataError

SPLITS = ("train", "validation", "test")
SAMPLE_MD5 = "b69851af9ae29f982aed1f33b99ed79b"  # as published in samples/README.md


def _config(data_dir="unused", size=16, colour="grey", limit=None):
  return ImageDataConfig(str(data_dir), size, colour, False, limit)


@pytest.fixture(name="sample", scope="module")
def _sample():
  data = lzma.decompress(images.SAMPLE_FILE.read_bytes())
  assert hashlib.md5(data).hexdigest() == SAMPLE_MD5
  with np.load(io.BytesIO(data)) as archive:
    return {name: archive[name] for name in archive}


def test_the_sample_is_what_the_readme_says(sample):
  assert sample["images"].shape == (3655, 32, 32, 3) and sample["images"].dtype == np.uint8
  assert (len(sample["group_names"]), len(sample["subgroup_names"])) == (9, 99)
  assert np.bincount(sample["split"]).tolist() == [2924, 365, 366]
  for split in range(3):
    assert np.bincount(sample["group"][sample["split"] == split], minlength=9).min() >= 5


def test_no_image_is_in_two_splits(sample):
  contents = [{image.tobytes() for image in sample["images"][sample["split"] == split]}
              for split in range(3)]
  assert not (contents[0] & contents[1] or contents[0] & contents[2] or contents[1] & contents[2])
  # So it is after reduction to grey, but for the simplest shapes.
  small = load_image_data("sample_images", _config())
  tokens = [{row.tobytes() for row in small.tokens[split]} for split in SPLITS]
  assert len(tokens[2] & tokens[0]) + len(tokens[1] & tokens[0]) <= 4


def test_variants_of_a_subject_are_in_one_split():
  hand, light, dark = 0x1F44B, 0x1F3FB, 0x1F3FF
  listing = "\n".join([
      "# group: People", "# subgroup: hands",
      f"{hand:X} ; fully-qualified # a", f"{hand:X} {light:X} ; fully-qualified # b",
      f"{hand:X} {dark:X} ; fully-qualified # c", f"{hand:X} FE0F ; unqualified # no",
      "1F468 200D 1F680 ; fully-qualified # d", "1F469 1F3FF 200D 1F680 ; fully-qualified # e",
      "# group: Other", "# subgroup: none",
      *(f"{code:X} ; fully-qualified # x" for code in range(0x1F600, 0x1F628))])
  parsed = list(emoji.parse(listing))
  assert len(parsed) == 45 and parsed[0].group == "People" and parsed[-1].subgroup == "none"
  subjects = [one.subject for one in parsed]
  assert len(set(subjects[:3])) == len(set(subjects[3:5])) == 1
  pictures = [np.full((2, 2, 3), index, np.uint8) for index in range(45)]
  pictures[-1] = pictures[0]  # an equal picture under another name
  split = emoji.split(subjects, pictures)
  assert len({*split[:3], split[-1]}) == len(set(split[3:5])) == 1
  assert set(split) == {0, 1, 2} and (split == 0).sum() >= 30
  assert np.array_equal(emoji.split(subjects[::-1], pictures[::-1])[::-1], split)


def test_grey_and_pooling_are_exact():
  rng = np.random.default_rng(0)
  colour = rng.integers(0, 256, (5, 8, 8, 3)).astype(np.uint8)
  exact = colour.astype(np.float64) @ [0.299, 0.587, 0.114]
  assert np.abs(images.to_grey(colour) - exact).max() <= 0.5 + 1e-9
  grey = np.repeat(np.arange(256, dtype=np.uint8)[None, None, :, None], 3, -1)
  assert np.array_equal(images.to_grey(grey), grey[..., 0])
  means = colour.reshape(5, 4, 2, 4, 2, 3).mean((2, 4))
  assert np.array_equal(images.pool(colour, 4), np.floor(means + 0.5))
  assert np.array_equal(images.pool(colour, 8), colour)


@pytest.mark.parametrize("colour, shape, num_tokens", [
    ("grey", (8, 8), 64), ("palette", (8, 8, 3), 64), ("rgb", (8, 8, 3), 192)])
def test_tokens_and_images_are_each_others_inverse(tmp_path, sample, colour, shape, num_tokens):
  data = load_image_data("sample_images", _config(tmp_path, 8, colour, limit=50))
  assert {split: len(tokens) for split, tokens in data.tokens.items()} == {
      "train": 2924, "validation": 50, "test": 50}
  assert data.tokens["test"].dtype == np.uint8 and data.num_classes == 9
  decoded = data.decode(data.tokens["test"])
  assert decoded.dtype == np.uint8 and decoded.shape == (50, *shape)
  order = images.permutation(3655, seed=0, epoch=0)
  original = images.pool(sample["images"][order[sample["split"][order] == 2]], 8)
  if colour == "palette":
    again = palette.nearest(decoded, data.palette).reshape(50, -1)
    assert np.array_equal(data.palette[again], data.palette[data.tokens["test"]])
    assert np.square(decoded / 255 - original[:50] / 255).mean() < 0.003
  else:
    expected = images.to_grey(original) if colour == "grey" else original
    assert np.array_equal(decoded, expected[:50])
    assert data.tokens["test"].shape[1] == num_tokens
    assert np.array_equal(decoded.reshape(50, -1), data.tokens["test"])  # top row first


def test_a_palette_is_fitted_once_and_kept(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
  fitted = palette.fit(pixels)
  assert fitted.shape == (256, 3) and np.array_equal(palette.fit(pixels), fitted)
  error = lambda colours: np.square(
      colours[palette.nearest(pixels, colours)] - pixels.astype(np.float64)).mean()
  spread = pixels.reshape(-1, 3)[:: pixels.size // 3 // 256][:256]
  assert error(fitted) < 0.8 * error(spread)
  assert np.array_equal(palette.cached_palette(str(tmp_path), "x", pixels), fitted)
  assert np.array_equal(palette.cached_palette(str(tmp_path), "x", pixels[:1]), fitted)  # kept
  (tmp_path / "palettes" / "x-colours.npy").write_bytes(b"\x93NUMPY")
  with pytest.raises(DataError, match="palette .*x-.*npy cannot be read.*delete it"):
    palette.cached_palette(str(tmp_path), "x", pixels)


def test_a_palette_of_few_colours_holds_them():
  pixels = np.array([[[[0, 0, 0], [255, 0, 0], [0, 0, 255], [9, 9, 9]]]], np.uint8)
  colours = palette.fit(pixels)
  assert np.array_equal(colours[palette.nearest(pixels, colours)], pixels)


def test_a_real_set_is_split_in_its_order(monkeypatch):
  count = {"train": 5_020, "test": 30}
  made = {split: Labelled(np.repeat((np.arange(n) % 256).astype(np.uint8), 3072).reshape(
      n, 32, 32, 3), {"label": (np.arange(n) % 10).astype(np.uint8)}) for split, n in count.items()}
  monkeypatch.setattr(images, "load_images", lambda name, data_dir: made)
  monkeypatch.setattr(images, "read_metadata", lambda name, data_dir: {"files": {"train": "md5"}})
  data = load_image_data("cifar10", _config("made here", 8))
  assert {split: len(tokens) for split, tokens in data.tokens.items()} == {
      "train": 20, "validation": 5_000, "test": 30}
  assert data.tokens["validation"][0, 0] == 20 and data.labels["validation"][0] == 0
  assert data.num_classes == 10


def test_begin_tokens_name_the_class_or_nothing():
  data = ImageData("x", 3, {}, {"test": np.array([2, 0, 1], np.uint8)}, (8, 8))
  assert data.begin_tokens("test", False).tolist() == [BOS, BOS, BOS]
  assert data.begin_tokens("test", True).tolist() == [258, 256, 257]


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(ConfigError, match="unknown dataset 'cifar'; use one of cifar10, cifar100"):
    load_image_data("cifar", _config())
  with pytest.raises(DataError, match="'cifar10' is not prepared.*damcha_jax.data.prepare cifar10"):
    load_image_data("cifar10", _config(tmp_path))
  with pytest.raises(DataError, match="no image"):
    EvalImages(np.zeros((0, 4), np.uint8), np.zeros(0, np.int32))


TOKENS = np.random.default_rng(1).integers(0, 256, (20, 9)).astype(np.uint8)
BEGIN = np.arange(256, 276, dtype=np.int32)


def _equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_every_image_comes_once_an_epoch_in_another_order():
  source = TrainImages(TOKENS, BEGIN, 8, seed=3)
  begins = np.concatenate([source.batch_at(step)["inputs"][:, 0] for step in range(10)])
  epochs = begins.reshape(4, 20)
  for epoch in epochs:
    assert sorted(epoch) == BEGIN.tolist()
  assert len({epoch.tobytes() for epoch in epochs}) == 4
  batch = source.batch_at(1)
  rows = batch["inputs"][:, 0] - 256
  assert np.array_equal(batch["targets"], TOKENS[rows])
  assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
  assert batch["targets"].dtype == batch["inputs"].dtype == np.int32 and batch["weights"].all()


@pytest.mark.parametrize("process_count", [2, 4])
@pytest.mark.parametrize("batch_size", [8, 64])
def test_processes_share_the_global_batch(process_count, batch_size):
  whole = TrainImages(TOKENS, BEGIN, batch_size, seed=1)
  parts = [TrainImages(TOKENS, BEGIN, batch_size, 1, i, process_count)
           for i in range(process_count)]
  for step in (0, 2, 1000):
    batches = [part.batch_at(step) for part in parts]
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    assert _equal(joined, whole.batch_at(step))


def test_a_batch_depends_on_seed_and_step_alone():
  first = TrainImages(TOKENS, BEGIN, 8, seed=0)
  for step in range(7):
    first.batch_at(step)
  resumed = TrainImages(TOKENS, BEGIN, 8, seed=0)
  assert _equal(first.batch_at(7), resumed.batch_at(7))
  assert not _equal(resumed.batch_at(7), TrainImages(TOKENS, BEGIN, 8, seed=1).batch_at(7))
  with pytest.raises(ConfigError, match="batch_size 6 is not divisible by the 4 processes"):
    TrainImages(TOKENS, BEGIN, 6, 0, 0, 4)


def test_golden_order():
  """A change of the data order is a change of every published curve: make it knowingly."""
  assert images.permutation(20, seed=42, epoch=3).tolist() == [
      1, 6, 17, 3, 4, 5, 9, 19, 2, 18, 13, 16, 8, 0, 12, 7, 11, 14, 10, 15]


@pytest.mark.parametrize("batch_size", [1, 7, 20, 32])
def test_evaluation_scores_each_token_once(batch_size):
  source = EvalImages(TOKENS, BEGIN)
  scored = []
  for start in range(0, len(source), batch_size):
    batch = source.batch(start, batch_size)
    assert batch["targets"].shape == (batch_size, 9)
    real = batch["weights"][:, 0] > 0
    assert np.array_equal(batch["inputs"][real, 0], BEGIN[start:start + batch_size])
    scored.append(batch["targets"][real])
    assert np.array_equal(batch["weights"], np.repeat(batch["weights"][:, :1], 9, 1))
  assert np.array_equal(np.concatenate(scored), TOKENS)
