"""The efficiency experiment's second part: how costs grow with T, D, H and N (Table 7, D.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
from pathlib import Path
from typing import Optional

from damcha_jax import reporting
from damcha_jax.analysis import complexity
from damcha_jax.analysis import scaling
from damcha_jax.analysis.closed_forms import Size
from damcha_jax.config.efficiency import EfficiencyConfig, ScalingConfig, ShapeConfig
from damcha_jax.reporting import Measurement
from experiments import contender
from experiments.contender import Contender

# Axis letter -> the sizes in ScalingConfig and the field of ShapeConfig that takes one of them.
AXES = {"T": ("context_lengths", "context_length"), "D": ("features", "features"),
        "H": ("num_heads", "num_heads"), "N": ("num_layers", "num_layers")}
GROWING = ("gflops", "peak_memory", "latency")


def formulas(config: EfficiencyConfig) -> Iterator[tuple[Measurement, Optional[float]]]:
  """What Table 7 and D.4 say without a measurement, and what is counted."""
  yield from _table7(config.scaling)
  yield from _parameters(config.scaling)
  yield from _generator_over_layers(config)


def is_point(row: reporting.Row) -> bool:
  """Whether a row is one of the sizes along an axis."""
  return "=" in (row["variant"] or "")


def plot(rows: Iterable[reporting.Row], directory: Path) -> None:
  """Writes `<metric>_<axis>.png`: one line per attention."""
  curves: dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]] = {}
  for row in filter(is_point, rows):
    if row["metric"] in GROWING:
      axis, _, size = row["variant"].partition("=")
      lines = curves.setdefault((row["metric"], row["unit"], axis), {})
      lines.setdefault(row["attention"], []).append((int(size), row["value"]))
  for (metric, unit, axis), lines in curves.items():
    reporting.plot_log_log(directory / f"{metric}_{axis}.png", lines, axis, f"{metric} ({unit})")


def _table7(sizes: ScalingConfig) -> Iterator[tuple[Measurement, None]]:
  """Are the paper's terms, with the constants that it leaves out, all that is computed?"""
  grid = [Size(*size) for size in
          itertools.product(sizes.context_lengths, sizes.features, sizes.num_heads)]
  for (attention, stage), fit in scaling.fit_table7(grid, sizes.shape.damcha_widths).items():
    yield _one(attention, "table7_residual", fit.residual, f"table7 {stage}",
               f"largest relative difference of the operations counted to {fit}"), None


def _parameters(sizes: ScalingConfig) -> Iterator[tuple[Measurement, float]]:
  shape, num_layers = sizes.shape, sizes.num_layers[-1]
  counts = scaling.count_parameters(_size(shape), shape.damcha_widths, num_layers)
  square = shape.features**2
  yield _one("mha", "params_per_layer", counts.mha, "d4", "without biases"), 4.0 * square
  yield _one("damcha", "params_per_layer", counts.damcha, "d4", "without biases"), 2.0 * square
  yield _one("damcha", "params_saved", counts.saved, "d4",
             f"by {num_layers} layers with a generator of {counts.generator} parameters; the "
             "paper: 2 N D^2 less those"), 2.0 * num_layers * square - counts.generator


def _generator_over_layers(config: EfficiencyConfig) -> Iterator[tuple[Measurement, float]]:
  """D.2 has f_theta run once whatever N: so it is if the stack shares its metrics."""
  for sharing in ("stack", "generator"):
    damcha = dataclasses.replace(config.damcha, sharing=sharing, metric="generated")
    own = dataclasses.replace(config, damcha=damcha)
    sizes = config.scaling.num_layers
    flops = []
    for num_layers in sizes:
      shape = dataclasses.replace(config.scaling.shape, num_layers=num_layers)
      operations = Contender(own, shape, "damcha").costs.operations
      # Under scan the layers' copy of the shared generator goes by its class name.
      parts = [complexity.below(operations, name) for name in ("generator", "MetricGenerator")]
      flops.append(sum(part.matmul for found in parts for part in found.values()))
    yield _one("damcha", "generator_gflops_exponent", complexity.log_log_slope(sizes, flops),
               f"in N, sharing {sharing}"), 0.0


def all_shapes(config: EfficiencyConfig) -> Iterator[ShapeConfig]:
  """Every size along every axis, and the shape itself; nothing where none is varied."""
  if config.scaling is not None:
    yield config.scaling.shape
    for axis in AXES:
      yield from _shapes(config.scaling, axis)


def _shapes(sizes: ScalingConfig, axis: str) -> Iterator[ShapeConfig]:
  plural, field = AXES[axis]
  for size in getattr(sizes, plural):
    yield dataclasses.replace(sizes.shape, variant=f"{axis}={size}", **{field: size})


def along(config: EfficiencyConfig, axis: str) -> Iterator[tuple[Measurement, Optional[float]]]:
  """Costs at the sizes of an axis, their exponents, and those of the paper's formula."""
  sizes = getattr(config.scaling, AXES[axis][0])
  values: dict[tuple[str, str], list[float]] = {}
  for shape in _shapes(config.scaling, axis):
    for one in contender.measure(config, shape, contender.make_contenders(config, shape)):
      yield one, None
      if one.metric in GROWING and one.seed in (None, config.seeds[0]):
        values.setdefault((one.attention, one.metric), []).append(one.value)
  for (attention, metric), costs in values.items():
    note = f"over {axis} from {min(sizes)} to {max(sizes)}"
    paper = None
    if metric == "gflops" and attention in ("mha", "damcha"):
      paper = _paper_exponent(config.scaling, axis, attention)
      note += "; the paper's formula with every constant at one"
    yield _one(attention, f"{metric}_exponent", complexity.log_log_slope(sizes, costs),
               f"in {axis}", note), paper


def _paper_exponent(sizes: ScalingConfig, axis: str, attention: str) -> float:
  plural, field = AXES[axis]
  if axis == "N":
    return 1.0
  shapes = [dataclasses.replace(sizes.shape, **{field: size}) for size in getattr(sizes, plural)]
  costs = [scaling.paper_flops(attention, _size(shape), shape.damcha_widths) for shape in shapes]
  return complexity.log_log_slope(getattr(sizes, plural), costs)


def _size(shape: ShapeConfig) -> Size:
  return Size(shape.context_length, shape.features, shape.num_heads)


def _one(attention: str, metric: str, value: float, variant: str,
         note: Optional[str] = None) -> Measurement:
  return Measurement(attention, "synthetic", "test", metric, value, "1", variant=variant, note=note)
