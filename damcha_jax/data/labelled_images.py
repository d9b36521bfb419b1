"""Batches of labelled images for a classifier, as functions of the step or of the place.

A batch holds `inputs` uint8 [B, size, size, 3], `targets` int32 [B] and `weights` float32 [B].
Where worker processes decode and augment, they make whole batches ahead, in turn; which batch is
made, and how, does not depend on them.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any, NamedTuple, Optional, Protocol
import weakref

import numpy as np
from PIL import Image

from damcha_jax.config import AugmentationConfig, ClassificationDataConfig, ConfigError
from damcha_jax.data import augmentation as augmentation_lib
from damcha_jax.data import imagenet
from damcha_jax.data.images import sample_class_names, sample_hashes, sample_images
from damcha_jax.data.shuffling import ShuffledEpochs
from damcha_jax.errors import DataError

# Of Unicode's two levels: with the 9 groups, over half of the images are of one class, and the
# likeliest 5 are nearly all.
SAMPLE_LABEL = "subgroup"
DATASETS = (imagenet.NAME, "sample_images")
_EXPECTED = "ignore:resource_tracker"

Batch = dict[str, np.ndarray]


class LabelledImages(Protocol):
  """A split: RGB images and their classes."""

  def __len__(self) -> int:
    """The number of images."""

  def __getitem__(self, index: int) -> tuple[Image.Image, int]:
    """An image and its class."""


class ArrayImages:
  """Images in memory, uint8 [N, H, W, 3], and their classes [N]."""

  def __init__(self, images_NHWC: np.ndarray, labels_N: np.ndarray):
    self._images_NHWC, self._labels_N = images_NHWC, labels_N

  def __len__(self) -> int:
    return len(self._images_NHWC)

  def __getitem__(self, index: int) -> tuple[Image.Image, int]:
    return Image.fromarray(self._images_NHWC[index]), int(self._labels_N[index])


class ClassifiedImages(NamedTuple):
  """The splits of a data set that have labels."""

  num_classes: int
  train: LabelledImages
  validation: LabelledImages
  hashes: dict[str, str]  # of its files by name
  class_names: tuple[str, ...] = ()  # by class, where the data set has them

  def class_name(self, index: int) -> str:
    """What class `index` is called, or "class <index>"."""
    return self.class_names[index] if self.class_names else f"class {index}"


@functools.lru_cache(maxsize=2)
def load_labelled_images(dataset: str, data_dir: str) -> ClassifiedImages:
  """Opens a data set.

  Args:
    dataset: 'imagenet2012' (prepared under `data_dir`), or 'sample_images' (shipped).
    data_dir: where `damcha_jax.data.prepare` puts what it prepares.

  Raises:
    DataError: the images are missing or damaged; the message says what to do.
    ConfigError: an unknown data set.
  """
  if dataset == imagenet.NAME:
    splits = [imagenet.ImageRecords(data_dir, split) for split in ("train", "validation")]
    for split in splits:
      len(split)  # raises where it cannot be read
    return ClassifiedImages(imagenet.NUM_CLASSES, *splits, imagenet.hashes(data_dir))
  if dataset != "sample_images":
    raise ConfigError(f"unknown dataset '{dataset}'; use one of {', '.join(DATASETS)}")
  samples = sample_images(SAMPLE_LABEL)
  names = sample_class_names(SAMPLE_LABEL)
  return ClassifiedImages(len(names), *(
      ArrayImages(samples[split].images, samples[split].labels[SAMPLE_LABEL])
      for split in ("train", "validation")), sample_hashes(), names)


class AugmentedBatches:
  """Training batches by step: shuffled epochs, each image changed at random.

  Row r of step n depends on (seed, n B + r) and on the image alone.
  """

  def __init__(self, images: LabelledImages, order: ShuffledEpochs, seed: int, size: int,
               augmentation: AugmentationConfig):
    self._images, self._order, self._seed = images, order, seed
    self._size, self._augmentation = size, augmentation

  def __getitem__(self, step: int) -> Batch:
    """This process's rows of batch `step`."""
    batch = _empty(len(self._order.numbers(step)), self._size)
    for row, (number, index) in enumerate(zip(self._order.numbers(step).tolist(),
                                              self._order.indices(step).tolist())):
      image, batch["targets"][row] = self._images[index]
      batch["inputs"][row] = augmentation_lib.training_image(
          image, self._size, self._augmentation, augmentation_lib.Draws(self._seed, number))
      batch["weights"][row] = 1.0
    return batch


class CentredBatches:
  """All images of a split in order, by batch; what is past the last one has weight 0."""

  def __init__(self, images: LabelledImages, num_images: int, size: int, resize: int,
               batch_size: int):
    self._images, self._num_images, self._batch_size = images, num_images, batch_size
    self._size, self._resize = size, resize

  def __getitem__(self, number: int) -> Batch:
    """Images `number` x batch size and those that follow."""
    batch = _empty(self._batch_size, self._size)
    start = number * self._batch_size
    for row, index in enumerate(range(start, min(start + self._batch_size, self._num_images))):
      image, batch["targets"][row] = self._images[index]
      batch["inputs"][row] = augmentation_lib.held_out_image(image, self._size, self._resize)
      batch["weights"][row] = 1.0
    return batch


