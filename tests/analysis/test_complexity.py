"""Counted operations and parameters are the closed forms, whatever the program's structure."""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from damcha_jax.analysis import closed_forms
from damcha_jax.analysis import complexity
from damcha_jax.analysis.closed_forms import Size
from damcha_jax.analysis.complexity import Operations
from damcha_jax.attention import ATTENTIONS
from damcha_jax.metric import MetricGenerator
from damcha_jax.models.stack import BlockStack

A, B, C, N = 3, 5, 5, 7


def _direct(x_AB, kernels_NBC):
  for kernel_BC in kernels_NBC:
    x_AB = x_AB @ kernel_BC
  return x_AB


def _scanned(x_AB, kernels_NBC):
  return jax.lax.scan(lambda x_AB, kernel_BC: (x_AB @ kernel_BC, None), x_AB, kernels_NBC)[0]


@jax.custom_vjp
def _own_gradient(x_AB, kernels_NBC):
  return _direct(x_AB, kernels_NBC)


_own_gradient.defvjp(lambda *args: (_direct(*args), None), lambda _, g: (g, None))


@pytest.mark.parametrize("function", [
    _direct, _scanned, jax.jit(_direct), jax.checkpoint(_scanned), _own_gradient,
    lambda x_AB, kernels_NBC: jax.jit(jax.jit(_scanned))(x_AB, kernels_NBC),
    lambda x_AB, kernels_NBC: jax.lax.cond(True, _scanned, lambda x_AB, _: x_AB, x_AB, kernels_NBC),
], ids=["direct", "scan", "jit", "checkpoint of scan", "custom_vjp", "nested jit of scan", "cond"])
def test_each_product_counts_once(function):
  jaxpr = jax.make_jaxpr(function)(jnp.ones((A, B)), jnp.ones((N, B, C)))
  assert complexity.matmul_flops(jaxpr.jaxpr) == N * 2 * A * B * C


def test_elementwise_operations_count_results_and_summands():
  function = lambda x_AB: (jnp.exp(x_AB) * 2.0 + x_AB).sum(-1)
  jaxpr = jax.make_jaxpr(function)(jnp.ones((A, B)))
  assert complexity.operations_by_module(jaxpr.jaxpr) == {"": Operations(0, 4 * A * B)}


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _stack(**fields: Any) -> BlockStack:
  return BlockStack(**{
      "num_layers": 3,
      "attention": functools.partial(ATTENTIONS["damcha"], num_heads=2),
      "mlp_features": 24,
      "generator": functools.partial(MetricGenerator, 2, (5, 6)),
      **fields,
  })


