"""What storing only the RowSum changes: `rowsum` against `blocks` on the model of any config.

  python -m experiments.rowsum --config=configs/mix.py:cpu

Starts both from the same function, takes one AdamW update with each, and times their updates in
turn. `rowsum` has the sum of H blocks that always get equal gradients in place of the blocks (the
paper's RowSum, Section 3.3, is linear), so outputs and updates must agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from pathlib import Path
import statistics
import time
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import LanguageModelConfig, freeze
from damcha_jax.metric import blocks_to_rowsum
from damcha_jax.reporting import Measurement
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.workdir import Workdir
from experiments import command_line
from experiments import common

NUM_ROUNDS = 9


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Writes `summary.json` with the differences and the ratios of `rowsum` to `blocks`."""
  config = dataclasses.replace(freeze(config), experiment="rowsum")
  common.claim(Workdir(workdir), config)
  blocks, rowsum = (_Contender(config, kind) for kind in ("blocks", "rowsum"))
  params = jax.jit(lambda key: nn.unbox(blocks.task.init_params(key)))(jax.random.key(0))
  converted = jax.jit(blocks_to_rowsum)(params)
  batch = blocks.task.train_source.batch_at(0)
  rows = reporting.summary_rows(
      _measurements(config, blocks, rowsum, params, converted, batch), comparable=False,
      paper=lambda _: None)
  reporting.write_summary(workdir / "summary.json", config.experiment,
                          f"{config.name}:{config.size}", rows)
  print(reporting.format_table(rows))
  print(f"\nResults are in {workdir}")
  return rows


class _Contender:
  """The DAMCHA model of a config in one parameterization, and its update."""

  def __init__(self, config: LanguageModelConfig, parameterization: str):
    damcha = dataclasses.replace(config.damcha, parameterization=parameterization)
    self.task = task = language_model_task(
        dataclasses.replace(config, damcha=damcha), "damcha", seed=0)
    self.optimizer = optimizer_lib.make_optimizer(
        dataclasses.replace(config.optimizer, warmup_steps=0), config.num_steps,
        task.parameter_groups)

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
      def mean_loss(params: Any) -> jax.Array:
        total, sums = task.loss_fn(params, batch, None)
        return total / sums["weight"]

      loss, grads = jax.value_and_grad(mean_loss)(params)
      updates, opt_state = self.optimizer.update(grads, opt_state, params)
      return jax.tree.map(jnp.add, params, updates), opt_state, loss

    self.update = update

  def seconds(self, params: Any, opt_state: Any, batch: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(self.update(params, opt_state, batch))
    return time.perf_counter() - start


def _measurements(config: LanguageModelConfig, blocks: _Contender, rowsum: _Contender, params: Any,
                  converted: Any, batch: Any) -> Iterator[Measurement]:
  states = blocks.optimizer.init(params), rowsum.optimizer.init(converted)
  new_params, _, loss = blocks.update(params, states[0], batch)
  new_converted, _, converted_loss = rowsum.update(converted, states[1], batch)
  moved = _largest_difference(converted, new_converted)
  apart = _largest_difference(blocks_to_rowsum(new_params), new_converted)
  times = [(blocks.seconds(params, states[0], batch), rowsum.seconds(converted, states[1], batch))
           for _ in range(NUM_ROUNDS)]
  block_times, rowsum_times = zip(*times)
  count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  values = {
      "loss_difference": (abs(float(loss - converted_loss)), "nats/token"),
      "update_size": (moved, "1"),
      "update_difference": (apart, "1"),
      "num_params_ratio": (count(converted) / count(params), "1"),
      "step_time_ratio": (statistics.median(rowsum_times) / statistics.median(block_times), "1"),
  }
  note = f"interleaved, medians of {NUM_ROUNDS} rounds; all at equal W = {config.damcha.widths}"
  for metric, (value, unit) in values.items():
    yield Measurement("damcha", config.dataset, "train", metric, value, unit,
                      variant="rowsum to blocks", note=note)


def _largest_difference(left: Any, right: Any) -> float:
  return float(max(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), left, right))))


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "rowsum", reads="gpt2_enwik8")
