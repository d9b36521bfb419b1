"""The efficiency experiment's third part: how fast whole decoders train, evaluate and sample.

All decoders take turns in every round, and ratios are to another decoder in the same round, so that
a machine's slow moments fall on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import statistics
import time
import types
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis import complexity
from damcha_jax.config import ConfigError, MeshConfig, OptimizerConfig
from damcha_jax.config.efficiency import DecoderShapeConfig, EfficiencyConfig
from damcha_jax.data.sources import TrainWindows
from damcha_jax.models.decoder import init_cache, init_params, make_decoder
from damcha_jax.reporting import Measurement
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.decoder import loss_and_sums, parameter_groups, sums_per_row
from damcha_jax.training.flops import model_flops_per_step
from damcha_jax.training.sharding import make_mesh, Partitioning
from damcha_jax.training.step import make_train_step
from damcha_jax.training.task import Batch, Task
from experiments.plain_decoder import PlainDecoder

PLAIN = "flax"  # what all are relative to
MHA = "mha"  # the suite's own, which DAMCHA is relative to as well
MATMUL = "matmul"
INPUTS = "input_pipeline"
MATMUL_SIZE = 2048  # of the square matrices whose product counts as the machine's peak
DEPTH_FACTOR = 4
NUM_BYTES = 2**22  # of the text that training windows are drawn from

Seconds = Mapping[str, Sequence[float]]


class Decoder:
  """One contender at one shape. Nothing is computed before it is asked to run.

  Raises:
    ConfigError: it cannot be built.
  """

  def __init__(self, config: EfficiencyConfig, shape: DecoderShapeConfig, name: str,
               attention: str, **damcha: Any):
    self.name, self.shape = name, shape
    self._optimizer = dataclasses.replace(config.optimizer, warmup_steps=0)
    self._attention = attention
    damcha = dataclasses.replace(config.damcha, widths=shape.damcha_widths, **damcha)
    self._sections = types.SimpleNamespace(**(vars(config) | dict(
        damcha=damcha, model=shape.model, context_length=shape.context_length)))
    self.task = self._task()
    try:
      self.params = nn.unbox(jax.eval_shape(self.task.init_params, jax.random.key(0)))
    except (OverflowError, ValueError) as error:  # what a model notices only when it sees its inputs
      raise ConfigError(str(error)) from error

  def model(self, decode: bool = False) -> nn.Module:
    if self.name == PLAIN:
      sizes = dataclasses.replace(self.shape.model, scan_layers=False)
      return PlainDecoder(sizes, self.shape.context_length, decode)
    return make_decoder(self._sections, self._attention, decode=decode)

  def initial_params(self, seed: int) -> Any:
    return jax.jit(lambda key: nn.unbox(self.task.init_params(key)))(jax.random.key(seed))

  def train_step(self) -> TrainStep:
    return TrainStep(self.task, self.params, self._optimizer, self.shape)

  def _task(self) -> Task:
    model = self.model()
    tokens_BT = jnp.zeros((1, self.shape.context_length), jnp.int32)
    return Task(
        name=self.name,
        model=model,
        init_params=lambda rng: init_params(model, rng, tokens_BT),
        loss_fn=lambda params, batch, rng: loss_and_sums(model, params, batch, rng),
        eval_loss_fn=lambda params, batch: sums_per_row(model, params, batch),
        train_source=None,
        eval_sources={},
        metrics_of=dict,
        selection_metric="nats_per_token",
        parameter_groups=parameter_groups(self._sections),
    )


class TrainStep:
  """The update that `damcha_jax.training.loop` makes, compiled, and the state it works on."""

  def __init__(self, task: Task, params: Any, optimizer: OptimizerConfig,
               shape: DecoderShapeConfig):
    self.task, self.state = task, None
    self._optimizer = optimizer_lib.make_optimizer(optimizer, 1, task.parameter_groups)
    self._partitioning = Partitioning(make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]), ())
    self._targets = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype,
                                          sharding=self._partitioning.replicated),
        state_lib.TrainState(jax.ShapeDtypeStruct((), jnp.int32), params,
                             jax.eval_shape(self._optimizer.init, params)))
    self._batch = _batch_shapes(shape)
    schedule = optimizer_lib.learning_rate_schedule(optimizer, 1)
    step = make_train_step(task, self._optimizer, schedule, jax.random.key(0), self._partitioning,
                           self._targets, accumulation_steps=1)
    with _without_compilation_cache():
      start = time.perf_counter()
      self._compiled = step.lower(self._targets, self._batch).compile()
      self.compile_seconds = time.perf_counter() - start

  @functools.cached_property
  def flops(self) -> int:
    """Of matrix products, as MFU counts them: see `model_flops_per_step`."""
    return model_flops_per_step(self.task, self._targets.params, self._batch)

  @property
  def peak_bytes(self) -> int:
    return complexity.peak_bytes(self._compiled)

  def begin(self, seed: int) -> None:
    self.state = state_lib.create_state(self.task, self._optimizer, jax.random.key(seed),
                                        self._targets)

  def place(self, batch: Batch) -> dict[str, jax.Array]:
    return self._partitioning.place_local_rows(batch)

  def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Makes one update; its loss."""
    self.state, metrics = self._compiled(self.state, batch)
    return metrics["loss"]


