"""Claims of the paper: how one is stated, what decides it, and how the verdict reads.

A claim is data and a function from evidence to a status. Every number of a verdict is read from a
row of the results or recomputed from the paper's tables, and the evidence keeps the commands of
all that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import functools
import re
from typing import Any, NamedTuple, Optional

from damcha_jax.reporting import Row
from experiments import paper_tables
from experiments.document import Block, Code, Heading, Paragraph, Table
from experiments.results import Result, ResultsError, SMOKE, by_size

REPORT = "python -m experiments.report --results=results --out=runs/report"

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
INCONSISTENT = "inconsistent in the paper"
NEEDS_HARDWARE = "needs hardware"
NOT_RUN = "not run here"
UNDECIDED = "undecided"
_ONLY = "holds only under "

CLEAR = 1e-2  # a relative difference that is no rounding
FULL_WIDTH = "full-width metrics (Appendix C.1)"
# What these compute at the sizes that they name has no data, and holds for any.
_OF_NO_DATA = ("theory", "efficiency")
# Values of a config that choose among runs, and change none.
_CHOICES = ("attentions", "seeds", "datasets", "variants", "inference", "sets", "exploratory")


def holds_only_under(condition: str) -> str:
  return _ONLY + condition


class Verdict(NamedTuple):
  """What became of a claim.

  Attributes:
    status: one of the above.
    evidence: why, in sentences.
    sizes: at which it was decided, as `Evidence.sizes`; None: by all that was read.
  """

  status: str
  evidence: str
  sizes: Optional[str] = None


class Absent(Exception):
  """No result holds what a claim is decided by."""


class Evidence:
  """Rows and the paper's figures, and the `commands` that made what was read.

  Runs of a few steps are not among them.
  """

  def __init__(self, results: Sequence[Result], paper: Mapping[str, Any]):
    # What counts more is asked first.
    self._results = [one for one in by_size(results) if one.size != SMOKE]
    self._paper = paper
    self._read: dict[str, tuple[Result, list[Row]]] = {}  # by name, ordered
    self.commands: dict[str, None] = {}  # ordered

  @property
  def names(self) -> list[str]:
    """Of the results whose rows were read."""
    return list(self._read)

  @property
  def paper(self) -> Mapping[str, Any]:
    """The paper's tables, as `results/paper.json` has them."""
    self.commands[REPORT] = None
    return self._paper

  def figure(self, path: paper_tables.Path) -> float:
    return functools.reduce(lambda tree, key: tree[key], path, self.paper)

  def rows(self, experiment: str, config: str = "", **fields: Any) -> list[Row]:
    """The rows with these fields and a value, of the largest run that has any; see `found`."""
    return self.found(experiment, config, **fields)[1]

  def found(self, experiment: str, config: str = "", **fields: Any) -> tuple[Result, list[Row]]:
    """The largest run that has rows with these fields and a value, and them.

    Raises:
      Absent: none has.
    """
    for result in self._results:
      if result.experiment == experiment and result.config.startswith(config):
        found = [row for row in result.rows if row["value"] is not None
                 and all(row.get(key) == value for key, value in fields.items())]
        if found:
          self._note(result, found)
          return result, found
    raise Absent

  def value(self, experiment: str, **fields: Any) -> float:
    """That of the one row with these fields; see `rows`."""
    return self.rows(experiment, **fields)[0]["value"]

  def both(self, path: paper_tables.Path, other: paper_tables.Path,
           ) -> Iterator[tuple[Result, Row, Row]]:
    """Every result that has values for two cells of the paper's tables, and its rows."""
    cells = self._cells
    rivals = {result.name: row for result, row in cells.get(other, ()) if row["value"] is not None}
    for result, row in cells.get(path, ()):
      if row["value"] is not None and result.name in rivals:
        self._note(result, [row, rivals[result.name]])
        yield result, row, rivals[result.name]

  def aside(self) -> Evidence:
    """The same, but what is read of it decides nothing; its commands are kept."""
    aside = copy.copy(self)
    aside._read = {}
    return aside

  def _note(self, result: Result, rows: Sequence[Row]) -> None:
    self.commands[result.command] = None
    self._read.setdefault(result.name, (result, []))[1].extend(rows)

  @property
  def sizes(self) -> str:
    """At which all was measured that was read; nothing where that is the paper's."""
    small = [measured_at(result, rows) for result, rows in self._read.values()
             if not all(row["comparable"] for row in rows)
             and not (result.experiment in _OF_NO_DATA and result.size == "paper")]
    return " and ".join(dict.fromkeys(small))

  @functools.cached_property
  def _cells(self) -> paper_tables.Found:
    found = paper_tables.locate(self._results)
    return {path: [(result, row) for result, row in pairs
                   if not paper_tables.is_stand_in(path, row)] for path, pairs in found.items()}


def measured_at(result: Result, rows: Sequence[Row]) -> str:
  """Size, data and number of seeds, such as '`mix:cpu`, sample data, 3 seeds'."""
  data = dict.fromkeys("sample data" if name.startswith("sample_") else name
                       for row in rows for name in result.data(row))
  counts = [len(row["seeds"]) for row in rows if row["seeds"]]
  seeds = [f"{span(counts)} seed" + ("" if max(counts) == 1 else "s")] if counts else []
  changed = re.search(rf" --config\.(?!({'|'.join(_CHOICES)})=)", result.command)
  return ", ".join([f"`{result.config}`" + (" with other values" if changed else ""),
                    some(list(data)), *seeds])


