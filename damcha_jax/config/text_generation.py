"""The config of a text-generation experiment (paper Section 5.1)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Optional

from damcha_jax.config.conversion import require, require_length_penalty, require_rule
from damcha_jax.config.decoder import DecoderConfig

NUM_SYMBOLS = 3 + 256  # what begins, divides and ends a row, and every byte


@dataclasses.dataclass(frozen=True)
class TextDataConfig:
  """Where texts live, and how they become rows of tokens."""

  data_dir: str
  direction: Optional[Literal["en-de", "de-en"]]  # None: as the set has it, in English
  tokenizer: Literal["bpe", "bytes"]  # of model.vocab_size ids
  packing: bool  # several examples in a training row
  max_source_tokens: int
  max_target_tokens: int  # without the end; also the longest text that is generated
  overlong: Literal["truncate", "skip"]  # a longer source; a longer target is always skipped
  max_held_out_examples: Optional[int]  # of the validation and of the test part; None: all

  @property
  def languages(self) -> tuple[str, str]:
    """Of sources and targets."""
    source, target = (self.direction or "en-en").split("-")
    return source, target


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """How texts are generated: beam search, or, with one beam, token by token."""

  num_beams: int
  length_penalty: float  # beams compete by log p / length^this
  temperature: float  # 0: the most probable token
  top_k: int  # 0: off
  top_p: float  # 1.0: off
  batch_size: int


@dataclasses.dataclass(frozen=True)
class TextMetricsConfig:
  """What BARTScore is computed with; without weights its rows have no value."""

  bart_weights: Optional[str]  # path of a directory
  bart_direction: Literal["source_to_hypothesis", "reference_to_hypothesis",
                          "hypothesis_to_reference", "f_score"]
  ranking: Literal["per_token", "summed"]  # the likelihood that makes the top 50
  allow_other_weights: bool


@dataclasses.dataclass(frozen=True)
class TextGenerationConfig(DecoderConfig):
  """One text-generation experiment.

  `dataset` is 'wmt14', 'commongen', 'sample_pairs', 'sample_concepts' or the path of a folder.
  """

  data: TextDataConfig
  sampling: DecodingConfig
  metrics: TextMetricsConfig

  def __post_init__(self):
    require(self.model.attention_implementation != "pallas",
            "model.attention_implementation='pallas' takes no masks, which padded or packed texts "
            "need; use 'plain' (or 'auto')")
    super().__post_init__()
    data, sampling = self.data, self.sampling
    for name in ("max_source_tokens", "max_target_tokens"):
      require(getattr(data, name) > 0, f"config key 'data.{name}' must be positive")
    needed = data.max_source_tokens + data.max_target_tokens + 2
    require(needed <= self.context_length,
            f"data.max_source_tokens={data.max_source_tokens}, data.max_target_tokens="
            f"{data.max_target_tokens} and the two symbols around the source need "
            f"context_length={needed}, not {self.context_length}")
    require(self.model.vocab_size >= NUM_SYMBOLS,
            f"model.vocab_size={self.model.vocab_size} does not hold the {NUM_SYMBOLS} symbols and "
            f"bytes; set it to {NUM_SYMBOLS} or more")
    limit = data.max_held_out_examples
    require(limit is None or limit > 0,
            f"data.max_held_out_examples={limit} must be positive, or None for whole splits")
    for name in ("num_beams", "batch_size"):
      require(getattr(sampling, name) > 0, f"config key 'sampling.{name}' must be positive")
    require_rule(sampling, "sampling.")
    require_length_penalty(sampling.length_penalty, data.max_target_tokens + 1, "sampling.")
    require(sampling.num_beams <= self.model.vocab_size,
            f"sampling.num_beams={sampling.num_beams} exceeds model.vocab_size="
            f"{self.model.vocab_size}; use fewer")
    require(sampling.num_beams == 1 or sampling.temperature == 0,
            f"sampling.num_beams={sampling.num_beams} searches for the most probable text, "
            f"sampling.temperature={sampling.temperature} draws one; use one beam, or "
            "temperature 0")
