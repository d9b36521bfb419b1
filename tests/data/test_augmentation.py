"""Augmentations, each against a plain reference in NumPy."""

import dataclasses

import numpy as np
from PIL import Image
import pytest

from damcha_jax.config import AugmentationConfig, ConfigError
from damcha_jax.data import augmentation
from damcha_jax.data.augmentation import Draws, OPERATIONS

PLAIN = AugmentationConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=False,
                           randaugment_layers=0, randaugment_magnitude=9.0, mixup_alpha=0.0,
                           label_smoothing=0.0)
PIXELS = np.random.default_rng(0).integers(20, 200, (12, 12, 3)).astype(np.uint8)


def _image(pixels=PIXELS):
  return Image.fromarray(pixels)


class _Fixed:
  """Draws that are all alike, for one sign, one place."""

  def __init__(self, sign=1, below=0):
    self._sign, self._below = sign, below

  def sign(self):
    return self._sign

  def below(self, num):
    return min(self._below, num - 1)


def _applied(name, level, draws=_Fixed()):
  return np.asarray(OPERATIONS[name](_image(), level, draws)).astype(int)


def test_draws_are_a_function_of_seed_and_number():
  take = lambda seed, number: [Draws(seed, number).uniform(0, 1), Draws(seed, number).below(1000)]
  assert take(1, 2) == take(1, 2)
  assert len({tuple(take(*key)) for key in ((1, 2), (1, 3), (2, 2))}) == 3
  draws = Draws(0, 0)
  values = [draws.uniform(-2, 3) for _ in range(4000)]
  assert -2 <= min(values) and max(values) < 3 and np.mean(values) == pytest.approx(0.5, abs=0.1)
  assert {draws.below(3) for _ in range(50)} == {0, 1, 2}
  assert {draws.sign() for _ in range(20)} == {-1, 1}
  # The stream is NumPy's promise, and a resumed run's.
  assert Draws(42, 7).uniform(0, 1) == 0.9890500327641266



def test_boxes_have_the_areas_and_shapes_that_are_asked_for():
  boxes = [augmentation.random_box(500, 375, (0.08, 1.0), (3 / 4, 4 / 3), Draws(0, number))
           for number in range(600)]
  left, top, right, bottom = np.array(boxes).T
  wide, high = right - left, bottom - top
  assert (left >= 0).all() and (top >= 0).all() and (right <= 500 + 1e-9).all()
  assert (bottom <= 375 + 1e-9).all()
  assert ((wide / high > 0.7499) & (wide / high < 1.3334)).all()
  square = [augmentation.random_box(100, 100, (0.08, 1.0), (1.0, 1.0), Draws(0, number))
            for number in range(600)]
  share = np.array([(right - left) * (bottom - top) / 1e4 for left, top, right, bottom in square])
  assert share.min() < 0.1 and share.max() > 0.98 and share.mean() == pytest.approx(0.54, abs=0.03)
  # Nothing of this shape fits: the largest part in the centre that the shapes allow.
  assert augmentation.random_box(100, 10, (1.0, 1.0), (0.5, 2.0), Draws(0, 0)) == (40, 0, 60, 10)


def test_the_whole_image_comes_out_as_it_is_and_a_flip_is_a_mirror_image():
  out = augmentation.training_image(_image(), 12, PLAIN, Draws(0, 0))
  np.testing.assert_array_equal(out, PIXELS)
  flipping = dataclasses.replace(PLAIN, flip=True)
  seen = [augmentation.training_image(_image(), 12, flipping, Draws(0, number))
          for number in range(30)]
  flipped = [np.array_equal(one, PIXELS[:, ::-1]) for one in seen]
  assert all(mirrored or np.array_equal(one, PIXELS) for mirrored, one in zip(flipped, seen))
  assert 5 < sum(flipped) < 25


def test_a_crop_is_the_mean_of_its_pixels_where_it_shrinks_by_half():
  cropping = dataclasses.replace(PLAIN, crop_scale=(0.25, 0.25))
  box = augmentation.random_box(12, 12, (0.25, 0.25), (1.0, 1.0), _Places(0.0))
  assert box == (0, 0, 6, 6)
  out = augmentation.training_image(_image(), 6, cropping, _Places(0.0))
  np.testing.assert_array_equal(out, PIXELS[:6, :6])


