"""Synthetic tasks that need several head subspaces together: Section 5.6.

  python -m experiments.synthetic --config=configs/synthetic.py

Every attention, its parameters matched to MHA's, on two look-ups over five entanglements and four
feature dimensions, ten seeds each. Needs no data. The paper's Appendix I, which defines its tasks,
is not public: docs/synthetic.md says what these are, and why, and what would falsify the claim.

  python -m experiments.synthetic --config=configs/synthetic.py:cpu

Some 25 minutes on two idle cores: five seeds. Stops and resumes like every experiment.

  python -m experiments.synthetic --config=configs/synthetic.py:smoke

Seconds after compilation; every part of the program once.
"""

import ml_collections

from configs import gpt2

SIZES = ("paper", "cpu", "smoke")
ATTENTIONS = ("mha,damcha,damcha_robust,damcha_full_width,tha,dcmha,colmha,moa,mma,authors_tha,"
              "authors_dcmha,authors_colmha,authors_moa,authors_mma,told")


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  """The study; 5.6 gives none of the sizes, so each has its reason beside it.

  Raises:
    ValueError: `size` is none of SIZES.
  """
  if size not in SIZES:
    raise ValueError(f"unknown size '{size}'; choose one of {', '.join(SIZES)}")
  config = paper()
  if size != "paper":
    {"cpu": shrink_to_cpu, "smoke": shrink_to_smoke}[size](config)
  config.size = size
  return config.lock()


def paper() -> ml_collections.ConfigDict:
  """Section 5.6 as far as it goes: two tasks, entanglement and feature dimension as knobs."""
  config = ml_collections.ConfigDict()
  config.experiment = "synthetic"
  config.name = "synthetic"
  config.size = "paper"
  config.tasks = "classification,retrieval"  # 5.6: two tasks, one of them a classification
  config.attentions = ATTENTIONS  # 5.6 compares with MHA; the others are Table 1's. And the control
  config.seeds = tuple(range(10))  # omitted: enough for intervals
  config.entanglements = (0.0, 0.25, 0.5, 0.75, 1.0)  # 5.6: from absent to strong
  config.dimension = 32  # omitted: 8 features for each of 4 heads
  config.dimensions = (16, 32, 64, 128)  # 5.6: "scales with feature dimensionality"
  config.num_steps = 2_000  # omitted: several times what every attention needs to level off
  config.batch_size = 64  # omitted: sequences
  config.num_held_out = 4_096  # omitted: an accuracy of 0.9 has a standard error of 0.2%
  config.classification = ml_collections.ConfigDict(dict(
      num_items=16,  # omitted: enough that a guess among them is poor
      num_queries=4,  # omitted: more queries for the same items teach faster
      num_classes=4,  # omitted: items share their class, as in a classification
      separation=12.0,  # omitted: the optimum errs on some 3% of the queries at D = 32
      causal=False,  # a classifier of a given set: an encoder, as is 5.5's
      damcha_context="sequence",  # 3.2: the mean of the whole input, which an encoder may see
  ))
  config.retrieval = ml_collections.ConfigDict(dict(
      num_items=16,  # 2^H, so that at full entanglement it takes every head's subspace
      num_queries=4,  # omitted: as above
      num_classes=8,  # omitted: more than above, as retrieval wants the one item
      separation=48.0,  # omitted: fully entangled, the optimum errs on 3% at D = 16, 1% at 32
      causal=True,  # a sequence read from left to right, as in the paper's decoders (5.1)
      damcha_context="prefix",  # the causal form of the mean
  ))
  config.model = ml_collections.ConfigDict(dict(
      # omitted: so that it takes the attention to join subspaces. With two layers, the first one's
      # feed-forward part can do it for the second one's attention.
      num_layers=1,
      num_heads=4,  # omitted: two pairs of subspaces
      symbol_features=4,  # omitted: 16 in all, for 5 or 9 symbols
      mlp_features=192,  # omitted: 4 times the width of 32 + 16
      initializer="lecun",  # omitted: unit variance at any width
      attention_implementation="auto",  # no effect on results beyond rounding
      dtype="float32",  # omitted: small models
      param_dtype="float32",
  ))

  base = gpt2.paper("synthetic")  # DAMCHA's section, and what has no effect on results
  config.damcha = base.damcha
  gpt2.comparators(config)
  # A metric for every query. rowsum trains the function of blocks (a learning rate H times larger,
  # see README). W is twice the 2NH of other configs; the feed-forward part is narrower for it.
  config.damcha.update(stride=1, parameterization="rowsum", widths=(16,) * 8)
  config.full_width_rank = 1  # omitted: of the update on top of a metric like MHA's
  config.mma.local_window = 8  # half of the items

  config.optimizer = base.optimizer
  config.optimizer.update(
      learning_rate=1.5e-2,  # omitted: the best of 2e-3, 5e-3 and this for MHA and DAMCHA
      end_learning_rate_factor=0.0,
      warmup_steps=50,
      b2=0.99,
      weight_decay=0.01,  # omitted: examples never repeat, so there is little to regularise
      clip_norm=0.0,  # a norm over seeds that are trained together would couple them
  )
  for key in ("mesh", "logical_rules", "prng_impl"):
    config[key] = base[key]
  config.evaluation = ml_collections.ConfigDict(dict(every_steps=500, batch_size=256))
  config.checkpoint = ml_collections.ConfigDict(dict(every_steps=500, keep_last=1, keep_best=0))
  config.logging = ml_collections.ConfigDict(dict(every_steps=50, tensorboard=False))
  return config


def shrink_to_cpu(config: ml_collections.ConfigDict) -> None:
  """Some 25 minutes on two idle cores."""
  config.seeds = tuple(range(5))
  config.entanglements = (0.0, 0.5, 1.0)
  config.dimensions = (16, 32, 64)
  config.num_steps = 300
  config.batch_size = 32
  config.num_held_out = 1_024
  config.evaluation.update(every_steps=300, batch_size=128)
  config.checkpoint.update(every_steps=300)
  config.logging.update(every_steps=20)


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds an attention: two seeds, and too few steps to learn."""
  shrink_to_cpu(config)
  config.attentions = "mha,damcha,told"
  config.seeds = (0, 1)
  config.entanglements = (0.0, 1.0)
  config.dimension = 8
  config.dimensions = (8,)
  config.num_steps = 10
  config.batch_size = 8
  config.num_held_out = 16
  for task in ("classification", "retrieval"):
    config[task].update(num_items=4, num_queries=2, num_classes=2)
  config.model.update(num_heads=2, mlp_features=32)
  config.damcha.update(widths=(8,) * 2)
  config.optimizer.update(warmup_steps=2)
  config.evaluation.update(every_steps=10, batch_size=16)
  config.checkpoint.update(every_steps=10)
  config.logging.update(every_steps=2)
