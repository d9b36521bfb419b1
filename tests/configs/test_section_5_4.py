"""The language-model configs are Section 5.4's, and every size can be built."""

import importlib
import json
import math

from ml_collections import ConfigDict
import pytest

from configs import gpt2
from damcha_jax import config as config_lib
from damcha_jax.config import ConfigError, freeze, to_dict

CONFIGS = ("mix", "enwik8", "text8")

# "All models have 12 layers, 12 attention heads, model dimension 768, and are trained for 100K
# steps with batch size 64, context length 512, and learning rate 6e-4."
SECTION_5_4 = {
    "model.num_layers": 12,
    "model.num_heads": 12,
    "model.features": 768,
    "num_steps": 100_000,
    "batch_size": 64,
    "context_length": 512,
    "optimizer.learning_rate": 6e-4,
}
# Section 5.1: "the metric generator is implemented as a 9-layer MLP", that is 9 Linear layers.
NUM_GENERATOR_LAYERS = 9


def _config(name: str, size: str) -> ConfigDict:
  return importlib.import_module(f"configs.{name}").get_config(size)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("key", SECTION_5_4)
def test_paper_size_is_section_5_4(name, key):
  value = _config(name, "paper")
  for part in key.split("."):
    value = value[part]
  assert value == SECTION_5_4[key] and type(value) is type(SECTION_5_4[key])


