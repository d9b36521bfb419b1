"""BARTScore against PyTorch's BART, and the directories and texts that are refused."""

from __future__ import annotations

import json
import pathlib
import shutil

import chex
import jax
import numpy as np
import pytest
from random_weights import random_tensors

from damcha_jax.evaluation import bart
from damcha_jax.evaluation import published
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.published import WeightsError
from damcha_jax.interop import tensor_files

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "bart.json").read_text(encoding="utf-8"))


def _tensors() -> dict[str, np.ndarray]:
  return random_tensors({name: tuple(shape) for name, shape in EXPECTED["shapes"].items()}, 1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("bart") / "bart"
  shutil.copytree(FIXTURES / "bart", path)
  tensors = _tensors()
  tensors["model.encoder.embed_tokens.weight"] = tensors["model.shared.weight"]
  tensor_files.write_safetensors(path / "model.safetensors", tensors)
  return path


@pytest.fixture(scope="module")
def scorer(directory: pathlib.Path) -> bart.BartScorer:
  return bart.BartScorer(directory, batch_size=2, allow_other_weights=True)


def test_tokens_and_scores_are_those_of_the_original(scorer: bart.BartScorer) -> None:
  sources, targets = EXPECTED["sources"], EXPECTED["targets"]
  tokens = zip(scorer.encode(sources)[0], scorer.encode(targets)[0])
  assert [list(pair) for pair in tokens] == EXPECTED["tokens"]
  values_N, notes = scorer.score(sources, targets)
  np.testing.assert_allclose(values_N, EXPECTED["scores"], rtol=1e-5)
  assert not notes
  # The scores must depend on the sources for the comparison to cover them.
  shuffled_N = scorer.score(sources[::-1], targets).values_N
  assert np.abs(shuffled_N - values_N).min() > 1e-3


def test_scores_do_not_depend_on_batches_or_neighbours(directory: pathlib.Path) -> None:
  sources, targets = EXPECTED["sources"] * 2, EXPECTED["targets"] * 2
  scorer = bart.BartScorer(directory, batch_size=3, allow_other_weights=True)
  np.testing.assert_allclose(scorer.score(sources, targets).values_N, EXPECTED["scores"] * 2,
                             rtol=1e-5)


def test_over_long_texts_are_cut_with_a_note(scorer: bart.BartScorer) -> None:
  long = "red house " * 40
  (ids,), num_cut = scorer.encode([long])
  assert num_cut == 1 and len(ids) == 48 and (ids[0], ids[-1]) == (0, 2)
  values_N, notes = scorer.score([long, "red"], ["red", "red"])
  assert notes == ("1 of 2 sources were cut to 48 tokens",)
  assert np.isfinite(values_N).all()
  # What is cut off makes no difference, what is kept does.
  again_N = scorer.score([long + "x", "red"], ["red", "red"]).values_N
  np.testing.assert_allclose(again_N, values_N, rtol=1e-6)


def test_a_vocabulary_and_merges_give_the_same_tokens(
    scorer: bart.BartScorer, directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
  merges = [" ".join(pair) for pair in model["merges"]]
  (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
  (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
  tokenizer = bart.load_tokenizer(tmp_path)
  for text, ids in zip(EXPECTED["sources"], scorer.encode(EXPECTED["sources"])[0]):
    assert tokenizer.encode(text).ids == ids


def test_pairs_and_tokens_that_do_not_fit_are_refused(
    scorer: bart.BartScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
  with pytest.raises(MetricError, match="0 sources and 0 targets"):
    scorer.score([], [])
  with pytest.raises(MetricError, match="1 sources and 2 targets"):
    scorer.score(["a"], ["a", "b"])
  small = bart.dataclasses.replace(scorer.config, vocab_size=80)
  monkeypatch.setattr(scorer, "config", small)
  with pytest.raises(MetricError, match="'the fox' has token 2.., and the model knows 80"):
    scorer.encode(["the fox"])
  monkeypatch.setattr(scorer, "config", bart.dataclasses.replace(small, eos_token_id=5))
  with pytest.raises(MetricError, match="does not put <s> and </s>"):
    scorer.encode(["a"])


def _edited(directory: pathlib.Path, tmp_path: pathlib.Path, **changes: object) -> pathlib.Path:
  path = tmp_path / "edited"
  shutil.copytree(directory, path)
  config = json.loads((path / "config.json").read_text(encoding="utf-8"))
  config.update(changes)
  config = {name: value for name, value in config.items() if value is not None}
  (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
  return path


@pytest.mark.parametrize("changes, message", [
    ({"model_type": "mbart"}, "is of a mbart"),
    ({"activation_function": "relu"}, "with relu"),
    ({"d_model": None}, "lacks 'd_model'"),
    ({"encoder_layers": 1}, "encoder.layers.*has shape"),
    ({"decoder_layers": 4}, "decoder.layers.*has shape"),
    ({"d_model": 24}, "has shape"),
    *(({"d_model": value}, "has d_model=.*, which is no") for value in ("8", [8], 8.0, True)),
    *(({"d_model": value}, "has d_model=.*, which is not from") for value in (-8, 0, 10**12)),
    ({"encoder_attention_heads": 0}, "has encoder_attention_heads=0"),
    ({"decoder_attention_heads": 7}, "decoder_attention_heads=7, which do not divide"),
    ({"scale_embedding": "no"}, "has scale_embedding='no', which is no bool"),
    ({"pad_token_id": 10**6}, "has pad_token_id=1000000, which is not from"),
])
def test_other_models_are_refused(directory, tmp_path, changes, message) -> None:
  with pytest.raises(WeightsError, match=message) as caught:
    bart.BartScorer(_edited(directory, tmp_path, **changes), allow_other_weights=True)
  assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_named(directory, tmp_path) -> None:
  with pytest.raises(WeightsError, match="not the published BART .* or set allow_other_weights"):
    bart.BartScorer(directory)
  path = _edited(directory, tmp_path)
  load = lambda: bart.BartScorer(path, allow_other_weights=True)
  weights = (path / "model.safetensors").read_bytes()
  (path / "model.safetensors").write_bytes(weights[:-3])
  with pytest.raises(tensor_files.TensorFileError, match="damaged"):
    load()
  (path / "tokenizer.json").write_text("{", encoding="utf-8")
  with pytest.raises(WeightsError, match="tokenizer in .* is damaged"):
    load()
  (path / "tokenizer.json").unlink()
  with pytest.raises(WeightsError, match="neither tokenizer.json nor vocab.json"):
    load()
  (path / "model.safetensors").unlink()
  with pytest.raises(WeightsError, match="model.safetensors is missing; fetch https"):
    load()
  (path / "config.json").write_text("[]", encoding="utf-8")
  with pytest.raises(WeightsError, match="config.json is damaged"):
    load()
  with pytest.raises(WeightsError, match="config.json cannot be read.*fetch https"):
    bart.BartScorer(tmp_path / "none")


def test_layers_that_differ_are_refused(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
  path, tensors = _edited(directory, tmp_path), _tensors()
  del tensors["model.decoder.layers.1.fc1.bias"]
  tensor_files.write_safetensors(path / "model.safetensors", tensors)
  with pytest.raises(WeightsError, match="layers differ in model.decoder.layers.fc1.bias"):
    bart.BartScorer(path, allow_other_weights=True)


def _without_prefix(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name.removeprefix("model."): array for name, array in tensors.items()}


def _embedding_as(name: str):
  def rename(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name if key == "model.shared.weight" else key: array for key, array in tensors.items()}
  return rename


@pytest.mark.parametrize("change", [
    _without_prefix,
    lambda tensors: {**tensors, "model.encoder.version": np.full(1, 3, np.float32)},
    lambda tensors: _without_prefix(_embedding_as("lm_head.weight")(tensors)),
    _embedding_as("model.decoder.embed_tokens.weight"),
], ids=["prefix", "version", "head", "embedding"])
def test_the_layouts_of_published_files(directory, tmp_path, change) -> None:
  path, tensors = _edited(directory, tmp_path), _tensors()
  config = bart.read_config(path)
  del tensors["final_logits_bias"]  # left out where it is zero
  tensor_files.write_safetensors(path / "model.safetensors", change(tensors))
  actual, expected = bart.load_params(path, config), bart.load_params(directory, config)
  expected["final_logits_bias"] = np.zeros((1, config.vocab_size), np.float32)
  chex.assert_trees_all_equal(actual, expected)


def test_the_published_model_has_as_many_parameters() -> None:
  # 406,290,432 in facebook/bart-large-cnn's file, which leaves out the bias of the logits.
  config = bart.BartConfig(50264, 1024, 12, 12, 16, 16, 4096, 4096, 1024, 1, 0, 2, 2, False)
  shapes = jax.tree.leaves(bart.abstract_params(config))
  assert sum(leaf.size for leaf in shapes) == 406_290_432 + config.vocab_size
  # The file's bytes are those, in float32, and a header of the 511 names.
  assert 0 < published.BART.num_bytes - 4 * 406_290_432 < 511 * 150
