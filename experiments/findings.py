"""What an analysis found out about one run."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional

import numpy as np

from damcha_jax.analysis import geometry
from damcha_jax.analysis.geometry import LayerGeometry
from damcha_jax.analysis.gradient_flow import Contributions, GradientNorms


class Snapshot(NamedTuple):
  """One checkpoint; step 0 is before training.

  Attributes:
    step: completed updates.
    geometry: of each layer's metrics; empty where there are none.
    block_energy: of each layer, [H, H]; empty where no single blocks are stored.
    drift: `block_drift` from the initial values, or empty.
    gradients: by layer and part.
    contributions: to the gradient of a generator that several layers share, if there is one.
  """

  step: int
  geometry: dict[int, LayerGeometry]
  block_energy: dict[int, np.ndarray]
  drift: dict[str, float]
  gradients: GradientNorms
  contributions: Optional[Contributions]


@dataclasses.dataclass(frozen=True)
class Findings:
  """One run.

  Attributes:
    name: of its files.
    attention, seed, dataset, variant: as in a summary's rows.
    snapshots: oldest first, and first of all step 0.
    weights: by layer, [H, T, S] for one held-out example at the last checkpoint.
    heads: those whose weights are drawn.
    absent: why something is not shown, by what it is.
  """

  name: str
  attention: str
  seed: int
  dataset: str
  variant: Optional[str]
  snapshots: list[Snapshot]
  weights: dict[int, np.ndarray]
  heads: tuple[int, ...]
  absent: dict[str, str]

  @property
  def title(self) -> str:
    where = f"{self.dataset} {self.variant}" if self.variant else self.dataset
    return f"{self.attention} on {where}, seed {self.seed}"

  def at(self, snapshot: Snapshot) -> str:
    """The variant of a snapshot's rows."""
    return ", ".join(filter(None, (self.variant, f"step {snapshot.step}")))

  @property
  def last(self) -> Snapshot:
    return self.snapshots[-1]

  @property
  def shown(self) -> list[Snapshot]:
    """The first and the last."""
    return self.snapshots[:1] + self.snapshots[1:][-1:]

  def distance(self, snapshot: Snapshot) -> dict[int, np.ndarray]:
    """By layer, how far each head's mean metric has moved from its initial value, [H]."""
    first = self.snapshots[0].geometry
    return {layer: geometry.relative_distance(first[layer].mean_HKK, one.mean_HKK)
            for layer, one in snapshot.geometry.items()}

  def geometry_numbers(self, snapshot: Snapshot) -> dict[int, dict[str, float]]:
    """By layer, means over heads, but for the largest rank."""
    distances = self.distance(snapshot)
    found = {}
    for layer, one in snapshot.geometry.items():
      found[layer] = {
          "metric_norm": float(one.norm_H.mean()),
          "metric_distance": float(distances[layer].mean()),
          "effective_rank": float(one.effective_rank_H.mean()),
          "rank_max": one.rank_max,
          "asymmetry": float(one.asymmetry_H.mean()),
          "adaptivity": one.adaptivity,
      }
      if layer in snapshot.block_energy:
        found[layer]["diagonal_share"] = geometry.diagonal_share(snapshot.block_energy[layer])
    return found

  def as_json(self) -> dict[str, Any]:
    """The numbers behind the figures, but for `arrays`."""
    return {"attention": self.attention, "seed": self.seed, "dataset": self.dataset,
            "variant": self.variant, "absent": self.absent,
            "snapshots": [self._snapshot(one) for one in self.snapshots]}

  def _snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
    distances = self.distance(snapshot)
    layers = {}
    for layer, one in snapshot.geometry.items():
      layers[layer] = {name: np.asarray(value).tolist() for name, value in one._asdict().items()
                       if name != "mean_HKK"}
      layers[layer]["distance_H"] = distances[layer].tolist()
      if layer in snapshot.block_energy:
        layers[layer]["block_energy_HH"] = snapshot.block_energy[layer].tolist()
    contributions = snapshot.contributions and {
        name: np.asarray(value).tolist()
        for name, value in snapshot.contributions._asdict().items()}
    return {"step": snapshot.step, "layers": layers, "drift": snapshot.drift,
            "gradients": snapshot.gradients._asdict(), "contributions": contributions}

  def arrays(self) -> dict[str, np.ndarray]:
    """Mean metrics [H, K, K] by step and layer, attention weights [H, T, S] by layer."""
    means = {f"mean_metric/step{one.step}/layer{layer}": found.mean_HKK.astype(np.float32)
             for one in self.snapshots for layer, found in one.geometry.items()}
    return {**means, **{f"attention_weights/layer{layer}": weights_HTS
                        for layer, weights_HTS in self.weights.items()}}
