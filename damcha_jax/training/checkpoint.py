"""Asynchronous Orbax checkpoints that are checked, kept by recency and by score, and survivable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
import shutil
import time
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from damcha_jax.config import CheckpointConfig
from damcha_jax.errors import CheckpointError, silence_orbax_threads
from damcha_jax.training.sharding import path_name
from damcha_jax.training.state import TrainState

PyTree = Any


class Checkpointer:
  """The checkpoints of one run, in `<workdir>/checkpoints/<step>`.

  Every checkpoint carries a checksum per leaf, computed on the devices at the time of saving, and a
  restore compares them: silent corruption counts as corruption. The newest `keep_last` are kept and
  the `keep_best` with the lowest entry in `scores`.

  Attributes:
    scores: `step -> validation metric`, filled in by the loop; lower is better.
    restored_beside: what `save` was given beside the state of the checkpoint restored last.
  """

  def __init__(self, directory: Path, config: CheckpointConfig, targets: TrainState,
               note: Callable[[str], None]):
    """Opens the directory and removes what a killed process left half written.

    Args:
      directory: an absolute path.
      config: what to keep.
      targets: `ShapeDtypeStruct`s with shardings, onto which checkpoints are restored; they need
        not be the shardings under which the checkpoint was saved.
      note: prints one line.
    """
    self.scores: dict[int, float] = {}
    self.restored_beside: dict[str, Any] = {}
    self._directory = directory
    self._config = config
    self._targets = targets
    self._note = note
    silence_orbax_threads()
    if jax.process_index() == 0:
      _remove_half_written(directory)
    try:
      self._manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(
          preservation_policy=_KeepLastAndBest(config, self.scores),
          cleanup_tmp_directories=True))
    except Exception as error:
      raise self._cannot_save(f"open {directory}", error) from error

  @property
  def steps(self) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: TrainState, **beside: Any) -> None:
    """Starts writing a checkpoint; an error of the previous write is raised here.

    Args:
      step: the number of updates.
      state: after them.
      **beside: JSON values to keep with it.

    Raises:
      CheckpointError: a write failed, for example on a full disk; older checkpoints are intact.
    """
    self._check_space(step, state)
    meta = {"step": step, "checksums": self._named_checksums(state), "beside": beside}
    try:
      self._manager.check_for_errors()
      self._manager.save(step, args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)), force=True)
    except Exception as error:
      raise self._cannot_save(f"save checkpoint {self._directory / str(step)}", error) from error

  def wait(self) -> None:
    """Blocks until nothing is being written; raises `CheckpointError` if a write failed."""
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as error:
      raise self._cannot_save(f"save a checkpoint in {self._directory}", error) from error

  def restore_latest(self) -> Optional[TrainState]:
    """The newest readable checkpoint, or None where there is none.

    Unreadable ones are named in one line each and moved aside, so that training can write those
    steps again.

    Raises:
      CheckpointError: there are checkpoints and none is readable.
    """
    unreadable = []
    for step in reversed(self.steps):
      try:
        state = self.restore(step)
      except CheckpointError as error:
        unreadable.append((step, error))
        continue
      for bad_step, error in unreadable:
        self._set_aside(bad_step, error, step)
      return state
    if unreadable:
      raise CheckpointError(
          f"no checkpoint in {self._directory} is readable; the newest: {unreadable[0][1]}; "
          "restore the files, or choose another workdir to start afresh")
    return None

  def restore(self, step: int) -> TrainState:
    """The checkpoint of a step, on the shardings of this process's mesh.

    Raises:
      CheckpointError: it is missing, unreadable, of other shapes, or its checksums differ.
    """
    path = self._directory / str(step)
    try:
      restored = self._manager.restore(step, args=ocp.args.Composite(
          state=ocp.args.StandardRestore(self._targets), meta=ocp.args.JsonRestore()))
      state, expected, saved_step = (restored.state, restored.meta["checksums"],
                                     restored.meta["step"])
      beside = dict(restored.meta.get("beside", {}))  # which early versions lack
    except Exception as error:
      raise CheckpointError(f"checkpoint {path} is unreadable ({one_line(error)})") from error
    if saved_step != step:
      raise CheckpointError(f"checkpoint {path} is that of step {saved_step}, renamed")
    self._compare(path, state, expected)
    self.restored_beside = beside
    return state

  def read_back(self, step: int, state: TrainState) -> None:
    """Reads a finished checkpoint and compares it with the state in memory, leaf by leaf.

    Raises:
      CheckpointError: it cannot be read or differs.
    """
    restored = self.restore(step)
    self._compare(self._directory / str(step), restored, self._named_checksums(state))

  def close(self) -> None:
    """Waits for writes in flight. Errors were raised by `save` and `wait`, or no longer matter."""
    try:
      self._manager.close()
    except Exception as error:  # pylint: disable=broad-exception-caught
      self._note(f"a checkpoint in flight was lost ({one_line(error)}); older ones are intact")

  def _named_checksums(self, state: TrainState) -> dict[str, int]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_name(path): value for (path, _), value in zip(paths, checksums(state))}

  def _compare(self, path: Path, state: TrainState, expected: dict[str, int]) -> None:
    for name, checksum in self._named_checksums(state).items():
      if expected.get(name) != checksum:
        raise CheckpointError(f"checkpoint {path} is corrupt (the checksum of '{name}' differs)")

  def _set_aside(self, step: int, error: Exception, restored_step: int) -> None:
    aside = self._directory.parent / "corrupt_checkpoints" / str(step)
    while aside.exists():
      aside = aside.with_name(aside.name + "_")
    if jax.process_index() == 0:
      aside.parent.mkdir(exist_ok=True)
      (self._directory / str(step)).rename(aside)
    self._manager.reload()
    self._note(f"{error}; moved to {aside}, going on from step {restored_step}")

  def _check_space(self, step: int, state: TrainState) -> None:
    """Fails before anything is written, where the disk is plainly too small."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self._directory).free
    if free < needed:
      raise CheckpointError(
          f"cannot save checkpoint {self._directory / str(step)}: it needs {needed / 1e6:.1f} MB "
          f"and {free / 1e6:.1f} MB are free; earlier checkpoints are intact; free space, then run "
          "the same command again")

  def _cannot_save(self, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot {what}: {one_line(error)}; earlier checkpoints are intact; "
                           "free space or check permissions, then run the same command again")


