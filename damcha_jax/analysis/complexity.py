"""What a model costs: parameters, operations, memory and time, from the program JAX makes of it.

Operations are counted in the jaxpr, so they are those of the modules that are built, and by Flax
module, whose names the jaxpr carries in each equation's name stack. A multiply-add is 2 FLOPs.
`closed_forms` has the formulas to hold them against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import math
import statistics
import time
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax.extend import core as jax_core
import numpy as np

from damcha_jax.attention.core import whole_scores

Array = jax.Array

# One operation per entry of the result, whatever it costs in instructions.
_ELEMENTWISE = frozenset(
    "abs add add_any cbrt ceil clamp cos cosh cumlogsumexp cumsum div erf erf_inv exp exp2 expm1"
    " floor integer_pow log log1p logistic max min mul neg pow rem round rsqrt sign sin sinh sqrt"
    " square sub tan tanh".split()
)
# One operation per entry of the operand.
_REDUCTIONS = frozenset("argmax argmin reduce_max reduce_min reduce_prod reduce_sum".split())


class Operations(NamedTuple):
  """Numbers of floating-point operations."""

  matmul: int  # 2 * multiply-adds of matrix products and convolutions: what GFLOPs mean here
  elementwise: int  # arithmetic besides: one per result, or per summand of a reduction

  def __add__(self, other: Operations) -> Operations:
    return Operations(self.matmul + other.matmul, self.elementwise + other.elementwise)

  def times(self, factor: int) -> Operations:
    return Operations(self.matmul * factor, self.elementwise * factor)


class Costs(NamedTuple):
  """Parameters and operations of a call of a model, by module path as in 'layer_0/attention'."""

  params: dict[str, int]
  operations: dict[str, Operations]

  @property
  def num_params(self) -> int:
    return sum(self.params.values())

  @property
  def total(self) -> Operations:
    return sum(self.operations.values(), Operations(0, 0))


def model_costs(model: nn.Module, *inputs: Any, params: Any = None) -> Costs:
  """Costs of `model(*inputs)`; nothing is computed, so `inputs` may be shapes alone.

  Module paths start below the model itself, '' being what it does in its own name. `params` are the
  model's parameters or their shapes, if at hand.
  """
  params = param_shapes(model, *inputs) if params is None else params
  apply = lambda params, *inputs: model.apply({"params": params}, *inputs)
  return Costs(params_by_module(params), operations_by_module(trace(apply, params, *inputs)))


def trace(function: Callable[..., Any], *inputs: Any) -> Any:
  """The jaxpr of `function(*inputs)`, in which causal attention makes all scores.

  That is how operations are counted by convention, though half of these are never needed.
  """
  anew = lambda *inputs: function(*inputs)  # of `function` JAX may hold a trace with fewer scores
  with whole_scores():
    return jax.make_jaxpr(anew)(*inputs).jaxpr


def param_shapes(model: nn.Module, *inputs: Any) -> Any:
  """The model's parameters as shapes, without logical axis names."""
  init = lambda *inputs: model.init(jax.random.key(0), *inputs)
  return nn.unbox(jax.eval_shape(init, *inputs)).get("params", {})


def params_by_module(params: Any) -> dict[str, int]:
  """Numbers of parameters by the module that owns them; parameters shared by modules count once."""
  counts: dict[str, int] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    module = "/".join(entry.key for entry in path[:-1])
    counts[module] = counts.get(module, 0) + math.prod(leaf.shape)
  return counts


def below(counts: Mapping[str, Any], module: str) -> dict[str, Any]:
  """The part of counts by module that belongs to modules of this name and those inside them."""
  return {path: count for path, count in counts.items() if module in path.split("/")}


def matmul_flops(jaxpr: Any) -> int:
  """`2 * multiply-adds` of every matrix product in a jaxpr, loop bodies times their trip count."""
  return sum(operations.matmul for operations in operations_by_module(jaxpr).values())


def operations_by_module(jaxpr: Any) -> dict[str, Operations]:
  """Operations of a jaxpr by the Flax module they stand in, loop bodies times their trip count.

  The body of a `while` counts once, for its trip count is not in the program; of the branches of a
  `cond`, the one with most matrix products counts.
  """
  return {module: operations for module, operations in _count(jaxpr, "").items() if any(operations)}


