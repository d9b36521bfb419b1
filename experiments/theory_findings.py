"""What the theory experiment finds, part by part: functions `(config, seed) -> findings`."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis import complexity
from damcha_jax.analysis.closed_forms import Size
from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.config.theory import TheoryConfig
from damcha_jax.reporting import Measurement
from damcha_jax.theory import equivalence
from damcha_jax.theory import growth
from damcha_jax.theory import low_rank
from damcha_jax.theory import metric_risk
from damcha_jax.theory.metric_risk import Problem
from damcha_jax.theory.trained_generator import trained_excess
from damcha_jax.theory.trained_generator import Training
from experiments.common import Finding

# Risks that should be equal differ by the rounding of float64.
_ROUNDING = 1e-9


def embedding(config: TheoryConfig, seed: int) -> Iterator[Finding]:
  """C.1, Step 1, and the converse for the head-slice form."""
  num_instances = config.embedding.num_instances
  for shape in config.embedding.shapes:
    size = Size(*shape)
    for dtype in (jnp.float32, jnp.float64):
      # Accelerators round products of float32 unless told otherwise.
      with jax.enable_x64(dtype == jnp.float64), jax.default_matmul_precision("highest"):
        differences = {
            ("damcha_full_width", "converted"): equivalence.converted_difference,
            ("damcha_full_width", "constant metric"): equivalence.constant_metric_difference,
            ("damcha_head_slice", "as mha"): equivalence.head_slice_difference,
        }
        for (attention, how), difference in differences.items():
          found = difference(size, num_instances, seed, dtype)
          for metric, value in found._asdict().items():
            yield _one("c1_embedding", attention, f"{metric}_error", value, seed,
                       f"{how}, {jnp.dtype(dtype)}, {_name(size)}",
                       f"largest difference from mha, relative, of {num_instances} instances"), 0.0
  size = Size(*config.embedding.shapes[0])
  yield _one("c1_head_slice", "damcha_head_slice", "metric_residual",
             equivalence.slice_metric_residual(size, seed), seed, _name(size),
             f"constant metric; 1 - 1 / H^2 under a root is {math.sqrt(1 - size.num_heads**-2):.4f}"
             ), 0.0
  for length in config.embedding.slice_lengths:
    yield _one("c1_head_slice", "damcha_head_slice", "score_residual",
               equivalence.slice_score_residual(size._replace(length=length), seed), seed,
               f"T={length}", "with any metric for every query; the paper's C.1 says 0"), 0.0


def strictness(config: TheoryConfig, seed: int) -> Iterator[Finding]:
  """C.1, Step 2."""
  sizes = config.strictness
  metric_DD = np.random.default_rng(seed).normal(size=(sizes.features, sizes.features))
  metric_DD /= np.linalg.norm(metric_DD)
  for rank in sizes.ranks:
    left, right = low_rank.truncate(metric_DD, rank)
    trained = low_rank.trained_errors(metric_DD, rank, sizes.num_starts, sizes.num_steps,
                                      sizes.learning_rate, seed)
    errors = {"best_error": low_rank.truncation_error(metric_DD, rank),
              "svd_error": np.linalg.norm(metric_DD - left @ right.T),
              "trained_error": trained.min()}
    for name, value in errors.items():
      yield _one("c1_strictness", "low_rank_metric", name, float(value), seed, f"rank={rank}",
                 "relative Frobenius distance from a metric of full rank"), None
  size = Size(sizes.length, sizes.features, sizes.num_heads)
  with jax.default_matmul_precision("highest"):
    errors = equivalence.full_rank_errors(size, sizes.num_starts, seed, jnp.float32)
  for attention, value in zip(("damcha_full_width", "mha"), errors, strict=True):
    yield _one("c1_strictness", attention, "score_error", value, seed, _name(size),
               "of the scores of metrics of full rank"), 0.0 if attention != "mha" else None


def contexts(config: TheoryConfig, seed: int) -> Iterator[Finding]:
  """C.2: excess risks by number of contexts and rank, and by how much contexts differ."""
  sizes = config.contexts

  def problem(num_contexts: int, condition: float, heterogeneity: float) -> Problem:
    return metric_risk.make_problem(num_contexts, sizes.features, sizes.num_heads, heterogeneity,
                                    condition, seed)

  for condition in sizes.conditions:
    for num_contexts in sizes.num_contexts:
      made = problem(num_contexts, condition, sizes.heterogeneity)
      for rank in sizes.ranks:
        yield from _risks(made, rank, "c2_contexts", seed,
                          f"K={num_contexts}, rank={rank}, condition={condition:g}")
  for heterogeneity in sizes.heterogeneities:
    made = problem(sizes.num_contexts[-1], sizes.conditions[-1], heterogeneity)
    variant = f"heterogeneity={heterogeneity:g}"
    yield from _risks(made, sizes.features // sizes.num_heads, "c2_heterogeneity", seed, variant)
    full = metric_risk.excess_risk(made, metric_risk.best_static(made, sizes.features))
    yield _one("c2_heterogeneity", "static_full_rank", "excess_risk", full, seed, variant), None
    slices = metric_risk.excess_risk(made, metric_risk.best_head_slice(made))
    yield _one("c2_heterogeneity", "adaptive_head_slice", "excess_risk", slices, seed, variant,
               "the best block (i, i) for every context; the paper's C.2 says 0"), 0.0


def _risks(problem: Problem, rank: int, dataset: str, seed: int, variant: str) -> Iterator[Finding]:
  scale = metric_risk.excess_risk(problem, np.zeros_like(problem.mean_HDD))
  attentions = {
      "static": (metric_risk.best_static, metric_risk.static_bound),
      "adaptive_low_rank": (metric_risk.best_adaptive, metric_risk.adaptive_bound),
  }
  for attention, (best, bound_of) in attentions.items():
    excess, bound = metric_risk.excess_risk(problem, best(problem, rank)), bound_of(problem, rank)
    yield _one(dataset, attention, "excess_risk", excess, seed, variant), None
    yield _one(dataset, attention, "lower_bound", bound, seed, variant), None
    yield _one(dataset, attention, "below_bound", float(excess < bound - _ROUNDING * scale), seed,
               variant, "share of seeds whose excess risk is below the bound"), 0.0
  yield _one(dataset, "static", "bound_from_rank", metric_risk.rank_bound(problem, rank), seed,
             variant, "the part of the bound that is left with one context"), None


def generator(config: TheoryConfig, seed: int) -> Iterator[Finding]:
  """C.2, Assumption 4: what a trained generator reaches, by how much of the context it can see."""
  sizes, metrics = config.generator, config.contexts
  problem = metric_risk.make_problem(
      sizes.num_contexts, metrics.features, metrics.num_heads, metrics.heterogeneity, 1.0, seed)
  names = ("length", "noise", "widths", "num_steps", "batch_size", "learning_rate")
  training = Training(**{name: getattr(sizes, name) for name in names})
  for signal in sizes.signals:
    excess = trained_excess(problem, signal, training, sizes.num_held_out, seed)
    variant = f"signal={signal:g}"
    yield _one("c2_generator", "trained_generator", "excess_risk", excess.mean, seed, variant,
               "the best adaptive metric has 0"), None
    yield _one("c2_generator", "trained_generator", "excess_risk_upper",
               excess.mean + 1.645 * excess.standard_error, seed, variant,
               f"upper 95% limit over {sizes.num_held_out} sequences"), None
  for rank in (metrics.features, metrics.features // metrics.num_heads):
    variant = f"rank={rank}"
    static = metric_risk.excess_risk(problem, metric_risk.best_static(problem, rank))
    yield _one("c2_generator", "static", "excess_risk", static, seed, variant), None
    yield _one("c2_generator", "static", "lower_bound", metric_risk.static_bound(problem, rank),
               seed, variant), None


def softmax_growth(config: TheoryConfig, seed: int) -> Iterator[Finding]:
  """C.2, Assumption 3: the largest mu that holds at a distance R from the best metric."""
  sizes = config.growth
  directions = {
      "softmax": (growth.random_directions(sizes.num_directions, sizes.features, seed), False),
      "softmax_normalised": (growth.unseen_direction(sizes.features, seed), True),
  }
  for attention, (directions_UDD, normalised) in directions.items():
    excess = growth.softmax_excess(directions_UDD, sizes.radii, sizes.length, sizes.num_samples,
                                   normalised, seed)
    for radius, excess_U in zip(sizes.radii, excess.T, strict=True):
      yield _one("c2_growth", attention, "growth_constant", 2 * float(excess_U.min()) / radius**2,
                 seed, f"R={radius:g}", "least over directions, in nats per squared distance"), None
    if not normalised:
      for nearer, radius, before, now in zip(sizes.radii, sizes.radii[1:], excess.T, excess.T[1:]):
        yield _one("c2_growth", attention, "linear_growth",
                   float((now / before).min() * nearer / radius), seed, f"R={radius:g}",
                   "excess over that at the radius before, in proportion; at least 1 where the "
                   "risk is convex"), None


def full_width_costs(config: TheoryConfig) -> Iterator[Finding]:
  """D counts the head-slice form; the theorems of C are about the full-width one."""
  shape = config.costs.scaling.shape
  inputs = jax.ShapeDtypeStruct((1, shape.context_length, shape.features), jnp.float32)
  attentions = {
      "mha": MultiHeadAttention(shape.num_heads, causal=False),
      "damcha_head_slice": DamchaAttention(shape.num_heads, causal=False, context="sequence"),
      "damcha_full_width": DamchaAttention(shape.num_heads, causal=False, context="sequence",
                                           form="full_width", static_part=False),
  }
  for attention, module in attentions.items():
    costs = complexity.model_costs(module, inputs)
    note = "one layer and its generator, of the module's default widths"
    variant = _name(Size(shape.context_length, shape.features, shape.num_heads))
    for metric, value, unit in (("gflops", costs.total.matmul / 1e9, "GFLOP"),
                                ("num_params", float(costs.num_params), "1")):
      one = _one("d_forms", attention, metric, value, None, variant, note)
      yield dataclasses.replace(one, unit=unit), None


def _name(size: Size) -> str:
  return f"T={size.length}, D={size.features}, H={size.num_heads}"


def _one(dataset: str, attention: str, metric: str, value: float, seed: Optional[int],
         variant: str, note: Optional[str] = None) -> Measurement:
  unit = "nats" if metric == "growth_constant" else "1"
  return Measurement(attention, dataset, "test", metric, value, unit, seed, variant, note)
