"""The image-generation configs are Section 5.1's, and every size can be built."""

import importlib
import json
import math

import pytest

from configs import generation
from damcha_jax.config import ConfigError, ImageGenerationConfig, freeze, to_dict
from experiments import image_generation

CONFIGS = ("cifar10", "cifar100")

# "images are flattened into sequences of 32x32=1024 tokens with 8-bit pixel values [...] All models
# have 10 decoders, 8 attention heads, model dimension 512, and head dimension 64. Models are trained
# for 50 epochs with batch size 128, learning rate 3e-4, and Adam optimizer."
SECTION_5_1 = {
    "context_length": 1024,
    "data.image_size": 32,
    "data.colour": "grey",
    "model.vocab_size": 256,
    "model.num_layers": 10,
    "model.num_heads": 8,
    "model.features": 512,
    "batch_size": 128,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.0,
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


@pytest.mark.parametrize("name", CONFIGS)
def test_fifty_epochs_and_heads_of_width_64(name):
  config = freeze(_config(name, "paper"), ImageGenerationConfig)
  assert config.num_steps * config.batch_size / 45_000 == pytest.approx(50, abs=0.01)
  assert config.model.features // config.model.num_heads == 64
  # A 9-layer MLP with all its blocks; W matches the projections that it replaces.
  assert len(config.damcha.widths) == 8 and config.damcha.parameterization == "blocks"
  assert config.damcha.widths[-1] == 2 * config.model.num_layers
  assert (config.dataset, config.name, config.size) == (name, name, "paper")
  assert image_generation.comparable(config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", generation.SIZES)
def test_every_size_freezes_and_survives_json(name, size):
  frozen = freeze(_config(name, size), ImageGenerationConfig)
  assert frozen.size == size
  assert freeze(json.loads(json.dumps(to_dict(frozen))), ImageGenerationConfig) == frozen
  assert frozen.context_length // frozen.damcha.stride >= 8
  assert image_generation.comparable(frozen) == (size in ("paper", "wide"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_small_sizes_run_on_what_ships(name):
  cpu, smoke = (freeze(_config(name, size), ImageGenerationConfig) for size in ("cpu", "smoke"))
  assert cpu.dataset == smoke.dataset == "sample_images"
  assert (cpu.data.image_size, cpu.data.colour) == (16, "grey")
  last_kernel = cpu.damcha.widths[-1] * cpu.model.features**2 / cpu.model.num_heads
  assert math.isclose(last_kernel, 2 * cpu.model.num_layers * cpu.model.features**2)
  assert smoke.attentions == SECTION_5_1["attentions"]


def test_unknown_size_is_named_with_the_choices():
  with pytest.raises(ValueError, match="unknown size 'tpu'; choose one of paper, wide, cpu, smoke"):
    _config("cifar10", "tpu")


@pytest.mark.parametrize("change, message", [
    ({"context_length": 65}, "context_length=65 must be the 64 tokens of a 'grey' image of 8x8"),
    ({"data": {"colour": "rgb"}}, "must be the 192 tokens of a 'rgb' image of 8x8 pixels"),
    ({"data": {"image_size": 12}}, "data.image_size=12 must be one of 32, 16, 8"),
    ({"data": {"colour": "hsv"}}, "'data.colour' must be one of 'grey', 'palette', 'rgb'"),
    ({"data": {"max_held_out_images": 0}}, "data.max_held_out_images=0 must be positive"),
    ({"model": {"vocab_size": 255}}, "model.vocab_size=255 does not hold the 256 values"),
    ({"sampling": {"num_samples": 0}}, "'sampling.num_samples' must be positive"),
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature=-1.0 must be at least 0"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p=0.0 must be above 0 and at most 1"),
    ({"metrics": {"inception_mode": "torch"}}, "must be one of 'pytorch-fid', 'tf', not 'torch'"),
    ({"data": {"color": 1}}, "unknown config key 'data.color'; the nearest valid key is 'data.colour'"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = to_dict(freeze(_config("cifar10", "smoke"), ImageGenerationConfig))
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values, ImageGenerationConfig)
  assert message in str(error.value)