def _count(jaxpr: Any, scope: str) -> dict[str, Operations]:
  counts: dict[str, Operations] = {}
  for equation in jaxpr.eqns:
    inside = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
    own = _operations(equation)
    if own is not None:
      parts = [{_module_path(inside): own}]
    else:
      parts = [_count(body, inside) for body in _sub_jaxprs(equation)]
      if equation.primitive.name == "cond":
        parts = [max(parts, key=lambda part: sum(part.values(), Operations(0, 0)))]
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    for part in parts:
      for module, operations in part.items():
        counts[module] = counts.get(module, Operations(0, 0)) + operations.times(times)
  return counts


def _operations(equation: Any) -> Operations | None:
  """Operations of an equation without a body that counts; None where the body does."""
  name = equation.primitive.name
  inputs = [var.aval.shape for var in equation.invars if hasattr(var.aval, "shape")]
  outputs = [var.aval for var in equation.outvars]
  if name in ("dot_general", "ragged_dot_general"):
    if name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
    else:  # every row meets the matrix of its own group
      (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    depth = math.prod(inputs[0][axis] for axis in contracted)
    return Operations(2 * depth * outputs[0].size, 0)
  if name == "conv_general_dilated":
    layout = equation.params["dimension_numbers"].rhs_spec
    per_output = math.prod(inputs[1]) // inputs[1][layout[0]]
    return Operations(2 * per_output * outputs[0].size, 0)
  if name.startswith("dot_product_attention_fwd"):  # cuDNN; [B,T,H,K] and [B,S,H,K]
    return Operations(4 * math.prod(inputs[0]) * inputs[1][1], 0)
  if _sub_jaxprs(equation):
    return None
  if not outputs or not np.issubdtype(outputs[0].dtype, np.inexact):
    return Operations(0, 0)
  if name in _REDUCTIONS:
    return Operations(0, math.prod(inputs[0]))
  return Operations(0, outputs[0].size if name in _ELEMENTWISE else 0)


def _sub_jaxprs(equation: Any) -> list[Any]:
  leaves = jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda value: isinstance(value, (jax_core.Jaxpr, jax_core.ClosedJaxpr)))
  # One branch per leaf: from jax 0.12 on a closed jaxpr is an instance of Jaxpr as well.
  return [leaf.jaxpr if isinstance(leaf, jax_core.ClosedJaxpr) else leaf for leaf in leaves
          if isinstance(leaf, (jax_core.Jaxpr, jax_core.ClosedJaxpr))]


def _module_path(name_stack: str) -> str:
  """'Stack/layer_0/layer_0.attend/attention/bthk,bshk->bhts' -> 'layer_0/attention'.

  Flax names a module's `__call__` after the module and other methods 'module.method'; einsum adds
  its equation. The first entry is the model itself.
  """
  names = [name for name in name_stack.split("/") if "." not in name and "->" not in name]
  return "/".join(names[1:])


def peak_bytes(compiled: Any) -> int:
  """Bytes that a compiled program needs at once: arguments, results and temporaries."""
  stats = compiled.memory_analysis()
  return (stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
          - stats.alias_size_in_bytes)


def interleaved_seconds(
    functions: Mapping[str, Callable[[], Any]], num_rounds: int
) -> dict[str, list[float]]:
  """Times each function once per round, in an order that turns from round to round.

  Slow drifts of the machine (clock speed, other work) then fall on all alike. Each is called once
  before, to compile.

  Returns:
    `num_rounds` times by name, in seconds; the i-th of each belong to one round.
  """
  for function in functions.values():
    jax.block_until_ready(function())
  names = list(functions)
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for index in range(num_rounds):
    turn = index % len(names)
    for name in names[turn:] + names[:turn]:
      start = time.perf_counter()
      jax.block_until_ready(functions[name]())
      seconds[name].append(time.perf_counter() - start)
  return seconds


def median_ratio(seconds: list[float], reference: list[float]) -> float:
  """The median over rounds of one function's time to another's in the same round."""
  return statistics.median(mine / other for mine, other in zip(seconds, reference, strict=True))


def log_log_slope(sizes: list[float], costs: list[float]) -> float:
  """The exponent p of the least-squares fit costs = a * sizes^p."""
  return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
