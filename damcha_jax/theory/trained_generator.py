"""A metric generator that learns the metrics of Appendix C.2's contexts from scores of tokens.

Assumption 4 lets a metric depend on the context, C = q(X). The generator does not read X but the
mean of its tokens, so what it can adapt to is what shows in that mean: here a first token, which
is not scored, marks the context, and its size is how much shows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from damcha_jax.metric.context import Contexts
from damcha_jax.metric.context import sequence_context
from damcha_jax.metric.application import apply_metric
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.theory.metric_risk import context_excess
from damcha_jax.theory.metric_risk import Problem

Array = jax.Array


class Training(NamedTuple):
  """How a generator is trained."""

  length: int  # scored tokens of a sequence
  noise: float  # standard deviation of the scores that it learns from
  widths: tuple[int, ...]  # hidden widths of the generator
  num_steps: int
  batch_size: int
  learning_rate: float  # at the first update; it falls to zero along a cosine


class Excess(NamedTuple):
  """A mean over held-out sequences, and its standard error."""

  mean: float
  standard_error: float


class _World(NamedTuple):
  log_prior_C: Array
  metric_CHDD: Array
  root_CDD: Array  # S = root root^T
  marker_CD: Array


class _Sequences(NamedTuple):
  context_B: Array
  x_BTD: Array
  contexts: Contexts  # of the marker and the tokens


def trained_excess(
    problem: Problem, signal: float, training: Training, num_held_out: int, seed: int
) -> Excess:
  """The excess risk sum_c pi_c E[r_c(g(X)) - r_c(M*_c) | c] of a generator g trained on samples.

  It minimises 1/2 sum_i mean_{t != s} (x_t^T m_i(X) x_s - score_its)^2 by Adam, with sequences that
  are drawn anew for every update. The risk of each held-out sequence's metrics is in closed form
  (`metric_risk`), that of a new pair of tokens.

  Args:
    problem: the contexts.
    signal: what the marker adds to each entry of the mean, in standard deviations of the mean of
      white tokens; with 0 and S_c the same in all contexts the mean says nothing about them.
    training: how the generator learns.
    num_held_out: sequences that the risk is averaged over.
    seed: of markers, initial values and samples.
  """
  world = _world(problem, signal, training.length, seed)
  num_heads, features = problem.metric_CHDD.shape[1:3]
  generator = MetricGenerator(
      num_heads, training.widths, preset="robust", row_features=features, column_features=features
  )
  key_params, key_steps, key_held_out = jax.random.split(jax.random.key(seed), 3)
  params = _train(generator, training, world, key_params, key_steps)
  context_N, metric_NHDD = _generated(generator, training, world, params, key_held_out,
                                      num_held_out)
  excess_N = np.empty(num_held_out)
  for context in range(len(problem.prior_C)):
    held_out = context_N == context
    excess_N[held_out] = _excess_in(problem, context, metric_NHDD[held_out])
  return Excess(float(excess_N.mean()), float(excess_N.std(ddof=1) / num_held_out**0.5))


def _excess_in(problem: Problem, context: int, metric_NHDD: np.ndarray) -> np.ndarray:
  repeat = lambda array: np.broadcast_to(array[context], (len(metric_NHDD), *array.shape[1:]))
  alike = Problem(np.empty(0), repeat(problem.metric_CHDD), repeat(problem.moment_CDD))
  return context_excess(alike, metric_NHDD)


def _world(problem: Problem, signal: float, length: int, seed: int) -> _World:
  num_contexts, features = len(problem.prior_C), problem.mean_HDD.shape[-1]
  marks = np.random.default_rng(seed).choice([-1.0, 1.0], size=(num_contexts, features))
  marks *= signal * (length + 1) ** 0.5
  roots = np.linalg.cholesky(problem.moment_CDD)
  arrays = np.log(problem.prior_C), problem.metric_CHDD, roots, marks
  return _World(*(jnp.asarray(array, jnp.float32) for array in arrays))


def _draw(training: Training, world: _World, key: Array, batch_size: int) -> _Sequences:
  key_context, key_tokens = jax.random.split(key)
  context_B = jax.random.categorical(key_context, world.log_prior_C, shape=(batch_size,))
  features = world.marker_CD.shape[-1]
  white_BTD = jax.random.normal(key_tokens, (batch_size, training.length, features))
  x_BTD = jnp.einsum("bde,bte->btd", world.root_CDD[context_B], white_BTD)
  marked = jnp.concatenate([world.marker_CD[context_B][:, None], x_BTD], 1)
  return _Sequences(context_B, x_BTD, sequence_context(marked))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train(
    generator: MetricGenerator, training: Training, world: _World, key_params: Array,
    key_steps: Array,
) -> dict:
  optimizer = optax.adam(
      optax.cosine_decay_schedule(training.learning_rate, training.num_steps))
  apart_TS = 1.0 - jnp.eye(training.length)
  scores = lambda query_BTHD, x_BTD: jnp.einsum("bthd,bsd->bhts", query_BTHD, x_BTD)

  def loss(params: dict, key: Array) -> Array:
    key_draw, key_noise = jax.random.split(key)
    drawn = _draw(training, world, key_draw, training.batch_size)
    x_BT1D = drawn.x_BTD[:, :, None]
    metric = generator.apply({"params": params}, drawn.contexts.vectors_BCD)
    found = scores(apply_metric(x_BT1D, metric, drawn.contexts), drawn.x_BTD)
    true_metric = world.metric_CHDD[drawn.context_B][:, None]
    wanted = scores(apply_metric(x_BT1D, true_metric, drawn.contexts), drawn.x_BTD)
    wanted += training.noise * jax.random.normal(key_noise, wanted.shape)
    squares_BTS = jnp.sum((found - wanted) ** 2, 1) * apart_TS
    return 0.5 * jnp.sum(squares_BTS) / (training.batch_size * jnp.sum(apart_TS))

  def step(carry: tuple, key: Array) -> tuple[tuple, None]:
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params, key), state)
    return (optax.apply_updates(params, updates), state), None

  params = generator.init(key_params, world.marker_CD)["params"]
  keys = jax.random.split(key_steps, training.num_steps)
  (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
  return params


def _generated(
    generator: MetricGenerator, training: Training, world: _World, params: dict, key: Array,
    num_sequences: int,
) -> tuple[np.ndarray, np.ndarray]:
  drawn = _draw(training, world, key, num_sequences)
  metric = generator.apply({"params": params}, drawn.contexts.vectors_BCD)
  return np.asarray(drawn.context_B), np.asarray(metric[:, 0], np.float64)
