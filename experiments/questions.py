"""The study's questions: each with an answer computed from its rows, a table and a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple, Optional

from damcha_jax import reporting
from damcha_jax.config.study import SETS, VARIANTS
from damcha_jax.evaluation.intervals import student_quantile
from damcha_jax.reporting import Row
from experiments import claims_of_study as study
from experiments.claims import Evidence, number, with_spread
from experiments.document import Block, Figure, Heading, Paragraph, Table
from experiments.results import by_size, FIGURES, Result, SMOKE

LOSS, MINUS, TUNING = "nats_per_token", "nats_minus_", "tuning_nats_per_token"
PARAMS, ABSENT = "num_params", "–"
PREFIX = "question-"  # of figures
_SETS = ("mix", "images", "pairs", "concepts")
_ABOUT = {  # what not every reader knows of a set
    "mix_decontaminated": "`mix_decontaminated` lacks passages of the validation and test parts that "
                          "training has word for word in its other half.",
    "dictionary": "`dictionary` and sets whose names begin so are another corpus, 3.6 times as "
                  "large, prepared in the same way.",
    "more_pairs": "`more_pairs` are `pairs` with 18,500 more to train on, from a dictionary."}
_PARTS = {
    "damcha_static": "without a generator: one learned metric for all inputs",
    "damcha_unshared": "without sharing: a generator for each layer",
    "damcha_stack": "with one metric for all layers",
    "damcha_diagonal": "without the sum over heads: trained with diagonal blocks alone",
    "damcha_initializer": "with initial values that keep the variance",
    "damcha_residual": "with a residual generator",
    "damcha_normalized": "with a normalized context",
    "damcha_robust": "with all three of these (`robust`)",
    "damcha_prefix": "with a metric for each token (stride 1)"}
_INFERENCE = {"": "all blocks", "-off_diagonal": "all but the diagonal ones",
              "-diagonal": "the diagonal ones alone", "-shifted": "one other of each row alone"}


class Comparison(NamedTuple):
  """A variant's test loss less a baseline's."""

  name: str
  set: str
  variant: str
  baseline: str


class Question(NamedTuple):
  """What is asked.

  Attributes:
    key: of its figure, `figures/question-<key>.svg`.
    text: the question.
    comparisons: what answers it.
    reading: what they can tell and what not.
    also: what other rows add.
  """

  key: str
  text: str
  comparisons: tuple[Comparison, ...]
  reading: str = ""
  also: tuple[study.Say, ...] = ()


class Difference(NamedTuple):
  """How a comparison came out; below 0 the variant is the better one.

  Attributes:
    comparison: which.
    losses: the rows of the variant and of the baseline.
    value: the mean difference.
    half: of its 95% interval; None where nothing tells how much seeds differ.
    seeds: the number of pairs.
    params: how many more parameters the variant has, as a fraction; None where that is not known.
  """

  comparison: Comparison
  losses: tuple[Row, Row]
  value: float
  half: Optional[float]
  seeds: int
  params: Optional[float]

  @property
  def verdict(self) -> str:
    if self.half is None:
      return "no interval"
    return ("lower" if self.value < -self.half else "higher" if self.value > self.half
            else "undecided")

  def __str__(self) -> str:
    half = "" if self.half is None else f" ± {self.half:.2g}"
    return f"{self.comparison.name} {self.value:+.3g}{half}"


def _each(variants: Mapping[str, str], baseline: str) -> tuple[Comparison, ...]:
  """Variants on the mix, by how they read."""
  return tuple(Comparison(name, "mix", variant, baseline) for variant, name in variants.items())


def _over_sets(names: Sequence[str], variants: Sequence[str], baselines: Sequence[str],
               ) -> tuple[Comparison, ...]:
  return tuple(Comparison(f"`{variant}` less `{baseline}` on {name}", name, variant, baseline)
               for name in names for variant in variants for baseline in baselines)


def of_future(evidence: Evidence) -> str:
  """The paper's margins over multi-head attention, beside which a leak can be seen."""
  margins = []
  for name, cells in evidence.paper["table5"].items():
    losses = cells["cross_entropy"]
    margins.append(f"{losses['DAMCHA'] - losses['MHA']:+.2f} on {name} "
                   f"({100 * (losses['DAMCHA'] / losses['MHA'] - 1):+.1f}%)")
  return (f"The paper's margins of DAMCHA over multi-head attention (Table 5), in its unit: "
          f"{', '.join(margins)}.")


def of_blocks(evidence: Evidence) -> str:
  """How far training moves the blocks of a row together, and apart."""
  moved, apart, start = (evidence.rows("analysis", metric=metric, attention="damcha")[-1]["value"]
                         for metric in ("block_drift", "block_spread", "block_difference"))
  return (f"Where all blocks are stored, training moved them by {number(moved)} (root mean square), "
          f"and those of one row apart by {number(apart)}, which began {number(start)} apart: "
          "gradients move the blocks of a row alike, and weight decay takes from each what it began "
          "with.")