@pytest.mark.parametrize("name", CONFIGS)
def test_paper_size_is_the_default_and_names_its_corpus(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  assert (config.size, config.dataset, config.name) == ("paper", name, name)
  assert config.damcha.preset == "paper" and config.damcha.parameterization == "blocks"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", gpt2.SIZES)
def test_every_size_freezes_and_survives_json(name, size):
  frozen = freeze(_config(name, size))
  assert frozen.size == size
  assert freeze(json.loads(json.dumps(to_dict(frozen)))) == frozen


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", gpt2.SIZES)
def test_metric_has_contexts_to_adapt_to(name, size):
  config = freeze(_config(name, size))
  assert config.context_length // config.damcha.stride >= 8
  assert len(config.damcha.widths) == NUM_GENERATOR_LAYERS - 1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", ["paper", "cpu"])
def test_generator_matches_the_projections_it_replaces(name, size):
  """The last kernel, W D^2 or (summed over H blocks) W D^2 / H, against 2 N D^2."""
  config = freeze(_config(name, size))
  copies = config.model.num_heads if config.damcha.parameterization == "rowsum" else 1
  last_kernel = config.damcha.widths[-1] * config.model.features**2 / copies
  assert math.isclose(last_kernel, 2 * config.model.num_layers * config.model.features**2)


def test_small_sizes_run_on_what_ships():
  for name, sample in zip(CONFIGS, ("sample_mix", "sample_text", "sample_text8"), strict=True):
    assert {_config(name, size).dataset for size in ("cpu", "smoke")} == {sample}


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerator_sizes_train_table_5s_rows(name):
  attentions = {size: _config(name, size).attentions for size in gpt2.SIZES}
  assert attentions == {"paper": "mha,dcmha,damcha", "wide": "mha,dcmha,damcha",
                        "cpu": "mha,damcha", "smoke": "mha,damcha"}


def test_no_two_options_of_a_comparator_are_one():
  config = _config("mix", "paper")
  config.unlock()
  config.tha.num_key_heads = 24
  assert config.tha.num_softmax_heads is config.tha.num_value_heads is None


def test_smoke_logs_ten_steps_and_three_validations():
  config = freeze(_config("mix", "smoke"))
  assert config.num_steps // config.logging.every_steps >= 10
  assert config.num_steps // config.evaluation.every_steps >= 3


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_size_is_named_with_the_choices(name):
  with pytest.raises(ValueError, match="unknown size 'tpu'; choose one of paper, wide, cpu, smoke"):
    _config(name, "tpu")


@pytest.mark.parametrize("change, message", [
    ({"batchsize": 3}, "unknown config key 'batchsize'; the nearest valid key is 'batch_size'"),
    ({"damcha": {"strde": 3}}, "'damcha.strde'; the nearest valid key is 'damcha.stride'"),
    ({"batch_size": 3.0}, "'batch_size' must be int, not 3.0"),
    ({"batch_size": True}, "'batch_size' must be int, not True"),
    ({"model": {"remat": 1}}, "'model.remat' must be bool, not 1"),
    ({"damcha": {"widths": (8, 2.5)}}, "'damcha.widths' must be int, not 2.5"),
    ({"damcha": {"widths": 8}}, "'damcha.widths' must be a tuple, not 8"),
    ({"damcha": {"widths": (8, 0)}}, "'damcha.widths' must hold positive widths"),
    ({"model": 3}, "'model' must be a section, not 3"),
    ({"logical_rules": (("embed",),)}, "'logical_rules' must hold entries of 2"),
    ({"model": {"positions": "learnt"}}, "must be one of 'learned', 'sinusoidal', not 'learnt'"),
    ({"seeds": ()}, "'seeds' must name at least one entry"),
    ({"seeds": (0, -1)}, "'seeds' must hold numbers from 0 to 2^63 - 1, not (0, -1)"),
    ({"seeds": (2**63,)}, "'seeds' must hold numbers from 0 to 2^63 - 1"),
    ({"dataset": ""}, "'dataset' is empty; name a corpus or a text file"),
    ({"data": {"max_held_out_bytes": 0}}, "data.max_held_out_bytes=0 must be positive, or None"),
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature=-1.0 must be at least 0"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p=0.0 must be above 0 and at most 1"),
    ({"attentions": "mha,mha"}, "'attentions' must name at least one entry and none twice"),
    ({"model": {"num_heads": 5}}, "model.features=16 is not divisible by model.num_heads=5"),
    ({"context_length": 0}, "'context_length' must be positive"),
    ({"damcha": {"context": "sequence"}}, "lets a causal decoder see the future; use 'prefix'"),
    ({"damcha": {"block_ablation_eval": "diagonal"}}, "keeps no single blocks to ablate"),
    ({"damcha": {"update_rank": 4}}, "damcha.update_rank is for damcha.form='full_width'"),
    ({"damcha": {"form": "full_width", "update_rank": -1}}, "damcha.update_rank=-1 must be at le"),
    ({"damcha": {"form": "full_width", "parameterization": "blocks"}}, "has no blocks; use damcha."),
    ({"damcha": {"form": "full_width"}, "model": {"attention_implementation": "xla"}},
     "which fused kernels do not take; use model.attention_implementation='plain'"),
    ({"model": {"attention_implementation": "xla", "attention_dropout_rate": 0.1}},
     "the weights that a fused kernel never forms"),
    ({"attentions": "mha,dcmha", "model": {"attention_implementation": "xla"}},
     "attention 'dcmha' mixes, widens or masks what model.attention_implementation='xla' computes; use 'plain' (or 'auto'), or attentions=mha"),
    ({"attentions": "mma", "context_length": 128, "model": {"attention_implementation": "pallas"}},
     "attention 'mma' mixes, widens or masks what model.attention_implementation='pallas' computes; use 'plain'"),
    ({"context_length": 192, "model": {"attention_implementation": "pallas"}},
     "context_length=192 must be a multiple of 128 for model.attention_implementation='pallas'"),
    ({"model": {"attention_implementation": "cudnn", "dtype": "float32"}, "attentions": "mha"},
     "'cudnn' computes in bfloat16, not in model.dtype='float32'; change that, or use 'plain'"),
    ({"moa": {"num_experts": 0}}, "moa.num_experts=0 must be positive, or None"),
    ({"tha": {"key_head_features": 0}}, "tha.key_head_features=0 must be positive, or None"),
    ({"authors": {"router_rank": -1}}, "authors.router_rank=-1 must be positive, or None"),
    ({"authors": {"local_window": 0}}, "'authors.local_window' must be positive"),
    ({"authors": {"expert_factor": 0}}, "'authors.expert_factor' must be positive"),
    ({"damcha": {"initializer": "zeros"}}, "'damcha.initializer' must be one of 'torch'"),
    ({"damcha": {"residual": 1}}, "'damcha.residual' must be bool, not 1"),
    ({"moa": {"z_coefficient": -0.1}}, "moa.z_coefficient=-0.1 must be at least 0"),
    ({"dcmha": {"qk_norm": "batch"}}, "'dcmha.qk_norm' must be one of 'rms', 'layer', not 'batch'"),
    ({"optimizer": {"learning_rate": -1.0}}, "optimizer.learning_rate=-1.0 must be at least 0"),
    ({"optimizer": {"eps": float("nan")}}, "optimizer.eps=nan must be at least 0 and finite"),
    ({"optimizer": {"b2": 1.5}}, "optimizer.b2=1.5 must be at least 0 and below 1"),
    ({"checkpoint": {"keep_best": -1}}, "checkpoint.keep_best=-1 must be at least 0"),
    ({"model": {"dropout_rate": 1.0}}, "model.dropout_rate=1.0 must be at least 0 and below 1"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = to_dict(freeze(_config("mix", "smoke")))
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values)
  assert message in str(error.value)


def test_a_missing_key_is_named():
  values = to_dict(freeze(_config("mix", "smoke")))
  del values["damcha"]["stride"]
  with pytest.raises(ConfigError, match="'damcha.stride' is missing"):
    freeze(values)


def test_no_field_has_a_default():
  """Whatever a run depends on stands in its config file."""
  with pytest.raises(TypeError):
    config_lib.MeshConfig()  # pylint: disable=no-value-for-parameter
