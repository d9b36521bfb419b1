"""The attentions against Flax's and against NumPy, with every kind of mask, cache and dtype."""

import re

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis import complexity
from damcha_jax.attention import core, DamchaAttention, FutureLeakError, masks, MultiHeadAttention
from damcha_jax.metric import MetricGenerator, StaticMetric

B, T, S, D, H = 2, 6, 5, 8, 2
K = D // H
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
Y = RNG.normal(size=(B, S, D)).astype(np.float32)
CAUSAL = np.tril(np.ones((T, T), bool))[None, None]

KINDS = {
    "mha": MultiHeadAttention(H),
    "prefix": DamchaAttention(H),
    "stride": DamchaAttention(H, stride=4),
    "factors": DamchaAttention(H, generator=MetricGenerator(H, (2,))),
    "sequence": DamchaAttention(H, context="sequence", causal=False),
    "learned": DamchaAttention(H, context="learned"),
    "static": DamchaAttention(H, generator=StaticMetric(H, D)),
    "blocks": DamchaAttention(H, generator=MetricGenerator(H, (5,), "blocks")),
    "beyond": DamchaAttention(H, stride=2, half_life=3.0, mix_slices=True),
    "full_width": DamchaAttention(H, form="full_width", update_rank=3),
    "full_rank": DamchaAttention(H, form="full_width", static_part=False),
}
# Of code paths that all have in common, the others are tried with the families.
COMMON = [kind if kind in ("mha", "prefix", "full_width") else
          pytest.param(kind, marks=pytest.mark.families) for kind in KINDS]


def randomised(variables):
  """Every parameter random, so that nothing that starts at zero hides."""
  leaves, tree = jax.tree.flatten(variables)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return tree.unflatten([0.4 * jax.random.normal(k, v.shape) for k, v in zip(keys, leaves)])


def init(module, *inputs):
  return {"params": randomised(module.init(jax.random.key(0), *inputs)["params"])}


