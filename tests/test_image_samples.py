"""Drawn images: their likelihoods, the rows that were given, classes, and interrupted drawing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import cifar10
from damcha_jax import image_samples
from damcha_jax.analysis.causality import random_variables
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError, ImageGenerationConfig, freeze
from damcha_jax.data.images import load_image_data
from damcha_jax.image_samples import read_samples, sample_images
from damcha_jax.models.decoder import make_decoder
from damcha_jax.origins import origin_of
from damcha_jax.sampling import Sampler
from damcha_jax.training.decoder import sums_per_row
from damcha_jax.training.image_generation import image_generation_task


def _config(class_conditional=False, **sampling):
  config = cifar10.get_config("smoke")
  with config.unlocked():
    config.model.update(num_layers=1, features=8, mlp_features=16, vocab_size=265)
    config.damcha.update(widths=(6, 6))
    config.data.update(class_conditional=class_conditional, max_held_out_images=12)
    config.sampling.update(**{"num_samples": 6, "num_completions": 5, "batch_size": 4, **sampling})
  return freeze(config, ImageGenerationConfig)


class _Run:
  """A model with random parameters in the place of a trained one; counts how often it is read."""

  def __init__(self, monkeypatch, config, attention="damcha"):
    self.config, self.attention, self.restored, self.notes = config, attention, 0, []
    self.step, self.seed = 7, 0
    self.data = load_image_data(config.dataset, config.data)
    self.params = random_variables(make_decoder(config, attention), jnp.zeros((1, 4), jnp.int32),
                                   std=0.3)["params"]
    self._decoder = make_decoder(config, attention, evaluation=True, decode=True)
    monkeypatch.setattr(image_samples, "restore_decoder", self._restore)
    monkeypatch.setattr(image_samples, "Sampler", functools.cache(Sampler))  # compiled once

  def _restore(self, directory, config, attention, which, note):
    del directory, config, attention, note
    self.restored += 1
    return self._decoder, which, self.params

  def sample(self, folder):
    return sample_images(self.config, self.attention, self.seed, folder, self.data,
                         self.notes.append, self.result)

  @property
  def result(self):
    return {"selection_metric": "nats_per_token", "best": {
        "step": self.step, "metrics": {"validation": {"nats_per_token": 5.0}}}}

  def nats(self, images, begin):
    """Of whole images and of their lower halves, by scoring."""
    tokens = images.reshape(len(images), -1).astype(np.int32)
    batch = {"inputs": np.concatenate([begin[:, None], tokens[:, :-1]], 1), "targets": tokens}
    lower = np.repeat(np.arange(64)[None] >= 32, len(tokens), 0).astype(np.float32)
    model = make_decoder(self.config, self.attention, evaluation=True)
    score = jax.jit(lambda params, batch: sums_per_row(model, params, batch)["nats"])
    return [np.asarray(score(self.params, {**batch, "weights": weights}))
            for weights in (np.ones_like(lower), lower)]


def _check_likelihoods(run, samples):
  whole, _ = run.nats(samples.images, samples.begin)
  np.testing.assert_allclose(-samples.log_likelihoods, whole, rtol=0, atol=1e-4 * 64)
  np.testing.assert_allclose(-samples.log_likelihoods / 64, whole / 64, rtol=0, atol=1e-4)


@pytest.mark.families
def test_images_have_the_likelihood_that_scoring_gives(monkeypatch, tmp_path):
  run = _Run(monkeypatch, _config())
  samples = run.sample(tmp_path)
  assert samples.images.shape == (6, 8, 8) and samples.images.dtype == np.uint8
  assert samples.step == 7 and (samples.begin == 0).all()
  _check_likelihoods(run, samples)
  assert len({image.tobytes() for image in samples.images}) == 6

  truth = run.data.decode(run.data.tokens["test"])[:5]
  assert samples.completed.shape == (5, 8, 8) and samples.num_given_rows == 4
  assert np.array_equal(samples.completed[:, :4], truth[:, :4])
  assert (samples.completed[:, 4:] != truth[:, 4:]).any((1, 2)).all()
  _, lower = run.nats(samples.completed, np.zeros(5, np.int32))
  np.testing.assert_allclose(-samples.completed_log_likelihoods / 32, lower / 32, rtol=0, atol=1e-4)

  for ours, theirs in zip(run.sample(tmp_path), samples):  # reads
    assert np.array_equal(ours, theirs)
  assert run.restored == 1 and not (tmp_path / "samples").exists()


def test_interrupted_drawing_goes_on(monkeypatch, tmp_path):
  run = _Run(monkeypatch, _config(), "mha")
  whole = run.sample(tmp_path / "whole")
  write, seen = image_samples._write, []

  def stop(path, origin, arrays):
    if len(seen) == 3:
      raise KeyboardInterrupt
    seen.append(path)
    write(path, origin, arrays)

  monkeypatch.setattr(image_samples, "_write", stop)
  with pytest.raises(KeyboardInterrupt):
    run.sample(tmp_path / "cut")
  monkeypatch.setattr(image_samples, "_write", write)
  assert not (tmp_path / "cut" / image_samples.FILE).exists()
  seen[1].write_bytes(seen[1].read_bytes()[:-30])  # and one was torn
  run.notes.clear()
  resumed = run.sample(tmp_path / "cut")
  compiling = [f"{part}: compiling the sampler" for part in ("images", "completed")]
  assert run.notes == [compiling[0], "images: 6 of 6 drawn",
                       compiling[1], "completed: 5 of 5 drawn"]
  for ours, theirs in zip(resumed, whole):
    assert np.array_equal(ours, theirs)


@pytest.mark.families
def test_samples_of_another_step_seed_or_rule_are_drawn_again(monkeypatch, tmp_path):
  """A part, or all, that was put there or kept from before is not taken for what is asked."""
  run = _Run(monkeypatch, _config(), "mha")
  run.sample(tmp_path)
  file = tmp_path / image_samples.FILE
  kept = file.read_bytes()

  def drawn_again():
    before, run.notes = run.restored, []
    run.sample(tmp_path)
    return run.restored > before and any(line.endswith("drawing again") for line in run.notes)

  assert not drawn_again()
  for name, value in (("step", 8), ("seed", 1), ("config", _config(temperature=0.5))):
    setattr(run, name, value)
    assert drawn_again() and not drawn_again()

  file.write_bytes(kept)
  with np.load(file) as archive:
    arrays = dict(archive)
  run.step = 7
  origin = origin_of("mha", 0, run.result, _config().sampling)
  assert read_samples(tmp_path, origin) is not None
  for change in ({"images": arrays["images"][:3]}, {"step": np.array(8)}, {"extra": np.zeros(1)},
                 {"images": arrays["images"].astype(float)}, {"seal": np.zeros(3)}):
    np.savez(file, **{**arrays, **change})
    assert read_samples(tmp_path, origin) is None
  np.savez(file, **{name: array for name, array in arrays.items() if name != "begin"})
  assert read_samples(tmp_path, origin) is None


def test_parts_of_another_step_are_drawn_again(monkeypatch, tmp_path):
  run = _Run(monkeypatch, _config(), "mha")
  remove = image_samples._Parts.remove
  monkeypatch.setattr(image_samples._Parts, "remove", lambda self: None)
  run.sample(tmp_path)
  (tmp_path / image_samples.FILE).unlink()
  run.step, run.notes = 8, []
  monkeypatch.setattr(image_samples._Parts, "remove", remove)
  assert run.sample(tmp_path).step == 8
  assert [line for line in run.notes if "drawn" in line] == [
      "images: 4 of 6 drawn", "images: 6 of 6 drawn", "completed: 4 of 5 drawn",
      "completed: 5 of 5 drawn"]


@pytest.mark.families
def test_classes_begin_the_sequences_and_are_never_pixels(monkeypatch, tmp_path):
  run = _Run(monkeypatch, _config(class_conditional=True, num_samples=14, batch_size=7), "mha")
  labels = run.data.labels["test"]
  # A model that says nothing but classes.
  run.params["head"] = run.params["head"].at[256:].multiply(50.0)
  samples = run.sample(tmp_path)
  assert np.array_equal(samples.begin, 256 + labels[np.arange(14) % 12].astype(np.int32))
  _check_likelihoods(run, samples)
  # The images, uint8, hold what was drawn: a class would have come out as another pixel.
  assert -samples.log_likelihoods.max() > 64 * np.log(256)


def test_the_vocabulary_must_hold_the_classes():
  config = _config(class_conditional=True)
  small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=264))
  with pytest.raises(ConfigError, match="does not hold 256 pixel values and the 9 classes of 's"
                     ".*set it to 265"):
    image_generation_task(small, "mha", seed=0)


@pytest.mark.families
def test_other_batches_draw_the_same(monkeypatch, tmp_path):
  run = _Run(monkeypatch, _config())
  four = run.sample(tmp_path / "four")
  run.config = _config(batch_size=3)
  three = run.sample(tmp_path / "three")
  for field in ("images", "completed", "begin"):
    assert np.array_equal(getattr(three, field), getattr(four, field))
  np.testing.assert_allclose(three.log_likelihoods, four.log_likelihoods, rtol=1e-5)


@pytest.mark.families
@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_every_attention_scores_what_it_draws(monkeypatch, tmp_path, attention):
  run = _Run(monkeypatch, _config(), attention)
  _check_likelihoods(run, run.sample(tmp_path))
