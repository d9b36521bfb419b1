"""FLOPs counted in the traced program are the closed form, whatever the program's structure."""

import jax
import jax.numpy as jnp
import pytest

from damcha_jax.training.flops import matmul_flops

A, B, C, N = 3, 5, 5, 7


def _direct(x_AB, kernels_NBC):
  for kernel_BC in kernels_NBC:
    x_AB = x_AB @ kernel_BC
  return x_AB


def _scanned(x_AB, kernels_NBC):
  return jax.lax.scan(lambda x_AB, kernel_BC: (x_AB @ kernel_BC, None), x_AB, kernels_NBC)[0]


@pytest.mark.parametrize("function", [
    _direct, _scanned, jax.jit(_direct), jax.checkpoint(_scanned),
    lambda x_AB, kernels_NBC: jax.jit(jax.jit(_scanned))(x_AB, kernels_NBC),
], ids=["direct", "scan", "jit", "checkpoint of scan", "nested jit of scan"])
def test_each_product_counts_once(function):
  jaxpr = jax.make_jaxpr(function)(jnp.ones((A, B)), jnp.ones((N, B, C)))
  assert matmul_flops(jaxpr.jaxpr) == N * 2 * A * B * C
