"""Images from a trained decoder, and completions of real ones, kept beside the run.

Both are drawn in batches, each written as soon as it is there, so that an interrupted run goes on;
in the end all are in one `samples.npz`, which is all that metrics and figures need:

  step                 of the checkpoint that they come from
  images               uint8 [N, H, W] or [N, H, W, 3]
  log_likelihoods      of them, in nats [N]
  begin                what each sequence began with: 0, or 256 + its class, [N]
  completed            uint8 [M, H, W] or [M, H, W, 3]: the test images 0 .. M - 1 with their lower
                       half drawn
  completed_log_likelihoods   of the lower halves, in nats [M]
  num_given_rows       of them, the upper ones
  seal                 a checksum of all this and of whose it is: what is another run's, step's or
                       rule's, or was changed, is drawn again

Axes: N samples, M completions, B batch, H height, W width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
import shutil
from typing import Any, NamedTuple, Optional
import zlib

import numpy as np

from damcha_jax.config import ImageGenerationConfig
from damcha_jax.config.image_generation import PIXEL_TOKENS
from damcha_jax.data.images import ImageData
from damcha_jax.origins import Origin, origin_of, seal
from damcha_jax.sampling import Sampler, row_keys
from damcha_jax.training.restore import restore_decoder
from damcha_jax.training.workdir import Workdir, write_arrays

FILE = "samples.npz"
# Completions have random keys of their own.
_FIRST_COMPLETION = 1 << 31


class ImageSamples(NamedTuple):
  """The contents of `samples.npz` but the seal; see above."""

  step: int
  images: np.ndarray
  log_likelihoods: np.ndarray
  begin: np.ndarray
  completed: np.ndarray
  completed_log_likelihoods: np.ndarray
  num_given_rows: int


def sample_images(config: ImageGenerationConfig, attention: str, seed: int, directory: Path,
                  data: ImageData, note: Callable[[str], None], result: Mapping[str, Any],
                  trained: Optional[Path] = None) -> ImageSamples:
  """Draws what `config.sampling` asks of a run's best checkpoint, or reads what is there.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the sampling.
    directory: where they are kept.
    data: the images; the test part is completed.
    note: prints one line.
    result: the run's `result.json`, which says which checkpoint is the best.
    trained: the directory of the run, where it is another.

  Raises:
    CheckpointError: that checkpoint is not readable.
    WorkdirError: the samples cannot be written, or the run was trained on other data.
  """
  trained, rule = trained or directory, config.sampling
  Workdir(trained).check_data(data.hashes)
  origin = origin_of(attention, seed, result, rule)
  kept = read_samples(directory, origin)
  if kept is not None:
    return kept
  if (directory / FILE).exists():
    note(f"{directory / FILE} is not what this run drew: drawing again")
  model, step, params = restore_decoder(trained, config, attention, result["best"]["step"], note)
  sampler = Sampler(model, rule.temperature, rule.top_k, rule.top_p, num_symbols=PIXEL_TOKENS)
  parts = _Parts(directory / "samples", origin, rule.batch_size, note)
  tokens_NT = data.tokens["test"]
  begin_N = data.begin_tokens("test", config.data.class_conditional)
  num_given_rows = data.image_shape[0] // 2
  num_given = num_given_rows * (config.context_length // data.image_shape[0])
  num_completions = min(rule.num_completions, len(tokens_NT))

  def draw(rows: range, given_BT: np.ndarray, first_key: int) -> dict[str, np.ndarray]:
    """The tokens of whole images, and the log-likelihoods of what was drawn of them."""
    # Classes are as frequent as in the test part.
    begin_B = begin_N[np.array(rows) % len(begin_N)]
    drawn = sampler.sample(params, given_BT.tolist(), config.context_length - given_BT.shape[1],
                           row_keys(seed, [first_key + row for row in rows]), begin_B.tolist())
    return {"tokens": np.concatenate([given_BT, drawn.tokens_BN], axis=1).astype(np.uint8),
            "log_likelihoods": drawn.log_probs_BN.sum(1, dtype=np.float64), "begin": begin_B}

  nothing_BT = np.zeros((rule.batch_size, 0), np.uint8)
  samples = parts.collect("images", rule.num_samples, lambda rows: draw(rows, nothing_BT, 0))
  completed = parts.collect("completed", num_completions, lambda rows: draw(
      rows, tokens_NT[np.array(rows) % num_completions, :num_given], _FIRST_COMPLETION))
  drawn = ImageSamples(
      step, data.decode(samples["tokens"]), samples["log_likelihoods"], samples["begin"],
      data.decode(completed["tokens"]), completed["log_likelihoods"], num_given_rows)
  _write(directory / FILE, origin, drawn._asdict())
  parts.remove()
  return drawn


def read_samples(directory: Path, origin: Origin) -> Optional[ImageSamples]:
  """What was drawn of a run, or None if it was not, or not all, or is another's or changed."""
  arrays = _read(directory / FILE, origin)
  if arrays is None or set(arrays) != set(ImageSamples._fields):
    return None
  numbers = {name: int(arrays[name]) for name in ("step", "num_given_rows")}
  return ImageSamples(**{**arrays, **numbers})


class _Parts:
  """Batches of samples in a folder, each a file."""

  def __init__(self, folder: Path, origin: Origin, batch_size: int, note: Callable[[str], None]):
    self._folder, self._origin = folder, origin
    self._batch_size, self._note = batch_size, note

  def collect(self, name: str, num: int,
              draw: Callable[[range], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`draw` of rows 0 .. num - 1, in batches of equal size; those that are there are read."""
    batches, is_compiled = [], False
    for start in range(0, num, self._batch_size):
      path = self._folder / f"{name}-{start:06d}.npz"
      batch = _read(path, {**self._origin, "part": path.name})
      if batch is None:
        if not is_compiled:
          self._note(f"{name}: compiling the sampler")
          is_compiled = True
        # The last batch goes beyond `num`: one size, one compilation.
        batch = draw(range(start, start + self._batch_size))
        _write(path, {**self._origin, "part": path.name}, batch)
        self._note(f"{name}: {min(start + self._batch_size, num):,} of {num:,} drawn")
      batches.append(batch)
    return {key: np.concatenate([batch[key] for batch in batches])[:num] for key in batches[0]}

  def remove(self) -> None:
    shutil.rmtree(self._folder, ignore_errors=True)


def _read(path: Path, origin: Origin) -> Optional[dict[str, np.ndarray]]:
  """The arrays of a file, unless it is absent, torn, changed or of another origin."""
  try:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
      arrays = {name: archive[name] for name in archive}
    return arrays if arrays.pop("seal") == _seal(origin, arrays) else None
  except Exception:  # pylint: disable=broad-except; missing, or damaged in any way
    return None


def _write(path: Path, origin: Origin, arrays: Mapping[str, Any]) -> None:
  write_arrays(path, {**arrays, "seal": _seal(origin, arrays)})


def _seal(origin: Origin, arrays: Mapping[str, Any]) -> int:
  values = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
  return seal(origin, [[name, value.dtype.str, list(np.shape(arrays[name])), zlib.crc32(value)]
                       for name, value in values.items()])
