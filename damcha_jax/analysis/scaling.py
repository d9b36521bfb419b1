"""The paper's Table 7 and Appendix D.4 against what the modules compute and hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis import complexity
from damcha_jax.analysis.closed_forms import Size
from damcha_jax.analysis.complexity import Operations
from damcha_jax.attention import core
from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.metric.blocks import row_sum
from damcha_jax.metric.application import apply_metric
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.models.stack import BlockStack

# Terms of the paper's O(.), by attention and stage; `w` is the generator's width, `p` its depth.
Term = Callable[[Size, int, int], float]
_TERMS: dict[str, Term] = {
    "T D": lambda size, w, p: size.length * size.features,
    "T D^2": lambda size, w, p: size.length * size.features**2,
    "T D^2 / H": lambda size, w, p: size.length * size.features**2 / size.num_heads,
    "T^2 D": lambda size, w, p: size.length**2 * size.features,
    "H T^2": lambda size, w, p: size.num_heads * size.length**2,
    "D^2": lambda size, w, p: size.features**2,
    "P w^2": lambda size, w, p: p * w**2,
    "w D^2": lambda size, w, p: w * size.features**2,
}
TABLE7: dict[tuple[str, str], tuple[str, ...]] = {
    ("mha", "qk_projections"): ("T D^2",),
    ("mha", "scores"): ("T D^2", "T^2 D"),
    ("mha", "softmax"): ("H T^2",),
    ("mha", "values_and_output"): ("T D^2", "T^2 D"),
    ("mha", "total"): ("T D^2", "T^2 D"),
    ("damcha", "generator"): ("T D", "P w^2", "w D^2"),
    ("damcha", "row_sum"): ("D^2",),
    ("damcha", "scores"): ("T D^2 / H", "T^2 D"),
    ("damcha", "softmax"): ("H T^2",),
    ("damcha", "values_and_output"): ("T D^2", "T^2 D"),
    ("damcha", "total"): ("T D^2", "T D^2 / H", "T^2 D"),
}


class Fit(NamedTuple):
  """Operations as a combination of a formula's terms."""

  constants: dict[str, float]
  residual: float  # largest relative difference; 0 where the formula says all there is

  def __str__(self) -> str:
    return " + ".join(f"{constant:.4g} {term}" for term, constant in self.constants.items())


def fit_table7(
    sizes: Sequence[Size], widths: tuple[int, ...]
) -> dict[tuple[str, str], Fit]:
  """The constants that the paper's Table 7 suppresses, fitted to operations counted at `sizes`.

  Args:
    sizes: of one layer; they should differ in T, D and H.
    widths: hidden widths of the generator, all equal.
  """
  stages = [{**_mha_stages(size), **_damcha_stages(size, widths)} for size in sizes]
  depth = len(widths) + 1
  return {
      key: _fit([stage[key] for stage in stages], sizes, terms, widths[0], depth)
      for key, terms in TABLE7.items()
  }


def paper_flops(attention: str, size: Size, widths: tuple[int, ...]) -> float:
  """Table 7's total with all the constants that it suppresses at one."""
  return sum(_TERMS[term](size, widths[0], len(widths) + 1)
             for term in TABLE7[attention, "total"])


class ParameterCounts(NamedTuple):
  """Appendix D.4, biases left out: an attention's, the generator's, and those a stack saves."""

  mha: int
  damcha: int
  generator: int
  saved: int


def count_parameters(
    size: Size, widths: tuple[int, ...], num_layers: int
) -> ParameterCounts:
  """Counts, in built stacks, what D.4 says is 4 D^2, 2 D^2, Theta_f and 2 N D^2 - Theta_f."""
  H = size.num_heads
  make_generator = functools.partial(MetricGenerator, H, widths, parameterization="blocks")
  mha = functools.partial(MultiHeadAttention, num_heads=H, use_bias=False)
  damcha = functools.partial(DamchaAttention, num_heads=H, use_bias=False)
  stack = functools.partial(BlockStack, num_layers, mlp_features=1, scan_layers=True)
  with_mha = complexity.model_costs(stack(mha), _inputs(size))
  with_damcha = complexity.model_costs(stack(damcha, generator=make_generator), _inputs(size))
  per_layer = lambda costs: (
      sum(complexity.below(costs.params, "attention").values()) // num_layers
  )
  return ParameterCounts(
      per_layer(with_mha),
      per_layer(with_damcha),
      sum(complexity.below(with_damcha.params, "generator").values()),
      with_mha.num_params - with_damcha.num_params,
  )


