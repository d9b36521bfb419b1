"""The theory experiment's figures, from the rows of its summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from damcha_jax.analysis import closed_forms
from damcha_jax.analysis.closed_forms import Size
from damcha_jax.config.efficiency import ShapeConfig
from damcha_jax.config.theory import TheoryConfig
from damcha_jax.reporting import Row
from damcha_jax.theory import figures
from damcha_jax.theory.figures import Curve
from damcha_jax.theory.figures import Panel
from damcha_jax.theory.figures import Point

Figure = tuple[str, str, list[Panel]]  # title, caption and panels
_RISK = "excess risk [squared score]"


def draw(rows: Sequence[Row], config: TheoryConfig, directory: Path) -> None:
  """Writes the figures of every part into `directory`."""
  drawings = {"strictness": _strictness, "head_slice": _head_slice, "excess_risk": _excess_risk,
              "heterogeneity": _heterogeneity, "generator": _generator, "growth": _growth,
              "costs": _costs}
  for name, drawing in drawings.items():
    figures.draw(directory / name, *drawing(rows, config))


def _curve(rows: Sequence[Row], dataset: str, attention: str, metric: str, along: str,
           *within: str) -> Curve:
  """The rows whose variant has `along`=x and every entry `within`."""
  points = []
  for row in rows:
    if (row["dataset"], row["attention"], row["metric"]) == (dataset, attention, metric):
      entries = (row["variant"] or "").split(", ")
      xs = [float(entry.partition("=")[2]) for entry in entries if entry.startswith(f"{along}=")]
      if xs and set(within) <= set(entries):
        points.append(Point(xs[0], row["value"], row["spread"]))
  return Curve(sorted(points), theorem=metric in ("best_error", "lower_bound"))


def _strictness(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  curve = lambda metric: _curve(rows, "c1_strictness", "low_rank_metric", metric, "rank")
  width = config.strictness.features // config.strictness.num_heads
  return ("What a metric of lower rank misses (C.1)",
          f"A head of width {width} has rank {width} at most, and no training takes it below the "
          "singular values that are left over.",
          [Panel("Random metrics of full rank", "rank of the metric [1]",
                 "distance, relative Frobenius norm [1]",
                 {"trained, least of its starts": curve("trained_error"),
                  "least possible (Eckart-Young)": curve("best_error")})])


def _head_slice(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  _, features, num_heads = config.embedding.shapes[0]
  curve = _curve(rows, "c1_head_slice", "damcha_head_slice", "score_residual", "T")
  return ("Multi-head scores that the head-slice form cannot have (C.1)",
          f"Beyond {features // num_heads + 1} tokens, one more than a slice is wide, no generator "
          "gives head slices the scores of multi-head attention.",
          [Panel(f"D={features}, H={num_heads}", "length T [tokens]",
                 "share of the scores missed, Frobenius norm [1]",
                 {"best metric for every query": curve}, x_scale="log")])


def _excess_risk(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  condition = f"condition={config.contexts.conditions[-1]:g}"
  panels = []
  for num_contexts in config.contexts.num_contexts:
    curves = {}
    for attention, name in (("static", "static"), ("adaptive_low_rank", "adaptive")):
      for metric, label in (("excess_risk", "best"), ("lower_bound", "bound")):
        curves[f"{name}, {label}"] = _curve(
            rows, "c2_contexts", attention, metric, "rank", f"K={num_contexts}", condition)
    panels.append(Panel(f"K={num_contexts}", "rank of the metrics [1]", _RISK, curves))
  return ("Excess risk of the best metrics of a rank, and the theorem's lower bound (C.2)",
          "No static metric is below the bound; what is left of it with one context (K=1) is due "
          "to rank alone, and at full rank to adaptivity alone.", panels)


def _heterogeneity(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  names = {"static": "static, rank of a head (MHA)", "static_full_rank": "static, full rank",
           "adaptive_low_rank": "adaptive, rank of a head", "adaptive_head_slice":
           "adaptive, head slices (DAMCHA as built)"}
  curves = {name: _curve(rows, "c2_heterogeneity", attention, "excess_risk", "heterogeneity")
            for attention, name in names.items()}
  curves["bound of MHA"] = _curve(rows, "c2_heterogeneity", "static", "lower_bound",
                                  "heterogeneity")
  return ("Excess risk by how much contexts differ (C.2)",
          "Metrics of full width and rank that adapt have zero, as the theorem says of DAMCHA; "
          "head slices lack all blocks of a metric but one, and adapting does not make up for it.",
          [Panel(f"K={config.contexts.num_contexts[-1]}", "heterogeneity of the metrics [1]", _RISK,
                 curves)])


def _generator(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  curves = {"trained generator": _curve(rows, "c2_generator", "trained_generator", "excess_risk",
                                        "signal")}
  ranks = {row["variant"]: row for row in rows
           if (row["dataset"], row["metric"]) == ("c2_generator", "lower_bound")}
  for rank, row in ranks.items():
    points = [Point(signal, row["value"]) for signal in sorted(config.generator.signals)]
    curves[f"bound of static, {rank}"] = Curve(points, theorem=True)
  return ("What a trained generator reaches (C.2, Assumption 4)",
          "The generator reads the mean of the tokens: where contexts do not show in it, adapting "
          "gains nothing over a static metric of full rank.",
          [Panel(f"K={config.generator.num_contexts}", "signal of the context in the mean "
                 "[standard deviations]", _RISK, curves)])


def _growth(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  del config
  curve = _curve(rows, "c2_growth", "softmax", "growth_constant", "R")
  return ("Assumption 3 through a softmax (C.2)",
          "A quadratic lower bound would need a constant; the likelihood of attention weights "
          "grows linearly, so the largest mu falls like 1/R.",
          [Panel("Excess log-likelihood risk", "distance R from the best metric [1]",
                 "2 excess / R^2 [nats]", {"least over directions": curve}, "log", "log")])


def _costs(rows: Sequence[Row], config: TheoryConfig) -> Figure:
  shape = config.costs.scaling.shape
  panels = []
  for metric, label in (("gflops", "operations [GFLOP]"), ("latency", "forward pass [ms]")):
    curves = {}
    for attention in ("mha", "damcha"):
      measured = _curve(rows, shape.dataset, attention, metric, "T")
      if not measured.points:  # a size that measures nothing
        continue
      curves[attention] = measured
      gflops = [_formula(attention, int(point.x), shape) for point in measured.points]
      scale = measured.points[-1].y / gflops[-1] if metric == "latency" else 1.0
      curves[f"{attention}, formula"] = Curve(
          [Point(point.x, scale * value)
           for point, value in zip(measured.points, gflops, strict=True)], theorem=True)
    if curves:
      panels.append(Panel(f"D={shape.features}, H={shape.num_heads}", "length T [tokens]", label,
                          curves, "log", "log"))
  return ("One layer's costs beside their formulas (D)",
          "Operations are those of Table 7 with its constants; times, beside the same formulas "
          "scaled to the longest sequence, follow them only roughly.", panels)


def _formula(attention: str, length: int, shape: ShapeConfig) -> float:
  """GFLOPs by Table 7, with the constants that it leaves out and the generator."""
  size = Size(length, shape.features, shape.num_heads)
  layer = closed_forms.FORMS[attention](size)
  if attention == "damcha":
    layer += closed_forms.generator(size, shape.damcha_widths)
  return closed_forms.stack(layer, size, shape.num_layers, shape.mlp_features).flops / 1e9
