"""No attention sees what it must not, and the audit sees every leak that is planted."""

import dataclasses
import functools

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis import causality
from damcha_jax.attention import DamchaAttention, MultiHeadAttention
from damcha_jax.metric import MetricGenerator, StaticMetric
from damcha_jax.models.decoder import init_cache
from tests.models import decoders

T, D, H = 7, 8, 2
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
BOTH_SIDES = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]], bool)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])

ATTENTIONS = {
    "mha": MultiHeadAttention(H, causal=True),
    "mha_xla": MultiHeadAttention(H, causal=True, implementation="xla"),
    "prefix_1": DamchaAttention(H, causal=True),
    "prefix_3": DamchaAttention(H, causal=True, stride=3),
    "prefix_16": DamchaAttention(H, causal=True, stride=16),
    "factors": DamchaAttention(H, causal=True, generator=MetricGenerator(H, (2,))),
    "learned": DamchaAttention(H, causal=True, context="learned"),
    "xla": DamchaAttention(H, causal=True, stride=3, implementation="xla"),
    "robust": DamchaAttention(H, causal=True, generator=MetricGenerator(H, preset="robust")),
    "static": DamchaAttention(H, causal=True, generator=StaticMetric(H, D)),
    "off_diagonal": DamchaAttention(H, causal=True, generator=MetricGenerator(
        H, parameterization="blocks", block_ablation="off_diagonal")),
    "full_width": DamchaAttention(H, causal=True, form="full_width", update_rank=3),
    "full_width_full_rank": DamchaAttention(H, causal=True, form="full_width", stride=3),
    "bfloat16": DamchaAttention(H, causal=True, dtype=jnp.bfloat16),
}


def test_a_leak_is_found_in_whatever_inputs_at_the_first_perturbation():
  leak = lambda x: x + jnp.roll(x, -1, axis=1)
  for inputs in (X, np.zeros_like(X), np.random.default_rng([0, 0]).standard_normal(X.shape)):
    report = causality.audit(leak, inputs, forms=["perturbation"], num_perturbations=1)
    assert {leak.output for leak in report.leaks} == set(range(T - 1))


# The rest differ from these in nothing that a gradient could flow through.
DIFFERENTIATED = ("mha", "prefix_3", "factors", "full_width")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_causal_and_ignores_padding(name):
  forms = causality.FORMS if name in DIFFERENTIATED else ["perturbation"]
  report = causality.audit_module(ATTENTIONS[name], X, kwargs={"padding_mask": BOTH_SIDES},
                                  forms=forms)
  assert report.is_causal and report.response > 0, report


@pytest.mark.parametrize("name", ["mha_xla", "prefix_1", "prefix_3", "prefix_16"])
def test_attention_is_causal_without_padding(name):
  report = causality.audit_module(ATTENTIONS[name], X)
  assert report.is_causal and report.response > 0, report


@pytest.mark.parametrize("name", ["mha", "prefix_3", "full_width"])
def test_documents_of_a_packed_row_do_not_see_each_other(name):
  report = causality.audit_module(ATTENTIONS[name], X, kwargs={"segment_ids": SEGMENTS})
  assert report.is_causal and report.response > 0, report


def test_sequence_context_may_see_its_own_document_alone():
  module = DamchaAttention(H, causal=False, context="sequence")
  kwargs = {"segment_ids": SEGMENTS, "padding_mask": BOTH_SIDES}
  report = causality.audit_module(module, X, kwargs=kwargs, causal=False)
  assert report.is_causal and report.response > 0, report


@pytest.mark.parametrize("name, forms", [
    pytest.param("damcha", causality.FORMS, marks=pytest.mark.families),
    ("stack_scan", causality.FORMS),
    ("mha", ["perturbation"]),
    ("scan", ["perturbation"]),
    ("none", ["perturbation"]),
    ("stack", ["perturbation"]),
    ("full_width_stack", ["perturbation"]),
])
def test_decoder_is_causal(name, forms):
  model, params = decoders.decoder(decoders.MODES[name])
  apply_fn = lambda tokens: model.apply({"params": params}, tokens)
  causality.assert_causal(apply_fn, decoders.TOKENS[:, :6], vocab_size=decoders.VOCAB, forms=forms)


