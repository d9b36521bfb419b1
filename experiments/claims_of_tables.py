"""Claims about the paper's tables: whether the tables bear them out, and whether runs do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import math
import re

from damcha_jax.reporting import Row
from experiments.claims import (Absent, Evidence, INCONSISTENT, NEEDS_HARDWARE, NOT_REPRODUCED,
                                REPRODUCED, Verdict, holds_only_under, measured_at, number, some,
                                with_spread)
from experiments.paper_tables import CIFAR as IMAGES, Path, in_layers, readable

TEXTS = ("WMT", "CommonGen")
SETS = (*IMAGES, *TEXTS)
RIVALS = ("MHA", "THA", "DCMHA", "ColMHA", "MMA", "MoA")
IMAGE_METRICS = ("mse_mean", "mse_q25", "mse_q75", "fid_mean", "fid_q25", "fid_q75", "fid_top50")
TEXT_METRICS = ("nll_mean", "nll_q25", "nll_q75", "bartscore_mean", "bartscore_q25",
                "bartscore_q75", "bartscore_top50")
# Mean and Top-50 of each data set, as the text compares them.
QUALITY = {**dict.fromkeys(IMAGES, ("fid_mean", "fid_top50")),
           **dict.fromkeys(TEXTS, ("bartscore_mean", "bartscore_top50"))}
TABLE5_SETS = ("Enwik8", "Text8", "Mix")
DEPTHS = ("1", "3", "5", "7", "9")
Pair = tuple[Path, Path]  # the second is said to be worse



def table1(dataset: str, rivals: Sequence[str] = RIVALS,
           metrics: Sequence[str] = ()) -> list[Pair]:
  """DAMCHA against others."""
  metrics = metrics or (IMAGE_METRICS if dataset in IMAGES else TEXT_METRICS)
  return [(("table1", dataset, "DAMCHA", metric), ("table1", dataset, rival, metric))
          for metric in metrics for rival in rivals]


def table2(metric: str, datasets: Sequence[str], rivals: Sequence[str]) -> list[Pair]:
  return [(("table2", dataset, "DAMCHA", metric), ("table2", dataset, rival, metric))
          for dataset in datasets for rival in rivals]


def table5(datasets: Sequence[str] = TABLE5_SETS,
           rivals: Sequence[str] = ("MHA", "DCMHA")) -> list[Pair]:
  return [(("table5", dataset, metric, "DAMCHA"), ("table5", dataset, metric, rival))
          for dataset in datasets for metric in ("cross_entropy", "perplexity")
          for rival in rivals]


def table6(rivals: Sequence[str] = ("MHA", "DCMHA")) -> list[Pair]:
  return [(("table6", "DAMCHA", f"{top}_epoch{epoch}"), ("table6", rival, f"{top}_epoch{epoch}"))
          for top in ("top1", "top5") for epoch in (100, 500) for rival in rivals]


def table3(better: str, worse: str, column: str) -> list[Pair]:
  return [(("table3", better, dataset, column, depth), ("table3", worse, dataset, column, depth))
          for dataset in SETS for depth in DEPTHS]


def higher_is_better(path: Path) -> bool:
  if path[0] in ("table3", "table4"):
    return bool(set(TEXTS) & set(path))
  return any(part.startswith(("bartscore", "top1_", "top5_")) for part in path)


def is_better(path: Path, value: float, other: float) -> bool:
  return value > other if higher_is_better(path) else value < other


def gain(evidence: Evidence, better: Path, worse: Path) -> float:
  """By how many percent of `worse` the first figure is better."""
  sign = 1 if higher_is_better(better) else -1
  reference = evidence.figure(worse)
  return sign * 100 * (evidence.figure(better) - reference) / abs(reference)


def label(path: Path) -> str:
  return " ".join(in_layers(part) if part in DEPTHS else readable(part) for part in path[1:])


def exceptions(evidence: Evidence, pairs: Iterable[Pair]) -> list[str]:
  """The pairs that are the other way round, or equal, in the paper's own table."""
  return [f"{label(path)} {evidence.figure(path)}, {label(rival)} {evidence.figure(rival)}"
          for path, rival in pairs
          if not is_better(path, evidence.figure(path), evidence.figure(rival))]


