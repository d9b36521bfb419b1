"""Contexts against their definition, written out token by token in NumPy."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.metric import context as context_lib
from damcha_jax.metric.application import apply_metric

B, T, D, H = 3, 11, 4, 2
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
STRIDES = (1, 3, 4, 16)
HALF_LIVES = pytest.mark.parametrize(
    "half_life", [None, np.array([0.5, 1.0, 3.0, 100.0], np.float32)], ids=["mean", "decayed"])


def expected_contexts(x_BTD, stride, valid_BT=None, segment_ids_BT=None, half_life=None):
  """The context of each query: the mean of its segment's real tokens up to its stride's start."""
  half_life_D = np.full(x_BTD.shape[2], np.inf) if half_life is None else half_life
  expected = np.full(x_BTD.shape, np.nan)
  for b, row in enumerate(x_BTD):
    tokens = {}
    for t in range(len(row)):
      if valid_BT is not None and not valid_BT[b, t]:
        continue
      seen = tokens.setdefault(0 if segment_ids_BT is None else segment_ids_BT[b, t], [])
      seen.append(row[t])
      counted = np.array(seen[: (len(seen) - 1) // stride * stride + 1])
      age_N1 = np.arange(len(counted))[::-1, None]
      expected[b, t] = np.average(counted, axis=0, weights=2.0 ** (-age_N1 / half_life_D))
  return expected


def contexts_of_queries(contexts, num_queries):
  """[B, T, D]: reads each query's context back through `apply_metric`, zero where it has none."""
  metric = jnp.zeros((*contexts.vectors_BCD.shape[:2], 1, 1, D))
  metric = metric.at[:, :, 0, 0, :].set(contexts.vectors_BCD)
  ones = jnp.ones((contexts.vectors_BCD.shape[0], num_queries, 1, 1))
  return np.asarray(apply_metric(ones, metric, contexts))[:, :, 0]


def assert_contexts(contexts, expected, start=0):
  actual = contexts_of_queries(contexts, expected.shape[1])
  real = ~np.isnan(expected)
  np.testing.assert_allclose(actual[real], expected[real], atol=1e-6)
  assert np.isfinite(actual).all()


@HALF_LIVES
@pytest.mark.parametrize("stride", STRIDES)
def test_prefix(stride, half_life):
  contexts = context_lib.prefix_contexts(X, stride, half_life_D=half_life)
  chex.assert_shape(contexts.vectors_BCD, (B, -(-T // stride), D))
  assert_contexts(contexts, expected_contexts(X, stride, half_life=half_life))


@HALF_LIVES
@pytest.mark.parametrize("stride", STRIDES)
def test_padding_anywhere_counts_for_nothing(stride, half_life):
  valid = np.array([[0] * 4 + [1] * 7, [1] * 5 + [0] * 6, [1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1]], bool)
  garbage = np.where(valid[..., None], X, np.nan)
  assert_contexts(context_lib.prefix_contexts(garbage, stride, valid, half_life_D=half_life),
                  expected_contexts(X, stride, valid, half_life=half_life))


@HALF_LIVES
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("padded", [False, True])
def test_packed_rows_restart(stride, padded, half_life):
  segments = np.array([[0] * 5 + [1] * 6, [3] * 2 + [5] * 4 + [7] * 5, [1] * T])
  valid = None
  if padded:
    valid = np.ones((B, T), bool)
    valid[0, 5:7] = valid[1, 10:] = valid[2, 3] = False
  assert_contexts(context_lib.prefix_contexts(X, stride, valid, segments, half_life),
                  expected_contexts(X, stride, valid, segments, half_life))


@HALF_LIVES
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("chunks", [(1,) * T, (4, 1, 1, 5), (11,)])
def test_going_on_equals_going_through(stride, chunks, half_life):
  valid = np.array([[0] * 3 + [1] * 8, [1] * T, [0] * 7 + [1] * 4], bool)
  expected = expected_contexts(X, stride, valid, half_life=half_life)
  state, start = context_lib.empty_state(B, D, jnp.float32), 0
  for size in chunks:
    piece = slice(start, start + size)
    contexts, state = context_lib.continue_prefix(X[:, piece], stride, valid[:, piece], state,
                                                  half_life)
    assert_contexts(contexts, expected[:, piece])
    start += size
  np.testing.assert_array_equal(state.count_B, valid.sum(1))


@HALF_LIVES
@pytest.mark.parametrize("stride", [1, 4])
def test_no_context_depends_on_a_later_token(stride, half_life):
  changed = X.copy()
  changed[:, 6:] += 100.0
  before, after = (contexts_of_queries(
      context_lib.prefix_contexts(tokens, stride, half_life_D=half_life), T)
                   for tokens in (X, changed))
  np.testing.assert_array_equal(before[:, :6], after[:, :6])
  assert np.abs(after[:, 8:] - before[:, 8:]).max() > 1


def test_sequence_is_the_mean_of_the_real_tokens():
  valid = np.array([[1] * 4 + [0] * 7, [1] * T, [0] * T], bool)
  mean = [X[0, :4].mean(0), X[1].mean(0), np.zeros(D)]
  vectors = context_lib.sequence_context(X, valid).vectors_BCD
  np.testing.assert_allclose(vectors[:, 0], mean, atol=1e-6)
  segments = np.repeat([[0, 1]], [4, 7], axis=1).repeat(B, 0)
  packed = contexts_of_queries(context_lib.sequence_context(X, None, segments), T)
  np.testing.assert_allclose(packed[0, 0], X[0, :4].mean(0), atol=1e-6)
  np.testing.assert_allclose(packed[0, 10], X[0, 4:].mean(0), atol=1e-6)


def test_bfloat16_tokens_are_summed_in_float32():
  tokens = jnp.ones((1, 4096, 1), jnp.bfloat16) * 1.0078125  # sums stall at 256 in bfloat16
  vectors = context_lib.prefix_contexts(tokens, 1).vectors_BCD
  np.testing.assert_allclose(vectors[0, -1], 1.0078125, rtol=1e-5)
