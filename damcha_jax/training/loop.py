"""The training loop: evaluate -> save -> next batch -> step, resumable at any instant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

from flax import linen as nn
import jax
import numpy as np

from damcha_jax.attention.activations import sharded_like
from damcha_jax.config import ConfigError
from damcha_jax.errors import CheckpointError, Interrupted, NonFiniteError
from damcha_jax.evaluation.likelihood import Evaluator
from damcha_jax.training import flops as flops_lib
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.checkpoint import Checkpointer
from damcha_jax.training.meter import Meter
from damcha_jax.training.profiling import Profiler
from damcha_jax.training.result import read_result
from damcha_jax.training.signals import StopRequest
from damcha_jax.training.step import make_train_step
from damcha_jax.training.task import Task
from damcha_jax.training.workdir import Workdir
from damcha_jax.training.writer import MetricsWriter, Progress, Throttled, format_duration


def train(task: Task, config: Any, workdir: str | Path, seed: int) -> dict[str, Any]:
  """Trains one model, or goes on where an earlier process stopped, and returns its `result.json`.

  Exactly `config.num_steps` updates happen, however often the run is interrupted, and on one device
  count the final parameters are bitwise those of an uninterrupted run. A finished run is only read.

  Args:
    task: what to train.
    config: any frozen config with `num_steps`, `batch_size`, `optimizer`, `mesh`, `logical_rules`,
      `evaluation`, `checkpoint`, `logging` and `prng_impl`; recorded whole.
    workdir: the run's own directory. Gets `config.json`, `data.json`, `versions.json`,
      `metrics.jsonl`, `checkpoints/` and `result.json`.
    seed: seed of the initial parameters and of dropout.

  Raises:
    ConfigError: the configuration cannot run on these devices.
    WorkdirError: the directory is in use, belongs to another configuration or to other data, or
      cannot be written.
    CheckpointError: a checkpoint cannot be written, or none can be read.
    Interrupted: SIGTERM or SIGINT; the state is saved.
    NonFiniteError: the loss, a gradient or an evaluation is not finite.
  """
  _check_intervals(config)
  directory = Workdir(workdir)
  with directory.locked(), StopRequest() as stop:
    directory.check_config(config, task.name, seed)
    directory.check_data(task.data_hashes)
    progress = Progress(f"{task.name} seed {seed}", enabled=directory.is_primary)
    result = read_result(directory, name=task.name, seed=seed, num_steps=config.num_steps)
    if result is not None:
      progress.note(f"complete after {result['num_steps']} steps: {directory.path}")
      return result
    run = _Run(task, config, directory, seed, stop, progress)
    try:
      run.start()
      run.compile()
      run.loop()
      return run.finish()
    finally:
      run.close()


def check(task: Task, config: Any, seed: int) -> None:
  """Raises `ConfigError` if `train` would refuse the configuration; writes nothing."""
  _check_intervals(config)
  _Run(task, config, None, seed, None, None)


def _check_intervals(config: Any) -> None:
  positive = {
      "num_steps": config.num_steps,
      "evaluation.every_steps": config.evaluation.every_steps,
      "evaluation.batch_size": config.evaluation.batch_size,
      "checkpoint.every_steps": config.checkpoint.every_steps,
      "checkpoint.keep_last": config.checkpoint.keep_last,
      "logging.every_steps": config.logging.every_steps,
  }
  for name, value in positive.items():
    if value < 1:
      raise ConfigError(f"config key '{name}' is {value}; it must be at least 1")


class _Run:
  """One process's part of a run."""

  def __init__(self, task: Task, config: Any, directory: Optional[Workdir], seed: int,
               stop: Optional[StopRequest], progress: Optional[Progress]):
    """Raises `ConfigError` for what cannot run; touches no file, so `check` passes no directory."""
    self.task, self.config, self.directory, self.seed = task, config, directory, seed
    self.stop, self.progress = stop, progress
    mesh = sharding_lib.make_mesh(config.mesh)
    sharding_lib.check_batch_size(config.batch_size, config.optimizer.accumulation_steps, mesh)
    self.partitioning = sharding_lib.Partitioning(mesh, config.logical_rules)
    self.root = state_lib.root_key(seed, config.prng_impl)
    self.optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps,
                                                  task.parameter_groups, task.ema_decay)
    self.evaluator = Evaluator(sharded_like(self.partitioning.batch, task.eval_loss_fn),
                               self.partitioning.place_global_rows,
                               config.evaluation.batch_size, self.partitioning.batch_multiple,
                               out_shardings=self.partitioning.replicated)
    # Their few rows need not be a multiple of the devices.
    self.diagnostics = jax.jit(sharded_like(self.partitioning.whole_batch, task.diagnostics),
                               out_shardings=self.partitioning.replicated)
    try:
      boxed = state_lib.abstract_state(self.task, self.optimizer, self.root)
    except (OverflowError, ValueError) as error:  # what modules notice only when they see inputs
      raise ConfigError(f"{task.name} cannot be built: {error}") from error
    params = nn.meta.unbox(boxed).params
    optimizer_lib.check_groups(params, self.task.parameter_groups)
    self.leaf_names = [sharding_lib.path_name(path)
                       for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    self.targets = state_lib.sharded_targets(boxed, self.partitioning)
    self.evaluated_step = self.saved_step = -1
    self.pending: Optional[tuple[int, Any]] = None
    self.checkpointer = self.writer = self.profiler = None

  def start(self) -> None:
    """Creates or restores the state and opens the records."""
    self.directory.claim(self.config, self.task.name, self.seed)
    self.directory.claim_data(self.task.data_hashes)
    path = self.directory.path
    for change in self.directory.record_versions():
      self.progress.note(f"since this run began: {change}")
    self.checkpointer = Checkpointer(path / "checkpoints", self.config.checkpoint, self.targets,
                                     self.progress.note)
    self.profiler = Profiler(path / "profile")
    state = self.checkpointer.restore_latest()
    if state is None:
      state = state_lib.create_state(self.task, self.optimizer, self.root, self.targets)
    else:
      self.saved_step = int(state.step)
      self.progress.note(f"resuming at step {self.saved_step} of {self.config.num_steps}")
    self.state, self.step = state, int(state.step)
    self._open_records(path)

  def _open_records(self, path: Path) -> None:
    tensorboard = path / "tensorboard" if self.config.logging.tensorboard else None
    self.writer = MetricsWriter(path / "metrics.jsonl", self.step, self.directory.is_primary,
                                tensorboard, needed={"validation": self.task.selection_metric,
                                                     "train": "train_seconds"})
    lost = "; their scores are lost, and the best checkpoint is chosen among those that are left"
    if self.saved_step > 0 and not self.writer.records:
      self.progress.note(f"{path / 'metrics.jsonl'} has no record of these steps{lost}")
    elif self.saved_step >= 0 and not self.writer.begins_with(**self.checkpointer.restored_beside):
      self.progress.note(f"{path / 'metrics.jsonl'} lacks records that it had at step "
                         f"{self.saved_step}, or they were changed{lost}")
    for record in self.writer.records:
      if record["split"] == "validation":
        self.checkpointer.scores[record["step"]] = record[self.task.selection_metric]
        self.evaluated_step = record["step"]

  def compile(self) -> None:
    """Compiles the step before any clock runs."""
    batch = self._next_batch()
    self.flops_per_step = flops_lib.model_flops_per_step(self.task, self.state.params, batch)
    schedule = optimizer_lib.learning_rate_schedule(self.config.optimizer, self.config.num_steps)
    step = make_train_step(self.task, self.optimizer, schedule, self.root, self.partitioning,
                           self.targets, self.config.optimizer.accumulation_steps)
    if self.step < self.config.num_steps:
      self.progress.update("compiling")
      self.train_step = step.lower(self.state, batch).compile()
    spent = [record["train_seconds"] for record in self.writer.records
             if record["split"] == "train"]
    self.meter = Meter(self.config.num_steps - self.step, self.flops_per_step,
                       max(spent, default=0.0), self.task.unit)

  def _next_batch(self) -> dict[str, jax.Array]:
    return self.partitioning.place_local_rows(self.task.train_source.batch_at(self.step))

  def loop(self) -> None:
    """Runs the updates that are left."""
    if not self.writer.records:
      self._diagnose()
    while True:
      self.profiler.before(self.step + 1, self.state)
      self._evaluate_if_due()
      self._save_if_due()
      if self.step == self.config.num_steps:
        return
      batch = self._next_batch()
      self.state, metrics = self.train_step(self.state, batch)
      self.step += 1
      # Step n is already dispatched when the numbers of n-1 are waited for.
      self._report()
      self.pending = (self.step, metrics)

  def _evaluate_if_due(self) -> None:
    last = self.step == self.config.num_steps
    if self.step <= max(0, self.evaluated_step) or not (
        last or self.step % self.config.evaluation.every_steps == 0):
      return
    self._report()
    self.meter.pause()
    results = self._evaluate(state_lib.evaluated_params(self.state),
                             _sources(self.task, test=False), self.step)
    if results is not None:
      self._diagnose()
    self.meter.resume()
    if results is None:
      return
    self.evaluated_step = self.step
    if "validation" in results:
      self.checkpointer.scores[self.step] = results["validation"][self.task.selection_metric]
    self.progress.note(f"step {self.step}: " + ", ".join(
        f"{split} {metrics[self.task.selection_metric]:.4f}" for split, metrics in results.items())
        + f" {self.task.selection_metric}")

  def _evaluate(self, params: Any, sources: Any, step: int) -> Optional[dict[str, Any]]:
    """Metrics by split, recorded under `step`; None if a signal came in between."""
    progress = Throttled(lambda split, fraction: self.progress.update(
        f"step {step}: evaluating {split} {fraction:.0%}"))
    sums = self.evaluator.evaluate(params, sources, lambda: self.stop.signal_name is not None,
                                   progress)
    if sums is None:
      return None
    results = {split: self.task.metrics_of(totals) for split, totals in sums.items()}
    for split, metrics in results.items():
      for key, value in metrics.items():
        if not math.isfinite(value):
          raise NonFiniteError(f"{split} {key} is {value} at step {step}; {self._last_good()}")
    for split, metrics in results.items():
      self.writer.write({"step": step, "split": split, **metrics})
    return results

  def _diagnose(self) -> None:
    values = jax.device_get(self.diagnostics(state_lib.evaluated_params(self.state)))
    if values:
      self.writer.write({"step": self.step, "split": "diagnostics",
                         **{name: float(value) for name, value in values.items()}})

  def _save_if_due(self) -> None:
    """Saves at intervals, at the end, at a new best, and when asked to stop."""
    stop = self.stop.requested(self.step)
    due = self.step > 0 and (self.step % self.config.checkpoint.every_steps == 0
                             or self.step == self.config.num_steps or self._is_among_best())
    if (due or stop) and self.step > self.saved_step:
      self._report()
      self.meter.pause()
      self.checkpointer.save(self.step, self.state, **self.writer.fingerprint())
      self.saved_step = self.step
      self.meter.resume()
    if stop:
      raise self._interrupted()

  def _is_among_best(self) -> bool:
    scores = self.checkpointer.scores
    if self.step not in scores:
      return False
    better = sum(score < scores[self.step] for score in scores.values())
    return better < self.config.checkpoint.keep_best

  def _interrupted(self) -> Interrupted:
    self.checkpointer.wait()
    return Interrupted(f"stopped by {self.stop.signal_name} at step {self.step} of "
                       f"{self.config.num_steps}; saved in {self.directory.path}; run the same "
                       "command again to resume")

  def _report(self) -> None:
    """Waits for the pending step, checks it and, at intervals, records it."""
    if self.pending is None:
      return
    (step, metrics), self.pending = self.pending, None
    metrics = jax.device_get(metrics)
    self._check_finite(step, metrics)
    self.meter.count_step(float(metrics["sums"]["weight"]))
    if step % self.config.logging.every_steps and step != self.config.num_steps:
      return
    sums = {key: float(value) for key, value in metrics["sums"].items()}
    speed = self.meter.read()
    record = {"step": step, "split": "train", **self.task.metrics_of(sums),
              **{key: float(metrics[key]) for key in ("loss", "grad_norm", "learning_rate")},
              **speed}
    self.writer.write(record)
    utilisation = "" if speed["mfu"] is None else f"MFU {speed['mfu']:.1%}  "
    self.progress.update(
        f"step {step}/{self.config.num_steps}  {self.task.selection_metric} "
        f"{record[self.task.selection_metric]:.4f}  {speed[f'{self.task.unit}_per_second']:,.0f} "
        f"{self.task.unit}/s  "
        f"{utilisation}left {format_duration(self.meter.seconds_left())}")

  def _check_finite(self, step: int, metrics: Any) -> None:
    if np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]):
      return
    bad = np.flatnonzero(~np.isfinite(metrics["leaf_square_norms_L"]))
    leaf = (f"the first bad gradient is '{self.leaf_names[bad[0]]}'" if bad.size
            else "every gradient is finite")
    raise NonFiniteError(f"loss {metrics['loss']} at update {step} (batch {step - 1}): {leaf}; "
                         f"{self._last_good()}")

  def _last_good(self) -> str:
    where = (f"the last good checkpoint is step {self.saved_step} in {self.directory.path}"
             if self.saved_step >= 0 else "there is no checkpoint yet")
    return f"{where}; lower optimizer.learning_rate or clip_norm and use another workdir"

  def finish(self) -> dict[str, Any]:
    """Verifies the last checkpoint, evaluates the best parameters on test, writes `result.json`."""
    self.checkpointer.wait()
    self.checkpointer.read_back(self.step, self.state)
    best_step, best_params = self._best()
    test = self._evaluate(best_params, _sources(self.task, test=True), best_step)
    if test is None:
      raise self._interrupted()
    result = {
        "name": self.task.name,
        "seed": self.seed,
        "num_steps": self.step,
        "num_params": state_lib.num_params(self.state),
        "model_flops_per_step": self.flops_per_step,
        "train_seconds": self.meter.train_seconds,
        "selection_metric": self.task.selection_metric,
        "final": {"step": self.step, "metrics": self._metrics_at(self.step)},
        "best": {"step": best_step, "metrics": self._metrics_at(best_step)},
    }
    self.directory.write_json("result.json", result, sealed=True)
    held_out = test or {"validation": result["best"]["metrics"]["validation"]}
    chosen = "best" if self.config.checkpoint.keep_best else "last"
    self.progress.note(f"step {best_step} ({chosen}): " + ", ".join(
        f"{split} {metrics[self.task.selection_metric]:.4f}" for split, metrics in held_out.items())
        + f" {self.task.selection_metric}; done in {self.directory.path}")
    return result

  def _best(self) -> tuple[int, Any]:
    """The step and parameters with the lowest validation score among the kept checkpoints."""
    scores = self.checkpointer.scores
    kept = [step for step in self.checkpointer.steps if step in scores]
    if self.config.checkpoint.keep_best == 0:
      kept = []
    for step in sorted(kept, key=lambda step: (scores[step], step)):
      if step == self.step:
        break
      try:
        return step, state_lib.evaluated_params(self.checkpointer.restore(step))
      except CheckpointError as error:
        self.progress.note(f"{error}; trying the next best step")
    return self.step, state_lib.evaluated_params(self.state)

  def _metrics_at(self, step: int) -> dict[str, Any]:
    return {record["split"]: {key: value for key, value in record.items()
                              if key not in ("step", "split")}
            for record in self.writer.records if record["step"] == step}

  def close(self) -> None:
    """Ends writes in flight and leaves the terminal in order."""
    self.progress.close()
    if self.profiler is not None:
      self.profiler.close()
    if self.checkpointer is not None:
      self.checkpointer.close()
    if self.writer is not None:
      self.writer.close()


def _sources(task: Task, test: bool) -> dict[str, Any]:
  """The splits that are evaluated at the very end only (`test`), or the others."""
  return {name: source for name, source in task.eval_sources.items()
          if (name.split("/")[0] == "test") == test}
