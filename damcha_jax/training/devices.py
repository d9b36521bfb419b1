"""Accelerators by name: what a run may use of them, for plans made where there are none.

Memory is what the makers' pages state for one JAX device: cloud.google.com/tpu/docs (v4, v5e, v5p,
v6e; a chip is a device), and NVIDIA's data sheets of A100 (40 and 80 GB SXM), H100 SXM, H200 and
L4. Peaks are those of `flops`, from the same pages.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from damcha_jax.config import ConfigError
from damcha_jax.training.flops import peak_flops_of

# The rest is for the runtime, for other programs and for gaps between arrays.
USABLE_SHARE = 0.9
# Of the peak, as whole runs of Transformers report it; assumed, since nothing is measured. Small
# models and few rows on each device are at its lower end or below.
MFU_RANGE = (0.15, 0.5)
# A plan makes a CPU device with threads of its own for each, which takes 0.3 MB and milliseconds;
# tens of thousands exceed what a process may have.
MOST_DEVICES = 4096


class DeviceKind(NamedTuple):
  """One accelerator.

  Attributes:
    name: as it is asked for.
    device_kind: as JAX calls it, or its beginning.
    memory_gib: memory in GiB.
  """

  name: str
  device_kind: str
  memory_gib: float

  @property
  def usable_bytes(self) -> float:
    return USABLE_SHARE * self.memory_gib * 2**30

  @property
  def peak_flops(self) -> float:
    """Dense bfloat16 FLOP/s."""
    return peak_flops_of(self.device_kind)


KINDS = {kind.name: kind for kind in (
    DeviceKind("v4", "TPU v4", 32),
    DeviceKind("v5e", "TPU v5e", 16),
    DeviceKind("v5p", "TPU v5p", 95),
    DeviceKind("v6e", "TPU v6e", 32),
    DeviceKind("a100", "NVIDIA A100", 40),
    DeviceKind("a100_80gb", "NVIDIA A100", 80),
    DeviceKind("h100", "NVIDIA H100", 80),
    DeviceKind("h200", "NVIDIA H200", 141),
    DeviceKind("l4", "NVIDIA L4", 24),
)}


def parse_devices(text: str) -> tuple[DeviceKind, int]:
  """'v5e-64' -> 64 devices of kind v5e. Cloud TPU's own names of v4 and v5p count two a device.

  Raises:
    ConfigError: the kind is unknown, there is no number, or it is more than `MOST_DEVICES`.
  """
  name, dash, number = text.rpartition("-")
  if not dash or not re.fullmatch(r"[1-9][0-9]*", number):
    raise ConfigError(f"--devices={text} is no kind and number of devices, such as v5e-64")
  if name not in KINDS:
    raise ConfigError(f"--devices={text}: unknown kind '{name}'; choose from {', '.join(KINDS)}")
  if int(number) > MOST_DEVICES:
    raise ConfigError(f"--devices={text}: a plan is for at most {MOST_DEVICES} devices")
  return KINDS[name], int(number)
