"""The same numbers on every mesh: training, evaluation, restores; and errors."""

from __future__ import annotations

import json
from pathlib import Path

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.config import ConfigError, MeshConfig
from damcha_jax.training import sharding as sharding_lib
import eight_devices
import eight_devices_collectives
from tiny_task import RULES, assert_trees_equal, run_script


QUICK = ("1x1x1", "2x2x2")


def _run(path, scanned, unrolled):
  done = run_script(Path(eight_devices.__file__), path, ",".join(scanned), ",".join(unrolled),
                    num_devices=8)
  assert done.returncode == 0, done.stderr
  return json.loads((path / "report.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Where eight_devices.py left its report and checkpoints."""
  path = tmp_path_factory.mktemp("eight_devices")
  _run(path, QUICK, ["1x1x1"])
  return path


@pytest.fixture(scope="module")
def report(folder):
  return json.loads((folder / "report.json").read_text())


def _check_losses(losses, scan_layers, meshes):
  one = losses[f"1x1x1 {scan_layers}"]
  assert len(one) == eight_devices.NUM_STEPS and one[-1] < one[0] - 0.5
  for mesh in meshes:
    np.testing.assert_allclose(losses[f"{mesh} {scan_layers}"], one, rtol=1e-5, err_msg=mesh)


def test_twenty_steps_agree_on_a_mesh_of_every_axis(report):
  _check_losses(report["losses"], True, QUICK)


@pytest.mark.families
def test_twenty_steps_agree_on_every_mesh_scanned_and_unrolled(tmp_path):
  report = _run(tmp_path, eight_devices.MESHES, eight_devices.MESHES)
  _check_losses(report["losses"], True, eight_devices.MESHES)
  _check_losses(report["losses"], False, eight_devices.MESHES)
  assert report["moved"] == dict.fromkeys(eight_devices.MESHES, True)


def test_scanned_and_unrolled_stacks_agree(report):
  losses = report["losses"]
  np.testing.assert_allclose(losses["1x1x1 True"], losses["1x1x1 False"], rtol=1e-5)


def test_parameters_are_created_sharded_with_the_same_values(report):
  assert all(difference < 1e-6 for difference in report["initial_difference"].values())
  assert len(report["initial_difference"]) == 3
  assert report["fraction"]["1x1x1 True"] == 1.0
  assert report["fraction"]["2x2x2 True"] <= 0.5


def test_evaluation_is_the_same_for_batches_1_to_10_000_on_1_and_8_devices(report):
  evaluations = list(report["evaluations"].values())
  assert len(evaluations) == 7
  for evaluation in evaluations:
    assert evaluation["weight"] == 1000.0  # 5% of the corpus, each byte once
    assert evaluation["nats"] == pytest.approx(evaluations[0]["nats"], rel=1e-6)


def test_checkpoints_move_from_8_devices_to_2_and_back(report):
  assert report["restored"] == [[2, True], [8, True]]
  assert report["moved"] == {"1x1x1": True, "2x2x2": True}  # to two devices and back


def test_a_checkpoint_of_eight_devices_opens_in_a_process_with_other_devices(folder):
  one = eight_devices.Setup(eight_devices.make_config(folder / "corpus.txt", True), (1, 1, 1))
  checkpointer = one.checkpointer(folder / "to 2")
  restored = checkpointer.restore_latest()
  checkpointer.close()
  with np.load(folder / "state.npz") as saved:
    wanted = [saved[name] for name in saved.files]
  assert len(jax.devices()) != 8
  assert_trees_equal(jax.tree.leaves(restored), wanted)


def _partitioning(rules=RULES):
  return sharding_lib.Partitioning(
      sharding_lib.make_mesh(MeshConfig(-1, 1, 1), jax.devices()[:1]), rules)


def _boxed(shape, names):
  return {"layer": {"kernel": nn.LogicallyPartitioned(
      jax.ShapeDtypeStruct(shape, jnp.float32), names)}}


@pytest.mark.families
def test_meshes_exchange_parameters_and_gradients_and_no_activations():
  """Activations left to XLA were exchanged and kept whole: 8 times the parameters' bytes."""
  done = run_script(Path(eight_devices_collectives.__file__), num_devices=8)
  assert done.returncode == 0, done.stderr
  assert "Involuntary full rematerialization" not in done.stderr
  exchanged = json.loads(done.stdout)
  for attention in ("mha", "damcha"):
    data, fsdp = exchanged["8x1x1"][attention], exchanged["1x8x1"][attention]
    params = data["params"]
    assert set(data) == {"all-reduce", "params", "peak"}
    # The gradients, once: the tied embedding's two parts each, and of a row of blocks, whose
    # gradients are equal, one.
    assert 0.6 * params < data["all-reduce"] < 1.05 * params
    assert fsdp["all-reduce"] < 1.3 * params
    assert fsdp["all-gather"] < 1.3 * params  # on a CPU forward and backward share one gather
    assert fsdp["peak"] < 0.75 * data["peak"]


def test_a_dimension_that_does_not_divide_names_parameter_axis_and_remedy():
  partitioning = _partitioning()
  # The arithmetic needs no devices.
  partitioning.mesh = jax.sharding.AbstractMesh((1, 4, 2), sharding_lib.AXES)
  assert partitioning.shardings(_boxed((8, 6), ("embed", "mlp")))["layer"]["kernel"].spec == (
      jax.sharding.PartitionSpec("fsdp", "tensor"))
  with pytest.raises(ConfigError, match=r"'layer/kernel': dimension 0 \('embed', size 6\) is not a "
                                        r"multiple of mesh fsdp = 4; .*map 'embed' to None"):
    partitioning.shardings(_boxed((6, 6), ("embed", "mlp")))
  with pytest.raises(ConfigError, match=r"logical axis 'heads', .*add \('heads', None\)"):
    partitioning.shardings(_boxed((8, 6), ("embed", "heads")))


def test_batch_size_errors_name_the_numbers_and_a_remedy():
  mesh = jax.sharding.AbstractMesh((4, 2, 1), sharding_lib.AXES)
  sharding_lib.check_batch_size(32, 2, mesh)
  with pytest.raises(ConfigError, match=r"20 is not a multiple of 16 \(mesh data 4 x fsdp 2 x "
                                        r"optimizer.accumulation_steps 2\); use batch_size 16"):
    sharding_lib.check_batch_size(20, 2, mesh)


def test_mesh_errors_name_the_numbers():
  with pytest.raises(ConfigError, match="mesh data 3 x fsdp -1 x tensor 2 needs a multiple of 6"):
    sharding_lib.make_mesh(MeshConfig(3, -1, 2), jax.devices()[:1] * 8)
