"""Intervals over seeds, against the tables of Student's distribution."""

import numpy as np
import pytest

from damcha_jax.evaluation.intervals import bootstrap, half_width, student_quantile


@pytest.mark.parametrize("degrees, confidence, quantile", [
    (1, 0.95, 12.7062), (4, 0.95, 2.7764), (9, 0.95, 2.2622), (4, 0.99, 4.6041), (30, 0.9, 1.6973)])
def test_quantiles_are_those_of_the_tables(degrees, confidence, quantile):
  assert student_quantile(degrees, confidence) == pytest.approx(quantile, rel=1e-3)


def test_intervals_hold_the_mean_as_often_as_they_say():
  samples = np.random.default_rng(0).normal(3.0, 2.0, (300, 5))
  held = [abs(np.mean(values) - 3.0) < half_width(values.tolist()) for values in samples]
  assert 0.92 < np.mean(held) < 0.98


def test_one_value_has_no_interval():
  with pytest.raises(ValueError, match="use at least two seeds"):
    half_width([1.0])
  with pytest.raises(ValueError, match="use at least two seeds"):
    bootstrap([1.0])


def test_the_bootstrap_of_three_reaches_from_the_least_to_the_largest():
  assert bootstrap([1.0, 4.0, 2.0]) == (1.0, 4.0)  # 1 of 27 resamplings at either end


def test_the_bootstrap_agrees_with_student_where_values_are_many_and_normal():
  values = np.random.default_rng(0).normal(3.0, 2.0, 100).tolist()
  low, high = bootstrap(values)
  assert (high - low) / 2 == pytest.approx(half_width(values), rel=0.1)
