"""Cached sampling gives what the uncached model gives, row by row, and samples as it is told."""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mix
from damcha_jax.analysis.causality import random_variables
from damcha_jax.config import ConfigError, freeze
from damcha_jax.data.sources import BOS
from damcha_jax.models.decoder import init_cache, make_decoder
from damcha_jax.sampling import Sampler, restrict, row_keys, window_start
from tests.models import decoders

LENGTH = decoders.CONTEXT_LENGTH
PROMPTS = [[3, 1, 4, 1, 5], [], [9, 2, 6], [5] * 11]


@functools.lru_cache(maxsize=None)
def _models(name):
  """The uncached model's jitted logits, the cached model and their parameters."""
  plain, params = decoders.decoder(decoders.MODES[name], std=0.4)
  cached, _ = decoders.decoder(decoders.MODES[name], decode=True)
  logits = jax.jit(lambda tokens, mask: plain.apply({"params": params}, tokens, padding_mask=mask))
  return logits, cached, params


# The cache ----------------------------------------------------------------------------------------


# One mode of each code path; the others are combinations of these.
PATHS = ("damcha", "mha_sinusoidal_post", "stride_1", "learned", "stack_scan", "none_blocks_scan",
         "full_width")
QUICK = ("mha_sinusoidal_post", "stack_scan", "full_width")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(
        name, marks=pytest.mark.families if name in PATHS else pytest.mark.slow)
    for name in decoders.MODES])
def test_cached_logits_equal_uncached_at_every_position(name):
  """Left-padded prompts of 7, 5 and 2 tokens, one prefill, then single steps."""
  logits_fn, cached, params = _models(name)
  tokens = np.random.default_rng(1).integers(0, decoders.VOCAB, (3, 12))
  mask = np.arange(12) >= np.array([0, 2, 5])[:, None]
  expected = np.asarray(logits_fn(tokens, mask))
  apply = jax.jit(functools.partial(cached.apply, mutable=["cache"]))
  logits, cache = apply({"params": params, "cache": init_cache(cached, 3, 14)}, tokens[:, :7],
                        padding_mask=mask[:, :7])
  parts = [logits]
  for t in range(7, 12):
    logits, cache = apply({"params": params, **cache}, tokens[:, t:t + 1])
    parts.append(logits)
  difference = np.abs(np.concatenate(parts, axis=1) - expected)[mask]
  assert difference.max() < (0.15 if name == "bfloat16" else 1e-4) * np.abs(expected).max()


def test_prompt_appended_in_pieces_equals_one_prefill():
  """Pieces end inside a stride of 3, and later pieces have padding too."""
  logits_fn, cached, params = _models("damcha")
  tokens = np.random.default_rng(2).integers(0, decoders.VOCAB, (2, 12))
  mask = np.ones((2, 12), bool)
  mask[0, [0, 4, 5]] = mask[1, 9] = False
  expected = np.asarray(logits_fn(tokens, mask))
  cache, parts = {"cache": init_cache(cached, 2, 12)}, []
  apply = jax.jit(functools.partial(cached.apply, mutable=["cache"]))
  for piece in (slice(0, 4), slice(4, 8), slice(8, 12)):
    logits, cache = apply({"params": params, **cache}, tokens[:, piece],
                          padding_mask=mask[:, piece])
    parts.append(logits)
  np.testing.assert_allclose(np.concatenate(parts, axis=1)[mask], expected[mask], atol=2e-5)


def test_overflowing_the_cache_cannot_be_overlooked():
  _, cached, params = _models("damcha")
  apply = jax.jit(functools.partial(cached.apply, mutable=["cache"]))
  cache = {"cache": init_cache(cached, 1, 4)}
  finite = []
  for _ in range(3):
    logits, cache = apply({"params": params, **cache}, jnp.ones((1, 2), jnp.int32))
    finite.append(np.isfinite(logits).all())
  assert finite == [True, True, False] and np.isnan(logits).all()


# Sampling -----------------------------------------------------------------------------------------


def _windows(text):
  """The model's input for the token after `text`, right-padded, and which of it is real."""
  window = [BOS, *text[window_start(len(text), LENGTH):]]
  return np.pad(window, (0, LENGTH - len(window))), np.arange(LENGTH) < len(window)


def _log_probs(name, prompt, tokens):
  """log p of each token given all before it, each from its own uncached pass over its window."""
  logits_fn = _models(name)[0]
  text = [*prompt, *tokens.tolist()]
  windows, masks = zip(*(_windows(text[:n]) for n in range(len(prompt), len(text))))
  logits = np.asarray(logits_fn(np.array(windows), np.array(masks)))
  last = [mask.sum() - 1 for mask in masks]
  return np.asarray(jax.nn.log_softmax(logits[np.arange(len(last)), last]))