class _Places(_Fixed):

  def __init__(self, place):
    super().__init__()
    self._place = place

  def uniform(self, low, high):
    return low + self._place * (high - low)


def test_held_out_images_are_the_centre_after_resizing():
  pixels = np.zeros((16, 24, 3), np.uint8)
  pixels[4:12, 8:16] = PIXELS[:8, :8]
  np.testing.assert_array_equal(augmentation.held_out_image(_image(pixels), 8, 16), PIXELS[:8, :8])
  # To a half: the shorter side of 16 becomes 8, of which the middle 4 are cut out.
  out = augmentation.held_out_image(_image(pixels), 4, 8)
  reference = _image(pixels[4:12, 8:16]).resize((4, 4), Image.Resampling.BILINEAR)
  inner = lambda pixels: np.asarray(pixels).astype(int)[1:-1, 1:-1]
  np.testing.assert_allclose(inner(out), inner(reference), atol=1)


POINTWISE = {
    "invert": lambda x, level, sign: 255 - x,
    "posterize": lambda x, level, sign: x & (0xFF << round(4 * level)) & 0xFF,
    "solarize": lambda x, level, sign: np.where(x < 256 - round(256 * level), x, 255 - x),
    "solarize_add": lambda x, level, sign: np.where(
        x < 128, np.minimum(x + round(110 * level), 255), x),
    "brightness": lambda x, level, sign: np.clip(x * (1 + 0.9 * level * sign), 0, 255),
    "color": lambda x, level, sign: np.clip(
        _grey(x) + (x - _grey(x)) * (1 + 0.9 * level * sign), 0, 255),
    "contrast": lambda x, level, sign: np.clip(
        _mean_grey(x) + (x - _mean_grey(x)) * (1 + 0.9 * level * sign), 0, 255),
    "auto_contrast": lambda x, level, sign: (
        (x - x.min((0, 1))) * 255 / (x.max((0, 1)) - x.min((0, 1)))),
}


def _grey(x):
  return np.round(x @ np.array([0.299, 0.587, 0.114]))[..., None]


def _mean_grey(x):
  return np.round(_grey(x).mean())


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", [0.3, 1.0])
@pytest.mark.parametrize("name", POINTWISE)
def test_values_change_as_the_formula_says(name, level, sign):
  expected = POINTWISE[name](PIXELS.astype(int), level, sign)
  np.testing.assert_allclose(_applied(name, level, _Fixed(sign)), expected, atol=1.01)


