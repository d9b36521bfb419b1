"""Claims about costs, which counts and timings decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from damcha_jax.reporting import Row
from experiments.claims import (Absent, CLEAR, Evidence, FULL_WIDTH, holds_only_under, in_cases,
                                NOT_REPRODUCED, number, REPRODUCED, span, values_of, Verdict)

# The models whose costs are measured, by the variant of their rows; W is the generator's width.
MODELS = {None: "the model that Table 2 counted",
          "section_5_1": "Section 5.1 with W = 2N",
          "section_5_1_wide": "Section 5.1 with W = D",
          "gpt2": "GPT-2 with W = 2N",
          "vit_s16": "ViT-S/16 with W = 2N"}


def table7(evidence: Evidence) -> Verdict:
  rows = _table7(evidence)
  worst = max(rows, key=lambda row: row["value"])
  totals = [row for row in rows if row["variant"] == "table7 total"]
  return Verdict(REPRODUCED if worst["value"] < CLEAR else NOT_REPRODUCED,
                 f"Operations counted over a grid of sizes are the formulas with their constants: "
                 f"the totals to {max(values_of(totals)):.1g}, the stage that differs most, "
                 f"{worst['attention']}'s {worst['variant'].partition(' ')[2]}, by "
                 f"{number(worst['value'])}.")


def _table7(evidence: Evidence) -> list[Row]:
  for experiment in ("theory", "efficiency"):
    try:
      return evidence.rows(experiment, metric="table7_residual")
    except Absent:
      continue
  raise Absent


def cheaper_scores(evidence: Evidence) -> Verdict:
  """D.3, by the counts of one layer and its generator in each form."""
  gflops = {row["attention"]: row for row in evidence.rows("theory", dataset="d_forms",
                                                           metric="gflops")}
  mha = gflops["mha"]["value"]
  names = {"damcha_head_slice": "head slices (Section 3.3)", "damcha_full_width": FULL_WIDTH}
  held = [names[name] for name in names if gflops[name]["value"] < mha]
  failed = [names[name] for name in names if gflops[name]["value"] >= mha]
  text = "; ".join(f"{names[name]} {number(gflops[name]['value'])}" for name in names)
  return Verdict(in_cases(held, failed), f"GFLOP of a layer at {gflops['mha']['variant']}: "
                 f"{text}; multi-head attention {number(mha)}.")


def amortised(evidence: Evidence) -> Verdict:
  """D.2: the generator runs once whatever N."""
  exponents = {row["variant"].rpartition(" ")[2]: row["value"] for row in evidence.rows(
      "theory", metric="generator_gflops_exponent")}
  held = [f"`sharing={name}`" for name, value in exponents.items() if abs(value) < CLEAR]
  failed = [f"`sharing={name}`" for name, value in exponents.items() if abs(value) >= CLEAR]
  text = ", ".join(f"{number(round(value, 9))} with `sharing={name}`"
                   for name, value in exponents.items())
  return Verdict(in_cases(held, failed), f"The generator's operations grow with N to the power "
                 f"{text}; `stack` is a metric for the whole stack, `generator` Section 3.4's "
                 "parameters for the whole stack and a metric for each layer.")


def layer_parameters(evidence: Evidence) -> Verdict:
  """D.4: 4 D^2 and 2 D^2."""
  rows = evidence.rows("theory", metric="params_per_layer")
  equal = all(row["value"] == row["paper"] for row in rows)
  return Verdict(REPRODUCED if equal else NOT_REPRODUCED, "; ".join(
      f"{row['attention']} {row['value']:,.0f}, formula {row['paper']:,.0f}" for row in rows)
                 + " (without the generator and biases).")


def saving(evidence: Evidence) -> Verdict:
  """D.4: the net saving, at the sizes counted."""
  row = evidence.rows("theory", metric="params_saved")[0]
  status = (REPRODUCED if row["value"] > 0
            else holds_only_under("a generator of fewer than 2 N D^2 parameters"))
  return Verdict(status, f"The formula is exact ({row['paper']:,.0f}), and the saving is "
                 f"{row['value']:,.0f} parameters: {row['note'].partition(';')[0]}.")


def _ratios(evidence: Evidence, metric: str) -> dict[str, list[float]]:
  """DAMCHA's to MHA's, by model."""
  rows = []
  for config in ("table2", "costs"):
    try:
      rows += evidence.rows("efficiency", f"{config}:", metric=metric)
    except Absent:
      continue
  mha = {(row["dataset"], row["variant"]): row["value"] for row in rows
         if row["attention"] == "mha"}
  ratios: dict[str, list[float]] = {}
  for row in rows:
    if row["attention"] == "damcha" and row["variant"] in MODELS:
      ratios.setdefault(MODELS[row["variant"]], []).append(
          row["value"] / mha[row["dataset"], row["variant"]])
  if not ratios:
    raise Absent
  return ratios


def _of_decoders(evidence: Evidence, metrics: Sequence[str],
                 by_context: bool) -> dict[str, list[float]]:
  """DAMCHA's to MHA's in the same round, by decoder and how often the context is renewed."""
  ratios: dict[str, list[float]] = {}
  for metric in metrics:
    try:
      rows = evidence.rows("efficiency", "speed:", metric=f"{metric}_to_mha")
    except Absent:
      continue
    for row in rows:
      name = f"decoder `{row['variant']}`" + f" with `{row['attention']}`" * by_context
      ratios.setdefault(name, []).append(row["value"])
  return ratios


def comparable(metric: str, what: str, tolerance: float = 0.1) -> Callable[[Evidence], Verdict]:
  """Whether DAMCHA has no more of a cost than MHA, up to a tolerance."""

  def decide(evidence: Evidence) -> Verdict:
    return _up_to(_ratios(evidence, metric), tolerance, what, "comparable")

  return decide


def memory(evidence: Evidence) -> Verdict:
  """1: a forward pass of the layers, and a train step of whole decoders."""
  ratios = _ratios(evidence, "peak_memory") | _of_decoders(evidence, ("peak_memory",), False)
  return _up_to(ratios, 0.1, "Peak memory (a forward pass; a decoder's train step)", "comparable")


def latency(evidence: Evidence) -> Verdict:
  """3.3: what layers' forward passes and decoders' steps take here, in the same round as MHA's."""
  ratios = _ratios(evidence, "latency_ratio") | _of_decoders(
      evidence, ("step_time", "evaluation_time"), True)
  return _up_to(ratios, 0.1, "Time here (a forward pass; a decoder's train step and evaluation)",
                "negligible")


def _up_to(ratios: dict[str, list[float]], tolerance: float, what: str, word: str) -> Verdict:
  held = [name for name, values in ratios.items() if max(values) <= 1 + tolerance]
  failed = [name for name in ratios if name not in held]
  text = "; ".join(f"{name} {span(values)}" for name, values in ratios.items())
  return Verdict(in_cases(held, failed), f"{what} of DAMCHA in units of multi-head attention's: "
                 f"{text}. Up to {1 + tolerance:g} counts as {word}.")
