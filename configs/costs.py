"""What every attention costs in the paper's models, and how that grows: Table 7, Appendix D.4.

  python -m experiments.efficiency --config=configs/costs.py

Counts, peak memory and latency of the layers of Section 5.1's model, GPT-2 and ViT-S/16; the
constants that Table 7's formulas leave out, which `table7_residual` 0 shows to be all there is;
exponents in T, D, H and N, counted and measured, with plots; step times relative to MHA. Five
minutes on two idle cores, most of them compiling; the same command resumes at the shape where it
stopped.

  python -m experiments.efficiency --config=configs/costs.py:smoke

Seconds after compilation; the same program on shapes too small to mean anything.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import table2


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = table2.base("costs", size)
  config.attentions = ("mha,damcha,tha,dcmha,colmha,moa,mma,authors_tha,authors_dcmha,"
                       "authors_colmha,authors_moa,authors_mma")
  config.shapes = (*_models(), *_steps())
  config.scaling = _scaling()
  if size == "smoke":
    small = dict(num_layers=1, context_length=16, features=16, mlp_features=32, num_heads=4,
                 damcha_widths=(4, 4), omitted=())
    config.shapes = tuple(table2.reduced(entry, **small) for entry in config.shapes[2:4])
    config.scaling.update(context_lengths=(8, 16), features=(8, 16), num_heads=(4, 8),
                          num_layers=(1, 2))
    config.scaling.shape.update(context_length=8, features=8, num_heads=4, measured="nothing",
                                damcha_widths=(4, 4))
  return config.lock()


def _models() -> Iterator[dict[str, Any]]:
  yield table2.section_5_1(dataset="synthetic", variant="section_5_1", context_length=256,
                           measured="forward")
  yield table2.shape(
      dataset="synthetic",
      variant="gpt2",
      context_length=512,  # 5.4, as are the next three
      num_layers=12,
      num_heads=12,
      features=768,
      mlp_features=3072,
      damcha_stride=64,
      damcha_widths=(24,) * 8,
      measured="forward",
  )
  yield table2.shape(
      dataset="synthetic",
      variant="vit_s16",
      context_length=197,  # 5.5: 14 x 14 patches and the class token
      num_layers=12,
      num_heads=6,
      features=384,
      mlp_features=1536,
      causal=False,
      damcha_context="sequence",
      damcha_stride=1,
      damcha_widths=(24,) * 8,
      measured="forward",
      omitted=("mma",),  # 6 heads do not make four groups
  )


def _steps() -> Iterator[dict[str, Any]]:
  """Small layers, where what surrounds the products counts, and one of GPT-2's."""
  for length in (64, 256):
    yield table2.shape(
        dataset="synthetic",
        variant=f"d128_t{length}",
        batch_size=512 // length,
        context_length=length,
        num_layers=3,
        num_heads=8,
        features=128,
        mlp_features=512,
        damcha_stride=length // 8,
        damcha_widths=(6,) * 8,  # 2N
        measured="train_step",
    )
  yield table2.shape(
      dataset="synthetic",
      variant="gpt2_layer",
      batch_size=1,
      context_length=512,
      num_layers=1,
      num_heads=12,
      features=768,
      mlp_features=3072,
      damcha_stride=64,
      damcha_widths=(2,) * 8,  # 2N
      measured="train_step",
  )


def _scaling() -> ml_collections.ConfigDict:
  """The attention alone, with a metric per layer as Table 7 has it."""
  return ml_collections.ConfigDict(dict(
      shape=table2.shape(
          dataset="synthetic",
          context_length=256,
          num_layers=1,
          num_heads=8,
          features=128,
          mlp_features=1,  # next to no feed-forward part
          causal=False,
          damcha_context="sequence",
          damcha_stride=1,
          damcha_widths=(24,) * 8,
          measured="forward",
      ),
      context_lengths=(64, 256, 1024),
      features=(64, 128, 256),
      num_heads=(4, 8, 16),
      num_layers=(1, 2, 4),
  ))