def _empty(num_rows: int, size: int) -> Batch:
  return {"inputs": np.zeros((num_rows, size, size, 3), np.uint8),
          "targets": np.zeros(num_rows, np.int32), "weights": np.zeros(num_rows, np.float32)}


class TrainLabelledImages:
  """The source of training batches."""

  def __init__(self, batches: AugmentedBatches, num_steps: int, num_workers: int):
    self._read = _Reader(batches, num_steps, num_workers)

  def batch_at(self, step: int) -> Batch:
    """This process's rows of the batch that update number `step` consumes."""
    return self._read(step)


class EvalLabelledImages:
  """A split, or the first images of it, read in order: every image exactly once."""

  def __init__(self, images: LabelledImages, size: int, data: ClassificationDataConfig,
               limit: Optional[int]):
    """Raises DataError if the split is empty."""
    self._num_images = min(len(images), len(images) if limit is None else limit)
    if not self._num_images:
      raise DataError("a split that is evaluated holds no image")
    self._images, self._size, self._data = images, size, data
    self._reader: Optional[tuple[int, _Reader]] = None

  def __len__(self) -> int:
    return self._num_images

  def batch(self, start: int, batch_size: int) -> Batch:
    """Images start .. start + batch_size - 1; rows past the last image have weight 0."""
    number, inside = divmod(start, batch_size)
    if inside:
      raise ValueError(f"batches of {batch_size} images do not begin at image {start}")
    if self._reader is None or self._reader[0] != batch_size:
      batches = CentredBatches(self._images, self._num_images, self._size, self._data.resize,
                               batch_size)
      self._reader = batch_size, _Reader(batches, -(-self._num_images // batch_size),
                                         self._data.num_workers)
    return self._reader[1](number)


class _Reader:
  """Items 0 .. num - 1 of a sequence, made when they are asked for, or ahead by workers.

  Workers start when one item is asked for after another, as in training and evaluation and unlike
  where somebody looks at a few; they end with the last item, or when another is asked for.
  """

  def __init__(self, items: Any, num: int, num_workers: int):
    self._items, self._num, self._num_workers = items, num, num_workers
    self._last: tuple[int, Optional[Batch]] = -2, None
    self._workers: list[Any] = []  # the iterator over what they make, if they run
    weakref.finalize(self, _end, self._workers).atexit = False

  def __call__(self, number: int) -> Batch:
    if not self._num_workers or number >= self._num:
      return self._items[number]
    if number != self._last[0]:  # compiling looks at the batch that training begins with
      self._last = number, self._make(number)
    return self._last[1]

  def _make(self, number: int) -> Batch:
    if number != self._last[0] + 1:
      _end(self._workers)
      return self._items[number]
    if not self._workers:
      self._workers.append(_made_ahead(_Items(self._items, self._num), number, self._num_workers))
      # Before `multiprocessing` ends processes, which is registered by now and so comes later.
      atexit.register(_end, self._workers)
    try:
      # Copies, as Grain's arrays are views of memory that it takes back.
      item = {name: np.array(rows) for name, rows in next(self._workers[0]).items()}
    except RuntimeError as error:  # such as where the system ended one
      raise DataError(f"a process that makes batches ended ({error}); give it more memory, shared "
                      f"memory too, or lower data.num_workers={self._num_workers}") from error
    if number + 1 == self._num:
      _end(self._workers)
    return item


def _end(workers: list[Any]) -> None:
  while workers:
    workers.pop().close()


@dataclasses.dataclass(frozen=True)
class _Items:
  """What Grain calls a random-access data source."""

  items: Any
  num: int

  def __len__(self) -> int:
    return self.num

  def __getitem__(self, number: int) -> Batch:
    return self.items[number]


def _made_ahead(items: _Items, first: int, num_workers: int) -> Any:
  """An iterator over items first, first + 1, .., which worker processes make."""
  try:
    from absl import flags
    import grain
  except ImportError as error:
    raise DataError(f"data.num_workers={num_workers} needs a package that is not installed "
                    f"({error}); run pip install 'damcha-jax[imagenet]', or use 0") from error
  flags.FLAGS.mark_as_parsed()  # Grain hands the flags on to its workers
  # Python's resource tracker removes what was made and nobody took, and would warn of it.
  if _EXPECTED not in sys.warnoptions:
    sys.warnoptions.append(_EXPECTED)
  dataset = grain.MapDataset.source(items)[first:].to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
  return iter(dataset.mp_prefetch(
      grain.MultiprocessingOptions(num_workers=min(num_workers, items.num - first)),
      worker_init_fn=_settle))


def _settle(worker: int, num_workers: int) -> None:
  """Leaves Ctrl-C to the training process, and ends with it."""
  del worker, num_workers
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  multiprocessing.parent_process().join()
  os._exit(1)  # the process that would take what is made is gone