class Claim(NamedTuple):
  """What the paper says.

  Attributes:
    section: where.
    text: what, in short.
    judge: evidence -> verdict; raises `Absent` where there is none.
    commands: what decides it, at the size that the claim is about.
    absent: the status where there is no evidence.
  """

  section: str
  text: str
  judge: Callable[[Evidence], Verdict]
  commands: tuple[str, ...]
  absent: str = NOT_RUN


class Judged(NamedTuple):
  claim: Claim
  verdict: Verdict
  commands: tuple[str, ...]  # that made the evidence
  sizes: str  # that decided it, where they are not the paper's

  @property
  def status(self) -> str:
    return f"{self.verdict.status} ({self.sizes})" if self.sizes else self.verdict.status

  @property
  def kind(self) -> str:
    kind = f"{_ONLY}a condition" if self.verdict.status.startswith(_ONLY) else self.verdict.status
    return f"{kind} at a small size" if self.sizes else kind


def judge(claims: Sequence[Claim], results: Sequence[Result],
          paper: Mapping[str, Any]) -> list[Judged]:
  judged = []
  for claim in claims:
    evidence = Evidence(results, paper)
    try:
      verdict = claim.judge(evidence)
    except Absent:
      verdict = Verdict(claim.absent, "No result that could decide it is among those published.")
      evidence.commands.clear()
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
      if not evidence.names:
        raise
      raise ResultsError(  # edited, or of another version: the rows do not go together
          f"the rows of {' and '.join(evidence.names)} do not tell what became of the claim "
          f"'{claim.text}' ({type(error).__name__}: {error}); run what makes them again, or leave "
          "them out") from error
    decided = verdict.status not in (INCONSISTENT, NEEDS_HARDWARE, NOT_RUN)
    judged.append(Judged(claim, verdict, tuple(evidence.commands),
                         (evidence.sizes if verdict.sizes is None else verdict.sizes)
                         if decided else ""))
  return judged


def as_blocks(judged: Sequence[Judged]) -> list[Block]:
  """A table of all, and each with its evidence."""
  counts: dict[str, int] = {}
  for one in judged:
    counts[one.kind] = counts.get(one.kind, 0) + 1
  blocks: list[Block] = [
      Paragraph("Every claim that can be tested, in the paper's order. Statuses and numbers are "
                "computed from the rows in `results/` and from the paper's own tables "
                "(`results/paper.json`), so they change when results do. **Inconsistent in the "
                "paper** means that its own tables say otherwise; **needs hardware**, that only "
                "its own sizes decide; **not run here**, that the command is there and its "
                "result is not; **undecided**, that intervals or single seeds do not tell. A "
                "status that names a config in brackets is of that size and of these data, not of "
                "the paper's. Runs of the size `smoke` decide nothing."),
      Paragraph(f"{len(judged)} claims: " + ", ".join(
          f"{count} {kind}" for kind, count in counts.items()) + "."),
      Table("All claims and their statuses.", (REPORT,), ("Section", "Claim", "Status"),
            tuple((f"{index}. {one.claim.section}", one.claim.text, one.status)
                  for index, one in enumerate(judged, 1)))]
  for index, one in enumerate(judged, 1):
    blocks += _block(index, one)
  return blocks


def _block(index: int, one: Judged) -> Iterator[Block]:
  yield Heading(3, f"Claim {index}: {one.claim.section}")
  yield Paragraph(one.claim.text)
  yield Paragraph(f"**{one.status[0].upper()}{one.status[1:]}.** "
                  f"{one.verdict.evidence}")
  # What would decide it; nothing has to where the paper contradicts itself, or it is decided.
  is_open = one.verdict.status in (NEEDS_HARDWARE, NOT_RUN, UNDECIDED)
  decisive = [command for command in one.claim.commands
              if command not in one.commands and (is_open or not one.commands)]
  yield Code((*(f"{command}  # the evidence" for command in one.commands),
              *(f"{command}  # would decide it" for command in decisive)))


def in_cases(held: Sequence[str], failed: Sequence[str]) -> str:
  """The status of a claim that holds for some and not for others."""
  if not failed:
    return REPRODUCED
  return holds_only_under(", ".join(held)) if held else NOT_REPRODUCED


def values_of(rows: Sequence[Row]) -> list[float]:
  return [row["value"] for row in rows]


def number(value: float) -> str:
  return f"{value:.4g}"


def with_spread(row: Row) -> str:
  return number(row["value"]) + (f" ± {row['spread']:.2g}" if row["spread"] else "")


def span(values: Sequence[float]) -> str:
  low, high = number(min(values)), number(max(values))
  return low if low == high else f"{low} to {high}"


def some(entries: Sequence[str], limit: int = 4) -> str:
  """The first few."""
  rest = len(entries) - limit
  return "; ".join(entries[:limit]) + (f"; and {rest} more" if rest > 0 else "")
