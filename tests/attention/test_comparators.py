"""What is particular to one comparator, beyond its original's numbers (tests/golden)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.causality import audit_module, random_variables
from damcha_jax.attention import CollaborativeAttention
from damcha_jax.attention import DynamicallyComposableAttention
from damcha_jax.attention import MixedMultiHeadAttention
from damcha_jax.attention import MixtureOfHeadsAttention
from damcha_jax.attention import MultiHeadAttention
from damcha_jax.attention import TalkingHeadsAttention
from damcha_jax.attention import moa

B, T, D, H = 2, 6, 8, 4
X = np.random.default_rng(3).normal(size=(B, T, D)).astype(np.float32)


@pytest.mark.families
@pytest.mark.parametrize("cls", [TalkingHeadsAttention, DynamicallyComposableAttention])
def test_chunks_of_queries_change_nothing(cls):
  """Neither outputs nor gradients, padding and dropout included."""
  whole = cls(H, causal=True, query_chunk=None, dropout_rate=0.4, deterministic=False)
  with jax.enable_x64(True):  # so that only the chunks could tell the two apart
    _check_chunks(whole, jax.tree.map(np.float64, random_variables(cls(H), X)))


def _check_chunks(whole, variables):
  padding_mask = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool)

  def loss(module, variables):
    output = module.apply(variables, X.astype(np.float64), padding_mask=padding_mask,
                          rngs={"dropout": key})
    return jnp.sum(output**2), output

  key = jax.random.key(0)
  grad = lambda module: jax.jit(jax.grad(functools.partial(loss, module), has_aux=True))(variables)
  expected, chunked = grad(whole), grad(whole.copy(query_chunk=4))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), chunked,
               expected)


def test_talking_heads_drop_a_key_for_all_queries():
  module = TalkingHeadsAttention(H, dropout_rate=0.5, deterministic=False)
  variables = random_variables(module.copy(deterministic=True), X)
  dropout = module.apply(variables, rngs={"dropout": jax.random.key(0)},
                         method=lambda self: self._dropout((B, H, T, T), None, None))
  assert dropout.kept_BHTS.shape == (B, H, 1, T)


def test_collaborative_blocks_are_multi_head_attention():
  """With the block indicator as mixing matrix, biases included."""
  mha, collaborative = MultiHeadAttention(H), CollaborativeAttention(H, mixing_init="blocks")
  params = random_variables(mha, X)["params"]
  mixing = collaborative.init(jax.random.key(0), X)["params"]["mixing_kernel"]
  flat = lambda name: jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], D), params[name])
  ours = {**params, "query": flat("query"), "key": flat("key"), "mixing_kernel": mixing}
  np.testing.assert_allclose(collaborative.apply({"params": ours}, X),
                             mha.apply({"params": params}, X), atol=1e-5)


def test_cached_widths():
  """What decoding keeps per token: one shared key, or one head, or more for the compositions."""
  def cached(module):
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X))["cache"]
    return {name[7:]: leaf.shape[2:] for name, leaf in shapes.items() if leaf.ndim > 2}

  decode = dict(decode=True, causal=True)
  assert cached(CollaborativeAttention(H, key_features=6, **decode)) == {
      "key": (1, 6), "value": (H, 2)}
  assert cached(MixtureOfHeadsAttention(H, expert_features=5, **decode)) == {
      "key": (1, 5), "value": (1, 5)}
  assert cached(DynamicallyComposableAttention(H, gate=False, **decode)) == {
      "key": (H, 2), "value": (H, 2), "pre_w1": (2, H), "pre_w2": (2, H), "post_w1": (2, H),
      "post_w2": (2, H)}


@pytest.mark.families
def test_renormalised_gates_stop_the_gradient_of_their_sum():
  """The output is that of gates that add up to 1; the router learns as if the sum were fixed."""
  module = MixtureOfHeadsAttention(H, renormalize=True)
  variables = random_variables(module, X)
  _, state = module.apply(variables, X, mutable=["intermediates"])
  gates_BTJ = state["intermediates"]["routing"][0].gates_BTJ
  plain = module.copy(renormalize=False)
  # Per token, the plain output over the sum of its gates.
  total_BT1 = np.asarray(gates_BTJ.sum(-1, keepdims=True))
  np.testing.assert_allclose(module.apply(variables, X), plain.apply(variables, X) / total_BT1,
                             rtol=1e-4, atol=1e-5)
  router = lambda module, weight: jax.grad(
      lambda params: jnp.sum(module.apply({"params": params}, X) * weight))(
          variables["params"])["router_kernel"]
  weight = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
  np.testing.assert_allclose(router(module, weight), router(plain, weight / total_BT1), rtol=1e-3,
                             atol=1e-4)


def test_padding_counts_in_no_balance():
  routing = lambda probs: moa.Routing(
      jnp.log(jnp.maximum(probs, 1e-9)), probs, *jax.lax.top_k(probs, 1))
  real = jnp.array([[[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]]])
  padded = jnp.concatenate([real, jnp.zeros((1, 2, 2))], axis=1)
  for name in ("switch_loss", "cv_loss"):
    np.testing.assert_allclose(moa.auxiliary_losses(routing(padded))[name],
                               moa.auxiliary_losses(routing(real))[name], rtol=1e-6)
  # P = (1.5, 1.5) / 3, n = (2, 1) / 3: balanced probabilities leave the loss at its least, 1.
  assert moa.auxiliary_losses(routing(real))["switch_loss"] == pytest.approx(1.0)


def test_large_router_logits_leave_the_z_loss_finite():
  routing = moa.Routing(jnp.full((1, 2, 3), 1e4), *(jnp.full((1, 2, 3), 1 / 3),) * 2,
                        jnp.zeros((1, 2, 3), jnp.int32))
  assert np.isfinite(moa.auxiliary_losses(routing)["z_loss"])


def test_a_source_is_seen_both_ways_and_only_from_within():
  """In training, and when decoding takes in the source with the first tokens of the target."""
  module = MixedMultiHeadAttention(H, causal=True, local_window=1)
  variables = random_variables(module, X)
  source_mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]], bool)
  padding_mask = np.array([[1] * T, [0, 1, 1, 1, 1, 1]], bool)
  masks = dict(source_mask=source_mask, padding_mask=padding_mask)
  output, state = module.apply(variables, X, sow_weights=True, mutable=["intermediates"], **masks)
  (weights,) = state["intermediates"]["attention_weights"]
  ahead = np.triu(np.ones((T, T), bool), 1) & padding_mask[:, :, None]  # of real queries
  within = source_mask[:, :, None] & source_mask[:, None, :]
  near = np.abs(np.subtract.outer(np.arange(T), np.arange(T))) <= 1
  for head, seen in enumerate((within, within & near, within & False, within)):
    assert np.array_equal(np.asarray(weights[:, head] > 0) & ahead, seen & ahead)
  decoder = module.copy(decode=True)
  cache = decoder.init(jax.random.key(0), X)["cache"]
  pieces = []
  for columns in (slice(0, 5), slice(5, 6)):
    piece, state = decoder.apply(
        {**variables, "cache": cache}, X[:, columns], mutable=["cache"],
        **{name: mask[:, columns] for name, mask in masks.items()})
    pieces, cache = [*pieces, piece], state["cache"]
  np.testing.assert_allclose(np.concatenate(pieces, axis=1), output, atol=1e-5)


@pytest.mark.parametrize("call, message", [
    (lambda: DynamicallyComposableAttention(H, gelu="fast"), "gelu 'fast' is neither"),
    (lambda: DynamicallyComposableAttention(H, qk_norm="batch"), "qk_norm 'batch'"),
    (lambda: DynamicallyComposableAttention(H, window=0), "window 0 must be an integer"),
    (lambda: DynamicallyComposableAttention(H, window=2, causal=False), "it needs causal=True"),
    (lambda: CollaborativeAttention(H, form="bert"), "form 'bert'"),
    (lambda: CollaborativeAttention(H, mixing_init="ones"), "mixing_init 'ones'"),
    (lambda: CollaborativeAttention(H, mixing_init="blocks", key_features=6).init(
        jax.random.key(0), X), "choose a multiple"),
    (lambda: MixtureOfHeadsAttention(H, experts_per_token=9), "exceeds num_experts 8"),
    (lambda: MixtureOfHeadsAttention(H, use_bias=True), "use_bias=False"),
    (lambda: MixtureOfHeadsAttention(H, dispatch="random"), "dispatch 'random'"),
    (lambda: MixedMultiHeadAttention(6), "num_heads 6 is not a multiple of the 4 groups"),
    (lambda: MixedMultiHeadAttention(H, groups=("global",) * 4), "each of global, local, past"),
    (lambda: MixedMultiHeadAttention(H, local_window=-1), "local_window -1"),
    (lambda: TalkingHeadsAttention(H, implementation="xla").init(jax.random.key(0), X),
     "use implementation='plain'"),
])
def test_bad_options_are_named_with_the_remedy(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize("kwargs", [
    {"mask": np.arange(T)[None, None, None] > 1},  # what is hidden counts for nothing
    {"segment_ids": np.array([[1, 1, 2, 2, 1, 1]] * B)},  # a segment that comes back
])
def test_mma_orders_tokens_whose_positions_are_equal(kwargs):
  module = MixedMultiHeadAttention(H, causal=True)
  report = audit_module(module, X, kwargs=kwargs, forms=["perturbation"])
  assert report.is_causal and report.response > 0, report
