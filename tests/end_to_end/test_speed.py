"""The speed benchmark: the plain decoder it measures against, and the program as a user runs it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import speed as speed_config
from damcha_jax.config import freeze
from damcha_jax.config.efficiency import EfficiencyConfig
from damcha_jax.models.decoder import init_cache
from experiments import command_line
from experiments import efficiency
from experiments import speed

# Names of the suite's modules by those that Flax gives in the plain decoder.
PARTS = {"LayerNorm_0": "attention_norm", "MultiHeadDotProductAttention_0": "attention",
         "LayerNorm_1": "mlp_norm"}


def _shape(**sizes):
  config = freeze(speed_config.get_config("smoke"), EfficiencyConfig)
  shape = config.speed.shapes[0]
  return config, dataclasses.replace(shape, model=dataclasses.replace(shape.model, **sizes))


def _decoders(config, shape, *names):
  found = {decoder.name: decoder for decoder in speed.make_decoders(config, shape)}
  return [found[name] for name in names]


def _as_the_suites(plain):
  """Parameters of the plain decoder under the names of the suite's."""
  layers = {}
  for index in range(sum(name.startswith("PlainBlock") for name in plain)):
    block = plain[f"PlainBlock_{index}"]
    layers[f"layer_{index}"] = {
        **{name: block[part] for part, name in PARTS.items()},
        "mlp": {"in": block["Dense_0"], "out": block["Dense_1"]}}
  return {"embed": plain["Embed_0"], "positions": plain["positions"],
          "norm": plain["LayerNorm_0"], "stack": layers}


def _random(params):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), params)


@pytest.mark.families
def test_the_plain_decoder_is_the_suites_multi_head_decoder():
  config, shape = _shape(num_layers=2)
  plain, mha = _decoders(config, shape, speed.PLAIN, speed.MHA)
  params = _random(plain.params)
  tokens_BT = jax.random.randint(jax.random.key(0), (2, shape.context_length), 0, 256)
  logits = plain.model().apply({"params": params}, tokens_BT)
  ours = mha.model().apply({"params": _as_the_suites(params)}, tokens_BT)
  np.testing.assert_allclose(logits, ours, atol=1e-4)
  assert np.std(logits) > 0.1


def test_the_plain_decoder_computes_the_same_with_a_cache():
  config, shape = _shape(num_layers=2)
  (plain,) = _decoders(config, shape, speed.PLAIN)
  params = _random(plain.params)
  tokens_BT = jax.random.randint(jax.random.key(0), (2, shape.context_length), 0, 256)
  cached = plain.model(decode=True)
  cache = init_cache(cached, 2, shape.context_length)
  step = jax.jit(lambda cache, tokens: cached.apply({"params": params, "cache": cache}, tokens,
                                                    mutable=["cache"]))
  logits = []
  for index in range(shape.context_length):
    one, updated = step(cache, tokens_BT[:, index:index + 1])
    cache = updated["cache"]
    logits.append(one)
  np.testing.assert_allclose(np.concatenate(logits, axis=1),
                             plain.model().apply({"params": params}, tokens_BT), atol=1e-4)


def test_contenders_are_the_attentions_with_damchas_variants_in_place_of_damcha():
  config, shape = _shape()
  names = [decoder.name for decoder in speed.make_decoders(config, shape)]
  assert names == ["flax", "mha", *(one.name for one in config.speed.damcha_variants)]
  omitting = dataclasses.replace(shape, omitted=("flax", "mha"))
  assert [decoder.name for decoder in speed.make_decoders(config, omitting)] == names[2:]


def test_variants_differ_in_where_the_metric_comes_from():
  config, shape = _shape()
  models = {}
  for decoder in speed.make_decoders(config, shape):
    if decoder.name.startswith("damcha"):
      stack = decoder.model().stack.keywords
      models[decoder.name] = stack["sharing"], stack["stride"]
  assert models["damcha_stride64"] == ("generator", 64)
  assert models["damcha_prefix_stack"] == ("stack", 1)


@pytest.mark.families
def test_a_train_step_updates_and_is_compiled_anew(tmp_path):
  config, shape = _shape()
  (mha,) = _decoders(config, shape, speed.MHA)
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  try:
    step = mha.train_step()
  finally:
    jax.config.update("jax_compilation_cache_dir", directory)
  assert not list(tmp_path.iterdir())  # which the next process would take it from
  assert step.compile_seconds > 0 and step.peak_bytes > 4 * sum(
      leaf.size for leaf in jax.tree.leaves(mha.params))
  step.begin(seed=0)
  before = jax.tree.map(np.asarray, step.state.params)
  batch = step.place(speed._source(shape, 0).batch_at(0))
  losses = [float(step(batch)) for _ in range(3)]
  assert losses[-1] < losses[0] and int(step.state.step) == 3
  assert all(np.any(old != new) for old, new in zip(
      jax.tree.leaves(before), jax.tree.leaves(step.state.params)))


