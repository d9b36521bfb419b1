"""A metric left in its factors does what it does multiplied out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.causality import random_variables
from damcha_jax.attention import DamchaAttention
from damcha_jax.attention import metric as metric_lib
from damcha_jax.metric import MetricGenerator, StaticMetric
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.context import Contexts, prefix_contexts

B, T, D, H = 2, 11, 16, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
PADDING = np.ones((B, T), bool)
PADDING[0, :4] = PADDING[1, 9:] = False
SEGMENTS = np.array([[0] * 5 + [1] * 6, [0] * 2 + [1] * 8 + [2]])
NARROW = functools.partial(MetricGenerator, H, (3,))  # 4 factors of 8 columns

ATTENTIONS = {
    "rowsum": DamchaAttention(H, causal=True, generator=NARROW()),
    "off_diagonal": DamchaAttention(H, causal=True, generator=NARROW(
        parameterization="blocks", block_ablation="off_diagonal")),
    "full_width": DamchaAttention(H, causal=True, form="full_width", update_rank=6,
                                  generator=NARROW(row_features=D, column_features=6)),
    "wide": DamchaAttention(H, causal=True, generator=MetricGenerator(H, (20,))),
}


@pytest.fixture(name="small_chunks")
def _small_chunks(monkeypatch):
  """Chunks of three queries, and metrics never multiplied out for all of them."""
  monkeypatch.setattr(metric_lib, "_CHUNK_NUMBERS", 1)
  monkeypatch.setattr(metric_lib, "_LEAST_CHUNK", 3)
  monkeypatch.setattr(metric_lib, "_MOST_METRIC_BYTES", 0)


@pytest.mark.parametrize("name, masks", [
    pytest.param(name, masks, id="-".join((name, *masks)),
                 marks=[] if name == "wide" and "padding_mask" in masks else pytest.mark.families)
    for name in ATTENTIONS
    for masks in ({}, {"padding_mask": PADDING}, {"segment_ids": SEGMENTS})])
def test_factors_do_what_the_metric_does(name, masks, small_chunks, monkeypatch):
  attention = ATTENTIONS[name]
  variables = random_variables(attention, X, std=0.4)
  cotangent = RNG.normal(size=X.shape).astype(np.float32)
  multiplied_out = []
  original = metric_lib.apply_metric
  monkeypatch.setattr(metric_lib, "apply_metric", lambda x, m, contexts: (
      multiplied_out.append(m.shape[1]) or original(x, m, contexts)))

  def results():
    apply = lambda variables, x: attention.apply(variables, x, **masks)
    output, pullback = jax.vjp(apply, variables, X)
    return output, pullback(jnp.asarray(cotangent))

  in_factors = results()
  assert all(num_contexts <= 3 for num_contexts in multiplied_out)
  assert bool(multiplied_out) == (name == "wide")
  monkeypatch.setattr(metric_lib, "_in_factors", lambda *unused: False)
  whole = results()
  assert max(multiplied_out) >= T
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4),
               in_factors, whole)


def test_sown_metrics_are_multiplied_out():
  attention = ATTENTIONS["rowsum"]
  variables = random_variables(attention, X)
  _, state = attention.apply(variables, X, mutable=["intermediates"])
  (sown,) = state["intermediates"]["metric"]
  contexts = prefix_contexts(X, 1)
  expected = NARROW().apply({"params": variables["params"]["generator"]}, contexts.vectors_BCD)
  np.testing.assert_allclose(sown, expected[:, ::2], atol=1e-5)


@pytest.mark.parametrize("generator, stride, shared, expected", [
    (NARROW(), 1, False, True),
    (NARROW(), 1, True, True),
    (NARROW(), 2, False, False),  # fewer metrics than queries
    (MetricGenerator(H, (20,)), 1, False, False),  # more factors than columns
    (AuthorsMetricGenerator(H, (3,)), 1, False, False),
])
def test_the_cheaper_form_is_chosen(generator, stride, shared, expected):
  contexts = Contexts(jnp.zeros((B, T, D)), None, stride)
  assert metric_lib._in_factors(generator, contexts, shared) is expected


def test_metrics_too_large_to_keep_are_made_again_unless_other_layers_use_them():
  contexts = Contexts(jax.ShapeDtypeStruct((64, 2048, 512), jnp.float32), None, 1)
  wide = MetricGenerator(8, (512,))
  assert metric_lib._in_factors(wide, contexts, shared=False)
  assert not metric_lib._in_factors(wide, contexts, shared=True)


def test_factors_of_other_heads_are_named():
  with pytest.raises(ValueError, match="the metric is for 4 heads of width 4"):
    DamchaAttention(H, generator=MetricGenerator(4, (2,))).init(jax.random.key(0), X)


def test_a_static_metric_needs_no_factors():
  attention = DamchaAttention(H, generator=StaticMetric(H, D))
  assert attention.init_with_output(jax.random.key(0), X)[0].shape == X.shape
