"""One page of all results: the paper's tables beside ours, figures, and what became of its claims.

  python -m experiments.report --results=results --out=runs/report
  python -m experiments.report --results=results --out=runs/report --claims=docs/claims.md \
      --study=docs/study.md

Reads every `summary.json` under `--results` and writes `index.html`, which needs no other file,
`report.md`, `claims.md` and `study.md` into `--out`; `--claims` and `--study` write the paper's
claims and the study's answers to another place as well.
Every table and figure names the command that makes it; a cell of the paper that no result fills
has the command that would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
import sys
from typing import Optional

from absl import flags

from damcha_jax.config import ConfigError
from damcha_jax.reporting import Row
from damcha_jax.training.workdir import write_atomically, writing
from experiments import claims
from experiments import command_line
from experiments import common
from experiments import paper_tables
from experiments import questions
from experiments.claims import number
from experiments.document import (Block, Figure, Folded, Heading, Paragraph, Table, to_html,
                                  to_markdown)
from experiments.paper_claims import CLAIMS
from experiments.results import FIGURES, Result, SMOKE, read_results, unfinished

TITLE = "DAMCHA: the paper's results beside ours"
CLAIMS_TITLE = "What became of the paper's claims"
STUDY_TITLE = "What the study answers"
ABSENT = "–"
# How a unit of a summary reads behind a number.
UNITS = {"1": "", "0 .. 100": "of 100", "squared error of the range": "of the squared range"}


def main(argv: Sequence[str]) -> None:
  values = parse(argv)
  results, out = read_results(Path(values.results)), Path(values.out)
  for folder in unfinished(Path(values.results)):
    common.note(f"{folder} has no summary.json and is left out; the command of its config.json "
                "finishes it")
  paper = paper_tables.read_paper()
  judged = claims.judge(CLAIMS, results, paper)
  answers = questions.blocks(results, paper)
  blocks = report(results, judged, answers)
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
  write_atomically(out / "index.html", to_html(TITLE, blocks))
  write_atomically(out / "report.md", to_markdown(TITLE, blocks, out))
  for path in (out / "claims.md", values.claims and Path(values.claims)):
    if path:
      _write(path, claims_page(judged))
  for path in (out / "study.md", values.study and Path(values.study)):
    if path:
      _write(path, study_page(answers, path.parent))
  print(f"{len(results)} results and {len(judged)} claims are in {out / 'index.html'}")


def _write(path: Path, page: str) -> None:
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, page)


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("results", "results", "the folder of results or workdirs", **define)
  flags.DEFINE_string("out", None, "name a folder for the report, such as runs/report", **define)
  flags.DEFINE_string("claims", None, "another file for the claims", **define)
  flags.DEFINE_string("study", None, "another file for the study's answers", **define)
  parsed = command_line.parse_options(values, argv, __doc__, required=("out",))
  pages = [Path(parsed.out) / name for name in ("index.html", "report.md", "claims.md", "study.md")]
  pages += [Path(one) for one in (parsed.claims, parsed.study) if one]
  if len({page.resolve() for page in pages}) < len(pages):
    raise ConfigError("--claims and --study must name two files, and none of those in --out, "
                      "which has both")
  return parsed


def claims_page(judged: Sequence[claims.Judged]) -> str:
  """`docs/claims.md`."""
  return to_markdown(CLAIMS_TITLE, claims.as_blocks(judged), Path())


def study_page(answers: Sequence[Block], folder: Path) -> str:
  """`docs/study.md`, for a file in `folder`."""
  return to_markdown(STUDY_TITLE, answers, folder)


def report(results: Sequence[Result], judged: Sequence[claims.Judged],
           answers: Sequence[Block]) -> list[Block]:
  """The page: the study, tables, claims, figures, and every row."""
  blocks: list[Block] = [Paragraph(
      "What a study at a small size answers, every table of the paper with the figures of this "
      "project, the paper's claims, and all that was measured. A row is **comparable** where data "
      "and size are the paper's; elsewhere the "
      "paper's figure stands beside ours for orientation only, and no difference is shown. Spread "
      "is the sample standard deviation over seeds; a difference is ours less the paper's. Errors "
      "of pictures are in units of the squared range of a pixel.")]
  blocks += [Heading(2, STUDY_TITLE), *answers]
  paper, found = paper_tables.read_paper(), paper_tables.locate(results)
  for name, shape in paper_tables.TABLES.items():
    blocks.append(Heading(2, shape.title))
    for part in paper_tables.parts(name, paper):
      blocks += _part(part, found)
  blocks += [Heading(2, "Table 7: complexity"), *_table7(results)]
  blocks += [Heading(2, CLAIMS_TITLE), *claims.as_blocks(judged)]
  blocks += [Heading(2, "Figures"), *_figures(results)]
  blocks += [Heading(2, "All rows"), *_all_rows(results)]
  return blocks


def _part(part: paper_tables.Part, found: paper_tables.Found) -> Iterator[Block]:
  """Ours beside the paper's, a table for each result, and the cells that none fills."""
  yield Heading(3, f"Table {part.cells[0].path[0][-1]}, {part.title}")
  by_result: dict[str, tuple[Result, list[tuple[paper_tables.Cell, Row]]]] = {}
  for cell in part.cells:
    for result, row in found.get(cell.path, ()):
      by_result.setdefault(result.name, (result, []))[1].append((cell, row))
  for result, pairs in by_result.values():
    other = paper_tables.same_sample(part.title, [row for _, row in pairs])
    caption = f"{part.title}, this project at `{result.config}` (`{result.name}`)."
    if result.size == SMOKE:
      caption += " A few steps, which are no evidence of anything."
    if other is not None:
      caption += (f" The data are the sample that stands for {other} as well, so both are the same "
                  "experiment.")
    yield _noted(caption, result.command,
                 ("Method", "Quantity", "Ours", "Spread", "Seeds", "Paper's", "Difference",
                  "Comparable"),
                 [((_method(cell, row), _quantity(cell, row), *_beside(row, cell.figure)),
                   row.get("note")) for cell, row in pairs])
  left = [cell for cell in part.cells if cell.path not in found]
  if left and by_result:
    yield Folded(f"{part.title}: what none of these runs has", (_not_run(part, left),))
  elif left:
    yield _not_run(part, left)


