"""Adaptivity separates generators that follow their context from those that ignore it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.geometry import (adaptivity, adaptivity_by_layer, block_drift,
                                          stored_blocks)
from damcha_jax.metric import MetricGenerator

CONTEXTS = jax.random.normal(jax.random.key(0), (32, 512))


def test_equals_its_definition():
  metric = np.random.default_rng(0).normal(size=(32, 4, 3)) + np.arange(3)
  expected = np.sqrt(metric.var(0).mean() / metric.var())
  assert adaptivity(lambda _: jnp.asarray(metric), CONTEXTS) == pytest.approx(expected, rel=1e-5)


def test_bounds():
  constant = jax.random.normal(jax.random.key(1), (4, 4))
  assert adaptivity(lambda c: jnp.broadcast_to(constant, (len(c), 4, 4)), CONTEXTS) < 1e-6
  assert adaptivity(lambda c: jnp.zeros((len(c), 4)), CONTEXTS) == 0
  assert adaptivity(lambda c: c - c.mean(0), CONTEXTS) == pytest.approx(1.0)


def _parts(preset, depth):
  """Standard deviations of the input-dependent and of the constant part of m, D=512, W=20."""
  generator = MetricGenerator(8, widths=(20,) * (depth - 1), preset=preset)
  variables = generator.init(jax.random.key(1), CONTEXTS)
  generate = jax.jit(lambda contexts: generator.apply(variables, contexts))
  metric = np.asarray(generate(CONTEXTS), np.float64)
  return metric.std(0).mean(), metric.mean(0).std(), adaptivity(generate, CONTEXTS)


def test_the_papers_nine_layers_are_nearly_blind_and_three_are_not():
  varying, constant, adaptive = _parts("paper", depth=9)
  block = np.sqrt(8)  # m adds the blocks of 8 heads; the figures are those of one block
  assert 3e-5 < varying / block < 5e-5 and 0.12 < constant / block < 0.15
  assert adaptive < 1e-3
  varying, constant, _ = _parts("paper", depth=3)
  assert 0.05 < varying / block < 0.07 and 0.12 < constant / block < 0.15


def test_the_robust_preset_follows_its_context_at_any_depth():
  for depth in (3, 9):
    assert _parts("robust", depth)[2] > 0.3


def test_layers_are_told_apart_unrolled_scanned_and_shared():
  m = np.random.default_rng(0).normal(size=(3, 2, 4, 2, 3, 3)).astype(np.float32)
  m[1] = m[1, :1, :1]  # the middle layer's metric ignores its context
  unrolled = {"stack": {f"layer_{i}": {"attention": {"metric": (m[i],)}} for i in (2, 0, 1)}}
  scanned = {"stack": {"layers": {"attention": {"metric": (m,)}}}}
  for intermediates in (unrolled, scanned):
    values = adaptivity_by_layer(intermediates)
    assert values["adaptivity/layer_1"] < 1e-6
    assert 0.9 < values["adaptivity/layer_0"] != values["adaptivity/layer_2"] > 0.9
    layers = [values[f"adaptivity/layer_{i}"] for i in range(3)]
    assert values["adaptivity"] == pytest.approx(sum(layers) / 3)
  assert set(adaptivity_by_layer({"stack": {"metric": (m[0],)}})) == {
      "adaptivity", "adaptivity/layer_0"}
  assert adaptivity_by_layer({}) == {}


def test_block_drift_equals_its_definition():
  rng, shape = np.random.default_rng(0), (5, 3, 2, 3, 2)  # [W, H, K, H, K]
  start, common, apart = (rng.normal(size=size) for size in (shape, (5, 3, 2, 1, 2), shape))
  apart -= apart.mean(-2, keepdims=True)
  rms = lambda array: np.sqrt(np.mean(array**2))
  assert block_drift([start], [start + common + 1e-3 * apart]) == pytest.approx({
      "block_drift": rms(common + 1e-3 * apart), "block_spread": 1e-3 * rms(apart),
      "block_spread_max": 1e-3 * np.abs(apart).max(),
      "block_difference": rms(start - start.mean(-2, keepdims=True))})
  assert block_drift([start], [start])["block_drift"] == 0
  both = block_drift([start, start[0]], [start + 1, start[0] - 1])  # of a kernel and a bias
  assert both["block_drift"] == pytest.approx(1) and both["block_spread_max"] < 1e-12


def test_the_blocks_of_generators_and_static_metrics_are_found():
  generator = MetricGenerator(8, widths=(4, 4), parameterization="blocks")
  params = {"stack": {"generator": generator.init(jax.random.key(0), CONTEXTS)["params"],
                      "layer_0": {"metric_blocks": jnp.ones((8, 64, 8, 64))}},
            "embed": {"embedding": jnp.ones((3, 2))}}
  assert sorted(block.shape for block in stored_blocks(params)) == [
      (4, 8, 64, 8, 64), (8, 64, 8, 64), (8, 64, 8, 64)]
