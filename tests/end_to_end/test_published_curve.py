"""The published curve of the main job starts where this installation starts."""

import csv
from pathlib import Path

from flax import linen as nn
import jax
import pytest

from configs import mix
from damcha_jax.config import freeze
from damcha_jax.training import state as state_lib
from damcha_jax.training.language_model import language_model_task

CURVE = Path(__file__).parents[2] / "results" / "mix_cpu" / "first_100_steps.csv"


@pytest.mark.parametrize("attention", ["mha", "damcha"])
def test_first_loss(attention):
  with CURVE.open() as file:
    published = list(csv.DictReader(file))
  assert [int(row["step"]) for row in published] == list(range(1, 101))
  config = freeze(mix.get_config("cpu"))
  task = language_model_task(config, attention, seed=0)
  key = state_lib.stream_key(state_lib.root_key(0, config.prng_impl), "params", 0)
  params = nn.unbox(jax.jit(task.init_params)(key))
  loss_sum, sums = jax.jit(lambda p, b: task.loss_fn(p, b, None))(
      params, task.train_source.batch_at(0))
  assert loss_sum / sums["weight"] == pytest.approx(float(published[0][attention]), abs=1e-4)
