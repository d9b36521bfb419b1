"""What train steps of paper size exchange, compiled for CPU devices that are not there; none runs.

To renew the golden after a change that is meant:

  XLA_FLAGS=--xla_force_host_platform_device_count=256 PYTHONPATH=. JAX_PLATFORMS=cpu \
    python tests/sharding/forced_devices.py > tests/sharding/collectives.json

The partitioning is that for CPUs: it has bfloat16 sent as float32, and sums the gradient of the
generator, which all layers share, in every layer; accelerators' compilers can sum it after the loop.
"""

from __future__ import annotations

import json
import math
import sys

import jax

from configs import cifar10, mix
from damcha_jax.analysis.collectives import exchanges
from damcha_jax.config import freeze, ImageGenerationConfig, LanguageModelConfig, MeshConfig
from damcha_jax.training.abstract import abstract_run
from damcha_jax.training.sharding import make_mesh

CONFIGS = {"mix": (mix, LanguageModelConfig), "cifar10": (cifar10, ImageGenerationConfig)}
# Config, attention, mesh (data, fsdp, tensor).
CASES = [
    *(("mix", attention, mesh) for attention in ("mha", "damcha")
      for mesh in ((8, 1, 1), (1, 8, 1), (32, 8, 1))),
    ("mix", "damcha", (4, 1, 2)),
    ("cifar10", "damcha", (1, 8, 1)),
    ("cifar10", "damcha", (32, 8, 1)),
]


def main() -> None:
  json.dump({_name(*case): _exchanged(*case) for case in CASES}, sys.stdout, indent=1)
  print()


def _name(config: str, attention: str, shape: tuple[int, int, int]) -> str:
  return f"{config} {attention} {'x'.join(map(str, shape))}"


def _exchanged(name: str, attention: str, shape: tuple[int, int, int]) -> dict[str, object]:
  module, cls = CONFIGS[name]
  config = module.get_config().unlock()
  config.batch_size = max(64, math.prod(shape))
  mesh = make_mesh(MeshConfig(*shape), jax.devices()[:math.prod(shape)])
  update = abstract_run(freeze(config, cls), attention, mesh)
  compiled = update.step.lower(update.targets, update.batch).compile()
  leaves = jax.tree.leaves(update.targets)
  whole = sum(math.prod(leaf.shape) for leaf in leaves)
  held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
  return {"params_bytes": sum(4 * leaf.size for leaf in jax.tree.leaves(update.targets.params)),
          "state_share": round(held / whole, 4),  # of the train state, on one device
          **{kind: one._asdict() for kind, one in sorted(exchanges(compiled).items())}}


if __name__ == "__main__":
  main()