def better(pairs: Sequence[Pair]) -> Callable[[Evidence], Verdict]:
  """Decided by the paper's own tables if they contradict it, else by runs of the paper's size."""

  def decide(evidence: Evidence) -> Verdict:
    other_way = exceptions(evidence, pairs)
    if other_way:
      return Verdict(INCONSISTENT, f"In the paper's own tables {len(other_way)} of {len(pairs)} "
                     f"comparisons are the other way: {some(other_way)}.")
    return at_paper_size(evidence, pairs)

  return decide


def _milestone(row: Row) -> str:
  """The epoch that stands in for one of Table 6's, if any does."""
  epoch = re.fullmatch(r"epoch(\d+)", row["variant"] or "")
  return f"here epoch {epoch[1]}, " if epoch else ""


def at_paper_size(evidence: Evidence, pairs: Sequence[Pair]) -> Verdict:
  """What comparable rows say, and smaller runs beside it."""
  won, lost, smaller = [], [], []
  for path, rival in pairs:
    for result, row, other in evidence.both(path, rival):
      line = f"{label(path)} {with_spread(row)}, {label(rival)} {with_spread(other)}"
      if not (row["comparable"] and other["comparable"]):
        smaller.append(f"{line} ({_milestone(row)}{measured_at(result, [row, other])})")
      elif is_better(path, row["value"], other["value"]):
        won.append((path, rival, line))
      else:
        lost.append((path, rival, line))
  if lost:
    return Verdict(NOT_REPRODUCED, f"At the paper's size {len(lost)} of {len(lost) + len(won)} "
                   f"comparisons are the other way: {some([line for *_, line in lost])}.", "")
  if {one[:2] for one in won} == set(pairs):
    return Verdict(REPRODUCED, f"At the paper's size all {len(pairs)} comparisons are as claimed: "
                   f"{some([line for *_, line in won])}.", "")
  text = (f"The paper's tables bear it out in all {len(pairs)} comparisons. At its size "
          f"{len({one[:2] for one in won})} of them have been run.")
  return Verdict(NEEDS_HARDWARE, text + (
      f" Smaller runs, which cannot decide it: {some(smaller)}." if smaller else ""))


def order_here(pairs: Sequence[Pair], caveat: str) -> Callable[[Evidence], Verdict]:
  """Decided by the order that is measured here, whatever the device."""

  def decide(evidence: Evidence) -> Verdict:
    other_way = exceptions(evidence, pairs)
    if other_way:
      return Verdict(INCONSISTENT, f"In the paper's own table {len(other_way)} of {len(pairs)} "
                     f"comparisons are the other way: {some(other_way)}.")
    held, failed = [], []
    for path, rival in pairs:
      for _, row, other in list(evidence.both(path, rival))[:1]:
        line = (f"{label(path)} {with_spread(row)}, {label(rival)} {with_spread(other)} "
                f"{row['unit']}")
        (held if is_better(path, row["value"], other["value"]) else failed).append((path, line))
    if len(held) + len(failed) < len(pairs):
      raise Absent
    text = f"Here {len(held)} of {len(pairs)} comparisons are as claimed. "
    if failed:
      text += f"Not so: {some([line for _, line in failed])}. "
    status = REPRODUCED if not failed else NOT_REPRODUCED
    kept = {path[1] for path, _ in held} - {path[1] for path, _ in failed}
    if failed and kept:
      status = holds_only_under(f"the lengths of {' and '.join(sorted(kept))}")
    return Verdict(status, text + caveat)

  return decide


class Percent(tuple):
  """A percentage that the paper prints, and the two figures that it is of."""

  def __new__(cls, claimed: float, better_path: Path, worse_path: Path, of_better: bool = False):
    return super().__new__(cls, (claimed, better_path, worse_path, of_better))