def softmax(scores, visible):
  scores = np.where(visible, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def test_mha_is_flaxs():
  flax = nn.MultiHeadDotProductAttention(H, qkv_features=16, out_features=3)
  ours = MultiHeadAttention(H, qkv_features=16, out_features=3)
  variables = flax.init(jax.random.key(0), X, Y)
  chex.assert_trees_all_equal(variables, ours.init(jax.random.key(0), X, Y))
  variables = randomised(variables)
  mask = RNG.random((B, 1, T, S)) < 0.7
  mask[..., 0] = True
  np.testing.assert_allclose(ours.apply(variables, X, Y, mask=mask),
                             flax.apply(variables, X, Y, mask=mask), atol=2e-6)


@pytest.mark.parametrize("stride", [1, 4])
def test_damcha_is_its_equation(stride):
  generator = MetricGenerator(H, (5,), "blocks")
  attention = DamchaAttention(H, generator=generator, stride=stride, causal=True)
  variables = init(attention, X)
  params = jax.device_get(variables["params"])
  expected = np.zeros((B, T, D))
  for b in range(B):
    for t in range(T):
      context = X[b, : t // stride * stride + 1].mean(0)
      blocks = np.asarray(
          generator.apply({"params": params["generator"]}, context, method="blocks"))
      heads = []
      for i in range(H):
        metric = sum(blocks[i, :, j] for j in range(H))
        slices = X[b, :, i * K : (i + 1) * K]
        scores = slices[t] @ metric @ slices.T / np.sqrt(K)
        weights = softmax(scores, np.arange(T) <= t)
        value = X[b] @ params["value"]["kernel"][:, i] + params["value"]["bias"][i]
        heads.append(weights @ value)
      expected[b, t] = np.einsum("hk,hkd->d", heads, params["out"]["kernel"])
  expected += params["out"]["bias"]
  np.testing.assert_allclose(attention.apply(variables, X), expected, atol=2e-5)


def test_full_width_contains_multi_head_attention():
  flax = nn.MultiHeadDotProductAttention(H)
  variables = randomised(flax.init(jax.random.key(0), X))
  expected = flax.apply(variables, X, mask=CAUSAL)
  for rank in (0, 3, None):
    ours = DamchaAttention(H, form="full_width", update_rank=rank, causal=True)
    params = ours.init(jax.random.key(2), X)["params"]
    params = {**params, **variables["params"]}
    np.testing.assert_allclose(ours.apply({"params": params}, X), expected, atol=2e-6)
    if rank is None:  # the update starts at zero and is really there
      params["generator"] = randomised(params["generator"])
      assert np.abs(ours.apply({"params": params}, X) - expected).max() > 1e-3


def test_full_width_is_its_equation():
  attention = DamchaAttention(H, form="full_width", update_rank=3, context="learned", causal=False)
  variables = init(attention, X)
  params = jax.device_get(variables["params"])
  metric = attention_metric = MetricGenerator(H, row_features=D, column_features=3)
  update = np.asarray(attention_metric.apply(
      {"params": params["generator"]}, params["context"]["vector"]))
  value = np.einsum("btd,dhk->bthk", X, params["value"]["kernel"]) + params["value"]["bias"]
  heads = []
  for i in range(H):
    query_kernel, key_kernel = params["query"]["kernel"][:, i], params["key"]["kernel"][:, i]
    metric = query_kernel @ key_kernel.T + update[i] @ params["update_key"]["kernel"][:, i].T
    u = key_kernel @ params["query"]["bias"][i]
    scores = (X @ metric + u) @ X.transpose(0, 2, 1) / np.sqrt(K)  # the key bias cancels
    heads.append(softmax(scores, True) @ value[:, :, i])
  expected = np.einsum("hbtk,hkd->btd", heads, params["out"]["kernel"]) + params["out"]["bias"]
  np.testing.assert_allclose(attention.apply(variables, X), expected, atol=2e-5)


@pytest.mark.parametrize("kind", COMMON)
def test_swaps_in_for_flaxs_attention(kind):
  module = KINDS[kind]
  variables = init(module, X, Y)
  mask = np.ones((B, 1, T, S), bool)
  mask[0, :, :, 3:] = False
  masked = module.apply(variables, X, Y, mask=mask, deterministic=True)
  chex.assert_shape(masked, (B, T, D))
  np.testing.assert_allclose(masked[:1], module.apply(variables, X[:1], Y[:1, :3]), atol=2e-6)


@pytest.mark.parametrize("kind", COMMON)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_what_they_give_alone(kind, side):
  module = KINDS[kind]
  if kind != "sequence":
    module = module.copy(causal=True)
  variables = init(module, X)
  alone = module.apply(variables, X)
  garbage = np.full((B, 3, D), 50.0, np.float32)
  pieces = [garbage, X] if side == "left" else [X, garbage]
  real = slice(3, None) if side == "left" else slice(0, T)
  padding_mask = np.zeros((B, T + 3), bool)
  padding_mask[:, real] = True
  padded = module.apply(variables, np.concatenate(pieces, 1), padding_mask=padding_mask)
  np.testing.assert_allclose(padded[:, real], alone, atol=3e-6)
  assert not np.any(np.asarray(padded)[~padding_mask])
  # A mask that nobody may look at marks padding as well.
  mask = padding_mask[:, None, None, :] & np.ones((T + 3, 1), bool)
  implied = module.apply(variables, np.concatenate(pieces, 1), mask=mask)
  np.testing.assert_allclose(implied[:, real], alone, atol=3e-6)


@pytest.mark.parametrize("kind", COMMON)
def test_what_stands_in_padded_tokens_is_never_used(kind):
  module = KINDS[kind]
  queries = np.array([[0, 1, 1, 1, 0, 1], [0] * T], bool)
  keys = np.array([[1, 0, 1, 1, 0], [0] * S], bool)

  def loss_and_gradients(blank, others, **masks):
    variables = init(module, X, *others)
    loss = lambda variables, *inputs: jnp.sum(module.apply(variables, *inputs, **masks) ** 2)
    inputs = [np.where(valid[..., None], x, blank).astype(np.float32)
              for x, valid in [(X, queries)] + [(y, keys) for y in others]]
    return jax.value_and_grad(loss, range(1 + len(inputs)))(variables, *inputs)

  cross = dict(query_padding_mask=queries, key_padding_mask=keys)
  for others, masks in (([], dict(padding_mask=queries)), ([Y], cross), ([Y, Y], cross)):
    chex.assert_trees_all_equal(loss_and_gradients(np.nan, others, **masks),
                                loss_and_gradients(7.0, others, **masks))


@pytest.mark.parametrize("kind", ["mha", "prefix", "stride", "learned", "full_width"])
def test_cross_attention_padding(kind):
  module = KINDS[kind]
  variables = init(module, X, Y)
  queries = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)
  keys = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
  padded = module.apply(variables, X, Y, query_padding_mask=queries, key_padding_mask=keys)
  np.testing.assert_allclose(padded[:1, 2:], module.apply(variables, X[:1, 2:], Y[:1, :3]),
                             atol=3e-6)
  assert not np.any(padded[0, :2])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sequence"])
def test_decodes_one_token_at_a_time_as_flaxs_does(kind):
  module = KINDS[kind].copy(causal=True)
  variables = init(module, X)
  whole = module.apply(variables, X)
  decoder = module.copy(decode=True)
  cache = decoder.init(jax.random.key(0), X)["cache"]
  step = jax.jit(lambda cache, x: decoder.apply({**variables, "cache": cache}, x,
                                                mutable=["cache"]))
  for t in range(T):
    output, updated = step(cache, X[:, t : t + 1])
    cache = updated["cache"]
    np.testing.assert_allclose(output[:, 0], whole[:, t], atol=3e-6)
  output, _ = step(cache, X[:, :1])  # the cache is full
  assert np.isnan(output).all()


@pytest.mark.parametrize("kind", COMMON)
def test_blind_queries_are_finite_with_finite_gradients(kind):
  module = KINDS[kind]
  variables = init(module, X)
  mask = np.ones((B, 1, T, T), bool)
  mask[1, :, 2] = False
  mask[0] = False

  def loss(x):
    return jnp.sum(module.apply(variables, x, mask=mask) ** 2)

  output = module.apply(variables, X, mask=mask)
  bias = variables["params"]["out"]["bias"]
  np.testing.assert_allclose(output[1, 2], bias, atol=1e-6)
  np.testing.assert_allclose(output[0], np.broadcast_to(bias, (T, D)), atol=1e-6)
  assert np.isfinite(jax.grad(loss)(X)).all()


@pytest.mark.parametrize("num_queries, num_keys", [(T, T), (T, S), (S, T)])
def test_causality_alone_hides_the_future_exactly_in_one_pass(num_queries, num_keys):
  query_BTHK = RNG.normal(size=(B, num_queries, H, K)).astype(np.float32)
  key_BSHK = RNG.normal(size=(B, num_keys, H, K)).astype(np.float32)
  mask = masks.causal(num_queries, num_keys)
  causal = lambda q, k: core.attention_weights(q, k, scale=20.0, is_causal=True)
  masked = lambda q, k: core.attention_weights(q, k, scale=20.0, mask=mask)
  weights_BHTS = causal(query_BTHK, key_BSHK)
  np.testing.assert_array_equal(weights_BHTS, masked(query_BTHK, key_BSHK))
  assert not np.any(np.where(mask, 0.0, weights_BHTS))
  selections = lambda function: len(re.findall(  # of scores or weights, not of the mask's entries
      r":f32\[[\d,]+\] = select_n", str(jax.make_jaxpr(function)(query_BTHK, key_BSHK))))
  assert selections(masked) == 2 and selections(causal) == 1


@pytest.mark.parametrize("num_queries, num_keys, num_key_heads", [
    (150, 300, H), *(pytest.param(*sizes, marks=pytest.mark.families)
                     for sizes in ((128, 128, H), (259, 259, 1), (300, 150, H)))])
def test_causal_blocks_attend_as_the_whole_with_fewer_scores(num_queries, num_keys, num_key_heads):
  key = jax.random.key(0)
  query_BTHK = jax.random.normal(key, (B, num_queries, H, K))
  key_BSHK = jax.random.normal(jax.random.fold_in(key, 1), (B, num_keys, num_key_heads, K))
  shape = (B, H, num_queries, num_keys)
  full_mask = jax.random.bernoulli(jax.random.fold_in(key, 2), 0.7, shape)
  dropout = core.Dropout(jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, shape), 0.5)
  bias = jax.random.normal(jax.random.fold_in(key, 4), (1, 1, num_queries, num_keys))
  for options in ({}, dict(mask=full_mask, bias=bias[:, :, :1], dropout=dropout)):

    def loss(q, k):
      return jnp.sum(jnp.sin(core.attend(q, k, 2 * k, scale=2.0, is_causal=True, **options)))

    blocks = jax.value_and_grad(loss, (0, 1))(query_BTHK, key_BSHK)
    with core.whole_scores():
      whole = jax.value_and_grad(loss, (0, 1))(query_BTHK, key_BSHK)
    num_flops = complexity.matmul_flops(jax.make_jaxpr(loss)(query_BTHK, key_BSHK).jaxpr)
    assert num_flops < 0.9 * complexity.matmul_flops(complexity.trace(loss, query_BTHK, key_BSHK))
    chex.assert_trees_all_close(blocks, whole, rtol=2e-4, atol=2e-4)
    # In one piece: what makes the queries may be far larger than they are.
    assert " pad[" not in str(jax.make_jaxpr(jax.grad(loss))(query_BTHK, key_BSHK))


