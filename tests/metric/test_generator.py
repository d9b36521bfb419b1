"""f_theta against NumPy, and the facts about RowSum that the suite builds on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from damcha_jax.metric import MetricGenerator, StaticMetric, blocks_to_rowsum
from damcha_jax.metric import blocks as blocks_lib

D, H, K, W = 12, 3, 4, 5
CONTEXT = np.random.default_rng(0).normal(size=(2, 7, D)).astype(np.float32)
MASKS = {"full": np.ones((H, H)), "diagonal": np.eye(H), "off_diagonal": 1 - np.eye(H),
         "shifted": np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]])}


def make(parameterization="blocks", widths=(W, W), **options):
  generator = MetricGenerator(H, widths, parameterization, **options)
  return generator, generator.init(jax.random.key(0), CONTEXT)


def numpy_blocks(params, context, widths=(W, W)):
  hidden = context
  for index in range(len(widths)):
    layer = params[f"hidden_{index}"]
    z = hidden @ layer["kernel"] + layer["bias"]
    hidden = z * 0.5 * (1 + special.erf(z / np.sqrt(2)))
  flat = hidden @ np.reshape(params["out_kernel"], (hidden.shape[-1], -1))
  return flat.reshape(*context.shape[:-1], H, K, H, K) + params["out_bias"]


@pytest.mark.parametrize("ablation", MASKS)
@pytest.mark.parametrize("fuse_rowsum", [True, False])
@pytest.mark.parametrize("widths", [(), (W, W)])
def test_equals_numpy(ablation, fuse_rowsum, widths):
  generator, variables = make(block_ablation=ablation, fuse_rowsum=fuse_rowsum, widths=widths)
  blocks = numpy_blocks(jax.device_get(variables["params"]), CONTEXT, widths)
  blocks = blocks * MASKS[ablation][:, None, :, None]
  np.testing.assert_allclose(generator.apply(variables, CONTEXT), blocks.sum(-2), atol=1e-5)
  seen = generator.apply(variables, CONTEXT, method="blocks")
  np.testing.assert_allclose(seen, blocks, atol=1e-5)


def test_fusing_changes_neither_outputs_nor_gradients():
  probe = np.random.default_rng(1).normal(size=(2, 7, H, K, K)).astype(np.float32)

  def loss(variables, fuse_rowsum):
    generator = MetricGenerator(H, (W, W), "blocks", fuse_rowsum=fuse_rowsum)
    return jnp.sum(jnp.sin(generator.apply(variables, CONTEXT)) * probe)

  _, variables = make()
  fused, unfused = (jax.value_and_grad(loss)(variables, fuse) for fuse in (True, False))
  chex.assert_trees_all_close(fused, unfused, atol=2e-5, rtol=1e-5)


def test_all_blocks_of_a_row_get_the_same_gradient():
  generator, variables = make()
  grads = jax.grad(lambda v: jnp.sum(generator.apply(v, CONTEXT) ** 3))(variables)["params"]
  for name in ("out_kernel", "out_bias"):
    first = grads[name][..., :1, :]
    assert np.abs(first).max() > 0
    np.testing.assert_array_equal(grads[name], np.broadcast_to(first, grads[name].shape))


def test_conversion_to_rowsum_is_exact():
  blocks, variables = make()
  rowsum, rowsum_variables = make("rowsum")
  converted = blocks_to_rowsum(variables)
  chex.assert_trees_all_equal_shapes_and_dtypes(converted, rowsum_variables)
  np.testing.assert_allclose(rowsum.apply(converted, CONTEXT), blocks.apply(variables, CONTEXT),
                             atol=1e-6)


@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_rowsum_starts_with_the_spread_of_the_summed_blocks(preset):
  generators = [MetricGenerator(8, (64, 64), kind, preset) for kind in ("blocks", "rowsum")]
  context = jax.random.normal(jax.random.key(1), (64, 128))
  std = [jnp.std(g.apply(g.init(jax.random.key(2), context), context)) for g in generators]
  np.testing.assert_allclose(std[0], std[1], rtol=0.05)


def test_the_papers_preset_starts_as_pytorch_does():
  generator = MetricGenerator(8, (50, 50), "blocks")
  params = generator.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
  for leaf, fan_in in ((params["hidden_0"]["kernel"], 64), (params["hidden_0"]["bias"], 64),
                       (params["hidden_1"]["kernel"], 50), (params["out_kernel"], 50),
                       (params["out_bias"], 50)):
    bound = 1 / np.sqrt(fan_in)
    assert 0.9 * bound < np.abs(leaf).max() <= bound
    np.testing.assert_allclose(np.std(leaf), bound / np.sqrt(3), rtol=0.2)


def test_robust_preset_ignores_the_scale_of_its_context():
  generator, variables = make(preset="robust")
  np.testing.assert_allclose(generator.apply(variables, CONTEXT),
                             generator.apply(variables, 100 * CONTEXT), atol=1e-4)


def test_zero_output_is_no_metric_and_still_learns():
  generator, variables = make("rowsum", zero_output=True, row_features=D, column_features=2)
  chex.assert_shape(generator.apply(variables, CONTEXT), (2, 7, H, D, 2))
  assert not np.any(generator.apply(variables, CONTEXT))
  grads = jax.grad(lambda v: jnp.sum(generator.apply(v, CONTEXT)))(variables)
  assert np.abs(grads["params"]["out_kernel"]).max() > 0


def test_bfloat16_computes_near_float32_and_returns_float32():
  generator, variables = make()
  half = generator.copy(dtype=jnp.bfloat16).apply(variables, CONTEXT)
  assert half.dtype == jnp.float32
  np.testing.assert_allclose(half, generator.apply(variables, CONTEXT), atol=2e-2)


@pytest.mark.parametrize("parameterization", ["blocks", "rowsum"])
def test_static_metric_starts_at_the_identity(parameterization):
  static = StaticMetric(H, D, parameterization)
  variables = static.init(jax.random.key(0))
  np.testing.assert_array_equal(static.apply(variables), np.broadcast_to(np.eye(K), (H, K, K)))
  if parameterization == "blocks":
    blocks = static.apply(variables, method="blocks")
    np.testing.assert_array_equal(blocks_lib.join_blocks(blocks), np.eye(D))
    converted = blocks_to_rowsum(variables)
    np.testing.assert_array_equal(StaticMetric(H, D, "rowsum").apply(converted),
                                  static.apply(variables))


@pytest.mark.parametrize("options, message", [
    (dict(parameterization="columns"), "parameterization 'columns'"),
    (dict(preset="best"), "preset 'best'"),
    (dict(initializer="ones"), "initializer 'ones'"),
    (dict(block_ablation="upper", parameterization="blocks"), "block_ablation 'upper'"),
    (dict(block_ablation="diagonal"), "needs parameterization 'blocks'"),
    (dict(num_heads=5), "num_heads 5 does not divide the context width 12"),
    (dict(parameterization="blocks", row_features=12), "use parameterization 'rowsum'"),
])
def test_what_does_not_go_together_is_an_error(options, message):
  generator = MetricGenerator(**{"num_heads": H, **options})
  with pytest.raises(ValueError, match=message):
    generator.init(jax.random.key(0), CONTEXT)


def test_rowsum_has_no_blocks_to_show():
  generator, variables = make("rowsum")
  with pytest.raises(ValueError, match="use 'blocks' to see blocks"):
    generator.apply(variables, CONTEXT, method="blocks")
