"""Claims that runs decide: theory, synthetic tasks, and what is measured in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from damcha_jax.evaluation.intervals import student_quantile
from experiments.claims import (Absent, CLEAR, Evidence, FULL_WIDTH, holds_only_under, in_cases,
                                NOT_REPRODUCED, number, REPRODUCED, some, span, UNDECIDED,
                                values_of, Verdict, with_spread)

ROUNDING = {"float32": 1e-5, "float64": 1e-12}
ADAPTS = 0.1  # the least share of a metric's variation that is its context's


def embedding(evidence: Evidence) -> Verdict:
  """C.1: multi-head attention is a DAMCHA, and not the reverse."""
  rows = evidence.rows("theory", dataset="c1_embedding", attention="damcha_full_width",
                       metric="scores_error")
  exact = all(row["value"] <= ROUNDING[dtype] for row in rows for dtype in ROUNDING
              if dtype in row["variant"])
  strict = evidence.value("theory", dataset="c1_strictness", attention="mha", metric="score_error")
  reached = evidence.value("theory", dataset="c1_strictness", attention="damcha_full_width",
                           metric="score_error")
  outside = evidence.rows("theory", dataset="c1_head_slice", metric="score_residual")
  worst = max(outside, key=lambda row: row["value"])
  text = (f"Full width: multi-head attention's scores are computed to within "
          f"{number(max(values_of(rows)))} (relative, float32 and float64); on metrics of full rank "
          f"multi-head attention misses {number(strict)} of the scores, DAMCHA {number(reached)}. "
          f"Head slices (Section 3.3): {number(worst['value'])} of multi-head attention's scores "
          f"are out of reach of any metric at {worst['variant']}.")
  if not (exact and strict > CLEAR and reached < CLEAR):
    return Verdict(NOT_REPRODUCED, text)
  return Verdict(holds_only_under(FULL_WIDTH) if worst["value"] > CLEAR else REPRODUCED, text)


def rank(evidence: Evidence) -> Verdict:
  """3.3, 3.4: RowSum lifts the bound on a head's rank."""
  inclusion = max(values_of(evidence.rows("theory", dataset="c1_embedding", metric="scores_error",
                                        attention="damcha_head_slice")))
  full = evidence.value("theory", dataset="c1_strictness", attention="damcha_full_width",
                        metric="score_error")
  mha = evidence.value("theory", dataset="c1_strictness", attention="mha", metric="score_error")
  text = (f"A head-slice metric of width D / H is a metric of multi-head attention with heads of "
          f"that width (scores differ by {number(inclusion)}), so its rank has the same bound: the "
          "sum of H blocks of that size is a block of that size. Full-width metrics do lift it: on "
          f"metrics of full rank they miss {number(full)} of the scores, multi-head attention "
          f"{number(mha)}.")
  lifted = full < CLEAR < mha
  if inclusion > ROUNDING["float32"]:
    return Verdict(REPRODUCED, text)
  return Verdict(holds_only_under(FULL_WIDTH) if lifted else NOT_REPRODUCED, text)


def risk_no_larger(evidence: Evidence) -> Verdict:
  """C.2, first half, for the best metric of each form."""
  static = {row["variant"]: row["value"] for row in evidence.rows(
      "theory", dataset="c2_heterogeneity", attention="static", metric="excess_risk")}
  slices = {row["variant"]: row["value"] for row in evidence.rows(
      "theory", dataset="c2_heterogeneity", attention="adaptive_head_slice",
      metric="excess_risk")}
  worse = [f"{variant} {number(value)}, static {number(static[variant])}"
           for variant, value in slices.items() if value > static[variant]]
  text = ("Full-width adaptive metrics have the least risk of all by definition (excess 0). Best "
          f"head-slice metric of each context against the best static one of multi-head attention: "
          f"worse in {len(worse)} of {len(slices)} cases ({some(worse) or 'none'}).")
  return Verdict(holds_only_under(FULL_WIDTH) if worse else REPRODUCED, text)


def risk_bound(evidence: Evidence) -> Verdict:
  """C.2, second half."""
  below = evidence.rows("theory", dataset="c2_contexts", attention="static", metric="below_bound")
  one = [row for row in evidence.rows("theory", dataset="c2_contexts", attention="static",
                                      metric="lower_bound") if row["variant"].startswith("K=1,")]
  text = (f"In closed form the excess risk of the best static metric is below the bound in "
          f"{number(sum(values_of(below)))} of {len(below)} cases. With one context, where there is "
          f"nothing to adapt to, the bound is still up to "
          f"{number(max(values_of(one), default=0.0))}: that part is due to rank.")
  if any(values_of(below)):
    return Verdict(NOT_REPRODUCED, text)
  return Verdict(holds_only_under("full-width metrics and risks that grow as the squared "
                                  "distance, as squared errors of scores do"), text)


