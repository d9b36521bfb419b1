"""Checkpoints of earlier versions stay readable, whatever reads them."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from damcha_jax.training.restore import restore_params
from tests.resume import golden_checkpoint
from tiny_task import assert_trees_equal


@pytest.fixture(name="golden", scope="module")
def _golden():
  return golden_checkpoint.Golden()


def test_training_goes_on_from_it(golden, tmp_path):
  shutil.copytree(golden_checkpoint.FOLDER / "checkpoints", tmp_path / "checkpoints")
  checkpointer = golden.checkpointer(tmp_path / "checkpoints")
  restored = checkpointer.restore_latest()
  checkpointer.close()
  assert_trees_equal(restored, golden.state())


def test_its_parameters_compute_what_they_did(golden):
  step, params = restore_params(golden_checkpoint.FOLDER, golden.targets.params, "last",
                                "nats_per_token", pytest.fail)
  assert step == golden_checkpoint.STEP
  expected = json.loads((golden_checkpoint.FOLDER / "logits.json").read_text())
  np.testing.assert_allclose(golden.logits(params)[:, :8], expected, atol=1e-4)
  assert np.std(expected) > 0.1 and len(jax.tree.leaves(params)) > 10
