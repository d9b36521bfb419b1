"""What every attention must do: see what it may, ignore padding, decode as it trains, stay finite.

All of `ATTENTIONS` is tested, and the comparators also with the options that change what they do.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis import causality
from damcha_jax.attention import ATTENTIONS

B, T, D, H = 2, 6, 16, 4
X = np.random.default_rng(2).normal(size=(B, T, D)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(B, 5, D)).astype(np.float32)
SELF_ONLY = ("mma", "authors_mma")

OPTIONS = {
    "tha_heads": ("tha", dict(num_key_heads=2, num_softmax_heads=6, query_chunk=4)),
    "dcmha_all": ("dcmha", dict(static=True, gelu="exact", qk_norm="layer", rope=True, window=3,
                                use_bias=True, query_chunk=4)),
    "dcmha_static": ("dcmha", dict(static=True, dynamic=False, gate=False, qk_norm="rms")),
    "colmha_epfml": ("colmha", dict(form="epfml", key_features=8)),
    "moa_sorted": ("moa", dict(dispatch="sorted", num_experts=5, experts_per_token=3,
                               renormalize=True, cv_coefficient=1.0)),
    "mma_near": ("mma", dict(local_window=1, groups=("future", "local", "past", "global"))),
}


def tiered(kinds):
  """The attentions that stand for themselves by default; variations of them with the families."""
  return [pytest.param(kind, marks=pytest.mark.families)
          if kind in OPTIONS or kind.startswith("authors_") else kind for kind in kinds]


KINDS = tiered((*ATTENTIONS, *OPTIONS))
NAMES = tiered(ATTENTIONS)


def make(kind, **fields):
  name, options = OPTIONS.get(kind, (kind, {}))
  return ATTENTIONS[name](H, **{"causal": True, **options, **fields})


@functools.cache
def variables(kind):
  return {"params": causality.random_variables(make(kind), X, std=0.4)["params"]}


def columns(rows, length, fill=np.nan):
  """Rows of tokens at given columns, `fill` elsewhere, and the mask of the real ones."""
  x = np.full((len(rows), length, D), fill, np.float32)
  real = np.zeros((len(rows), length), bool)
  for row, (tokens, where) in enumerate(rows):
    x[row, where], real[row, where] = tokens, True
  return x, real


# Left and right padding; two documents in a row; a row and a query that see nothing.
MIXED_X, MIXED_REAL = columns([(X[0], slice(3, 9)), (X[1], slice(0, 6)),
                               (np.concatenate([X[0, :4], X[1, :5]]), slice(0, 9)),
                               (X[0], slice(0, 6)), (X[1], slice(0, 6))], 9)
MIXED_SEGMENTS = np.ones((5, 9), int)
MIXED_SEGMENTS[2, :4] = 3
MIXED_MASK = np.ones((5, 1, 9, 9), bool)
MIXED_MASK[3], MIXED_MASK[4, :, 2] = False, False
BIAS = np.random.default_rng(3).normal(size=(1, 1, T, T)).astype(np.float32)
MIXED = dict(padding_mask=MIXED_REAL, segment_ids=MIXED_SEGMENTS, mask=MIXED_MASK)


@functools.cache
def results(kind):
  """Outputs in many circumstances, from one compilation."""
  module, params = make(kind), variables(kind)
  dropped = functools.partial(make(kind, dropout_rate=0.5).apply, deterministic=False)

  def run(params, x):
    outputs = dict(alone=module.apply(params, x), mixed=module.apply(params, MIXED_X, **MIXED))
    if kind in ATTENTIONS:
      keys = jax.random.split(jax.random.key(0))
      outputs.update(
          biased=module.apply(params, x, bias=BIAS),
          half=make(kind, dtype=jnp.bfloat16).apply(params, x),
          dropped=jax.vmap(lambda key: dropped(params, x, rngs={"dropout": key}))(keys))
    return outputs

  return jax.device_get(jax.jit(run)(params, X))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_rows_give_what_they_give_alone(kind):
  mixed, alone = results(kind)["mixed"], results(kind)["alone"]
  close = functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-5)
  close(mixed[0, 3:], alone[0])
  close(mixed[1, :6], alone[1])
  close(mixed[2, :4], alone[0, :4])
  close(mixed[2, 4:], alone[1, :5])
  assert not np.any(mixed[~MIXED_REAL])


@pytest.mark.parametrize("kind", KINDS)
def test_queries_without_keys_give_the_output_bias_alone(kind):
  bias = variables(kind)["params"].get("out", {}).get("bias", np.zeros(D))
  mixed = results(kind)["mixed"]
  np.testing.assert_allclose(mixed[3, :6], np.broadcast_to(bias, (T, D)), atol=1e-6)
  np.testing.assert_allclose(mixed[4, 2], bias, atol=1e-6)
  assert np.abs(mixed[4, 3:6] - bias).max() > 1e-3


@pytest.mark.parametrize("kind", NAMES)
def test_a_bias_of_the_caller_counts(kind):
  biased, alone = results(kind)["biased"], results(kind)["alone"]
  assert np.abs(biased[:, 1:] - alone[:, 1:]).max() > 1e-3, "the caller's bias is not used"
  # The first query sees one key, whose weight no bias changes.
  np.testing.assert_allclose(biased[:, 0], alone[:, 0], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", NAMES)
def test_bfloat16_is_rounded_float32(kind):
  half, alone = results(kind)["half"], results(kind)["alone"]
  assert half.dtype == jnp.bfloat16
  error = np.abs(half.astype(np.float32) - alone).max() / np.abs(alone).max()
  assert 0 < error < 0.08


@pytest.mark.parametrize("kind", NAMES)
def test_dropout_drops_other_weights_each_time(kind):
  first, second = results(kind)["dropped"]
  assert np.isfinite(first).all() and np.isfinite(second).all()
  assert np.abs(first - second).max() > 1e-3


@pytest.mark.families
@pytest.mark.parametrize("kind", (*ATTENTIONS, *OPTIONS))
def test_gradients_are_finite_in_all_circumstances(kind):
  loss = lambda params, x: jnp.sum(make(kind).apply(params, x, **MIXED) ** 2)
  gradient = jax.jit(jax.grad(loss, (0, 1)))
  # With biases of zero, as they are at first, projections of padding are zero too.
  at_first = jax.tree_util.tree_map_with_path(
      lambda path, leaf: leaf * (path[-1].key != "bias"), variables(kind))
  for params in (variables(kind), at_first):
    leaves = jax.tree_util.tree_leaves_with_path(gradient(params, MIXED_X))
    infinite = [jax.tree_util.keystr(path) for path, leaf in leaves if not np.isfinite(leaf).all()]
    assert infinite == []


class OffByOne(nn.Module):
  """Attention under a mask that shows every query the token after it."""

  attention: nn.Module

  @nn.compact
  def __call__(self, x):
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool), k=1)[None, None]
    return self.attention(x, mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_the_future_another_document_or_padding(kind):
  x, real = columns([(X[0], slice(1, 7)), (X[1], slice(0, 6))], 7, fill=0.0)
  masks = {"padding_mask": real, "segment_ids": np.array([[0] * 7, [1, 1, 1, 2, 2, 2, 2]])}
  report = causality.audit_module(make(kind), x, kwargs=masks, forms=["perturbation"],
                                  num_perturbations=2)
  assert report.is_causal and report.response > 0, report


@pytest.mark.parametrize("kind", NAMES)
def test_a_planted_leak_is_caught(kind):
  report = causality.audit_module(OffByOne(make(kind, causal=None)), X, forms=["perturbation"],
                                  num_perturbations=1)
  assert {leak.output for leak in report.leaks} == set(range(T - 1)), report


@pytest.mark.families
@pytest.mark.parametrize("kind", (*ATTENTIONS, *OPTIONS))
def test_no_gradient_comes_from_the_future(kind):
  report = causality.audit_module(make(kind), X, forms=["gradient"])
  assert report.is_causal and report.response > 0, report


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_gives_what_the_whole_gives(kind):
  """Left-padded prompts, and one whose padding is on the right, so between it and what follows."""
  x, real = columns([(X[0], slice(3, 9)), (X[1], [0, 1, 2, 6, 7, 8])], 9)
  decoder = make(kind, decode=True)
  shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), x))["cache"]
  cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  step = jax.jit(lambda cache, x, real: decoder.apply(
      {**variables(kind), "cache": cache}, x, padding_mask=real, mutable=["cache"]))
  outputs = []
  chunks = ((0, 3), (3, 6), (6, 9)) if kind in OPTIONS else ((0, 6), (6, 7), (7, 8), (8, 9))
  for start, stop in chunks:
    output, state = step(cache, x[:, start:stop], real[:, start:stop])
    cache = state["cache"]
    outputs.append(output)
  outputs = np.concatenate(outputs, axis=1)
  alone = results(kind)["alone"]
  np.testing.assert_allclose(outputs[0, real[0]], alone[0], atol=3e-5, rtol=1e-5)
  np.testing.assert_allclose(outputs[1, real[1]], alone[1], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", tiered(kind for kind in ATTENTIONS if kind not in SELF_ONLY))
def test_cross_attention_ignores_padded_keys(kind):
  module, params = make(kind, causal=None), variables(kind)
  keys, real = columns([(Y[0, :3], slice(2, 5)), (Y[1, :3], slice(0, 3))], 5)

  def run(params, x):
    return (module.apply(params, x, keys, key_padding_mask=real, query_padding_mask=x[..., 0] < 9),
            module.apply(params, x, Y[:, :3]))

  padded, expected = jax.jit(run)(params, X)
  np.testing.assert_allclose(padded, expected, atol=3e-5, rtol=1e-5)
  assert np.abs(expected[0] - expected[1]).max() > 1e-2


@pytest.mark.parametrize("kind", tiered(kind for kind in ATTENTIONS
                                        if kind not in (*SELF_ONLY, "damcha", "dcmha")))
def test_keys_and_values_of_other_widths_have_heads_as_wide_as_the_queries(kind):
  keys, values = (jnp.zeros((B, 5, width)) for width in (24, 8))
  init = lambda: make(kind, causal=None).init_with_output(jax.random.key(0), X, keys, values)
  output, state = jax.eval_shape(init)
  assert output.shape == X.shape
  if kind == "mha":
    flax = nn.MultiHeadDotProductAttention(H)
    expected = jax.eval_shape(lambda: flax.init(jax.random.key(0), X, keys, values))
    assert state == expected


@pytest.mark.parametrize("kind", SELF_ONLY)
def test_masks_of_other_heads_are_named(kind):
  with pytest.raises(ValueError, match="mask is for 3 heads, but 4 attend"):
    make(kind).init(jax.random.key(0), X, mask=np.ones((B, 3, T, T), bool))


@pytest.mark.parametrize("kind", [*SELF_ONLY, "dcmha_all"])
def test_what_cannot_cross_attend_says_what_to_do(kind):
  with pytest.raises(ValueError, match="use "):
    make(kind, causal=None).init(jax.random.key(0), X, Y)


@pytest.mark.parametrize("name, options, count", [
    ("mha", {"use_bias": False}, 4 * 512**2),
    ("tha", {}, 1_048_704),
    ("dcmha", {}, 1_134_592),
    ("dcmha", {"static": True, "qk_norm": "rms"}, 1_134_592 + 128 + 128),
    ("colmha", {"form": "epfml"}, 1_057_792),
    ("colmha", {"form": "epfml", "key_features": 128}, 661_504),
    ("colmha", {"form": "fairseq"}, 4 * (512**2 + 512) + 8 * 512),
    ("moa", {}, 1_122_304),
    ("mma", {}, 4 * 512**2 + 4 * 512),
])
def test_parameters_at_width_512_and_8_heads(name, options, count):
  module = ATTENTIONS[name](8, **options)
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 2, 512))))["params"]
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
