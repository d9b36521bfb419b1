"""The Vision Transformer: its size, what it shares, and every attention as an encoder."""

import dataclasses
import types

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.causality import random_variables
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import AttentionsConfig, ConfigError, MeshConfig, VisionModelConfig
from damcha_jax.models.stack import BlockStack, stack_layers
from damcha_jax.models.vit import make_vit
from damcha_jax.training.sharding import make_mesh, Partitioning, path_name
from tests.models import decoders

IMAGES = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
SMALL = dict(num_layers=2, num_heads=4, features=8, mlp_features=12, image_size=6, patch_size=2,
             num_classes=5)
TABLE_6 = dict(num_layers=12, num_heads=6, features=384, mlp_features=1536, image_size=224,
               patch_size=16, num_classes=1000)


def _config(sizes=None, damcha=None, **model):
  language = decoders.config({})
  fields = dict(pooling="class", initializer="vit", dropout_rate=0.0, attention_dropout_rate=0.0,
                stochastic_depth_rate=0.0, remat=False, scan_layers=False,
                attention_implementation="auto", dtype="float32", param_dtype="float32")
  sections = {field.name: getattr(language, field.name)
              for field in dataclasses.fields(AttentionsConfig)}
  sections["damcha"] = dataclasses.replace(
      language.damcha, **{"context": "sequence", **(damcha or {})})
  return types.SimpleNamespace(
      model=VisionModelConfig(**{**(sizes or SMALL), **fields, **model}), **sections)


def _shapes(vit, images=IMAGES):
  return jax.eval_shape(lambda: vit.init(jax.random.key(0), images))["params"]


def test_table_6_has_the_parameters_of_vit_small():
  """N (4D^2 + 4D attention, 2DF + D + F, 4D norms), patches, positions, class, norm and head."""
  shapes = nn.unbox(_shapes(make_vit(_config(TABLE_6), "mha"), jnp.zeros((1, 224, 224, 3))))
  d, f, num_tokens, num_classes = 384, 1536, 14**2 + 1, 1000
  layer = 4 * d**2 + 4 * d + 2 * d * f + d + f + 4 * d
  rest = (3 * 16**2 + 1) * d + (num_tokens + 1) * d + 2 * d + (d + 1) * num_classes
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 12 * layer + rest == 22_050_664


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_makes_an_encoder_that_can_be_sharded(name):
  vit = make_vit(_config(), name)
  shapes = _shapes(vit)
  partitioning = Partitioning(make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]),
                              decoders.config({}).logical_rules)
  partitioning.shardings(shapes)  # raises where a logical axis has no rule
  # Everything of more than one axis is named, down to DAMCHA's context-free parts.
  named = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
  leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=named)
  assert [f"{path_name(path)} has no axes" for path, leaf in leaves if not named(leaf)] == []
  logits = jax.eval_shape(vit.apply, {"params": nn.unbox(shapes)}, IMAGES)
  chex.assert_shape(logits, (2, 5))
  assert logits.dtype == jnp.float32


@pytest.mark.parametrize("sharing, places", [
    ("generator", {"stack/generator"}),
    ("stack", {"stack/generator"}),
    ("none", {"stack/layer_0/attention/generator", "stack/layer_1/attention/generator"}),
])
def test_generators_are_where_sharing_says(sharing, places):
  vit = make_vit(_config(damcha={"sharing": sharing}), "damcha")
  paths = jax.tree_util.tree_leaves_with_path(nn.unbox(_shapes(vit)))
  names = ["/".join(key.key for key in path) for path, _ in paths]
  assert {name.removesuffix("/out_kernel") for name in names if "out_kernel" in name} == places


@pytest.mark.families
@pytest.mark.parametrize("sharing", ["stack", "generator"])
def test_the_class_sees_every_patch_scanned_or_not(sharing):
  config = _config(damcha={"sharing": sharing})
  vit = make_vit(config, "damcha")
  params = random_variables(vit, IMAGES, std=0.3)["params"]

  def logits(vit, params):
    def total(images):
      logits = vit.apply({"params": params}, images)
      return jnp.sum(jnp.sin(logits)), logits
    return jax.jit(jax.grad(total, has_aux=True))(IMAGES)

  by_pixel, expected = logits(vit, params)
  assert (np.abs(by_pixel) > 0).all()
  scanned = make_vit(_config(damcha={"sharing": sharing}, scan_layers=True), "damcha")
  by_pixel_scanned, actual = logits(scanned, stack_layers(nn.unbox(params)))
  np.testing.assert_allclose(actual, expected, atol=1e-5)
  np.testing.assert_allclose(by_pixel_scanned, by_pixel, atol=1e-5)


