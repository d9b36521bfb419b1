"""The Vision Transformer's config is Section 5.5's, and every size can be built."""

import json

import pytest

from configs import generation, vit_s16
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError, freeze, ImageClassificationConfig, to_dict
from experiments import vit_imagenet

# "ImageNet-1K classification using ViT-S/16 (12 layers, 6 heads, dimension 384, 22M parameters).
# Models are trained for 500 epochs with batch size 1024, learning rate 0.001, and standard
# augmentation. We report Top-1 and Top-5 accuracy at epochs 100 and 500".
SECTION_5_5 = {
    "dataset": "imagenet2012",
    "attentions": "mha,dcmha,damcha",  # Table 6's rows
    "model.num_layers": 12,
    "model.num_heads": 6,
    "model.features": 384,
    "model.image_size": 224,
    "model.patch_size": 16,
    "model.num_classes": 1000,
    "batch_size": 1024,
    "optimizer.learning_rate": 1e-3,
    "milestone_epochs": (100, 500),
    "damcha.context": "sequence",
}


def _config(size="paper"):
  return freeze(vit_s16.get_config(size), ImageClassificationConfig)


@pytest.mark.parametrize("key", SECTION_5_5)
def test_paper_size_is_section_5_5(key):
  value = _config()
  for part in key.split("."):
    value = getattr(value, part)
  assert value == SECTION_5_5[key] and type(value) is type(SECTION_5_5[key])


def test_five_hundred_epochs_end_at_a_milestone_and_are_evaluated_at_both():
  config = _config()
  assert config.num_steps * config.batch_size / 1_281_167 == pytest.approx(500, rel=2e-4)
  assert config.milestones == {"epoch100": 125_100, "epoch500": 625_500}
  assert 125_100 % config.evaluation.every_steps == 0
  assert vit_imagenet.comparable(config) and not vit_imagenet.comparable(_config("cpu"))
  # A 9-layer MLP with all its blocks; W matches the projections that it replaces.
  assert config.damcha.widths == (2 * 12,) * 8 and config.damcha.parameterization == "blocks"
  assert config.checkpoint.keep_best == 0  # Table 6 is about epochs, not about the best of many
  assert config.dcmha.static and config.dcmha.use_bias


@pytest.mark.parametrize("size", generation.SIZES)
def test_every_size_freezes_and_survives_json(size):
  frozen = _config(size)
  assert (frozen.name, frozen.size, frozen.experiment) == ("vit_s16", size, "vit_imagenet")
  assert freeze(json.loads(json.dumps(to_dict(frozen))), ImageClassificationConfig) == frozen


def test_the_small_sizes_run_on_what_ships():
  cpu, smoke = _config("cpu"), _config("smoke")
  assert cpu.dataset == smoke.dataset == "sample_images"
  assert set(smoke.attention_names) <= set(ATTENTIONS) and len(smoke.attention_names) == 12
  assert list(cpu.milestones) == ["epoch4", "epoch20"]
  with pytest.raises(ValueError, match="unknown size 'tpu'; choose one of paper, wide, cpu, smoke"):
    vit_s16.get_config("tpu")


def test_the_paper_s_figures_stand_beside_its_epochs_and_what_stands_in_for_them():
  paper = json.loads(vit_imagenet.common.PAPER.read_text(encoding="utf-8"))["table6"]
  figure = lambda config, attention, metric, variant, split="validation": vit_imagenet._figure(
      paper, config, vit_imagenet.Measurement(attention, "", split, metric, 0.0, "%", 0, variant))
  assert figure(_config(), "damcha", "top1", "epoch500") == 82.1
  assert figure(_config(), "dcmha", "top5", "epoch100") == 88.71
  assert figure(_config("cpu"), "mha", "top1", "epoch4") == 69.02
  assert figure(_config("smoke"), "mha", "top1", "epoch0.03") == 79.51
  assert figure(_config(), "tha", "top1", "epoch500") is None
  assert figure(_config(), "mha", "nats_per_image", "epoch500") is None
  assert figure(_config(), "mha", "top1", "epoch500", split="train") is None


@pytest.mark.parametrize("change, message", [
    ({"evaluation": {"every_steps": 5}, "milestone_epochs": (1, 2), "steps_per_epoch": 4},
     "evaluation.every_steps=5 does not come by the end of epoch1, step 4"),
    ({"milestone_epochs": (0,)}, "'milestone_epochs' must hold positive numbers"),
    ({"ema_decay": 1.0}, "ema_decay=1.0 must be between 0 and 1, or None"),
    ({"model": {"patch_size": 5}}, "model.patch_size=5 does not tile images of 16 pixels"),
    ({"model": {"num_classes": 4}}, "model.num_classes=4 must be at least 5"),
    ({"model": {"pooling": "max"}}, "'model.pooling' must be one of 'class', 'mean', not 'max'"),
    ({"model": {"stochastic_depth_rate": 1.0}}, "model.stochastic_depth_rate=1.0 must be at least"),
    ({"data": {"resize": 8}}, "data.resize=8 must be at least model.image_size=16"),
    ({"data": {"num_workers": -1}}, "data.num_workers=-1 must be from 0"),
    ({"data": {"num_workers": 10**6}}, "data.num_workers=1000000 must be from 0 to 1,024"),
    ({"batch_size": 0}, "'batch_size' must be positive"),
    ({"damcha": {"widths": (10**13,)}}, "'damcha.widths' must hold positive widths of at most"),
    ({"augmentation": {"mixup_alpha": 1e300}}, "augmentation.mixup_alpha=1e+300 must be from 0"),
    ({"augmentation": {"randaugment_layers": 10**9}}, "must be from 0 to 100"),
    ({"optimizer": {"learning_rate": 1e300}}, "optimizer.learning_rate=1e+300 must be at least 0"),
    ({"data": {"max_held_out_images": 0}}, "data.max_held_out_images=0 must be positive"),
    ({"augmentation": {"flip": 1}}, "'augmentation.flip' must be bool, not 1"),
    ({"augmentation": {"mixup": 1}}, "unknown config key 'augmentation.mixup'; the nearest valid"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = to_dict(_config("smoke"))
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values, ImageClassificationConfig)
  assert message in str(error.value)
