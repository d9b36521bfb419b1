"""Texts that end: greedy, sampled and beam-searched continuations of prompts, with the cache.

    score(y) = sum_n log p(y_n | prompt, y_1 .. y_n-1) / length(y)^penalty

A continuation ends with the token `end`, or where it is as long as it may be. Prompts are
left-padded; each row is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.config import ConfigError
from damcha_jax.config.conversion import require_length_penalty
from damcha_jax.models.decoder import init_cache
from damcha_jax.sampling import Sampler

Array = jax.Array

_WIDTH_STEP = 16  # prompts are padded to multiples of it, so that few programs are compiled


class Continuations(NamedTuple):
  """Tokens [B, N], their log-probabilities in nats [B, N], and how many there are, [B].

  The count includes the final `end`; what is past it is 0. Log-probabilities are the model's own,
  at temperature 1 and before any cut.
  """

  tokens_BN: np.ndarray
  log_probs_BN: np.ndarray
  counts_B: np.ndarray

  def texts(self, end: int) -> list[list[int]]:
    """The tokens of each row, without the `end`."""
    return [[token for token in row[:count].tolist() if token != end]
            for row, count in zip(self.tokens_BN, self.counts_B)]


@dataclasses.dataclass(frozen=True, eq=False)
class TextDecoder:
  """Continues prompts by one rule; compiled once per batch size and width of prompts.

  Attributes:
    sampler: the model, made with `decode=True` and unrolled layers, and how a token is drawn.
    end: the token that ends a text.
    max_tokens: N, of a continuation, its end included.
    num_beams: 1 draws as the sampler says; more search for the most probable text.
    length_penalty: see above; 0 compares sums, 1 means.

  Raises:
    ConfigError: a value is out of range, or values do not go together.
  """

  sampler: Sampler
  end: int
  max_tokens: int
  num_beams: int = 1
  length_penalty: float = 0.0

  def __post_init__(self):
    vocab_size = self.sampler.model.model.vocab_size
    if not 0 <= self.end < vocab_size:
      raise ConfigError(f"end {self.end} is outside the vocabulary of {vocab_size}")
    if self.max_tokens < 1:
      raise ConfigError(f"max_tokens {self.max_tokens} must be at least 1")
    if not 1 <= self.num_beams <= vocab_size:
      raise ConfigError(f"num_beams {self.num_beams} must be at least 1 and at most the vocabulary "
                        f"of {vocab_size}")
    require_length_penalty(self.length_penalty, self.max_tokens)
    if self.num_beams > 1 and self.sampler.temperature:
      raise ConfigError("beams search for the most probable text; use temperature 0, or one beam")
    if self.sampler.model.model.scan_layers:
      raise ConfigError("decoding needs a model with scan_layers=False")

  def decode(self, params: Any, prompts: Sequence[Sequence[int]], keys_B: Array) -> Continuations:
    """Continues every prompt.

    Args:
      params: the model's parameters, unboxed.
      prompts: token ids, not empty; BOS is not added.
      keys_B: one random key per prompt; see `sampling.row_keys`.

    Raises:
      ConfigError: no prompt, an empty one, or one that leaves no room for `max_tokens`.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not min(lengths):
      raise ConfigError("there is no prompt to continue; each needs at least the begin symbol")
    room = self.sampler.model.context_length - self.max_tokens + 1  # the last token is not read
    if max(lengths) > room:
      raise ConfigError(f"a prompt of {max(lengths)} tokens and {self.max_tokens} more do not fit "
                        f"the context length {self.sampler.model.context_length}; shorten either")
    width = -(-max(lengths) // _WIDTH_STEP) * _WIDTH_STEP
    tokens_BT = np.zeros((len(prompts), width), np.int32)
    padding_mask_BT = np.arange(width) >= width - np.asarray(lengths)[:, None]
    tokens_BT[padding_mask_BT] = np.concatenate([np.asarray(prompt) for prompt in prompts])
    run = _search if self.num_beams > 1 else _draw
    return Continuations(*jax.device_get(run(self, params, tokens_BT, padding_mask_BT, keys_B)))


def _begin(decoder: TextDecoder, params: Any, tokens_BT: Array,
           padding_mask_BT: Array) -> tuple[Any, Array]:
  """The cache after the prompts, and the logits of the first token."""
  cache = init_cache(decoder.sampler.model, len(tokens_BT),
                     tokens_BT.shape[1] + decoder.max_tokens - 1)
  return _advance(decoder, params, cache, tokens_BT, padding_mask_BT)


def _advance(decoder: TextDecoder, params: Any, cache: Any, tokens_BT: Array,
             padding_mask_BT: Any = None) -> tuple[Any, Array]:
  logits_BTV, updated = decoder.sampler.model.apply(
      {"params": params, "cache": cache}, tokens_BT, padding_mask=padding_mask_BT,
      mutable=["cache"])
  return updated["cache"], logits_BTV[:, -1]


@functools.partial(jax.jit, static_argnums=0)
def _draw(decoder: TextDecoder, params: Any, tokens_BT: Array, padding_mask_BT: Array,
          keys_B: Array) -> tuple[Array, Array, Array]:
  """Token by token, until every row has ended."""
  num_rows = len(tokens_BT)
  tokens_BN = jnp.zeros((num_rows, decoder.max_tokens), jnp.int32)
  cache, logits_BV = _begin(decoder, params, tokens_BT, padding_mask_BT)

  def record(number, logits_BV, outputs):
    """Draws token `number` of the rows that go on, and writes it down."""
    tokens_BN, log_probs_BN, counts_B, alive_B = outputs
    drawn_B, log_probs_B = decoder.sampler.draw(logits_BV, keys_B, number)
    return (tokens_BN.at[:, number].set(jnp.where(alive_B, drawn_B, 0)),
            log_probs_BN.at[:, number].set(jnp.where(alive_B, log_probs_B, 0.0)),
            counts_B + alive_B, alive_B & (drawn_B != decoder.end))

  def step(state):
    number, cache, outputs = state
    last_B1 = jax.lax.dynamic_slice_in_dim(outputs[0], number - 1, 1, axis=1)
    cache, logits_BV = _advance(decoder, params, cache, last_B1)
    return number + 1, cache, record(number, logits_BV, outputs)

  outputs = record(0, logits_BV, (tokens_BN, jnp.zeros(tokens_BN.shape), jnp.zeros(num_rows, int),
                                  jnp.ones(num_rows, bool)))
  unfinished = lambda state: (state[0] < decoder.max_tokens) & state[2][3].any()
  return jax.lax.while_loop(unfinished, step, (1, cache, outputs))[2][:3]


class _Beams(NamedTuple):
  """The M best beginnings of each row; those that have ended stay as they are while they lead."""

  tokens_BMN: Array
  log_probs_BMN: Array
  counts_BM: Array
  alive_BM: Array


@functools.partial(jax.jit, static_argnums=0)
def _search(decoder: TextDecoder, params: Any, tokens_BT: Array, padding_mask_BT: Array,
            keys_B: Array) -> tuple[Array, Array, Array]:
  """Beam search: of all continuations of the beams by a token, the M best go on."""
  del keys_B  # nothing is drawn
  num_rows, num_beams = len(tokens_BT), decoder.num_beams
  shape = (num_rows, num_beams, decoder.max_tokens)
  beams = _Beams(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape[:2], int),
                 jnp.ones(shape[:2], bool))
  cache, logits_BV = _begin(decoder, params, tokens_BT, padding_mask_BT)
  cache = _take_rows(cache, jnp.repeat(jnp.arange(num_rows), num_beams), num_rows)
  # All beams are the prompt still, so that only the first may go on.
  first_BM = jnp.broadcast_to(jnp.arange(num_beams) == 0, shape[:2])
  beams, _ = _best(decoder, beams, jnp.repeat(logits_BV[:, None], num_beams, axis=1), 0, first_BM)

  def step(state):
    number, cache, beams = state
    last_BM = jax.lax.dynamic_index_in_dim(beams.tokens_BMN, number - 1, axis=2, keepdims=False)
    cache, logits = _advance(decoder, params, cache, last_BM.reshape(-1, 1))
    beams, parents_BM = _best(decoder, beams, logits.reshape(*shape[:2], -1), number,
                              jnp.ones(shape[:2], bool))
    rows = (jnp.arange(num_rows)[:, None] * num_beams + parents_BM).ravel()
    return number + 1, _take_rows(cache, rows, num_rows * num_beams), beams

  unfinished = lambda state: (state[0] < decoder.max_tokens) & state[2].alive_BM.any()
  beams = jax.lax.while_loop(unfinished, step, (1, cache, beams))[2]
  return beams.tokens_BMN[:, 0], beams.log_probs_BMN[:, 0], beams.counts_BM[:, 0]


