"""Image sets as tokens, and the batches that training and evaluation read from them.

An image is the sequence of its tokens in the order of reading, top row first. A batch is a pure
function of (seed, step), so a run that resumes needs no iterator state, on any number of processes.

Axes: N images, B batch, H height, W width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import io
import lzma
from pathlib import Path
from typing import Optional

import numpy as np

from damcha_jax.config import ConfigError, ImageDataConfig
from damcha_jax.config.image_generation import PIXEL_TOKENS
from damcha_jax.data import emoji
from damcha_jax.data import palette as palette_lib
from damcha_jax.data.image_sets import IMAGE_SETS, Labelled
from damcha_jax.data.prepared_images import load_images, read_metadata
from damcha_jax.data.shuffling import permutation, ShuffledEpochs
from damcha_jax.data.sources import BOS
from damcha_jax.errors import DataError
from damcha_jax.files import file_hash

SAMPLE_FILE = Path(__file__).parent / "samples" / emoji.IMAGES_FILE
DATASETS = (*IMAGE_SETS, "sample_images")
NUM_VALIDATION = 5_000  # of a real set's training images, the last ones

_AT_ONCE = 4096  # images converted at a time
_GREY = (299, 587, 114)  # thousandths of red, green and blue in the brightness (ITU-R BT.601)

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ImageData:
  """The splits `train`, `validation` and `test` of an image set.

  Attributes:
    name: the data set's.
    num_classes: how many there are.
    tokens: by split, uint8 [N, T].
    labels: by split, uint8 [N].
    image_shape: of one image, (H, W) or (H, W, 3).
    palette: the 256 colours [256, 3] that tokens stand for, or None.
    hashes: of its files by name, and of the palette.
  """

  name: str
  num_classes: int
  tokens: Mapping[str, np.ndarray]
  labels: Mapping[str, np.ndarray]
  image_shape: tuple[int, ...]
  palette: Optional[np.ndarray] = None
  hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def decode(self, tokens_NT: np.ndarray) -> np.ndarray:
    """The images, uint8 [N, H, W] or [N, H, W, 3], that tokens [N, T] stand for."""
    tokens_NT = np.asarray(tokens_NT).astype(np.uint8)
    values = tokens_NT if self.palette is None else self.palette[tokens_NT]
    return values.reshape(len(tokens_NT), *self.image_shape)

  def begin_tokens(self, split: str, class_conditional: bool) -> np.ndarray:
    """What each image's sequence begins with: BOS, or 256 + its class; int32 [N]."""
    labels = self.labels[split].astype(np.int32)
    return PIXEL_TOKENS + labels if class_conditional else np.full_like(labels, BOS)


@functools.lru_cache(maxsize=4)
def load_image_data(dataset: str, data: ImageDataConfig) -> ImageData:
  """Reads an image set and turns it into tokens.

  Args:
    dataset: 'cifar10' or 'cifar100' (prepared under `data.data_dir`), or 'sample_images' (shipped).
    data: size, colours and how much of the held-out parts is kept.

  Raises:
    DataError: the images are missing or damaged; the message says what to do.
    ConfigError: an unknown data set.
  """
  if dataset not in DATASETS:
    raise ConfigError(f"unknown dataset '{dataset}'; use one of {', '.join(DATASETS)}")
  if dataset == "sample_images":
    (images, labels), hashes = _sample(), sample_hashes()
  else:
    images, labels = _real(dataset, data.data_dir)
    hashes = dict(read_metadata(dataset, data.data_dir)["files"])
  for split in ("validation", "test"):
    images[split] = images[split][:data.max_held_out_images]
    labels[split] = labels[split][:data.max_held_out_images]

  def reduce(part: np.ndarray) -> np.ndarray:
    reduced = pool(part, data.image_size)
    return to_grey(reduced) if data.colour == "grey" else reduced

  pixels = {split: _in_parts(reduce, array) for split, array in images.items()}
  image_shape, palette = pixels["train"].shape[1:], None
  if data.colour == "palette":
    palette = palette_lib.cached_palette(data.data_dir, f"{dataset}-{data.image_size}",
                                         pixels["train"])
    hashes["palette"] = hashlib.sha256(palette.tobytes()).hexdigest()
    pixels = {split: _in_parts(functools.partial(palette_lib.nearest, palette_K3=palette), array)
              for split, array in pixels.items()}
  tokens = {split: array.reshape(len(array), -1) for split, array in pixels.items()}
  num_classes = IMAGE_SETS[dataset].num_classes if dataset in IMAGE_SETS else (
      1 + max(int(array.max()) for array in labels.values()))
  return ImageData(dataset, num_classes, tokens, labels, image_shape, palette, hashes)