@pytest.mark.families
def test_the_paper_s_generator_starts_as_the_authors_vit():
  config = _config(damcha={"widths": (64, 64)})
  params = nn.unbox(jax.jit(make_vit(config, "damcha").init)(jax.random.key(0), IMAGES)["params"])
  generator = params["stack"]["generator"]
  assert not generator["hidden_0"]["bias"].any()
  np.testing.assert_allclose(generator["hidden_1"]["kernel"].std(), 0.02, rtol=0.05)
  feed_forward = params["stack"]["layer_0"]["mlp"]["in"]["kernel"]
  np.testing.assert_allclose(feed_forward.std(), 0.02, rtol=0.3)


@pytest.mark.families
def test_half_precision_and_dropout():
  params = random_variables(make_vit(_config(), "mha"), IMAGES, std=0.3)["params"]
  run = lambda **model: jax.jit(make_vit(_config(**model), "mha").apply)({"params": params}, IMAGES)
  expected, half = run(), run(dtype="bfloat16")
  assert half.dtype == jnp.float32
  assert 1e-5 < np.abs(half - expected).max() / np.abs(expected).max() < 0.1
  dropout = jax.jit(lambda rng: make_vit(_config(dropout_rate=0.5), "mha").apply(
      {"params": params}, IMAGES, deterministic=False, rngs={"dropout": rng}))
  dropped = dropout(jax.random.key(0))
  assert np.abs(dropped - expected).max() > 1e-3


def test_what_does_not_fit_is_said():
  vit = make_vit(_config(), "mha")
  with pytest.raises(ValueError, match=r"\[batch, 6, 6, channels\], not shape \(1, 8, 6, 3\)"):
    _shapes(vit, jnp.zeros((1, 8, 6, 3)))
  with pytest.raises(ValueError, match="patches of 4 do not tile images of 6"):
    _shapes(make_vit(_config(patch_size=4), "mha"))
  with pytest.raises(ConfigError, match="unknown attention 'vit'"):
    make_vit(_config(), "vit")
  with pytest.raises(ConfigError, match="num_heads=3 does not divide"):
    make_vit(_config(num_heads=3), "mha")


@pytest.mark.families
def test_the_mean_over_patches_takes_the_place_of_the_class_token():
  vit = make_vit(_config(pooling="mean"), "mha")
  params = nn.unbox(random_variables(vit, IMAGES, std=0.3)["params"])
  assert "class" not in params and params["positions"].shape == (9, 8)
  logits, state = vit.apply({"params": params}, IMAGES, capture_intermediates=True,
                            mutable=["intermediates"])
  (normed_BTD,) = state["intermediates"]["norm"]["__call__"]
  assert normed_BTD.shape == (2, 9, 8)
  expected = normed_BTD.mean(1) @ params["head"]["kernel"] + params["head"]["bias"]
  np.testing.assert_allclose(logits, expected, rtol=1e-5)
  with pytest.raises(ValueError, match="pooling 'max' is neither 'class' nor 'mean'"):
    _shapes(vit.copy(pooling="max"))


def test_bytes_are_scaled_to_plus_and_minus_one():
  vit = make_vit(_config(), "mha")
  params = random_variables(vit, IMAGES, std=0.3)["params"]
  values = np.random.default_rng(0).integers(0, 256, IMAGES.shape).astype(np.uint8)
  run = jax.jit(lambda images: vit.apply({"params": params}, images))
  np.testing.assert_allclose(run(values), run(values / np.float32(127.5) - 1), atol=1e-6)


@pytest.mark.families
@pytest.mark.parametrize("scan_layers", [False, True])
def test_stochastic_depth_leaves_out_branches_more_often_further_up(scan_layers):
  """A branch that is 1 adds kept / (1 - rate) to an example, at the rates 0, 0.3 and 0.6."""
  class One(nn.Module):

    @nn.compact
    def __call__(self, x_BTD, **options):
      return jnp.ones_like(x_BTD)

  stack = BlockStack(3, One, mlp_features=4, causal=False, stochastic_depth_rate=0.6,
                     scan_layers=scan_layers, sow_layers=not scan_layers)
  x_BTD = jnp.zeros((4000, 1, 2))
  params = jax.tree.map(jnp.zeros_like, stack.init(jax.random.key(0), x_BTD)["params"])
  run = lambda deterministic: stack.apply(
      {"params": params}, x_BTD, deterministic=deterministic, mutable=["intermediates"],
      rngs={"dropout": jax.random.key(1)})
  still, _ = run(True)
  np.testing.assert_array_equal(still, 3.0)  # the feed-forward parts add nothing
  out, state = run(False)
  possible = [1 + a / 0.7 + b / 0.4 for a in (0, 1) for b in (0, 1)]
  assert (np.abs(out[:, 0, :1] - np.array(possible)).min(-1) < 1e-5).all()
  np.testing.assert_array_equal(out[..., 0], out[..., 1])
  assert out.mean() == pytest.approx(3.0, abs=0.1)  # the mean stays
  if not scan_layers:
    depths = np.stack(state["intermediates"]["layer_outputs"])[..., 0, 0]
    kept = (np.diff(depths, axis=0, prepend=0) > 0).mean(1)
    np.testing.assert_allclose(kept, [1.0, 0.7, 0.4], atol=0.03)
