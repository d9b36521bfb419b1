"""Summaries: one row per measured quantity, beside the paper's figure, as JSON, table and plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import statistics
from typing import Any, Optional

import numpy as np

from damcha_jax.training.workdir import write_atomically, writing

Row = dict[str, Any]
# As many as there are attentions; the first ten are matplotlib's.
_COLOURS = (*(f"C{index}" for index in range(10)), "black", "gold")
_MARKERS = "osD^v<>pPX*h"
_DASHES = ("-", "--", ":", "-.")
_GRID_PIXELS = 800  # the width of a grid of images


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One number from one run, or from no run (`seed` None), such as a compressor's."""

  attention: str
  dataset: str
  split: str  # 'train', 'validation' or 'test'
  metric: str
  value: Optional[float]  # None: unavailable, and `note` says why
  unit: str
  seed: Optional[int] = None
  variant: Optional[str] = None
  note: Optional[str] = None


def summary_rows(measurements: Iterable[Measurement], comparable: bool,
                 paper: Callable[[Measurement], Optional[float]]) -> list[Row]:
  """Means over seeds, in order of first appearance.

  (attention, dataset, split, variant, metric) identifies a row. `spread` is the sample standard
  deviation over seeds, None for a single one.

  Args:
    measurements: the numbers of all runs.
    comparable: whether data and size are the paper's, so that its figures can be held against ours.
    paper: the paper's figure for a measurement, or None.

  Raises:
    ValueError: two measurements of one row have the same seed.
  """
  groups: dict[tuple, list[Measurement]] = {}
  for one in measurements:
    key = (one.attention, one.dataset, one.split, one.variant, one.metric)
    group = groups.setdefault(key, [])
    if any(one.seed == other.seed for other in group):
      raise ValueError(f"two measurements of {key} with seed {one.seed}")
    group.append(one)
  return [_row(group, comparable, paper(group[0])) for group in groups.values()]


def _row(group: list[Measurement], comparable: bool, paper: Optional[float]) -> Row:
  first = group[0]
  values = [one.value for one in group if one.value is not None]
  row = {
      "name": f"{first.attention}/{first.split}",
      "metric": first.metric,
      "value": statistics.fmean(values) if values else None,
      "unit": first.unit,
      "seeds": [one.seed for one in group if one.seed is not None],
      "paper": paper,
      "attention": first.attention,
      "dataset": first.dataset,
      "split": first.split,
      "variant": first.variant,
      "spread": statistics.stdev(values) if len(values) > 1 else None,
      "comparable": comparable,
  }
  notes = dict.fromkeys(one.note for one in group if one.note)
  if notes:
    row["note"] = "; ".join(notes)
  return row


