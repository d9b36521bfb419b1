"""Text generation, Section 5.1: what WMT14 and CommonGen have in common.

Not an experiment of its own: `wmt14.py` and `commongen.py` change what is their own.
"""

from collections.abc import Callable

import ml_collections
from ml_collections import config_dict

from configs import generation


def get_config(size: str, paper: Callable[[], ml_collections.ConfigDict],
               sample: str) -> ml_collections.ConfigDict:
  """The experiment that `paper` makes; the small sizes run on `sample`, which ships with us.

  Raises:
    ValueError: `size` is none of `generation.SIZES`.
  """
  generation.check_size(size)
  config = paper()
  if size == "wide":
    generation.widen(config)
  elif size != "paper":
    {"cpu": shrink_to_cpu, "smoke": shrink_to_smoke}[size](config)
    config.dataset = sample
  config.size = size
  return config.lock()


def base(dataset: str, context_length: int,
         num_training_examples: int) -> ml_collections.ConfigDict:
  """Section 5.1 on texts: BOS source SEP target EOS, the target predicted."""
  config = generation.paper("text_generation", dataset, context_length, num_training_examples)
  config.data = ml_collections.ConfigDict(dict(
      data_dir="~/.cache/damcha_jax",  # where `prepare` puts sets, and tokenizers are kept
      direction=config_dict.placeholder(str),  # None: as the set has it
      tokenizer="bpe",  # omitted: byte-level, trained on the training split, model.vocab_size ids
      # 5.1: 128 sequences a batch, read as 128 examples. Packed, a batch would hold several times
      # as many, and 50 epochs would be as many times fewer updates.
      packing=False,
      max_source_tokens=context_length // 2 - 1,  # omitted: half of a row each
      max_target_tokens=context_length // 2 - 1,
      overlong="truncate",  # omitted
      max_held_out_examples=config_dict.placeholder(int),  # whole splits
  ))
  config.sampling = ml_collections.ConfigDict(dict(
      num_beams=4,  # omitted: usual in translation, as the next (Vaswani et al. 2017)
      length_penalty=0.6,
      temperature=0.0,
      top_k=0,
      top_p=1.0,
      batch_size=64,  # no effect on results
  ))
  config.metrics = ml_collections.ConfigDict(dict(
      bart_weights=config_dict.placeholder(str),  # path of a directory; without, no BARTScore
      bart_direction="reference_to_hypothesis",  # omitted: BARTScore has several
      ranking="per_token",  # omitted: 5.1 ranks "by their generation likelihood", or 'summed'
      allow_other_weights=False,
  ))
  return config


def shrink_to_cpu(config: ml_collections.ConfigDict) -> None:
  """Some three minutes a run on two cores: 600 steps of 2,048 tokens."""
  generation.shrink_to_cpu(config)
  config.num_steps = 600
  config.context_length = 128
  config.damcha.stride = 16  # 8 metrics a row
  config.model.vocab_size = 1_024
  # Packed, for rows of which most is padding would be most of the time.
  config.data.update(packing=True, max_source_tokens=60, max_target_tokens=60,
                     max_held_out_examples=200)
  config.sampling.update(num_beams=1, batch_size=50)
  config.evaluation.update(every_steps=300, batch_size=50)
  config.checkpoint.update(every_steps=150)


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds an attention."""
  shrink_to_cpu(config)
  generation.shrink_to_smoke(config)
  config.context_length = 64
  config.damcha.stride = 8
  config.data.update(max_source_tokens=28, max_target_tokens=34, max_held_out_examples=64)
  config.sampling.update(batch_size=64)
  config.evaluation.batch_size = 64
