"""What every attention of an experiment needs, without allocating anything or reading data.

  python -m experiments.plan --config=configs/cifar10.py --devices=v5e-64
  python -m experiments.plan --config=configs/cifar10.py --num_devices=8

With a kind of device (see `damcha_jax.training.devices`): the memory that a step takes on each,
how long steps and the run may take, and, with exit status 2, what does not fit, and a remedy.
Each model's step is compiled for that, with attention weights made whole or in chunks, which takes
up to a minute; a fused kernel needs less memory. With a number alone: parameters, the memory of
parameters and optimizer state on each device, and the model's FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import sys
from typing import NamedTuple, Optional

from absl import flags
import jax

from damcha_jax.config import (AblationsConfig, ConfigError, DecoderConfig, freeze,
                               ImageClassificationConfig)
from damcha_jax.training.devices import (DeviceKind, KINDS, MFU_RANGE, MOST_DEVICES,
                                         parse_devices)
from damcha_jax.training.plan import check_fits, Plan, plan_run
from damcha_jax.training.sharding import make_mesh
from damcha_jax.training.writer import format_duration
from experiments import command_line
from experiments import common

RunConfig = DecoderConfig | ImageClassificationConfig


# Whose devices run the kernels of `model.attention_implementation`, by the kinds' names in JAX.
_KERNELS_OF = {"pallas": "TPU", "cudnn": "NVIDIA"}


class Devices(NamedTuple):
  """What is asked about; without a kind, of any."""

  number: int
  kind: Optional[DeviceKind]


def main(argv: Sequence[str]) -> None:
  config, devices = parse(argv)
  models = _models(config)
  if devices.kind is not None:
    _check_kernels(models, devices.kind)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices.number)
  mesh = make_mesh(next(iter(models.values()))[0].mesh, jax.devices())
  print(f"{config.name}:{config.size} on {devices.number} device{'s' * (devices.number > 1)}, mesh "
        + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()))
  if devices.kind is not None:
    print(f"{devices.kind.name}: {devices.kind.memory_gib:g} GiB and "
          f"{devices.kind.peak_flops / 1e12:g} TFLOP/s each; times at "
          f"{MFU_RANGE[1]:.0%} to {MFU_RANGE[0]:.0%} of that, assumed")
  else:
    print("state: parameters and optimizer, in all and on a device; --devices, such as "
          "--devices=v5e-8, tells what a whole step needs and how long it may take")
  columns = _columns(devices)
  print(f"{'attention':20}" + "".join(f"{title:>{width}}" for title, (width, _) in columns.items()),
        flush=True)
  plans = {}
  for number, (name, (own, attention)) in enumerate(models.items(), start=1):
    if devices.kind is not None:
      common.note(f"{name}, {number} of {len(models)}: compiling a step")
    plans[name] = plan = plan_run(own, attention, jax.devices(), devices.kind is not None)
    print(f"{name:20}" + "".join(f"{show(plan):>{width}}" for width, show in columns.values()),
          flush=True)
  if devices.kind is not None:
    for line in (*_about_kernels(models, devices.kind), *_about_activations(models)):
      print(line)
    check_fits(*max(plans.items(), key=lambda item: item[1].peak_bytes_per_device), devices.kind)


def _columns(devices: Devices) -> dict[str, tuple[int, Callable[[Plan], str]]]:
  """Width and contents of each column of the table."""
  flops = {"FLOP/step": (12, lambda plan: f"{plan.flops_per_step:.3e}"),
           "FLOP/run": (12, lambda plan: f"{plan.flops_per_step * plan.num_steps:.3e}")}
  params = {"parameters": (14, lambda plan: f"{plan.num_params:,}")}
  if devices.kind is None:
    return {**params, "state": (10, lambda plan: _readable(plan.state_bytes)),
            "a device": (10, lambda plan: _readable(plan.state_bytes_per_device)), **flops}
  times = lambda plan: plan.step_seconds(devices.kind, devices.number)
  span = lambda plan, factor, show: " to ".join(show(factor * time) for time in times(plan))
  of_device = {
      "weights": lambda plan: plan.params_bytes_per_device,
      "gradients": lambda plan: plan.params_bytes_per_device,
      "optimizer": lambda plan: plan.state_bytes_per_device - plan.params_bytes_per_device,
      "activations": lambda plan: plan.activation_bytes_per_device,
      "in all": lambda plan: plan.peak_bytes_per_device,
  }
  return {
      **params,
      **{title: (14, lambda plan, size=size: _readable(size(plan)))
         for title, size in of_device.items()}, **flops,
      "ms/step": (22, lambda plan: span(plan, 1e3, "{:.3g}".format)),
      "run": (20, lambda plan: span(plan, plan.num_steps, format_duration)),
  }


def _check_kernels(models: dict[str, tuple[RunConfig, str]], kind: DeviceKind) -> None:
  """Raises `ConfigError` for attention of an implementation that devices of this kind lack."""
  for name, (config, _) in models.items():
    asked = config.model.attention_implementation
    maker = _KERNELS_OF.get(asked)
    if maker and not kind.device_kind.startswith(maker):
      raise ConfigError(f"{name}: model.attention_implementation='{asked}' is for {maker}s, not for "
                        f"{kind.name}; use 'auto'")


def _about_kernels(models: dict[str, tuple[RunConfig, str]], kind: DeviceKind) -> Iterator[str]:
  """That memory is planned without a fused kernel which is asked for."""
  names = [name for name, (config, _) in models.items()
           if config.model.attention_implementation in _KERNELS_OF]
  if names:
    yield (f"{', '.join(names)}: the kernel that {kind.name} would run needs less for activations "
           "than is planned here, where attention weights are made")


def _about_activations(models: dict[str, tuple[RunConfig, str]]) -> Iterator[str]:
  """Why those of some models are fewer."""
  in_chunks: dict[int, list[str]] = {}
  for name, (config, attention) in models.items():
    chunk = getattr(getattr(config, attention, None), "query_chunk", None)
    if chunk and isinstance(config, DecoderConfig) and chunk < config.context_length:
      in_chunks.setdefault(chunk, []).append(name)
  for chunk, names in in_chunks.items():
    yield (f"{', '.join(names)}: attention weights are made for {chunk} queries at a time, and "
           "again in the backward pass (query_chunk), so activations hold no layer's weights "
           "whole; those of other attentions do here, at most: accelerators' fused kernels need less")


def _models(config: RunConfig | AblationsConfig) -> dict[str, tuple[RunConfig, str]]:
  """Config and attention of every model, by its name."""
  if isinstance(config, AblationsConfig):
    return {f"{dataset}/{variant}": (config.family_config(dataset, variant), "damcha")
            for dataset in config.dataset_names for variant in config.variant_names}
  return {attention: (config, attention) for attention in config.attention_names}


def parse(argv: Sequence[str]) -> tuple[RunConfig | AblationsConfig, Devices]:
  """The frozen config and the devices.

  Raises:
    ConfigError: the command line cannot be understood, or its experiment has no plan.
  """
  values = flags.FlagValues()
  devices = flags.DEFINE_string(
      "devices", None, "kind and number of devices, such as v5e-64, of one of "
      f"{', '.join(KINDS)}: tells what a whole step needs on each", flag_values=values)
  num_devices = flags.DEFINE_integer(
      "num_devices", None, "their number alone, by default 1", flag_values=values, lower_bound=1,
      upper_bound=MOST_DEVICES)
  config, _ = command_line.parse(argv, values=values)
  if config.experiment not in common.CONFIG_CLASSES:
    raise ConfigError(f"experiment '{config.experiment}' has no plan; there are plans for "
                      f"{', '.join(common.CONFIG_CLASSES)}")
  kind, number = None, num_devices.value or 1
  if devices.value is not None:
    if num_devices.value is not None:
      raise ConfigError("--devices names a number of devices; leave out --num_devices")
    kind, number = parse_devices(devices.value)
  return freeze(config, common.CONFIG_CLASSES[config.experiment]), Devices(number, kind)


def _readable(num_bytes: int) -> str:
  for unit in ("KiB", "MiB"):
    num_bytes /= 1024
    if num_bytes < 1000:
      return f"{num_bytes:.1f} {unit}"
  return f"{num_bytes / 1024:.2f} GiB"


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
