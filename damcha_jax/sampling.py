"""Sampling from the decoder with a key-value cache.

    x_n ~ softmax(logits(BOS, x_s .. x_{n-1}) / temperature), cut to top_k and top_p

A model sees at most `context_length` = T tokens, the begin symbol included, and its training
windows begin with it wherever in the text they lie. So does sampling: when a row's window is full
it begins anew, with BOS and the last (T + 1) // 2 - 1 tokens. Where the window begins depends on
the length of the row's own text alone (`window_start`), which makes a row independent of its batch.

Rows of different lengths are left-padded. One call takes in the windows, then every token is one
cached step; BOS and padding are never sampled text, though a model may emit the symbol BOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.config import ConfigError
from damcha_jax.config.conversion import require_rule
from damcha_jax.data.sources import BOS
from damcha_jax.models.decoder import DecoderLM, init_cache

Array = jax.Array


class Samples(NamedTuple):
  """Sampled tokens [B, N] and the model's log-probability of each, in nats [B, N].

  The log-probabilities are the model's own, at temperature 1 and before any cut.
  """

  tokens_BN: np.ndarray
  log_probs_BN: np.ndarray


def row_keys(seed: int, rows: Sequence[int]) -> Array:
  """The random keys of the rows with these numbers; row i has the same key in any batch."""
  # threefry whatever JAX's default: the other generators give other numbers under vmap.
  root = jax.random.key(seed, impl="threefry2x32")
  return jax.vmap(functools.partial(jax.random.fold_in, root))(jnp.asarray(rows, jnp.uint32))


def window_start(length: int, context_length: int) -> int:
  """Index of the first token that a model sees of a text, so that BOS and the rest fit.

  0 while they fit; then in steps of T + 1 - (T + 1) // 2, each leaving (T + 1) // 2 tokens, BOS
  included.
  """
  step = context_length + 1 - (context_length + 1) // 2
  return max(0, -(-(length + 1 - context_length) // step) * step)


def restrict(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Array:
  """Logits of the distribution to sample from, [.., V] -> [.., V], -inf where cut.

  In this order: division by `temperature`, the largest logit being 0; the `top_k` largest (0: all);
  of those, renormalised, the fewest whose probabilities reach `top_p` (1: all), at least one. Ties
  go to the lower index.
  """
  logits = logits.astype(jnp.float32)
  # Whatever the temperature, the largest one does not overflow.
  logits = (logits - logits.max(-1, keepdims=True)) / temperature
  if not top_k and top_p >= 1.0:
    return logits
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ordered = jnp.take_along_axis(logits, order, axis=-1)
  if top_k:
    num_kept = min(top_k, logits.shape[-1])
    ordered = jnp.where(jnp.arange(logits.shape[-1]) < num_kept, ordered, -jnp.inf)
  if top_p < 1.0:
    probs = jax.nn.softmax(ordered)
    before = jnp.cumsum(probs, axis=-1) - probs
    first = jnp.arange(logits.shape[-1]) == 0
    ordered = jnp.where(first | (before < top_p), ordered, -jnp.inf)
  return jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
  """Samples from one model with one rule; compiled once per batch size and quarter of the window.

  Attributes:
    model: made with `decode=True`; an unrolled one is faster than one with `scan_layers`, which
      copies the whole cache in every step.
    temperature: 0 takes the most probable token.
    top_k, top_p: see `restrict`; 0 and 1 turn them off.
    num_symbols: how many tokens of the vocabulary, the first ones, may be drawn; None: all.

  Raises:
    ConfigError: a value is out of range.
  """

  model: DecoderLM
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  num_symbols: Optional[int] = None

  def __post_init__(self):
    if not self.model.decode:
      raise ConfigError("sampling needs a model made with decode=True")
    require_rule(self)

  def sample(self, params: Any, prompts: Sequence[Sequence[int]], num_tokens: int,
             keys_B: Array, begin: Optional[Sequence[int]] = None) -> Samples:
    """Continues every prompt by `num_tokens` tokens, a whole window per call to the device.

    Args:
      params: the model's parameters, unboxed.
      prompts: token ids, of any lengths, without BOS.
      num_tokens: N.
      keys_B: one random key per prompt; see `row_keys`.
      begin: what each row's windows begin with in place of BOS, such as its class.

    Raises:
      ConfigError: no prompt, a token outside the vocabulary, or `num_tokens` below 1.
    """
    texts = self._texts(prompts, num_tokens, keys_B)
    begin = [BOS] * len(texts) if begin is None else begin
    parts, done = [], 0
    while done < num_tokens:
      state, count = self._begin(params, begin, texts, num_tokens - done, keys_B, done)
      rest = _finish(self, params, state, keys_B, done + 1, count - 1)
      part = [np.concatenate([first[:, None], others[:, :count - 1]], axis=1)
              for first, others in zip(jax.device_get(state[1:]), jax.device_get(rest))]
      for text, tokens in zip(texts, part[0]):
        text.extend(tokens.tolist())
      parts.append(part)
      done += count
    return Samples(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts)))

  def stream(self, params: Any, prompts: Sequence[Sequence[int]], num_tokens: int,
             keys_B: Array) -> Iterator[Samples]:
    """The same tokens as `sample`, one of each row at a time: Samples of shape [B, 1]."""
    texts = self._texts(prompts, num_tokens, keys_B)
    remaining = 0
    for done in range(num_tokens):
      if remaining == 0:
        state, remaining = self._begin(params, [BOS] * len(texts), texts, num_tokens - done,
                                       keys_B, done)
      else:
        cache, tokens_B, _ = state
        state = _advance(self, params, cache, tokens_B[:, None], None, keys_B, done)
      remaining -= 1
      emitted = Samples(*(np.asarray(array)[:, None] for array in state[1:]))
      for text, token in zip(texts, emitted.tokens_BN[:, 0]):
        text.append(int(token))
      yield emitted

  def _texts(self, prompts: Sequence[Sequence[int]], num_tokens: int,
             keys_B: Array) -> list[list[int]]:
    vocab_size = self.model.model.vocab_size
    texts = [[int(token) for token in prompt] for prompt in prompts]
    if not texts:
      raise ConfigError("there is no prompt to continue; pass at least one, which may be empty")
    if num_tokens < 1:
      raise ConfigError(f"num_tokens {num_tokens} must be at least 1")
    if len(keys_B) != len(texts):
      raise ConfigError(f"{len(texts)} prompts need as many keys, not {len(keys_B)}")
    for token in (token for text in texts for token in text):
      if not 0 <= token < vocab_size:
        raise ConfigError(f"token {token} of a prompt is outside the vocabulary of {vocab_size}")
    return texts

  def _begin(self, params: Any, begin: Sequence[int], texts: list[list[int]], num_tokens: int,
             keys_B: Array, done: int) -> tuple[tuple[Any, Array, Array], int]:
    """Takes in every row's window; the state, and how many tokens it yields until one is full."""
    length = self.model.context_length
    windows = [[first, *text[window_start(len(text), length):]]
               for first, text in zip(begin, texts, strict=True)]
    longest = max(map(len, windows))
    # Four widths at most, so that windows of all lengths share four compilations.
    quarter = self._quarter
    width = min(length, -(-longest // quarter) * quarter)
    tokens_BT = np.zeros((len(windows), width), np.int32)
    padding_mask_BT = np.zeros(tokens_BT.shape, bool)
    for row, window in enumerate(windows):
      tokens_BT[row, width - len(window):] = window
      padding_mask_BT[row, width - len(window):] = True
    state = _prefill(self, params, tokens_BT, padding_mask_BT, keys_B, done)
    # The last token drawn from a full window need not enter it.
    return state, min(num_tokens, length - longest + 1)

  @property
  def _quarter(self) -> int:
    return -(-self.model.context_length // 4)

  def draw(self, logits_BV: Array, keys_B: Array, index: Any) -> tuple[Array, Array]:
    """The next token of every row, and its log-probability; every draw of a row has its own key."""
    allowed_BV = logits_BV[:, :self.num_symbols]
    if self.temperature == 0.0:
      tokens_B = jnp.argmax(allowed_BV, axis=-1)
    else:
      keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, index)
      cut_BV = restrict(allowed_BV, self.temperature, self.top_k, self.top_p)
      tokens_B = jax.vmap(jax.random.categorical)(keys_B, cut_BV)
    log_probs_BV = jax.nn.log_softmax(logits_BV)
    return tokens_B, jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=-1)[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def _prefill(sampler: Sampler, params: Any, tokens_BT: Array, padding_mask_BT: Array,
             keys_B: Array, index: Any) -> tuple[Any, Array, Array]:
  """`_advance` from an empty cache, which has room for a whole window and the padding before it."""
  num_columns = sampler.model.context_length + sampler._quarter
  cache = init_cache(sampler.model, len(tokens_BT), num_columns)
  return _advance(sampler, params, cache, tokens_BT, padding_mask_BT, keys_B, index)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(sampler: Sampler, params: Any, cache: Any, tokens_BT: Array, padding_mask_BT: Any,
             keys_B: Array, index: Any) -> tuple[Any, Array, Array]:
  """Appends T tokens to the cache and draws the one after them: the window, or one step."""
  logits_BTV, updated = sampler.model.apply(
      {"params": params, "cache": cache}, tokens_BT, padding_mask=padding_mask_BT,
      mutable=["cache"])
  return updated["cache"], *sampler.draw(logits_BTV[:, -1], keys_B, index)


@functools.partial(jax.jit, static_argnums=0)
def _finish(sampler: Sampler, params: Any, state: tuple[Any, Array, Array], keys_B: Array,
            index: Any, count: Any) -> tuple[Array, Array]:
  """`count` steps on: the tokens drawn and their log-probabilities [B, T], `count` of T filled."""

  def step(number, carry):
    (cache, tokens_B, _), *outputs = carry
    state = _advance(sampler, params, cache, tokens_B[:, None], None, keys_B, index + number)
    return state, *(output.at[:, number].set(new) for output, new in zip(outputs, state[1:]))

  outputs = [jnp.zeros((len(keys_B), sampler.model.context_length), array.dtype)
             for array in state[1:]]
  # The trip count is traced: one compilation serves every window.
  return jax.lax.fori_loop(0, count, step, (state, *outputs))[1:]
