"""The figures of an analysis, each with a sentence that says what is to be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from damcha_jax.analysis import plots
from damcha_jax.analysis.geometry import diagonal_share, LayerGeometry
from damcha_jax.analysis.gradient_flow import PARTS
from damcha_jax.analysis.plots import HeatMap, Lines
from experiments.findings import Findings, Snapshot

Item = TypeVar("Item")
_STEP = "training step [updates]"
_LAYER = "layer [0 is nearest the input]"
_GRADIENT = "norm of the gradient [nats]"  # all losses are in nats, parameters without unit
_SHARED = "generator, shared by all layers"
_MOST_PANELS = 4


class Figure(NamedTuple):
  title: str
  caption: str
  rows: list[list[Lines | HeatMap]]
  colour_bar: Optional[str] = None


def draw(directory: Path, found: Findings) -> dict[str, str]:
  """Writes every figure that the findings allow; captions by the name of the file."""
  captions = {}
  for name, make in FIGURES.items():
    figure = make(found)
    if figure is not None:
      file = f"{found.name}-{name}"
      plots.draw(directory / file, f"{figure.title}\n{found.title}", *figure[1:])
      captions[file] = figure.caption
  return captions


def spread(items: Sequence[Item], most: int) -> list[Item]:
  """At most so many, from all over, with both ends."""
  if len(items) <= most:
    return list(items)
  return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _evolution(found: Findings) -> Optional[Figure]:
  return _pages(found, spread(found.snapshots, _MOST_PANELS), lambda now, layer: (
      now.geometry[layer].mean_HKK), "Metrics over training and depth",
      "The mean metric m_i of each head (tiles, head 0 top left, then along the row; gaps are grey) over the contexts of held-out "
      "examples: entry (a, b) says how feature a of a query and feature b of a key in the head's "
      "slice count towards their similarity.", "entry of m_i [1]")


def _change(found: Findings) -> Optional[Figure]:
  first = found.snapshots[0]
  return _pages(found, spread(found.snapshots[1:], _MOST_PANELS), lambda now, layer: (
      now.geometry[layer].mean_HKK - first.geometry[layer].mean_HKK),
      "What training changed of the metrics",
      "The same mean metrics less what they were at first: what is learned, apart from the initial "
      "values that it started from.", "change of m_i [1]")


def _pages(found: Findings, snapshots: Sequence[Snapshot],
           values: Callable[[Snapshot, int], np.ndarray], title: str, caption: str,
           unit: str) -> Optional[Figure]:
  """Layers down, steps across."""
  layers = spread(sorted(found.last.geometry), _MOST_PANELS)
  if not layers or not snapshots:
    return None
  rows = []
  for layer in layers:
    pages = [values(now, layer) for now in snapshots]
    # A few outliers would leave the rest pale.
    limit = float(np.quantile(np.abs(pages), 0.995))
    rows.append([HeatMap(f"layer {layer}, step {now.step}", "", "", plots.tiles(page), limit=limit,
                         plain=True) for now, page in zip(snapshots, pages)])
  return Figure(title, caption, rows, unit)


def _movement(found: Findings) -> Optional[Figure]:
  return _over_training(found, "How far metrics move, and how they follow their context", (
      "Left: distance of the mean metric from its initial value, in units of that value's norm; "
      "right: the part of the spread of its entries that is due to the context (0: "
      "the metric ignores it, 1: nothing else matters)."), (
          ("Movement", "distance ||m - m_0|| / ||m_0|| [1]", "metric_distance"),
          ("Adaptivity", "adaptivity [1]", "adaptivity")))


def _geometry(found: Findings) -> Optional[Figure]:
  if not found.last.geometry:
    return None
  width = found.last.geometry[min(found.last.geometry)].mean_HKK.shape[-1]
  return _over_training(found, "Effective rank and asymmetry of the metrics", (
      f"Left: the exponential of the entropy of the singular values, {width} at most, the width of "
      "a head's metric; right: the antisymmetric part of the metric's norm (0: symmetric; "
      "independent entries have about 0.7). Means over heads and contexts."), (
          ("Effective rank", f"effective rank [of {width}]", "effective_rank"),
          ("Asymmetry", "||m - m^T|| / (2 ||m||) [1]", "asymmetry")))


def _over_training(found: Findings, title: str, caption: str,
                   panels: Sequence[tuple[str, str, str]]) -> Optional[Figure]:
  """One curve for each layer."""
  numbers = [(now.step, found.geometry_numbers(now)) for now in found.snapshots]
  if not numbers[-1][1]:
    return None
  curve = lambda layer, metric: [(step, by_layer[layer][metric]) for step, by_layer in numbers]
  return Figure(title, caption, [[
      Lines(name, _STEP, label,
            {f"layer {layer}": curve(layer, metric) for layer in numbers[-1][1]})
      for name, label, metric in panels]])


def _spectrum(found: Findings) -> Optional[Figure]:
  layers = spread(sorted(found.last.geometry), 5)
  if not layers:
    return None
  curves = lambda now: {f"layer {layer}": list(enumerate(now.geometry[layer].spectrum_K, start=1))
                        for layer in layers}
  return Figure(
      "Spectra of the metrics",
      "Singular values of the heads' metrics, largest first, means over heads and contexts: a "
      "curve that falls steeply is a metric that compares tokens along few directions.",
      [[Lines(f"step {now.step}", "index of the singular value [1]", "singular value [1]",
              curves(now), y_scale="log") for now in found.shown]])


def _heads(found: Findings) -> Optional[Figure]:
  layers = sorted(found.last.geometry)
  if not layers:
    return None
  matrix = lambda pick: np.array([pick(found.last.geometry[layer]) for layer in layers])
  width = found.last.geometry[layers[0]].mean_HKK.shape[-1]
  quantities: list[tuple[str, str, Callable[[LayerGeometry], np.ndarray]]] = [
      ("Effective rank", f"effective rank [of {width}]", lambda one: one.effective_rank_H),
      ("Asymmetry", "||m - m^T|| / (2 ||m||) [1]", lambda one: one.asymmetry_H),
  ]
  values = [("Movement", "||m - m_0|| / ||m_0|| [1]",
             np.array([found.distance(found.last)[layer] for layer in layers]))]
  values += [(name, unit, matrix(pick)) for name, unit, pick in quantities]
  return Figure(
      f"Heads at step {found.last.step}",
      "Distance from the initial metric, effective rank and asymmetry of every head's metric, "
      "layers from top to bottom.",
      [[HeatMap(name, "head", "" if column else _LAYER, of_heads, "amount", unit=unit,
                x_names=_numbers(of_heads.shape[1]), y_names=list(map(str, layers)))
        for column, (name, unit, of_heads) in enumerate(values)]])


def _blocks(found: Findings) -> Optional[Figure]:
  layers = spread(sorted(found.last.block_energy), 2)
  if not layers:
    return None
  shares = {(layer, now.step): now.block_energy[layer] / now.block_energy[layer].sum()
            for layer in layers for now in found.shown}
  limit = max(float(share_HH.max()) for share_HH in shares.values())
  names = _numbers(len(found.last.block_energy[layers[0]]))
  rows = [[HeatMap(
      f"layer {layer}, step {now.step}: diagonal {diagonal_share(shares[layer, now.step]):.1%}",
      "block column j", "block row i", shares[layer, now.step], "amount", limit,
      "share of the energy [1]", names, names) for now in found.shown] for layer in layers]
  return Figure(
      "Energy of the metric's blocks",
      f"Share of ||M||^2 in each block M_ij of heads i and j; where all blocks are alike, "
      f"{1 / len(names):.1%} is on the diagonal. Blocks of a row get equal gradients, so training "
      "does not tell them apart.", rows)


def _gradient_flow(found: Findings) -> Optional[Figure]:
  panels = []
  for now in found.shown:
    by_layer, shared = now.gradients.by_layer, now.gradients.outside.get("metric")
    curves = {part: [(layer, norms[part]) for layer, norms in by_layer.items()
                     if norms.get(part, 0) > 0] for part in PARTS}
    if shared:
      curves[_SHARED] = [(layer, shared) for layer in by_layer]
    panels.append(Lines(
        f"step {now.step}, loss {now.gradients.loss:.3f} nats", _LAYER, _GRADIENT,
        {part: curve for part, curve in curves.items() if curve}, (_SHARED,), "log"))
  if not any(panel.curves for panel in panels):
    return None
  return Figure(
      "Gradient flow",
      "Norm of the gradient of the mean training loss by layer and part of the layer; the gradient "
      "of a generator that all layers share is one number, drawn across them.", [panels])


def _sharing(found: Findings) -> Optional[Figure]:
  if found.last.contributions is None:
    return None
  panels = []
  for now in found.shown:
    own, total = now.contributions.norm_N, now.contributions.total
    panels.append(Lines(
        f"step {now.step}, alignment {now.contributions.alignment:.2f}", _LAYER,
        _GRADIENT, {"own copy of the layer": list(enumerate(own)),
                    _SHARED: [(layer, total) for layer in range(len(own))]}, (_SHARED,)))
  return Figure(
      "Gradient of the generator with and without sharing",
      "What a layer's own copy of the generator would get without sharing, and what the shared one "
      "gets, the sum over layers; alignment is the norm of that sum over the sum of the norms.",
      [panels])


def _cosines(found: Findings) -> Optional[Figure]:
  if found.last.contributions is None:
    return None
  names = _numbers(len(found.last.contributions.norm_N))
  return Figure(
      "Do the layers agree about the shared generator?",
      "Cosine between the layers' contributions to the gradient of the shared generator: 1, they "
      "pull the same way; 0, they do not interfere; -1, they cancel.",
      [[HeatMap(f"step {now.step}", "layer", "layer", now.contributions.cosine_NN, limit=1.0,
                unit="cosine [1]", x_names=names, y_names=names) for now in found.shown]])


def _attention(found: Findings) -> Optional[Figure]:
  if not found.weights:
    return None
  layers = list(found.weights)
  rows = [[HeatMap(f"layer {layer}, head {head}",
                   "key [token]" if layer == layers[-1] else "",
                   "query [token]" if head == found.heads[0] else "",
                   found.weights[layer][head], "weight", limit=1.0) for head in found.heads]
          for layer in layers]
  return Figure(
      f"Attention at step {found.last.step}",
      "How much each query (row) of one held-out example takes from each key (column); weights of "
      "a row sum to 1 for plain softmax attention. Colours are logarithmic from 0.001; white keys "
      "are hidden from the query or get nothing, or less where heads are mixed.", rows,
      "weight [1]")


def _numbers(count: int) -> list[str]:
  return [str(index) for index in range(count)]


FIGURES: dict[str, Callable[[Findings], Optional[Figure]]] = {
    "metric-evolution": _evolution, "metric-change": _change, "metric-movement": _movement,
    "metric-geometry": _geometry, "metric-spectrum": _spectrum, "metric-heads": _heads,
    "block-energy": _blocks, "gradient-flow": _gradient_flow, "gradient-sharing": _sharing,
    "gradient-cosine": _cosines, "attention": _attention,
}