def _remove_half_written(directory: Path) -> None:
  """Orbax does so too, but fails where threads of a write that failed still add files."""
  deadline = time.monotonic() + 10
  while time.monotonic() < deadline and (left := [*directory.glob("*.orbax-checkpoint-tmp*")]):
    for path in left:
      shutil.rmtree(path, ignore_errors=True)
    time.sleep(0.1)


class _KeepLastAndBest:
  """Orbax preservation policy. Orbax's own best-N forgets its metrics between processes."""

  def __init__(self, config: CheckpointConfig, scores: dict[int, float]):
    self._config = config
    self._scores = scores

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    scored = sorted((self._scores[step], step) for step in steps if step in self._scores)
    best = [step for _, step in scored[:self._config.keep_best]]
    last = sorted(steps)[-self._config.keep_last:]
    return [step in best or step in last for step in steps]


def checksums(tree: PyTree) -> list[int]:
  """One uint32 per leaf: `sum_n bits_n (2n + 1) mod 2^32` over its elements in row-major order.

  Integer sums do not depend on the order of addition, so the value is the same on any mesh.
  """
  # One after the other: many programs with collectives in flight at once can starve each other of
  # threads on a CPU that stands for several devices.
  return [int(_checksum(leaf)) for leaf in jax.tree.leaves(tree)]


@jax.jit  # leaf by leaf: Adam's moments reuse what was compiled for the parameters
def _checksum(leaf: jax.Array) -> jax.Array:
  word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)
  index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
  for axis in reversed(range(bits.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride % 2**32)
    stride *= bits.shape[axis]
  return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def one_line(error: BaseException) -> str:
  """An error's class and first line, shortened."""
  first = (str(error).strip().splitlines() or [""])[0]
  first = first.partition(" See full TensorStore details")[0]
  return f"{type(error).__name__}: {first[:200]}"
