"""Figures of lines and heat maps side by side, for readers who have not seen the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
import textwrap
from typing import Any, NamedTuple, Optional

import numpy as np

from damcha_jax.training.workdir import writing

_WIDTH = 8.0  # inches: at 800 pixels, ten points are fourteen pixels
_MOST_WRITTEN = 36  # cells of a heat map whose values are written into them
# For what may be negative, what may not, and what spans orders of magnitude up to 1.
_COLOURS = {"signed": "RdBu_r", "amount": "viridis", "weight": "magma_r"}
_LEAST_WEIGHT = 1e-3


class Lines(NamedTuple):
  """Curves of (x, y) by name; labels hold the unit in brackets. `dashed` are for comparison."""

  title: str
  x_label: str
  y_label: str
  curves: Mapping[str, Sequence[tuple[float, float]]]
  dashed: tuple[str, ...] = ()
  y_scale: str = "linear"


class HeatMap(NamedTuple):
  """Values [rows, columns], the first row above; NaN stays white, or grey in a plain one.

  Attributes:
    title, x_label, y_label: of the axes; labels hold the unit in brackets.
    values: what is drawn.
    colours: 'signed' (red positive, blue negative), 'amount' or 'weight' (logarithmic up to 1).
    limit: the value of the last colour; None: the largest of `values`.
    unit: label of its own colour bar, unless the figure has one for all.
    x_names, y_names: of columns and rows, if they have any.
    plain: without any numbers along the axes.
  """

  title: str
  x_label: str
  y_label: str
  values: np.ndarray
  colours: str = "signed"
  limit: Optional[float] = None
  unit: str = ""
  x_names: Sequence[str] = ()
  y_names: Sequence[str] = ()
  plain: bool = False


def tiles(m_HKL: np.ndarray) -> np.ndarray:
  """The matrices of all heads side by side, head 0 top left, NaN between them."""
  num_heads, num_rows, num_columns = m_HKL.shape
  across = math.ceil(math.sqrt(num_heads))
  down = math.ceil(num_heads / across)
  gap = max(1, num_rows // 16)
  page = np.full((down * (num_rows + gap) - gap, across * (num_columns + gap) - gap), np.nan)
  for head, m_KL in enumerate(m_HKL):
    top, left = (head // across) * (num_rows + gap), (head % across) * (num_columns + gap)
    page[top:top + num_rows, left:left + num_columns] = m_KL
  return page


def draw(path: Path, title: str, caption: str, rows: Sequence[Sequence[Lines | HeatMap]],
         colour_bar: Optional[str] = None) -> None:
  """Writes panels in rows, with a title above and a caption below, as PNG and SVG.

  Args:
    path: of both files, without their suffixes.
    title: of the figure.
    caption: a sentence that says what is to be seen.
    rows: of equally many panels each.
    colour_bar: label of one bar for each row of heat maps, which then share their limit.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  num_columns = len(rows[0])
  height = (1.1 + 0.8 * _WIDTH / max(num_columns, 2)
            if any(isinstance(panel, Lines) for row in rows for panel in row)
            else 0.5 + 0.85 * _WIDTH / max(num_columns, 2))
  text = textwrap.fill(caption, 100)
  figure = Figure(figsize=(_WIDTH, height * len(rows) + 0.6 + 0.17 * text.count("\n")),
                  layout="constrained")
  grid = figure.subplots(len(rows), num_columns, squeeze=False)
  for axes_in_row, row in zip(grid, rows, strict=True):
    image = None
    for axes, panel in zip(axes_in_row, row, strict=True):
      axes.set_title(panel.title, fontsize=10, parse_math=False)
      axes.set_xlabel(panel.x_label, fontsize=9)
      axes.set_ylabel(panel.y_label, fontsize=9)
      if isinstance(panel, Lines):
        _draw_lines(axes, panel)
        continue
      image = _draw_heat_map(axes, panel, write=colour_bar is None)
      if colour_bar is None:
        figure.colorbar(image, ax=axes, label=panel.unit, shrink=0.8)
    if colour_bar is not None:
      figure.colorbar(image, ax=list(axes_in_row), label=colour_bar, shrink=0.9)
  _align(grid, rows)
  figure.suptitle(title, fontsize=11, parse_math=False)
  figure.supxlabel(text, fontsize=8.5)
  for suffix in (".png", ".svg"):
    file = path.with_name(path.name + suffix)
    with writing(file):
      file.parent.mkdir(parents=True, exist_ok=True)
      figure.savefig(file, dpi=150)


def _align(grid: np.ndarray, rows: Sequence[Sequence[Lines | HeatMap]]) -> None:
  """One y axis for lines of one quantity in a row, so that they can be compared."""
  for axes_in_row, row in zip(grid, rows):
    if len({panel.y_label for panel in row}) == 1 and all(isinstance(p, Lines) for p in row):
      limits = [axes.get_ylim() for axes in axes_in_row]
      for axes in axes_in_row:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _draw_lines(axes: Any, panel: Lines) -> None:
  from matplotlib.ticker import MaxNLocator  # pylint: disable=import-outside-toplevel

  for index, (name, points) in enumerate(panel.curves.items()):
    width = 1.2 + 2.8 * 0.35**index  # a curve is seen below those that are drawn over it
    axes.plot(*zip(*points), label=name, color=f"C{index % 10}", marker="o", markersize=2 + width,
              linewidth=width,
              linestyle="--" if name in panel.dashed or index >= 10 else "-")
  axes.set_yscale(panel.y_scale)
  places = {x for points in panel.curves.values() for x, _ in points}
  if len(places) == 1:
    axes.set_xticks(list(places))
  elif all(float(x).is_integer() for x in places):
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  axes.grid(alpha=0.3)
  if panel.curves:
    axes.legend(fontsize=7.5, ncols=1 + (len(panel.curves) > 6))


def _draw_heat_map(axes: Any, panel: HeatMap, write: bool) -> Any:
  from matplotlib.colors import LogNorm  # pylint: disable=import-outside-toplevel

  values = np.asarray(panel.values, np.float64)
  limit = panel.limit or float(np.nanmax(np.abs(values))) or 1.0
  if panel.colours == "weight":
    scale = dict(norm=LogNorm(_LEAST_WEIGHT, limit, clip=True))
    values = np.where(values > 0, values, np.nan)  # hidden from the query
  else:
    scale = dict(vmin=-limit if panel.colours == "signed" else 0.0, vmax=limit)
  image = axes.imshow(values, cmap=_COLOURS[panel.colours], interpolation="nearest",
                      aspect="equal" if values.shape[0] == values.shape[1] else "auto", **scale)
  for set_ticks, names in ((axes.set_xticks, panel.x_names), (axes.set_yticks, panel.y_names)):
    if names:
      every = math.ceil(len(names) / 12)
      set_ticks(range(0, len(names), every), names[::every])
  axes.tick_params(labelsize=8)
  if panel.plain:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor("0.6")  # of gaps, which no value has
  if write and values.size <= _MOST_WRITTEN:
    for row, column in np.ndindex(values.shape):
      shade = image.cmap(image.norm(values[row, column]))
      axes.text(column, row, f"{values[row, column]:.2g}", ha="center", va="center", fontsize=8,
                color="white" if np.dot(shade[:3], (0.3, 0.6, 0.1)) < 0.5 else "black")
  return image
