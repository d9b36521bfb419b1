"""A trained multi-head attention becomes a full-width DAMCHA of the same function that learns."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention import DamchaAttention, MultiHeadAttention
from damcha_jax.interop.mha_to_damcha import ConversionError
from damcha_jax.interop.mha_to_damcha import decoder_to_damcha
from damcha_jax.interop.mha_to_damcha import mha_to_damcha
from damcha_jax.models.decoder import make_decoder
from damcha_jax.models.stack import stack_layers
from tests.models import decoders

H, D = 2, 8
X_BTD = np.random.default_rng(0).normal(size=(2, 6, D)).astype(np.float32)
FULL_WIDTH = {"damcha.form": "full_width", "damcha.parameterization": "rowsum",
              "model.num_heads": H}


def _random(tree: Any) -> Any:
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 2, tree)


@pytest.fixture(scope="module")
def trained_attention() -> Any:
  init = lambda: MultiHeadAttention(H, causal=True).init(jax.random.key(0), X_BTD)["params"]
  return _random(jax.eval_shape(init))


@pytest.mark.parametrize("update_rank", [None, 0, 3])
def test_one_attention_computes_the_same(trained_attention: Any, update_rank: int | None) -> None:
  damcha = DamchaAttention(H, causal=True, form="full_width", update_rank=update_rank)
  initial = jax.jit(damcha.init)(jax.random.key(0), X_BTD)["params"]
  params = mha_to_damcha(trained_attention, initial)
  mask_BT = np.arange(6) < np.array([[6], [4]])
  run = lambda module: jax.jit(lambda params: module.apply(
      {"params": params}, X_BTD, padding_mask=mask_BT))
  expected = run(MultiHeadAttention(H, causal=True))(trained_attention)
  actual = run(damcha)(params)
  np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=1e-6)


def test_what_cannot_be_converted_is_named(trained_attention: Any) -> None:
  def zeros(**fields: Any) -> Any:
    damcha = DamchaAttention(H, causal=True, **fields)
    shapes = jax.eval_shape(lambda: damcha.init(jax.random.key(0), X_BTD))["params"]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)

  initial, other = zeros(form="full_width", update_rank=2), zeros()
  with pytest.raises(ConversionError, match=r"no parameters \['key/bias', 'key/kernel', 'query/"):
    mha_to_damcha(trained_attention, other)
  moved = jax.tree.map(lambda leaf: leaf + 0.1, initial)
  with pytest.raises(ConversionError, match="generator/out_.* is not zero"):
    mha_to_damcha(trained_attention, moved)
  with pytest.raises(ConversionError, match=r"query/kernel has shape \(8, 1, 8\)"):
    wrong = {**trained_attention, "query": {**trained_attention["query"],
                                            "kernel": np.zeros((D, 1, D))}}
    mha_to_damcha(wrong, initial)
  with pytest.raises(ConversionError, match="no parameter value/kernel"):
    less = {**trained_attention, "value": {"bias": trained_attention["value"]["bias"]}}
    mha_to_damcha(less, initial)


@pytest.mark.families
@pytest.mark.parametrize("changes", [
    {"damcha.update_rank": 2},
    pytest.param({"damcha.update_rank": 2, "model.scan_layers": True}, marks=pytest.mark.slow),
    pytest.param({"damcha.update_rank": None, "damcha.sharing": "none", "model.scan_layers": True},
                 marks=pytest.mark.slow),
], ids=["shared", "shared_scanned", "unshared_scanned"])
def test_a_decoder_computes_the_same_and_goes_on_learning(changes: dict[str, Any]) -> None:
  config = decoders.config({**FULL_WIDTH, **changes})
  mha, trained = decoders.decoder({"attention": "mha"})
  if config.model.scan_layers:
    trained = stack_layers(nn.unbox(trained))
    mha = make_decoder(config, "mha")
  boxed = decoder_to_damcha(trained, config, jax.random.key(0))
  assert any(isinstance(leaf, nn.meta.AxisMetadata) for leaf in jax.tree.leaves(
      boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)))
  params, damcha = nn.unbox(boxed), make_decoder(config, "damcha")
  tokens = decoders.TOKENS[:, :10]

  def loss(params: Any) -> tuple[jax.Array, jax.Array]:
    logits = damcha.apply({"params": params}, tokens[:, :-1])
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean(), logits

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (before, logits), grads = step(params)
  expected = jax.jit(lambda params: mha.apply({"params": params}, tokens[:, :-1]))(trained)
  np.testing.assert_allclose(logits, expected, atol=1e-6, rtol=1e-6)
  # The last layer of the generator learns at once, and with it, from then on, all of it.
  adaptive = lambda tree: {
      jax.tree_util.keystr(path): np.abs(leaf).max()
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if "generator" in str(path)
  }
  moves = adaptive(grads)
  assert all(size > 0 for path, size in moves.items() if "out_" in path)
  assert not any(size for path, size in moves.items() if "hidden_0" in path)
  params = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads)
  (after, _), grads = step(params)
  assert after < before
  assert all(size > 0 for size in adaptive(grads).values())