def test_a_length_that_is_not_known_attends_in_one_piece():
  (length,) = jax.export.symbolic_shape("t")
  abstract = jax.ShapeDtypeStruct((B, length, H, K), jnp.float32)
  attend = jax.jit(lambda x: core.attend(x, x, x, scale=1.0, is_causal=True))
  exported = jax.export.export(attend)(abstract)
  x_BTHK = RNG.normal(size=(B, 150, H, K)).astype(np.float32)
  chex.assert_trees_all_close(exported.call(x_BTHK), attend(x_BTHK), atol=1e-5)


@pytest.mark.parametrize("form", ["plain", "padding_mask", "segment_ids"])
@pytest.mark.parametrize("kind", ["prefix", "factors", "stride"])
def test_is_exported_for_batches_of_any_size(kind, form):
  module = KINDS[kind].copy(causal=True)
  variables = init(module, X)
  given = {"plain": {}, "padding_mask": dict(padding_mask=np.arange(T) < np.array([[T], [3]])),
           "segment_ids": dict(segment_ids=np.full((B, T), np.arange(T) // 2, np.int32))}[form]
  (batch_size,) = jax.export.symbolic_shape("b")
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype),
                          (X, given))
  apply = jax.jit(lambda variables, x, given: module.apply(variables, x, **given))
  exported = jax.export.export(apply)(variables, *abstract)
  chex.assert_trees_all_close(exported.call(variables, X, given), apply(variables, X, given),
                              atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_an_empty_output(kind):
  output = jax.eval_shape(KINDS[kind].init_with_output, jax.random.key(0), X[:0])[0]
  assert output.shape == (0, T, D)


@pytest.mark.parametrize("kind", ["mha", "stride"])
def test_implementations_agree(kind):
  plain = KINDS[kind].copy(causal=True, implementation="plain")
  variables = init(plain, X)
  padding_mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
  for masks in ({}, {"padding_mask": padding_mask}):
    expected = plain.apply(variables, X, **masks)
    fused = plain.copy(implementation="xla").apply(variables, X, **masks)
    np.testing.assert_allclose(fused, expected, atol=3e-6)


@pytest.mark.parametrize("kind", ["mha", "stride", "full_width"])
def test_bfloat16_is_rounded_float32(kind):
  module = KINDS[kind].copy(causal=True)
  variables = init(module, X)
  half = module.copy(dtype=jnp.bfloat16)
  output, state = half.apply(variables, X, sow_weights=True, mutable=["intermediates"])
  assert output.dtype == jnp.bfloat16
  (weights,) = state["intermediates"]["attention_weights"]
  assert weights.dtype == jnp.float32
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)  # not so after a bfloat16 softmax
  reference = module.apply(variables, X)
  error = np.abs(output.astype(jnp.float32) - reference).max() / np.abs(reference).max()
  assert error < 0.05


def test_dropout_needs_a_key_and_keeps_the_mean():
  module = MultiHeadAttention(H, dropout_rate=0.5)
  variables = init(MultiHeadAttention(H), X)
  outputs = [module.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(i)})
             for i in range(200)]
  assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
  np.testing.assert_allclose(np.mean(outputs, 0), module.apply(variables, X, deterministic=True),
                             atol=0.5)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": None}])