def test_ratios_are_to_the_plain_decoder_and_to_mha():
  _, shape = _shape()
  seconds = {"flax": [1.0, 2.0, 4.0], "mha": [2.0, 4.0, 8.0], "damcha_stride64": [1.0, 4.0, 4.0]}
  found = {(one.attention, one.metric): one.value
           for one in speed._times(shape, "step_time", seconds, seed=0)}
  assert found["damcha_stride64", "step_time"] == 4000.0
  assert found["mha", "step_time_ratio"] == 2.0
  assert found["damcha_stride64", "step_time_ratio"] == 1.0
  assert found["damcha_stride64", "step_time_to_mha"] == 0.5
  assert ("mha", "step_time_to_mha") not in found


@pytest.mark.parametrize("changes, message", [
    ({"damcha_variants": 2 * (dict(name="damcha", stride=1, sharing="stack"),)},
     "'speed.damcha_variants' have the same name"),
    ({"shapes": ("variant", "twice")}, "'speed.shapes' have the same name"),
    ({"shapes": ("batch_size", 0)}, "'speed.shapes' has batch_size=0"),
    ({"shapes": ("num_heads", 3)}, "num_heads=3, which does not divide features=16"),
    ({"damcha_variants": (dict(name="damcha", stride=0, sharing="stack"),)}, "stride=0"),
])
def test_a_bad_config_is_one_line(tmp_path, changes, message, capsys):
  config = speed_config.get_config("smoke")
  first = config.speed.shapes[0]
  with config.unlocked():
    if "shapes" in changes:
      key, value = changes["shapes"]
      changed = {"variant": (first, first), "batch_size": ({**first, key: value},),
                 "num_heads": ({**first, "model": {**first["model"], key: value}},)}[key]
      changes = {"shapes": changed}
    config.speed.update(changes)
  with pytest.raises(SystemExit) as stopped, command_line.user_errors():
    efficiency.train_and_evaluate(config, tmp_path / "run")
  error = capsys.readouterr().err
  assert stopped.value.code == 2 and message in error and error.count("\n") == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.families
def test_a_small_run_measures_all_and_is_resumed(tmp_path, capsys):
  config = speed_config.get_config("smoke")
  rows = efficiency.train_and_evaluate(config, tmp_path)
  assert json.loads((tmp_path / "summary.json").read_text())["rows"] == rows
  value = {(row["attention"], row["variant"], row["split"], row["metric"]): row["value"]
           for row in rows}
  assert len(value) == len(rows) and all(number >= 0 for number in value.values())
  layer = lambda name, metric, split="train": value[name, "gpt2_layer_reduced", split, metric]
  assert layer("flax", "step_time_ratio") == layer("flax", "evaluation_time_ratio", "test") == 1
  assert layer("mha", "num_params") == layer("flax", "num_params")
  assert layer("mha", "step_gflops") == layer("flax", "step_gflops")
  assert layer("matmul", "peak_gflops_per_second") > 1
  assert layer("input_pipeline", "host_wait_share") < 1
  for name in ("damcha_stride64", "damcha_prefix_stack"):
    for metric in ("step_time_ratio", "step_time_to_mha", "compile_time", "peak_share"):
      assert (name, "gpt2_layer_reduced", "train", metric) in value
    for metric in ("token_time_growth", "cache_speedup", "token_time_ratio"):
      assert (name, "gpt2_sampling_reduced", "test", metric) in value
    assert (name, "depth12_reduced", "train", "compile_time_growth") in value
  assert ("damcha_prefix_stack", "gpt2_t2048_reduced", "train", "peak_memory_to_mha") in value
  (tmp_path / "speed-depth12_reduced" / "result.json").unlink()
  times = lambda rows: [row for row in rows if row["metric"] == "step_time"]
  assert times(efficiency.train_and_evaluate(config, tmp_path)) == times(rows)
  assert "compile_time_growth" in capsys.readouterr().out


@pytest.mark.families
def test_the_exact_prefix_takes_little_more_memory_than_mha():
  """Of a whole train step on 2,048 tokens at GPT-2's width, compiled and not run."""
  config = freeze(speed_config.get_config(), EfficiencyConfig)
  (shape,) = [shape for shape in config.speed.shapes if shape.variant == "gpt2_t2048"]
  assert (shape.context_length, shape.model.features, shape.model.num_layers) == (2048, 768, 3)
  names = (speed.MHA, "damcha_prefix_generator", "damcha_prefix_stack")
  mha, *prefix = [decoder.train_step().peak_bytes for decoder in _decoders(config, shape, *names)]
  assert mha > 3 * 2 * 4 * 12 * 2048**2  # scores and weights of every layer and head
  for peak in prefix:
    assert mha / 2 < peak < 1.3 * mha