def test_equalizing_makes_values_as_frequent_as_they_can_be():
  pixels = np.random.default_rng(1).normal(100, 20, (64, 64, 3)).clip(0, 255).astype(np.uint8)
  out = np.asarray(OPERATIONS["equalize"](_image(pixels), 0.5, _Fixed()))
  for channel in range(3):
    values, counts = np.unique(pixels[..., channel], return_counts=True)
    step = (counts.sum() - counts[-1]) // 255
    before = np.cumsum(counts) - counts
    table = dict(zip(values.tolist(), np.minimum((step // 2 + before) // step, 255).tolist()))
    expected = [table[value] for value in pixels[..., channel].ravel().tolist()]
    np.testing.assert_array_equal(out[..., channel].ravel(), expected)


def test_sharpness_zero_is_a_blur_and_more_is_its_opposite():
  blurred, sharper = (_applied("sharpness", 1 / 0.9, _Fixed(sign)) for sign in (-1, 1))
  inner = PIXELS.astype(int)
  kernel = sum(np.roll(inner, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)) + 4 * inner
  np.testing.assert_allclose(blurred[1:-1, 1:-1], kernel[1:-1, 1:-1] / 13, atol=1.01)
  np.testing.assert_allclose(sharper, np.clip(2 * inner - blurred, 0, 255), atol=1.01)


def _moved(matrix):
  """Where each pixel comes from, about the centre; grey where that is outside."""
  out = np.full(PIXELS.shape, 128)
  for y in range(12):
    for x in range(12):
      across, down = np.array(matrix) @ np.array([x + 0.5 - 6, y + 0.5 - 6, 1.0]) + 6
      if 0 <= across < 12 and 0 <= down < 12:
        out[y, x] = PIXELS[int(down), int(across)]
  return out


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name, matrix", [
    ("translate_x", lambda s: [[1, 0, 0.45 * 12 * 0.7 * s], [0, 1, 0]]),
    ("translate_y", lambda s: [[1, 0, 0], [0, 1, 0.45 * 12 * 0.7 * s]]),
    ("shear_x", lambda s: [[1, 0.3 * 0.7 * s, 0], [0, 1, 0]]),
    ("shear_y", lambda s: [[1, 0, 0], [0.3 * 0.7 * s, 1, 0]]),
    ("rotate", lambda s: [[np.cos(np.pi / 6 * 0.7), s * np.sin(np.pi / 6 * 0.7), 0],
                          [-s * np.sin(np.pi / 6 * 0.7), np.cos(np.pi / 6 * 0.7), 0]]),
])
def test_pixels_move_where_the_matrix_says(name, matrix, sign):
  moved = _applied(name, 0.7, _Fixed(sign))
  expected = _moved(matrix(sign))
  assert (moved == expected).all(-1).mean() > 0.97  # but for ties of rounding
  assert not np.array_equal(moved, PIXELS)


def test_cutout_covers_a_square_with_grey():
  out = _applied("cutout", 1.0, _Fixed(below=5))
  expected = PIXELS.astype(int)
  expected[3:7, 3:7] = 128  # round(0.36 * 12) pixels about (5, 5)
  np.testing.assert_array_equal(out, expected)


def test_randaugment_draws_from_all_operations_as_many_as_it_has_layers(monkeypatch):
  used = []
  for name in OPERATIONS:
    monkeypatch.setitem(OPERATIONS, name, lambda image, level, draws, name=name: (
        used.append((name, level)), image)[1])
  layers = dataclasses.replace(PLAIN, randaugment_layers=2, randaugment_magnitude=5.0)
  for number in range(150):
    augmentation.training_image(_image(), 12, layers, Draws(0, number))
  assert len(used) == 300 and {level for _, level in used} == {0.5}
  assert {name for name, _ in used} == set(OPERATIONS) and len(OPERATIONS) == 16


@pytest.mark.parametrize("change, message", [
    ({"crop_scale": (0.5, 0.2)}, r"augmentation.crop_scale=\(0.5, 0.2\) must be positive"),
    ({"crop_scale": (0.5, 2.0)}, "and at most 1"),
    ({"randaugment_magnitude": 11.0}, "randaugment_magnitude=11.0 must be from 0 to 10"),
    ({"mixup_alpha": -1.0}, "mixup_alpha=-1.0 must be from 0 to"),
    ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
])
def test_a_wrong_value_is_named(change, message):
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(PLAIN, **change)


def _palette():
  image = Image.new("P", (1, 1))
  image.putpalette([200, 10, 30])
  image.info["transparency"] = b"\x00"
  return image


@pytest.mark.parametrize("image, pixel", [
    (Image.new("RGB", (1, 1), (1, 2, 3)), (1, 2, 3)),
    (Image.new("L", (1, 1), 7), (7, 7, 7)),
    (Image.fromarray(np.full((1, 1), 0x8001, np.uint16)), (128, 128, 128)),
    (Image.new("RGBA", (1, 1), (200, 10, 30, 0)), (255, 255, 255)),
    (Image.new("LA", (1, 1), (9, 255)), (9, 9, 9)),
    (_palette(), (255, 255, 255)),
    (Image.new("CMYK", (1, 1), (0, 0, 0, 255)), (0, 0, 0)),
])
def test_pictures_of_every_kind_become_rgb_on_white(image, pixel):
  found = augmentation.rgb_on_white(image)
  assert (found.mode, found.getpixel((0, 0))) == ("RGB", pixel)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode):
  with pytest.raises(ValueError, match="no known range; save it with 8 bits"):
    augmentation.rgb_on_white(Image.new(mode, (1, 1)))
