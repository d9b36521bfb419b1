"""Image generation on CIFAR-100: Section 5.1, Table 1.

  python -m experiments.image_generation --config=configs/cifar100.py

Needs the images: `python -m damcha_jax.data.prepare cifar100`. 50 epochs of 45,000 images, 1,024
grey pixels each. FIDs need Inception's weights, of which `config.metrics.inception_weights` is the
path. The paper reports, for MHA and DAMCHA: MSE 0.125 and 0.123, FID 358.1 and
314.6, FID@Top-50 59.7 and 53.8.

  python -m experiments.image_generation --config=configs/cifar100.py:cpu

Three attentions, minutes each on two cores, on 16x16 images that ship with the package.

  python -m experiments.image_generation --config=configs/cifar100.py:smoke

Seconds per attention after compilation; runs every part of the program and learns little.
"""

import ml_collections

from configs import cifar


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  return cifar.get_config(size, dataset="cifar100")
