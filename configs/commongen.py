"""Sentences from sets of concepts, CommonGen: Section 5.1, Tables 1 and 3.

  python -m experiments.text_generation --config=configs/commongen.py

Needs the data set: `python -m damcha_jax.data.prepare commongen`. Its test split is published
without references, so its validation split is what is reported. The paper reports NLL 5.7560 and
BARTScore -5.9250 with MHA, 5.2204 and -5.6142 with DAMCHA.

  python -m experiments.text_generation --config=configs/commongen.py:wide

The same with a generator as wide as the model.

  python -m experiments.text_generation --config=configs/commongen.py:cpu

Minutes an attention on two cores, on examples from a dictionary that ship with the package.

  python -m experiments.text_generation --config=configs/commongen.py:smoke

Seconds an attention after compilation; runs every part of the program and learns little.
"""

import ml_collections

from configs import text

# 67,389 sentences without those of the 1,000 concept sets of 32,651 that are held out, of which
# there are two or so each.
NUM_TRAINING_EXAMPLES = 65_325


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = text.get_config(size, paper, sample="sample_concepts")
  if size in ("cpu", "smoke"):
    with config.unlocked():
      # Sets and sentences are short: rows of half the length hold as many.
      config.context_length = 64
      config.damcha.stride = 8
      config.data.update(max_source_tokens=24, max_target_tokens=38)
      config.num_steps *= 2 if size == "cpu" else 1
  return config


def paper() -> ml_collections.ConfigDict:
  config = text.base("commongen", context_length=128,  # Table 2's T
                     num_training_examples=NUM_TRAINING_EXAMPLES)
  config.model.vocab_size = 8_000  # omitted: CommonGen has about 10,000 different words
  return config
