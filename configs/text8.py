"""GPT-2 over bytes on text8 (100M characters of cleaned Wikipedia): Section 5.4, Table 5.

  python -m experiments.gpt2_enwik8 --config=configs/text8.py

Needs the corpus: `python -m damcha_jax.data.prepare text8`. 1.9e18 FLOP with MHA, 1.6e18 with
DAMCHA: at 40% utilisation (an estimate, not a measurement) 1.2 and 1 hours on four TPU v4 chips.
The paper reports, in nats per character on validation: MHA 1.06, DCMHA 1.05, DAMCHA 1.03.

  python -m experiments.gpt2_enwik8 --config=configs/text8.py:cpu

Minutes per attention on two cores, on text that ships with the package. Every attention should end
below what `gzip -9` makes of the same validation bytes, 2.31 bits per byte.

  python -m experiments.gpt2_enwik8 --config=configs/text8.py:smoke

Seconds after compilation; runs every part of the program and learns little.
"""

import ml_collections

from configs import gpt2


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  return gpt2.get_config(size, dataset="text8", sample="sample_text8")
