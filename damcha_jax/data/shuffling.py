"""The order of training examples: epochs of permutations that depend on the seed alone."""

from __future__ import annotations

import functools

import numpy as np

from damcha_jax.config import ConfigError


def permutation(num: int, seed: int, epoch: int) -> np.ndarray:
  """The order of `num` examples in an epoch, [num]."""
  # Raw words, because NumPy promises their stream for ever, and not that of `permutation`.
  key = np.array([seed % 2**64, epoch], np.uint64)
  return np.argsort(np.random.Philox(key=key).random_raw(num), kind="stable")


# A batch touches two epochs at most, unless it is larger than the data.
_kept_permutation = functools.lru_cache(maxsize=4)(permutation)


class ShuffledEpochs:
  """Epochs of shuffled examples, one after another; batch `step` depends on (seed, step) alone.

  Row r of the global batch of step n is number (n B + r) mod N of epoch (n B + r) div N, whose
  order is a function of (seed, epoch): every example comes once an epoch. Process p of P takes rows
  [p B / P, (p + 1) B / P).
  """

  def __init__(self, num_examples: int, batch_size: int, seed: int, process_index: int = 0,
               process_count: int = 1):
    """Raises ConfigError if the batch is not divisible among the processes."""
    if batch_size % process_count:
      raise ConfigError(f"batch_size {batch_size} is not divisible by the {process_count} "
                        "processes; choose a multiple")
    self._num_examples, self._batch_size, self._seed = num_examples, batch_size, seed
    rows = batch_size // process_count
    self._rows = np.arange(process_index * rows, (process_index + 1) * rows)

  def numbers(self, step: int) -> np.ndarray:
    """Where this process's rows of batch `step` stand in the whole stream, [b]."""
    return step * self._batch_size + self._rows

  def indices(self, step: int) -> np.ndarray:
    """The examples in this process's rows of batch `step`, [b]."""
    epochs, places = np.divmod(self.numbers(step), self._num_examples)
    return np.array([_kept_permutation(self._num_examples, self._seed, epoch)[place]
                     for epoch, place in zip(epochs.tolist(), places.tolist())])
