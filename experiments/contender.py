"""Stacks of layers that differ in their attention, and what they cost at one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import statistics
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis import complexity
from damcha_jax.config import ConfigError
from damcha_jax.config.efficiency import EfficiencyConfig, ShapeConfig
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.models.attentions import attention_factory
from damcha_jax.models.layers import make_initializers
from damcha_jax.models.stack import BlockStack
from damcha_jax.reporting import Measurement
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training.task import ParameterGroup

Array = jax.Array

# Of the layer bias at the authors' first public commit.
FIRST_COMMIT_RANK = 16
FIRST_COMMIT = ("as at the authors' first public commit: M from one linear layer on a learned "
                f"vector, and a layer bias of rank {FIRST_COMMIT_RANK}")


class Contender:
  """One attention at one shape. Nothing is computed before `program` is called.

  Attributes:
    stack: the layers.
    params: shapes of their parameters.

  Raises:
    ConfigError: the attention cannot be built at this shape.
  """

  def __init__(self, config: EfficiencyConfig, shape: ShapeConfig, attention: str):
    self.shape, self.attention = shape, attention
    self._key = (config, _essence(shape, attention), attention)
    self.stack, self.params = _build(config, _of_one_token(self._key[1]), attention)
    self._optimizer_config = dataclasses.replace(config.optimizer, warmup_steps=0)

  @property
  def costs(self) -> complexity.Costs:
    """Parameters and operations of one sequence's forward pass."""
    return _count(*self._key)

  def measurement(self, metric: str, value: float, unit: str, seed: Optional[int] = None,
                  note: Optional[str] = None) -> Measurement:
    return _measurement(self.attention, self.shape, metric, value, unit, seed, note)

  def program(self) -> Program:
    """The forward pass, or the train step if the shape measures that, compiled."""
    if self.shape.measured == "train_step":
      optimizer = optimizer_lib.make_optimizer(
          self._optimizer_config, 1, (ParameterGroup("", decay=True),))
      return Program(self, functools.partial(self._step, optimizer), optimizer)
    return Program(self, self._forward, None)

  def _forward(self, params: Any, x_BTD: Array) -> Array:
    return self.stack.apply({"params": params}, x_BTD)

  def _step(self, optimizer: Any, params: Any, opt_state: Any, x_BTD: Array) -> tuple[Any, Any]:
    """One update on a loss that uses every output."""
    loss = lambda params: jnp.mean(jnp.square(self._forward(params, x_BTD).astype(jnp.float32)))
    updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
    return jax.tree.map(jnp.add, params, updates), opt_state


class Program:
  """A compiled function of a contender."""

  def __init__(self, contender: Contender, function: Callable[..., Any], optimizer: Optional[Any]):
    x_BTD = _input_shape(contender.shape, contender.shape.batch_size)
    self._inputs = (contender.params, x_BTD)
    if optimizer is not None:
      opt_state = jax.eval_shape(optimizer.init, contender.params)
      self._inputs = (contender.params, opt_state, x_BTD)
    self._compiled = jax.jit(function).lower(*self._inputs).compile()

  @property
  def peak_bytes(self) -> int:
    return complexity.peak_bytes(self._compiled)

  def call(self, seed: int) -> Callable[[], Any]:
    """Runs the program on random numbers, whatever they are: times do not depend on it."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> Array:
      if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, leaf.dtype)
      # Not negative, because Adam takes roots of some of them.
      return jnp.asarray(0.02 * rng.random(leaf.shape, np.float32), leaf.dtype)

    return functools.partial(self._compiled, *jax.tree.map(fill, self._inputs))


def make_contenders(config: EfficiencyConfig, shape: ShapeConfig) -> list[Contender]:
  return [Contender(config, shape, attention) for attention in config.attention_names
          if attention not in shape.omitted]


def measure(config: EfficiencyConfig, shape: ShapeConfig,
            contenders: Sequence[Contender]) -> Iterator[Measurement]:
  """What the attentions cost at a shape: counts, peak memory, times."""
  for attention in (name for name in config.attention_names if name in shape.omitted):
    yield _measurement(attention, shape, "gflops", None, "GFLOP",
                       note=_why_omitted(config, shape, attention))
  for one in contenders:
    total = one.costs.total
    first_commit = shape.first_commit and one.attention == "damcha"
    yield one.measurement("gflops", total.matmul / 1e9, "GFLOP",
                          note=FIRST_COMMIT if first_commit else None)
    yield one.measurement("elementwise_gflops", total.elementwise / 1e9, "GFLOP")
    yield one.measurement("num_params", one.costs.num_params, "1")
  if shape.measured == "nothing":
    return
  programs = {one.attention: one.program() for one in contenders}
  for one in contenders:
    yield one.measurement("peak_memory", programs[one.attention].peak_bytes / 1e6, "MB")
  if shape.measured == "memory":
    return
  for seed in config.seeds:
    seconds = complexity.interleaved_seconds(
        {name: program.call(seed) for name, program in programs.items()}, config.num_rounds)
    for one in contenders:
      yield from _times(one, seconds, seed, contenders)


def _why_omitted(config: EfficiencyConfig, shape: ShapeConfig, attention: str) -> str:
  try:
    Contender(config, shape, attention)
  except ConfigError as error:
    return f"left out, because it cannot be built at this shape: {error}"
  return "left out by config key 'shapes'"


def _times(one: Contender, seconds: dict[str, list[float]], seed: int,
           contenders: Sequence[Contender]) -> Iterator[Measurement]:
  """Ratios are to mha in the same round, so that a machine's slow moments fall on both."""
  note = f"medians of {len(seconds[one.attention])} interleaved rounds"
  ratio_name = "step_time_ratio"
  if one.shape.measured == "forward":
    ratio_name = "latency_ratio"
    median = statistics.median(seconds[one.attention])
    yield one.measurement("latency", 1e3 * median, "ms", seed, note)
    yield one.measurement("throughput", one.shape.batch_size / median, "1/s", seed, note)
  if "mha" in seconds:
    reference = next(other for other in contenders if other.attention == "mha")
    more = one.costs.num_params / reference.costs.num_params
    if abs(more - 1) > 0.01:
      note += f"; not parameter-matched: {more:.2f} times the parameters of mha"
    ratio = complexity.median_ratio(seconds[one.attention], seconds["mha"])
    yield one.measurement(ratio_name, ratio, "1", seed, note)


