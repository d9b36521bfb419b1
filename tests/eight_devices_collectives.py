"""Compiles a train step for meshes of eight forced CPU devices and prints what they exchange.

`python eight_devices_collectives.py` prints, as JSON, megabytes by mesh, attention and collective
operation, those of the parameters under 'params', and the program's peak under 'peak'.
"""

from __future__ import annotations

import collections
import json
import math
import re
import sys

import jax
import jax.numpy as jnp

from configs import mix
from damcha_jax.analysis.complexity import peak_bytes
from damcha_jax.config import freeze
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.decoder import decoder_task
from damcha_jax.training.step import make_train_step

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1)}
OPERATION = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"(f32|s32|u32|pred)\[([\d,]*)\]")


def main() -> None:
  json.dump({name: {attention: _exchanged(attention, shape) for attention in ("mha", "damcha")}
             for name, shape in MESHES.items()}, sys.stdout)


def _exchanged(attention: str, shape: tuple[int, int, int]) -> dict[str, float]:
  config = _config(shape)
  partitioning = sharding_lib.Partitioning(
      sharding_lib.make_mesh(config.mesh, jax.devices()), config.logical_rules)
  task = decoder_task(config, attention, train_source=None, eval_sources={}, metrics_of=dict,
                      probe={})
  optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps,
                                           task.parameter_groups)
  root = state_lib.root_key(0, config.prng_impl)
  targets = state_lib.sharded_targets(state_lib.abstract_state(task, optimizer, root), partitioning)
  step = make_train_step(task, optimizer, lambda step: 0.0, root, partitioning, targets, 1)
  rows = lambda dtype: jax.ShapeDtypeStruct((config.batch_size, config.context_length), dtype,
                                            sharding=partitioning.batch)
  compiled = step.lower(targets, {"inputs": rows(jnp.int32), "targets": rows(jnp.int32),
                                  "weights": rows(jnp.float32)}).compile()
  num_bytes = collections.Counter()
  for arrays, operation in OPERATION.findall(compiled.as_text()):
    num_bytes[operation] += sum(4 * math.prod(int(size) for size in sizes.split(",") if size)
                                for _, sizes in ARRAY.findall(arrays))
  num_bytes["params"] = sum(leaf.size * 4 for leaf in jax.tree.leaves(targets.params))
  num_bytes["peak"] = peak_bytes(compiled)
  return {name: size / 1e6 for name, size in num_bytes.items()}


def _config(shape: tuple[int, int, int]):
  config = mix.get_config("paper").unlock()
  config.batch_size, config.context_length = 16, 128
  config.model.update(num_layers=2, features=256, mlp_features=1024, num_heads=8, dtype="float32",
                      scan_layers=False)
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = shape
  return freeze(config)


if __name__ == "__main__":
  main()
