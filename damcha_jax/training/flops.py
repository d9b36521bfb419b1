"""Model FLOPs counted in the traced program, and what devices can do, for the MFU."""

from __future__ import annotations

from typing import Any, Optional

import jax

from damcha_jax.analysis.complexity import matmul_flops, trace
from damcha_jax.training.task import Task

# Dense bfloat16 FLOP/s per device from the makers' data sheets, by `device_kind`.
_PEAK_FLOPS = {
    "TPU v2": 22.5e12,  # a JAX device is one of a chip's two cores up to v3
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device: jax.Device) -> Optional[float]:
  """The device's peak, or None where it is not known (a CPU, for one)."""
  kind = device.device_kind
  if device.platform == "gpu":  # 'NVIDIA A100-SXM4-40GB', but not 'NVIDIA L40' for 'NVIDIA L4'
    kind = " ".join(kind.replace("-", " ").split()[:2])
  return _PEAK_FLOPS.get(kind)


def peak_flops_of(device_kind: str) -> float:
  """The peak of a kind that is in the table."""
  return _PEAK_FLOPS[device_kind]


def model_flops_per_step(task: Task, params: Any, batch: Any) -> int:
  """3 times the matrix-product FLOPs of the forward pass over one batch.

  The backward pass has two products for each forward one. Rematerialised products do not count
  (MFU is about the model, not about the hardware's work), nor does anything elementwise.
  """
  return 3 * matmul_flops(trace(lambda params, batch: task.loss_fn(params, batch, None),
                                params, batch))
