"""GPT-2 over bytes on text8 (100M characters of cleaned Wikipedia): Section 5.4, Table 5.

  python -m experiments.gpt2_enwik8 --config=configs/text8.py
  python -m experiments.gpt2_enwik8 --config=configs/text8.py:cpu
  python -m experiments.gpt2_enwik8 --config=configs/text8.py:smoke
"""

import ml_collections

from configs import gpt2


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  return gpt2.get_config(size, dataset="text8", sample="sample_text8")
