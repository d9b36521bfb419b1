"""Placement: a (data, fsdp, tensor) device mesh and logical axis names mapped onto it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any, Optional

from flax import linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from damcha_jax.config import ConfigError, MeshConfig

PyTree = Any
LogicalRules = tuple[tuple[str, Any], ...]
AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


def make_mesh(config: MeshConfig, devices: Optional[Sequence[jax.Device]] = None) -> Mesh:
  """Arranges devices as `data x fsdp x tensor`; an axis of -1 takes what the others leave.

  Args:
    config: the axes' sizes.
    devices: by default all.

  Raises:
    ConfigError: the product of the axes is not the number of devices, or `tensor` would span
      processes (each process feeds whole rows of the batch to its own devices).
  """
  sizes = {axis: getattr(config, axis) for axis in AXES}
  devices = jax.devices() if devices is None else devices
  num_devices = len(devices)
  written = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
  if any(size < 1 and size != -1 for size in sizes.values()):
    raise ConfigError(f"mesh {written}: an axis is a positive number, or -1 for the devices left")
  free = [axis for axis, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(free) > 1:
    raise ConfigError(f"mesh {written}: only one axis may be -1")
  if num_devices % fixed or (not free and fixed != num_devices):
    raise ConfigError(
        f"mesh {written} needs {'a multiple of ' if free else ''}{fixed} devices and there are "
        f"{num_devices}; set one of mesh.data, mesh.fsdp, mesh.tensor to -1 or change the numbers")
  for axis in free:
    sizes[axis] = num_devices // fixed
  if jax.local_device_count() % sizes["tensor"]:
    raise ConfigError(f"mesh.tensor {sizes['tensor']} must divide the {jax.local_device_count()} "
                      "devices of one process; use mesh.fsdp across processes")
  # The default, Explicit, puts shardings into types, which Linen modules are not written for.
  return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES),
                       devices=devices)


def check_batch_size(batch_size: int, accumulation_steps: int, mesh: Mesh) -> None:
  """Raises `ConfigError` unless every device gets the same number of rows in every microbatch."""
  for name, value in (("batch_size", batch_size),
                      ("optimizer.accumulation_steps", accumulation_steps)):
    if value < 1:
      raise ConfigError(f"config key '{name}' is {value}; it must be at least 1")
  data, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
  unit = data * fsdp * accumulation_steps
  if batch_size % unit:
    nearest = max(1, round(batch_size / unit)) * unit
    raise ConfigError(
        f"batch_size {batch_size} is not a multiple of {unit} (mesh data {data} x fsdp {fsdp} x "
        f"optimizer.accumulation_steps {accumulation_steps}); use batch_size {nearest}, or change "
        "the mesh or the accumulation")


class Partitioning:
  """Where everything lives: a mesh plus the rules `logical axis name -> mesh axes`.

  Every sharding is explicit, with no mesh in the context: under one, Linen's `DenseGeneral`
  constrains its kernel while that is still flattened, and fails.
  """

  def __init__(self, mesh: Mesh, rules: LogicalRules):
    self.mesh = mesh
    self.rules = tuple((name, tuple(axes) if isinstance(axes, list) else axes)
                       for name, axes in rules)
    for name, axes in self.rules:
      for axis in jax.tree.leaves(axes):
        if axis not in AXES:
          raise ConfigError(f"logical_rules maps '{name}' to '{axis}', which is no mesh axis; use "
                            f"{', '.join(AXES)} or None")
    self.replicated = NamedSharding(mesh, PartitionSpec())
    self.batch = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    self.whole_batch = NamedSharding(mesh, PartitionSpec(None))  # all rows, on every device
    self.microbatches = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    self.batch_multiple = math.prod(mesh.shape[axis] for axis in BATCH_AXES)

  def shardings(self, boxed: PyTree) -> PyTree:
    """`NamedSharding` for every leaf of an abstract tree boxed by `nn.with_logical_partitioning`.

    Leaves without logical names are replicated.

    Raises:
      ConfigError: a logical name has no rule, or a dimension is not a multiple of its mesh axes.
    """
    def of_leaf(path, leaf):
      if not isinstance(leaf, nn.meta.AxisMetadata):
        return self.replicated
      return self._leaf_sharding(path_name(path), leaf.get_partition_spec(), leaf.value.shape)

    return jax.tree_util.tree_map_with_path(
        of_leaf, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))

  def _leaf_sharding(self, name: str, logical: PartitionSpec, shape: tuple[int, ...]):
    known = {rule for rule, _ in self.rules}
    for axis in logical:
      if axis is not None and axis not in known:
        raise ConfigError(f"parameter '{name}' has the logical axis '{axis}', for which "
                          f"logical_rules has no entry; add ('{axis}', None) to replicate it")
    spec = nn.logical_to_mesh_axes(tuple(logical), self.rules)
    for dimension, (size, axes) in enumerate(zip(shape, spec)):
      ways = math.prod(self.mesh.shape[axis] for axis in jax.tree.leaves(axes))
      if size % ways:
        raise ConfigError(
            f"parameter '{name}': dimension {dimension} ('{logical[dimension]}', size {size}) is "
            f"not a multiple of mesh {'*'.join(jax.tree.leaves(axes))} = {ways}; change the size "
            f"or the mesh, or map '{logical[dimension]}' to None in logical_rules")
    return NamedSharding(self.mesh, spec)

  def place_local_rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A global batch from the rows that each process made for itself."""
    return {key: jax.make_array_from_process_local_data(self.batch, rows)
            for key, rows in batch.items()}

  def place_global_rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A global batch from all its rows, present in every process."""
    return {key: jax.make_array_from_callback(rows.shape, self.batch, rows.__getitem__)
            for key, rows in batch.items()}


def path_name(path: tuple[Any, ...]) -> str:
  """A tree path as it is written in messages and parameter groups: `layers_0/value/kernel`."""
  return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
                  for key in path)