def write_summary(path: Path, experiment: str, config: str, rows: Sequence[Row]) -> None:
  """Replaces `path` by `{"experiment", "config", "status", "rows"}`, whole or not at all."""
  summary = {"experiment": experiment, "config": config, "status": "ok", "rows": list(rows)}
  write_atomically(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def format_table(rows: Sequence[Row]) -> str:
  """One block per (dataset, split, variant): attentions down, metrics and paper figures across."""
  blocks: dict[tuple, list[Row]] = {}
  for row in rows:
    blocks.setdefault((row["dataset"], row["split"], row["variant"]), []).append(row)
  texts = [_block(" · ".join(filter(None, key)), block) for key, block in blocks.items()]
  if any(row["spread"] for row in rows):
    texts.append("Behind ± is the standard deviation over seeds.")
  return "\n\n".join(texts)


def _block(title: str, rows: list[Row]) -> str:
  cells: dict[tuple[str, str], str] = {}
  columns: dict[str, None] = {}  # ordered
  for row in rows:
    column = row["metric"]
    columns[column] = None
    cells[row["attention"], column] = format_number(row["value"]) + (
        f" ± {row['spread']:.2g}" if row["spread"] else "")
    if any(other["paper"] is not None for other in rows if other["metric"] == column):
      columns["paper's " + column] = None
      cells[row["attention"], "paper's " + column] = format_number(row["paper"])
  attentions = list(dict.fromkeys(row["attention"] for row in rows))
  lines = [[title, *columns]] + [
      [attention, *(cells.get((attention, column), "") for column in columns)]
      for attention in attentions]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return "\n".join(
      "  ".join([line[0].ljust(widths[0]),
                 *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]).rstrip()
      for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table whose columns are of equal width also as plain text; the first names rows."""
  lines = [header, *rows]
  widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
  texts = ["| " + " | ".join([line[0].ljust(widths[0]),
                              *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))])
           + " |" for line in lines]
  rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
  return "\n".join([texts[0], "| " + " | ".join(rule) + " |", *texts[1:]])


def format_number(value: Optional[float]) -> str:
  """Four digits; `-` for None."""
  if value is None:
    return "-"
  if abs(value) >= 1e4:
    return f"{value:.3e}" if value >= 1e7 else f"{value:,.0f}"
  return f"{value:.4g}"


def plot_learning_curves(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]],
                         metric: str, title: str = "") -> None:
  """Writes a PNG with one line of (step, value) per named curve."""
  _plot(path, curves, "step [updates]", metric, "linear", title)


def plot_log_log(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], quantity: str,
                 metric: str) -> None:
  """Writes a PNG with one line of (quantity, value) per named curve, both axes logarithmic."""
  _plot(path, curves, quantity, metric, "log")


def _plot(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], quantity: str,
          metric: str, scale: str, title: str = "") -> None:
  # Only a finished experiment draws, so that importing this module stays fast.
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
  from matplotlib.ticker import MaxNLocator  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(6, 4) if len(curves) <= 6 else (8, 4), layout="constrained")
  axes = figure.subplots()
  for index, (name, points) in enumerate(curves.items()):
    axes.plot(*zip(*points), label=name, **_line_style(index))
  axes.set_title(title, parse_math=False)  # which may hold a file's name
  axes.set(xlabel=quantity, ylabel=metric.replace("_", " "), xscale=scale,
           yscale=scale)
  if scale == "linear":
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 2.5, 5, 10)))
  if len(curves) > 6:  # more would hide the lines
    figure.legend(loc="outside right upper")
  elif curves:
    axes.legend()
  _save(figure, path)


def _line_style(index: int) -> dict[str, Any]:
  """A colour and a marker of its own for each of twelve lines, and another dash from there on."""
  dash, line = divmod(index, len(_COLOURS))
  return dict(color=_COLOURS[line], marker=_MARKERS[line], markersize=4,
              linestyle=_DASHES[dash % len(_DASHES)])


def _save(figure: Any, path: Path) -> None:
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_intervals(path: Path, curves: Mapping[str, Sequence[tuple[float, float, float]]],
                   title: str, quantity: str, metric: str, ticks: Sequence[float] = (),
                   names: Sequence[str] = ()) -> None:
  """Writes lines of (quantity, mean, half width of its interval) by name, as PNG and SVG.

  Args:
    path: of both files, without their suffixes.
    curves: by name, in the order of the legend.
    title: of the figure.
    quantity: of the axis below, with its unit in brackets.
    metric: of the axis at the left, likewise.
    ticks: where the quantity is on a logarithmic scale, the values that it names.
    names: of the curves of all figures, in each of which a name has the same style.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(8, 5), layout="constrained")
  axes = figure.subplots()
  styles = {name: _line_style(index) for index, name in enumerate(dict.fromkeys((*names, *curves)))}
  for name, points in curves.items():
    quantities, means, halves = zip(*points)
    axes.errorbar(quantities, means, halves, label=name, capsize=3, **styles[name])
  axes.set_title(title, parse_math=False)
  axes.set(xlabel=quantity, ylabel=metric)
  if ticks:
    axes.set_xscale("log")
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_xticks([], minor=True)
  figure.legend(loc="outside right upper")
  _save(figure, path.with_name(path.name + ".png"))
  _save(figure, path.with_name(path.name + ".svg"))


def plot_differences(path: Path, differences: Mapping[str, tuple[float, float]], title: str,
                     quantity: str) -> None:
  """Writes one line per name, a difference with the half width of its interval, as PNG and SVG.

  Args:
    path: of both files, without their suffixes.
    differences: (mean, half width) by name, from above; half widths are 0 where there are none.
    title: of the figure.
    quantity: of the axis.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(8, 1.4 + 0.32 * len(differences)), layout="constrained")
  axes = figure.subplots()
  means, halves = zip(*differences.values())
  rows = range(len(differences))
  axes.errorbar(means, rows, xerr=halves, fmt="o", capsize=3)
  axes.axvline(0.0, color="black", linewidth=1)
  # Of the whole width: long names leave the axes little of it.
  figure.suptitle(title, fontsize="medium", parse_math=False)
  figure.supxlabel(quantity, fontsize="medium")
  axes.set_yticks(rows, list(differences))
  axes.set_ylim(len(differences) - 0.5, -0.5)
  _save(figure, path.with_name(path.name + ".png"))
  _save(figure, path.with_name(path.name + ".svg"))


def plot_distributions(path: Path, values: Mapping[str, np.ndarray], title: str, quantity: str,
                       unit: str) -> None:
  """Writes densities by name, with quartiles below, as PNG and SVG (Figures 3, 4, Appendix E).

  A density is sum_n N(x; x_n, h) / N with `bandwidth` h. Values that are all equal have none, only
  quartiles.

  Args:
    path: of both files, without their suffixes.
    values: one per sample, by name; in the order of the legend.
    title: of the figure.
    quantity: what the values are.
    unit: of the values.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(8, 4 + 0.28 * len(values)), layout="constrained")
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 0.3 + 0.28 * len(values)))
  widths = {name: bandwidth(values_N) for name, values_N in values.items()}
  margin = 3 * max(widths.values())
  everything = np.concatenate(list(values.values()))
  grid_G = np.linspace(everything.min() - margin, everything.max() + margin, 400)
  for row, (name, values_N) in enumerate(values.items()):
    colour = f"C{row % 10}"
    if widths[name] > 0:
      above.plot(grid_G, gaussian_density(values_N, grid_G, widths[name]), color=colour, label=name,
                 linestyle="-" if row < 10 else "--")
    q25, median, q75 = np.quantile(values_N, (0.25, 0.5, 0.75))
    below.plot([q25, q75], [row, row], color=colour, linewidth=5, solid_capstyle="butt")
    below.plot(median, row, "|", color="black", markersize=12, markeredgewidth=2)
  above.set_title(title, parse_math=False)
  above.set_ylabel(f"density [1 / ({unit})]")
  above.set_ylim(bottom=0)
  if above.lines and len(values) <= 10:  # more would hide the curves, whose colours are below too
    above.legend()
  below.set_yticks(range(len(values)), list(values))
  below.set_ylim(len(values) - 0.4, -0.6)
  below.set_ylabel("quartiles")
  below.set_xlabel(f"{quantity} [{unit}]")
  _save(figure, path.with_name(path.name + ".png"))
  _save(figure, path.with_name(path.name + ".svg"))


