"""The kernel for TPUs, interpreted on CPUs, against the plain path."""

import re

import chex
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis.complexity import matmul_flops, trace
from damcha_jax.attention import (DamchaAttention, MixtureOfHeadsAttention, MultiHeadAttention,
                                  core, flash)

H, T, D = 2, 384, 16  # three blocks of queries
RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.normal(size=(2, 1, T, D)).astype(np.float32)
KINDS = {
    "mha": MultiHeadAttention(H, causal=True),
    "bidirectional": MultiHeadAttention(H),
    "moa": MixtureOfHeadsAttention(H, causal=True),  # whose heads share their keys and values
    "prefix": DamchaAttention(H, causal=True),
    "stride": DamchaAttention(H, stride=64, causal=True),
}


def _output_and_gradient(module, variables):
  def loss(variables, x):
    output = module.apply(variables, x)
    return (output.astype(jnp.float32) * WEIGHTS).sum(), output

  (_, output), gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, X)
  return output, gradient


@pytest.mark.families
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_agrees_with_the_plain_path(kind):
  plain = KINDS[kind].copy(implementation="plain")
  variables = plain.init(jax.random.key(0), X)
  variables = {"params": variables["params"]}
  expected, expected_gradient = _output_and_gradient(plain, variables)
  with pltpu.force_tpu_interpret_mode():
    output, gradient = _output_and_gradient(plain.copy(implementation="pallas"), variables)
  np.testing.assert_allclose(output, expected, atol=1e-5)
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_gradient))
  chex.assert_trees_all_close(gradient, expected_gradient, atol=1e-5 * scale)


def test_the_output_has_the_dtype_of_the_computation():
  module = KINDS["stride"].copy(implementation="pallas", dtype=jnp.bfloat16)
  output, _ = jax.eval_shape(module.init_with_output, jax.random.key(0), X)
  assert output.dtype == jnp.bfloat16  # here XLA cannot run that, which it can on TPUs


@pytest.mark.families
def test_with_a_cache_the_plain_path_takes_its_place():
  plain = KINDS["stride"].copy(implementation="plain")
  params = plain.init(jax.random.key(0), X)["params"]
  cached = KINDS["stride"].copy(implementation="pallas", decode=True)
  cache = cached.init(jax.random.key(0), X)["cache"]
  output, _ = cached.apply({"params": params, "cache": cache}, X[:, :100], mutable=["cache"])
  np.testing.assert_allclose(output, plain.apply({"params": params}, X)[:, :100], atol=1e-5)


@pytest.mark.parametrize("length", [128, 384, 512])
def test_every_block_size_divides_the_length(length):
  sizes = flash._block_sizes(length)  # pylint: disable=protected-access
  assert length % sizes.block_q == 0 and sizes.has_backward_blocks


@pytest.mark.parametrize("options, message", [
    ({"mask": np.ones((1, 1, T, T), bool)}, "takes no bias and no mask"),
    ({"padding_mask": np.ones((1, T), bool)}, "takes no bias and no mask"),
    ({"segment_ids": np.zeros((1, T), int)}, "takes no bias and no mask"),
    ({"bias": np.zeros((1, 1, T, T))}, "takes no bias and no mask"),
    ({"inputs_k": X[:, :128]}, "not in 1 from 384 to 128"),
])
def test_what_the_kernel_does_not_take_is_named(options, message):
  module = MultiHeadAttention(H, implementation="pallas")
  with pytest.raises(ValueError, match=message):
    module.init(jax.random.key(0), X, **options)


@pytest.mark.parametrize("rows, length", [(1, 0), (1, 200), (0, 128), ("b", 128), (1, "128*t")])
def test_sizes_that_the_kernel_does_not_take_are_named(rows, length):
  shape = jax.export.symbolic_shape(f"{rows}, {length}, {D}")
  module = MultiHeadAttention(H, implementation="pallas")
  with pytest.raises(ValueError, match=f"not in {shape[0]} from {re.escape(str(shape[1]))} to .*; "
                                       "use implementation='plain'"):
    jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("dtype, scale, message", [
    (jnp.float64, 0.25, "no float64 and no array as scale, not float64 and float"),
    (jnp.float32, np.ones(()), "not float32 and ndarray")])
def test_numbers_that_the_kernel_does_not_take_are_named(dtype, scale, message):
  with jax.enable_x64(True):
    query = jax.ShapeDtypeStruct((1, T, H, D), dtype)
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(lambda query: flash.attend(query, query, query, scale=scale, is_causal=True),
                     query)


@pytest.mark.parametrize("implementation", ["auto", "pallas", "cudnn"])
def test_operations_in_a_fused_kernel_are_counted(monkeypatch, implementation):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where 'auto' is cuDNN's kernel
  query = jnp.zeros((1, T, H, 16), jnp.bfloat16)
  attend = lambda query: core.attend(query, query, query, scale=0.25, is_causal=True,
                                     implementation=implementation)
  assert matmul_flops(trace(attend, query)) == 2 * 2 * H * T * T * 16
