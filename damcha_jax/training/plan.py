"""What a run will need, from shapes alone: nothing is allocated and no data is read."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any, NamedTuple, Optional

import jax

from damcha_jax.analysis.complexity import peak_bytes
from damcha_jax.config import (ConfigError, DecoderConfig, for_any_device,
                               ImageClassificationConfig)
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.abstract import abstract_run
from damcha_jax.training.devices import DeviceKind, MFU_RANGE, USABLE_SHARE


class Plan(NamedTuple):
  """The needs of one run.

  Attributes:
    num_params: of the model.
    state_bytes: of parameters and optimizer state, one copy.
    state_bytes_per_device: what of it one device holds.
    params_bytes_per_device: what of the parameters one device holds; of gradients likewise.
    peak_bytes_per_device: of a whole step, if it was asked for: state, gradients, activations.
    flops_per_step: of the model, as MFU counts them.
    num_steps: updates.
  """

  num_params: int
  state_bytes: int
  state_bytes_per_device: int
  params_bytes_per_device: int
  peak_bytes_per_device: Optional[int]
  flops_per_step: int
  num_steps: int

  @property
  def activation_bytes_per_device(self) -> int:
    """What a step needs besides state and gradients."""
    return max(0, self.peak_bytes_per_device - self.state_bytes_per_device
               - self.params_bytes_per_device)

  def step_seconds(self, kind: DeviceKind, num_devices: int) -> tuple[float, float]:
    """The shortest and the longest step, at the ends of `MFU_RANGE`."""
    low, high = MFU_RANGE
    at_peak = self.flops_per_step / (kind.peak_flops * num_devices)
    return at_peak / high, at_peak / low


def plan_run(config: DecoderConfig | ImageClassificationConfig, attention: str,
             devices: Sequence[jax.Device], with_peak: bool = False) -> Plan:
  """The needs of one run of an experiment on these devices.

  The peak is that of the step which XLA compiles for them. Where CPU devices stand for others, it
  holds some bfloat16 numbers as float32 and forms every attention weight, so that accelerators,
  which fuse more, need less rather than more. So it is where attention's implementation is one that
  these devices lack: the plan is then 'auto''s.

  Args:
    config: the experiment.
    attention: the attention's name.
    devices: as many as the run will have, of whatever kind.
    with_peak: compile the step, which takes seconds, to tell the peak.

  Raises:
    ConfigError: the configuration cannot run on them.
  """
  mesh = sharding_lib.make_mesh(config.mesh, devices)
  update = abstract_run(for_any_device(config), attention, mesh)
  peak = None
  if with_peak:
    # Only the sizes of arrays matter, not how fast the program would be.
    options = {"xla_backend_optimization_level": 0}
    peak = peak_bytes(update.step.lower(update.targets, update.batch).compile(options))
  return Plan(state_lib.num_params(update.targets), _bytes(update.targets),
              _bytes(update.targets, per_device=True),
              _bytes(update.targets.params, per_device=True), peak, update.flops(),
              config.num_steps)


def check_fits(name: str, plan: Plan, kind: DeviceKind) -> None:
  """Raises `ConfigError` if a step's peak is more than a device of this kind has to use."""
  if plan.peak_bytes_per_device <= kind.usable_bytes:
    return
  parts = {"parameters, gradients and optimizer state":
               plan.state_bytes_per_device + plan.params_bytes_per_device,
           "activations": plan.activation_bytes_per_device}
  largest = max(parts, key=parts.get)
  remedy = ("model.remat=True, a larger optimizer.accumulation_steps, or more devices"
            if largest == "activations" else "a larger mesh.fsdp, or more devices with it")
  gib = lambda num_bytes: f"{num_bytes / 2**30:.1f} GiB"
  raise ConfigError(
      f"{name} needs {gib(plan.peak_bytes_per_device)} on each device, {gib(parts[largest])} of it "
      f"for {largest}, and {kind.name} has {gib(kind.usable_bytes)} ({USABLE_SHARE:.0%} of "
      f"{kind.memory_gib:g}); use {remedy}")


def _bytes(tree: Any, per_device: bool = False) -> int:
  return sum(leaf.dtype.itemsize * math.prod(
      leaf.sharding.shard_shape(leaf.shape) if per_device else leaf.shape)
             for leaf in jax.tree.leaves(tree))