def _real(dataset: str, data_dir: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  splits = load_images(dataset, data_dir)
  train, test = splits["train"], splits["test"]
  cut = len(train.images) - NUM_VALIDATION
  label = lambda labelled: labelled.labels["label"]
  return ({"train": train.images[:cut], "validation": train.images[cut:], "test": test.images},
          {"train": label(train)[:cut], "validation": label(train)[cut:], "test": label(test)})


def _sample() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  splits = sample_images("group")
  return ({name: one.images for name, one in splits.items()},
          {name: one.labels["group"] for name, one in splits.items()})


def sample_images(label: str) -> dict[str, Labelled]:
  """The emoji that ship with the package, by split; their label is the 'group' or 'subgroup'.

  Raises:
    DataError: they cannot be read.
  """
  images, labels, split = _sample_arrays("images", label, "split")
  # They are filed by class; a part of a split should hold some of every class.
  order = permutation(len(images), seed=0, epoch=0)
  chosen = {name: order[split[order] == number]
            for number, name in enumerate(("train", "validation", "test"))}
  return {name: Labelled(images[indices], {label: labels[indices]})
          for name, indices in chosen.items()}


def sample_class_names(label: str) -> tuple[str, ...]:
  """What Unicode calls the classes that a label of `sample_images` counts.

  Raises:
    DataError: they cannot be read.
  """
  return tuple(_sample_arrays(f"{label}_names")[0].tolist())


def _sample_arrays(*names: str) -> list[np.ndarray]:
  try:
    with np.load(io.BytesIO(lzma.decompress(SAMPLE_FILE.read_bytes()))) as archive:
      return [archive[name] for name in names]
  except (OSError, ValueError, KeyError, lzma.LZMAError) as error:
    raise DataError(f"the sample images {SAMPLE_FILE} cannot be read ({error}); "
                    "reinstall the package") from error


def sample_hashes() -> dict[str, str]:
  """The hash of the file that `sample_images` reads."""
  return {SAMPLE_FILE.name: file_hash(SAMPLE_FILE)}


def _in_parts(convert: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> np.ndarray:
  """`convert` of all images, some at a time, for it needs much more memory than its result."""
  return np.concatenate([convert(images[start:start + _AT_ONCE])
                         for start in range(0, len(images), _AT_ONCE)])


def to_grey(images_NHWC: np.ndarray) -> np.ndarray:
  """Brightness 0.299 R + 0.587 G + 0.114 B in integers, halves up: uint8 [N, H, W, 3] -> [N, H, W].

  Grey stays as it is.
  """
  return ((images_NHWC.astype(np.uint32) @ np.array(_GREY, np.uint32) + 500) // 1000).astype(
      np.uint8)


def pool(images_NHWC: np.ndarray, size: int) -> np.ndarray:
  """Means of equal squares of pixels, halves up: uint8 [N, H, W, C] -> [N, size, size, C]."""
  count, height, width, channels = images_NHWC.shape
  factor = height // size
  if (height, width) != (size * factor, size * factor):
    raise ValueError(f"images of {height}x{width} pixels do not reduce to {size}x{size}")
  squares = images_NHWC.reshape(count, size, factor, size, factor, channels)
  total = squares.sum((2, 4), dtype=np.uint32)
  return ((2 * total + factor**2) // (2 * factor**2)).astype(np.uint8)


class TrainImages:
  """Epochs of shuffled images, one after another; batch `step` depends on (seed, step) alone."""

  def __init__(self, tokens_NT: np.ndarray, begin_N: np.ndarray, batch_size: int, seed: int,
               process_index: int = 0, process_count: int = 1):
    """Raises ConfigError if the batch is not divisible among the processes."""
    self._tokens_NT, self._begin_N = tokens_NT, begin_N
    self._order = ShuffledEpochs(len(tokens_NT), batch_size, seed, process_index, process_count)

  def batch_at(self, step: int) -> Batch:
    """This process's rows of batch `step`: inputs, targets int32 [b, T], weights float32 [b, T]."""
    indices = self._order.indices(step)
    targets_BT = self._tokens_NT[indices].astype(np.int32)
    return _batch(targets_BT, self._begin_N[indices], np.ones(targets_BT.shape, np.float32))


class EvalImages:
  """All images of a split, in order: each token is a target exactly once."""

  def __init__(self, tokens_NT: np.ndarray, begin_N: np.ndarray):
    """Raises DataError if the split is empty."""
    if not len(tokens_NT):
      raise DataError("an evaluation split holds no image")
    self._tokens_NT, self._begin_N = tokens_NT, begin_N

  def __len__(self) -> int:
    return len(self._tokens_NT)

  def batch(self, start: int, batch_size: int) -> Batch:
    """Images start .. start + batch_size - 1; rows past the last image have weight 0."""
    found = self._tokens_NT[start:start + batch_size]
    targets_BT = np.zeros((batch_size, self._tokens_NT.shape[1]), np.int32)
    begin_B = np.full(batch_size, BOS, np.int32)
    weights_BT = np.zeros(targets_BT.shape, np.float32)
    targets_BT[:len(found)] = found
    begin_B[:len(found)] = self._begin_N[start:start + batch_size]
    weights_BT[:len(found)] = 1.0
    return _batch(targets_BT, begin_B, weights_BT)


def _batch(targets_BT: np.ndarray, begin_B: np.ndarray, weights_BT: np.ndarray) -> Batch:
  inputs_BT = np.concatenate([begin_B[:, None], targets_BT[:, :-1]], axis=1)
  return {"inputs": inputs_BT, "targets": targets_BT, "weights": weights_BT}
