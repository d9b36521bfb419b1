"""What the probe reads out of a decoder is what NumPy makes of its parameters and inputs."""

import jax
import numpy as np
import pytest

from damcha_jax.analysis import probe
from damcha_jax.training.decoder import loss_and_sums
from tests.models import decoders

# A post-LN layer sees the stack's input itself, and a generator of one layer is a product.
PLAIN = {"model.norm_placement": "post", "damcha.widths": (), "damcha.parameterization": "blocks"}
STRIDE, HEADS, WIDTH = 3, 2, 4


def _setup(changes):
  model, params = decoders.decoder(changes)
  loss_fn = lambda params, batch, rng: loss_and_sums(model, params, batch, rng)
  tokens = decoders.TOKENS.astype(np.int32)
  batch = {"inputs": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}
  return model, loss_fn, jax.device_get(params), batch


def _input(params, batch):
  """[B, T, D] of the first layer."""
  return params["embed"]["embedding"][batch["inputs"]] + params["positions"]


def _blocks(params, x):
  """M [B, C, H, K, H, K] of the first layer's contexts."""
  ends = range(0, x.shape[1], STRIDE)
  contexts = np.stack([x[:, :end + 1].mean(1) for end in ends], axis=1)
  generator = params["stack"]["generator"]
  return np.tensordot(contexts, generator["out_kernel"], 1) + generator["out_bias"]


def test_metrics_blocks_and_weights_are_those_of_the_definition():
  model, loss_fn, params, batch = _setup(PLAIN)
  x = _input(params, batch)
  blocks = _blocks(params, x)
  m = blocks.sum(-2)
  found = probe.metrics(model, loss_fn, params, batch)
  assert list(found.m) == [0, 1] and found.m[1].shape == found.m[0].shape
  np.testing.assert_allclose(found.m[0], m.reshape(-1, HEADS, WIDTH, WIDTH), rtol=1e-4, atol=1e-5)
  energy = (blocks[0] ** 2).sum((2, 4)).mean(0)
  np.testing.assert_allclose(found.block_energy[0], energy, rtol=1e-4)

  weights = probe.attention_weights(model, loss_fn, params, batch)
  assert list(weights) == [0, 1]
  slices = x.reshape(*x.shape[:2], HEADS, WIDTH)
  length = x.shape[1]
  queries = np.einsum("bthk,bthkl->bthl", slices, m[:, np.arange(length) // STRIDE])
  scores = np.einsum("bthl,bshl->bhts", queries, slices) / np.sqrt(WIDTH)
  scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
  expected = np.exp(scores - scores.max(-1, keepdims=True))
  expected /= expected.sum(-1, keepdims=True)
  np.testing.assert_allclose(weights[0], expected, rtol=1e-3, atol=1e-5)


def test_contexts_that_no_token_uses_are_left_out():
  model, loss_fn, params, batch = _setup(PLAIN)
  lengths = np.array([7, 16])
  batch["padding_mask"] = np.arange(16) < lengths[:, None]
  found = probe.metrics(model, loss_fn, params, batch)
  expected = _blocks(params, _input(params, batch)).sum(-2)
  expected = np.concatenate([expected[0, :3], expected[1, :6]])  # ceil(7 / 3) and ceil(16 / 3)
  np.testing.assert_allclose(found.m[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes, layers, has_blocks", [
    ({"damcha.sharing": "stack"}, [0], False),
    ({"damcha.sharing": "none", "damcha.parameterization": "blocks"}, [0, 1], True),
    ({"attention": "mha"}, [], False),
])
def test_every_way_of_sharing_is_seen(changes, layers, has_blocks):
  found = probe.metrics(*_setup(changes))
  assert sorted(found.m) == layers and bool(found.block_energy) == has_blocks


def test_a_static_metric_is_its_parameter():
  model, loss_fn, params, batch = _setup({"damcha.metric": "static",
                                          "damcha.parameterization": "blocks"})
  found = probe.metrics(model, loss_fn, params, batch)
  for layer in (0, 1):
    blocks = params["stack"][f"layer_{layer}"]["attention"]["generator"]["metric_blocks"]
    np.testing.assert_allclose(found.m[layer], blocks.sum(-2)[None], rtol=1e-5)
    np.testing.assert_allclose(found.block_energy[layer], (blocks**2).sum((1, 3)), rtol=1e-5)