def percentages(*printed: Percent, then: Sequence[Pair],
                exact: bool = False) -> Callable[[Evidence], Verdict]:
  """Whether they are those of the figures; if so, runs decide whether pairs `then` are in order.

  Figures are rounded, which is allowed for, unless percentages are to be `exact` those of them.
  """

  def decide(evidence: Evidence) -> Verdict:
    wrong = []
    for claimed, path, rival, of_better in printed:
      actual = _percent(evidence, path, rival, of_better)
      first, second = evidence.figure(path), evidence.figure(rival)
      slack = 0.0 if exact else 100 * _half(first, second) * (abs(first) + abs(second)) / second**2
      if abs(actual - claimed) > 1.02 * _half(claimed) + slack:
        wrong.append(f"{label(path)} {evidence.figure(path)} against {label(rival)} "
                     f"{evidence.figure(rival)} is {actual:.2f}%, not {claimed:g}%")
    if wrong:
      return Verdict(INCONSISTENT, f"{len(wrong)} of {len(printed)} percentages are not those of "
                     f"the figures: {some(wrong, 6)}.")
    verdict = at_paper_size(evidence, then)
    return verdict._replace(evidence=f"All {len(printed)} percentages are those of the figures. "
                            + verdict.evidence)

  return decide


def _half(*printed: float) -> float:
  """Half a unit of the last decimal of numbers that are printed to the same."""
  return 0.5 * 10.0**-max(len(str(one).partition(".")[2]) for one in printed)


def _percent(evidence: Evidence, path: Path, rival: Path, of_better: bool) -> float:
  difference = abs(evidence.figure(path) - evidence.figure(rival))
  return 100 * difference / abs(evidence.figure(path if of_better else rival))


def mix_percentages(evidence: Evidence) -> Verdict:
  """5.19% against what the printed losses allow."""
  path, mha = (("table5", "Mix", "cross_entropy", method) for method in ("DAMCHA", "MHA"))
  verdict = percentages(Percent(5.19, path, mha),
                        Percent(3.70, path, (*path[:3], "DCMHA")), then=table5(("Mix",)),
                        exact=True)(evidence)
  if verdict.status != INCONSISTENT:
    return verdict
  ours, theirs = evidence.figure(path), evidence.figure(mha)
  half = _half(ours, theirs)
  low, high = (100 * (1 - (ours + sign * half) / (theirs - sign * half)) for sign in (1, -1))
  return verdict._replace(evidence=verdict.evidence + f" Losses that round to the printed ones "
                          f"allow {low:.1f}% to {high:.1f}%, but the table's other percentages are "
                          "those of the printed losses.")


def largest_on_mix(evidence: Evidence) -> Verdict:
  gains = {(dataset, rival): gain(evidence, ("table5", dataset, "cross_entropy", "DAMCHA"),
                                  ("table5", dataset, "cross_entropy", rival))
           for dataset in TABLE5_SETS for rival in ("MHA", "DCMHA")}
  text = "; ".join(f"{dataset} {value:.2f}% over {rival}"
                   for (dataset, rival), value in gains.items())
  if not all(gains["Mix", rival] == max(gains[dataset, rival] for dataset in TABLE5_SETS)
             for rival in ("MHA", "DCMHA")):
    return Verdict(INCONSISTENT, f"Gains in the paper's table: {text}.")
  return Verdict(NEEDS_HARDWARE, f"Gains in the paper's table: {text}. Differences at these losses "
                 "take runs of its size.")


def perplexities(evidence: Evidence) -> Verdict:
  """Table 5's losses are nats per character if perplexities are their exponentials."""
  off, pairs = [], 0
  for dataset in TABLE5_SETS:
    for method in ("MHA", "DCMHA", "DAMCHA"):
      loss = evidence.figure(("table5", dataset, "cross_entropy", method))
      printed = evidence.figure(("table5", dataset, "perplexity", method))
      pairs += 1
      if not (math.exp(loss - 0.005) <= printed + 0.005
              and printed - 0.005 <= math.exp(loss + 0.005)):
        off.append(f"{dataset} {method}: exp({loss:g}) = {math.exp(loss):.3f}, not {printed:g}")
  if off:
    return Verdict(INCONSISTENT, f"{len(off)} of {pairs} are not: {some(off)}.")
  return Verdict(REPRODUCED, f"All {pairs} perplexities are exponentials of losses that round to "
                 "the printed ones, so losses are in nats per character.")


def margins(evidence: Evidence) -> Verdict:
  """Gains over MHA on Top-50 and on average."""
  lines, kept = [], 0
  for dataset, (mean, top) in QUALITY.items():
    on_mean, on_top = (gain(evidence, ("table1", dataset, "DAMCHA", metric),
                            ("table1", dataset, "MHA", metric)) for metric in (mean, top))
    kept += on_top > on_mean
    lines.append(f"{dataset} {on_top:.1f}% on Top-50, {on_mean:.1f}% on average")
  status = NEEDS_HARDWARE if kept == len(QUALITY) else INCONSISTENT
  return Verdict(status, f"In Table 1 it is so on {kept} of {len(QUALITY)} data sets: "
                 f"{'; '.join(lines)}.")


