"""What a general-purpose compressor reaches on the bytes that a model is scored on."""

from __future__ import annotations

import gzip

import numpy as np


def gzip9_bits_per_byte(array: np.ndarray) -> float:
  """Size of `gzip -9` of the very bytes scored, in bits per byte.

  bits_per_byte = 8 * len(gzip(x)) / len(x): the threshold that a trained byte model has to beat.

  Args:
    array: uint8, any shape, at least one byte.
  """
  data = np.ascontiguousarray(array, np.uint8).tobytes()
  if not data:
    raise ValueError("no bytes to compress")
  return 8.0 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data)