def curvature(evidence: Evidence) -> Verdict:
  """C.2's Assumption 3 with a softmax."""
  rows = evidence.rows("theory", dataset="c2_growth", attention="softmax",
                       metric="growth_constant")
  normalised = evidence.rows("theory", dataset="c2_growth", attention="softmax_normalised",
                             metric="growth_constant")
  first, last = rows[0], rows[-1]
  text = (f"The largest constant that serves up to a distance R falls from "
          f"{number(first['value'])} ({first['variant']}) to {number(last['value'])} "
          f"({last['variant']}), so none serves all; with normalised inputs it is at most "
          f"{max(map(abs, values_of(normalised))):.1g} at every distance.")
  if last["value"] > first["value"] / 2 and min(values_of(normalised)) > CLEAR:
    return Verdict(REPRODUCED, text)
  return Verdict(holds_only_under("losses of scores before the softmax"), text)


def context_seen(evidence: Evidence) -> Verdict:
  """C.2's Assumption 4 with what the generator reads."""
  trained = evidence.rows("theory", dataset="c2_generator", attention="trained_generator",
                          metric="excess_risk")
  static = min(values_of(evidence.rows("theory", dataset="c2_generator", attention="static",
                                     metric="lower_bound")))
  best, blind = min(trained, key=lambda row: row["value"]), trained[0]
  text = (f"A trained generator that reads the mean of the tokens has an excess risk of "
          f"{number(best['value'])} at {best['variant']} and {number(blind['value'])} at "
          f"{blind['variant']}; the best static metric of full rank has {number(static)}.")
  if best["value"] > static / 2:
    return Verdict(NOT_REPRODUCED, text)
  if blind["value"] < static / 2:
    return Verdict(REPRODUCED, text)
  return Verdict(holds_only_under("contexts that the mean of the tokens tells apart"), text)


def additive(evidence: Evidence) -> Verdict:
  """K: the gap to MHA as a structural and a dynamic part.

  With S_c = 1 the bound of C.2 is attained, which adds the rank's share of the contexts' mean
  metric. What rank costs the metric of each context is another number.
  """
  excess, of_mean = (
      {(row["attention"], row["variant"]): row["value"]
       for row in evidence.rows("theory", dataset="c2_contexts", metric=metric)}
      for metric in ("excess_risk", "bound_from_rank"))
  ranks = {variant.split(", ")[1] for _, variant in excess}
  full = max(ranks, key=lambda name: int(name.partition("=")[2]))
  worst: dict[str, tuple[float, str]] = {}
  num_cases = 0
  for (attention, variant), both in excess.items():
    contexts, rank_of, condition = variant.split(", ")
    if (attention, condition) != ("static", "condition=1") or contexts == "K=1" or rank_of == full:
      continue
    num_cases += 1
    dynamic = excess["static", f"{contexts}, {full}, {condition}"]
    for reading, structural in (
        ("what rank costs the contexts' mean metric", of_mean["static", variant]),
        ("what rank costs each context's own metric", excess["adaptive_low_rank", variant])):
      share = abs(both - dynamic - structural) / both
      text = (f"without adapting {number(dynamic)} and {reading} {number(structural)} miss the "
              f"{number(both)} without either by {100 * share:.2g}% ({variant})")
      worst[reading] = max(worst.get(reading, (0.0, text)), (share, text))
  if not worst:
    raise Absent
  held = [reading for reading, (share, _) in worst.items() if share < CLEAR]
  failed = [reading for reading in worst if reading not in held]
  return Verdict(in_cases([f"the structural part being {reading}" for reading in held], failed),
                 f"Excess risks in closed form with S_c = 1, the worst of {num_cases} cases: "
                 f"{'; '.join(text for _, text in worst.values())}. Less than "
                 f"{100 * CLEAR:g}% counts as rounding.")


def equal_updates(evidence: Evidence) -> Verdict:
  """3.1, 5.3: off-diagonal blocks hold what diagonal ones lack."""
  moved = evidence.value("rowsum", metric="update_size")
  apart = evidence.value("rowsum", metric="update_difference")
  text = (f"Storing the sum of a row's blocks alone trains the same function: after an update of "
          f"up to {number(moved)} parameters differ by up to {number(apart)}. All blocks of a row "
          "get one gradient, so off-diagonal blocks learn what diagonal ones do, and head i still "
          "compares slice i of the query with slice i of the key.")
  return Verdict(NOT_REPRODUCED if apart < CLEAR * moved else REPRODUCED, text)


