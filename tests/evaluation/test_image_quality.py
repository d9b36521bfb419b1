"""Pixel metrics, rankings and their controls against plain definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from damcha_jax.evaluation import image_quality
from damcha_jax.evaluation.report import MetricError


def _images(num: int = 6, size: int = 4, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 256, (num, size, size), np.uint8)


def test_errors_are_in_units_of_the_whole_range() -> None:
  black, white = np.zeros((3, 4, 4), np.uint8), np.full((3, 4, 4), 255, np.uint8)
  np.testing.assert_array_equal(image_quality.mse_unpaired(black, white), [1, 1, 1])
  # 10 - 250 must not wrap around.
  low, high = np.full((1, 2, 2), 10, np.uint8), np.full((1, 2, 2), 250, np.uint8)
  np.testing.assert_allclose(image_quality.mse_unpaired(low, high), [(240 / 255) ** 2])


def test_unpaired_errors_compare_as_many_as_there_are() -> None:
  samples, reference = _images(4), _images(6, seed=1)
  expected_N = np.mean((samples / 255 - reference[:4] / 255) ** 2, (1, 2))
  np.testing.assert_allclose(image_quality.mse_unpaired(samples, reference), expected_N)
  np.testing.assert_allclose(image_quality.mse_unpaired(reference, samples), expected_N)


def test_completions_are_compared_in_the_completed_rows_alone() -> None:
  truth = _images(size=4)
  completed = truth.copy()
  completed[:, 2:] = 0
  expected_N = np.mean((truth[:, 2:] / 255) ** 2, (1, 2))
  np.testing.assert_allclose(image_quality.mse_completion(completed, truth, 2), expected_N)
  completed[0, 1, 0] ^= 1
  with pytest.raises(MetricError, match="do not keep the rows"):
    image_quality.mse_completion(completed, truth, 2)
  with pytest.raises(MetricError, match="leave nothing"):
    image_quality.mse_completion(truth, truth, 4)


def test_unrelated_images_by_all_pairs() -> None:
  images = _images(5) / 255
  expected = np.mean([np.mean((a - b) ** 2) for a, b in itertools.combinations(images, 2)])
  assert image_quality.mse_unrelated(_images(5)) == pytest.approx(expected)
  assert image_quality.mse_unrelated(np.repeat(_images(1), 3, 0)) == pytest.approx(0, abs=1e-15)
  with pytest.raises(MetricError, match="at least 2 images"):
    image_quality.mse_unrelated(_images(1))


def test_a_perfect_sampler_meets_the_unrelated_control() -> None:
  data = _images(600)
  control = image_quality.mse_unrelated(data[300:])
  unpaired_N = image_quality.mse_unpaired(data[:300], data[300:])
  assert unpaired_N.mean() == pytest.approx(control, rel=0.02)


def test_total_variation() -> None:
  ramp = np.broadcast_to(np.arange(0, 255, 51, np.uint8), (1, 5, 5))  # steps of 0.2 along rows
  colour = np.repeat(ramp[..., None], 3, -1)
  np.testing.assert_allclose(image_quality.total_variation(ramp), [0.1])
  np.testing.assert_allclose(image_quality.total_variation(colour.swapaxes(1, 2)), [0.1])
  with pytest.raises(MetricError, match="no neighbours"):
    image_quality.total_variation(ramp[:, :1])


def test_rank_correlation() -> None:
  x_N = np.array([3.0, 1.0, 2.0, 2.0])  # ranks 4, 1, 2.5, 2.5
  y_N = np.array([10.0, 0.0, 5.0, -7.0])  # ranks 4, 2, 3, 1
  expected = np.corrcoef([4, 1, 2.5, 2.5], [4, 2, 3, 1])[0, 1]
  assert image_quality.spearman(x_N, y_N) == pytest.approx(expected)
  assert image_quality.spearman(x_N, -np.exp(x_N)) == pytest.approx(-1)
  with pytest.raises(MetricError, match="all are alike"):
    image_quality.spearman(x_N, np.ones(4))
  with pytest.raises(MetricError, match="1 of 4 samples, first in sample 2"):
    image_quality.spearman(x_N, np.array([0, 1, np.nan, 2]))
  with pytest.raises(MetricError, match="two samples or more"):
    image_quality.spearman(x_N, y_N[:3])


def test_rankings() -> None:
  log_likelihoods_N, num_tokens_N = np.array([-8.0, -3.0, -6.0, -3.0]), np.array([8, 1, 3, 2])
  top = lambda ranking, num: image_quality.top_by_likelihood(
      log_likelihoods_N, num_tokens_N, ranking, num).tolist()
  assert top("summed", 3) == [1, 3, 2]
  assert top("per_token", 4) == [0, 3, 2, 1]
  with pytest.raises(MetricError, match="top 50 need as many samples, and there are 4"):
    top("summed", 50)
  with pytest.raises(ValueError, match="ranking 'best' is none of"):
    top("best", 1)
  num_tokens_N[0] = 0
  with pytest.raises(MetricError, match="number of tokens"):
    top("per_token", 1)
  log_likelihoods_N[3] = np.nan
  with pytest.raises(MetricError, match="NaN"):
    top("summed", 1)


@pytest.mark.parametrize("metric", [
    lambda images: image_quality.mse_unpaired(images, images),
    lambda images: image_quality.mse_completion(images, images, 0),
    image_quality.mse_unrelated,
    image_quality.total_variation,
], ids=["unpaired", "completion", "unrelated", "variation"])
def test_unusable_images_are_named(metric) -> None:
  with pytest.raises(MetricError, match="must be uint8.*not float64"):
    metric(_images() / 255)
  with pytest.raises(MetricError, match="there are no"):
    metric(_images(0))