def test_sequence_context_must_be_declared_non_causal(options):
  with pytest.raises(FutureLeakError, match="use context='prefix'"):
    DamchaAttention(H, context="sequence", **options)
  DamchaAttention(H, context="sequence", allow_future_leak=True, **options)


def test_sequence_context_refuses_a_causal_mask_and_decoding():
  module = KINDS["sequence"]
  variables = init(module, X)
  with pytest.raises(FutureLeakError, match="causal mask"):
    module.apply(variables, X, mask=CAUSAL)
  module.apply(variables, X, mask=np.ones((1, 1, T, T), bool))
  with pytest.raises(FutureLeakError, match="cannot decode"):
    DamchaAttention(H, context="sequence", causal=False, decode=True)


@pytest.mark.parametrize("call, message", [
    (lambda: init(MultiHeadAttention(3), X), "num_heads 3 does not divide"),
    (lambda: init(DamchaAttention(3), X), "num_heads 3 does not divide"),
    (lambda: init(DamchaAttention(H), X, Y[..., :4]), "slices of equal width"),
    (lambda: init(DamchaAttention(H), X[0]), "must be \\[batch, length, features\\]"),
    (lambda: DamchaAttention(H, stride=0), "stride 0 must be an integer of at least 1"),
    (lambda: DamchaAttention(H, context="suffix"), "context 'suffix'"),
    (lambda: DamchaAttention(H, half_life=0), "half_life 0 must be a finite number above 0"),
    (lambda: DamchaAttention(H, half_life="2"), "half_life '2' must be a finite number"),
    (lambda: DamchaAttention(H, half_life=2, context="learned"), "half_life is for context='prefix'"),
    (lambda: DamchaAttention(H, form="full_width", mix_slices=True), "form='head_slice'"),
    (lambda: DamchaAttention(H, form="wide"), "form 'wide'"),
    (lambda: DamchaAttention(H, update_rank=2), "update_rank is for form='full_width'"),
    (lambda: init(DamchaAttention(H, implementation="fast"), X), "implementation 'fast'"),
    (lambda: MultiHeadAttention(H).init(jax.random.key(0), X, mask=CAUSAL[0]), "mask\\[:, None\\]"),
    (lambda: MultiHeadAttention(H).init(jax.random.key(0), X, padding_mask=np.ones((B, S), bool)),
     "padding_mask must have shape"),
    (lambda: MultiHeadAttention(H).init(jax.random.key(0), X, Y, padding_mask=np.ones((B, T))),
     "cross-attention takes"),
    (lambda: MultiHeadAttention(H, implementation="xla", dropout_rate=0.1).init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, deterministic=False),
     "use implementation='plain'"),
])
def test_bad_input_is_named_with_its_remedy(call, message):
  with pytest.raises(ValueError, match=message):
    call()
