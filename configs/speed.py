"""How fast whole decoders train, evaluate and sample, beside one of plain Flax.

  python -m experiments.efficiency --config=configs/speed.py

Decoders take turns in every round; every figure is a median, `_ratio` is to the plain Flax decoder
in the same round and `_to_mha` to the suite's MHA. What is aimed at, in rows of `summary.json`, and
what came out on two cores with nothing else to do:

| variant | metric | decoder | aim | here |
|---|---|---|---|---|
| gpt2_layer | step_time_ratio | damcha_stride64 | at most 0.88 | 0.86 |
| gpt2_layer | step_time_ratio | damcha_prefix_stack | at most 1.25 | 1.17 |
| gpt2_layer | step_time_ratio | damcha_prefix_generator | at most 1.5 | 1.24 |
| gpt2_layer | step_time_ratio | mha | at most 1.0 | 0.94 |
| gpt2_layer | peak_share | damcha_stride64 | at least 0.65 | 0.81 |
| d128_t64 | step_time_to_mha | damcha_prefix_stack | at most 2.5 | 1.95 |
| d128_t256 | step_time_to_mha | damcha_prefix_stack | at most 1.5 | 1.59 |
| gpt2_t2048 | peak_memory_to_mha | damcha_prefix_generator | at most 1.3 | 1.02 |
| depth12 | compile_time_growth | damcha_stride64 | at most 1.3 | 1.02 |
| gpt2_sampling | token_time_growth | all | at most 1.2 | at most 1.05 |
| gpt2_sampling | cache_speedup | all | at least 10 | at least 19 |
| all with steps | supply_ratio | input_pipeline | at least 20 | at least 76 |
| all with steps | host_wait_share | input_pipeline | at most 0.03 | 0.000 |

It took ten minutes, all attentions included (`results/speed`). The same command resumes at the
shape where it stopped. Ratios of steps vary by 0.1 with what else the machine does: the stack's 1.17
is 1.24 as the ratio of the two medians, which does not tell it from 1.25, nor from one for each
layer. In `d128_t256` a step with the exact prefix for the stack has 2.3 times the operations of
MHA's; it takes 1.31 times plain Flax's step, of which the suite's MHA takes 0.84.

All ratios are medians of those of single rounds, which need not be the ratio of two medians. `flax`
is the plain decoder, `matmul` a product of two matrices, `input_pipeline` what makes batches; a
DAMCHA is named after its stride or `prefix` (a metric for each token), and after `stack` if all
layers share its metrics.

| metric | is |
|---|---|
| step_gflops | operations of a step's matrix products, by the convention that counts all scores |
| peak_gflops_per_second | operations a second of the matrix product alone, the machine's peak |
| peak_share | step_gflops a second, in units of that peak |
| token_time, rerun_time | a token with a cache, near the window's end; all of the window without one |
| token_time_growth | a token near the window's end, in units of one near its beginning |
| cache_speedup | rerun_time in units of token_time |
| compile_time_growth | compiling four times as many layers, in units of compiling these |
| supply_ratio | batches that are made in the time of the fastest decoder's step |
| host_wait_share | of the time of a training loop, in which a batch was waited for |

  python -m experiments.efficiency --config=configs/speed.py:smoke

Compilation takes a minute or more; then seconds, on shapes too small to mean anything.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import gpt2
from configs import table2

GPT2_LAYER = dict(num_heads=12, features=768, mlp_features=3072)  # 5.4; F as in `gpt2.py`
D128 = dict(num_layers=4, num_heads=8, features=128, mlp_features=256)  # Table 2's
OTHERS = ("tha", "dcmha", "colmha", "moa", "mma")


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  config = table2.base("speed", size)
  config.attentions = ",".join(("mha", "damcha", *OTHERS))
  config.damcha.parameterization = "rowsum"  # the same function as blocks, in less time
  config.speed = ml_collections.ConfigDict(dict(
      damcha_variants=(
          dict(name="damcha_stride64", stride=64, sharing="generator"),
          dict(name="damcha_stride64_stack", stride=64, sharing="stack"),
          dict(name="damcha_prefix_generator", stride=1, sharing="generator"),
          dict(name="damcha_prefix_stack", stride=1, sharing="stack"),
      ),
      shapes=tuple(_shapes()),
  ))
  if size == "smoke":
    config.attentions = "mha,damcha"
    config.speed.damcha_variants = config.speed.damcha_variants[::3]
    small = dict(num_layers=1, num_heads=4, features=16, mlp_features=32)
    config.speed.shapes = tuple(
        table2.reduced({**entry, "model": {**entry["model"], **small}}, batch_size=2,
                       context_length=32, damcha_widths=(4, 4))
        for entry in config.speed.shapes if not entry["variant"].startswith("d128"))
  return config.lock()


def _shapes() -> Iterator[dict[str, Any]]:
  layers = dict(num_layers=3, **GPT2_LAYER)
  few = dict(omitted=OTHERS)  # whose step times in small layers are in `costs.py`
  yield decoder("gpt2_layer", 2, 512, (32, 32), layers, "steps")
  for length in (64, 256):
    yield decoder(f"d128_t{length}", 8, length, (256, 512), D128, "steps", **few)
  yield decoder("gpt2_sampling", 1, 512, (32, 32), layers, "sampling", **few)
  yield decoder("gpt2_t2048", 1, 2048, (32, 32), layers, "memory", **few)
  # Flax's has no scan over layers, and takes four times as long to compile with four times as many.
  yield decoder("depth12", 1, 64, (32, 32), dict(D128, num_layers=12, scan_layers=True), "depth",
                omitted=("flax", "damcha_stride64_stack", "damcha_prefix_generator", *OTHERS))


def decoder(variant: str, batch_size: int, context_length: int, damcha_widths: tuple[int, ...],
            sizes: dict[str, Any], measured: str, omitted: tuple[str, ...] = ()) -> dict[str, Any]:
  """An entry of `speed.shapes`: the decoder of Section 5.4 in float32 with other sizes."""
  model = gpt2.paper("mix").model.to_dict() | dict(
      dropout_rate=0.0,  # plain Flax's has none
      scan_layers=False,  # faster on a CPU
      attention_implementation="plain",  # one program for all: few of them have a fused kernel
      dtype="float32",
  )
  return dict(variant=variant, batch_size=batch_size, context_length=context_length,
              model=model | sizes, damcha_widths=damcha_widths, measured=measured, omitted=omitted)
