"""What an attention refuses, in words, and odd inputs that it must take."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention import ATTENTIONS, DamchaAttention, MultiHeadAttention
from damcha_jax.analysis.causality import random_variables

B, T, S, D, H = 2, 6, 5, 8, 2
X, Y = np.ones((B, T, D), np.float32), np.ones((B, S, D), np.float32)


@pytest.mark.parametrize("inputs, masks, message", [
    ((X, Y[:1]), {}, r"inputs_k must be \[2, 5, features\] .* not shape \(1, 5, 8\)"),
    ((X, Y, X), {}, r"inputs_v must be \[2, 5, features\]"),
    ((X[0],), {}, r"inputs_q must be \[batch, length, features\]"),
    ((X,), {"mask": np.ones((B, 1, T, S), bool)}, r"mask must be broadcastable to \[2, heads, 6, 6\]"),
    ((X,), {"mask": np.ones((3, 1, T, T), bool)}, r"mask must be .* not shape \(3, 1, 6, 6\)"),
    ((X, Y), {"mask": np.ones((S, T), bool)}, r"mask must be broadcastable to \[2, heads, 6, 5\]"),
    ((X,), {"mask": np.ones((B, 3, T, T), bool)}, "mask is for 3 heads, but 2 attend"),
    ((X,), {"bias": np.ones((B, 3, T, T))}, "bias is for 3 heads, but 2 attend"),
    ((X,), {"bias": np.ones((B, 1, S, T))}, r"bias must be broadcastable to \[2, heads, 6, 6\]"),
])
@pytest.mark.parametrize("cls", [MultiHeadAttention, DamchaAttention])
def test_shapes_that_do_not_go_together_are_named(cls, inputs, masks, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: cls(H).init(jax.random.key(0), *inputs, **masks))


def test_a_mask_of_cached_keys_is_as_long_as_the_cache():
  module = MultiHeadAttention(H, decode=True)
  variables = module.init(jax.random.key(0), X)
  call = lambda mask: module.apply(variables, X[:, :1], mask=mask, mutable=["cache"])
  call(np.ones((B, 1, 1, T), bool))
  with pytest.raises(ValueError, match=r"mask must be broadcastable to \[2, heads, 1, 6\]"):
    call(np.ones((B, 1, 1, S), bool))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_no_tokens_give_no_tokens(name):
  x = np.ones((B, 0, 4 * H), np.float32)
  output, _ = ATTENTIONS[name](4, causal=True).init_with_output(jax.random.key(0), x)
  assert output.shape == x.shape


@pytest.mark.parametrize("name", ATTENTIONS)
def test_integers_are_the_numbers_they_are(name):
  x = np.random.default_rng(0).integers(-3, 4, (B, T, 4 * H))
  variables = random_variables(ATTENTIONS[name](4, causal=True), x.astype(np.float32))
  apply = jax.jit(ATTENTIONS[name](4, causal=True).apply)
  np.testing.assert_array_equal(apply(variables, x), apply(variables, x.astype(np.float32)))


@pytest.mark.parametrize("options", [{"stride": 4}, {"context": "sequence", "causal": False},
                                     {"context": "learned"}, {"form": "full_width"}])
@pytest.mark.parametrize("masks", [
    {"segment_ids": np.zeros((B, 0), int)}, {"padding_mask": np.ones((B, 0), bool)},
    {"mask": np.ones((1, 1, 0, 0), bool)}])
def test_no_tokens_have_no_metric(options, masks):
  x = np.ones((B, 0, D), np.float32)
  output, _ = DamchaAttention(H, **options).init_with_output(jax.random.key(0), x, **masks)
  assert output.shape == x.shape


def test_packing_by_a_mask_holds_where_self_attention_is_not_told():
  """Under remat, `attention(x, x)` gets two arrays, and only the mask says what is one document."""
  x = np.random.default_rng(0).normal(size=(1, T, D)).astype(np.float32)
  documents = np.array([0, 0, 0, 1, 1, 1])
  mask = jnp.asarray(documents[:, None] == documents)[None, None]
  variables = random_variables(DamchaAttention(H), x)
  packed = nn.remat(DamchaAttention)(H).apply(variables, x, x, mask=mask)
  alone = [DamchaAttention(H).apply(variables, x[:, part]) for part in np.split(np.arange(T), 2)]
  np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-5)
