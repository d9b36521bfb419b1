"""Look-ups that take several head subspaces together: Section 5.6.

  python -m experiments.synthetic --config=configs/synthetic.py:cpu

How far each attention is from MHA as entanglement and feature dimension grow, beside the optimum,
which is known, and a control that is told how the subspaces belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
import statistics
from typing import Any, NamedTuple

from ml_collections import ConfigDict
import numpy as np

from damcha_jax import reporting
from damcha_jax.config import ConfigError, freeze
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.evaluation.intervals import half_width
from damcha_jax.reporting import Measurement
from damcha_jax.training import loop
from damcha_jax.training.synthetic import held_out, lane_name, synthetic_task
from damcha_jax.training.task import Task
from damcha_jax.training.workdir import Workdir
from experiments import command_line
from experiments import common

UNITS = {"accuracy": "1", "nats_per_query": "nats"}
OPTIMUM = "optimum"
LEVEL = "95%"


class Cell(NamedTuple):
  """Models that are trained together: one for each entanglement and seed."""

  task: str
  dimension: int
  attention: str

  def make(self, config: SyntheticConfig) -> Task:
    return synthetic_task(config, self.task, self.dimension, self.attention)

  def directory(self, workdir: Path) -> Path:
    return workdir / self.task / f"d{self.dimension}" / self.attention


class Point(NamedTuple):
  """Where an attention is measured."""

  task: str
  entanglement: float
  dimension: int

  @property
  def variant(self) -> str:
    return f"e{self.entanglement:g}_d{self.dimension}"


BySeed = dict[tuple[str, Point], list[float]]  # by attention and point


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Trains every cell in a folder of its own; writes `summary.json` and `figures/`."""
  config = freeze(config, SyntheticConfig)
  if "mha" not in config.attention_names:
    raise ConfigError("gaps are to mha; add it to config key 'attentions'")
  cells = [Cell(task, dimension, attention) for attention in config.attention_names
           for task in config.task_names for dimension in config.dimensions]
  for cell in cells:
    task = cell.make(config)
    if cell.dimension == config.dimensions[0]:  # the rest of what may be wrong is in all of them
      loop.check(task, config, seed=0)
  common.claim(Workdir(workdir), config, extensible=("attentions",))
  # The seeds are in the lanes; that of the run is the same for all.
  results = {cell: loop.train(cell.make(config), config, cell.directory(workdir), seed=0)
             for cell in cells}
  return summarize(config, workdir, results) if common.is_primary() else []


def summarize(config: SyntheticConfig, workdir: Path,
              results: Mapping[Cell, dict[str, Any]]) -> list[reporting.Row]:
  """Rows, table and figures of what is trained."""
  scores = {metric: _by_seed(config, results, metric) for metric in UNITS}
  gaps = {(attention, point): [a - b for a, b in zip(values, scores["accuracy"]["mha", point])]
          for (attention, point), values in scores["accuracy"].items() if attention != "mha"}
  optimum = {point: values for task in config.task_names for dimension in config.dimensions
             for point, values in _optimum(config, task, dimension)}
  rows = reporting.summary_rows(
      [*_measurements(config, scores, gaps), *_of_optimum(optimum), *_trends(config, gaps),
       *_costs(config, results)], False, lambda _: None)
  reporting.write_summary(workdir / "summary.json", config.experiment,
                          f"{config.name}:{config.size}", rows)
  for task in config.task_names:
    _plot(config, workdir / "figures", task, scores["accuracy"], gaps, optimum)
  of_main = lambda row: str(row["variant"]).endswith(f"d{config.dimension}")
  common.print_rows([row for row in rows if of_main(row) or "slope" in row["metric"]],
                    {"accuracy", "gap_to_mha", *SLOPES}, False, workdir)
  return rows


def _by_seed(config: SyntheticConfig, results: Mapping[Cell, dict[str, Any]],
             metric: str) -> BySeed:
  """The test metric of each seed's model."""
  return {(cell.attention, Point(cell.task, entanglement, cell.dimension)): [
      result["best"]["metrics"]["test"][f"{metric}_{lane_name(entanglement, seed)}"]
      for seed in config.seeds]
          for cell, result in results.items()
          for entanglement in config.entanglements_at(cell.dimension)}


def _optimum(config: SyntheticConfig, task: str,
             dimension: int) -> Iterator[tuple[Point, dict[str, float]]]:
  figures = held_out(config, task, dimension, "test").optimum()
  for index, entanglement in enumerate(config.entanglements_at(dimension)):
    yield Point(task, entanglement, dimension), {
        metric: float(values[index]) for metric, values in figures.items()}


