"""The attention in a model of Flax NNX, through the bridge that the README shows."""

from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
import jax
import jax.numpy as jnp
import numpy as np
import optax

from damcha_jax.attention import DamchaAttention

X_BTD = jax.random.normal(jax.random.key(0), (2, 6, 8))


class Model(nnx.Module):
  """An attention with a residual connection and a head."""

  def __init__(self, rngs: nnx.Rngs):
    self.attention = bridge.ToNNX(DamchaAttention(num_heads=2, causal=True), rngs=rngs)
    self.attention.lazy_init(X_BTD)
    self.head = nnx.Linear(8, 3, rngs=rngs)

  def __call__(self, x_BTD, **options):
    return self.head(x_BTD + self.attention(x_BTD, **options))


def test_it_computes_what_the_linen_module_does():
  layer = Model(nnx.Rngs(0)).attention
  params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  module = DamchaAttention(num_heads=2, causal=True)
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X_BTD))["params"]
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nn.unbox(shapes))
  mask = nn.make_causal_mask(jnp.ones(X_BTD.shape[:2]))
  for options in ({}, {"mask": mask}, {"padding_mask": jnp.arange(6) < jnp.array([[6], [4]])}):
    expected = module.apply({"params": params}, X_BTD, **options)
    np.testing.assert_allclose(layer(X_BTD, **options), expected, rtol=1e-6, atol=1e-6)


def test_it_trains_with_an_nnx_optimizer():
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  before = nnx.to_pure_dict(nnx.state(model, nnx.Param))

  @nnx.jit
  def update(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(X_BTD) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  losses = [float(update(model, optimizer)) for _ in range(5)]
  assert losses[-1] < losses[0]
  after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  assert all(np.any(old != new) for old, new in zip(jax.tree.leaves(before),
                                                    jax.tree.leaves(after)))
