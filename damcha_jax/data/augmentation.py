"""Images for training, cropped and changed at random, and for evaluation, cut out of the centre.

All randomness of an image comes from its own `Draws`, so that it does not matter which process
makes it, or when.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from damcha_jax.config import AugmentationConfig

_GREY = (128, 128, 128)  # what fills places that an operation leaves empty
_CROP_ATTEMPTS = 10
_AUGMENTATION_STREAM = 1  # beside stream 0 of the same key, the order of examples

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


class Draws:
  """A stream of random numbers that is a function of (seed, number).

  Made of raw words of Philox, because NumPy promises that stream for ever.
  """

  def __init__(self, seed: int, number: int):
    self._bits = np.random.Philox(key=np.array([seed % 2**64, number], np.uint64),
                                  counter=np.array([0, 0, 0, _AUGMENTATION_STREAM], np.uint64))

  def uniform(self, low: float, high: float) -> float:
    """A number in [low, high)."""
    return low + (high - low) * (int(self._bits.random_raw()) >> 11) * 2.0**-53

  def below(self, num: int) -> int:
    """An integer from 0 to num - 1."""
    return int(self.uniform(0, num))

  def sign(self) -> int:
    """-1 or 1."""
    return 2 * self.below(2) - 1


Operation = Callable[[Image.Image, float, Draws], Image.Image]


def training_image(image: Image.Image, size: int, augmentation: AugmentationConfig,
                   draws: Draws) -> np.ndarray:
  """A random-resized crop, perhaps flipped, through RandAugment: uint8 [size, size, 3]."""
  box = random_box(*image.size, augmentation.crop_scale, augmentation.crop_ratio, draws)
  image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
  if augmentation.flip and draws.below(2):
    image = ImageOps.mirror(image)
  for _ in range(augmentation.randaugment_layers):
    image = random_operation(image, augmentation.randaugment_magnitude / 10, draws)
  return np.asarray(image)


def held_out_image(image: Image.Image, size: int, resize: int) -> np.ndarray:
  """The centre of the image whose shorter side is made `resize` long: uint8 [size, size, 3]."""
  width, height = image.size
  side = min(width, height) * size / resize
  left, top = (width - side) / 2, (height - side) / 2
  return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR,
                                 box=(left, top, left + side, top + side)))


def rgb_on_white(image: Image.Image) -> Image.Image:
  """A picture of any kind in RGB: 16 bits made 8, and what shines through white.

  Raises:
    ValueError: its pixels are of a kind whose range is not known, such as floats.
  """
  if image.mode.startswith("I;16"):
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
  if image.mode in ("I", "F"):
    raise ValueError(f"its pixels, of mode {image.mode}, have no known range; save it with 8 bits")
  if image.mode not in ("LA", "PA", "RGBA", "La", "RGBa") and "transparency" not in image.info:
    return image.convert("RGB")
  white = Image.new("RGBA", image.size, "white")
  white.alpha_composite(image.convert("RGBA"))
  return white.convert("RGB")


def random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float],
               draws: Draws) -> Box:
  """A part of the image (Szegedy et al. 2015).

  Its share of the area is uniform in `scale`, the logarithm of its width over its height in that
  of `ratio`. After some that do not fit, the largest one in the centre that `ratio` allows.
  """
  for _ in range(_CROP_ATTEMPTS):
    area = width * height * draws.uniform(*scale)
    shape = math.exp(draws.uniform(*map(math.log, ratio)))
    wide, high = math.sqrt(area * shape), math.sqrt(area / shape)
    if wide <= width and high <= height:
      left, top = draws.uniform(0, width - wide), draws.uniform(0, height - high)
      return left, top, left + wide, top + high
  shape = min(max(width / height, ratio[0]), ratio[1])
  wide, high = min(width, height * shape), min(height, width / shape)
  left, top = (width - wide) / 2, (height - high) / 2
  return left, top, left + wide, top + high


def random_operation(image: Image.Image, level: float, draws: Draws) -> Image.Image:
  """One of the operations, as strong as `level`, from 0 to 1, says (Cubuk et al. 2020)."""
  names = tuple(OPERATIONS)
  return OPERATIONS[names[draws.below(len(names))]](image, level, draws)


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
  """The pixel at (x, y) comes from (a x + b y + c, d x + e y + f), about the centre."""
  a, b, c, d, e, f = matrix
  x, y = image.width / 2, image.height / 2
  centred = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
  return image.transform(image.size, Image.Transform.AFFINE, centred, fillcolor=_GREY)


def _rotate(image: Image.Image, level: float, draws: Draws) -> Image.Image:
  angle = math.radians(30) * level * draws.sign()
  return _affine(image, (math.cos(angle), math.sin(angle), 0, -math.sin(angle), math.cos(angle), 0))


def _cutout(image: Image.Image, level: float, draws: Draws) -> Image.Image:
  side = round(0.36 * level * image.width)
  x, y = draws.below(image.width), draws.below(image.height)
  image = image.copy()
  image.paste(_GREY, (x - side // 2, y - side // 2, x - side // 2 + side, y - side // 2 + side))
  return image


def _enhance(kind: Callable[[Image.Image], Any]) -> Operation:
  """More or less of a quality: none of the change at factor 1, none of the quality at 0."""
  return lambda image, level, draws: kind(image).enhance(1 + 0.9 * level * draws.sign())


def _solarize_add(image: Image.Image, level: float) -> Image.Image:
  added = round(110 * level)
  return image.point([min(value + added, 255) if value < 128 else value
                      for value in range(256)] * 3)


# The sixteen of the reference implementation of RandAugment, every one stronger with its level, and
# lengths as fractions of the image: its 40 and 100 pixels are meant for images of 224.
OPERATIONS: dict[str, Operation] = {
    "auto_contrast": lambda image, level, draws: ImageOps.autocontrast(image),
    "equalize": lambda image, level, draws: ImageOps.equalize(image),
    "invert": lambda image, level, draws: ImageOps.invert(image),
    "posterize": lambda image, level, draws: ImageOps.posterize(image, 8 - round(4 * level)),
    "solarize": lambda image, level, draws: ImageOps.solarize(image, 256 - round(256 * level)),
    "solarize_add": lambda image, level, draws: _solarize_add(image, level),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "rotate": _rotate,
    "shear_x": lambda image, level, draws: _affine(
        image, (1, 0.3 * level * draws.sign(), 0, 0, 1, 0)),
    "shear_y": lambda image, level, draws: _affine(
        image, (1, 0, 0, 0.3 * level * draws.sign(), 1, 0)),
    "translate_x": lambda image, level, draws: _affine(
        image, (1, 0, 0.45 * level * image.width * draws.sign(), 0, 1, 0)),
    "translate_y": lambda image, level, draws: _affine(
        image, (1, 0, 0, 0, 1, 0.45 * level * image.height * draws.sign())),
    "cutout": _cutout,
}