@pytest.mark.parametrize("name", [
    "stack_scan", pytest.param("scan", marks=pytest.mark.families)])
def test_log_probabilities_equal_uncached_scoring_while_sliding(name):
  """40 tokens in windows of 16, rows of unequal lengths sliding at different times."""
  _, cached, params = _models(name)
  samples = Sampler(cached, temperature=1.3).sample(params, PROMPTS, 40, row_keys(0, range(4)))
  assert samples.tokens_BN.shape == samples.log_probs_BN.shape == (4, 40)
  for prompt, tokens, log_probs in zip(PROMPTS, *samples):
    expected = _log_probs(name, prompt, tokens)[np.arange(40), tokens]
    np.testing.assert_allclose(log_probs, expected, atol=1e-4)


def test_greedy_takes_the_most_probable_token():
  _, cached, params = _models("scan")
  samples = Sampler(cached, temperature=0.0).sample(params, PROMPTS[:1], 20, row_keys(0, [0]))
  log_probs = _log_probs("scan", PROMPTS[0], samples.tokens_BN[0])
  np.testing.assert_allclose(samples.log_probs_BN[0], log_probs.max(-1), atol=1e-4)


def test_a_row_is_the_same_alone_streamed_or_in_any_batch():
  _, cached, params = _models("scan")
  sampler = Sampler(cached, temperature=1.1, top_k=9, top_p=0.9)
  batch = sampler.sample(params, PROMPTS, 5, row_keys(7, range(4)))
  again = sampler.sample(params, PROMPTS, 5, row_keys(7, range(4)))
  np.testing.assert_array_equal(batch.tokens_BN, again.tokens_BN)
  streamed = [np.concatenate(parts, axis=1)
              for parts in zip(*sampler.stream(params, PROMPTS, 5, row_keys(7, range(4))))]
  np.testing.assert_array_equal(batch.tokens_BN, streamed[0])
  np.testing.assert_allclose(batch.log_probs_BN, streamed[1], atol=1e-5)
  alone = sampler.sample(params, PROMPTS[1:2], 5, row_keys(7, [1]))
  np.testing.assert_array_equal(batch.tokens_BN[1], alone.tokens_BN[0])
  other = sampler.sample(params, PROMPTS, 5, row_keys(8, range(4)))
  assert (batch.tokens_BN != other.tokens_BN).mean() > 0.5
  same_prompt = sampler.sample(params, [[1] * 11] * 4, 5, row_keys(7, range(4)))
  assert len({tuple(row) for row in same_prompt.tokens_BN.tolist()}) == 4


def test_frequencies_follow_the_model():
  _, cached, params = _models("mha")
  sampler = Sampler(cached, temperature=0.7, top_k=5)
  num_rows = 1000
  samples = sampler.sample(params, [[2, 7]] * num_rows, 1, row_keys(0, range(num_rows)))
  frequencies = np.bincount(samples.tokens_BN[:, 0], minlength=decoders.VOCAB) / num_rows
  log_probs = _log_probs("mha", [2, 7], samples.tokens_BN[0])[0]
  expected = np.exp(np.asarray(jax.nn.log_softmax(restrict(jnp.asarray(log_probs), 0.7, 5))))
  assert (frequencies[expected == 0] == 0).all() and (expected > 0).sum() == 5
  np.testing.assert_allclose(frequencies, expected, atol=4 * np.sqrt(0.25 / num_rows))


@pytest.mark.families
def test_the_cache_makes_512_tokens_at_least_10_times_faster():
  """Against a pass over the whole window per token, both compiled, at the size of mix.py:cpu."""
  values = mix.get_config("cpu")
  values.context_length = 512
  config = freeze(values)
  plain, cached = (make_decoder(config, "damcha", decode=decode) for decode in (False, True))
  params = random_variables(plain, jnp.zeros((1, 4), jnp.int32), std=0.05)["params"]
  sampler, keys = Sampler(cached), row_keys(0, [0])

  @jax.jit
  def rerun(tokens, position):
    logits = plain.apply({"params": params}, tokens)
    token, _ = sampler.draw(logits[:, position], keys, position)
    return tokens.at[:, position + 1].set(token, mode="drop")

  def rerun_many(num_tokens):
    tokens = jnp.zeros((1, 512), jnp.int32)
    for position in range(num_tokens):
      tokens = rerun(tokens, position)
    return np.asarray(tokens)

  def seconds(function):
    start = time.process_time()  # of this process alone, whatever else the machine does
    function()
    return time.process_time() - start

  num_rerun = 8
  samples = sampler.sample(params, [[]], 512, keys)  # compiles
  np.testing.assert_array_equal(rerun_many(num_rerun)[0, 1:num_rerun + 1],
                                samples.tokens_BN[0, :num_rerun])
  with_cache = min(seconds(lambda: sampler.sample(params, [[]], 512, keys)) for _ in range(2))
  without = min(seconds(lambda: rerun_many(num_rerun)) for _ in range(2)) * 512 / num_rerun
  assert without > 10 * with_cache, f"{without:.2f} s without the cache, {with_cache:.2f} s with it"


