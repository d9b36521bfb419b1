"""A model, data and configuration small enough to train in a blink, with faults on demand."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import damcha_jax
from damcha_jax.config import CheckpointConfig, EvaluationConfig, LoggingConfig, MeshConfig
from damcha_jax.config import OptimizerConfig
from damcha_jax.training.task import ParameterGroup, Task

VOCAB, FEATURES, LENGTH = 16, 8, 6
RULES = (("embed", "fsdp"), ("mlp", "tensor"), ("vocab", None))
GROUPS = (ParameterGroup(r"bias$|embedding$", decay=False), ParameterGroup(r"kernel$", decay=True))


@dataclasses.dataclass(frozen=True)
class TinyConfig:
  """The part of an experiment's configuration that the loop reads."""

  num_steps: int = 8
  batch_size: int = 8
  prng_impl: str = "threefry2x32"
  logical_rules: tuple[tuple[str, Any], ...] = RULES
  optimizer: OptimizerConfig = OptimizerConfig(
      learning_rate=0.05, end_learning_rate_factor=0.1, warmup_steps=2, b1=0.9, b2=0.95, eps=1e-8,
      weight_decay=0.1, clip_norm=1.0, accumulation_steps=1)
  mesh: MeshConfig = MeshConfig(data=-1, fsdp=1, tensor=1)
  evaluation: EvaluationConfig = EvaluationConfig(every_steps=4, batch_size=7)
  checkpoint: CheckpointConfig = CheckpointConfig(every_steps=2, keep_last=2, keep_best=1)
  logging: LoggingConfig = LoggingConfig(every_steps=1, tensorboard=False)


class TinyModel(nn.Module):
  """Embedding, one hidden layer with dropout, logits."""

  dropout_rate: float = 0.0

  @nn.compact
  def __call__(self, tokens_BT, deterministic=True):
    normal, names = nn.initializers.normal(0.3), nn.with_logical_partitioning
    zeros = nn.initializers.zeros
    x = nn.Embed(VOCAB, FEATURES, embedding_init=names(normal, ("vocab", "embed")))(tokens_BT)
    x = nn.gelu(nn.Dense(16, kernel_init=names(normal, ("embed", "mlp")),
                         bias_init=names(zeros, ("mlp",)))(x))
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    return nn.Dense(VOCAB, kernel_init=names(normal, ("mlp", "vocab")))(x)


class TinySource:
  """Random tokens whose successors are learnable: target = 3 input + 1 mod V, mostly."""

  def __init__(self, num_rows: int, seed: int, on_batch: Callable[[int, dict], None] | None = None):
    self.num_rows, self.seed, self.on_batch = num_rows, seed, on_batch
    self.asked: list[int] = []

  def batch_at(self, step: int) -> dict[str, np.ndarray]:
    self.asked.append(step)
    batch = _rows(np.random.default_rng([self.seed, step]), self.num_rows)
    if self.on_batch is not None:
      self.on_batch(step, batch)
    return batch


class TinySplit:
  """A finite split, the same for the same seed."""

  def __init__(self, num_rows: int, seed: int):
    self.rows = _rows(np.random.default_rng(seed), num_rows)

  def __len__(self) -> int:
    return len(self.rows["inputs"])

  def batch(self, start: int, batch_size: int) -> dict[str, np.ndarray]:
    part = {key: rows[start:start + batch_size] for key, rows in self.rows.items()}
    missing = batch_size - len(part["inputs"])
    return {key: np.pad(rows, ((0, missing), (0, 0))) for key, rows in part.items()}


def _rows(rng: np.random.Generator, num_rows: int) -> dict[str, np.ndarray]:
  inputs = rng.integers(0, VOCAB, (num_rows, LENGTH), dtype=np.int32)
  noise = rng.random(inputs.shape) < 0.1
  targets = np.where(noise, rng.integers(0, VOCAB, inputs.shape), (3 * inputs + 1) % VOCAB)
  # Unequal weights: a mean of means would show.
  weights = (rng.random(inputs.shape) < rng.random((num_rows, 1))).astype(np.float32)
  weights[:, 0] = 1.0
  return {"inputs": inputs, "targets": targets.astype(np.int32), "weights": weights}


def tiny_task(batch_size: int = 8, on_batch: Callable[[int, dict], None] | None = None,
              dropout_rate: float = 0.0, **changes: Any) -> Task:
  """The task; `on_batch(step, batch)` runs before each training batch is handed out."""
  model = TinyModel(dropout_rate)

  def nats_BT(params, batch, rng):
    logits = model.apply({"params": params}, batch["inputs"], deterministic=rng is None,
                         rngs={} if rng is None else {"dropout": rng})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return batch["weights"] * losses

  def loss_fn(params, batch, rng):
    nats = nats_BT(params, batch, rng).sum()
    return nats, {"weight": batch["weights"].sum(), "nats": nats}

  def eval_loss_fn(params, batch):
    return {"weight": batch["weights"].sum(-1), "nats": nats_BT(params, batch, None).sum(-1)}

  task = Task(
      name="tiny", model=model,
      init_params=lambda rng: model.init(rng, jnp.zeros((1, LENGTH), jnp.int32))["params"],
      loss_fn=loss_fn, eval_loss_fn=eval_loss_fn,
      train_source=TinySource(batch_size, 1, on_batch),
      eval_sources={"validation": TinySplit(37, 2), "test/a": TinySplit(11, 3),
                    "test/b": TinySplit(5, 4)},
      metrics_of=lambda sums: {"nats_per_token": sums["nats"] / sums["weight"]},
      selection_metric="nats_per_token", parameter_groups=GROUPS)
  return dataclasses.replace(task, **changes)


def run_script(script: Path, *arguments: Any, num_devices: int = 1) -> subprocess.CompletedProcess:
  """Runs a test script in a new process with the package under test and forced CPU devices."""
  with start_script(script, *arguments, num_devices=num_devices) as process:
    output, errors = process.communicate(timeout=600)
  return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start_script(script: Path, *arguments: Any, num_devices: int = 1) -> subprocess.Popen[str]:
  """As `run_script`, and does not wait for its end."""
  paths = [Path(damcha_jax.__file__).parents[1], Path(__file__).parents[1], Path(__file__).parent]
  environment = {
      **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu",
      # Eight devices' threads on two busy cores may wait long for each other.
      "XLA_FLAGS": os.environ["XLA_FLAGS"]
                   + f" --xla_force_host_platform_device_count={num_devices}"
                   " --xla_cpu_collective_call_terminate_timeout_seconds=600"}
  return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_trees_equal(actual: Any, expected: Any) -> None:
  """Bitwise."""
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), jax.device_get(expected))