def of_adaptivity(evidence: Evidence) -> str:
  """How much of the full-width metric depends on its context in the end."""
  rows = evidence.rows("study", metric="adaptivity", attention="damcha_full_width")
  found = ", ".join(f"{row['dataset']} {row['value']:.2g}" for row in rows)
  return (f"Its adaptivity after training (0: the metric ignores its context, 1: it is all context) "
          f"is {found}: near 0 it is MHA with parameters to spare.")


def of_ablation(evidence: Evidence) -> str:
  """Losses with blocks left out at inference, beside a control that leaves out as many."""
  rows = {(row["section"], row["variant"]): row for row in evidence.rows(
      "ablations", "table3", metric=LOSS, split="test", attention="damcha")}
  trained = [(section, variant) for section, variant in rows
             if all((section, f"{variant}{suffix}") in rows for suffix in _INFERENCE)]
  lines = [f"{section}, {variant}: " + ", ".join(
      f"{with_spread(rows[section, variant + suffix])} with {what}"
      for suffix, what in _INFERENCE.items()) for section, variant in trained]
  return f"Blocks left out at inference, test loss: {'; '.join(lines)}." if lines else ""


QUESTIONS = (
    Question("baselines", "Does DAMCHA beat MHA and DCMHA at matched parameters?",
             _over_sets((*_SETS, "more_pairs"), ("damcha",), study.BASELINES)),
    Question("mixture", "Does the gain grow on the mixture, as the paper says?",
             _over_sets((*study.TEXTS, "mix_decontaminated", *study.DICTIONARY), ("damcha",),
                        study.BASELINES),
             also=(study.on_mixture(), study.on_mixture(study.DICTIONARY))),
    Question("shift", "Does DAMCHA cope better with a shift of the distribution?",
             _over_sets((study.SHIFT, "text"), ("damcha", "damcha_robust"), ("mha",)),
             "Trained on text and tested on text8-style text."),
    Question("parts", "Which part of the method matters?", _each(_PARTS, "damcha"),
             "Each line changes DAMCHA in what it names, so a higher loss says that what was "
             "changed helps. Diagonal blocks are stored as blocks, beside which `blocks` below "
             "is the like."),
    Question("blocks", "What do `blocks` and `rowsum` differ in after training?",
             (Comparison("`blocks` less `rowsum`", "mix", "damcha_blocks", "damcha"),),
             "Initial values are drawn for other shapes, so the runs begin at other points.",
             (of_blocks,)),
    Question("ablation", "Does leaving out diagonal or other blocks mean anything?",
             (Comparison("trained with diagonal blocks alone, less trained with all", "mix",
                         "damcha_diagonal", "damcha_blocks"),),
             "If diagonal blocks alone do as badly as one other block of each row, it is the "
             "number of blocks that matters, not which.", (of_ablation,)),
    Question("future", "How far does a look into the future lower the loss?",
             (Comparison("DAMCHA with the context of the whole sequence", "mix", "damcha_future",
                         "damcha"),
              Comparison("the authors' MMA with its heads that see the future", "mix",
                         "authors_mma_future", "authors_mma")),
             "These models see what they predict, and their losses are no results.",
             (of_future,)),
    Question("own", "Do variants of our own do better?",
             _over_sets(_SETS, ("damcha_full_width",), ("mha", "damcha")) + _each({
                 "damcha_full_width_robust": "full width with `robust`",
                 "damcha_mixed": "mixed slices",
                 "damcha_mixed_robust": "mixed slices with `robust`",
                 "damcha_decayed": "a context that fades, with `robust`",
                 "damcha_mixed_decayed": "mixed slices and a context that fades, with `robust`",
             }, "damcha"),
             "At full width a head's metric is MHA's, of the whole token and of low rank, and the "
             "context moves it by a generated update of rank 1 (Appendix C.1).", (of_adaptivity,)),
    Question("robust", "Is the `robust` preset better than the paper's?",
             _over_sets(study.SETS, ("damcha_robust",), ("damcha",))),
    Question("flops", "And at matched FLOPs?", _each({
        "damcha_flops": "`damcha`, trained for as many FLOPs as `mha`",
        "damcha_robust_flops": "`damcha_robust`, trained for as many FLOPs as `mha`"}, "mha"),
             "DAMCHA's step takes fewer FLOPs by the paper's count, so it gets more steps."),
    Question("others", "Where are the other attentions?",
             _over_sets((*_SETS, "more_pairs"), ("tha", "colmha", "moa", "mma"), ("mha",))
             + _over_sets(("mix",), ("authors_mma",), ("mha",)),
             "With MHA's learning rate, which was not tuned for them."))


