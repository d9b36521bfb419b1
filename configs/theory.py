"""What the paper proves, checked by computing it: Section 4, Appendices C and D.

  python -m experiments.theory --config=configs/theory.py

C.1: multi-head attention as a full-width DAMCHA, to float precision; what rank D / H cannot
express, and what the head-slice form cannot. C.2: the excess risk of static metrics beside the
theorem's lower bound, a generator that is trained, and the assumptions where they fail. D: counted
operations and parameters and measured times beside the formulas. The inputs are made; nothing is
downloaded. Two to four minutes on two cores; the same command resumes at the part and seed where
it stopped.

  python -m experiments.theory --config=configs/theory.py:smoke

The same program on sizes too small to mean anything; most of its time is compiling.

Every size here is ours: the paper has none in these appendices.
"""

import ml_collections

from configs import costs


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.costs = _costs(size)  # refuses unknown sizes
  config.experiment = "theory"
  config.name = "theory"
  config.size = size
  config.seeds = (0, 1, 2)
  config.embedding = dict(
      shapes=((16, 32, 4), (12, 64, 8)),
      num_instances=100,
      slice_lengths=(4, 8, 9, 16, 32, 128),  # D / H = 8 and one more: reached up to 9
  )
  config.strictness = dict(
      length=16,
      features=32,
      num_heads=4,
      ranks=(1, 2, 4, 8, 16, 24, 32),
      num_starts=4,
      num_steps=1500,
      learning_rate=0.03,
  )
  config.contexts = dict(
      features=16,
      num_heads=4,
      num_contexts=(1, 2, 4, 8),
      ranks=(2, 4, 8, 16),
      conditions=(1.0, 4.0),
      heterogeneity=0.5,
      heterogeneities=(0.0, 0.25, 0.5, 1.0, 2.0),
  )
  config.generator = dict(
      num_contexts=4,
      signals=(0.0, 0.25, 0.5, 1.0, 2.0),
      length=16,
      noise=1.0,
      widths=(64, 64),
      num_steps=2000,
      batch_size=32,
      learning_rate=0.01,
      num_held_out=2000,
  )
  config.growth = dict(
      features=16,
      length=16,
      num_directions=16,
      num_samples=1000,
      radii=(0.01, 0.1, 1.0, 10.0, 100.0, 1000.0),
  )
  if size == "smoke":
    config.seeds = (0, 1)
    config.embedding.update(shapes=((6, 8, 2),), num_instances=3, slice_lengths=(4, 16))
    config.strictness.update(length=6, features=8, num_heads=2, ranks=(2, 4, 8), num_starts=2,
                             num_steps=300)
    config.contexts.update(features=4, num_heads=2, num_contexts=(1, 2), ranks=(2, 4),
                           heterogeneities=(0.0, 1.0))
    config.generator.update(num_contexts=2, signals=(0.0, 2.0), length=4, widths=(8,),
                            num_steps=200, num_held_out=200)
    config.growth.update(features=4, num_directions=4, num_samples=50)
  return config.lock()


def _costs(size: str) -> ml_collections.ConfigDict:
  """The part of `costs.py` that grows sizes, of the two attentions that Appendix D compares."""
  config = costs.get_config(size)
  with config.unlocked():
    config.attentions = "mha,damcha"
    config.shapes = ()
  return config
