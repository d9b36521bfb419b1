"""What the study says of the paper's claims at its own size, which no figure of the paper is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from damcha_jax.evaluation.intervals import student_quantile
from damcha_jax.reporting import Row
from experiments.claims import (Absent, Evidence, NOT_REPRODUCED, REPRODUCED, UNDECIDED, Verdict,
                                holds_only_under, number, with_spread)

TEXTS = ("text", "text8", "mix")  # a corpus, the same cleaned, both mixed; the next likewise
DICTIONARY = ("dictionary", "dictionary_text8", "dictionary_mix")
SETS = (*TEXTS, "mix_decontaminated", "images", "pairs", "concepts")
SHIFT = "text to text8"
PRESETS = ("damcha", "damcha_robust")
BASELINES = ("mha", "dcmha")
Say = Callable[[Evidence], str]  # nothing, or Absent, where there is nothing to say


class Difference(NamedTuple):
  """A variant's test loss less another's; below 0 the variant is the better one."""

  set: str
  row: Row
  half: Optional[float]  # of the 95% interval over seeds; None for one seed

  @property
  def low(self) -> float:
    return self.row["value"] - self.half

  @property
  def high(self) -> float:
    return self.row["value"] + self.half

  def __str__(self) -> str:
    value = number(self.row["value"])
    if self.half is None:
      return f"{self.set} {value} (one seed)"
    verdict = "lower" if self.high < 0 else "higher" if self.low > 0 else "undecided"
    return f"{self.set} {value} ± {self.half:.2g} ({verdict})"


def with_study(decide: Callable[[Evidence], Verdict], *say: Say) -> Callable[[Evidence], Verdict]:
  """Adds what the study saw, which leaves a verdict as it is and is told where there is none."""

  def judge(evidence: Evidence) -> Verdict:
    aside = evidence.aside()
    lines = list(filter(None, (said(one, aside) for one in say)))
    text = f"At the study's size ({aside.sizes}): {' '.join(lines)}" if lines else ""
    try:
      verdict = decide(evidence)
    except Absent:
      if not text:
        raise
      return Verdict(UNDECIDED, text, aside.sizes)
    return verdict._replace(evidence=f"{verdict.evidence} {text}".strip())

  return judge


def said(say: Say, evidence: Evidence) -> str:
  """Nothing where there is nothing to say."""
  try:
    return say(evidence)
  except Absent:
    return ""


def losses(variants: Sequence[str], baselines: Sequence[str],
           names: Sequence[str] = SETS) -> Say:
  """Differences on every set that has them, with their intervals."""

  def say(evidence: Evidence) -> str:
    parts = []
    for variant in variants:
      for baseline in baselines:
        found = [str(one) for name in names
                 for one in _differences(evidence, variant, baseline, name)]
        if found:
          parts.append(f"`{variant}` less `{baseline}`: {', '.join(found)}")
    return f"Test loss in nats per token, {'; '.join(parts)}." if parts else ""

  return say


def _differences(evidence: Evidence, variant: str, baseline: str, name: str) -> list[Difference]:
  """The one there is, or none."""
  try:
    return [_difference(evidence, variant, baseline, name)]
  except Absent:
    return []


def _difference(evidence: Evidence, variant: str, baseline: str, name: str) -> Difference:
  fields = dict(attention=variant, dataset=name, split="test", variant=None)
  metric = f"nats_minus_{baseline}"
  row = evidence.rows("study", metric=metric, **fields)[0]
  try:
    return Difference(name, row, evidence.value("study", metric=f"{metric}_ci95", **fields))
  except Absent:
    return Difference(name, row, None)


def on_mixture(names: Sequence[str] = TEXTS) -> Say:
  """Whether the relative gain is largest on the mixture, the last name (Sections 1 and 5.4)."""

  def say(evidence: Evidence) -> str:
    lines = []
    for baseline in BASELINES:
      gains, halves = {}, {}
      for name in names:
        for one in _differences(evidence, "damcha", baseline, name):
          loss = evidence.value("study", metric="nats_per_token", attention=baseline, dataset=name,
                                split="test", variant=None)
          if loss:
            gains[name] = -100 * one.row["value"] / loss
            halves[name] = None if one.half is None else 100 * one.half / loss
      if len(gains) == len(names):
        lines.append(f"over `{baseline}` " + ", ".join(
            f"{name} {gain:.2f}%" for name, gain in gains.items())
                     + f" ({_largest(names[-1], gains, halves)})")
    return f"DAMCHA's gain {'; '.join(lines)}." if lines else ""

  return say


def _largest(mixture: str, gains: dict[str, float], halves: dict[str, Optional[float]]) -> str:
  """Whether the mixture has the largest gain, as far as intervals tell."""
  rivals = [name for name in gains if name != mixture]
  if None in halves.values():
    return "undecided, since some are of a single seed"
  low, high = gains[mixture] - halves[mixture], gains[mixture] + halves[mixture]
  if all(low > gains[name] + halves[name] for name in rivals):
    return f"largest on {mixture}"
  if any(high < gains[name] - halves[name] for name in rivals):
    return f"not largest on {mixture}"
  return "undecided"


def shifted(evidence: Evidence) -> Verdict:
  """Section 1: trained on enwik8 and tested on text8, or the study's texts in their place."""
  try:
    return _shifted_files(evidence)
  except Absent:
    return _shifted_here(evidence)


