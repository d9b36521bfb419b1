"""The jitted update: accumulation, weighting, donation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.step import make_train_step
from tiny_task import RULES, TinyConfig, tiny_task


@functools.cache
def _compiled(accumulation_steps, dropout_rate=0.0):
  config = TinyConfig()
  task = tiny_task(batch_size=24, dropout_rate=dropout_rate)
  partitioning = sharding_lib.Partitioning(sharding_lib.make_mesh(config.mesh), RULES)
  optimizer = optimizer_lib.make_optimizer(config.optimizer, 10, task.parameter_groups)
  root = state_lib.root_key(0, config.prng_impl)
  targets = state_lib.sharded_targets(state_lib.abstract_state(task, optimizer, root), partitioning)
  state = jax.device_get(state_lib.create_state(task, optimizer, root, targets))
  schedule = optimizer_lib.learning_rate_schedule(config.optimizer, 10)
  step = make_train_step(task, optimizer, schedule, root, partitioning, targets,
                         accumulation_steps)
  batch = partitioning.place_local_rows(task.train_source.batch_at(0))
  return task, state, step, batch


def _setup(accumulation_steps, dropout_rate=0.0):
  """The task, a fresh state, the step and a batch."""
  task, state, step, batch = _compiled(accumulation_steps, dropout_rate)
  return task, jax.tree.map(jnp.array, state), step, batch


def test_accumulation_equals_one_large_batch():
  params, losses = [], []
  for accumulation_steps in (1, 8):
    _, state, step, batch = _setup(accumulation_steps)
    for _ in range(3):
      state, metrics = step(state, batch)
    params.append(jax.device_get(state.params))
    losses.append(float(metrics["loss"]))
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *params)


def test_the_loss_is_the_sum_over_the_weight_of_the_whole_batch():
  task, state, step, batch = _setup(8)
  params = jax.device_get(state.params)
  (loss_sum, sums), grads = jax.jit(jax.value_and_grad(
      lambda params: task.loss_fn(params, batch, None), has_aux=True))(params)
  state, metrics = step(state, batch)
  np.testing.assert_allclose(metrics["loss"], loss_sum / sums["weight"], rtol=1e-6)
  np.testing.assert_allclose(metrics["sums"]["weight"], np.sum(batch["weights"]))
  squares = [np.sum(np.square(grad / sums["weight"])) for grad in jax.tree.leaves(grads)]
  np.testing.assert_allclose(metrics["leaf_square_norms_L"], squares, rtol=1e-4)
  np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)
  assert int(state.step) == 1


def test_the_state_is_donated():
  _, state, step, batch = _setup(1)
  old = jax.tree.leaves(state.params)
  step(state, batch)
  assert all(leaf.is_deleted() for leaf in old)


def test_streams_differ_by_name_step_seed_and_microbatch():
  keys = [state_lib.stream_key(state_lib.root_key(seed, "threefry2x32"), name, step)
          for seed in (0, 1) for name in ("dropout", "params") for step in (0, 1)]
  assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 8


def test_dropout_is_drawn_anew_at_every_step():
  _, state, step, batch = _setup(1, dropout_rate=0.5)
  losses = []
  for index in range(2):
    fresh = jax.tree.map(jnp.array, jax.device_get(state)).replace(step=jnp.int32(index))
    losses.append(float(step(fresh, batch)[1]["loss"]))
  assert losses[0] != losses[1]


def test_the_prng_implementation_is_the_configured_one():
  key = state_lib.root_key(0, "rbg")
  assert jax.random.key_impl(state_lib.stream_key(key, "dropout", 3)) == "rbg"
