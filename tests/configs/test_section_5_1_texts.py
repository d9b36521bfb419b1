"""The text-generation configs are Section 5.1's, and every size can be built."""

import importlib
import json

import pytest

from configs import generation
from damcha_jax.config import ConfigError, TextGenerationConfig, freeze, to_dict
from damcha_jax.data.text_pairs import PUBLISHED
from experiments import text_generation

CONFIGS = ("wmt14", "commongen")

# "WMT14 English-German translation and CommonGen [...] All models have 10 decoders, 8 attention
# heads, model dimension 512, and head dimension 64. Models are trained for 50 epochs with batch
# size 128, learning rate 3e-4, and Adam optimizer. [...] f_theta is implemented as a 9-layer MLP"
SECTION_5_1 = {
    "model.num_layers": 10,
    "model.num_heads": 8,
    "model.features": 512,
    "batch_size": 128,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.0,
    "damcha.metric": "generated",
    "damcha.sharing": "generator",
    "damcha.parameterization": "blocks",
    "damcha.preset": "paper",
    "data.packing": False,  # 128 sequences are 128 examples
    "attentions": "mha,tha,dcmha,colmha,mma,moa,damcha",  # Table 1's rows
}


def _config(name, size):
  return importlib.import_module(f"configs.{name}").get_config(size)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("key", SECTION_5_1)
def test_paper_size_is_section_5_1(name, key):
  value = _config(name, "paper")
  for part in key.split("."):
    value = value[part]
  assert value == SECTION_5_1[key] and type(value) is type(SECTION_5_1[key])


@pytest.mark.parametrize("name, num_examples, context_length, direction", [
    ("wmt14", 4_508_785, 256, "en-de"), ("commongen", 65_325, 128, None)])
def test_fifty_epochs_and_the_lengths_of_table_2(name, num_examples, context_length, direction):
  config = freeze(_config(name, "paper"), TextGenerationConfig)
  assert config.num_steps * config.batch_size / num_examples == pytest.approx(50, abs=0.01)
  assert 0 <= PUBLISHED[name].num_examples["train"] - num_examples < 3 * 1_000
  assert config.model.features // config.model.num_heads == 64
  assert len(config.damcha.widths) == 8  # of the 9 layers all but the last are hidden
  assert config.damcha.widths[-1] == 2 * config.model.num_layers
  assert (config.context_length, config.data.direction) == (context_length, direction)
  assert text_generation.comparable(config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", generation.SIZES)
def test_every_size_freezes_and_survives_json(name, size):
  frozen = freeze(_config(name, size), TextGenerationConfig)
  assert frozen.size == size
  assert freeze(json.loads(json.dumps(to_dict(frozen))), TextGenerationConfig) == frozen
  assert frozen.context_length // frozen.damcha.stride >= 8
  assert text_generation.comparable(frozen) == (size in ("paper", "wide"))


@pytest.mark.parametrize("name, sample", [("wmt14", "sample_pairs"),
                                          ("commongen", "sample_concepts")])
def test_the_small_sizes_run_packed_on_what_ships(name, sample):
  cpu, smoke = (freeze(_config(name, size), TextGenerationConfig) for size in ("cpu", "smoke"))
  assert cpu.dataset == smoke.dataset == sample and cpu.data.packing and smoke.data.packing
  assert cpu.damcha.widths[-1] == 2 * cpu.model.num_layers * cpu.model.num_heads
  assert smoke.attentions == SECTION_5_1["attentions"]


def test_unknown_size_is_named_with_the_choices():
  with pytest.raises(ValueError, match="unknown size 'tpu'; choose one of paper, wide, cpu, smoke"):
    _config("wmt14", "tpu")


@pytest.mark.parametrize("change, message", [
    ({"context_length": 63}, "around the source need context_length=64, not 63"),
    ({"data": {"max_target_tokens": 0}}, "'data.max_target_tokens' must be positive"),
    ({"attentions": "mha", "context_length": 100,  # of which no multiple would help
      "model": {"attention_implementation": "pallas"}},
     "'pallas' takes no masks, which padded or packed texts need"),
    ({"data": {"direction": "de-fr"}}, "'data.direction' must be one of 'en-de', 'de-en'"),
    ({"data": {"overlong": "cut"}}, "must be one of 'truncate', 'skip', not 'cut'"),
    ({"data": {"max_held_out_examples": 0}}, "data.max_held_out_examples=0 must be positive"),
    ({"model": {"vocab_size": 258}}, "model.vocab_size=258 does not hold the 259 symbols"),
    ({"sampling": {"num_beams": 0}}, "'sampling.num_beams' must be positive"),
    ({"sampling": {"num_beams": 2, "temperature": 1.0}}, "use one beam, or temperature 0"),
    ({"sampling": {"length_penalty": -1.0}}, "sampling.length_penalty=-1.0 must be at least 0"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p=0.0 must be above 0 and at most 1"),
    ({"sampling": {"top_p": 1e-46}}, "sampling.top_p=1e-46 must be above 0 and at most 1"),
    ({"sampling": {"temperature": 1e-40}}, "sampling.temperature=1e-40 must be at least 0"),
    ({"sampling": {"num_beams": 2, "length_penalty": 40.0}}, "sampling.length_penalty=40.0 must be"),
    ({"metrics": {"ranking": "sum"}}, "must be one of 'per_token', 'summed', not 'sum'"),
    ({"data": {"pack": 1}}, "unknown config key 'data.pack'; the nearest valid key is"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = to_dict(freeze(_config("wmt14", "smoke"), TextGenerationConfig))
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values, TextGenerationConfig)
  assert message in str(error.value)