def differences(question: Question, rows: Sequence[Row]) -> list[Difference]:
  """Of every comparison that was run."""
  table = {(row["dataset"], row["attention"], row["metric"]): row for row in rows
           if (row["split"] == "test" or row["metric"] == PARAMS) and row["variant"] is None
           and row["value"] is not None}
  found = (_difference(one, table) for one in question.comparisons)
  return [one for one in found if one is not None]


def _difference(one: Comparison, table: Mapping[tuple[str, str, str], Row],
                ) -> Optional[Difference]:
  losses = tuple(table.get((one.set, name, LOSS)) for name in (one.variant, one.baseline))
  if None in losses:
    return None
  metric = f"{MINUS}{one.baseline}"
  paired = table.get((one.set, one.variant, metric))
  interval = table.get((one.set, one.variant, f"{metric}_ci95"))
  if paired is not None:
    value, seeds = paired["value"], len(paired["seeds"])
  elif losses[0]["seeds"] == losses[1]["seeds"]:
    value, seeds = losses[0]["value"] - losses[1]["value"], len(losses[0]["seeds"])
  else:
    return None
  half = interval["value"] if interval else _half_of_one(one.set, table) if seeds == 1 else None
  counts = [table.get((one.set, name, PARAMS)) for name in (one.variant, one.baseline)]
  params = counts[0]["value"] / counts[1]["value"] - 1 if all(
      count and count["value"] for count in counts) else None
  return Difference(one, losses, value, half, seeds, params)


def _half_of_one(name: str, table: Mapping[tuple[str, str, str], Row]) -> Optional[float]:
  """Half the 95% interval of one pair's difference, if it varies as those of several seeds do.

  t(f) s: s^2 is the mean variance over S seeds of the differences of the set's n pairs P that have
  several, of variants with learning rates of their own; others may fail with some seeds. Pairs with a variant in common vary together, which leaves of their S - 1 degrees of
  freedom f = (S - 1) n^2 / sum_pq (|p & q| / 2)^2, p and q in P; it is (V - 1) (S - 1) where P is
  all pairs of V variants.
  """
  several: dict[frozenset[str], Row] = {}
  for (dataset, variant, metric), row in table.items():
    baseline = metric.removeprefix(MINUS)
    if (dataset == name and row["spread"] is not None and len(row["seeds"]) > 1
        and all(one in VARIANTS and VARIANTS[one].tuned_as is None for one in (variant, baseline))):
      several[frozenset((variant, baseline))] = row
  if not several:
    return None
  num_seeds = min(len(row["seeds"]) for row in several.values())
  overlap = sum((len(one & other) / 2)**2 for one in several for other in several)
  degrees = round((num_seeds - 1) * len(several)**2 / overlap)
  variance = statistics.fmean(row["spread"] * row["spread"] for row in several.values())
  return student_quantile(degrees, 0.95) * math.sqrt(variance)


def plot(figures: Path, rows: Sequence[Row]) -> None:
  """`question-<key>` of every question that rows answer, as PNG and SVG."""
  for question in QUESTIONS:
    found = differences(question, rows)
    if found:
      reporting.plot_differences(
          figures / f"{PREFIX}{question.key}",
          {one.comparison.name.replace("`", ""): (one.value, one.half or 0.0) for one in found},
          question.text.replace("`", ""), "test loss less the baseline's, nats per token")


def blocks(results: Sequence[Result], paper: Mapping[str, Any]) -> list[Block]:
  """The largest study among the results, and others of its size, on other sets."""
  studies = [one for one in by_size(results) if one.experiment == "study"]
  if not studies:
    return [Paragraph("The study was **not run here**. `python -m experiments.study "
                      "--config=configs/study_cpu.py` runs it.")]
  result = studies[0]
  found: list[Block] = [Paragraph(
      f"Answers of `{result.config}`" + (", a few steps, which are no evidence of anything"
                                         if result.size == SMOKE else "") +
      ", at its size and on its data. A difference is a variant's test loss less a baseline's in "
      "nats per token, paired by seed; below 0 the variant is better. Behind its ± is half a 95% "
      "interval: of the mean by Student's t where there are several seeds; of a single seed, "
      "which is exploratory, by the spread over seeds of pairs with learning rates of their own on "
      "the same set. "
      "Behind the ± of a loss is its standard deviation over seeds. Of twenty comparisons without "
      "any difference one is expected beyond its interval. Parameters are the variant's beside its "
      f"baseline's.{_untuned(result)}")]
  of_its_size = [one for one in studies if one.config == result.config]
  for question in QUESTIONS:
    found += _answer(question, of_its_size, Evidence(results, paper))
  return [*found, *_tuning(result)]


