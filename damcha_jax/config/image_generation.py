"""The config of an image-generation experiment (paper Section 5.1)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Optional

from damcha_jax.config.conversion import require, require_rule
from damcha_jax.config.decoder import DecoderConfig

PIXEL_TOKENS = 256  # of 8 bits
# How often 32 pixels are halved.
IMAGE_SIZES = (32, 16, 8)


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
  """Where image sets live, and how images become tokens."""

  data_dir: str
  image_size: int  # pixels on a side
  colour: Literal["grey", "palette", "rgb"]  # a token is a grey value, one of 256 colours, a channel
  class_conditional: bool  # the class in the place of the begin symbol
  max_held_out_images: Optional[int]  # of the validation and of the test part; None: all

  @property
  def tokens_per_image(self) -> int:
    return self.image_size**2 * (3 if self.colour == "rgb" else 1)


@dataclasses.dataclass(frozen=True)
class ImageSamplingConfig:
  """The images that are made after training."""

  num_samples: int
  num_completions: int  # of the first test images, whose upper half is given
  batch_size: int
  temperature: float
  top_k: int  # 0: off
  top_p: float  # 1.0: off


@dataclasses.dataclass(frozen=True)
class ImageMetricsConfig:
  """What FID and KID are computed with; without weights their rows have no value."""

  inception_weights: Optional[str]  # path of the published file
  inception_mode: Literal["pytorch-fid", "tf"]
  allow_other_weights: bool


@dataclasses.dataclass(frozen=True)
class ImageGenerationConfig(DecoderConfig):
  """One image-generation experiment. `dataset` is 'cifar10', 'cifar100' or 'sample_images'."""

  data: ImageDataConfig
  sampling: ImageSamplingConfig
  metrics: ImageMetricsConfig

  def __post_init__(self):
    super().__post_init__()
    data, sampling = self.data, self.sampling
    require(data.image_size in IMAGE_SIZES,
            f"data.image_size={data.image_size} must be one of {', '.join(map(str, IMAGE_SIZES))}")
    require(self.context_length == data.tokens_per_image,
            f"context_length={self.context_length} must be the {data.tokens_per_image} tokens of a "
            f"'{data.colour}' image of {data.image_size}x{data.image_size} pixels")
    require(self.model.vocab_size >= PIXEL_TOKENS,
            f"model.vocab_size={self.model.vocab_size} does not hold the {PIXEL_TOKENS} values of a "
            f"pixel; set it to {PIXEL_TOKENS}, or more with classes")
    limit = data.max_held_out_images
    require(limit is None or limit > 0,
            f"data.max_held_out_images={limit} must be positive, or None for whole splits")
    for name in ("num_samples", "num_completions", "batch_size"):
      require(getattr(sampling, name) > 0, f"config key 'sampling.{name}' must be positive")
    require_rule(sampling, "sampling.")
