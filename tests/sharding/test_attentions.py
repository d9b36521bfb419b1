"""A training step on a 4x2 mesh is that of one device, whatever the attention."""

import json
from pathlib import Path

import numpy as np
import pytest

from damcha_jax.attention import ATTENTIONS
import eight_devices_attentions
import eight_devices_flash
from tiny_task import run_script

def _check(path: Path, names: list[str]) -> None:
  done = run_script(Path(eight_devices_attentions.__file__), path, ",".join(names), num_devices=8)
  assert done.returncode == 0, done.stderr
  report = json.loads((path / "report.json").read_text())
  assert list(report) == list(names)
  for name, of in report.items():
    np.testing.assert_allclose(of["losses"][1], of["losses"][0], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(of["norms"][1], of["norms"][0], rtol=1e-4, err_msg=name)
    assert of["difference"] < 1e-6 < 1e-5 < of["moved"], name
    assert of["largest"] <= 0.5, name  # of any big array
    auxiliary = ["switch_loss", "z_loss"] if name == "moa" else []
    assert of["sums"] == sorted(["nats", "weight", *auxiliary])


@pytest.mark.families
def test_a_step_on_eight_devices_is_that_of_one(tmp_path):
  _check(tmp_path, list(ATTENTIONS))


@pytest.fixture(name="flash_report", scope="module")
def _flash_report(tmp_path_factory):
  path = tmp_path_factory.mktemp("flash")
  done = run_script(Path(eight_devices_flash.__file__), path, num_devices=8)
  assert done.returncode == 0, done.stderr
  return json.loads((path / "report.json").read_text())


@pytest.mark.families
def test_each_device_runs_the_fused_kernel_on_its_rows_and_heads(flash_report):
  assert len(flash_report["gradients"]) == 4
  for name, of in flash_report["gradients"].items():
    assert of["shapes"] == [[2, 2, 128, 6] if "4 heads" in name else [2, 3, 128, 8]], name
    assert of["difference"] < 1e-5, name  # of the largest entry; sums go in another order


@pytest.mark.families
def test_the_loops_diagnostics_are_lowered_with_the_fused_kernel(flash_report):
  assert flash_report["kernels"]["diagnostics"] > 0
