"""Translation of WMT14 from English to German: Section 5.1, Tables 1 and 3 and Figure 3.

  python -m experiments.text_generation --config=configs/wmt14.py

Needs the data set: `python -m damcha_jax.data.prepare wmt14`. The paper reports NLL 5.7730 and
BARTScore -8.4740 with MHA, 5.1907 and -5.4451 with DAMCHA. It names no direction; BARTScore's model
reads English, so only `--config.data.direction=de-en` has one.

  python -m experiments.text_generation --config=configs/wmt14.py:wide

The same with a generator as wide as the model.

  python -m experiments.text_generation --config=configs/wmt14.py:cpu

Minutes an attention on two cores, on sentences of a help system that ship with the package.

  python -m experiments.text_generation --config=configs/wmt14.py:smoke

Seconds an attention after compilation; runs every part of the program and learns little.
"""

import ml_collections

from configs import text

NUM_TRAINING_EXAMPLES = 4_508_785


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  return text.get_config(size, paper, sample="sample_pairs")


def paper() -> ml_collections.ConfigDict:
  config = text.base("wmt14", context_length=256,  # Table 2's T
                     num_training_examples=NUM_TRAINING_EXAMPLES)
  config.model.vocab_size = 32_000  # omitted: both languages; usual for WMT14
  config.data.direction = "en-de"  # omitted: "English-German translation"
  return config
