"""What the experiments of Section 5.1 (Table 1) have in common: images and texts, one decoder.

Not an experiment of its own: the config files of either family begin with `paper` and shrink with
`shrink_to_cpu` and `shrink_to_smoke`. A comment `5.1` marks a value that the paper's Section 5.1
states (`3.2` and so on likewise); `omitted` marks one that the paper leaves out, with the reason
for the value chosen here.
"""

import ml_collections
from ml_collections import config_dict

from configs import gpt2

SIZES = ("paper", "wide", "cpu", "smoke")


def check_size(size: str) -> None:
  """Raises ValueError if `size` is none of `SIZES`."""
  if size not in SIZES:
    raise ValueError(f"unknown size '{size}'; choose one of {', '.join(SIZES)}")


def paper(experiment: str, dataset: str, context_length: int,
          num_training_examples: int) -> ml_collections.ConfigDict:
  """Section 5.1 in full, but for the sections `data`, `sampling` and the family's own."""
  config = ml_collections.ConfigDict()
  config.experiment = experiment
  config.name = dataset
  config.size = "paper"
  config.dataset = dataset
  config.attentions = "mha,tha,dcmha,colmha,mma,moa,damcha"  # Table 1's rows; comma-separated
  config.seeds = (0,)  # omitted: one run per cell is what Table 1 shows
  config.batch_size = 128  # 5.1, sequences over all devices
  config.num_steps = 50 * num_training_examples // config.batch_size  # 5.1: 50 epochs
  config.context_length = context_length  # tokens T

  config.model = ml_collections.ConfigDict(dict(
      num_layers=10,  # 5.1
      num_heads=8,  # 5.1; with the next, head dimension 64 as 5.1 says
      features=512,  # 5.1
      mlp_features=2048,  # omitted: 4D, the usual width
      vocab_size=256,  # the family's tokens
      positions="learned",  # omitted: as in 5.4's GPT-2
      norm_placement="pre",  # omitted: as in 5.4's GPT-2
      tie_embeddings=True,  # omitted: as in 5.4's GPT-2
      initializer="gpt2",  # omitted: as in 5.4's GPT-2
      gelu="exact",  # omitted: as in the authors' code
      dropout_rate=0.1,  # omitted: as in 5.4's GPT-2; 50 epochs see every example 50 times
      attention_dropout_rate=0.0,  # omitted: GPT-2 drops weights too, but fused kernels keep none
      remat=False,  # no effect on results
      scan_layers=True,  # no effect on results: compiles one layer instead of ten
      attention_implementation="auto",  # no effect on results beyond rounding
      dtype="bfloat16",  # omitted: the accelerators' matrix units; softmax and metric in float32
      param_dtype="float32",  # omitted: bfloat16 would lose small updates
  ))
  config.damcha = ml_collections.ConfigDict(dict(
      form="head_slice",  # 3.3: head i scores its own slice of the input
      update_rank=config_dict.placeholder(int),  # unused by the head-slice form
      static_part=True,  # unused by the head-slice form
      metric="generated",  # 3.2
      sharing="generator",  # 3.4: one f_theta for the stack, each layer its own context
      context="prefix",  # omitted: a mean over the whole sequence would leak the future
      stride=context_length // 16,  # omitted: 16 contexts per example
      half_life=config_dict.placeholder(float),  # 3.2: a mean, in which all tokens count alike
      mix_slices=False,  # 3.3: slices of the layer input itself
      # 5.1: f_theta is a 9-layer MLP: 9 Linear layers, so 8 hidden widths. The width is omitted:
      # W = 2N = 20 matches the query and key projections it replaces (2ND^2) in parameters, which
      # the paper's "comparable parameter count" needs.
      widths=(20,) * 8,
      parameterization="blocks",  # 3.2: M with all its H x H blocks
      preset="paper",  # omitted: PyTorch's default initial values, as in the authors' code
      initializer=config_dict.placeholder(str),  # the preset's, as the next two
      residual=config_dict.placeholder(bool),
      normalize_context=config_dict.placeholder(bool),
      block_ablation_train="full",  # 5.1 ablates nothing
      block_ablation_eval="full",
      allow_future_leak=False,
  ))
  gpt2.comparators(config)
  config.optimizer = ml_collections.ConfigDict(dict(
      learning_rate=3e-4,  # 5.1
      end_learning_rate_factor=1.0,  # omitted: 5.1 names a rate and no schedule, so it stays
      warmup_steps=500,  # omitted: Adam's first steps are too large without
      b1=0.9,  # omitted: Adam's default
      b2=0.999,  # omitted: Adam's default
      eps=1e-8,  # omitted: Adam's default
      weight_decay=0.0,  # 5.1: Adam
      clip_norm=1.0,  # omitted: as in 5.4's GPT-2
      accumulation_steps=1,  # no effect on results
  ))
  gpt2.execution(config)
  every = config.num_steps // 25  # omitted: every other epoch
  config.evaluation = ml_collections.ConfigDict(dict(every_steps=every, batch_size=128))
  config.checkpoint = ml_collections.ConfigDict(dict(every_steps=every, keep_last=2, keep_best=1))
  config.logging = ml_collections.ConfigDict(dict(every_steps=100, tensorboard=True))
  return config


def widen(config: ml_collections.ConfigDict) -> None:
  """The other reading of the 9-layer MLP, W = D: not comparable in parameters (134M in f_theta)."""
  config.damcha.widths = (config.model.features,) * 8


def shrink_to_cpu(config: ml_collections.ConfigDict) -> None:
  """Minutes on two cores, on samples that ship with the package."""
  config.attentions = "mha,dcmha,damcha"  # the others take as long again, each
  config.batch_size = 16
  config.model.update(num_layers=3, num_heads=4, features=128, mlp_features=512, dropout_rate=0.0,
                      tie_embeddings=False, initializer="lecun", scan_layers=False,
                      dtype="float32")
  # rowsum trains the same function as blocks with fewer parameters; W = 2NH matches the
  # parameters of the projections it replaces.
  config.damcha.update(parameterization="rowsum", widths=(24,) * 8)
  config.optimizer.update(learning_rate=2e-3, end_learning_rate_factor=0.1, warmup_steps=50,
                          b2=0.99)
  config.logging.update(every_steps=20)


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds: every part of the program once, on a model too small to learn much."""
  shrink_to_cpu(config)
  config.attentions = "mha,tha,dcmha,colmha,mma,moa,damcha"
  config.num_steps = 30
  config.batch_size = 8
  config.model.update(num_layers=2, num_heads=4, features=16, mlp_features=64)
  config.damcha.update(widths=(8,) * 8)
  config.optimizer.update(learning_rate=1e-2, warmup_steps=3)
  config.evaluation.update(every_steps=10)
  config.checkpoint.update(every_steps=10)
  config.logging.update(every_steps=2)
