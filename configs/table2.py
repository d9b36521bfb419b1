"""What the attentions cost at Table 2's sizes: Section 5.2.

  python -m experiments.efficiency --config=configs/table2.py

Table 2 was counted on four layers of width 128 over 64, 128 and 256 tokens; `gflops` equals it to
the four decimals printed. The rows of variant `section_5_1` are the same sets in the model of
Section 5.1, ten layers of width 512, whose generator is a 9-layer MLP; its images have 1024 tokens.
Memory and latency are those of this machine, one sequence at a time. A minute on two cores; all 18
distinct GFLOPs of the table come out as printed.

  python -m experiments.efficiency --config=configs/table2.py:smoke

Seconds; the same program on shapes too small to mean anything.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import gpt2

SIZES = ("paper", "smoke")
# 5.2's tokens per sequence are omitted; these are the ones whose counts are Table 2's.
LENGTHS = {"cifar10": 64, "cifar100": 64, "common_gen": 128, "wmt14": 256}


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = base("table2", size)
  # The simplified comparators of the authors' code, which is what the paper compares.
  config.attentions = ("mha,authors_tha,authors_dcmha,authors_colmha,authors_mma,authors_moa,"
                       "damcha")
  config.shapes = tuple(_shapes())
  if size == "smoke":
    small = dict(num_layers=2, features=16, mlp_features=32, num_heads=2)
    table, model = config.shapes[0], config.shapes[len(LENGTHS)]
    config.shapes = (reduced(table, **small), reduced(model, **small, damcha_widths=(4, 4)))
  return config.lock()


def base(name: str, size: str) -> ml_collections.ConfigDict:
  """What `table2` and `costs` have in common; the attentions' options are those of Section 5.4.

  Raises:
    ValueError: `size` is none of `SIZES`.
  """
  if size not in SIZES:
    raise ValueError(f"unknown size '{size}'; choose one of {', '.join(SIZES)}")
  model = gpt2.paper("mix")
  config = ml_collections.ConfigDict()
  config.experiment = "efficiency"
  config.name = name
  config.size = size
  config.attentions = ""
  config.seeds = (0,)
  config.num_rounds = 7 if size == "paper" else 2  # of interleaved timing
  config.shapes = ()
  config.scaling = None
  config.speed = None
  config.damcha, config.optimizer = model.damcha, model.optimizer
  gpt2.comparators(config)
  return config


def shape(**fields: Any) -> dict[str, Any]:
  """An entry of `shapes`; what is given overrides what they have in common."""
  return dict(
      variant=None,
      batch_size=1,
      causal=True,
      first_commit=False,
      damcha_context="prefix",
      omitted=(),
      initializer="lecun",  # no effect on costs
      attention_dropout_rate=0.0,
      attention_implementation="plain",  # one program for all: few of them have a fused kernel
      dtype="float32",
      param_dtype="float32",
  ) | fields


def reduced(entry: dict[str, Any], **sizes: Any) -> dict[str, Any]:
  """An entry of `shapes` with other sizes than its name says, which its variant then tells."""
  variant = "_".join(filter(None, (entry["variant"], "reduced")))
  return {**entry, **sizes, "variant": variant}


def section_5_1(**fields: Any) -> dict[str, Any]:
  """The decoder of Section 5.1: eight contexts per sequence, W = 2N as in `gpt2.py`."""
  return shape(
      num_layers=10,  # 5.1
      num_heads=8,  # 5.1
      features=512,  # 5.1
      mlp_features=2048,  # omitted: 4D
      damcha_stride=fields["context_length"] // 8,
  ) | dict(damcha_widths=(20,) * 8) | fields


def _shapes() -> Iterator[dict[str, Any]]:
  for dataset, length in LENGTHS.items():
    yield shape(
        dataset=dataset,
        context_length=length,
        num_layers=4,
        num_heads=8,
        features=128,
        mlp_features=256,
        first_commit=True,
        damcha_context="learned",  # at the authors' first public commit, which Table 2 counted
        damcha_stride=1,
        damcha_widths=(),
        measured="forward",
    )
  # Section 5.1 makes images pixel by pixel.
  lengths = LENGTHS | {"cifar10": 1024, "cifar100": 1024}
  for dataset, length in lengths.items():
    yield section_5_1(dataset=dataset, variant="section_5_1", context_length=length,
                      measured="nothing")
    yield section_5_1(dataset=dataset, variant="section_5_1_wide", context_length=length,
                      measured="nothing", damcha_widths=(512,) * 8)
