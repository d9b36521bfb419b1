"""Attentions by name with a config's options, in scanned and unrolled decoders."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mix
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError, freeze
from damcha_jax.models.attentions import attention_factory
from damcha_jax.models.decoder import init_params, make_decoder
from damcha_jax.training.decoder import loss_and_sums, parameter_groups
from damcha_jax.training.optimizer import check_groups, group_of

CONFIG = freeze(mix.get_config("smoke"))
TOKENS = np.random.default_rng(0).integers(1, 256, (2, 7))


def config_with(section, **fields):
  changed = dataclasses.replace(getattr(CONFIG, section), **fields)
  return dataclasses.replace(CONFIG, **{section: changed})


@pytest.mark.families
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_scanned_decoder_gives_the_numbers_of_an_unrolled_one(name):
  batch = dict(inputs=TOKENS, targets=TOKENS, weights=np.ones(TOKENS.shape, np.float32))
  found = []
  for scan_layers in (False, True):
    model = make_decoder(config_with("model", scan_layers=scan_layers, remat=scan_layers), name)
    params = nn.unbox(jax.jit(lambda key: init_params(model, key, jnp.asarray(TOKENS)))(
        jax.random.key(0)))
    loss = lambda params: loss_and_sums(model, params, batch, None)
    (total, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))
    found.append(dict(total=total, squares=squares, **sums))
  assert ("switch_loss" in found[0]) == (name == "moa")
  for key, value in found[0].items():
    np.testing.assert_allclose(found[1][key], value, rtol=1e-5, err_msg=key)


def _params(name, config=CONFIG):
  make = attention_factory(config, name, config.model).attention
  x_BTD = jnp.zeros((1, 3, config.model.features))
  return nn.unbox(jax.jit(make(parent=None).init)(jax.random.key(0), x_BTD)["params"])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_optimizer_knows_every_parameter(name):
  make = attention_factory(CONFIG, name, CONFIG.model).attention
  x_BTD = jnp.zeros((1, 3, CONFIG.model.features))
  shapes = jax.eval_shape(make(parent=None).init, jax.random.key(0), x_BTD)["params"]
  check_groups({"attention": nn.unbox(shapes)}, parameter_groups(CONFIG))


def test_matrices_decay_and_scales_and_biases_do_not():
  groups = parameter_groups(CONFIG)
  for name, decays in (("kernel", True), ("mixing_kernel", True), ("scale", False),
                       ("slope_scale", False), ("bias", False), ("content_bias", False)):
    assert group_of(f"stack/layer_0/attention/{name}", groups).decay == decays, name


def test_comparators_keep_their_papers_initial_values():
  config = config_with("model", initializer="gpt2", features=128)
  # A normal distribution cut off at 2 sigma has 0.88 of the deviation.
  for name, std in (("mha", 0.02), ("tha", 0.88 / np.sqrt(128)), ("mma", 1 / np.sqrt(128))):
    kernel = np.asarray(_params(name, config)["value"]["kernel"])
    assert kernel.std() == pytest.approx(std, rel=0.02), name
  assert not _params("moa")["router_kernel"].any()


@pytest.mark.parametrize("section, fields, changed", [
    ("tha", dict(num_softmax_heads=7), lambda params: params["weights_kernel"].shape == (7, 4)),
    ("dcmha", dict(qk_norm="rms"), lambda params: "key_norm" in params),
    ("colmha", dict(key_features=6), lambda params: params["mixing_kernel"].shape == (4, 6)),
    ("colmha", dict(key_features=8, mixing_init="blocks"),
     lambda params: np.array_equal(params["mixing_kernel"], np.kron(np.eye(4), np.ones((1, 2))))),
    ("moa", dict(num_experts=5), lambda params: params["query_kernel"].shape == (5, 16, 4)),
    ("tha", dict(key_head_features=3), lambda params: params["key"]["kernel"].shape == (16, 4, 3)),
    ("tha", dict(value_head_features=5), lambda params: params["value"]["kernel"].shape[2] == 5),
])
def test_options_reach_the_attention(section, fields, changed):
  assert not changed(_params(section))
  assert changed(_params(section, config_with(section, **fields)))


@pytest.mark.parametrize("name, fields, field, value", [
    ("authors_dcmha", dict(router_rank=3), "router_rank", 3),
    ("authors_moa", dict(expert_factor=5), "expert_factor", 5),
    ("authors_mma", dict(local_window=2), "window", 2),
    ("authors_mma", dict(allow_future_leak=True), "allow_future_leak", True),
])
def test_options_reach_the_authors_attentions(name, fields, field, value):
  make = lambda config: attention_factory(config, name, config.model).attention(parent=None)
  assert getattr(make(CONFIG), field) != value
  assert getattr(make(config_with("authors", **fields)), field) == value


@pytest.mark.parametrize("fields, field", [
    (dict(initializer="flax"), "initializer"),
    (dict(residual=True), "residual"),
    (dict(normalize_context=True), "normalize_context"),
])
def test_entries_of_the_preset_can_be_replaced_one_by_one(fields, field):
  preset = lambda config: attention_factory(config, "damcha", config.model).stack_options[
      "generator"](parent=None)._preset()  # pylint: disable=protected-access
  before, after = preset(CONFIG), preset(config_with("damcha", **fields))
  assert getattr(before, field) != fields[field]
  assert after == before._replace(**fields)


def test_the_full_width_form_does_without_its_static_part():
  full_width = dict(form="full_width", update_rank=2, sharing="none", parameterization="rowsum")
  assert "query" in _params("damcha", config_with("damcha", **full_width))
  alone = _params("damcha", config_with("damcha", static_part=False, **full_width))
  assert "query" not in alone and "update_key" in alone


@pytest.mark.parametrize("name, section, fields, message", [
    ("damcha", "damcha", dict(form="full_width", parameterization="rowsum", update_rank=0,
                              static_part=False), "leaves no metric at all"),
    ("dcmah", "model", {}, "unknown attention 'dcmah'; choose from damcha, mha, tha, dcmha"),
    ("mma", "model", dict(num_heads=2), "num_heads 2 is not a multiple of the 4 groups"),
    ("moa", "moa", dict(num_experts=3), "experts_per_token 4 exceeds num_experts 3"),
    ("mha", "model", dict(features=18), "model.num_heads=4 does not divide model.features=18"),
])
def test_what_cannot_be_built_is_a_config_error(name, section, fields, message):
  config = dataclasses.replace(getattr(CONFIG, section), **fields)
  model = config if section == "model" else CONFIG.model
  sections = CONFIG if section == "model" else dataclasses.replace(CONFIG, **{section: config})
  with pytest.raises(ConfigError, match=message):
    attention_factory(sections, name, model)
