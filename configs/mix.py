"""GPT-2 over bytes on Mix, half enwik8 and half text8 (200M characters): Section 5.4, Table 5.

  python -m experiments.gpt2_enwik8 --config=configs/mix.py
  python -m experiments.gpt2_enwik8 --config=configs/mix.py:cpu
  python -m experiments.gpt2_enwik8 --config=configs/mix.py:smoke
"""

import ml_collections

from configs import gpt2


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  return gpt2.get_config(size, dataset="mix", sample="sample_mix")
