"""`python -m experiments.rowsum`: equal functions, equal updates, fewer parameters."""

import json

import pytest

from configs import mix
from experiments import rowsum


@pytest.mark.families
def test_rowsum_computes_and_trains_the_same_with_fewer_parameters(tmp_path):
  config = mix.get_config("smoke")
  config.dataset = str(tmp_path / "text.txt")
  (tmp_path / "text.txt").write_text("one two three " * 400)
  rowsum.train_and_evaluate(config, tmp_path / "run")
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["experiment"] == "rowsum" and summary["status"] == "ok"
  value = {row["metric"]: row["value"] for row in summary["rows"]}
  assert value["loss_difference"] < 1e-5
  assert value["update_size"] > 1e-3
  assert value["update_difference"] < 1e-2 * value["update_size"]
  assert value["num_params_ratio"] < 1
  assert value["step_time_ratio"] > 0
