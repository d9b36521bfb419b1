"""The train state and the random streams derived from (seed, name, step)."""

from __future__ import annotations

import math
from typing import Any
import zlib

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import optax

from damcha_jax.training.optimizer import averaged_params
from damcha_jax.training.sharding import Partitioning
from damcha_jax.training.task import Task

PyTree = Any


class TrainState(struct.PyTreeNode):
  """All that a checkpoint holds. Random streams are functions of the step, so none is kept.

  Attributes:
    step: completed updates.
    params: the model's parameters, unboxed.
    opt_state: the optimizer's state.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree


def root_key(seed: int, prng_impl: str) -> jax.Array:
  """The run's root key; the implementation is explicit because JAX's default may change."""
  return jax.random.key(seed, impl=prng_impl)


def stream_key(root: jax.Array, name: str, step: jax.Array | int) -> jax.Array:
  """The key of stream `name` at `step`. Streams are independent of each other and of restarts."""
  return jax.random.fold_in(jax.random.fold_in(root, zlib.crc32(name.encode())), step)


def abstract_state(task: Task, optimizer: optax.GradientTransformation,
                   root: jax.Array) -> TrainState:
  """Shapes of the train state, boxed with logical axis names (also on Adam's moments)."""
  return jax.eval_shape(lambda key: _initial_state(task, optimizer, key), root)


def sharded_targets(boxed: TrainState, partitioning: Partitioning) -> TrainState:
  """`ShapeDtypeStruct`s with shardings, the form in which checkpoints are restored."""
  return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
      nn.meta.unbox(boxed), partitioning.shardings(boxed))


def create_state(task: Task, optimizer: optax.GradientTransformation, root: jax.Array,
                 targets: TrainState) -> TrainState:
  """Initialises under jit with output shardings: no device ever holds the whole model."""
  init = jax.jit(lambda key: nn.meta.unbox(_initial_state(task, optimizer, key)),
                 out_shardings=jax.tree.map(lambda target: target.sharding, targets))
  return init(root)


def initial_params(task: Task, root: jax.Array) -> PyTree:
  """What a run with this root key starts from, boxed."""
  return task.init_params(stream_key(root, "params", 0))


def evaluated_params(state: TrainState) -> PyTree:
  """The averaged parameters, where the optimizer keeps them, else the parameters themselves."""
  averaged = averaged_params(state.opt_state)
  return state.params if averaged is None else averaged


def num_params(state: TrainState) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))


def _initial_state(task: Task, optimizer: optax.GradientTransformation,
                   root: jax.Array) -> TrainState:
  params = initial_params(task, root)
  return TrainState(step=jnp.zeros((), jnp.int32), params=params,
                    opt_state=optimizer.init(params))