@pytest.mark.parametrize("name", ["damcha", "mha"])
def test_prefill_of_the_cache_is_causal_and_ignores_padding(name):
  model, params = decoders.decoder(decoders.MODES[name], decode=True)
  cache = init_cache(model, 2, 9)
  padding_mask = BOTH_SIDES[:, :6]

  def prefill(tokens):
    variables = {"params": params, "cache": cache}
    return model.apply(variables, tokens, padding_mask=padding_mask, mutable=["cache"])[0]

  causality.assert_causal(prefill, decoders.TOKENS[:, :6], vocab_size=decoders.VOCAB,
                          padding_mask=padding_mask, forms=["perturbation"])


# Planted leaks ------------------------------------------------------------------------------------


class OffByOne(nn.Module):
  """Attention under a mask that shows every query the token after it."""

  attention: nn.Module

  @nn.compact
  def __call__(self, x):
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool), k=1)[None, None]
    return self.attention(x, mask=mask)


class PackedByMask(nn.Module):
  """Keeps documents apart by a mask."""

  attention: nn.Module

  @nn.compact
  def __call__(self, x, segment_ids):
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return self.attention(x, mask=mask)


class MixedMetric(DamchaAttention):
  """Keeps documents that a mask packs apart in the scores, but not in the metric."""

  def _with_documents(self, inputs, mask):
    return inputs


FUTURE_LEAKS = {
    "sequence context": DamchaAttention(H, causal=True, context="sequence", allow_future_leak=True),
    "mask off by one": OffByOne(MultiHeadAttention(H)),
    "mask off by one, metric": OffByOne(DamchaAttention(H)),
}


@pytest.mark.parametrize("form", causality.FORMS)
@pytest.mark.parametrize("name", FUTURE_LEAKS)
def test_a_planted_look_ahead_is_caught(name, form):
  report = causality.audit_module(FUTURE_LEAKS[name], X, forms=[form])
  assert not report.is_causal
  # Query 0 sees one key: no metric can change its weights. Query T - 1 has no future.
  first = 1 if name == "sequence context" else 0
  leaks = {(leak.row, leak.output) for leak in report.leaks}
  assert leaks == {(row, output) for row in range(2) for output in range(first, T - 1)}
  if "off by one" in name and form == "gradient":
    assert all(leak.inputs == (leak.output + 1,) for leak in report.leaks)


@pytest.mark.parametrize("form", causality.FORMS)
def test_a_planted_leak_between_documents_is_caught(form):
  audit = functools.partial(causality.audit_module, inputs=X, kwargs={"segment_ids": SEGMENTS},
                            forms=[form])
  assert audit(PackedByMask(DamchaAttention(H, causal=True))).is_causal
  report = audit(PackedByMask(MixedMetric(H, causal=True)))
  leaks = {(leak.row, leak.output) for leak in report.leaks}
  # Only later documents follow another, and a first token sees itself alone.
  assert leaks == {(row, t) for row in range(2) for t in range(1, T)
                   if SEGMENTS[row, t] > 0 and SEGMENTS[row, t] == SEGMENTS[row, t - 1]}


@pytest.mark.parametrize("form", causality.FORMS)
def test_padding_that_counts_in_the_context_is_caught(form):
  attention = DamchaAttention(H, causal=True)
  variables = causality.random_variables(attention, X)
  hide_keys_only = lambda x: attention.apply(
      variables, x, bias=jnp.where(BOTH_SIDES, 0.0, -1e30)[:, None, None, :])
  report = causality.audit(hide_keys_only, X, padding_mask=BOTH_SIDES, forms=[form])
  # Padding on the right comes after every real token.
  assert {leak.row for leak in report.leaks} == {0}


