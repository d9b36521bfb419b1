"""Distances between sets of features against closed forms and plain definitions."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from damcha_jax.evaluation import frechet
from damcha_jax.evaluation.report import MetricError


def _draw(num: int, num_features: int, seed: int = 0, shift: float = 0.0) -> np.ndarray:
  """Correlated features with a falling spectrum, as those of a network."""
  rng = np.random.default_rng([num, num_features, seed])
  mix = np.random.default_rng(1).normal(size=(num_features, num_features)) / num_features**0.5
  spectrum = np.arange(1, num_features + 1) ** -0.5
  return (rng.normal(size=(num, num_features)) * spectrum) @ mix + shift


def _from_definition(x_NF: np.ndarray, y_MF: np.ndarray) -> float:
  """tr((C_x C_y)^(1/2)) by the eigenvalues of the product of the covariances."""
  c_x, c_y = np.cov(x_NF, rowvar=False), np.cov(y_MF, rowvar=False)
  eigenvalues = np.linalg.eigvals(c_x @ c_y).real.clip(0)
  distance = x_NF.mean(0) - y_MF.mean(0)
  return distance @ distance + np.trace(c_x) + np.trace(c_y) - 2 * np.sqrt(eigenvalues).sum()


@pytest.mark.parametrize("num", [50, 5000])
def test_frechet_distance_is_that_of_the_definition(num: int) -> None:
  # 40 features leave the covariance of 50 samples regular, where the definition is exact too.
  x_NF, y_MF = _draw(num, 40, shift=0.1), _draw(3000, 40, seed=1)
  actual = frechet.frechet_distance(frechet.statistics(x_NF), frechet.statistics(y_MF))
  assert actual == pytest.approx(_from_definition(x_NF, y_MF), rel=1e-9)


def test_frechet_distance_of_fewer_samples_than_features() -> None:
  # In a basis of the 49 directions that the 50 samples span, C_x is regular and nothing is lost:
  # tr((C_x C_y)^(1/2)) depends on C_y through its projection on them alone.
  x_NF, y_MF = _draw(50, 120, shift=0.1), _draw(500, 120, seed=1)
  c_x, c_y = np.cov(x_NF, rowvar=False), np.cov(y_MF, rowvar=False)
  values_F, vectors_FF = np.linalg.eigh(c_x)
  root = (vectors_FF[:, -49:] * np.sqrt(values_F[-49:])).T
  trace = np.sqrt(np.linalg.eigvalsh(root @ c_y @ root.T)).sum()
  distance = x_NF.mean(0) - y_MF.mean(0)
  expected = distance @ distance + np.trace(c_x) + np.trace(c_y) - 2 * trace
  actual = frechet.frechet_distance(frechet.statistics(x_NF), frechet.statistics(y_MF))
  assert actual == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("num", [50, 5000])
def test_frechet_distance_in_closed_form(num: int) -> None:
  # Stretching each axis of a set with uncorrelated axes: sum of (s_i - t_i)^2, plus the shift.
  rng = np.random.default_rng(0)
  draws_NF = rng.normal(size=(num, 31))
  white_NF = np.linalg.qr(draws_NF - draws_NF.mean(0))[0] * np.sqrt(num - 1)
  s_F, t_F = rng.uniform(1, 2, 31), np.r_[rng.uniform(0, 2, 30), 0.0]
  x = frechet.statistics(white_NF * s_F + 3)
  y = frechet.statistics(white_NF * t_F)
  expected = np.square(s_F - t_F).sum() + 31 * 9
  assert frechet.frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)
  assert frechet.frechet_distance(x, x) == pytest.approx(0, abs=1e-9)


def test_statistics_published_as_covariances_give_the_same_distance() -> None:
  x_NF, y_MF = _draw(60, 100), _draw(80, 100, seed=1)  # both singular
  x, y = frechet.statistics(x_NF), frechet.statistics(y_MF)
  published = frechet.statistics_from_covariance(y_MF.mean(0), np.cov(y_MF, rowvar=False))
  expected = frechet.frechet_distance(x, y)
  assert frechet.frechet_distance(x, published) == pytest.approx(expected, rel=1e-6)
  with pytest.raises(MetricError, match="negative eigenvalue"):
    frechet.statistics_from_covariance(np.zeros(2), np.diag([1.0, -1.0]))
  with pytest.raises(MetricError, match="does not fit"):
    frechet.statistics_from_covariance(np.zeros(2), np.eye(3))


def test_groups_are_disjoint_and_whole() -> None:
  features_NF, reference = _draw(27, 6), frechet.statistics(_draw(100, 6, seed=1))
  distances = [frechet.frechet_distance(frechet.statistics(features_NF[i : i + 8]), reference)
               for i in (0, 8, 16)]
  actual = frechet.grouped_frechet_distances(features_NF, reference, group_size=8)
  np.testing.assert_allclose(actual, distances)
  with pytest.raises(MetricError, match="at least 50 samples"):
    frechet.grouped_frechet_distances(features_NF, reference)


def test_kernel_distance_is_that_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(frechet, "_BLOCK", 3)
  x_NF, y_MF = _draw(7, 4), _draw(5, 4, seed=1, shift=0.3)
  k = lambda a, b: (a @ b / 4 + 1) ** 3
  mean = lambda a, b, same: np.mean([k(u, v) for i, u in enumerate(a) for j, v in enumerate(b)
                                     if not (same and i == j)])
  expected = mean(x_NF, x_NF, True) + mean(y_MF, y_MF, True) - 2 * mean(x_NF, y_MF, False)
  assert frechet.kernel_distance(x_NF, y_MF) == pytest.approx(expected, rel=1e-12)
  known = frechet.kernel_self_similarity(y_MF)
  assert frechet.kernel_distance(x_NF, y_MF, known) == frechet.kernel_distance(x_NF, y_MF)


def test_kernel_distance_is_unbiased_and_frechet_distance_is_not() -> None:
  kernel, of_few = [], []
  for seed in range(300):
    x_NF, y_MF = _draw(10, 8, seed=2 * seed), _draw(30, 8, seed=2 * seed + 1)
    kernel.append(frechet.kernel_distance(x_NF, y_MF))
    of_few.append(frechet.frechet_distance(frechet.statistics(x_NF), frechet.statistics(y_MF)))
  error = np.std(kernel) / len(kernel) ** 0.5
  assert abs(np.mean(kernel)) < 3 * error
  assert np.mean(of_few) > 3 * np.std(of_few) / len(of_few) ** 0.5
  different = frechet.kernel_distance(_draw(200, 8), _draw(200, 8, seed=1, shift=0.5))
  assert different > 20 * error


def test_kernel_distance_of_subsets() -> None:
  x_NF, y_MF = _draw(40, 8), _draw(50, 8, seed=1, shift=0.5)
  mean, deviation = frechet.kernel_distance_of_subsets(x_NF, y_MF, 20, 50)
  assert mean == pytest.approx(frechet.kernel_distance(x_NF, y_MF), abs=deviation)
  assert (mean, deviation) == frechet.kernel_distance_of_subsets(x_NF, y_MF, 20, 50)
  with pytest.raises(MetricError, match="subsets of 1000"):
    frechet.kernel_distance_of_subsets(x_NF, y_MF)


def test_diversity_and_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(frechet, "_BLOCK", 3)
  x_NF, y_NF = _draw(8, 5, shift=10), _draw(8, 5, seed=1)
  distances = [np.linalg.norm(a - b) for i, a in enumerate(x_NF) for b in x_NF[:i]]
  assert frechet.diversity(x_NF) == pytest.approx(np.mean(distances))
  assert frechet.diversity(np.repeat(x_NF[:1], 4, 0)) == pytest.approx(0, abs=1e-7)
  np.testing.assert_allclose(frechet.feature_distance(x_NF, y_NF),
                             [(a - b) @ (a - b) for a, b in zip(x_NF, y_NF)])


@pytest.mark.parametrize("metric", [
    lambda x, y: frechet.frechet_distance(frechet.statistics(x), frechet.statistics(y)),
    lambda x, y: frechet.grouped_frechet_distances(x, frechet.statistics(y), 4),
    frechet.kernel_distance,
    frechet.feature_distance,
    lambda x, y: frechet.diversity(x),
], ids=["frechet", "grouped", "kernel", "pairs", "diversity"])
def test_unusable_samples_are_named(metric) -> None:
  good = _draw(8, 3)
  nan = good.copy()
  nan[5, 1] = np.nan
  with pytest.raises(MetricError, match="1 of 8 samples, first in sample 5"):
    metric(nan, good)
  with pytest.raises(MetricError, match="samples are needed, and there are 0"):
    metric(good[:0], good)
  with pytest.raises(MetricError, match=r"must be \[samples, features\]"):
    metric(good[0], good)


def test_different_numbers_of_features_are_refused() -> None:
  with pytest.raises(MetricError, match="3 features cannot be compared with 4"):
    frechet.frechet_distance(frechet.statistics(_draw(8, 3)), frechet.statistics(_draw(8, 4)))
  with pytest.raises(MetricError, match="3 features cannot be compared with 4"):
    frechet.kernel_distance(_draw(8, 3), _draw(8, 4))


def test_a_reference_is_computed_once_per_key(tmp_path: pathlib.Path) -> None:
  path, calls = tmp_path / "new" / "real.npz", []

  def compute() -> np.ndarray:
    calls.append(1)
    return _draw(20, 5)

  first = frechet.cached_reference(path, {"mode": "tf"}, compute)
  again = frechet.cached_reference(path, {"mode": "tf"}, compute)
  assert len(calls) == 1 and again.statistics.num_samples == 20
  np.testing.assert_array_equal(again.features_MF, first.features_MF)
  distance = frechet.frechet_distance(first.statistics, again.statistics)
  assert distance == pytest.approx(0, abs=1e-12)
  frechet.cached_reference(path, {"mode": "pytorch-fid"}, compute)
  path.write_bytes(path.read_bytes()[:100])
  frechet.cached_reference(path, {"mode": "pytorch-fid"}, compute)
  frechet.cached_reference(None, {}, compute)
  assert len(calls) == 4
  assert [file.name for file in path.parent.iterdir()] == ["real.npz"]
  (tmp_path / "file").touch()
  with pytest.raises(MetricError, match="cannot be written"):
    frechet.cached_reference(tmp_path / "file" / "x.npz", {}, compute)


@pytest.mark.slow
def test_frechet_distance_of_2048_features() -> None:
  x_NF, y_MF = _draw(5000, 2048, shift=0.01), _draw(3000, 2048, seed=1)
  actual = frechet.frechet_distance(frechet.statistics(x_NF), frechet.statistics(y_MF))
  assert actual == pytest.approx(_from_definition(x_NF, y_MF), rel=1e-6)
