"""Image generation, Section 5.1: what CIFAR-10 and CIFAR-100 have in common.

Not an experiment of its own: `cifar10.py` and `cifar100.py` call `get_config` with their data set.
"""

import ml_collections
from ml_collections import config_dict

from configs import generation

NUM_TRAINING_IMAGES = 45_000  # of 50,000; the rest is for validation, which 5.1 does not mention


def get_config(size: str, dataset: str) -> ml_collections.ConfigDict:
  """The experiment named for its `dataset`; the small sizes run on images that ship with us.

  Raises:
    ValueError: `size` is none of `generation.SIZES`.
  """
  generation.check_size(size)
  config = paper(dataset)
  if size == "wide":
    generation.widen(config)
  elif size != "paper":
    {"cpu": shrink_to_cpu, "smoke": shrink_to_smoke}[size](config)
    config.dataset = "sample_images"
  config.size = size
  return config.lock()


def paper(dataset: str) -> ml_collections.ConfigDict:
  """Section 5.1 on images: a pixel is a token, in the order of reading."""
  config = generation.paper("image_generation", dataset, context_length=32 * 32,  # 5.1
                            num_training_examples=NUM_TRAINING_IMAGES)
  config.model.vocab_size = 256  # 5.1: 8-bit pixel values; 0 doubles as the begin symbol
  config.data = ml_collections.ConfigDict(dict(
      data_dir="~/.cache/damcha_jax",  # where `python -m damcha_jax.data.prepare` puts image sets
      image_size=32,  # 5.1
      # 5.1: 32 x 32 tokens of 8 bits, so a pixel has one value: grey, or 'palette' (256 colours).
      # 'rgb' has three tokens a pixel and a context_length of 3072.
      colour="grey",
      # omitted: 5.1 speaks of no classes. With them model.vocab_size is 256 + their number.
      class_conditional=False,
      max_held_out_images=config_dict.placeholder(int),  # whole splits
  ))
  config.sampling = ml_collections.ConfigDict(dict(
      num_samples=10_000,  # omitted: as many as there are test images
      num_completions=10_000,  # omitted: the lower half of every test image
      batch_size=250,  # no effect on results
      temperature=1.0,  # omitted: the model's own distribution
      top_k=0,
      top_p=1.0,
  ))
  config.metrics = ml_collections.ConfigDict(dict(
      inception_weights=config_dict.placeholder(str),  # a path; without, no FID
      inception_mode="pytorch-fid",  # omitted: how images are resized; or 'tf'
      allow_other_weights=False,
  ))
  return config


def shrink_to_cpu(config: ml_collections.ConfigDict) -> None:
  """About three minutes a run on two cores: grey images of 16x16 pixels."""
  generation.shrink_to_cpu(config)
  config.num_steps = 900
  config.batch_size = 8
  config.context_length = 16 * 16
  config.model.update(num_layers=2, features=96, mlp_features=384)
  # A metric for each row of the image.
  config.damcha.update(stride=16, widths=(16,) * 8)
  config.data.image_size = 16
  config.sampling.update(num_samples=200, num_completions=200, batch_size=100)
  config.evaluation.update(every_steps=300, batch_size=64)
  config.checkpoint.update(every_steps=300)


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds an attention: images of 8x8 pixels."""
  shrink_to_cpu(config)
  generation.shrink_to_smoke(config)
  config.context_length = 8 * 8
  config.damcha.stride = 8
  config.data.update(image_size=8, max_held_out_images=64)
  config.sampling.update(num_samples=64, num_completions=64, batch_size=64)