class Inputs(NamedTuple):
  """How the input pipeline keeps up."""

  batch_seconds: float  # to make a batch and place it
  wait_share: float  # of the time of a training loop, in which the device may have waited for that


def make_decoders(config: EfficiencyConfig, shape: DecoderShapeConfig) -> list[Decoder]:
  """The contenders: plain Flax's first.

  Raises:
    ConfigError: one cannot be built.
  """
  kinds: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: (MHA, {})}
  for attention in config.attention_names:
    if attention == "damcha":
      kinds |= {one.name: (attention, dict(stride=one.stride, sharing=one.sharing))
                for one in config.speed.damcha_variants}
    else:
      kinds[attention] = (attention, {})
  return [Decoder(config, shape, name, attention, **damcha)
          for name, (attention, damcha) in kinds.items() if name not in shape.omitted]


def measure(config: EfficiencyConfig, shape: DecoderShapeConfig,
            decoders: Sequence[Decoder]) -> Iterator[Measurement]:
  """What the shape asks for."""
  by_what = {"steps": _steps, "sampling": _sampling, "memory": _memory, "depth": _depth}
  yield from by_what[shape.measured](config, shape, decoders)


def _steps(config: EfficiencyConfig, shape: DecoderShapeConfig,
           decoders: Sequence[Decoder]) -> Iterator[Measurement]:
  steps = {}
  for decoder in decoders:
    steps[decoder.name] = step = decoder.train_step()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(decoder.params))
    yield _one(shape, decoder.name, "num_params", num_params, "1")
    yield _one(shape, decoder.name, "step_gflops", step.flops / 1e9, "GFLOP")
    yield _one(shape, decoder.name, "compile_time", step.compile_seconds, "s")
  yield from _peak_memory(shape, steps)
  evaluate = {decoder.name: jax.jit(decoder.task.eval_loss_fn) for decoder in decoders}
  for seed in config.seeds:
    source = _source(shape, seed)
    yield from _train_times(config, shape, steps, source, seed)
    batch = source.batch_at(0)
    params = {decoder.name: steps[decoder.name].state.params for decoder in decoders}
    seconds = complexity.interleaved_seconds(
        {name: lambda name=name: evaluate[name](params[name], batch) for name in evaluate},
        config.num_rounds)
    yield from _times(shape, "evaluation_time", seconds, seed, split="test")


def _train_times(config: EfficiencyConfig, shape: DecoderShapeConfig,
                 steps: Mapping[str, TrainStep], source: TrainWindows,
                 seed: int) -> Iterator[Measurement]:
  """Train steps beside a matrix product, and how long they wait for their batches."""
  product, product_flops = _matmul()
  functions: dict[str, Callable[[], Any]] = {MATMUL: product}
  for name, step in steps.items():
    step.begin(seed)
    batch = step.place(source.batch_at(0))
    functions[name] = lambda step=step, batch=batch: step(batch)
  seconds = complexity.interleaved_seconds(functions, config.num_rounds)
  peak = product_flops / statistics.median(seconds[MATMUL])
  yield _one(shape, MATMUL, "peak_gflops_per_second", peak / 1e9, "GFLOP/s", seed=seed,
             note=f"{MATMUL_SIZE} x {MATMUL_SIZE} matrices in float32")
  of_steps = {name: seconds[name] for name in steps}
  yield from _times(shape, "step_time", of_steps, seed)
  for name, step in steps.items():
    share = step.flops / product_flops / complexity.median_ratio(seconds[name], seconds[MATMUL])
    yield _one(shape, name, "peak_share", share, "1", seed=seed)
  fastest = min(of_steps, key=lambda name: statistics.median(of_steps[name]))
  inputs = _inputs(steps[fastest], source, 2 * config.num_rounds)
  yield _one(shape, INPUTS, "batches_per_second", 1 / inputs.batch_seconds, "1/s", seed=seed)
  yield _one(shape, INPUTS, "supply_ratio",
             statistics.median(seconds[fastest]) / inputs.batch_seconds, "1", seed=seed,
             note=f"batches made in the time of a step of {fastest}, the fastest")
  yield _one(shape, INPUTS, "host_wait_share", inputs.wait_share, "1", seed=seed,
             note="at most: of batches that were not made before the last step was done")


