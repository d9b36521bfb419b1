"""The ablations' `report.md`: a table for each question, and what it can and cannot show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import textwrap

from damcha_jax import reporting
from damcha_jax.config import AblationsConfig
from damcha_jax.config.ablations import depth
from damcha_jax.reporting import Row

DRIFT = ("block_drift", "block_spread", "block_spread_max", "block_difference")
# The metrics of each table.
QUESTIONS = {
    "How well it predicts": ("nats_per_token", "mse_unpaired_mean", "nll_mean"),
    "How good what it generates is, beside the paper": (
        "fid_group_mean", "fid_top50", "bartscore_mean", "bartscore_top50"),
    "What was trained": ("num_params", "adaptivity"),
    "What training did to the blocks": DRIFT,
}
TITLES = {
    "nats_per_token": "loss", "mse_unpaired_mean": "MSE to unrelated image",
    "nll_mean": "NLL of references", "fid_group_mean": "FID, groups of 50",
    "fid_top50": "FID, likeliest 50", "bartscore_mean": "BARTScore",
    "bartscore_top50": "BARTScore, best 50", "num_params": "parameters"}
# The figure of real data that a column is held against.
CONTROLS = {"mse_unrelated": "mse_unpaired_mean", "fid_real_group_mean": "fid_group_mean"}
_UNITS = {"squared error of the range": "range²", "squared distance": "distance²"}
_CONTROL = "real images"
_STATIC = "by definition: a static metric reads no context"
_READING = """\
Rows are variants; `-diagonal`, `-off_diagonal` and `-shifted` are evaluations of the trained one
with a part of its blocks. Units are in brackets, 1 is none. Of losses, NLL and FID lower is better,
of BARTScore higher; the MSE is to be held against that of `real images`, which two unrelated test
images have. A value that is missing has a letter, explained under its table; what only lacks
weights, `python -m experiments.evaluate` fills in from what was generated. A blank cell is a figure
that there is none of: the paper lacks the variant, or the row is no model."""
_ONE_SEED = """\
What differences mean. With one seed there is no spread to hold a difference against. Seeds alone
moved the test loss of `configs/mix.py:cpu` by 0.02 nats per token (standard deviation of three), so
in runs as small as that differences of a few hundredths are noise, and no order of variants follows
from them; `--config.seeds=0,1,2` measures the spread."""
_SEEDS = """\
What differences mean. ± is the sample standard deviation over {} seeds. A difference that is not
well above it shows nothing."""
_BLOCKS = """\
What leaving out blocks can and cannot show. The metric of head i is m_i = sum_j M_ij, so every
block of a row gets the same gradient, and Adam, which treats all entries alike, the same updates.
Here training moved the blocks by {moved} (`block_drift`, a root mean square over the last layers of
f_theta), and those of one row apart by at most {apart:.2g} (`block_spread_max`), which is {cause};
at the start they were up to {start:.2g} apart (`block_difference`), and still are. What was learned
is thus in all H blocks of a row in equal parts. Inference with the diagonal alone keeps 1/H of it
and one of H initial values, off-diagonal the other (H-1)/H. If that makes a model worse, its metric
has the wrong size and lost initial values that the rest was trained around. It does not show that
off-diagonal blocks hold interactions between heads that diagonal ones lack: no training on their
sum can tell them apart. The control is `shifted`, one other block of each row in place of the
diagonal one, which must do as well as the diagonal, up to the luck of initial values. A model that
is trained without them (`block_ablation_train`) has the same functions to choose from, and differs
in how its metric starts and how fast it learns. Rows of one depth are evaluations of one trained
model; those of different depths were trained apart and differ in parameters too."""
_GENERATOR = """\
What the comparison of generator and sharing can and cannot show. `static` trains a metric in each
layer directly, which reads no input; `unshared` has a generator in each layer, `full` one that all
layers share. So `static` against `unshared` is the generator, `unshared` against `full` is sharing,
and `static` against `full` both at once. None of them is matched in size (parameters: {params}), so
a difference may be one of size alone. Nor is a generator one that follows its context: where
adaptivity is near 0, its metric is nearly a static one, and that `full` is no better than `static`
says little about generators that do follow it. `robust` is `full` with initial values that do;
`rowsum` can compute what `full` can, with other initial values and fewer parameters, so that the
two show how much initial values alone matter."""


def report(config: AblationsConfig, rows: Sequence[Row]) -> str:
  """Markdown that can be read alone; `rows` as `summary.json` has them."""
  parts = [f"# Ablations: {config.name}:{config.size}", _READING]
  of_set: dict[str, list[Row]] = {}
  for row in rows:
    of_set.setdefault(_set(row), []).append(row)
  for name, own in of_set.items():
    parts.append(f"## {name}")
    for question, metrics in QUESTIONS.items():
      parts += _table(question, metrics, own)
  parts += [_filled(text) for text in _what_they_show(config, rows)]
  return "\n\n".join(parts) + "\n"


def _set(row: Row) -> str:
  """Several sections of the config may stand on one sample."""
  return " on ".join(dict.fromkeys((row.get("section", row["dataset"]), row["dataset"])))


def _table(question: str, metrics: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
  """Heading, table and footnotes; nothing if no row has any of the metrics."""
  cells: dict[str, dict[str, str]] = {}
  columns: dict[tuple[int, str], None] = {}
  notes: dict[str, str] = {}
  for row in rows:
    metric = CONTROLS.get(row["metric"], row["metric"])
    if metric not in metrics:
      continue
    name, _, part = (row["variant"] or _CONTROL).partition(", ")
    column = _title(metric, row, part)
    place = metrics.index(metric)
    columns[place, column] = None
    line = cells.setdefault(name, {})
    line[column] = _cell(row, notes)
    if row["paper"] is not None:
      columns[place, _papers(column)] = None
      line[_papers(column)] = reporting.format_number(row["paper"])
  if not cells:
    return
  if "adaptivity" in metrics and "static" in cells:
    column = next((title for _, title in columns if title.startswith("adaptivity")), "adaptivity")
    columns[metrics.index("adaptivity"), column] = None
    cells["static"][column] = f"0 ({_letter(notes, _STATIC)})"
  # Sorting is stable: of one metric, splits stay in their order, each before the paper's figure.
  titles = [title for _, title in sorted(columns, key=lambda column: column[0])]
  yield f"### {question}"
  yield reporting.markdown_table(
      ["", *titles], [[name, *(line.get(title, "") for title in titles)]
                      for name, line in cells.items()])
  absent = [name for name in dict.fromkeys((row["variant"] or "").split(", ")[0] for row in rows)
            if name == "rowsum" and name not in cells]
  yield from (f"({letter}) {note}" for note, letter in notes.items())
  if absent:
    yield "`rowsum` stores only the sums of blocks, so it is not in this table."


def _title(metric: str, row: Row, part: str) -> str:
  where = [row["split"], part] if metric not in ("num_params", "adaptivity", *DRIFT) else []
  return (", ".join(filter(None, (TITLES.get(metric, metric), *where)))
          + f" [{_UNITS.get(row['unit'], row['unit'])}]")


def _papers(column: str) -> str:
  return f"paper's {column.partition(', test')[0].partition(' [')[0]}"


def _cell(row: Row, notes: dict[str, str]) -> str:
  if row["value"] is None:
    return f"({_letter(notes, row.get('note', 'not measured'))})"
  spread = f" ± {row['spread']:.2g}" if row["spread"] else ""
  return reporting.format_number(row["value"]) + spread


def _letter(notes: dict[str, str], note: str) -> str:
  return notes.setdefault(note, chr(ord("a") + len(notes)))


def _what_they_show(config: AblationsConfig, rows: Sequence[Row]) -> Iterator[str]:
  if not all(row["comparable"] for row in rows if row["paper"] is not None):
    yield "The paper's figures are for its own data and size, which these are not."
  yield _ONE_SEED if len(config.seeds) == 1 else _SEEDS.format(len(config.seeds))
  drifts = [row for row in rows if row["metric"] in DRIFT]
  if drifts and (len(config.inference_names) > 1
                 or any(depth(name) is not None for name in config.variant_names)):
    yield _what_blocks_show(drifts)
  if {"static", "unshared"} & set(config.variant_names):
    yield _GENERATOR.format(params=_sizes(rows))


def _sizes(rows: Sequence[Row]) -> str:
  """Parameters by variant, in each data set."""
  by_set: dict[str, list[str]] = {}
  for row in rows:
    if row["metric"] == "num_params":
      by_set.setdefault(_set(row), []).append(f"{row['variant']} {row['value']:,.0f}")
  return "; ".join(", ".join(dict.fromkeys(sizes)) for sizes in by_set.values())


def _what_blocks_show(drifts: Sequence[Row]) -> str:
  largest = {metric: max(row["value"] for row in drifts if row["metric"] == metric)
             for metric in DRIFT}
  smallest = min(row["value"] for row in drifts if row["metric"] == "block_drift")
  is_rounding = largest["block_spread"] < 1e-4 * smallest
  return _BLOCKS.format(
      moved=" to ".join(dict.fromkeys(f"{rms:.2g}" for rms in (smallest, largest["block_drift"]))),
      apart=largest["block_spread_max"], start=largest["block_difference"],
      cause="rounding" if is_rounding else (
          "more than float32's rounding: weight decay, block_ablation_train or a narrower "
          "param_dtype told them apart"))


def _filled(text: str) -> str:
  return textwrap.fill(" ".join(text.split()), width=100, break_on_hyphens=False)
