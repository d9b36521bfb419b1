"""Texts that end: what is drawn, what is searched, where it stops, and how likely it is."""

import functools
import itertools
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError
from damcha_jax.decoding import TextDecoder
from damcha_jax.sampling import Sampler, row_keys
from tests.models import decoders

LENGTH = decoders.CONTEXT_LENGTH
PROMPTS = [[0, 5, 7, 3, 1], [0, 4, 1], [0, 3, 9, 11, 16, 2, 8, 1]]
KEYS = row_keys(1, range(3))


@functools.cache
def _models(name):
  """The uncached model's jitted logits, the cached model and their parameters."""
  changes = {"attention": name, "model.num_layers": 1,
             "model.num_heads": 4}  # as many as mma needs
  plain, params = decoders.decoder(changes, std=0.4)
  cached, _ = decoders.decoder(changes, decode=True)
  logits = jax.jit(lambda tokens, mask: plain.apply({"params": params}, tokens, padding_mask=mask))
  return logits, cached, params


def _scored(name, made):
  """log p of the tokens made, [B, N], as evaluation computes it: right-padded, without a cache."""
  inputs, mask = np.zeros((3, LENGTH), int), np.zeros((3, LENGTH), bool)
  for row, (prompt, tokens, count) in enumerate(zip(PROMPTS, made.tokens_BN, made.counts_B)):
    text = [*prompt, *tokens[:count - 1]]
    inputs[row, :len(text)], mask[row, :len(text)] = text, True
  log_probs = np.asarray(jax.nn.log_softmax(_models(name)[0](inputs, mask)))
  scored = np.zeros(made.tokens_BN.shape)
  for row, (prompt, count) in enumerate(zip(PROMPTS, made.counts_B)):
    columns = len(prompt) - 1 + np.arange(count)
    scored[row, :count] = log_probs[row, columns, made.tokens_BN[row, :count]]
  return scored


@functools.cache
def _decoder(name, temperature, **options):
  return TextDecoder(Sampler(_models(name)[1], temperature), end=2, max_tokens=8, **options)


# The cache of each attention is tested by itself.
QUICK = ("damcha",)


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.families)
    for name in ATTENTIONS])
def test_likelihood_while_drawing_is_that_of_scoring(name):
  made, other = (_decoder(name, 2.0).decode(_models(name)[2], PROMPTS, row_keys(seed, range(3)))
                 for seed in (0, 1))
  np.testing.assert_allclose(made.log_probs_BN, _scored(name, made), atol=1e-4)
  assert made.texts(2) != other.texts(2)


@pytest.mark.families
def test_likelihood_while_searching_is_that_of_scoring():
  """Also with the caches that DAMCHA adds, rows of which change places."""
  made = _decoder("damcha", 0.0, num_beams=4).decode(_models("damcha")[2], PROMPTS, KEYS)
  np.testing.assert_allclose(made.log_probs_BN, _scored("damcha", made), atol=1e-4)


# A model made by hand: the next token depends on the last alone -----------------------------------


class Chain(nn.Module):
  """p(next | last) = table[last]; the table, of 6 tokens, is its parameter."""

  context_length: int = 20
  decode: bool = True

  @property
  def model(self):
    return types.SimpleNamespace(vocab_size=6, scan_layers=False)

  @nn.compact
  def __call__(self, tokens_BT, *, padding_mask=None):
    count = self.variable("cache", "count", jnp.zeros, tokens_BT.shape[:1], jnp.int32)
    count.value = count.value + tokens_BT.shape[1]
    return jnp.log(self.param("table", nn.initializers.zeros, (6, 6)))[tokens_BT]


START, END, A, B, C, UNUSED = range(6)


def _table(**rows):
  """Probabilities of START, END, A, B, C after each of them; END after what is not mentioned."""
  table = np.zeros((6, 6), np.float32)
  table[:, END] = 1.0
  for last, probs in rows.items():
    table[globals()[last]] = [*probs, 0.0]
  return table


# A begins better than B, but nothing probable follows it.
MISLEADING = _table(START=(0., 0., .6, .4, 0.), A=(.25, .25, .25, 0., .25), B=(0., 0., 0., 0., 1.))


@functools.cache
def _chain_decoder(max_tokens, **options):
  return TextDecoder(Sampler(Chain(), 0.0), END, max_tokens, **options)