def _measurement(attention: str, shape: ShapeConfig, metric: str, value: Optional[float], unit: str,
                 seed: Optional[int] = None, note: Optional[str] = None) -> Measurement:
  split = "train" if shape.measured == "train_step" else "test"
  return Measurement(attention, shape.dataset, split, metric, value, unit, seed, shape.variant,
                     note)


def _essence(shape: ShapeConfig, attention: str) -> ShapeConfig:
  """The shape without what makes no difference to this attention: equal ones are traced once."""
  shape = dataclasses.replace(shape, dataset="", variant=None, batch_size=1, measured="nothing",
                              omitted=())
  if attention == "damcha":
    return shape
  return dataclasses.replace(shape, first_commit=False, damcha_context="prefix", damcha_stride=1,
                             damcha_widths=())


def _of_one_token(shape: ShapeConfig) -> ShapeConfig:
  """Parameters do not depend on the length."""
  return dataclasses.replace(shape, context_length=1)


@functools.cache
def _build(config: EfficiencyConfig, shape: ShapeConfig, attention: str) -> tuple[BlockStack, Any]:
  stack = make_stack(config, shape, attention)
  try:
    return stack, complexity.param_shapes(stack, _input_shape(shape, 1))
  except (OverflowError, ValueError) as error:  # what an attention notices only when it sees its inputs
    raise ConfigError(str(error)) from error


@functools.cache
def _count(config: EfficiencyConfig, shape: ShapeConfig, attention: str) -> complexity.Costs:
  stack, params = _build(config, _of_one_token(shape), attention)
  return complexity.model_costs(stack, _input_shape(shape, 1), params=params)


def _input_shape(shape: ShapeConfig, batch_size: int) -> jax.ShapeDtypeStruct:
  size = (batch_size, shape.context_length, shape.features)
  return jax.ShapeDtypeStruct(size, jnp.dtype(shape.dtype))


def make_stack(config: EfficiencyConfig, shape: ShapeConfig, attention: str) -> BlockStack:
  """The layers of `shape` with the named attention.

  Raises:
    ConfigError: unknown attention, or options that do not go together.
  """
  damcha = dataclasses.replace(config.damcha, context=shape.damcha_context,
                               stride=shape.damcha_stride, widths=shape.damcha_widths)
  sections = dataclasses.replace(config, damcha=damcha)
  factory = attention_factory(sections, attention, shape, causal=shape.causal)
  options = dict(factory.stack_options)
  if attention == "damcha" and shape.first_commit:
    options["generator"] = functools.partial(
        AuthorsMetricGenerator, num_heads=shape.num_heads, widths=shape.damcha_widths,
        layer_bias_rank=FIRST_COMMIT_RANK, num_layers=shape.num_layers, fuse_rowsum=False)
  return BlockStack(
      num_layers=shape.num_layers,
      attention=factory.attention,
      mlp_features=shape.mlp_features,
      initializers=make_initializers(shape.initializer, shape.num_layers),
      scan_layers=True,  # compiles one layer
      dtype=jnp.dtype(shape.dtype),
      param_dtype=jnp.dtype(shape.param_dtype),
      **options,
  )