def _quantity(cell: paper_tables.Cell, row: Row) -> str:
  """With the epoch that stands for the paper's where it is another."""
  if cell.path[0] == "table6" and not cell.path[-1].endswith(f"_{row['variant']}"):
    return f"{cell.column} (here {row['variant']})"
  return cell.column


def _not_run(part: paper_tables.Part, left: Sequence[paper_tables.Cell]) -> Table:
  columns = tuple(dict.fromkeys(cell.column for cell in left))
  lines: dict[str, dict[str, float]] = {}
  for cell in left:
    lines.setdefault(cell.line, {})[cell.column] = cell.figure
  elsewhere = (f" What small models do on other data is under \"{STUDY_TITLE}\"."
               if part.cells[0].path[0] == "table5" else "")
  return Table(f"{part.title}, **not run here**: the paper's figures.{elsewhere} Ours would come "
               "from", (part.command,), ("Method", *columns),
               tuple((line, *(str(figures.get(column, "")) for column in columns))
                     for line, figures in lines.items()))


def _noted(caption: str, command: str, header: tuple[str, ...],
           rows: Sequence[tuple[tuple[str, ...], Optional[str]]]) -> Table:
  """A table whose last column refers to its rows' notes, each of which is told once."""
  notes = list(dict.fromkeys(note for _, note in rows if note))
  return Table(caption, (command,), (*header, "Note"), tuple(
      (*cells, f"[{notes.index(note) + 1}]" if note else ABSENT) for cells, note in rows),
               tuple(notes))


def _method(cell: paper_tables.Cell, row: Row) -> str:
  """The paper's name, and ours where two of ours have that one."""
  is_one_of_two = (paper_tables.is_stand_in(cell.path, row)
                   or row["attention"].startswith("authors_"))
  return f"{cell.line} (`{row['attention']}`)" if is_one_of_two else cell.line


def _beside(row: Row, figure: float) -> tuple[str, ...]:
  """Ours, spread, seeds, the paper's, difference and whether they can be compared."""
  value = row["value"]
  difference = ABSENT if value is None or not row["comparable"] else (
      f"{value - figure:+.3g} ({100 * (value - figure) / abs(figure):+z.1f}%)")
  return (_value(row), _spread(row), _seeds(row), str(figure), difference,
          "yes" if row["comparable"] else "no")


def _value(row: Row) -> str:
  return "not available" if row["value"] is None else f"{number(row['value'])} {_unit(row)}".strip()


def _unit(row: Row) -> str:
  return UNITS.get(row["unit"], row["unit"])


def _spread(row: Row) -> str:
  return ABSENT if row["spread"] is None else f"{row['spread']:.2g}"


def _seeds(row: Row) -> str:
  return ", ".join(map(str, row["seeds"])) or ABSENT


def _table7(results: Sequence[Result]) -> Iterator[Block]:
  rows, commands = [], {}
  for stage, attention, formula, result, row in paper_tables.table7(results):
    if result is None:
      rows.append((stage, attention, formula, "not run here", ABSENT))
      commands[paper_tables.COSTS] = None
    else:
      fit = row["note"].rpartition("counted to ")[2]
      rows.append((stage, attention, formula, fit, f"{row['value']:.1g}"))
      commands[result.command] = None
  yield Table("Operations of a layer: the paper's terms, and what is counted in the modules. The "
              "difference is the largest, relative, over a grid of sizes.", tuple(commands),
              ("Stage", "Attention", "Paper's", "Counted", "Difference"), tuple(rows))


def _figures(results: Sequence[Result]) -> Iterator[Block]:
  if not any(result.figures for result in results):
    yield Paragraph("None of these results has figures.")
  for result in results:
    for path in result.figures:
      if path.name.startswith(questions.PREFIX):  # which is beside its answer
        continue
      name = path.relative_to(result.folder / FIGURES).with_suffix("").as_posix()
      title = name.replace("/", ", ").replace("_", " ").replace("-", ", ")
      yield Figure(path, f"Figure of {result.experiment} at {result.config}: {title}",
                   f"**{title}** ({result.experiment} at `{result.config}`).", (result.command,))


def _all_rows(results: Sequence[Result]) -> Iterator[Block]:
  for result in results:
    rows = [((row["attention"], " on ".join(dict.fromkeys(filter(None, (
        row.get("section"), row["dataset"])))), row["split"], row["variant"] or ABSENT,
              row["metric"], _value(row), _spread(row), _seeds(row),
              ABSENT if row["paper"] is None else f"{row['paper']:.6g}"), row.get("note"))
            for row in result.rows]
    yield Folded(f"{result.name}: {len(rows)} rows", (_noted(
        f"All rows of `{result.config}`.", result.command,
        ("Attention", "Data", "Split", "Variant", "Metric", "Value", "Spread", "Seeds", "Paper's"),
        rows),))


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