def bandwidth(values_N: np.ndarray) -> float:
  """Silverman's h = 0.9 min(std, interquartile range / 1.34) N^(-1/5), 0 for equal values."""
  if len(values_N) < 2:
    return 0.0
  std = np.std(values_N, ddof=1)
  q25, q75 = np.quantile(values_N, (0.25, 0.75))
  return 0.9 * min(std, (q75 - q25) / 1.34 or std) * len(values_N) ** -0.2


def gaussian_density(values_N: np.ndarray, grid_G: np.ndarray, width: float) -> np.ndarray:
  """The mean of Gaussians of standard deviation `width` around the values, [G]."""
  density_G = np.zeros_like(grid_G)
  for part in np.array_split(values_N, -(-len(values_N) // 1000)):  # bounds the memory
    density_G += np.exp(-0.5 * ((grid_G[:, None] - part) / width) ** 2).sum(1)
  return density_G / (len(values_N) * width * np.sqrt(2 * np.pi))


def write_image_grid(path: Path, images: np.ndarray, num_columns: int) -> None:
  """Writes a PNG of images side by side, uint8 [N, H, W] or [N, H, W, 3], as large as they fit.

  Grey lines are between them, and white is where the last row has no more.
  """
  from matplotlib import image  # pylint: disable=import-outside-toplevel

  if images.ndim == 3:
    images = np.repeat(images[..., None], 3, -1)
  num_rows = -(-len(images) // num_columns)
  scale = max(1, _GRID_PIXELS // (num_columns * images.shape[2]))
  images = images.repeat(scale, axis=1).repeat(scale, axis=2)
  images = np.pad(images, ((0, num_rows * num_columns - len(images)), (0, 0), (0, 0), (0, 0)),
                  constant_values=255)
  images = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=128)
  _, height, width, _ = images.shape
  grid = images.reshape(num_rows, num_columns, height, width, 3).swapaxes(1, 2)
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.imsave(path, grid.reshape(num_rows * height, num_columns * width, 3))
