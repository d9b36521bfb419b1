"""The classification task: targets, metrics, averaged weights, and what does not fit the data."""

import dataclasses
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import vit_s16
from damcha_jax.config import ConfigError, freeze, ImageClassificationConfig
from damcha_jax.training import image_classification, loop
from damcha_jax.training.image_classification import (image_classification_task, loss_and_sums,
                                                      metrics_of, sums_per_row)

SMOKE = freeze(vit_s16.get_config("smoke"), ImageClassificationConfig)


def _config(**changes):
  """One layer of width 8, and changes of the form section={key: value} or key=value."""
  sections = {"model": dict(num_layers=1, num_heads=2, features=8, mlp_features=8,
                            stochastic_depth_rate=0.0), "damcha": dict(widths=(4,))}
  sections |= {key: {**sections.get(key, {}), **value} for key, value in changes.items()
               if isinstance(value, dict)}
  return dataclasses.replace(
      SMOKE,
      **{key: value for key, value in changes.items() if not isinstance(value, dict)},
      **{key: dataclasses.replace(getattr(SMOKE, key), **value)
         for key, value in sections.items()})


class _Logits(nn.Module):
  """Logits that the images themselves are, between -1 and 1."""

  num_classes: int = 8

  def __call__(self, images, deterministic=True):
    return images.reshape(len(images), -1)[:, :self.num_classes]


def _batch(rows=6):
  rng = np.random.default_rng(0)
  return {"inputs": rng.integers(0, 256, (rows, 3, 3, 1)).astype(np.uint8),
          "targets": rng.integers(0, 8, rows).astype(np.int32),
          "weights": np.array([1.0] * (rows - 1) + [0.0], np.float32)}


def _log_softmax(logits):
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_smoothed_and_mixed_targets_are_as_the_formula_says():
  batch, key = _batch(), jax.random.key(3)
  augmentation = dataclasses.replace(SMOKE.augmentation, label_smoothing=0.2, mixup_alpha=0.5)
  loss, sums = loss_and_sums(_Logits(), augmentation, {}, batch, key)
  images = batch["inputs"].reshape(6, -1) / 127.5 - 1
  targets = 0.8 * np.eye(8)[batch["targets"]] + 0.2 / 8
  weight = float(jax.random.beta(jax.random.split(key)[0], 0.5, 0.5))
  mix = lambda rows: weight * rows + (1 - weight) * np.roll(rows, 1, axis=0)
  nats = -(mix(targets) * _log_softmax(mix(images)[:, :8])).sum(-1)
  assert 0.01 < weight < 0.99
  np.testing.assert_allclose(loss, (batch["weights"] * nats).sum(), rtol=1e-5)
  assert sums["weight"] == 5 and sums["nats"] == loss

  plain, _ = loss_and_sums(_Logits(), augmentation, {}, batch, None)
  nats = -(targets * _log_softmax(images[:, :8])).sum(-1)
  np.testing.assert_allclose(plain, (batch["weights"] * nats).sum(), rtol=1e-5)


def test_accuracies_are_those_of_a_sort_and_ties_are_no_success():
  batch = _batch(rows=200)
  sums = {name: np.asarray(rows) for name, rows in sums_per_row(_Logits(), {}, batch).items()}
  logits = batch["inputs"].reshape(200, -1)[:, :8].astype(int)
  order = np.argsort(-logits, axis=-1)
  for name, top in (("top1", 1), ("top5", 5)):
    hits = (order[:, :top] == batch["targets"][:, None]).any(-1)
    untied = np.array([len(set(row)) == 8 for row in logits])
    np.testing.assert_array_equal(sums[name][:-1][untied[:-1]], hits[:-1][untied[:-1]])
    assert sums[name][-1] == 0
  same = {**batch, "inputs": np.zeros_like(batch["inputs"])}
  assert not np.asarray(sums_per_row(_Logits(), {}, same)["top5"]).any()
  assert metrics_of({"weight": 4.0, "nats": 6.0, "top1": 1.0, "top5": 3.0, "z_loss": 2.0}) == {
      "nats_per_image": 1.5, "top1": 25.0, "top5": 75.0, "z_loss": 0.5}


@pytest.mark.parametrize("changes, message", [
    (dict(model=dict(num_classes=100)), "model.num_classes=100 is not the 99 of 'sample_images'"),
    (dict(batch_size=16), "steps_per_epoch=365 is not what 2,924 images take with batch_size=16; "
     "set it to 182"),
])
def test_what_does_not_fit_is_said(changes, message):
  with pytest.raises(ConfigError, match=message):
    image_classification_task(_config(**changes), "mha", seed=0)


def test_a_task_offers_its_model_and_images_to_look_into():
  task = image_classification_task(_config(), "damcha", seed=0)
  batch = task.eval_sources["validation"].batch(0, 2)
  params = nn.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  logits, state = jax.eval_shape(lambda params: task.model.apply(
      {"params": params}, batch["inputs"], mutable=["intermediates"]), params)
  assert logits.shape == (2, 99) and jax.tree.leaves(state["intermediates"])
  assert set(task.eval_sources) == {"validation", image_classification.PROBED_SPLIT}


@pytest.mark.families
def test_averaged_weights_are_evaluated_and_resumed(tmp_path, monkeypatch):
  """Averages over updates n of decay^(N - n), those of a run in two parts bitwise the same."""
  config = _config(num_steps=4, ema_decay=0.75, batch_size=8,
                   data=dict(max_held_out_images=16, num_probed_images=16),
                   evaluation=dict(every_steps=2, batch_size=16), checkpoint=dict(every_steps=1),
                   logging=dict(every_steps=1, tensorboard=False))
  params, averages = [], []

  class Watched(loop._Run):

    def _save_if_due(self):
      params.append(jax.device_get(self.state.params))
      averages.append(jax.device_get(loop.state_lib.evaluated_params(self.state)))
      if self.step == stop_at:
        self.checkpointer.save(self.step, self.state)
        self.checkpointer.wait()
        raise KeyboardInterrupt
      super()._save_if_due()

  monkeypatch.setattr(loop, "_Run", Watched)
  task, stop_at = image_classification_task(config, "mha", seed=0), None
  result = loop.train(task, config, tmp_path / "whole", seed=0)
  expected = params[0]
  for latest, average in zip(params[1:], averages[1:], strict=True):
    expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, expected, latest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), average,
                 expected)
  batch = task.eval_sources["validation"].batch(0, 16)
  for name, tree in (("averaged", averages[-1]), ("last", params[-1])):
    sums = jax.jit(task.eval_loss_fn)(tree, batch)
    same = result["best"]["metrics"]["validation"]["nats_per_image"] == pytest.approx(
        float(jnp.sum(sums["nats"])) / 16, rel=1e-6)
    assert same == (name == "averaged")

  whole, stop_at = averages[-1], 3
  with pytest.raises(KeyboardInterrupt):
    loop.train(task, config, tmp_path / "parts", seed=0)
  stop_at = None
  loop.train(task, config, tmp_path / "parts", seed=0)
  jax.tree.map(np.testing.assert_array_equal, averages[-1], whole)
  read = lambda name: [json.loads(line) for line in
                       (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
  held_out = lambda name: [one for one in read(name) if one["split"] == "validation"]
  assert held_out("parts") == held_out("whole") and len(held_out("whole")) == 2
  assert all(one["images_per_second"] > 0 for one in read("whole") if one["split"] == "train")
