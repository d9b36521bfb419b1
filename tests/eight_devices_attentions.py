"""One training step of every attention on eight forced CPU devices; writes FOLDER/report.json.

`python eight_devices_attentions.py FOLDER NAMES` compares a 4x2 mesh (fsdp x tensor) with one
device for the attentions NAMES (comma-separated).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
import sys

import jax
import numpy as np

from configs import enwik8
from damcha_jax.config import MeshConfig, freeze
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.step import make_train_step
import lm_run

MESHES = ((1, 1, 1), (1, 4, 2))


def step_on(config, name, shape, state=None):
  """The state before and after one step, its metrics, and the largest part of a device."""
  devices = jax.devices()[:np.prod(shape)]
  partitioning = sharding_lib.Partitioning(
      sharding_lib.make_mesh(MeshConfig(*shape), devices), config.logical_rules)
  task = language_model_task(config, name, seed=0)
  optimizer = optimizer_lib.make_optimizer(config.optimizer, 10, task.parameter_groups)
  root = state_lib.root_key(0, config.prng_impl)
  boxed = state_lib.abstract_state(task, optimizer, root)
  targets = state_lib.sharded_targets(boxed, partitioning)
  if state is None:
    state = jax.device_get(state_lib.create_state(task, optimizer, root, targets))
  placed = jax.device_put(state, jax.tree.map(lambda target: target.sharding, targets))
  largest = max(leaf.addressable_shards[0].data.size / leaf.size
                for leaf in jax.tree.leaves(placed.params) if leaf.size >= 256 and leaf.ndim >= 2)
  schedule = optimizer_lib.learning_rate_schedule(config.optimizer, 10)
  step = make_train_step(task, optimizer, schedule, root, partitioning, targets, 1)
  batch = partitioning.place_local_rows(task.train_source.batch_at(0))
  after, metrics = step(placed, batch)
  return state, jax.device_get(after.params), jax.device_get(metrics), largest


def main(folder: Path, names: list[str]) -> None:
  config = freeze(enwik8.get_config("smoke"))
  config = dataclasses.replace(
      config, dataset=str(lm_run.write_corpus(folder / "corpus.txt")), batch_size=8,
      context_length=8,
      model=dataclasses.replace(config.model, num_layers=1, mlp_features=32),
      damcha=dataclasses.replace(config.damcha, stride=2, widths=(8,)),
      # Of Adam's first step only the gradient's sign would be left.
      optimizer=dataclasses.replace(config.optimizer, eps=1.0, warmup_steps=0, clip_norm=0.0))
  report = {}
  for name in names:
    state, one, one_metrics, _ = step_on(config, name, MESHES[0])
    _, many, many_metrics, largest = step_on(config, name, MESHES[1], state)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, one)
    report[name] = dict(
        losses=[float(one_metrics["loss"]), float(many_metrics["loss"])],
        norms=[float(one_metrics["grad_norm"]), float(many_metrics["grad_norm"])],
        difference=max(float(np.abs(a - b).max()) for a, b in zip(
            jax.tree.leaves(one), jax.tree.leaves(many), strict=True)),
        moved=max(map(float, jax.tree.leaves(moved))),
        largest=largest,
        sums=sorted(many_metrics["sums"]))
  (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
  main(Path(sys.argv[1]), sys.argv[2].split(","))