def _untuned(result: Result) -> str:
  """A sentence on the sets of experiments of which none was tuned, if there are any."""
  rows = [row for row in result.rows if row["dataset"] in SETS]
  experiments = {SETS[row["dataset"]][0] for row in rows if row["metric"] == TUNING}
  sets = sorted({row["dataset"] for row in rows} - {
      name for name, (experiment, *_) in SETS.items() if experiment in experiments})
  if not sets:
    return ""
  return f" On {', '.join(sets)} learning rates were not tuned, which may favour some attentions."


def _tuning(result: Result) -> Iterator[Block]:
  """Validation losses by factor, and the one that was chosen."""
  lines: dict[tuple[str, str], list[str]] = {}
  for row in result.rows:
    if row["metric"] != TUNING or not row["variant"]:
      continue
    factor = row["variant"].removeprefix("learning rate x ")
    text = f"{factor}: " + ("diverged" if row["value"] is None else number(row["value"]))
    lines.setdefault((row["dataset"], row["attention"]), []).append(
        f"**{text}**" if row.get("note") == "chosen" else text)
  if lines:
    yield Heading(3, "Which learning rates were chosen?")
    yield Paragraph(
        "Each attention of the table was trained on one more seed with several multiples of the "
        "set's own rate; a grid whose end was best went on beyond it. The best holds for its "
        "variants, MHA's also for the full-width ones and for the attentions that are not here, and "
        "for all sets of the same experiment; other sets keep their own. One seed chose: beside a "
        "multiple that fails, the best may fail with others.")
    yield Table("Validation loss in nats per token by multiple, the chosen one in bold.",
                (result.command,), ("Set", "Attention", "Losses"),
                tuple((name, f"`{variant}`", ", ".join(losses))
                      for (name, variant), losses in lines.items()))


def _answer(question: Question, studies: Sequence[Result],
            evidence: Evidence) -> Iterator[Block]:
  by_study = {one.command: differences(question, one.rows) for one in studies}
  found = sorted((one for each in by_study.values() for one in each),
                 key=lambda one: question.comparisons.index(one.comparison))
  commands = [command for command, each in by_study.items() if each]
  yield Heading(3, question.text)
  sets = {one.comparison.set for one in found}
  texts = (_counts(found), _sentence(found),
           *(study.said(say, evidence) for say in question.also), question.reading,
           *(about for name, about in _ABOUT.items() if name in sets))
  yield Paragraph(" ".join(filter(None, texts)))
  if found:
    yield Table("Test losses in nats per token.", tuple(dict.fromkeys(
        (*commands, *evidence.commands))),
                ("Comparison", "Baseline", "Loss", "Baseline's", "Difference", "95%", "Relative",
                 "Seeds", "Parameters", "Verdict"), tuple(map(_line, found)))
  for one in studies:
    path = one.folder / FIGURES / f"{PREFIX}{question.key}.svg"
    if path.is_file():
      yield Figure(path, question.text, "Points are differences, bars 95% intervals where there "
                   "are any.", (one.command,))


def _counts(found: Sequence[Difference]) -> str:
  """How often a variant is the better and the worse one, where it is compared on several sets."""
  by_pair: dict[tuple[str, str], Counter[str]] = {}
  for one in found:
    pair = (one.comparison.variant, one.comparison.baseline)
    by_pair.setdefault(pair, Counter())[one.verdict] += 1
  return " ".join(
      f"**`{variant}` against `{baseline}`: worse on {counts['higher']} of {counts.total()} sets, "
      f"better on {counts['lower']}.**"
      for (variant, baseline), counts in by_pair.items() if counts.total() > 2)


def _sentence(found: Sequence[Difference]) -> str:
  by_verdict: dict[str, list[str]] = {}
  for one in found:
    by_verdict.setdefault(one.verdict, []).append(str(one))
  words = {"lower": "Lower than the baseline's, so better", "higher": "Higher, so worse",
           "undecided": "Undecided", "no interval": "Without an interval, so nothing is decided"}
  return " ".join(f"{text}: {'; '.join(by_verdict[verdict])}." for verdict, text in words.items()
                  if verdict in by_verdict) or "None of it was run here."


def _line(one: Difference) -> tuple[str, ...]:
  loss, baseline = one.losses
  paired = loss["value"] - one.value  # the baseline's, of the seeds that the variant has
  return (one.comparison.name, f"`{one.comparison.baseline}`", with_spread(loss),
          with_spread(baseline) if loss["seeds"] == baseline["seeds"] else number(paired),
          f"{one.value:+.4f}", ABSENT if one.half is None else f"± {one.half:.2g}",
          f"{100 * one.value / paired:+.1f}%" if paired else ABSENT, str(one.seeds),
          ABSENT if one.params is None else f"{100 * one.params:+.1f}%", one.verdict)
