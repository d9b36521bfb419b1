"""Figures of measured values beside what a theorem says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
import textwrap
from typing import NamedTuple, Optional

from damcha_jax.training.workdir import writing


class Point(NamedTuple):
  x: float
  y: float
  spread: Optional[float] = None  # standard deviation over seeds


class Curve(NamedTuple):
  """Points by ascending x; a `theorem` is drawn as a dashed line, what is measured with markers."""

  points: Sequence[Point]
  theorem: bool = False


class Panel(NamedTuple):
  """One pair of axes; labels hold the unit in brackets where there is one."""

  title: str
  x_label: str
  y_label: str
  curves: Mapping[str, Curve]
  x_scale: str = "linear"
  y_scale: str = "linear"


def draw(path: Path, title: str, caption: str, panels: Sequence[Panel]) -> None:
  """Writes panels, two beside each other, with a title above and a caption below, as PNG and SVG.

  Args:
    path: of both files, without their suffixes.
    title: of the figure.
    caption: a sentence that says what is to be seen.
    panels: from left to right, and then below.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  columns = min(2, len(panels))  # more are too small to read where a page is narrow
  rows = -(-len(panels) // columns)
  width = max(7.0, 4.2 * columns)
  figure = Figure(figsize=(width, 1.2 + 3.6 * rows), layout="constrained")
  for place, panel in enumerate(panels, start=1):
    axes = figure.add_subplot(rows, columns, place)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale)
    for name, curve in panel.curves.items():
      x, y, spread = zip(*curve.points)
      style = dict(linestyle="--", zorder=3) if curve.theorem else dict(marker="o", markersize=4)
      axes.errorbar(x, y, yerr=[value or 0.0 for value in spread], capsize=2, label=name, **style)
    axes.legend(fontsize=8)
  figure.suptitle(title)
  figure.supxlabel(textwrap.fill(caption, int(14 * width)), fontsize=9)
  for suffix in (".png", ".svg"):
    file = path.with_name(path.name + suffix)
    with writing(file):
      file.parent.mkdir(parents=True, exist_ok=True)
      figure.savefig(file, dpi=150)
