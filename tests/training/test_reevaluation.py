"""A trained run evaluated with other blocks, and how far its blocks moved."""

import dataclasses

from lm_run import tiny_language_model, write_corpus
import pytest

from damcha_jax.errors import WorkdirError
from damcha_jax.training import loop
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.reevaluation import drift_of_blocks, reevaluate
from damcha_jax.training.workdir import Workdir


def _ignore(line):
  del line


@pytest.mark.families
def test_a_run_is_reevaluated_with_the_blocks_that_are_left(tmp_path):
  config = tiny_language_model(write_corpus(tmp_path / "text.txt"), scan_layers=False)
  config = dataclasses.replace(
      config, model=dataclasses.replace(config.model, num_layers=1, scan_layers=False),
      damcha=dataclasses.replace(config.damcha, parameterization="blocks", widths=(4,)),
      optimizer=dataclasses.replace(config.optimizer, weight_decay=0.0, accumulation_steps=1))
  task = language_model_task(config, "damcha", seed=0)
  trained = tmp_path / "trained"
  with pytest.raises(WorkdirError, match="is not trained to the end"):
    reevaluate(task, config, trained, tmp_path / "again", 0, _ignore)
  result = loop.train(task, config, trained, seed=0)

  same = reevaluate(task, config, trained, tmp_path / "again", 0, _ignore)
  assert same["best"]["step"] == result["best"]["step"]
  for split in ("validation", "test"):
    assert same["best"]["metrics"][split]["nats_per_token"] == pytest.approx(
        result["best"]["metrics"][split]["nats_per_token"], rel=1e-6)

  ablated = dataclasses.replace(
      config, damcha=dataclasses.replace(config.damcha, block_ablation_eval="diagonal"))
  directory = tmp_path / "diagonal"
  task = language_model_task(ablated, "damcha", seed=0)
  diagonal = reevaluate(task, ablated, trained, directory, 0, _ignore)
  nats = [one["best"]["metrics"]["test"]["nats_per_token"] for one in (same, diagonal)]
  assert abs(nats[1] - nats[0]) > 1e-4
  assert diagonal["num_params"] == result["num_params"] and "final" not in diagonal
  assert Workdir(directory).read_json("result.json") == diagonal
  with pytest.raises(WorkdirError, match="block_ablation_eval='diagonal', not 'full'"):
    reevaluate(task, config, trained, directory, 0, _ignore)

  drift = drift_of_blocks(task, ablated, trained, 0, _ignore)
  assert drift["block_drift"] > 1e-3
  assert drift["block_spread_max"] < 1e-4 * drift["block_drift"] < drift["block_difference"]
  # Once measured, checkpoints are no longer needed.
  (trained / "checkpoints").rename(tmp_path / "elsewhere")
  assert drift_of_blocks(task, ablated, trained, 0, _ignore) == drift
  assert reevaluate(task, ablated, trained, directory, 0, _ignore) == diagonal
