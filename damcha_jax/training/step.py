"""One update: token-weighted gradients over microbatches, then the optimizer, under one jit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from damcha_jax.attention.activations import sharded_like
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.sharding import Partitioning
from damcha_jax.training.task import Task

PyTree = Any
TrainStep = Callable[[state_lib.TrainState, PyTree], tuple[state_lib.TrainState, PyTree]]


def make_train_step(task: Task, optimizer: optax.GradientTransformation, schedule: optax.Schedule,
                    root: jax.Array, partitioning: Partitioning, targets: state_lib.TrainState,
                    accumulation_steps: int) -> TrainStep:
  """Returns the jitted `(state, batch) -> (state, metrics)`; it consumes (donates) the state.

  The minimised loss is `sum of losses / sum of weights` over the whole batch, however many
  microbatches it is cut into, so accumulation equals one large batch up to rounding.

  `metrics`: `sums` (the task's), `loss`, `grad_norm`, `learning_rate`, and `leaf_square_norms_L`,
  one number per parameter in tree order, from which a non-finite gradient's leaf is named.
  """
  shardings = jax.tree.map(lambda target: target.sharding, targets)

  def train_step(state, batch):
    key = state_lib.stream_key(root, "dropout", state.step)
    loss_sum, sums, grads = accumulate(task.loss_fn, state.params, batch, key, accumulation_steps,
                                       partitioning)
    grads = jax.tree.map(lambda grad: grad / sums["weight"].astype(grad.dtype), grads)
    grads = jax.lax.with_sharding_constraint(grads, shardings.params)
    squares = optimizer_lib.leaf_square_norms(grads, task.parameter_groups)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {
        "sums": sums,
        "loss": loss_sum / sums["weight"],
        "grad_norm": jnp.sqrt(sum(squares)),
        "learning_rate": schedule(state.step),
        "leaf_square_norms_L": jnp.stack(squares),
    }
    state = state.replace(step=state.step + 1, opt_state=opt_state,
                          params=optax.apply_updates(state.params, updates))
    return state, metrics

  return jax.jit(train_step, donate_argnums=0, in_shardings=(shardings, partitioning.batch),
                 out_shardings=(shardings, partitioning.replicated))


def accumulate(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, key: jax.Array,
               num_microbatches: int, partitioning: Partitioning) -> tuple[Any, PyTree, PyTree]:
  """`(loss_sum, sums, gradient of loss_sum)` of the batch, one microbatch in memory at a time."""
  value_and_grad = jax.value_and_grad(sharded_like(partitioning.batch, loss_fn), has_aux=True)
  if num_microbatches == 1:
    (loss_sum, sums), grads = value_and_grad(params, batch, key)
    return loss_sum, sums, grads

  def split(rows):
    # Every A-th row, rather than consecutive ones, keeps each device's rows on that device.
    micro = rows.reshape(rows.shape[0] // num_microbatches, num_microbatches, *rows.shape[1:])
    return jax.lax.with_sharding_constraint(micro.swapaxes(0, 1), partitioning.microbatches)

  def add(totals, indexed):
    index, microbatch = indexed
    (loss_sum, sums), grads = value_and_grad(params, microbatch, jax.random.fold_in(key, index))
    new = (loss_sum, sums, grads)
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, new), None

  microbatches = jax.tree.map(split, batch)
  first = jax.tree.map(lambda leaf: leaf[0], microbatches)
  (loss_shape, sums_shape), grads_shape = jax.eval_shape(value_and_grad, params, first, key)
  zeros = jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)),
      (loss_shape, sums_shape, grads_shape))
  totals, _ = jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), microbatches))
  return totals
