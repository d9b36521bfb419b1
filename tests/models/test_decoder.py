"""The decoder: what is shared, scanned, packed, padded and counted."""

import dataclasses
import functools

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.causality import random_variables
from damcha_jax.attention import DamchaAttention
from damcha_jax.attention.metric import Metric
from damcha_jax.config import ConfigError
from damcha_jax.metric import MetricGenerator, blocks_to_rowsum
from damcha_jax.metric.context import Contexts
from damcha_jax.models.decoder import init_params, make_decoder
from damcha_jax.models.layers import Block, sinusoidal_positions
from damcha_jax.models.stack import BlockStack, stack_layers, unstack_layers
from tests.models import decoders

TOKENS = decoders.TOKENS[:, :10]


def _paths(params):
  return {"/".join(key.key for key in path): leaf.shape
          for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}


@pytest.mark.parametrize("sharing, scan, where", [
    ("generator", False, {"stack/generator"}),
    ("generator", True, {"stack/generator"}),
    ("stack", False, {"stack/generator"}),
    ("stack", True, {"stack/generator"}),
    ("none", False, {"stack/layer_0/attention/generator", "stack/layer_1/attention/generator"}),
    ("none", True, {"stack/layers/attention/generator"}),
])
def test_shared_parameters_are_in_the_tree_once(sharing, scan, where):
  _, params = decoders.decoder({"damcha.sharing": sharing, "model.scan_layers": scan})
  paths = _paths(params)
  found = {path.removesuffix("/out_kernel"): shape for path, shape in paths.items()
           if path.endswith("out_kernel")}
  assert set(found) == where
  stacked = (2,) if scan and sharing == "none" else ()
  assert set(found.values()) == {(*stacked, 6, 2, 4, 4)}
  assert not any("query" in path or "key" in path.split("/") for path in paths)


@pytest.mark.parametrize("name", [
    "stack",
    *(pytest.param(name, marks=pytest.mark.families) for name in ("damcha", "mha", "none"))])
def test_scanned_equals_unrolled_with_gradients(name):
  changes = decoders.MODES[name]
  unrolled, params = decoders.decoder(changes)
  scanned, _ = decoders.decoder({**changes, "model.scan_layers": True, "model.remat": True})

  def loss(model, stack):
    def of(params):
      logits = model.apply({"params": stack(params)}, TOKENS)
      return jnp.sum(jnp.sin(3 * logits)), logits
    return jax.jit(jax.grad(of, has_aux=True))(params)

  grads, logits = loss(unrolled, lambda tree: tree)
  scanned_grads, scanned_logits = loss(scanned, stack_layers)
  np.testing.assert_allclose(scanned_logits, logits, atol=1e-5)
  chex.assert_trees_all_close(scanned_grads, grads, rtol=1e-3, atol=1e-4)
  chex.assert_trees_all_equal(unstack_layers(stack_layers(params)), params)


def test_scanned_model_starts_as_the_unrolled_one():
  make = lambda scan: make_decoder(decoders.config({"model.scan_layers": scan}), "damcha")
  params = {scan: init_params(make(scan), jax.random.key(0), TOKENS) for scan in (False, True)}
  chex.assert_trees_all_equal(nn.unbox(stack_layers(params[False])), nn.unbox(params[True]))
  # The names that scanning itself gives, and the names given when stacking, agree.
  own = jax.eval_shape(make(True).init, jax.random.key(0), TOKENS)["params"]
  assert nn.get_partition_spec(own) == nn.get_partition_spec(params[True])
  kernel = params[True]["stack"]["layers"]["attention"]["value"]["kernel"]
  assert kernel.names == ("layers", "embed", "heads", "head_dim")
  assert params[True]["stack"]["generator"]["out_kernel"].names[0] == "metric_hidden"


@pytest.mark.parametrize("sharing", ["generator", "stack"])
def test_a_layer_makes_its_metric_from_its_own_input_unless_the_stack_makes_one(sharing):
  """Against blocks applied one by one, with metrics made outside of them."""
  x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
  attention = functools.partial(DamchaAttention, 2, causal=True)
  generator = MetricGenerator(2, (6,))
  stack = BlockStack(2, attention, 16, functools.partial(MetricGenerator, 2, (6,)), sharing)
  params = random_variables(stack, x, std=0.4)["params"]
  prefix_means = np.cumsum(x, axis=1) / np.arange(1, 6, dtype=np.float32)[:, None]
  made = generator.apply({"params": params["generator"]}, prefix_means)
  expected = x
  for layer in ("layer_0", "layer_1"):
    if sharing == "stack":
      block, own = Block(attention, 16), params[layer]
      metric = Metric(made, Contexts(prefix_means, None, stride=1))
    else:  # a block with a generator of its own, whose parameters are the shared ones
      block, metric = Block(functools.partial(attention, generator=generator), 16), None
      attention_params = {**params[layer]["attention"], "generator": params["generator"]}
      own = {**params[layer], "attention": attention_params}
    expected = block.apply({"params": own}, expected, metric=metric)
  np.testing.assert_allclose(stack.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["damcha", "stack", "mha"])
