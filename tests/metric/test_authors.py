"""The authors' generator options against literal NumPy, closed forms and statistics."""

from __future__ import annotations

import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.blocks import join_blocks
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.models.stack import BlockStack
from damcha_jax.models.stack import stack_layers

D, H, K = 12, 3, 4
SCALES = dict(diagonal_scale=0.7, off_diagonal_scale=1.6)
MODES = {
    "mlp": dict(),
    "linear_comb": dict(off_diagonal="linear_comb"),
    "bayesian": dict(off_diagonal="bayesian"),
    "separate_B": dict(off_diagonal="separate_B"),
    "compact": dict(compact_rank=2),
    "compact_separate_B": dict(compact_rank=2, off_diagonal="separate_B"),
    "free_linear_comb": dict(free_metric=True, off_diagonal="linear_comb"),
    "layer_bias": dict(layer_bias_rank=2, num_layers=3, off_diagonal="linear_comb"),
    "compact_layer_bias": dict(layer_bias_rank=5, num_layers=3, compact_rank=1),
}


def _make(mode: str = "mlp", **fields: Any) -> AuthorsMetricGenerator:
  return AuthorsMetricGenerator(H, **{"widths": (5, 6), **MODES[mode], **fields})


def _context(seed: int = 0) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), (2, 4, D))


def _params(module: nn.Module, inputs: Any = None) -> Any:
  """Parameters of order one, so that no term hides behind another."""
  inputs = _context() if inputs is None else inputs
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), inputs))["params"]
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), jnp.float32), shapes
  )


