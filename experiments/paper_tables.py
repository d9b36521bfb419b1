"""The paper's Tables 1 to 7, and which rows of our results stand in which cell.

A cell is named by its path in `results/paper.json`, such as ("table5", "Mix", "perplexity",
"DAMCHA").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import json
from typing import Any, NamedTuple, Optional

from damcha_jax.analysis import scaling
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config.ablations import depth
from damcha_jax.reporting import Row
from experiments import ablations
from experiments import common
from experiments import efficiency
from experiments import gpt2_enwik8
from experiments import image_generation
from experiments import text_generation
from experiments.results import Result, by_size

Path = tuple[str, ...]
Found = dict[Path, list[tuple[Result, Row]]]

_ALL = "mha,authors_tha,authors_dcmha,authors_colmha,authors_mma,authors_moa,damcha"
_IMAGES = ("python -m experiments.image_generation --config=configs/{}.py "
           f"--config.attentions={_ALL} --config.metrics.inception_weights=pt_inception.pth")
_TEXTS = ("python -m experiments.text_generation --config=configs/{}.py "
          f"--config.attentions={_ALL} --config.metrics.bart_weights=bart-large-cnn")
_TABLE1 = {"CIFAR-10": _IMAGES.format("cifar10"), "CIFAR-100": _IMAGES.format("cifar100"),
           "WMT": _TEXTS.format("wmt14") + " --config.data.direction=de-en",
           "CommonGen": _TEXTS.format("commongen")}
_ABLATION_SETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "WMT": "wmt14",
                  "CommonGen": "commongen"}
COSTS = "python -m experiments.efficiency --config=configs/costs.py"
SPEED = "python -m experiments.efficiency --config=configs/speed.py"
TABLE2 = "python -m experiments.efficiency --config=configs/table2.py"
TABLE6 = "python -m experiments.vit_imagenet --config=configs/vit_s16.py"


def _ablation(table: str, dataset: str) -> str:
  name = _ABLATION_SETS[dataset]
  weights = (f"--config.{name}.metrics.inception_weights=pt_inception.pth"
             if dataset.startswith("CIFAR")
             else f"--config.{name}.metrics.bart_weights=bart-large-cnn")
  more = " --config.wmt14.data.direction=de-en" if dataset == "WMT" else ""
  return (f"python -m experiments.ablations --config=configs/{table}.py "
          f"--config.datasets={name} {weights}{more}")


def _table5(dataset: str) -> str:
  return f"python -m experiments.gpt2_enwik8 --config=configs/{dataset.lower()}.py"


_WORDS = {"mse": "MSE", "fid": "FID", "nll": "NLL", "bartscore": "BARTScore", "top50": "Top-50",
          "gflops": "GFLOPs", "ms": "(ms)", "top1": "Top-1", "top5": "Top-5",
          "epoch100": "epoch 100", "epoch500": "epoch 500"}


# Of the paper's figures, where it prints one or where its other figures tell.
_UNITS = {"memory": " (unit not given)", "cross_entropy": " (nats per character)",
          "nll": " (nats, read as per token)", "top1_": " (%)", "top5_": " (%)"}
CIFAR, SAMPLE_IMAGES = ("CIFAR-10", "CIFAR-100"), "sample_images"


def in_layers(depth_of: str) -> str:
  return f"{depth_of} layer" + ("" if depth_of == "1" else "s")


def _score(data: str, column: str) -> str:
  """What Tables 3 and 4 measure on a data set, a column of theirs."""
  return f"{'fid' if data in CIFAR else 'bartscore'}_{column}"


def readable(name: str) -> str:
  """A key of `results/paper.json` in words."""
  return " ".join(_WORDS.get(word, word) for word in name.replace("$", "").split("_"))


class Cell(NamedTuple):
  path: Path
  figure: float
  line: str  # where a reader finds it: its line, and its column
  column: str


class Part(NamedTuple):
  """What one command makes of a table, its cells by line, Top-50 last."""

  title: str
  command: str
  cells: list[Cell]


class Shape(NamedTuple):
  """How a table is printed.

  Attributes:
    title: of the table.
    place: path without the table -> (part, line, column as a key of the paper's).
    command: part -> what makes it at the paper's size.
  """

  title: str
  place: Callable[..., tuple[str, str, str]]
  command: Callable[[str], str]


TABLES = {
    "table1": Shape("Table 1: generation", lambda data, method, metric: (data, method, metric),
                    _TABLE1.__getitem__),
    "table2": Shape("Table 2: efficiency", lambda data, method, metric: (data, method, metric),
                    lambda part: TABLE2),
    "table3": Shape("Table 3: depth of the generator, and blocks",
                    lambda blocks, data, column, layers: (data, f"{blocks}, {in_layers(layers)}",
                                                          _score(data, column)),
                    lambda part: _ablation("table3", part)),
    "table4": Shape("Table 4: generator and sharing",
                    lambda data, variant, column: (data, variant, _score(data, column)),
                    lambda part: _ablation("table4", part)),
    "table5": Shape("Table 5: GPT-2", lambda data, metric, method: (data, method, metric), _table5),
    "table6": Shape("Table 6: ImageNet-1K", lambda method, metric: ("ViT-S/16", method, metric),
                    lambda part: TABLE6),
}


def read_paper() -> dict[str, Any]:
  return json.loads(common.PAPER.read_text(encoding="utf-8"))


def parts(table: str, paper: Mapping[str, Any]) -> list[Part]:
  """The table, cut by what makes it."""
  shape = TABLES[table]
  found: dict[str, Part] = {}
  for path, figure in leaves(paper[table]):
    title, line, column = shape.place(*path)
    part = found.setdefault(title, Part(title, shape.command(title), []))
    unit = next((unit for key, unit in _UNITS.items() if column.startswith(key)), "")
    part.cells.append(Cell((table, *path), figure, readable(line), readable(column) + unit))
  for part in found.values():
    lines = list(dict.fromkeys(cell.line for cell in part.cells))
    part.cells.sort(key=lambda cell: (lines.index(cell.line), "Top-50" in cell.column))
  return list(found.values())


def same_sample(part: str, rows: Sequence[Row]) -> Optional[str]:
  """The other part whose data are the very sample that these rows are of, or None."""
  of_images = any(row["dataset"] == SAMPLE_IMAGES for row in rows)
  return next((one for one in CIFAR if one != part), None) if of_images and part in CIFAR else None


def leaves(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, float]]:
  """The numbers of a tree, by their paths."""
  for key, value in tree.items():
    if isinstance(value, Mapping):
      yield from leaves(value, (*prefix, key))
    else:
      yield (*prefix, key), value


def locate(results: Sequence[Result]) -> Found:
  """Every row that stands in a cell, by the cell's path; a stand-in's is not comparable."""
  found: Found = {}
  for result in results:
    place = _PLACES.get(result.experiment)
    for row in result.rows if place else ():
      path = place(result, row)
      if path is not None:
        if is_stand_in(path, row):
          measured = f"the paper measured authors_{row['attention']}"
          notes = dict.fromkeys((measured, *filter(None, (row.get("note") or "").split("; "))))
          row = {**row, "comparable": False, "note": "; ".join(notes)}
        found.setdefault(path, []).append((result, row))
  return found


def is_stand_in(path: Path, row: Row) -> bool:
  """Whether an attention is as its own paper has it where the paper measured a simplified one."""
  return path[0] == "table1" and f"authors_{row['attention']}" in ATTENTIONS


def _name(result: Result) -> str:
  return result.config.partition(":")[0]


def _of_table1(datasets: Mapping[str, str],
               metrics: Mapping[str, str]) -> Callable[[Result, Row], Optional[Path]]:
  methods = {name.lower(): name for name in ("MHA", "THA", "DCMHA", "ColMHA", "MMA", "MoA",
                                             "DAMCHA")}

  def place(result: Result, row: Row) -> Optional[Path]:
    dataset, metric = datasets.get(_name(result)), metrics.get(row["metric"])
    method = methods.get(row["attention"].removeprefix("authors_"))
    is_cell = None not in (dataset, method, metric) and row["paper"] is not None
    return ("table1", dataset, method, metric) if is_cell else None

  return place


def _of_table2(result: Result, row: Row) -> Optional[Path]:
  path = (efficiency.TABLE2_DATASETS.get(row["dataset"]),
          efficiency.TABLE2_METHODS.get(row["attention"]),
          efficiency.TABLE2_METRICS.get(row["metric"]))
  return ("table2", *path) if row["variant"] is None and None not in path else None


def _of_tables_3_and_4(_: Result, row: Row) -> Optional[Path]:
  # Several sets may have the same sample, so the section tells which one it stands for.
  names = {section: name for name, section in _ABLATION_SETS.items()}
  dataset, column = names.get(row.get("section")), ablations.COLUMNS.get(row["metric"])
  variant, _, inference = str(row["variant"]).partition(",")[0].partition("-")
  if None in (dataset, column) or row["attention"] != "damcha":
    return None
  blocks = ablations.TABLE3_INFERENCE.get(inference or "full")
  if depth(variant) is not None and blocks is not None:
    return "table3", blocks, dataset, column, str(depth(variant))
  if not inference and variant in ablations.TABLE4_VARIANTS:
    return "table4", dataset, ablations.TABLE4_VARIANTS[variant], column
  return None


def _of_table5(result: Result, row: Row) -> Optional[Path]:
  dataset = gpt2_enwik8.TABLE5_DATASETS.get(row["dataset"])
  metric = gpt2_enwik8.TABLE5_METRICS.get(row["metric"])
  is_cell = None not in (dataset, metric) and row["paper"] is not None
  return ("table5", dataset, metric, row["attention"].upper()) if is_cell else None


def _of_table6(result: Result, row: Row) -> Optional[Path]:
  # The last milestone is, or stands in for, epoch 500, the one before for epoch 100.
  milestones = dict.fromkeys(one["variant"] for one in result.rows if one["metric"] == "top1")
  epochs = dict(zip(reversed(milestones), ("epoch500", "epoch100")))
  is_cell = (row["metric"] in ("top1", "top5") and row["split"] == "validation"
             and row["variant"] in epochs and row["paper"] is not None)
  return (("table6", row["attention"].upper(), f"{row['metric']}_{epochs[row['variant']]}")
          if is_cell else None)


_PLACES = {
    "image_generation": _of_table1(image_generation.TABLE1_DATASETS,
                                   image_generation.TABLE1_METRICS),
    "text_generation": _of_table1(text_generation.TABLE1_DATASETS, {
        name: name for name in ("nll_mean", "nll_q25", "nll_q75", "bartscore_mean",
                                "bartscore_q25", "bartscore_q75", "bartscore_top50")}),
    "efficiency": _of_table2,
    "ablations": _of_tables_3_and_4,
    "gpt2_enwik8": _of_table5,
    "vit_imagenet": _of_table6,
}

STAGES = {"qk_projections": "Q, K projections", "generator": "Metric generator",
          "row_sum": "RowSum", "scores": "Attention scores", "softmax": "Softmax",
          "values_and_output": "V projection and output", "total": "Total"}


def table7(results: Sequence[Result],
           ) -> Iterator[tuple[str, str, str, Optional[Result], Optional[Row]]]:
  """Stage, attention, the paper's terms, and what was counted, where it was."""
  for (attention, stage), terms in scaling.TABLE7.items():
    rows = [(result, row) for result in by_size(results) for row in result.rows
            if row["metric"] == "table7_residual" and row["attention"] == attention
            and row["variant"] == f"table7 {stage}"]
    found = rows[0] if rows else (None, None)
    yield (STAGES[stage], attention, f"O({' + '.join(terms)})", *found)
