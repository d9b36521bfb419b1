"""Compiles a train step for meshes of eight forced CPU devices and prints what they exchange.

`python eight_devices_collectives.py` prints, as JSON, megabytes by mesh, attention and collective
operation, those of the parameters under 'params', and the program's peak under 'peak'.
"""

from __future__ import annotations

import json
import sys

import jax

from configs import mix
from damcha_jax.analysis.collectives import exchanges
from damcha_jax.analysis.complexity import peak_bytes
from damcha_jax.config import freeze
from damcha_jax.training.abstract import abstract_run
from damcha_jax.training.sharding import make_mesh

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1)}


def main() -> None:
  json.dump({name: {attention: _exchanged(attention, shape) for attention in ("mha", "damcha")}
             for name, shape in MESHES.items()}, sys.stdout)


def _exchanged(attention: str, shape: tuple[int, int, int]) -> dict[str, float]:
  config = _config(shape)
  update = abstract_run(config, attention, make_mesh(config.mesh, jax.devices()))
  compiled = update.step.lower(update.targets, update.batch).compile()
  num_bytes = {kind: one.num_bytes for kind, one in exchanges(compiled).items()}
  num_bytes["params"] = sum(leaf.size * 4 for leaf in jax.tree.leaves(update.targets.params))
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