def test_documents_of_a_packed_row_equal_rows_of_their_own(name):
  model, params = decoders.decoder(decoders.MODES[name])
  segments = np.array([[3, 3, 3, 3, 3, 1, 1, 1, 1, 1]])
  apply = jax.jit(lambda tokens, segments: model.apply(
      {"params": params}, tokens, segment_ids=segments))
  packed = apply(TOKENS[:1], segments).reshape(2, 5, -1)
  alone = apply(TOKENS[:1].reshape(2, 5), None)
  np.testing.assert_allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("name", [
    "damcha", *(pytest.param(name, marks=pytest.mark.families)
                for name in ("stack", "mha_sinusoidal_post"))])
def test_padding_on_either_side_changes_nothing(name):
  model, params = decoders.decoder(decoders.MODES[name])
  apply = jax.jit(lambda tokens, mask: model.apply(
      {"params": params}, tokens, padding_mask=mask))
  alone = apply(TOKENS[:, :7], None)
  for before, after in ((3, 0), (0, 3), (2, 1)):
    real = np.pad(np.ones((2, 7), bool), ((0, 0), (before, after)))
    tokens = np.pad(TOKENS[:, :7], ((0, 0), (before, after)), constant_values=5)
    padded = apply(tokens, real)
    np.testing.assert_allclose(padded[:, before:before + 7], alone, atol=1e-5)


def test_rowsum_computes_what_blocks_computed():
  model, params = decoders.decoder({"damcha.parameterization": "blocks"})
  rowsum, shapes = decoders.decoder({"damcha.parameterization": "rowsum"})
  converted = blocks_to_rowsum(params)
  chex.assert_trees_all_equal_shapes(converted, shapes)
  np.testing.assert_allclose(rowsum.apply({"params": converted}, TOKENS),
                             model.apply({"params": params}, TOKENS), atol=1e-5)


def test_blocks_are_ablated_where_the_config_says():
  changes = {"damcha.parameterization": "blocks", "damcha.block_ablation_eval": "diagonal"}
  train, params = decoders.decoder(changes)
  evaluation = make_decoder(decoders.config(changes), "damcha", evaluation=True)
  full = train.apply({"params": params}, TOKENS)
  ablated = evaluation.apply({"params": params}, TOKENS)
  assert np.abs(full - ablated).max() > 1e-4
  generator = params["stack"]["generator"]
  keep = np.eye(2)[:, None, :, None]
  diagonal = {**generator, "out_kernel": generator["out_kernel"] * keep,
              "out_bias": generator["out_bias"] * keep}
  by_hand = {**params, "stack": {**params["stack"], "generator": diagonal}}
  np.testing.assert_allclose(ablated, train.apply({"params": by_hand}, TOKENS), atol=1e-5)


def test_logits_come_from_the_tied_embedding_unless_untied():
  tied, params = decoders.decoder({"attention": "mha", "model.tie_embeddings": True})
  assert "head" not in params
  assert tied.apply({"params": params}, TOKENS).shape == (2, 10, decoders.VOCAB)
  untied, params = decoders.decoder({"attention": "mha", "model.tie_embeddings": False})
  before = untied.apply({"params": params}, TOKENS)
  doubled = {**params, "head": 2 * params["head"]}
  np.testing.assert_allclose(untied.apply({"params": doubled}, TOKENS), 2 * before, rtol=1e-5)


@pytest.mark.families
def test_bfloat16_returns_float32_logits_near_those_of_float32():
  model, params = decoders.decoder({})
  half, _ = decoders.decoder({"model.dtype": "bfloat16"})
  expected = model.apply({"params": params}, TOKENS)
  actual = half.apply({"params": params}, TOKENS)
  assert actual.dtype == jnp.float32
  assert 1e-5 < np.abs(actual - expected).max() / np.abs(expected).max() < 0.1


def test_sinusoidal_positions_are_their_formula():
  actual = sinusoidal_positions(jnp.array([[0, 3]]), 6)
  expected = [[f(3 / 10000 ** (2 * i / 6)) for i in range(3) for f in (np.sin, np.cos)]]
  np.testing.assert_allclose(actual[0, 1:], expected, rtol=1e-5)
  np.testing.assert_allclose(actual[0, 0], [0, 1] * 3)


def test_positions_end_with_the_context():
  model, params = decoders.decoder({"attention": "mha"})
  with pytest.raises(ValueError, match="17 tokens exceed the context length 16"):
    model.apply({"params": params}, np.zeros((1, 17), np.int32))
  apply = jax.jit(lambda positions: model.apply({"params": params}, TOKENS[:1],
                                                positions=positions))
  assert np.isfinite(apply(np.arange(6, 16)[None])).all()
  assert np.isnan(apply(np.arange(7, 17)[None])[0, 9]).all()  # cannot be overlooked


@pytest.mark.parametrize("attention, damcha, message", [
    ("moa2", {}, "unknown attention 'moa2'"),
    ("damcha", {"metric": "static", "form": "full_width"}, "static full-width form"),
    ("damcha", {"stride": 0}, "stride 0 must be an integer of at least 1"),
    ("damcha", {"sharing": "some"}, "sharing 'some'"),
])
def test_what_cannot_be_built_is_a_config_error(attention, damcha, message):
  config = decoders.config({})
  # Past the checks of the dataclass, as other callers of the library are.
  broken = dataclasses.replace(config.damcha)
  for name, value in damcha.items():
    object.__setattr__(broken, name, value)
  object.__setattr__(config, "damcha", broken)
  with pytest.raises(ConfigError, match=message):
    make_decoder(config, attention)
