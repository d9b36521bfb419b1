"""A packed row is its documents side by side: outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.causality import random_variables
from damcha_jax.attention import DamchaAttention, MultiHeadAttention, masks

D, H = 8, 2
LENGTHS = (4, 1, 6)
SEGMENTS = np.repeat(np.arange(3), LENGTHS)[None]
SAME_SEGMENT = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]
SIX = np.array([0, 0, 1, 2, 2, 2])
X = np.random.default_rng(0).normal(size=(1, sum(LENGTHS), D)).astype(np.float32)

KINDS = {
    "mha": MultiHeadAttention(H, causal=True),
    "prefix": DamchaAttention(H, causal=True),
    "stride": DamchaAttention(H, causal=True, stride=4),
    "learned": DamchaAttention(H, causal=True, context="learned"),
    "sequence": DamchaAttention(H, causal=False, context="sequence"),
    "full_width": DamchaAttention(H, causal=True, stride=3, form="full_width", update_rank=2),
}


@pytest.mark.parametrize("kind", [
    kind if kind in ("mha", "prefix") else pytest.param(kind, marks=pytest.mark.families)
    for kind in KINDS])
def test_a_packed_row_equals_its_documents(kind):
  module = KINDS[kind]
  variables = random_variables(module, X, std=0.4)
  cotangent = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)

  def packed(x):
    return module.apply(variables, x, segment_ids=SEGMENTS)

  def separate(x):
    documents = jnp.split(x, np.cumsum(LENGTHS)[:-1], axis=1)
    return jnp.concatenate([module.apply(variables, one) for one in documents], axis=1)

  @jax.jit
  def outputs_and_gradients(x, mask):
    # A mask alone may pack too; that one is known when the program is made, this one is not.
    masked = lambda x: module.apply(variables, x, mask=SAME_SEGMENT)
    traced = lambda x: module.apply(variables, x, mask=mask)
    pairs = [jax.vjp(function, x) for function in (separate, packed, masked, traced)]
    return [(outputs, *pullback(cotangent)) for outputs, pullback in pairs]

  (output, grad), *ways = outputs_and_gradients(X, SAME_SEGMENT)
  for packed_output, packed_grad in ways:
    np.testing.assert_allclose(packed_output, output, atol=2e-5)
    np.testing.assert_allclose(packed_grad, grad, atol=2e-5)


def test_documents_are_told_from_masks():
  causal = np.tril(np.ones((6, 6), bool))
  found = masks.documents(jnp.asarray(causal & (SIX[:, None] == SIX))[None, None], 1, 6)
  np.testing.assert_array_equal(found - found[:, :1], [SIX])
  assert masks.documents(causal[None, None], 2, 6) is None
  assert masks.documents((causal & ~np.tril(causal, k=-2))[None, None], 1, 6) is None  # a window
  padded = causal & np.array([0, 0, 1, 1, 1, 0], bool)
  assert masks.documents(padded[None, None], 1, 6) is None
  traced = jax.jit(lambda mask: masks.documents(mask, 1, 6))(padded[None, None])
  assert len(set(np.asarray(traced)[0, 2:5])) == 1
  # A prefix that sees itself both ways is one document with what follows.
  prefix = causal | (np.arange(6) < 3) & (np.arange(6) < 3)[:, None]
  assert masks.documents(prefix[None, None], 1, 6) is None


def test_masks():
  np.testing.assert_array_equal(masks.causal(2, 3)[0, 0], [[1, 0, 0], [1, 1, 0]])
  np.testing.assert_array_equal(
      masks.same_segment(jnp.array([[5, 5, 2]]))[0, 0], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
  assert masks.combine(None, None) is None
  np.testing.assert_array_equal(masks.combine(None, jnp.array([1, 0]), jnp.array([True, True])),
                                [True, False])
  mask = np.zeros((2, 3, 2, 4), bool)
  mask[0, 1, 0, 2] = mask[1, 2, 1, 3] = True
  np.testing.assert_array_equal(masks.tokens_seen(mask, 2, 4), [[0, 0, 1, 0], [0, 0, 0, 1]])
  np.testing.assert_array_equal(masks.queries_seeing(mask, 2, 2), [[1, 0], [0, 1]])
  np.testing.assert_array_equal(masks.tokens_seen(mask[:1, :1], 2, 4), np.zeros((2, 4)))


@pytest.mark.parametrize("mask, expected", [
    (None, False),
    (np.tril(np.ones((3, 3))), True),
    (np.eye(3)[None, None], True),
    (np.ones((3, 3)), False),
    (np.ones((1, 1)), False),  # a single query has no future to hide
    (np.tril(np.ones((2, 3))), False),  # cross-attention
    (np.ones((1, 1, 1, 3)), False),  # padding
])
def test_a_causal_mask_is_recognised(mask, expected):
  assert masks.is_concrete_causal(mask) is expected
  if mask is not None:
    assert not jax.jit(lambda m: jnp.array(masks.is_concrete_causal(m)))(mask)  # values unknown