def test_structure_changes_neither_parameters_nor_operations():
  x_BTD = _shape(2, 4, 8)
  unrolled = complexity.model_costs(_stack(), x_BTD)
  for fields in (dict(scan_layers=True), dict(remat=True), dict(scan_layers=True, remat=True)):
    other = complexity.model_costs(_stack(**fields), x_BTD)
    assert other.total.matmul == unrolled.total.matmul
    # What is the same in every layer may stand outside the loop, or inside.
    assert other.total.elementwise == pytest.approx(unrolled.total.elementwise, rel=1e-2)
    assert other.num_params == unrolled.num_params
  assert sum(part.matmul for part in complexity.below(unrolled.operations, "layer_1").values()) == (
      sum(part.matmul for part in unrolled.operations.values()) // 3)


def test_per_module_counts_are_those_of_the_modules():
  costs = complexity.model_costs(_stack(), _shape(2, 4, 8))
  num_contexts = 2 * 4  # stride 1
  assert costs.operations["layer_2/attention/value"].matmul == 2 * 8 * 8 * 8
  assert costs.operations["layer_0/mlp/in"].matmul == 2 * 8 * 8 * 24
  assert costs.params["layer_0/mlp/in"] == 8 * 24 + 24
  expected = closed_forms.generator(Size(4, 8, 2), (5, 6), "rowsum", num_contexts=num_contexts)
  assert sum(complexity.below(costs.params, "generator").values()) == expected.params
  generators = complexity.below(costs.operations, "generator").values()
  assert sum(part.matmul for part in generators) == 3 * expected.flops


def test_a_stack_is_its_layers_and_their_feed_forward_parts():
  size, num_layers = Size(4, 8, 2), 3
  costs = complexity.model_costs(
      _stack(attention=functools.partial(ATTENTIONS["mha"], num_heads=2), generator=None),
      _shape(1, *size[:2]))
  expected = closed_forms.stack(closed_forms.mha(size, use_bias=True), size, num_layers, 24)
  assert (costs.num_params, costs.total.matmul) == expected


def _costs(attention: str, size: Size, **fields: Any) -> complexity.Costs:
  return complexity.model_costs(
      ATTENTIONS[attention](num_heads=size.num_heads, **fields), _shape(1, *size[:2]))


def _assert_is(costs: complexity.Costs, form: closed_forms.Form) -> None:
  assert (costs.num_params, costs.total.matmul) == form


@pytest.mark.parametrize("attention", sorted(closed_forms.FORMS))
def test_counts_are_the_closed_form(attention):
  size = Size(length=6, features=24, num_heads=4)
  fields, form = {}, closed_forms.FORMS[attention](size)
  if attention == "damcha":
    fields = dict(generator=MetricGenerator(4, (5, 7)), stride=2)
    form += closed_forms.generator(size, (5, 7), "rowsum", num_contexts=3)
  _assert_is(_costs(attention, size, **fields), form)


@pytest.mark.parametrize("attention, fields, options", [
    ("mha", dict(use_bias=False), dict(use_bias=False)),
    ("tha", dict(query_chunk=2), dict()),
    ("dcmha", dict(static=True, query_chunk=4), dict(static=True)),
    ("colmha", dict(form="epfml", key_features=8), dict(key_features=8, content_bias=True)),
    ("colmha", dict(key_features=8), dict(key_features=8)),
    ("moa", dict(dispatch="sorted"), dict(dense=False)),
    ("moa", dict(num_experts=5, experts_per_token=3, expert_features=10),
     dict(num_experts=5, num_chosen=3, head_features=10)),
])
def test_counts_follow_the_options(attention, fields, options):
  size = Size(length=6, features=24, num_heads=4)
  _assert_is(_costs(attention, size, **fields), closed_forms.FORMS[attention](size, **options))


# At D = 512 and H = 8, from the definitions of the originals.
PARAMETERS = [
    ("mha", dict(use_bias=False), 4 * 512**2),
    ("tha", dict(), 1_048_704),
    ("dcmha", dict(), 1_134_592),
    ("dcmha", dict(static=True), 1_134_592 + 128),
    ("dcmha", dict(static=True, qk_norm="layer"), 1_134_592 + 128 + 128),
    ("colmha", dict(form="epfml", key_features=512), 1_057_792),
    ("colmha", dict(form="epfml", key_features=128), 661_504),
    ("moa", dict(num_experts=16, experts_per_token=8, expert_features=64), 1_122_304),
    ("mma", dict(), 4 * 512**2 + 4 * 512),
]


@pytest.mark.parametrize("attention, fields, expected", PARAMETERS)
def test_published_parameter_counts(attention, fields, expected):
  model = ATTENTIONS[attention](num_heads=8, **fields)
  params = complexity.param_shapes(model, _shape(1, 4, 512))
  assert sum(complexity.params_by_module(params).values()) == expected


def test_moa_costs_less_than_mha_where_its_paper_says():
  size = Size(length=1024, features=512, num_heads=8)
  ratio = closed_forms.moa(size).flops / closed_forms.mha(size).flops
  assert round(ratio, 2) == 0.79


def test_dcmha_gates_are_elementwise():
  size = Size(length=64, features=8, num_heads=4)
  operations = lambda **fields: _costs("dcmha", size, **fields).total
  gates = operations().elementwise - operations(gate=False).elementwise
  in_scores = 8 * size.num_heads * size.length**2
  per_token = 4 * size.num_heads * size.length  # tanh
  assert gates == in_scores + per_token


class _Wasteful(nn.Module):
  """A model with a product that no formula knows of."""

  @nn.compact
  def __call__(self, x_BTD):
    y_BTD = ATTENTIONS["mha"](num_heads=2, use_bias=False, name="attention")(x_BTD)
    return y_BTD + 0.0 * x_BTD @ jnp.zeros((8, 8))


def test_a_planted_product_is_noticed():
  costs = complexity.model_costs(_Wasteful(), _shape(1, 4, 8))
  expected = closed_forms.mha(Size(4, 8, 2))
  assert costs.num_params == expected.params
  assert costs.total.matmul == expected.flops + 2 * 4 * 8 * 8
  assert costs.operations[""].matmul == 2 * 4 * 8 * 8


def test_compiled_memory_holds_arguments_results_and_scores():
  num_tokens, features = 64, 8
  model = ATTENTIONS["mha"](num_heads=2)
  x_BTD = _shape(1, num_tokens, features)
  params = complexity.param_shapes(model, x_BTD)
  apply = jax.jit(lambda params, x_BTD: model.apply({"params": params}, x_BTD))
  peak = complexity.peak_bytes(apply.lower(params, x_BTD).compile())
  scores = 2 * num_tokens**2 * 4
  assert scores < peak < 6 * scores


def test_interleaved_times_tell_a_slow_function_from_a_fast_one():
  x = jnp.ones((300, 300))
  slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ x / 300.0, x))
  seconds = complexity.interleaved_seconds(
      {"fast": lambda: x + 1.0, "slow": lambda: slow(x)}, num_rounds=5)
  assert {name: len(times) for name, times in seconds.items()} == {"fast": 5, "slow": 5}
  assert complexity.median_ratio(seconds["slow"], seconds["fast"]) > 2
  assert complexity.median_ratio(seconds["slow"], seconds["slow"]) == 1


def test_slope_of_a_power_law():
  sizes = [1, 2, 4, 8]
  assert complexity.log_log_slope(sizes, [5 * size**3 for size in sizes]) == pytest.approx(3)