def _decode(table, max_tokens=6, prompts=([START],), **options):
  return _chain_decoder(max_tokens, **options).decode(
      {"table": jnp.asarray(table, jnp.float32)}, prompts, row_keys(0, range(len(prompts))))


def test_beams_find_what_greedy_misses():
  greedy, beam = _decode(MISLEADING), _decode(MISLEADING, num_beams=2)
  assert greedy.tokens_BN[0, 0] == A
  assert beam.texts(END) == [[B, C]] and beam.counts_B.tolist() == [3]
  np.testing.assert_allclose(np.exp(beam.log_probs_BN.sum()), 0.4, rtol=1e-6)
  assert beam.log_probs_BN.sum() > greedy.log_probs_BN.sum()


def _random_table(seed):
  return np.random.default_rng(seed).dirichlet(np.full(6, 0.5), 6)


def _best_of_all(table, max_tokens, penalty):
  """The best score of all texts, one after another."""
  scores = []
  for length in range(1, max_tokens + 1):
    for text in itertools.product(range(len(table)), repeat=length):
      if END in text[:-1] or (length < max_tokens and text[-1] != END):
        continue
      steps = zip((START, *text), text)
      scores.append(np.log([table[last][token] for last, token in steps]).sum() / length**penalty)
  return max(scores)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 99.0])
def test_enough_beams_find_the_best_of_all_texts(penalty):
  """With two tokens, as many beams as there are tokens leave nothing out."""
  for seed in range(5):
    table = _random_table(seed)
    made = _decode(table, max_tokens=2, num_beams=6, length_penalty=penalty)
    score = made.log_probs_BN.sum() / made.counts_B[0]**penalty
    np.testing.assert_allclose(score, _best_of_all(table, 2, penalty), rtol=1e-5)


def test_the_length_penalty_prefers_longer_texts():
  table = _table(START=(0., .5, .5, 0., 0.), A=(0., .9, 0., .1, 0.))
  short = _decode(table, num_beams=2)
  long = _decode(table, num_beams=2, length_penalty=1.0)
  assert short.texts(END) == [[]] and short.counts_B.tolist() == [1]
  assert long.texts(END) == [[A]] and long.counts_B.tolist() == [2]


def test_one_beam_among_many_is_what_the_row_has_alone():
  prompts = [[START], [A, B], [C, C, A]]
  table = _random_table(8)
  together = _decode(table, num_beams=2, prompts=prompts).texts(END)
  alone = [_decode(table, num_beams=2, prompts=[prompt]).texts(END)[0] for prompt in prompts]
  assert alone == together and len(set(map(tuple, alone))) > 1


@pytest.mark.parametrize("num_beams", [1, 2])
def test_texts_stop_at_their_end_or_at_the_limit(num_beams):
  table = _table(START=(0., 0., 1., 0., 0.), B=(0., 0., 0., 1., 0.))
  made = _decode(table, max_tokens=5, prompts=[[START], [B]], num_beams=num_beams)
  assert made.texts(END) == [[A], [B] * 5] and made.counts_B.tolist() == [2, 5]
  assert not made.tokens_BN[0, 2:].any() and not made.log_probs_BN[0, 2:].any()


def test_what_cannot_be_decoded_is_named():
  with pytest.raises(ConfigError, match="no prompt"):
    _decode(MISLEADING, prompts=[])
  with pytest.raises(ConfigError, match="no prompt"):
    _decode(MISLEADING, prompts=[[A], []])
  with pytest.raises(ConfigError, match="prompt of 16 tokens and 6 more .* length 20"):
    _decode(MISLEADING, prompts=[[A] * 16])
  _decode(MISLEADING, prompts=[[A] * 15])
  with pytest.raises(ConfigError, match="num_beams 7"):
    _decode(MISLEADING, num_beams=7)
  with pytest.raises(ConfigError, match="length_penalty=40.0 must be .* at most 38.6 for .* 6 tok"):
    _decode(MISLEADING, num_beams=2, length_penalty=40.0)
  with pytest.raises(ConfigError, match="max_tokens 0"):
    _decode(MISLEADING, max_tokens=0)
  with pytest.raises(ConfigError, match="temperature 0, or one beam"):
    TextDecoder(Sampler(Chain(), 1.0), END, 3, num_beams=2)