@pytest.mark.parametrize("form", causality.FORMS)
def test_a_decoder_with_sequence_context_is_caught(form):
  changes = {"damcha.context": "sequence", "damcha.allow_future_leak": True}
  model, params = decoders.decoder(changes)
  apply_fn = lambda tokens: model.apply({"params": params}, tokens)
  with pytest.raises(causality.DependenceError, match="row 0: output 1 .* input 2, 3"):
    causality.assert_causal(apply_fn, decoders.TOKENS[:, :4], vocab_size=decoders.VOCAB,
                            forms=[form])


# The audit itself ---------------------------------------------------------------------------------


def test_forms_see_what_the_other_misses():
  jump = lambda x: x + (jnp.roll(x, -1, axis=1) > 10.0)  # no gradient
  assert causality.audit(jump, X, forms=["gradient"]).is_causal
  assert not causality.audit(jump, X, forms=["perturbation"]).is_causal
  faint = lambda x: 1e8 * jnp.cumsum(x, 1) + 1e-8 * jnp.flip(jnp.tanh(x), axis=1)  # rounded away
  assert causality.audit(faint, X, forms=["perturbation"]).is_causal
  assert not causality.audit(faint, X, forms=["gradient"]).is_causal


def test_only_the_chosen_positions_are_audited():
  leaky = lambda x: x + x[:, -1:]
  report = causality.audit(leaky, X, positions=[2, 4])
  assert {leak.output for leak in report.leaks} == {2, 4}
  assert {leak.inputs for leak in report.leaks if leak.form == "gradient"} == {(T - 1,)}


def test_tolerance_admits_what_is_below_it():
  leaky = lambda x: x + 1e-6 * jnp.tanh(x[:, -1:])
  assert not causality.audit(leaky, X).is_causal
  assert causality.audit(leaky, X, tolerance=1e-4).is_causal


def test_a_leak_of_nan_is_a_leak():
  poisoned = lambda x: x + jnp.where(jnp.abs(x[:, -1:]) > 20, jnp.nan, 0.0)
  assert not causality.audit(poisoned, X, forms=["perturbation"]).is_causal


def test_what_cannot_be_audited_is_an_error():
  with pytest.raises(causality.DependenceError, match="do not depend on the inputs"):
    causality.assert_causal(jnp.zeros_like, X)
  with pytest.raises(ValueError, match="not finite"):
    causality.audit(lambda x: x * jnp.nan, X)
  with pytest.raises(ValueError, match=r"must be finite and \[2, 7"):
    causality.audit(lambda x: x.sum(1), X)
  with pytest.raises(ValueError, match="no nn.Embed"):
    causality.audit(lambda tokens: jnp.eye(5)[tokens], np.arange(5)[None])
  with pytest.raises(ValueError, match="'hessian'"):
    causality.audit(lambda x: x, X, forms=["hessian"])


@pytest.mark.parametrize("options, message", [
    ({"positions": []}, "positions must be at least one of 0 .. 6"),
    ({"positions": [7]}, r"not \[7\]"),
    ({"positions": [T - 1]}, "nothing to audit"),
    ({"causal": False}, "nothing to audit"),
    ({"num_perturbations": 0}, "num_perturbations must be at least 1, not 0"),
    ({"tolerance": np.nan}, "tolerance must be finite and at least 0, not nan"),
    ({"tolerance": -1.0}, "not -1.0")])
def test_an_audit_that_could_find_nothing_is_an_error(options, message):
  with pytest.raises(ValueError, match=message):
    causality.audit(lambda x: x, X, **options)


class RareTokens(nn.Module):
  """A token model in which only the last token of the vocabulary reveals the future."""

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(12, D)(tokens)
    return x + (jnp.roll(tokens, -1, axis=1) == 11)[..., None]


def test_replacements_come_from_the_whole_vocabulary():
  tokens = np.zeros((4, 16), int)
  report = causality.audit_module(RareTokens(), tokens, forms=["perturbation"])
  assert not report.is_causal


def test_report_reads_well():
  leak = causality.Leak("gradient", 1, 2, (5, 6), 0.25)
  report = causality.CausalityReport((leak,), 1.0)
  assert str(report) == ("1 forbidden dependences: row 1: output 2 depends on input 5, 6"
                         " (gradient 0.25)")
  assert "no forbidden dependence" in str(dataclasses.replace(report, leaks=()))