def _numpy_metric(generator: AuthorsMetricGenerator, params: Any, context: Any, layer: int):
  """M [.., D, D], written out block by block."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  erf = np.vectorize(math.erf)
  hidden = np.asarray(context, np.float64)
  for index in range(len(generator.widths)):
    dense = params[f"hidden_{index}"]
    hidden = hidden @ dense["kernel"] + dense["bias"]
    hidden = 0.5 * hidden * (1 + erf(hidden / np.sqrt(2)))
  kernel, bias = params["out_kernel"], params["out_bias"]
  out = hidden @ kernel.reshape(len(kernel), -1) + bias.reshape(-1)
  rank, batch = generator.compact_rank, out.shape[:-1]
  if rank:
    factors = out.reshape(*batch, 2, D, rank)
    metric = factors[..., 0, :, :] @ np.swapaxes(factors[..., 1, :, :], -1, -2) / np.sqrt(rank)
  else:
    metric = out.reshape(*batch, D, D)
  part = [slice(i * K, (i + 1) * K) for i in range(H)]
  raw = metric.copy()
  pairs = [(i, j) for i in range(H) for j in range(H) if i != j]
  for i, j in pairs if not (rank or generator.free_metric) else []:
    if generator.off_diagonal in ("linear_comb", "bayesian"):
      alpha = params["alpha"][i, j]
      metric[..., part[i], part[j]] = sum(alpha[k] * raw[..., part[k], part[k]] for k in range(H))
    elif generator.off_diagonal == "separate_B":
      metric[..., part[i], part[j]] = params["separate_blocks"][i, :, j]
  if generator.layer_bias_rank:
    scaled = params["bias_left"] * params["bias_scales"][layer]
    metric = metric + scaled @ params["bias_right"].T
  for i in range(H):
    metric[..., part[i], part[i]] *= generator.diagonal_scale
  for i, j in pairs:
    metric[..., part[i], part[j]] *= generator.off_diagonal_scale
  return metric


@pytest.mark.parametrize("mode", MODES)
def test_blocks_equal_the_definition_in_float64(mode: str) -> None:
  with jax.enable_x64(True):
    generator = _make(mode, dtype=jnp.float64, param_dtype=jnp.float64, **SCALES)
    context = jnp.asarray(_context(), jnp.float64)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), _params(generator))
    layer = generator.num_layers - 1
    blocks = generator.apply({"params": params}, context, layer, method="blocks")
    assert blocks.dtype == jnp.float64
    expected = _numpy_metric(generator, params, context, layer)
    np.testing.assert_allclose(join_blocks(blocks), expected, rtol=1e-12, atol=1e-12)
    metric = generator.apply({"params": params}, context, layer)
    assert metric.dtype == jnp.float64
    summed = expected.reshape(2, 4, H, K, H, K).sum(-2)
    np.testing.assert_allclose(metric, summed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ablation", ["full", "diagonal", "off_diagonal"])
@pytest.mark.parametrize("mode", MODES)
def test_row_sum_equals_summed_blocks_also_when_sampled(mode: str, ablation: str) -> None:
  generator = _make(mode, block_ablation=ablation, **SCALES)
  variables, rngs = {"params": _params(generator)}, {"alpha": jax.random.key(7)}
  blocks = generator.apply(variables, _context(), method="blocks", rngs=rngs)
  for fuse_rowsum in (True, False):
    metric = generator.clone(fuse_rowsum=fuse_rowsum).apply(variables, _context(), rngs=rngs)
    np.testing.assert_allclose(metric, blocks.sum(-2), rtol=1e-5, atol=1e-5)
  off_diagonal = np.abs(blocks[..., 0, :, 1, :]).max()
  diagonal = np.abs(blocks[..., 1, :, 1, :]).max()
  assert (off_diagonal == 0.0) == (ablation == "diagonal")
  assert (diagonal == 0.0) == (ablation == "off_diagonal")


def test_ablation_shows_the_blocks_unscaled() -> None:
  scaled, unscaled = _make("layer_bias", **SCALES), _make("layer_bias")
  variables = {"params": _params(scaled)}
  ablated = scaled.clone(block_ablation="diagonal").apply(variables, _context(), method="blocks")
  whole = unscaled.apply(variables, _context(), method="blocks")
  np.testing.assert_allclose(ablated[..., 1, :, 1, :], whole[..., 1, :, 1, :], rtol=1e-6)


def test_without_options_it_is_the_metric_generator() -> None:
  authors, plain = _make(), MetricGenerator(H, (5, 6), parameterization="blocks")
  assert jax.tree.map(jnp.shape, _params(plain)) == jax.tree.map(jnp.shape, _params(authors))
  variables = {"params": _params(plain)}
  for method in ("__call__", "blocks"):
    expected = plain.apply(variables, _context(), method=method)
    np.testing.assert_allclose(
        authors.apply(variables, _context(), method=method), expected, rtol=1e-6, atol=1e-6
    )


def test_kl_is_the_integral_that_defines_it() -> None:
  generator = _make("bayesian")
  params = _params(generator)
  mean, std = np.asarray(params["alpha"]), np.exp(0.5 * np.asarray(params["alpha_logvar"]))
  points = np.linspace(-12, 12, 40001)
  normal = lambda x, m, s: np.exp(-0.5 * ((x - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))
  expected = 0.0
  for i, j, k in np.ndindex(H, H, H):
    if i != j:  # alpha_iik is never used, so it is no random variable of the model
      density = normal(points, mean[i, j, k], std[i, j, k])
      log_ratio = np.log(std[i, j, k]) + 0.5 * ((points - mean[i, j, k]) / std[i, j, k]) ** 2
      expected += np.trapezoid(density * (0.5 * points**2 - log_ratio), points)
  actual = generator.apply({"params": params}, method="kl_divergence")
  np.testing.assert_allclose(actual, expected, rtol=1e-4)
  moved = {**params, "alpha": params["alpha"] + 3.0 * jnp.eye(H)[..., None]}
  np.testing.assert_array_equal(
      generator.apply({"params": moved}, method="kl_divergence"), actual
  )


def test_kl_is_zero_without_a_distribution() -> None:
  generator = _make("linear_comb")
  assert generator.apply({"params": _params(generator)}, method="kl_divergence") == 0.0


def test_alpha_is_sampled_in_training_and_at_its_mean_otherwise() -> None:
  generator, context = _make("bayesian"), _context()[0, 0]
  params = {**_params(generator), "alpha_logvar": jnp.full((H, H, H), 2 * math.log(0.3))}
  variables = {"params": params}
  sample = jax.vmap(lambda key: generator.apply(variables, context, rngs={"alpha": key}))
  samples = np.asarray(sample(jax.random.split(jax.random.key(3), 4000)))
  mean = np.asarray(generator.apply(variables, context))
  np.testing.assert_array_equal(mean, generator.apply(variables, context))
  diagonal = generator.apply(variables, context, method="blocks")
  diagonal = np.stack([diagonal[i, :, i] for i in range(H)])
  # m_i adds (H - 1) H independent alphas of variance 0.09, each on one diagonal block.
  std = np.sqrt(0.09 * (H - 1) * (diagonal**2).sum(0))
  assert np.all(np.abs(samples.mean(0) - mean) < 5 * std / math.sqrt(4000))
  np.testing.assert_allclose(samples.std(0), np.broadcast_to(std, mean.shape), rtol=0.06)


def test_dropout_needs_a_random_stream() -> None:
  generator = _make(dropout_rate=0.5)
  variables = {"params": _params(generator)}
  plain = _make().apply(variables, _context())
  np.testing.assert_array_equal(generator.apply(variables, _context()), plain)
  dropped = generator.apply(variables, _context(), rngs={"dropout": jax.random.key(0)})
  assert np.abs(dropped - plain).max() > 0.1


def test_initial_values() -> None:
  generator = AuthorsMetricGenerator(
      8, (16,), off_diagonal="bayesian", layer_bias_rank=32, num_layers=4
  )
  params = jax.jit(generator.init)(jax.random.key(0), jnp.zeros((1, 32)))["params"]
  np.testing.assert_allclose(np.std(params["alpha"]), 0.1, rtol=0.1)
  np.testing.assert_array_equal(params["alpha_logvar"], -4.0)
  for name in ("bias_left", "bias_right"):
    gram = np.asarray(params[name]).T @ np.asarray(params[name])
    np.testing.assert_allclose(gram, 0.01 * np.eye(32), atol=1e-6)
  expected = 0.1 * (1 + 0.2 * np.arange(4))
  np.testing.assert_allclose(np.std(params["bias_scales"], axis=1), expected, rtol=0.35)
  assert np.abs(params["out_kernel"]).max() <= 1 / 4
  np.testing.assert_allclose(np.std(params["out_kernel"]), 1 / math.sqrt(3 * 16), rtol=0.02)
  separate = AuthorsMetricGenerator(8, (16,), off_diagonal="separate_B")
  params = jax.jit(separate.init)(jax.random.key(0), jnp.zeros((1, 32)))["params"]
  np.testing.assert_allclose(np.std(params["separate_blocks"]), 0.01, rtol=0.1)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(parameterization="rowsum"), "parameterization 'rowsum'.*use 'blocks'"),
        (dict(off_diagonal="lowrank"), "off_diagonal 'lowrank' is not one of"),
        (dict(compact_rank=-1), "compact_rank -1 must be an integer of at least 0"),
        (dict(block_ablation="none"), "block_ablation 'none'"),
        (dict(initializer="xavier"), "initializer 'xavier'"),
        (dict(layer_bias_rank=2, num_layers=2, layer_index=2), "layer_index 2 is outside the 2"),
        (dict(layer_bias_rank=2, num_layers=2, layer_index=-1), "layer_index -1 is outside the 2"),
    ],
)
def test_options_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    _make(**fields).init(jax.random.key(0), _context())


def test_heads_must_divide_the_width() -> None:
  with pytest.raises(ValueError, match="num_heads 3 does not divide the context width 10"):
    _make().init(jax.random.key(0), jnp.zeros((1, 10)))


def test_a_traced_layer_is_looked_up_and_clamped() -> None:
  generator = _make("layer_bias")
  variables = {"params": _params(generator)}
  at = jax.jit(lambda layer: generator.apply(variables, _context(), layer))
  by_layer = [generator.apply(variables, _context(), layer) for layer in range(3)]
  for traced, layer in ((0, 0), (1, 1), (2, 2), (9, 2), (-1, 0)):
    np.testing.assert_allclose(at(traced), by_layer[layer], rtol=1e-5, atol=1e-5)
  assert np.abs(by_layer[0] - by_layer[1]).max() > 0.1


@pytest.mark.parametrize("shared", [True, False])
def test_every_layer_of_a_stack_gets_its_own_bias_also_under_scan(shared: bool) -> None:
  attention = functools.partial(DamchaAttention, num_heads=H, causal=True)
  if shared:
    options = dict(attention=attention, generator=functools.partial(_make, "layer_bias"))
  else:
    own = lambda **fields: attention(generator=_make("layer_bias", parent=None), **fields)
    options = dict(attention=own)
  stack = BlockStack(2, mlp_features=8, sharing="generator", **options)
  x_BTD = jax.random.normal(jax.random.key(5), (1, 5, D))
  params = _params(stack, x_BTD)

  def move(index: int) -> Any:
    """Moves the scales of one layer wherever they are."""
    change = lambda path, leaf: (
        leaf.at[index].add(1.0) if path[-1].key == "bias_scales" else leaf
    )
    return jax.tree_util.tree_map_with_path(change, params)

  unrolled, scanned = jax.jit(stack.apply), jax.jit(stack.clone(scan_layers=True).apply)
  outputs = []
  for weights in (params, move(0), move(1)):
    outputs.append(np.asarray(unrolled({"params": weights}, x_BTD)))
    actual = scanned({"params": stack_layers(weights)}, x_BTD)
    np.testing.assert_allclose(actual, outputs[-1], rtol=1e-5, atol=1e-5)
  plain, first_moved, last_moved = outputs
  assert np.abs(first_moved - plain).max() > 1e-3
  assert np.abs(last_moved - plain).max() > 1e-3
  assert np.abs(last_moved - first_moved).max() > 1e-3


def test_partitioned_parameters_have_the_same_values() -> None:
  plain, partitioned = _make("bayesian"), _make("bayesian", partitioned=True)
  boxed = jax.jit(partitioned.init)(jax.random.key(0), _context())
  assert boxed["params"]["out_kernel"].names == ("metric_hidden", "heads", "metric_row", None, None)
  expected = jax.jit(plain.init)(jax.random.key(0), _context())
  jax.tree.map(np.testing.assert_array_equal, nn.unbox(boxed), expected)
