"""The text-generation task of Section 5.1: a target given its source, with any attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import math
from typing import Any

import jax
import numpy as np

from damcha_jax.config import for_any_device, TextDataConfig, TextGenerationConfig
from damcha_jax.data import source_target, text_pairs
from damcha_jax.data.source_target import Encoded, EvalRows, Limits, TrainRows
from damcha_jax.data.text_pairs import Example
from damcha_jax.data.tokenizers import Tokenizer, load_tokenizer
from damcha_jax.errors import DataError
from damcha_jax.files import expanded
from damcha_jax.models.decoder import make_decoder
from damcha_jax.training.decoder import decoder_task, sums_per_row
from damcha_jax.training.task import Task

HELD_OUT = ("validation", "test")
_PROBE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Texts:
  """A set of texts as an experiment reads it.

  Attributes:
    tokenizer: trained on the training split.
    train: its pairs, one per reference.
    held_out: the examples of the other splits, of which the first reference is scored.
    hashes: of its files by name, and of the tokenizer.
  """

  tokenizer: Tokenizer
  train: Encoded
  held_out: Mapping[str, tuple[Example, ...]]
  hashes: Mapping[str, str]


def load_texts(config: TextGenerationConfig) -> Texts:
  """The data of an experiment; tokenizers and encoded training texts are kept in `data.data_dir`.

  Raises:
    DataError: the data is missing or damaged.
    ConfigError: the data set is unknown.
  """
  pairs = text_pairs.load_pairs(config.dataset, config.data.data_dir, config.data.direction)
  return _load(config.dataset, config.data, config.model.vocab_size, pairs.stamp)


@functools.lru_cache(maxsize=4)
def _load(dataset: str, data: TextDataConfig, vocab_size: int, stamp: Any) -> Texts:
  del stamp  # files that were replaced are read again
  pairs = text_pairs.load_pairs(dataset, data.data_dir, data.direction)
  content_hash = pairs.file_hash("train")
  cache_dir = expanded(data.data_dir) / "tokens"
  texts = (text for one in pairs.examples("train") for text in (one.source, *one.references))
  tokenizer = load_tokenizer(data.tokenizer, texts, content_hash, vocab_size, cache_dir)
  name = hashlib.sha256(f"{content_hash} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
  train = source_target.cached(cache_dir / f"train-{name}", lambda: source_target.encode(
      source_target.each_reference(pairs.examples("train")), tokenizer))
  return Texts(tokenizer, train, {split: _spread(pairs.examples(split), data.max_held_out_examples)
                                  for split in HELD_OUT if split in pairs.splits},
               {**pairs.hashes, "tokenizer": tokenizer.fingerprint})


def _spread(examples: Sequence[Example], count: int | None) -> tuple[Example, ...]:
  """`count` examples from all over the split, whose order may mean something."""
  if count is None or count >= len(examples):
    return tuple(examples)
  return tuple(examples[index * len(examples) // count] for index in range(count))


def limits(data: TextDataConfig) -> Limits:
  return Limits(data.max_source_tokens, data.max_target_tokens, data.overlong)


def eval_rows(config: TextGenerationConfig, texts: Texts, split: str) -> EvalRows:
  """The rows of a held-out split.

  Raises:
    DataError: there is no such split, or none of its examples fits.
  """
  if split not in texts.held_out:
    raise DataError(f"dataset '{config.dataset}' has no {split} split; add {split}.tsv.xz")
  return EvalRows(source_target.encode(texts.held_out[split], texts.tokenizer),
                  limits(config.data), config.context_length)


def text_generation_task(config: TextGenerationConfig, attention: str, seed: int) -> Task:
  """The task of one run. Losses are in nats per token of the target, its end included.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the order of training; the parameters' and dropout's goes to `loop.train`.

  Raises:
    ConfigError: the model cannot be built.
    DataError: the data is missing or damaged, or no example fits.
  """
  texts = load_texts(config)
  held_out = {split: eval_rows(config, texts, split) for split in HELD_OUT}
  return decoder_task(
      config, attention,
      train_source=TrainRows(texts.train, limits(config.data), config.batch_size,
                             config.context_length, seed, jax.process_index(),
                             jax.process_count(), config.data.packing),
      eval_sources=held_out,
      metrics_of=metrics_of,
      data_hashes=texts.hashes,
      probe=held_out["validation"].batch(0, min(_PROBE_ROWS, len(held_out["validation"]))))


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
  """Nats per token, perplexity = exp(nats), and what auxiliary losses add to the loss."""
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  nats = means.pop("nats")
  return {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0)), **means}


def score(config: TextGenerationConfig, attention: str, params: Any, rows: EvalRows,
          batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """-log p of each example's target and end, in nats, and of how many tokens: [N], [N].

  Args:
    config: the experiment.
    attention: the attention's name.
    params: parameters of unrolled layers.
    rows: the examples.
    batch_size: examples per call; no effect on results.
  """
  config = for_any_device(config)  # which need not be of the kind that the model was trained on
  unrolled = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=False))
  model = make_decoder(unrolled, attention, evaluation=True)
  sums_fn = jax.jit(functools.partial(sums_per_row, model))
  batches = [jax.device_get(sums_fn(params, rows.batch(start, batch_size)))
             for start in range(0, len(rows), batch_size)]
  nats_N, weight_N = (np.concatenate([batch[name] for batch in batches])[:len(rows)]
                      for name in ("nats", "weight"))
  return nats_N.astype(np.float64), weight_N.astype(np.int64)