def _shifted_files(evidence: Evidence) -> Verdict:
  """DAMCHA's lead on a file that begins with enwik8 and ends with text8, and on enwik8."""
  leads = {}
  for name in ("shift.txt", "enwik8"):
    losses_of = {attention: evidence.value(
        "gpt2_enwik8", dataset=name, split="test", metric="nats_per_token", variant=None,
        attention=attention) for attention in ("mha", "damcha")}
    leads[name] = losses_of["mha"] - losses_of["damcha"]
  return Verdict(REPRODUCED if leads["shift.txt"] > max(0.0, leads["enwik8"]) else NOT_REPRODUCED,
                 f"DAMCHA's lead over multi-head attention, in nats per character: "
                 f"{number(leads['shift.txt'])} on text8 after training on enwik8, "
                 f"{number(leads['enwik8'])} on enwik8.")


def _shifted_here(evidence: Evidence) -> Verdict:
  """The same with intervals over seeds, on the study's texts."""
  shift, plain = (_difference(evidence, "damcha", "mha", name) for name in (SHIFT, "text"))
  text = f"DAMCHA's test loss less multi-head attention's, in nats per token: {shift}; {plain}."
  if None in (shift.half, plain.half):
    return Verdict(UNDECIDED, text)
  if shift.high < min(0.0, plain.low):
    return Verdict(REPRODUCED, text)
  return Verdict(NOT_REPRODUCED if shift.low > min(0.0, plain.high) else UNDECIDED, text)


def blocks(evidence: Evidence) -> str:
  """What training without blocks between heads costs (Sections 3.1 and 5.3)."""
  text = losses(("damcha_blocks", "damcha_diagonal"), ("damcha",), ("mix",))(evidence)
  both = [one for name in ("damcha_diagonal", "damcha_blocks")
          for one in _differences(evidence, name, "damcha", "mix")]
  if len(both) < 2:
    return text
  gap = number(both[0].row["value"] - both[1].row["value"])
  return f"{text} Diagonal blocks alone, in training as well, less all blocks: {gap}."


def less_overfitting(evidence: Evidence) -> Verdict:
  """3.4: validation less training loss, with a generator per layer and with one for all."""
  return _unshared(evidence, "generalization_gap", "Validation less training loss, in nats",
                   _interval)


def fewer_parameters(evidence: Evidence) -> Verdict:
  """3.4: counts, which have no spread."""
  return _unshared(evidence, "num_params", "Parameters", lambda unshared, shared: 0.0)


def _interval(one: Row, other: Row) -> Optional[float]:
  """Half the 95% interval of a difference of means over seeds of one variance; None: no spread."""
  rows = [row for row in (one, other) if row["spread"] is not None and len(row["seeds"]) > 1]
  degrees = sum(len(row["seeds"]) - 1 for row in rows)
  if not degrees or not (one["seeds"] and other["seeds"]):
    return None
  variance = sum((len(row["seeds"]) - 1) * row["spread"] * row["spread"] for row in rows) / degrees
  return student_quantile(degrees, 0.95) * (
      variance * (1 / len(one["seeds"]) + 1 / len(other["seeds"])))**0.5


def _unshared(evidence: Evidence, metric: str, what: str,
              half: Callable[[Row, Row], Optional[float]]) -> Verdict:
  """Whether a metric is larger with a generator per layer, beyond `half` of an interval."""
  shared, unshared = ({row["dataset"]: row for row in evidence.rows(
      "study", metric=metric, attention=name)} for name in ("damcha", "damcha_unshared"))
  held, open_, lines = [], [], []
  for name in (both := [name for name in unshared if name in shared]):
    more, less = unshared[name], shared[name]
    width = half(more, less)
    difference = more["value"] - less["value"]
    if width is None or abs(difference) < width:
      open_.append(name)
    elif difference > width:
      held.append(f"`{name}`")
    interval = "" if not width else f", a difference of {number(difference)} ± {width:.2g}"
    lines.append(f"{name} {with_spread(more)} with a generator for each layer, "
                 f"{with_spread(less)} with one{interval}")
  if not both:
    raise Absent
  text = f"{what}: {'; '.join(lines)}."
  if len(held) == len(both):
    return Verdict(REPRODUCED, text)
  if held:
    return Verdict(holds_only_under(", ".join(held)), text)
  return Verdict(UNDECIDED if open_ else NOT_REPRODUCED, text)
