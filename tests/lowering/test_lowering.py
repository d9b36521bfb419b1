"""Every family's train step at the paper's size becomes a program for TPUs and GPUs, without any.

Models and batches are shapes alone, on a mesh of 256 devices that are not there.
"""

from collections.abc import Callable, Mapping
import functools
import math

import jax
from jax.sharding import AbstractMesh, AxisType
import pytest

from configs import cifar10, commongen, mix, synthetic, vit_s16, wmt14
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import (freeze, ImageClassificationConfig, ImageGenerationConfig,
                               LanguageModelConfig, TextGenerationConfig)
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.training.abstract import abstract_run, abstract_update, AbstractUpdate
from damcha_jax.training.sharding import AXES
from damcha_jax.training.synthetic import synthetic_task

BACKENDS = {"tpu": "tpu", "cuda": "gpu"}  # by platform: what jax.default_backend() says there
FUSED = ("mha", "damcha", "moa", "mma")
OTHERS = tuple(name for name in ATTENTIONS if name not in ("mha", "damcha", "authors_mma"))


def _run(module, cls, attention: str, implementation: str, mesh: AbstractMesh):
  config = module.get_config().unlock()
  config.attentions, config.model.attention_implementation = attention, implementation
  config.batch_size = max(config.batch_size, mesh.size)
  return abstract_run(freeze(config, cls), attention, mesh)


def _synthetic(attention: str, implementation: str, mesh: AbstractMesh):
  config = synthetic.get_config().unlock()
  config.seeds, config.batch_size = (0, 1), max(config.batch_size, mesh.size)
  config.model.attention_implementation = implementation
  config = freeze(config, SyntheticConfig)
  task = synthetic_task(config, "retrieval", config.dimension, attention)
  return abstract_update(task, config, mesh, task.train_source.batch_at(0))


FAMILIES: Mapping[str, Callable[[str, str, AbstractMesh], AbstractUpdate]] = {
    "gpt2_enwik8": functools.partial(_run, mix, LanguageModelConfig),
    "image_generation": functools.partial(_run, cifar10, ImageGenerationConfig),
    "text_generation": functools.partial(_run, wmt14, TextGenerationConfig),
    "short_texts": functools.partial(_run, commongen, TextGenerationConfig),
    "vit_imagenet": functools.partial(_run, vit_s16, ImageClassificationConfig),
    "synthetic": _synthetic,
}


def _check(monkeypatch, family: str, attention: str, platform: str,
           shape: tuple[int, int, int] = (32, 8, 1), implementation: str = "auto") -> str:
  """Exports the step, compares what it takes and gives, and returns its program."""
  monkeypatch.setattr(jax, "default_backend", lambda: BACKENDS[platform])
  if implementation == "auto":
    implementation = "xla" if platform == "cuda" and attention in FUSED else "plain"
  mesh = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  before = sum(array.nbytes for array in jax.live_arrays())
  update = FAMILIES[family](attention, implementation, mesh)
  exported = jax.export.export(update.step, platforms=[platform])(update.targets, update.batch)
  assert sum(array.nbytes for array in jax.live_arrays()) - before < 1000
  assert exported.platforms == (platform,) and exported.nr_devices == math.prod(shape)
  assert exported.mlir_module_serialized
  state, metrics = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
      lambda leaf: (leaf.shape, leaf.dtype), update.targets)
  assert metrics["loss"].shape == ()
  return exported.mlir_module()


def test_the_language_model_with_damcha_is_lowered_for_tpus(monkeypatch):
  _check(monkeypatch, "gpt2_enwik8", "damcha", "tpu")


@pytest.mark.parametrize("family, attention, shape", [
    ("gpt2_enwik8", "damcha", (32, 8, 1)),
    pytest.param("gpt2_enwik8", "mha", (32, 4, 2), marks=pytest.mark.families),
    pytest.param("image_generation", "damcha", (32, 4, 2), marks=pytest.mark.families),
    pytest.param("image_generation", "moa", (32, 8, 1), marks=pytest.mark.families)])
def test_flash_attention_is_lowered_for_tpus(monkeypatch, family, attention, shape):
  program = _check(monkeypatch, family, attention, "tpu", shape, "pallas")
  assert program.count("@tpu_custom_call") >= 3  # forward, and two of the backward pass


@pytest.mark.families
@pytest.mark.parametrize("platform", BACKENDS)
@pytest.mark.parametrize("attention", ("mha", "damcha"))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_lowered(monkeypatch, family, attention, platform):
  _check(monkeypatch, family, attention, platform)


@pytest.mark.families
@pytest.mark.parametrize("platform", BACKENDS)
@pytest.mark.parametrize("attention", OTHERS)
def test_every_comparator_is_lowered(monkeypatch, attention, platform):
  _check(monkeypatch, "gpt2_enwik8", attention, platform)


@pytest.mark.families
@pytest.mark.parametrize("attention", ("mha", "damcha"))
def test_the_tensor_axis_is_lowered(monkeypatch, attention):
  _check(monkeypatch, "image_generation", attention, "tpu", (16, 8, 2))
