"""The task of one cell of the synthetic study: all its (entanglement, seed) lanes at once.

A lane is a model and an optimizer of its own. All leaves have a leading axis of lanes, the loss is
the sum over lanes, and Adam treats every entry by itself, so that training together changes nothing
but the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
import optax

from damcha_jax.config import ConfigError
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.data.synthetic import HeldOut, Lookup, Lookups
from damcha_jax.models.lookup import (TOLD, ToldLookup, init_lookup, make_lookup, methods,
                                      matched_mlp_features)
from damcha_jax.training.decoder import parameter_groups
from damcha_jax.training.state import root_key
from damcha_jax.training.task import ParameterGroup, Task

PyTree = Any


def lookup_of(config: SyntheticConfig, task: str, dimension: int) -> Lookup:
  """The look-up that a cell is about."""
  section = config.lookup(task)
  return Lookup(task, config.model.num_heads, dimension, section.num_items, section.num_queries,
                section.num_classes, section.separation)


def held_out(config: SyntheticConfig, task: str, dimension: int, split: str) -> HeldOut:
  return HeldOut(lookup_of(config, task, dimension), config.entanglements_at(dimension),
                 len(config.seeds), config.num_held_out, split)


def lane_name(entanglement: float, seed: int) -> str:
  return f"e{entanglement:g}_seed{seed}"


def synthetic_task(config: SyntheticConfig, task: str, dimension: int, attention: str) -> Task:
  """The lanes of one attention on one task at one dimension.

  Lanes of one seed start from the same parameters and see the same draws, whatever their
  entanglement. The best checkpoint has the fewest nats per query over all lanes.

  Args:
    config: of the study.
    task: a name of a task.
    dimension: of the features.
    attention: one of `models.lookup.methods()`.

  Raises:
    ConfigError: an unknown attention, options that do not go together, or an attention with more
      parameters than the whole MHA model.
  """
  if attention not in methods():
    raise ConfigError(f"unknown attention '{attention}' in config key 'attentions'; choose from "
                      f"{', '.join(sorted(methods()))}")
  lookup = lookup_of(config, task, dimension)
  entanglements = config.entanglements_at(dimension)
  lanes = _Lanes(config, lookup, entanglements, attention)
  return Task(
      name=f"{task} d{dimension} {attention}",
      model=lanes.model,
      init_params=lanes.init_params,
      loss_fn=lanes.loss_and_sums,
      eval_loss_fn=lanes.sums_per_row,
      train_source=Lookups(lookup, entanglements, config.seeds, config.batch_size,
                           jax.process_index(), jax.process_count()),
      eval_sources={split: held_out(config, task, dimension, split)
                    for split in ("validation", "test")},
      metrics_of=metrics_of,
      selection_metric="nats_per_query",
      parameter_groups=(*parameter_groups(config), ParameterGroup("log_precision", decay=False)),
  )


def lane_task(config: SyntheticConfig, task: str, dimension: int, attention: str,
              entanglement: float, seed: int) -> Task:
  """One lane of `synthetic_task` as a task of its own, whose parameters have no axis of lanes.

  It is for looking into a model that was trained in its lane; `lane_of` gives its parameters.
  """
  lookup, strengths = lookup_of(config, task, dimension), (entanglement,)
  lane = _Lanes(dataclasses.replace(config, seeds=(seed,)), lookup, strengths, attention)
  whole = synthetic_task(config, task, dimension, attention)
  return dataclasses.replace(
      whole,
      init_params=lambda rng: jax.tree.map(lambda leaf: leaf[0], lane.init_params(rng)),
      loss_fn=lane.loss_of_one,
      eval_loss_fn=lambda params, batch: lane.sums_per_row(
          jax.tree.map(lambda leaf: leaf[None], params), batch),
      train_source=Lookups(lookup, strengths, (seed,), config.batch_size, jax.process_index(),
                           jax.process_count()),
      eval_sources={split: HeldOut(lookup, strengths, 1, config.num_held_out, split)
                    for split in whole.eval_sources})


def lane_of(config: SyntheticConfig, dimension: int, entanglement: float, seed: int,
            params: PyTree) -> PyTree:
  """The parameters of one lane."""
  lane = (config.entanglements_at(dimension).index(entanglement) * len(config.seeds)
          + config.seeds.index(seed))
  return jax.tree.map(lambda leaf: leaf[lane], params)


class _Lanes:
  """Models side by side."""

  def __init__(self, config: SyntheticConfig, lookup: Lookup, entanglements: tuple[float, ...],
               attention: str):
    self.names = [lane_name(entanglement, seed) for entanglement in entanglements
                  for seed in config.seeds]
    self._entanglements, self._seeds = entanglements, config.seeds
    self._prng_impl = config.prng_impl
    self._metrics_LDD = np.repeat(
        np.stack([lookup.metric(entanglement) for entanglement in entanglements]),
        len(config.seeds), axis=0).astype(np.float32)
    self._told = attention == TOLD
    self._dimension = lookup.dimension
    if self._told:
      self.model = ToldLookup(lookup.num_classes)
      return
    task = lookup.name
    try:
      mlp_features = matched_mlp_features(config, task, lookup.dimension, attention)
    except (OverflowError, ValueError) as error:  # what modules notice only when they see inputs
      raise ConfigError(f"{attention} cannot be built: {error}") from error
    if mlp_features < 1:
      raise ConfigError(
          f"attention '{attention}' alone has more parameters than the model with mha at dimension "
          f"{lookup.dimension}; raise model.mlp_features, or leave it out of 'attentions'")
    self.model = make_lookup(config, task, lookup.dimension, attention, mlp_features)

  def init_params(self, rng: jax.Array) -> PyTree:
    """Initial parameters; each lane's come from its own seed, not from the run's."""
    del rng
    # Computed at once rather than traced: to compile random numbers for the leaves of every cell
    # takes longer than to train it, and what is computed at once is compiled once for a shape.
    with jax.ensure_compile_time_eval():
      by_seed = {seed: self._init_lane(root_key(seed, self._prng_impl)) for seed in self._seeds}
      lanes = [by_seed[seed] for _ in self._entanglements for seed in self._seeds]
      return jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)

  def _init_lane(self, key: jax.Array) -> PyTree:
    if self._told:
      return {"log_precision": jnp.zeros(())}
    return init_lookup(self.model, key, self._dimension)

  def loss_and_sums(self, params: PyTree, batch: Mapping[str, jax.Array],
                    rng: Optional[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum over lanes of nats and auxiliary losses; sums by lane."""
    del rng  # nothing is dropped
    objective_L, (nats_LB, right_LB) = _each_lane(self._objective)(params, self._data(batch))
    sums = {name: rows_B.sum() for name, rows_B in self._named(nats_LB, right_LB).items()}
    return objective_L.sum(), {**sums, "weight": _num_queries(batch).sum()}

  def loss_of_one(self, params: PyTree, batch: Mapping[str, jax.Array],
                  rng: Optional[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`loss_and_sums` of the first lane, whose parameters these are, outside of any loop."""
    del rng
    objective, (nats_B, _) = self._objective(params, tuple(part[0] for part in self._data(batch)))
    return objective, {"nats": nats_B.sum(), "weight": _num_queries(batch).sum()}

  def sums_per_row(self, params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """nats and right answers of each lane, nats of all lanes, and the weight, [B] each."""
    _, (nats_LB, right_LB) = _each_lane(self._objective)(params, self._data(batch))
    return {**self._named(nats_LB, right_LB), "weight": _num_queries(batch)}

  def _data(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """What each lane reads, lanes first."""
    weights_LB = jnp.broadcast_to(batch["weights"], (len(self.names), len(batch["weights"])))
    return (*(batch[name].swapaxes(0, 1) for name in ("features", "symbols", "answers")),
            weights_LB, self._metrics_LDD)

  def _objective(self, params: PyTree, data: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    """One lane's loss times its number of queries; nats and right answers by row, [B]."""
    features_BTD, symbols_BN, answers_BQ, weights_B, metric_DD = data
    told = (metric_DD,) if self._told else ()
    logits_BQC, sown = self.model.apply({"params": params}, features_BTD, symbols_BN, *told,
                                        mutable=["losses"])
    nats_BQ = optax.softmax_cross_entropy_with_integer_labels(logits_BQC, answers_BQ)
    nats_B = weights_B * nats_BQ.sum(-1)
    right_B = weights_B * (logits_BQC.argmax(-1) == answers_BQ).sum(-1)
    auxiliary = sum(map(jnp.sum, jax.tree.leaves(sown)), jnp.zeros(()))
    return nats_B.sum() + weights_B.sum() * answers_BQ.shape[1] * auxiliary, (nats_B, right_B)

  def _named(self, nats_LB: jax.Array, right_LB: jax.Array) -> dict[str, jax.Array]:
    sums = {"nats": nats_LB.sum(0)}
    for index, name in enumerate(self.names):
      sums |= {f"nats_{name}": nats_LB[index], f"right_{name}": right_LB[index]}
    return sums


def _num_queries(batch: Mapping[str, jax.Array]) -> jax.Array:
  return batch["weights"] * batch["answers"].shape[-1]


def _each_lane(function: Callable[..., Any]) -> Callable[..., Any]:
  """`function(params, data) -> (scalar, aux)` of every lane; differentiable in the parameters.

  On CPUs, where products of many small matrices are slow, one lane comes after the other, and its
  gradient at once: a loop that kept what the gradient needs for later would take three times as
  long. Elsewhere all lanes are computed together.
  """
  def over_lanes(one_lane: Callable[..., Any], *arguments: Any) -> Any:
    if jax.default_backend() == "cpu":
      return jax.lax.map(lambda lane: one_lane(*lane), arguments)
    return jax.vmap(one_lane)(*arguments)

  @jax.custom_vjp
  def values(params, data):
    return over_lanes(function, params, data)

  def forward(params, data):
    return over_lanes(jax.value_and_grad(function, has_aux=True), params, data)

  def backward(grads, cotangents):
    scale_L, _ = cotangents
    scaled = lambda grad: grad * scale_L.reshape(-1, *[1] * (grad.ndim - 1)).astype(grad.dtype)
    return jax.tree.map(scaled, grads), None

  values.defvjp(forward, backward)
  return values


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
  """By lane, accuracy and nats per query; `nats_per_query` is the mean over lanes."""
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  lanes = [name.removeprefix("nats_") for name in means if name.startswith("nats_")]
  return {"nats_per_query": means["nats"] / len(lanes),
          **{f"nats_per_query_{lane}": means[f"nats_{lane}"] for lane in lanes},
          **{f"accuracy_{lane}": means[f"right_{lane}"] for lane in lanes}}