def adapts(evidence: Evidence) -> Verdict:
  """3.2: the trained metric follows its context."""
  found = {}
  for experiment, names in (("study", ("damcha", "damcha_robust")),
                            ("ablations", ("full", "robust"))):
    key = "attention" if experiment == "study" else "variant"
    try:
      found = {preset: evidence.rows(experiment, metric="adaptivity", **{key: name})
               for preset, name in zip(("paper", "robust"), names)}
      break
    except Absent:
      continue
  if not found:
    raise Absent
  text = "Adaptivity after training (0: the metric ignores its context, 1: it is all context): "
  text += "; ".join(f"with `preset={preset}` " + ", ".join(
      f"{row['dataset']} {with_spread(row)}" for row in rows) for preset, rows in found.items())
  text += f". It counts as adapting from {ADAPTS} on, less a standard deviation over seeds."
  held, failed = [], []
  for preset, rows in found.items():
    adaptive = [row["dataset"] for row in rows if row["value"] - (row["spread"] or 0.0) >= ADAPTS]
    if adaptive:
      held.append(f"`preset={preset}` on {' and '.join(adaptive)}")
    if len(adaptive) < len(rows):
      failed.append(preset)
  return Verdict(in_cases(held, failed), text)


def grows(metric: str, tasks: Sequence[str]) -> Callable[[Evidence], Verdict]:
  """5.6: a slope of DAMCHA's gap to MHA that is above 0 beyond its interval."""

  def decide(evidence: Evidence) -> Verdict:
    held, failed, lines = [], [], []
    for task in tasks:
      fields = dict(dataset=task, attention="damcha")
      slope = evidence.value("synthetic", metric=metric, **fields)
      half = evidence.value("synthetic", metric=f"{metric}_ci95", **fields)
      (held if slope - half > 0 else failed).append(f"`{task}`")
      lines.append(f"{task} {number(slope)} ± {half:.2g}")
    return Verdict(in_cases(held, failed), f"Slope of DAMCHA's accuracy less multi-head "
                   f"attention's, with its 95% interval: {'; '.join(lines)}.")

  return decide


def no_penalty(evidence: Evidence) -> Verdict:
  """5.6: without entanglement DAMCHA keeps up."""
  held, failed, lines = [], [], []
  rows = [row for row in evidence.rows("synthetic", metric="gap_to_mha", attention="damcha")
          if row["variant"].startswith("e0_")]
  for row in rows:
    half = evidence.value("synthetic", metric="gap_to_mha_ci95", attention="damcha",
                          dataset=row["dataset"], variant=row["variant"])
    name = f"{row['dataset']} {row['variant']}"
    (held if row["value"] + half >= 0 else failed).append(f"`{name}`")
    lines.append(f"{name} {number(row['value'])} ± {half:.2g}")
  return Verdict(in_cases(held, failed), "DAMCHA's accuracy less multi-head attention's, with its "
                 f"95% interval: {'; '.join(lines)}.")


def pixel_error(evidence: Evidence) -> Verdict:
  """5.1: the MSE of samples against that of unrelated pictures."""
  control = evidence.value("image_generation", metric="mse_unrelated", attention="real_images")
  rows = [row for row in evidence.rows("image_generation", metric="mse_unpaired_mean")
          if row["attention"] != "real_images"]
  lines = [f"{row['attention']} {with_spread(row)}" for row in rows]
  below = [row for row in rows if row["value"] < 0.5 * control]
  return Verdict(REPRODUCED if len(below) == len(rows) else NOT_REPRODUCED,
                 f"Two unrelated real pictures differ by {number(control)}; samples and the test "
                 f"pictures that they are held against by {some(lines)}. Less than half of the "
                 "former would count as measuring. The paper pairs samples with pictures that "
                 "they have nothing to do with.")


def evolves(evidence: Evidence) -> Verdict:
  """Appendix F: training makes metrics follow their inputs more."""
  rows = [row for row in evidence.rows("analysis", attention="damcha", metric="adaptivity")
          if "layer" not in row["variant"]]
  first, last = rows[0], rows[-1]
  return Verdict(REPRODUCED if last["value"] > first["value"] else NOT_REPRODUCED,
                 f"Adaptivity (0: the metric ignores its context) on {first['dataset']}: "
                 f"{with_spread(first)} at {first['variant']}, {with_spread(last)} at "
                 f"{last['variant']}.")


def layers_agree(evidence: Evidence) -> Verdict:
  """Appendix G: what layers contribute to a shared generator's gradient, by 95% over seeds."""
  row = evidence.rows("analysis", attention="damcha", metric="grad_alignment")[-1]
  norms = evidence.rows("analysis", attention="damcha", metric="grad_norm_own_generator",
                        dataset=row["dataset"])
  num_layers = len({one["variant"] for one in norms
                    if one["variant"].startswith(f"{row['variant']}, layer")})
  orthogonal = num_layers**-0.5
  status = REPRODUCED if row["value"] > orthogonal else NOT_REPRODUCED
  num_seeds = len(row["seeds"])
  if row["spread"] is not None and abs(row["value"] - orthogonal) < (
      student_quantile(num_seeds - 1, 0.95) * row["spread"] / num_seeds**0.5):
    status = UNDECIDED
  return Verdict(
      status, f"The layers' gradients add up to {with_spread(row)} of the sum of their lengths at "
      f"{row['variant']} on {row['dataset']}: 1 where all point one way, {number(orthogonal)} "
      f"where {num_layers} of equal length are orthogonal.")