def _measurements(config: SyntheticConfig, scores: Mapping[str, BySeed],
                  gaps: BySeed) -> Iterator[Measurement]:
  for metric, by_seed in [*scores.items(), ("gap_to_mha", gaps)]:
    for (attention, point), values in by_seed.items():
      yield from _with_interval(config, attention, point.task, point.variant, metric, values,
                                UNITS.get(metric, "1"))


def _with_interval(config: SyntheticConfig, attention: str, dataset: str, variant: str,
                   metric: str, values: Sequence[float], unit: str) -> Iterator[Measurement]:
  """A metric's value for each seed, and the half width of the interval of their mean."""
  for seed, value in zip(config.seeds, values, strict=True):
    yield Measurement(attention, dataset, "test", metric, value, unit, seed, variant)
  several = len(values) > 1
  yield Measurement(
      attention, dataset, "test", f"{metric}_ci95", half_width(values) if several else None, unit,
      variant=variant, note=f"the mean is within this at a confidence of {LEVEL}, by Student's t"
      if several else "one seed has no spread; name several")


def _of_optimum(optimum: Mapping[Point, dict[str, float]]) -> Iterator[Measurement]:
  for point, figures in optimum.items():
    for metric, value in figures.items():
      yield Measurement(OPTIMUM, point.task, "test", metric, value, UNITS.get(metric, "1"),
                        variant=point.variant)


# By metric: the points of a task along which the gap's slope is taken, and where each one is.
SLOPES: dict[str, tuple[Callable[..., list[Point]], Callable[[Point], float]]] = {
    "gap_slope_entanglement": (
        lambda config, task: [Point(task, entanglement, config.dimension)
                              for entanglement in config.entanglements],
        lambda point: point.entanglement),
    "gap_slope_log2_dimension": (
        lambda config, task: [Point(task, config.entanglements[-1], dimension)
                              for dimension in config.dimensions],
        lambda point: float(np.log2(point.dimension))),
}


def _trends(config: SyntheticConfig, gaps: BySeed) -> Iterator[Measurement]:
  """Least-squares slopes of each seed's gap: per unit of entanglement, or per doubling of D."""
  for metric, (points_of, place) in SLOPES.items():
    for task in config.task_names:
      points = points_of(config, task)
      if len(points) < 2:
        continue
      places = [place(point) for point in points]
      for attention in config.attention_names:
        if attention != "mha":
          by_seed = zip(*(gaps[attention, point] for point in points))
          slopes = [statistics.linear_regression(places, values).slope for values in by_seed]
          yield from _with_interval(config, attention, task, "trend", metric, slopes, "1")


def _costs(config: SyntheticConfig,
           results: Mapping[Cell, dict[str, Any]]) -> Iterator[Measurement]:
  """Parameters of one model; they do not depend on the entanglement."""
  for cell, result in results.items():
    num_lanes = len(config.entanglements_at(cell.dimension)) * len(config.seeds)
    yield Measurement(cell.attention, cell.task, "train", "num_params",
                      result["num_params"] / num_lanes, "1", variant=f"d{cell.dimension}")


def _plot(config: SyntheticConfig, figures: Path, task: str, accuracies: BySeed, gaps: BySeed,
          optimum: Mapping[Point, dict[str, float]]) -> None:
  for metric, (points_of, place) in SLOPES.items():
    points = points_of(config, task)
    axis = metric.rpartition("_")[2]
    quantity = {"entanglement": "entanglement [1]", "dimension": "features D [1]"}[axis]
    ticks = config.dimensions if axis == "dimension" else ()
    where = (lambda point: point.dimension) if ticks else place
    fixed = (f"entanglement {config.entanglements[-1]:g}" if ticks
             else f"{config.dimension} features")
    best = [(where(point), optimum[point]["accuracy"], 0.0) for point in points]
    for name, label, by_seed, reference in (
        ("accuracy", "accuracy [1]", accuracies, {OPTIMUM: best}),
        ("gap_to_mha", "accuracy less MHA's [1]", gaps, {})):
      curves = {attention: [(where(point), *_mean_and_half_width(by_seed[attention, point]))
                            for point in points]
                for attention in config.attention_names if (attention, points[0]) in by_seed}
      if curves:  # mha alone has no gap
        reporting.plot_intervals(
            figures / f"{task}-{name}-{axis}", {**curves, **reference},
            f"{task}, {fixed}; bars: {LEVEL} over {len(config.seeds)} seeds", quantity, label,
            ticks, config.attention_names)


def _mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
  return statistics.fmean(values), half_width(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "synthetic")