def ablation_margins(evidence: Evidence) -> Verdict:
  """Degradations without f(x), on Top-50 and on average."""
  lines, kept = [], 0
  for dataset in SETS:
    on_mean, on_top = (-_degradation(evidence, dataset, "w/o $f(x)$+share", column)
                       for column in ("mean", "top50"))
    kept += on_top > on_mean
    lines.append(f"{dataset} {on_top:.1f}% on Top-50, {on_mean:.1f}% on average")
  status = NEEDS_HARDWARE if kept == len(SETS) else INCONSISTENT
  return Verdict(status, f"In Table 4 it is so on {kept} of {len(SETS)} data sets: "
                 f"{'; '.join(lines)}.")


def _degradation(evidence: Evidence, dataset: str, variant: str, column: str) -> float:
  return gain(evidence, ("table4", dataset, variant, column),
              ("table4", dataset, "DAMCHA", column))


def narrower(evidence: Evidence) -> Verdict:
  """Figures 3 and 4 through the quartiles of Table 1."""
  shifts = exceptions(evidence, [pair for dataset in SETS for pair in table1(
      dataset, ("MHA",), [metric for metric in (*IMAGE_METRICS, *TEXT_METRICS)
                          if metric.startswith(("mse", "fid") if dataset in IMAGES
                                               else ("nll", "bartscore"))])])
  widths = []
  for dataset, metrics in {**dict.fromkeys(IMAGES, ("mse", "fid")),
                           **dict.fromkeys(TEXTS, ("nll", "bartscore"))}.items():
    for metric in metrics:
      ours, theirs = (evidence.figure(("table1", dataset, method, f"{metric}_q75"))
                      - evidence.figure(("table1", dataset, method, f"{metric}_q25"))
                      for method in ("DAMCHA", "MHA"))
      widths.append((ours >= theirs, f"{dataset} {metric} {number(ours)}, MHA's {number(theirs)}"))
  wider = [line for is_wider, line in widths if is_wider]
  if shifts or wider:
    return Verdict(INCONSISTENT, f"Means, quartiles and Top-50 of Table 1 that are no better "
                   f"than MHA's: {some(shifts) or 'none'}. Interquartile ranges that are no "
                   f"narrower, of {len(widths)}: {some(wider) or 'none'}.")
  return Verdict(NEEDS_HARDWARE, "Means, quartiles and interquartile ranges of Table 1 bear it "
                 f"out: {some([line for _, line in widths])}.")


def best_baseline(evidence: Evidence) -> Verdict:
  """In how many columns of Table 1 DCMHA is the best of the baselines."""
  columns = [(dataset, metric) for dataset in SETS
             for metric in ("mse_mean" if dataset in IMAGES else "nll_mean", *QUALITY[dataset])]
  best = {}
  for dataset, metric in columns:
    sign = 1 if higher_is_better(("table1", dataset, metric)) else -1
    best[dataset, metric] = max(
        RIVALS, key=lambda rival: sign * evidence.figure(("table1", dataset, rival, metric)))
  won = sum(method == "DCMHA" for method in best.values())
  names = {method: list(best.values()).count(method) for method in dict.fromkeys(best.values())}
  text = (f"Of the {len(columns)} means and Top-50 of Table 1, DCMHA is the best baseline in {won}."
          " Best are: " + ", ".join(f"{method} {count}" for method, count in names.items()) + ".")
  return Verdict(REPRODUCED if won > len(columns) / 2 else INCONSISTENT, text)


def one_model(evidence: Evidence) -> Verdict:
  """DAMCHA as described stands in Tables 1, 3 (9 layers) and 4."""
  lines, differ = [], 0
  for dataset, names in QUALITY.items():
    for column, metric in zip(("mean", "top50"), names):
      figures = [evidence.figure(path) for path in (
          ("table1", dataset, "DAMCHA", metric), ("table3", "DAMCHA", dataset, column, "9"),
          ("table4", dataset, "DAMCHA", column))]
      differ += len(set(figures)) > 1
      lines.append(f"{dataset} {readable(metric)} "
                   + ", ".join(f"{figure:g}" for figure in figures))
  return Verdict(INCONSISTENT if differ else REPRODUCED,
                 f"Tables 1, 3 and 4 give different figures in {differ} of {len(lines)} cases: "
                 f"{some(lines, 8)}.")


