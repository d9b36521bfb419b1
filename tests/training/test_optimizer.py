"""AdamW's groups, schedule and clipping, and the rules that make `rowsum` train like `blocks`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from damcha_jax.analysis.geometry import block_drift, stored_blocks
from damcha_jax.config import ConfigError
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training.task import ParameterGroup
from tiny_task import TinyConfig

CONFIG = TinyConfig().optimizer
NUM_HEADS, FEATURES = 4, 8


def test_schedule_warms_up_and_ends_at_the_end_value():
  config = dataclasses.replace(CONFIG, learning_rate=2.0, end_learning_rate_factor=0.25,
                               warmup_steps=4)
  schedule = optimizer_lib.learning_rate_schedule(config, num_steps=13)
  rates = [float(schedule(count)) for count in range(13)]
  np.testing.assert_allclose(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0])
  np.testing.assert_allclose(rates[8], 0.5 * (2.0 + 0.5))  # half way down the cosine
  np.testing.assert_allclose(rates[12], 0.5)
  assert all(a > b for a, b in zip(rates[4:], rates[5:]))


def test_equals_optax_adamw_where_there_is_one_group():
  """Two groups, one decayed: optax.adamw with a mask, clipping before it."""
  config = dataclasses.replace(CONFIG, warmup_steps=0, end_learning_rate_factor=1.0)
  groups = (ParameterGroup("bias$", decay=False), ParameterGroup("kernel$", decay=True))
  params = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
  ours = optimizer_lib.make_optimizer(config, 10, groups)
  theirs = optax.chain(
      optax.clip_by_global_norm(config.clip_norm),
      optax.adamw(config.learning_rate, config.b1, config.b2, config.eps,
                  weight_decay=config.weight_decay, mask={"kernel": True, "bias": False}))
  results = []
  for optimizer in (ours, theirs):
    current, state = params, optimizer.init(params)
    for step in range(5):
      grads = jax.tree.map(lambda leaf: jnp.sin(leaf + step) * 3, current)
      updates, state = optimizer.update(grads, state, current)
      current = optax.apply_updates(current, updates)
    results.append(current)
  for name in params:
    np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-6)


def test_averaged_parameters_follow_the_updates_and_change_none():
  groups, params = (ParameterGroup("kernel$", decay=True),), {"kernel": jnp.arange(4.0)}
  plain = optimizer_lib.make_optimizer(CONFIG, 10, groups)
  averaging = optimizer_lib.make_optimizer(CONFIG, 10, groups, ema_decay=0.8)
  states, expected = [plain.init(params), averaging.init(params)], np.arange(4.0)
  assert optimizer_lib.averaged_params(states[0]) is None
  for step in range(4):
    grads = {"kernel": jnp.cos(params["kernel"] + step)}
    updates, states[0] = plain.update(grads, states[0], params)
    same, states[1] = averaging.update(grads, states[1], params)
    np.testing.assert_array_equal(same["kernel"], updates["kernel"])
    params = optax.apply_updates(params, updates)
    expected = 0.8 * expected + 0.2 * np.asarray(params["kernel"])
    np.testing.assert_allclose(optimizer_lib.averaged_params(states[1])["kernel"], expected,
                               rtol=1e-6)


def test_every_parameter_must_be_in_a_group():
  groups = (ParameterGroup("bias$", decay=False),)
  optimizer_lib.check_groups({"a": {"bias": 0}}, groups)
  with pytest.raises(ConfigError, match="parameter 'a/kernel' is in no parameter group"):
    optimizer_lib.check_groups({"a": {"kernel": 0}}, groups)


def _train(parameterization, convert, copies, num_steps=200):
  """Trains a generator and a plain kernel beside it on the same data; returns the history of m."""
  generator = MetricGenerator(NUM_HEADS, widths=(5,), parameterization=parameterization,
                              param_dtype=jnp.float64, dtype=jnp.float64)
  contexts = np.random.default_rng(0).normal(size=(num_steps, 3, FEATURES))
  blocks = MetricGenerator(NUM_HEADS, widths=(5,), parameterization="blocks",
                           param_dtype=jnp.float64, dtype=jnp.float64)
  params = blocks.init(jax.random.key(0), contexts[0])["params"]
  params = {"generator": convert(params), "mix": {"kernel": jnp.ones((2, 2))}}
  groups = (
      ParameterGroup("generator/out_kernel$", decay=True, copies=copies),
      ParameterGroup("generator/out_bias$", decay=False, copies=copies),
      ParameterGroup("bias$", decay=False),
      ParameterGroup("kernel$", decay=True))
  config = dataclasses.replace(CONFIG, learning_rate=1e-2, weight_decay=0.3, clip_norm=0.5)
  optimizer = optimizer_lib.make_optimizer(config, num_steps, groups)

  def loss_fn(params, contexts_BD):
    metrics = generator.apply({"params": params["generator"]}, contexts_BD)
    pairs = metrics.reshape(3, -1, 2) @ params["mix"]["kernel"]
    return jnp.mean(jnp.square(jnp.sin(2 * pairs) - 0.7)) * 20

  @jax.jit
  def run(params):
    def step(carry, contexts_BD):
      params, state = carry
      grads = jax.grad(loss_fn)(params, contexts_BD)
      norm = optimizer_lib.global_norm(grads, groups)
      updates, state = optimizer.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (norm, generator.apply({"params": params["generator"]}, contexts_BD))
    return jax.lax.scan(step, (params, optimizer.init(params)), contexts)[1]

  return run(params)


def _summed(params):
  return {**params, "out_kernel": params["out_kernel"].sum(-2),
          "out_bias": params["out_bias"].sum(-2)}


def test_rowsum_trains_exactly_like_blocks():
  """200 Adam steps in float64, with clipping active at times and weight decay."""
  with jax.enable_x64(True):
    norms, blocks = _train("blocks", lambda params: params, copies=1)
    rowsum_norms, rowsum = _train("rowsum", _summed, copies=NUM_HEADS)
    _, naive = _train("rowsum", _summed, copies=1)
    assert 0.1 < np.mean(np.asarray(norms) > 0.5) < 1.0  # the clip is sometimes active
    np.testing.assert_allclose(rowsum_norms, norms, rtol=1e-7)
    np.testing.assert_allclose(rowsum, blocks, rtol=1e-7, atol=1e-7)
    assert np.abs(np.asarray(naive) - blocks).max() > 1e-2  # what the rules prevent


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adam_moves_all_blocks_of_a_row_by_one_step_and_decay_does_not(weight_decay):
  """Moments are equal bit for bit; what is left between the blocks is the rounding of the sum."""
  generator = MetricGenerator(NUM_HEADS, widths=(5,), parameterization="blocks")
  contexts_SBD = jax.random.normal(jax.random.key(1), (100, 3, FEATURES))
  initial = generator.init(jax.random.key(0), contexts_SBD[0])["params"]
  groups = (ParameterGroup("out_kernel$", decay=True), ParameterGroup("", decay=False))
  config = dataclasses.replace(CONFIG, learning_rate=1e-2, weight_decay=weight_decay, clip_norm=0.5)
  optimizer = optimizer_lib.make_optimizer(config, len(contexts_SBD), groups)

  @jax.jit
  def step(params, state, contexts_BD):
    grads = jax.grad(lambda params: jnp.mean(
        jnp.sin(2 * generator.apply({"params": params}, contexts_BD))) * 20)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, state = initial, optimizer.init(initial)
  for contexts_BD in contexts_SBD:
    params, state = step(params, state, contexts_BD)
  adam = next(part for part in state if isinstance(part, optax.ScaleByAdamState))
  for moment in (adam.mu, adam.nu):
    kernel = np.asarray(moment["out_kernel"])
    assert np.abs(kernel).max() > 0 and (kernel == kernel[..., :1, :]).all()
  drift = block_drift(stored_blocks(initial), stored_blocks(params))
  assert drift["block_drift"] > 0.05
  if weight_decay:
    assert drift["block_spread"] > 1e-3
  else:
    assert 0 < drift["block_spread_max"] < 1e-5 * drift["block_drift"]
