"""Appendix C.1: which attention contains which, and what rank cannot express."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.closed_forms import Size
from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.theory import equivalence
from damcha_jax.theory import low_rank

SIZE = Size(length=7, features=12, num_heads=3)
DIFFERENCES = {
    "converted": equivalence.converted_difference,
    "constant_metric": equivalence.constant_metric_difference,
    "head_slice": equivalence.head_slice_difference,
}


@pytest.mark.families
@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.float64, 1e-12)])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_one_attention_is_the_other_to_float_precision(name: str, dtype: Any, bound: float) -> None:
  with jax.enable_x64(dtype == jnp.float64):
    difference = DIFFERENCES[name](SIZE, 20, 0, dtype)
  assert difference.scores < bound and difference.output < bound


@pytest.mark.families
def test_the_comparison_sees_a_metric_that_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
  convert = equivalence.mha_to_damcha

  def convert_wrongly(mha_params: Any, damcha_params: Any) -> Any:
    params = convert(mha_params, damcha_params)
    generator = {**params["generator"], "out_bias": params["generator"]["out_bias"] + 1e-3}
    return {**params, "generator": generator}

  monkeypatch.setattr(equivalence, "mha_to_damcha", convert_wrongly)
  difference = equivalence.converted_difference(SIZE, 3, 0, jnp.float32)
  assert difference.scores > 1e-4 and difference.output > 1e-5


def test_full_width_expresses_what_the_rank_of_a_head_cannot() -> None:
  damcha, mha = equivalence.full_rank_errors(SIZE, 3, 0, jnp.float32)
  assert damcha < 1e-5 and mha > 0.3
  one_head = SIZE._replace(num_heads=1)  # K = D: nothing is lost
  assert max(equivalence.full_rank_errors(one_head, 3, 0, jnp.float32)) < 1e-5


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_no_factorisation_is_nearer_than_the_singular_values_say(rank: int) -> None:
  metric = np.random.default_rng(rank).normal(size=(8, 8))
  best = low_rank.truncation_error(metric, rank)
  left, right = low_rank.truncate(metric, rank)
  assert np.linalg.norm(metric - left @ right.T) == pytest.approx(best, abs=1e-12)
  trained = low_rank.trained_errors(metric, rank, 4, 600, 0.03, seed=0)
  assert trained.min() >= best - 1e-12
  assert trained.min() == pytest.approx(best, rel=1e-3, abs=1e-3)


def test_head_slices_reach_the_scores_of_few_tokens_alone() -> None:
  head_features = SIZE.features // SIZE.num_heads
  residual = lambda length: equivalence.slice_score_residual(SIZE._replace(length=length), 0)
  assert residual(head_features + 1) < 1e-12
  assert residual(head_features + 2) > 0.1
  assert residual(64) > 0.7


def test_all_scores_of_head_slices_are_in_the_span_that_the_residual_allows_them() -> None:
  x_BTD = jax.random.normal(jax.random.key(0), (1, 24, SIZE.features))
  damcha = DamchaAttention(SIZE.num_heads, causal=True)
  init = lambda: damcha.init_with_output(
      jax.random.key(1), x_BTD, sow_weights=True, mutable=("params", "intermediates"))
  _, sown = jax.jit(init)()
  (scores_BHTS,) = sown["intermediates"]["attention_scores"]
  for head, x_TK in enumerate(np.split(np.asarray(x_BTD[0], np.float64), SIZE.num_heads, axis=1)):
    missed = equivalence.without_span(np.asarray(scores_BHTS[0, head], np.float64), x_TK)
    assert np.abs(missed).max() < 1e-5 * np.abs(scores_BHTS).max()


def test_random_multi_head_metrics_are_outside_the_block_of_their_slice() -> None:
  size = Size(length=2, features=64, num_heads=4)
  residual = equivalence.slice_metric_residual(size, 0)
  assert residual == pytest.approx((1 - 1 / 16) ** 0.5, abs=0.02)