def deeper(evidence: Evidence) -> Verdict:
  """Each step to a deeper generator in Table 3."""
  pairs = [(("table3", "DAMCHA", dataset, column, deep),
            ("table3", "DAMCHA", dataset, column, flat))
           for dataset in SETS for column in ("top50", "mean")
           for flat, deep in zip(DEPTHS, DEPTHS[1:])]
  return better(pairs)(evidence)


def same_memory(evidence: Evidence) -> Verdict:
  """CIFAR-10 and CIFAR-100 have sequences of one length."""
  memory = {method: [evidence.figure(("table2", dataset, method, "memory")) for dataset in IMAGES]
            for method in (*RIVALS[1:], "DAMCHA")}
  differing = [f"{method} {first:g} and {second:g}"
               for method, (first, second) in memory.items() if first != second]
  same = [method for method, (first, second) in memory.items() if first == second]
  if not differing:
    return Verdict(REPRODUCED, f"Equal for {', '.join(same)}.")
  return Verdict(INCONSISTENT, f"Equal for {', '.join(same)}, but {', '.join(differing)}, at equal "
                 "GFLOPs: one of the two is not of the same model.")


def narrowing(evidence: Evidence) -> Verdict:
  """DAMCHA's lead over DCMHA in Table 6 at both epochs."""
  leads = {(top, epoch): evidence.figure(("table6", "DAMCHA", f"{top}_epoch{epoch}"))
           - evidence.figure(("table6", "DCMHA", f"{top}_epoch{epoch}"))
           for top in ("top1", "top5") for epoch in (100, 500)}
  text = "; ".join(f"{top} {leads[top, 100]:.2f} points at epoch 100, {leads[top, 500]:.2f} at 500"
                   for top in ("top1", "top5"))
  held = all(leads[top, 500] < leads[top, 100] for top in ("top1", "top5"))
  return Verdict(NEEDS_HARDWARE if held else INCONSISTENT, f"DAMCHA's lead in Table 6: {text}.")


def gflops_equal(evidence: Evidence) -> Verdict:
  equal, off = 0, []
  for dataset in SETS:
    for method in (*RIVALS[1:], "DAMCHA"):
      path = ("table2", dataset, method, "gflops")
      found = [row for _, row, _ in evidence.both(path, path) if row["comparable"]]
      if not found:
        raise Absent
      if round(found[0]["value"], 4) == evidence.figure(path):
        equal += 1
      else:
        off.append(f"{label(path)} {found[0]['value']:.4f}, not {evidence.figure(path):g}")
  text = f"{equal} of {equal + len(off)} cells are equal to all four decimals printed"
  return Verdict(NOT_REPRODUCED if off else REPRODUCED,
                 text + (f"; not {some(off)}." if off else "."))


def of_section_5_1(evidence: Evidence) -> Verdict:
  """Table 2 beside the model that Section 5.1 describes."""
  names = dict(zip(("cifar10", "cifar100", "common_gen", "wmt14"),
                   ("CIFAR-10", "CIFAR-100", "CommonGen", "WMT")))
  rows = evidence.rows("efficiency", "table2", metric="gflops", attention="damcha",
                       variant="section_5_1")
  ratios = {names[row["dataset"]]: (row["value"],
                                    evidence.figure(("table2", names[row["dataset"]], "DAMCHA",
                                                     "gflops"))) for row in rows}
  text = "; ".join(f"{name} {number(ours)}, Table 2 {paper:g}"
                   for name, (ours, paper) in ratios.items())
  same = all(abs(ours / paper - 1) < 0.05 for ours, paper in ratios.values())
  return Verdict(REPRODUCED if same else NOT_REPRODUCED, "GFLOP of DAMCHA's layers in the model of "
                 f"Section 5.1: {text}. The smallest ratio is "
                 f"{number(min(ours / paper for ours, paper in ratios.values()))}.")