def _inputs(step: TrainStep, source: TrainWindows, num_steps: int) -> Inputs:
  """Trains as the training loop does: a step is dispatched before the one before is waited for."""
  alone = []
  for index in range(100):
    start = time.perf_counter()
    step.place(source.batch_at(index))
    alone.append(time.perf_counter() - start)
  start, waited, last = time.perf_counter(), 0.0, None
  for index in range(num_steps):
    begin = time.perf_counter()
    batch = step.place(source.batch_at(index))
    if last is not None and last.is_ready():  # the device had nothing left to do
      waited += time.perf_counter() - begin
    loss = step(batch)
    jax.block_until_ready(last)
    last = loss
  jax.block_until_ready(last)
  return Inputs(statistics.median(alone), waited / (time.perf_counter() - start))


def _sampling(config: EfficiencyConfig, shape: DecoderShapeConfig,
              decoders: Sequence[Decoder]) -> Iterator[Measurement]:
  """A token early and one late in the window, with a cache, and by running the whole window."""
  num_rounds = 2 * config.num_rounds
  early, late = shape.context_length // 8, 7 * shape.context_length // 8
  for seed in config.seeds:
    made = {}
    for decoder in decoders:
      params = decoder.initial_params(seed)
      writers = _writers(decoder, params, (early - num_rounds // 2, late - num_rounds // 2))
      made[decoder.name] = dict(zip(("early", "late"), writers), rerun=_rerun(decoder, params))
    # One decoder after another, so that none finds its parameters in the processor's cache.
    seconds = complexity.interleaved_seconds(
        {(name, when): made[name][when] for when in ("early", "late", "rerun") for name in made},
        num_rounds)
    of = lambda when: {decoder.name: seconds[decoder.name, when] for decoder in decoders}
    yield from _times(shape, "token_time", of("late"), seed, "test", f"around token {late}")
    yield from _times(shape, "rerun_time", of("rerun"), seed, "test",
                      f"the model on {shape.context_length} tokens, without a cache")
    for decoder in decoders:
      ratio = lambda upper, lower: complexity.median_ratio(
          seconds[decoder.name, upper], seconds[decoder.name, lower])
      yield _one(shape, decoder.name, "token_time_growth", ratio("late", "early"), "1", "test",
                 seed, f"from token {early} to token {late}")
      yield _one(shape, decoder.name, "cache_speedup", ratio("rerun", "late"), "1", "test", seed)


def _writers(decoder: Decoder, params: Any,
             positions: Sequence[int]) -> list[Callable[[], jax.Array]]:
  """Functions that write one more token each, having begun with as many as `positions` says."""
  model = decoder.model(decode=True)
  shape = decoder.shape

  @jax.jit
  def forward(params: Any, cache: Any, tokens_B1: jax.Array) -> tuple[Any, jax.Array]:
    logits_B1V, updated = model.apply({"params": params, "cache": cache}, tokens_B1,
                                      mutable=["cache"])
    return updated["cache"], jnp.argmax(logits_B1V, axis=-1)

  advance = jax.jit(forward, donate_argnums=1)

  def writer(state: tuple[Any, jax.Array]) -> Callable[[], jax.Array]:
    def write() -> jax.Array:
      nonlocal state
      state = advance(params, *state)
      return state[1]
    return write

  cache = init_cache(model, shape.batch_size, shape.context_length)
  state = cache, jnp.zeros((shape.batch_size, 1), jnp.int32)
  writers, position = [], 0
  for wanted in positions:
    for _ in range(wanted - position):
      state = advance(params, *state)
    position = wanted
    writers.append(writer(jax.tree.map(jnp.copy, state)))
  return writers


def _rerun(decoder: Decoder, params: Any) -> Callable[[], jax.Array]:
  tokens_BT = jnp.zeros((decoder.shape.batch_size, decoder.shape.context_length), jnp.int32)
  run = jax.jit(lambda params, tokens_BT: jnp.argmax(
      decoder.task.model.apply({"params": params}, tokens_BT)[:, -1], axis=-1))
  return lambda: run(params, tokens_BT)


def _memory(config: EfficiencyConfig, shape: DecoderShapeConfig,
            decoders: Sequence[Decoder]) -> Iterator[Measurement]:
  del config
  yield from _peak_memory(shape, {decoder.name: decoder.train_step() for decoder in decoders})


def _depth(config: EfficiencyConfig, shape: DecoderShapeConfig,
           decoders: Sequence[Decoder]) -> Iterator[Measurement]:
  """How compiling takes longer with more layers."""
  deep = dataclasses.replace(shape, model=dataclasses.replace(
      shape.model, num_layers=DEPTH_FACTOR * shape.model.num_layers))
  pairs = list(zip(decoders, make_decoders(config, deep), strict=True))
  ratios: dict[str, list[float]] = {decoder.name: [] for decoder in decoders}
  for _ in range(-(-config.num_rounds // 3)):  # compiling takes its time
    for decoder, deeper in pairs:
      shallow_seconds = decoder.train_step().compile_seconds
      ratios[decoder.name].append(deeper.train_step().compile_seconds / shallow_seconds)
  for name, values in ratios.items():
    yield _one(shape, name, "compile_time_growth", statistics.median(values), "1",
               note=f"from {shape.model.num_layers} to {deep.model.num_layers} layers")


def _times(shape: DecoderShapeConfig, metric: str, seconds: Seconds, seed: int,
           split: str = "train", note: Optional[str] = None) -> Iterator[Measurement]:
  """Medians, and ratios to the plain decoder and, for DAMCHA, to the suite's mha."""
  num_rounds = len(next(iter(seconds.values())))
  note = "; ".join(filter(None, (note, f"medians of {num_rounds} interleaved rounds")))
  for name, own in seconds.items():
    yield _one(shape, name, metric, 1e3 * statistics.median(own), "ms", split, seed, note)
    for suffix, reference in _references(name, seconds):
      yield _one(shape, name, metric + suffix, complexity.median_ratio(own, seconds[reference]),
                 "1", split, seed, note)


def _peak_memory(shape: DecoderShapeConfig,
                 steps: Mapping[str, TrainStep]) -> Iterator[Measurement]:
  for name, step in steps.items():
    yield _one(shape, name, "peak_memory", step.peak_bytes / 1e6, "MB")
    for suffix, reference in _references(name, steps):
      yield _one(shape, name, "peak_memory" + suffix,
                 step.peak_bytes / steps[reference].peak_bytes, "1")


def _references(name: str, present: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """(suffix of the ratio's name, what it is relative to) of what is present."""
  if PLAIN in present:
    yield "_ratio", PLAIN
  if MHA in present and name.startswith("damcha"):
    yield "_to_mha", MHA


def _one(shape: DecoderShapeConfig, name: str, metric: str, value: float, unit: str,
         split: str = "train", seed: Optional[int] = None,
         note: Optional[str] = None) -> Measurement:
  return Measurement(name, "synthetic", split, metric, value, unit, seed, shape.variant, note)


def _matmul() -> tuple[Callable[[], jax.Array], int]:
  matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE))
  multiply = jax.jit(jnp.matmul)
  return lambda: multiply(matrix, matrix), 2 * MATMUL_SIZE**3


def _source(shape: DecoderShapeConfig, seed: int) -> TrainWindows:
  text = np.random.default_rng(seed).integers(1, 256, NUM_BYTES, np.uint8)
  return TrainWindows({"random": text}, shape.batch_size, shape.context_length, seed)


def _batch_shapes(shape: DecoderShapeConfig) -> dict[str, jax.ShapeDtypeStruct]:
  size = (shape.batch_size, shape.context_length)
  return {name: jax.ShapeDtypeStruct(size, dtype)
          for name, dtype in (("inputs", jnp.int32), ("targets", jnp.int32),
                              ("weights", jnp.float32))}


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
  """Compiles as if for the first time, whatever an earlier process has left."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
