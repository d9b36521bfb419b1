"""The config of an image-classification experiment (paper Section 5.5)."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

from damcha_jax.config.conversion import require
from damcha_jax.config.sections import VisionModelConfig
from damcha_jax.config.transformer import TransformerConfig

_MOST_LAYERS = 100  # one after the other, on each image
_MOST_WORKERS = 1024  # each takes memory for two batches
_LARGEST_ALPHA = 1e6  # with which images are halved to within a thousandth


@dataclasses.dataclass(frozen=True)
class ClassificationDataConfig:
  """Where images live and how they are read; their size is the model's."""

  data_dir: str
  resize: int  # pixels of the shorter side of a held-out image, before its centre is cut out
  max_held_out_images: Optional[int]  # None: all
  # Of the training images, as many as are evaluated in the way of held-out ones, for the gap.
  num_probed_images: int
  num_workers: int  # processes that decode and augment; 0: the training process does


@dataclasses.dataclass(frozen=True)
class AugmentationConfig:
  """What happens to training images and labels."""

  crop_scale: tuple[float, float]  # of the image's area, of a random-resized crop
  crop_ratio: tuple[float, float]  # width over height
  flip: bool  # left and right, of every other image
  randaugment_layers: int  # operations on an image; 0: none
  randaugment_magnitude: float  # from 0 to 10
  mixup_alpha: float  # of the Beta distribution that mixing weights are drawn from; 0: none
  label_smoothing: float  # the part of the target that all classes share

  def __post_init__(self):
    for name, (low, high), most in (("crop_scale", self.crop_scale, 1.0),
                                    ("crop_ratio", self.crop_ratio, math.inf)):
      require(0 < low <= high <= most and high < math.inf,
              f"augmentation.{name}={low, high} must be positive, the smaller one first"
              + (", and at most 1" if most == 1.0 else ""))
    require(0 <= self.randaugment_layers <= _MOST_LAYERS,
            f"augmentation.randaugment_layers={self.randaugment_layers} must be from 0 to "
            f"{_MOST_LAYERS}")
    require(0 <= self.randaugment_magnitude <= 10,
            f"augmentation.randaugment_magnitude={self.randaugment_magnitude} must be from 0 to 10")
    require(0 <= self.mixup_alpha <= _LARGEST_ALPHA,
            f"augmentation.mixup_alpha={self.mixup_alpha} must be from 0 to {_LARGEST_ALPHA:g}")
    require(0 <= self.label_smoothing < 1,
            f"augmentation.label_smoothing={self.label_smoothing} must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class ImageClassificationConfig(TransformerConfig):
  """One image-classification experiment. `dataset` is 'imagenet2012' or 'sample_images'."""

  steps_per_epoch: int
  milestone_epochs: tuple[int, ...]  # after which results are reported, as after the last step
  ema_decay: Optional[float]  # of averaged weights, which are then evaluated; None: the last ones
  model: VisionModelConfig
  data: ClassificationDataConfig
  augmentation: AugmentationConfig

  def __post_init__(self):
    super().__post_init__()
    model, data = self.model, self.data
    for name, value in (("steps_per_epoch", self.steps_per_epoch),
                        ("model.image_size", model.image_size),
                        ("model.patch_size", model.patch_size),
                        ("data.num_probed_images", data.num_probed_images)):
      require(value > 0, f"config key '{name}' must be positive")
    require(all(epoch > 0 for epoch in self.milestone_epochs),
            "config key 'milestone_epochs' must hold positive numbers, not "
            f"{self.milestone_epochs}")
    require(model.num_classes >= 5,
            f"model.num_classes={model.num_classes} must be at least 5, for top-5 accuracy")
    require(model.image_size % model.patch_size == 0,
            f"model.patch_size={model.patch_size} does not tile images of {model.image_size} "
            "pixels; choose a divisor of model.image_size")
    rate = model.stochastic_depth_rate
    require(0 <= rate < 1, f"model.stochastic_depth_rate={rate} must be at least 0 and below 1")
    require(data.resize >= model.image_size,
            f"data.resize={data.resize} must be at least model.image_size={model.image_size}")
    limit = data.max_held_out_images
    require(limit is None or limit > 0,
            f"data.max_held_out_images={limit} must be positive, or None for whole splits")
    require(0 <= data.num_workers <= _MOST_WORKERS,
            f"data.num_workers={data.num_workers} must be from 0 to {_MOST_WORKERS:,}")
    require(self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ema_decay={self.ema_decay} must be between 0 and 1, or None")
    every = self.evaluation.every_steps
    for name, step in self.milestones.items():
      require(every < 1 or step % every == 0 or step == self.num_steps,
              f"evaluation.every_steps={every} does not come by the end of {name}, step {step}; "
              "use a divisor of it, or change milestone_epochs")

  @property
  def milestones(self) -> dict[str, int]:
    """The steps after which results are reported, by name, such as 'epoch100'."""
    steps = {f"epoch{epoch}": epoch * self.steps_per_epoch for epoch in self.milestone_epochs}
    last = f"epoch{round(self.num_steps / self.steps_per_epoch, 2):g}"
    return {**{name: step for name, step in steps.items() if step < self.num_steps},
            last: self.num_steps}
