"""The loss is the target's alone; packing, batches and splits do not change it."""

import dataclasses
import lzma

from flax import linen as nn
import jax
import numpy as np
import pytest

from configs import commongen
from damcha_jax.config import TextGenerationConfig, freeze
from damcha_jax.data.text_pairs import Example, encode
from damcha_jax.data.tokenizers import EOS, SEP
from damcha_jax.errors import DataError
from damcha_jax.training import decoder as decoder_lib
from damcha_jax.training import text_generation
from damcha_jax.training.text_generation import eval_rows, load_texts, text_generation_task

EXAMPLES = {
    "train": [Example(f"{n} plus {n}", (f"is {2 * n}", f"makes {2 * n}")) for n in range(40)],
    "validation": [Example(f"{n} plus {n + 1}", (f"is {2 * n + 1}",)) for n in range(13)],
    "test": [Example(f"{n} plus {n + 2}", (f"is {2 * n + 2}", "or so")) for n in range(5)],
}


@pytest.fixture(name="config", scope="module")
def _config(tmp_path_factory):
  folder = tmp_path_factory.mktemp("sums")
  for split, examples in EXAMPLES.items():
    (folder / f"{split}.tsv.xz").write_bytes(lzma.compress(encode(examples)))
  config = freeze(commongen.get_config("smoke"), TextGenerationConfig)
  return dataclasses.replace(
      config, dataset=str(folder), batch_size=4,
      model=dataclasses.replace(config.model, num_layers=1, vocab_size=280),
      damcha=dataclasses.replace(config.damcha, stride=4, widths=(8,)),
      data=dataclasses.replace(config.data, data_dir=str(folder / "data")))


@pytest.fixture(name="task", scope="module")
def _task(config):
  return text_generation_task(config, "damcha", seed=0)


@pytest.fixture(name="params", scope="module")
def _params(task):
  params = nn.unbox(jax.jit(task.init_params)(jax.random.key(0)))
  # Far from the initial values, so that every token has a likelihood of its own.
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return tree.unflatten([leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32)
                         for leaf in leaves])


@pytest.fixture(name="sums_fn", scope="module")
def _sums_fn(task):
  return jax.jit(task.eval_loss_fn)


@pytest.fixture(name="alone", scope="module")
def _alone(config, sums_fn, params):
  """nats and weight of each training example alone, by its tokens."""
  texts = load_texts(config)
  rows = text_generation.EvalRows(texts.train, text_generation.limits(config.data),
                                  config.context_length)
  batch = rows.batch(0, len(rows))
  sums = jax.device_get(sums_fn(params, batch))
  return {tuple(batch["inputs"][row, batch["padding_mask"][row]].tolist()):
              (sums["nats"][row], sums["weight"][row]) for row in range(len(rows))}


def test_every_reference_is_trained_on_and_the_first_is_scored(config, task):
  texts = load_texts(config)
  assert len(texts.train) == 80
  assert {split: len(source) for split, source in task.eval_sources.items()} == {
      "validation": 13, "test": 5}
  batch = task.eval_sources["test"].batch(1, 1)
  scored = batch["targets"][0, batch["weights"][0] > 0]
  assert scored[-1] == EOS and texts.tokenizer.decode(scored) == "is 4"


def test_the_loss_is_that_of_target_and_end_alone(task, params, sums_fn):
  """By hand: log p of each token of one row, of which those after SEP count."""
  batch = task.eval_sources["validation"].batch(3, 4)
  logits = jax.jit(lambda tokens, mask: task.model.apply(
      {"params": params}, tokens, padding_mask=mask))(batch["inputs"], batch["padding_mask"])
  log_probs = np.asarray(jax.nn.log_softmax(logits))[0]
  separator = list(batch["inputs"][0]).index(SEP)
  end = list(batch["targets"][0]).index(EOS)
  expected = -sum(log_probs[column, batch["targets"][0, column]]
                  for column in range(separator, end + 1))
  sums = sums_fn(params, batch)
  np.testing.assert_allclose(sums["nats"][0], expected, rtol=1e-5)
  assert sums["weight"][0] == end + 1 - separator


def test_packed_rows_have_the_losses_of_their_examples(config, task, params, alone):
  batch = task.train_source.batch_at(0)
  assert batch["segment_ids"].max() > 1  # else nothing is packed
  loss, sums = jax.jit(decoder_lib.loss_and_sums, static_argnums=0)(task.model, params, batch, None)
  expected = [alone[tuple(batch["inputs"][row, batch["segment_ids"][row] == segment].tolist())]
              for row in range(4) for segment in range(1, batch["segment_ids"][row].max() + 1)]
  nats, weight = np.sum(expected, axis=0)
  np.testing.assert_allclose([loss, sums["nats"], sums["weight"]], [nats, nats, weight], rtol=1e-5)


def test_scores_are_those_of_evaluation_at_any_batch_size(config, params, sums_fn):
  rows = eval_rows(config, load_texts(config), "validation")
  whole = text_generation.score(config, "damcha", params, rows, 13)
  parts = text_generation.score(config, "damcha", params, rows, 4)
  np.testing.assert_allclose(whole[0], parts[0], rtol=1e-5)
  np.testing.assert_array_equal(whole[1], parts[1])
  sums = sums_fn(params, rows.batch(12, 4))
  np.testing.assert_allclose(whole[0][12], sums["nats"][0], rtol=1e-5)
  assert not np.asarray(sums["nats"])[1:].any() and whole[0].shape == (13,)


def test_a_model_of_another_kind_of_device_is_scored(config, params):
  rows = eval_rows(config, load_texts(config), "validation")
  here, elsewhere = (text_generation.score(
      dataclasses.replace(config, attentions="damcha", model=dataclasses.replace(
          config.model, attention_implementation=name, dtype="bfloat16")), "damcha", params, rows, 13)
      for name in ("plain", "cudnn"))
  np.testing.assert_array_equal(here, elsewhere)


def test_metrics():
  metrics = text_generation.metrics_of({"weight": 4.0, "nats": 8.0, "switch": 2.0})
  assert metrics == {"nats_per_token": 2.0, "perplexity": pytest.approx(np.exp(2.0)), "switch": 0.5}


def test_held_out_examples_come_from_all_over_the_split(config):
  few = dataclasses.replace(config, data=dataclasses.replace(config.data, max_held_out_examples=4))
  assert load_texts(few).held_out["validation"] == tuple(
      EXAMPLES["validation"][index] for index in (0, 3, 6, 9))


def test_a_missing_split_is_named(config, tmp_path):
  for split in ("train", "validation"):
    (tmp_path / f"{split}.tsv.xz").write_bytes(lzma.compress(encode(EXAMPLES[split])))
  with pytest.raises(DataError, match="has no test split; add test.tsv.xz"):
    text_generation_task(dataclasses.replace(config, dataset=str(tmp_path)), "mha", 0)
