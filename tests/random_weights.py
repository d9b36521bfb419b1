"""Random weights that NumPy alone makes, the same wherever they are needed."""

from __future__ import annotations

from collections.abc import Mapping
import math
import zlib

import numpy as np


def random_tensors(shapes: Mapping[str, tuple[int, ...]], scale: float = 2.0) -> dict:
  """One array per name, each from the name and the shape alone.

  Kernels have variance `scale` / inputs, so that signals keep their size from layer to layer;
  variances lie in 0.5 .. 1.5, the scales of normalizations around 1.
  """
  arrays = {}
  for name, shape in shapes.items():
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("running_var"):
      array = rng.uniform(0.5, 1.5, shape)
    elif len(shape) == 1 and name.endswith("weight"):
      array = rng.uniform(0.8, 1.2, shape)
    elif len(shape) == 1 or name.endswith("bias"):
      array = 0.1 * rng.standard_normal(shape)
    else:
      array = rng.standard_normal(shape, np.float32) * math.sqrt(scale / math.prod(shape[1:]))
    arrays[name] = np.asarray(array, np.float32)
  return arrays


def random_images(num: int, size: int, num_channels: int = 3) -> np.ndarray:
  """uint8 [num, size, size, num_channels]: noise on a gradient, so that resizing matters."""
  rng = np.random.default_rng([num, size])
  ramp = np.linspace(0, 200, size)[:, None, None] * np.linspace(0.3, 1, num_channels)
  noise = rng.integers(0, 56, (num, size, size, num_channels))
  return (ramp + noise).astype(np.uint8)