# Windows and cuts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("context_length", [1, 2, 5, 16])
def test_windows_fit_and_slide_by_half(context_length):
  sizes, starts = [], []
  for length in range(6 * context_length):
    starts.append(window_start(length, context_length))
    sizes.append(1 + length - starts[-1])
  assert max(sizes) == context_length
  assert set(starts[:context_length]) == {0}
  assert min(sizes[context_length:]) == (context_length + 1) // 2
  assert all(b - a in (0, context_length + 1 - (context_length + 1) // 2)
             for a, b in zip(starts, starts[1:]))


def _restrict_numpy(logits, temperature, top_k, top_p):
  """By the definition, one row at a time."""
  logits = (logits - logits.max()) / temperature
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  if top_k:
    order = order[:top_k]
  probs = np.exp(logits[order] - logits[order].max())
  probs /= probs.sum()
  kept, mass = [], 0.0
  for index, prob in zip(order, probs):
    if kept and mass >= top_p:
      break
    kept.append(index)
    mass += prob
  result = np.full(len(logits), -np.inf)
  result[kept] = logits[kept]
  return result


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (1, 1.0), (5, 1.0), (99, 1.0), (0, 0.6),
                                          (0, 1e-9), (6, 0.8)])
def test_cuts_equal_their_definition(top_k, top_p):
  logits = np.random.default_rng(0).normal(size=(50, 23)).astype(np.float32) * 2
  actual = restrict(jnp.asarray(logits), 0.7, top_k, top_p)
  expected = [_restrict_numpy(row.astype(np.float64), 0.7, top_k, top_p) for row in logits]
  np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_ties_keep_exactly_as_many_as_asked():
  kept = np.isfinite(restrict(jnp.array([1.0, 3.0, 3.0, 3.0, 0.0]), 1.0, top_k=2))
  assert kept.tolist() == [False, True, True, False, False]
  kept = np.isfinite(restrict(jnp.zeros(4), 1.0, top_p=0.5))
  assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1.0, 0, 1e-46), (1.0, 0, 1e-38), (2e-38, 0, 1.0), (2e-38, 3, 0.5), (2e-38, 2**62, 1.0)])
def test_the_likeliest_token_is_left_whatever_the_rule(temperature, top_k, top_p):
  """Where float32 has no room: 1e-46 is 0 in it, and logits / 2e-38 are infinite."""
  logits = jnp.array([[100.0, 300.0, -100.0], [-300.0, -100.0, -200.0]])
  cut = np.asarray(restrict(logits, temperature, top_k, top_p))
  assert cut[:, 1].tolist() == [0.0, 0.0] and np.isneginf(cut[:, [0, 2]]).all()


@pytest.mark.parametrize("field, value", [("temperature", -1.0), ("temperature", float("nan")),
                                          ("temperature", 1e-40), ("temperature", 1e39),
                                          ("top_k", -1), ("top_p", 0.0), ("top_p", 1e-46),
                                          ("top_p", 1.5)])
def test_bad_rules_are_named(field, value):
  _, cached, _ = _models("scan")
  with pytest.raises(ConfigError, match=re.escape(f"{field}={value} must be")):
    Sampler(cached, **{field: value})


def test_bad_requests_are_named():
  _, cached, params = _models("scan")
  sampler = Sampler(cached)
  with pytest.raises(ConfigError, match="no prompt"):
    sampler.sample(params, [], 3, row_keys(0, []))
  with pytest.raises(ConfigError, match="num_tokens 0"):
    sampler.sample(params, [[]], 0, row_keys(0, [0]))
  with pytest.raises(ConfigError, match="token 17 .* vocabulary of 17"):
    sampler.sample(params, [[17]], 3, row_keys(0, [0]))
  with pytest.raises(ConfigError, match="2 prompts need as many keys, not 1"):
    sampler.sample(params, [[1], [2]], 3, row_keys(0, [0]))
  with pytest.raises(ConfigError, match="decode=True"):
    Sampler(dataclasses.replace(cached, decode=False))