def _best(decoder: TextDecoder, beams: _Beams, logits_BMV: Array, number: Any,
          allowed_BM: Array) -> tuple[_Beams, Array]:
  """The best M of all beams that ended and of the others with one more token, and whence they are.

  Best first; a beam that ended counts once, under the token 0.
  """
  num_rows, num_beams, vocab_size = logits_BMV.shape
  log_probs_BMV = jax.nn.log_softmax(logits_BMV)
  alive_BM1 = beams.alive_BM[:, :, None]
  stay_BMV = jnp.where(jnp.arange(vocab_size) == 0, 0.0, -jnp.inf)
  added_BMV = jnp.where(alive_BM1, log_probs_BMV, stay_BMV)
  lengths_BM1 = (beams.counts_BM + beams.alive_BM)[:, :, None]
  scores_BMV = ((beams.log_probs_BMN.sum(-1)[:, :, None] + added_BMV)
                / lengths_BM1.astype(jnp.float32) ** decoder.length_penalty)
  scores_BMV = jnp.where(allowed_BM[:, :, None], scores_BMV, -jnp.inf)
  _, chosen_BM = jax.lax.top_k(scores_BMV.reshape(num_rows, -1), num_beams)
  parents_BM, drawn_BM = chosen_BM // vocab_size, (chosen_BM % vocab_size).astype(jnp.int32)
  added_BM = jnp.take_along_axis(added_BMV.reshape(num_rows, -1), chosen_BM, axis=1)
  old = jax.tree.map(
      lambda leaf: jnp.take_along_axis(
          leaf, parents_BM.reshape(parents_BM.shape + (1,) * (leaf.ndim - 2)), axis=1), beams)
  return _Beams(
      old.tokens_BMN.at[:, :, number].set(drawn_BM),
      old.log_probs_BMN.at[:, :, number].set(added_BM),
      old.counts_BM + old.alive_BM,
      old.alive_BM & (drawn_BM != decoder.end),
  ), parents_BM


def _take_rows(cache: Any, rows: Array, num_rows: int) -> Any:
  """The cache of these rows; what it holds once for all rows stays."""
  def take(leaf):
    if not leaf.ndim:
      return leaf
    if leaf.shape[0] != num_rows:
      raise ValueError(f"a cache of shape {leaf.shape} has no axis of {num_rows} rows in front")
    return leaf[rows]
  return jax.tree.map(take, cache)
