"""Runs on eight forced CPU devices and writes FOLDER/report.json.

`python eight_devices.py FOLDER SCANNED UNROLLED` trains the scanned and the unrolled stack on these
meshes (comma-separated), and evaluates and restores on several device counts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
import sys

import jax
import numpy as np

from damcha_jax.config import CheckpointConfig, MeshConfig
from damcha_jax.evaluation.likelihood import Evaluator
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.checkpoint import Checkpointer
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.step import make_train_step
import lm_run

NUM_STEPS = 20
MESHES = {"1x1x1": (1, 1, 1), "8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "1x4x2": (1, 4, 2),
          "2x2x2": (2, 2, 2)}


class Setup:
  """A task on a mesh of the first devices."""

  def __init__(self, config, shape):
    mesh_config = MeshConfig(*shape)
    devices = jax.devices()[:np.prod(shape)]
    self.partitioning = sharding_lib.Partitioning(
        sharding_lib.make_mesh(mesh_config, devices), config.logical_rules)
    self.config = config
    self.task = language_model_task(config, "damcha", seed=0)
    self.optimizer = optimizer_lib.make_optimizer(config.optimizer, NUM_STEPS,
                                                  self.task.parameter_groups)
    self.root = state_lib.root_key(0, config.prng_impl)
    self.boxed = state_lib.abstract_state(self.task, self.optimizer, self.root)
    self.targets = state_lib.sharded_targets(self.boxed, self.partitioning)
    self.shardings = jax.tree.map(lambda target: target.sharding, self.targets)

  def create(self):
    return state_lib.create_state(self.task, self.optimizer, self.root, self.targets)

  def train(self, state):
    """The losses of all steps, and the final state."""
    schedule = optimizer_lib.learning_rate_schedule(self.config.optimizer, NUM_STEPS)
    step = make_train_step(self.task, self.optimizer, schedule, self.root, self.partitioning,
                           self.targets, self.config.optimizer.accumulation_steps)
    losses = []
    for index in range(NUM_STEPS):
      batch = self.partitioning.place_local_rows(self.task.train_source.batch_at(index))
      state, metrics = step(state, batch)
      losses.append(float(metrics["loss"]))
    return losses, state

  def evaluate(self, params, batch_size):
    evaluator = Evaluator(self.task.eval_loss_fn, self.partitioning.place_global_rows, batch_size,
                          self.partitioning.batch_multiple, self.partitioning.replicated)
    return evaluator.evaluate(params, self.task.eval_sources)["validation"]

  def checkpointer(self, folder):
    return Checkpointer(folder, CheckpointConfig(1, 1, 0), self.targets, print)


def move(setup, state, to, folder):
  """Saves with one setup and restores with another; that one and the restored state."""
  saving = setup.checkpointer(folder)
  saving.save(NUM_STEPS, state)
  saving.wait()
  saving.close()
  restoring = to.checkpointer(folder)
  restored = restoring.restore_latest()
  restoring.close()
  return to, restored


def largest_fraction(state):
  """The largest part of any big array that one device holds."""
  return max(leaf.addressable_shards[0].data.size / leaf.size
             for leaf in jax.tree.leaves(state.params) if leaf.size >= 256 and leaf.ndim >= 2)


def same(left, right):
  return all(np.array_equal(a, b) for a, b in zip(
      jax.tree.leaves(jax.device_get(left)), jax.tree.leaves(jax.device_get(right))))


def make_config(corpus, scan_layers):
  config = lm_run.tiny_language_model(corpus, scan_layers)
  return dataclasses.replace(
      config, num_steps=NUM_STEPS,
      model=dataclasses.replace(config.model, dropout_rate=0.0),
      damcha=dataclasses.replace(config.damcha, widths=(8,)),
      optimizer=dataclasses.replace(config.optimizer, accumulation_steps=1))


def main(folder: Path, scanned: list[str], unrolled: list[str]) -> None:
  corpus = lm_run.write_corpus(folder / "corpus.txt")
  report = {"losses": {}, "initial_difference": {}, "fraction": {}, "evaluations": {}}
  for scan_layers, meshes in ((False, unrolled), (True, scanned)):
    config = make_config(corpus, scan_layers)
    initial = None
    for name in meshes:
      shape = MESHES[name]
      setup = Setup(config, shape)
      if name in ("1x1x1", "2x2x2"):
        state = setup.create()
        initial = initial or jax.device_get(state)
        report["initial_difference"][f"{name} {scan_layers}"] = max(
            float(np.abs(a - b).max()) for a, b in zip(
                jax.tree.leaves(jax.device_get(state.params)), jax.tree.leaves(initial.params)))
        report["fraction"][f"{name} {scan_layers}"] = largest_fraction(state)
      else:
        state = jax.device_put(initial, setup.shardings)
      losses, state = setup.train(state)
      report["losses"][f"{name} {scan_layers}"] = losses
  # The last state is that of 2x2x2, scanned: the last of MESHES.
  for batch_size in (1, 7, 64, 10_000):
    report["evaluations"][f"8 devices, {batch_size}"] = setup.evaluate(state.params, batch_size)
  one = Setup(config, (1, 1, 1))
  params = jax.device_put(jax.device_get(state.params), one.shardings.params)
  for batch_size in (7, 64, 10_000):
    report["evaluations"][f"1 device, {batch_size}"] = one.evaluate(params, batch_size)

  report["restored"] = []
  for name, shape in (("to 2", (1, 2, 1)), ("to 8", (2, 2, 2))):
    setup, restored = move(setup, state, Setup(config, shape), folder / name)
    num_devices = len(jax.tree.leaves(restored.params)[0].sharding.device_set)
    report["restored"].append([num_devices, same(state, restored)])
    state = restored
  report["moved"] = {}
  for name in scanned:
    start = Setup(config, MESHES[name])
    there = move(start, jax.device_put(jax.device_get(state), start.shardings),
                 Setup(config, (2, 1, 1)), folder / f"{name} to 2")
    _, back = move(*there, start, folder / f"2 to {name}")
    report["moved"][name] = same(state, back) and back.step.sharding == start.shardings.step
  np.savez(folder / "state.npz", *jax.tree.leaves(jax.device_get(state)))
  (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
  main(Path(sys.argv[1]), *(names.split(",") for names in sys.argv[2:]))
