"""The language-model task of Section 5.4: next-byte prediction with any of the attentions."""

from __future__ import annotations

from collections.abc import Mapping
import math

import jax
import numpy as np

from damcha_jax.config import ConfigError, LanguageModelConfig
from damcha_jax.data.sources import Corpus, EvalWindows, TrainWindows, load_corpus
from damcha_jax.training.decoder import decoder_task
from damcha_jax.training.task import Batch, Task

NUM_BYTES = 256


def language_model_task(config: LanguageModelConfig, attention: str, seed: int) -> Task:
  """The task of one run. Losses are in nats per token; a token is a byte.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the training windows; the parameters' and dropout's goes to `loop.train`.

  Raises:
    ConfigError: the model cannot be built, or its vocabulary does not hold every byte.
    DataError: the corpus is missing or damaged.
  """
  if config.model.vocab_size < NUM_BYTES:
    raise ConfigError(f"model.vocab_size {config.model.vocab_size} does not hold the {NUM_BYTES} "
                      "byte values; set it to 256")
  corpus = load_corpus(config.dataset, config.data)
  return decoder_task(
      config, attention,
      train_source=TrainWindows(corpus.train, config.batch_size, config.context_length, seed,
                                jax.process_index(), jax.process_count()),
      eval_sources={
          split if len(arrays) == 1 else f"{split}/{source}":
              EvalWindows(array, config.context_length)
          for split, arrays in (("validation", corpus.validation), ("test", corpus.test))
          for source, array in arrays.items()},
      metrics_of=metrics_of,
      data_hashes=corpus.hashes,
      probe=_probe(corpus, config.context_length))


def _probe(corpus: Corpus, context_length: int) -> Batch:
  """8 windows spread evenly over each source."""
  inputs = []
  for array in corpus.validation.values():
    windows = EvalWindows(array, context_length)
    starts = [index * len(windows) // 8 for index in range(8)]
    inputs += [windows.batch(start, 1)["inputs"] for start in starts]
  return {"inputs": np.concatenate(inputs)}


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
  """Nats per token, bits per byte = nats / ln 2 (tokens are bytes), perplexity = exp(nats).

  Auxiliary losses, which training has, come under their own names as what they add to the loss.
  """
  means = {name: value / sums["weight"] for name, value in sums.items() if name != "weight"}
  nats = means.pop("nats")
  return {"nats_per_token": nats, "bits_per_byte": nats / math.log(2),
          "perplexity": math.exp(min(nats, 700.0)),  # exp(710) overflows a float
          **means}
