"""What a run will need, from shapes alone: nothing is allocated and no data is read."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.config import DecoderConfig
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.decoder import decoder_task
from damcha_jax.training.flops import model_flops_per_step


class Plan(NamedTuple):
  """The needs of one run.

  Attributes:
    num_params: of the model.
    state_bytes: of parameters and optimizer state, one copy.
    state_bytes_per_device: what of it one device holds; activations come on top.
    flops_per_step: of the model, as MFU counts them.
    num_steps: updates.
  """

  num_params: int
  state_bytes: int
  state_bytes_per_device: int
  flops_per_step: int
  num_steps: int


def plan_decoder(config: DecoderConfig, attention: str, devices: Sequence[jax.Device]) -> Plan:
  """The needs of one run of a decoder experiment on these devices.

  Raises:
    ConfigError: the configuration cannot run on them.
  """
  mesh = sharding_lib.make_mesh(config.mesh, devices)
  sharding_lib.check_batch_size(config.batch_size, config.optimizer.accumulation_steps, mesh)
  # What a plan asks of a task needs no data.
  task = decoder_task(config, attention, train_source=None, eval_sources={}, metrics_of=dict,
                      probe={})
  optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps,
                                           task.parameter_groups)
  boxed = state_lib.abstract_state(task, optimizer, jax.eval_shape(
      lambda: state_lib.root_key(0, config.prng_impl)))
  targets = state_lib.sharded_targets(boxed, sharding_lib.Partitioning(mesh, config.logical_rules))
  shape = (config.batch_size, config.context_length)
  batch = {"inputs": jax.ShapeDtypeStruct(shape, jnp.int32),
           "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
           "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}
  return Plan(state_lib.num_params(targets), _bytes(targets),
              _bytes(targets, per_device=True),
              model_flops_per_step(task, nn.unbox(boxed.params), batch), config.num_steps)


def _bytes(tree: Any, per_device: bool = False) -> int:
  return sum(leaf.dtype.itemsize * math.prod(
      leaf.sharding.shard_shape(leaf.shape) if per_device else leaf.shape)
             for leaf in jax.tree.leaves(tree))
