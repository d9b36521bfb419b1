"""256 colours that stand for all those of an image set, so that a pixel is one token of 8 bits.

Axes: N images, P pixels, H height, W width, K = 256 colours.
"""

from __future__ import annotations


import numpy as np

from damcha_jax.data.arrays import kept_arrays
from damcha_jax.errors import DataError
from damcha_jax.files import expanded

NUM_COLOURS = 256

_NUM_PIXELS = 1 << 15  # that the colours are fitted to
_NUM_ROUNDS = 12
_AT_ONCE = 1 << 14  # pixels compared with every colour at a time


def cached_palette(data_dir: str, name: str, images: np.ndarray) -> np.ndarray:
  """`fit` of the training images, kept in `<data_dir>/palettes/<name>-*.npy` for the next time.

  Every run on a data set has to take the same colours, or its tokens would mean something else.

  Raises:
    DataError: the files are damaged, or cannot be written.
  """
  path = expanded(data_dir) / "palettes" / name
  try:
    (palette,) = kept_arrays(path, ("colours",), lambda: [fit(images)])
  except (OSError, ValueError) as error:
    raise DataError(f"the palette {path}-*.npy cannot be read or written ({error}); delete it, or "
                    "choose another data.data_dir") from error
  if palette.shape != (NUM_COLOURS, 3) or palette.dtype != np.uint8:
    raise DataError(f"the palette {path}-*.npy holds {palette.dtype}{list(palette.shape)}, not uint8"
                    f"[{NUM_COLOURS}, 3]; delete it")
  return palette


def fit(images: np.ndarray) -> np.ndarray:
  """The colours of least squared distance to the images' pixels by k-means, darkest first.

  Args:
    images: uint8 [N, H, W, 3]; of many pixels, an even choice is fitted.

  Returns:
    uint8 [256, 3]. It depends on the images alone.
  """
  pixels_P3 = images.reshape(-1, 3)
  pixels_P3 = pixels_P3[::max(1, len(pixels_P3) // _NUM_PIXELS)]
  colours, weights = np.unique(pixels_P3, axis=0, return_counts=True)
  brightness = np.argsort(colours.sum(1, dtype=np.int64), kind="stable")
  colours, weights = colours[brightness].astype(np.float64), weights[brightness]
  # Evenly through the colours by brightness: spread over them, and without chance.
  centers_K3 = colours[np.linspace(0, len(colours) - 1, NUM_COLOURS).round().astype(int)]
  for _ in range(_NUM_ROUNDS):
    owner = _nearest(colours, centers_K3)
    mass_K = np.bincount(owner, weights, NUM_COLOURS)
    sums_K3 = np.stack([np.bincount(owner, weights * channel, NUM_COLOURS)
                        for channel in colours.T], axis=1)
    # What owns no pixel stays.
    centers_K3 = np.where(mass_K[:, None] > 0, sums_K3 / np.maximum(mass_K, 1)[:, None], centers_K3)
  palette_K3 = np.floor(centers_K3 + 0.5).astype(np.uint8)
  return palette_K3[np.argsort(palette_K3.sum(1, dtype=np.int64), kind="stable")]


def nearest(images: np.ndarray, palette_K3: np.ndarray) -> np.ndarray:
  """The index of each pixel's nearest colour: uint8 [N, H, W, 3] -> [N, H, W]."""
  return _nearest(images.reshape(-1, 3).astype(np.float64), palette_K3.astype(np.float64)).astype(
      np.uint8).reshape(images.shape[:-1])


def _nearest(pixels_P3: np.ndarray, colours_K3: np.ndarray) -> np.ndarray:
  squares_K = np.square(colours_K3).sum(1)
  parts = [np.argmin(squares_K - 2 * part_P3 @ colours_K3.T, axis=1)
           for part_P3 in np.split(pixels_P3, range(_AT_ONCE, len(pixels_P3), _AT_ONCE))]
  return np.concatenate(parts)
