"""What every attention of an experiment needs, without allocating anything or reading data.

  python -m experiments.plan --config=configs/cifar10.py --num_devices=8

Parameters, the memory of parameters and optimizer state on each device (activations come on top),
and the model's FLOPs, for as many devices of whatever kind as are asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import sys

import jax

from damcha_jax.config import AblationsConfig, ConfigError, DecoderConfig, freeze
from damcha_jax.training.plan import plan_decoder
from damcha_jax.training.sharding import make_mesh
from experiments import common


def main(argv: Sequence[str]) -> None:
  config, num_devices = parse(argv)
  models = _models(config)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", num_devices)
  mesh = make_mesh(next(iter(models.values()))[0].mesh, jax.devices())
  print(f"{config.name}:{config.size} on {num_devices} device{'s' * (num_devices > 1)}, mesh "
        + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()))
  print(f"{'attention':20}{'parameters':>14}{'state':>10}{'a device':>10}{'FLOP/step':>12}"
        f"{'FLOP/run':>12}")
  for name, (own, attention) in models.items():
    plan = plan_decoder(own, attention, jax.devices())
    print(f"{name:20}{plan.num_params:14,}{_readable(plan.state_bytes):>10}"
          f"{_readable(plan.state_bytes_per_device):>10}{plan.flops_per_step:12.3e}"
          f"{plan.flops_per_step * plan.num_steps:12.3e}", flush=True)


def _models(config: DecoderConfig | AblationsConfig) -> dict[str, tuple[DecoderConfig, str]]:
  """Config and attention of every model, by its name."""
  if isinstance(config, AblationsConfig):
    return {f"{dataset}/{variant}": (config.family_config(dataset, variant), "damcha")
            for dataset in config.dataset_names for variant in config.variant_names}
  return {attention: (config, attention) for attention in config.attention_names}


def parse(argv: Sequence[str]) -> tuple[DecoderConfig | AblationsConfig, int]:
  """The frozen config and the number of devices.

  Raises:
    ConfigError: the command line cannot be understood, or its experiment has no plan.
  """
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument("--num_devices", type=int, default=1)
  options, rest = parser.parse_known_args(argv)
  config, _ = common.parse(rest)
  if config.experiment not in common.CONFIG_CLASSES:
    raise ConfigError(f"experiment '{config.experiment}' trains no decoder; plans are for "
                      f"{', '.join(common.CONFIG_CLASSES)}")
  return freeze(config, common.CONFIG_CLASSES[config.experiment]), options.num_devices


def _readable(num_bytes: int) -> str:
  for unit in ("KiB", "MiB"):
    num_bytes /= 1024
    if num_bytes < 1000:
      return f"{num_bytes:.1f} {unit}"
  return f"{num_bytes / 1024:.2f} GiB"


if __name__ == "__main__":
  with common.user_errors():
    main(sys.argv)
