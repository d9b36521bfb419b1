"""A trained run in a model that uses its parameters differently, as with some blocks left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import linen as nn
import jax

from damcha_jax.analysis.geometry import block_drift, stored_blocks
from damcha_jax.config import DecoderConfig
from damcha_jax.errors import WorkdirError
from damcha_jax.evaluation.likelihood import Evaluator
from damcha_jax.training import state as state_lib
from damcha_jax.training.restore import one_device_targets, restore_params
from damcha_jax.training.result import read_result
from damcha_jax.training.task import Task
from damcha_jax.training.workdir import Workdir

def reevaluate(task: Task, config: DecoderConfig, trained: Path, directory: Path, seed: int,
               note: Callable[[str], None]) -> dict[str, Any]:
  """The best checkpoint of `trained` on every split of `task`, as a `result.json`.

  Is only read if it is there.

  Args:
    task: as `loop.train` takes it; of `config`.
    config: of the evaluation, recorded whole.
    trained: the directory of the run, which is complete.
    directory: this evaluation's own; gets `config.json`, `versions.json` and `result.json`.
    seed: of the run.
    note: prints one line.

  Raises:
    WorkdirError: `trained` is not complete, or `directory` is in use or another configuration's.
    CheckpointError: no checkpoint is readable.
  """
  workdir = Workdir(directory)
  with workdir.locked():
    workdir.check_config(config, task.name, seed)
    result = read_result(workdir)
    if result is not None:
      return result
    result = read_result(Workdir(trained))
    if result is None:
      raise WorkdirError(f"{trained} is not trained to the end; run the command that made it")
    Workdir(trained).check_data(task.data_hashes)
    workdir.claim(config, task.name, seed)
    workdir.record_versions()
    step, params = restore_params(trained, one_device_targets(task.init_params),
                                  result["best"]["step"], task.selection_metric, note)
    evaluator = Evaluator(task.eval_loss_fn, lambda batch: batch, config.evaluation.batch_size)
    sums = evaluator.evaluate(params, task.eval_sources)
    result["best"] = {"step": step, "metrics": {
        split: task.metrics_of(totals) for split, totals in sums.items()}}
    del result["final"]
    workdir.write_json("result.json", result, sealed=True)
    return result


def drift_of_blocks(task: Task, config: DecoderConfig, trained: Path, seed: int,
                    note: Callable[[str], None]) -> dict[str, float]:
  """`block_drift` of a run's last checkpoint from what the run started with, kept in `drift.json`.

  Raises:
    CheckpointError: no checkpoint is readable.
  """
  workdir = Workdir(trained)
  kept = workdir.read_json("drift.json")
  if kept is not None:
    return kept
  key = state_lib.root_key(seed, config.prng_impl)
  # Under jit all other parameters' initial values are left out.
  initial = jax.jit(lambda key: stored_blocks(nn.unbox(state_lib.initial_params(task, key))))(key)
  _, last = restore_params(trained, one_device_targets(task.init_params), "last",
                           task.selection_metric, note)
  drift = block_drift(initial, stored_blocks(last))
  workdir.write_json("drift.json", drift, sealed=True)
  return drift
