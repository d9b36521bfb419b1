"""The config of an experiment that trains decoders, and that of the language models."""

from __future__ import annotations

import dataclasses

from damcha_jax.config.conversion import require, require_rule
from damcha_jax.config.sections import DataConfig, ModelConfig, SamplingConfig
from damcha_jax.config.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
  """What every experiment that trains causal decoders has in common."""

  context_length: int
  model: ModelConfig

  def __post_init__(self):
    super().__post_init__()
    for name, value in (("context_length", self.context_length),
                        ("model.vocab_size", self.model.vocab_size)):
      require(value > 0, f"config key '{name}' must be positive")
    require(self.damcha.context != "sequence" or self.damcha.allow_future_leak,
            "damcha.context='sequence' lets a causal decoder see the future; use 'prefix', or set "
            "damcha.allow_future_leak=True to study the leak")
    require(self.model.attention_implementation != "pallas" or self.context_length % 128 == 0,
            f"context_length={self.context_length} must be a multiple of 128 for "
            "model.attention_implementation='pallas'; change it, or use 'plain' (or 'auto')")


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(DecoderConfig):
  """One language-model experiment (paper Section 5.4).

  `dataset` is 'enwik8', 'text8', 'mix', 'sample_text', 'sample_text8', 'sample_mix', the path of a
  text file, 'text8:' and a path for its text cleaned as text8 was, or 'mix:' and a path for both.
  """

  data: DataConfig
  sampling: SamplingConfig

  def __post_init__(self):
    super().__post_init__()
    limit, sampling = self.data.max_held_out_bytes, self.sampling
    require(limit is None or limit > 0,
            f"data.max_held_out_bytes={limit} must be positive, or None for whole splits")
    require(sampling.num_tokens > 0, "config key 'sampling.num_tokens' must be positive")
    require_rule(sampling, "sampling.")