def _fit(
    counted: list[int], sizes: Sequence[Size], terms: tuple[str, ...], width: int, depth: int
) -> Fit:
  values = np.array([[_TERMS[term](size, width, depth) for term in terms] for size in sizes])
  target = np.array(counted, float)
  # Relative errors count, or the largest size would decide alone.
  constants, *_ = np.linalg.lstsq(values / target[:, None], np.ones(len(target)))
  residual = np.abs(values @ constants / target - 1).max()
  return Fit(dict(zip(terms, constants.tolist())), float(residual))


def _mha_stages(size: Size) -> dict[tuple[str, str], int]:
  model = MultiHeadAttention(num_heads=size.num_heads, use_bias=False)
  operations = complexity.model_costs(model, _inputs(size)).operations
  total = _matmul(operations)
  projections = sum(_matmul(complexity.below(operations, name)) for name in ("query", "key"))
  scores = projections + _dot_products(size)
  return {
      ("mha", "qk_projections"): projections,
      ("mha", "scores"): scores,
      ("mha", "softmax"): _softmax(size),
      ("mha", "values_and_output"): total - scores,
      ("mha", "total"): total,
  }


def _damcha_stages(size: Size, widths: tuple[int, ...]) -> dict[tuple[str, str], int]:
  generator = MetricGenerator(
      size.num_heads, widths, parameterization="blocks", fuse_rowsum=False
  )
  model = DamchaAttention(
      num_heads=size.num_heads, use_bias=False, generator=generator, context="sequence",
      causal=False,
  )
  operations = complexity.model_costs(model, _inputs(size)).operations
  context = complexity.below(operations, "context")
  generated = _matmul(complexity.below(operations, "generator"))
  total = _matmul(operations) - generated - _matmul(context)
  head_features = size.features // size.num_heads
  blocks = _shape(size.num_heads, head_features, size.num_heads, head_features)
  metric = _shape(size.num_heads, head_features, head_features)
  slices = _shape(1, size.length, size.num_heads, head_features)
  applied = _total(lambda x_BTHK, metric: apply_metric(x_BTHK, metric, None), slices, metric)
  scores = applied.matmul + _dot_products(size)
  return {
      ("damcha", "generator"): generated + sum(map(sum, context.values())),
      ("damcha", "row_sum"): _total(row_sum, blocks).elementwise,
      ("damcha", "scores"): scores,
      ("damcha", "softmax"): _softmax(size),
      ("damcha", "values_and_output"): total - scores,
      ("damcha", "total"): total,
  }


def _dot_products(size: Size) -> int:
  slices = _shape(1, size.length, size.num_heads, size.features // size.num_heads)
  weights = lambda query, key: core.attention_weights(query, key, scale=1.0)
  return _total(weights, slices, slices).matmul


def _softmax(size: Size) -> int:
  scores = _shape(1, size.num_heads, size.length, size.length)
  return _total(lambda scores: core.masked_softmax(scores, None), scores).elementwise


def _total(function: Callable[..., jax.Array], *inputs: jax.ShapeDtypeStruct) -> Operations:
  counted = complexity.operations_by_module(jax.make_jaxpr(function)(*inputs).jaxpr)
  return sum(counted.values(), Operations(0, 0))


def _matmul(operations: dict[str, Operations]) -> int:
  return sum(part.matmul for part in operations.values())


def _inputs(size: Size) -> jax.ShapeDtypeStruct:
  return _shape(1, size.length, size.features)


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)
