"""The language-model task: losses, metrics and parameter groups of the real decoder."""

from __future__ import annotations

import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mix
from damcha_jax.config import ConfigError, LanguageModelConfig, freeze
from damcha_jax.training import decoder, language_model
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training.sharding import path_name


def small_config(**changes) -> LanguageModelConfig:
  config = dataclasses.replace(freeze(mix.get_config("smoke")), dataset="sample_text")
  return dataclasses.replace(config, **changes)


def _damcha(config, **changes):
  return dataclasses.replace(config, damcha=dataclasses.replace(config.damcha, **changes))


class FixedLogits(nn.Module):
  """Returns given logits and sows two layers' auxiliary losses, as scan stacks them."""

  @nn.compact
  def __call__(self, tokens_BT, deterministic=True):
    table = self.param("table", nn.initializers.normal(1.0), (256, 256))
    self.sow("losses", "balance", jnp.array([0.25, 0.5]))
    return table[tokens_BT]


@pytest.fixture(name="fixed")
def _fixed():
  rng = np.random.default_rng(0)
  batch = {"inputs": rng.integers(0, 256, (3, 5)), "targets": rng.integers(0, 256, (3, 5)),
           "weights": rng.integers(0, 2, (3, 5)).astype(np.float32)}
  model = FixedLogits()
  params = model.init(jax.random.key(0), batch["inputs"])["params"]
  logits = np.asarray(params["table"], np.float64)[batch["inputs"]]
  log_sums = np.log(np.exp(logits).sum(-1))
  nats = log_sums - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  return model, params, batch, nats * batch["weights"]


def test_the_loss_is_cross_entropy_plus_the_sown_losses(fixed):
  model, params, batch, nats_BT = fixed
  loss_sum, sums = decoder.loss_and_sums(model, params, batch, None)
  weight = batch["weights"].sum()
  np.testing.assert_allclose(sums["nats"], nats_BT.sum(), rtol=1e-5)
  np.testing.assert_allclose(loss_sum / sums["weight"], nats_BT.sum() / weight + 0.75, rtol=1e-5)
  assert language_model.metrics_of(jax.device_get(sums))["balance"] == pytest.approx(0.75)
  per_row = decoder.sums_per_row(model, params, batch)
  np.testing.assert_allclose(per_row["nats"], nats_BT.sum(-1), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(per_row["weight"], batch["weights"].sum(-1))


def test_metrics_convert_nats():
  metrics = language_model.metrics_of({"nats": 6.0, "weight": 4.0})
  assert metrics == {"nats_per_token": 1.5, "bits_per_byte": 1.5 / math.log(2),
                     "perplexity": math.exp(1.5)}
  assert math.isfinite(language_model.metrics_of({"nats": 1e6, "weight": 1.0})["perplexity"])


def _groups(config, attention):
  """`parameter path -> group` of the whole model."""
  task = language_model.language_model_task(config, attention, seed=0)
  params = nn.meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  paths, _ = jax.tree_util.tree_flatten_with_path(params)
  return {path_name(path): (optimizer_lib.group_of(path_name(path), task.parameter_groups),
                            leaf.ndim) for path, leaf in paths}


@pytest.mark.parametrize("attention,changes", [
    ("mha", {}),
    ("damcha", {}),
    ("damcha", dict(parameterization="blocks", sharing="none")),
    ("damcha", dict(metric="static")),
    ("damcha", dict(context="learned", sharing="stack")),
    ("damcha", dict(form="full_width", update_rank=2)),
])
def test_every_parameter_has_a_group_and_matrices_alone_decay(attention, changes):
  config = _damcha(small_config(), **changes)
  groups = _groups(config, attention)
  for path, (group, ndim) in groups.items():
    leaf = path.split("/")[-1]
    assert group.decay == (leaf in ("kernel", "out_kernel", "metric_blocks", "head")
                           or leaf.endswith("_kernel")), path
    assert ndim >= 2 or not group.decay
    summed = leaf == "metric_blocks" or (
        path.endswith(("generator/out_kernel", "generator/out_bias")))
    rowsum = config.damcha.parameterization == "rowsum" and config.damcha.form == "head_slice"
    assert group.copies == (config.model.num_heads if summed and rowsum else 1), path
  if attention == "damcha":
    assert any("generator" in path or "metric_blocks" in path for path in groups)


def test_a_vocabulary_without_every_byte_is_refused():
  config = small_config()
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=128))
  with pytest.raises(ConfigError, match="vocab_size 128 does not hold the 256 byte values"):
    language_model.language_model_task(config, "mha", seed=0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a machine with CPUs alone")
@pytest.mark.parametrize("implementation, device", [("cudnn", "GPU"), ("pallas", "TPU")])
def test_a_kernel_that_this_machine_has_not_is_refused(implementation, device):
  config = small_config(context_length=128)
  config = dataclasses.replace(config, model=dataclasses.replace(
      config.model, attention_implementation=implementation, dtype="bfloat16"))
  with pytest.raises(ConfigError, match=f"'{implementation}' needs a {device}.*; use 'auto', and for"):
    language_model.language_model_task(config, "mha", 0)


def test_mix_is_evaluated_per_source_and_pooled():
  task = language_model.language_model_task(small_config(dataset="sample_mix"), "mha", seed=0)
  assert list(task.eval_sources) == [f"{split}/{source}" for split in ("validation", "test")
                                     for source in ("sample_text", "sample_text8")]
  single = language_model.language_model_task(small_config(), "mha", seed=0)
  assert list(single.eval_sources) == ["validation", "test"]
