"""Ranks, asymmetry and distances of metrics against NumPy, on matrices whose answer is known."""

import numpy as np
import pytest

from damcha_jax.analysis import geometry

RNG = np.random.default_rng(0)


def test_effective_rank_is_the_exponential_of_the_entropy():
  values = np.array([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0],
                     [0.0, 0.0, 0.0, 0.0]])
  entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
  np.testing.assert_allclose(geometry.effective_rank(values), [4, 1, np.exp(entropy), 0])


def test_numerical_rank_is_that_of_numpy():
  left, right = RNG.normal(size=(2, 5, 8, 3)).astype(np.float32)
  products = left @ right.swapaxes(-1, -2)
  full = RNG.normal(size=(5, 8, 8)).astype(np.float32)
  for matrices, rank in ((products, 3), (full, 8), (np.zeros_like(full), 0)):
    values = np.linalg.svd(matrices, compute_uv=False)
    assert (geometry.numerical_rank(values, 8) == rank).all()
    assert (np.linalg.matrix_rank(matrices) == rank).all()


def test_asymmetry_tells_symmetric_from_antisymmetric():
  m = RNG.normal(size=(64, 64))
  assert geometry.asymmetry(m + m.T) == pytest.approx(0, abs=1e-12)
  assert geometry.asymmetry(m - m.T) == pytest.approx(1)
  expected = np.linalg.norm((m - m.T) / 2) / np.linalg.norm(m)
  assert geometry.asymmetry(np.stack([m, 3 * m])) == pytest.approx([expected, expected])
  assert expected == pytest.approx(np.sqrt((1 - 1 / 64) / 2), rel=0.03)  # what the docstring says
  assert geometry.asymmetry(np.zeros((2, 2))) == 0


def test_relative_distance_and_diagonal_share():
  initial, trained = RNG.normal(size=(2, 3, 4, 4))
  expected = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(initial, trained)]
  np.testing.assert_allclose(geometry.relative_distance(initial, trained), expected)
  assert geometry.diagonal_share(np.array([[1.0, 2.0], [3.0, 4.0]])) == pytest.approx(0.5)


def test_a_layer_is_described_head_by_head():
  m = RNG.normal(size=(6, 2, 3, 3)).astype(np.float32)
  m[:, 1] = np.einsum("ei,ej->eij", m[:, 1, 0], m[:, 1, 1])  # of rank one
  found = geometry.layer_geometry(m)
  values = np.linalg.svd(m, compute_uv=False)
  np.testing.assert_allclose(found.mean_HKK, m.mean(0), atol=1e-6)
  np.testing.assert_allclose(found.norm_H, [np.linalg.norm(one) for one in m.mean(0)], rtol=1e-5)
  np.testing.assert_allclose(found.spectrum_K, values.mean((0, 1)), rtol=1e-4)
  assert found.effective_rank_H[1] == pytest.approx(1, abs=1e-3) and found.effective_rank_H[0] > 1.3
  assert found.rank_max == 3
  assert geometry.layer_geometry(m[:, 1:]).rank_max == 1
  assert found.adaptivity == pytest.approx(np.sqrt(m.var(0).mean() / m.var()), rel=1e-5)
