"""Names and shapes of the authors' checkpoints, in both directions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.interop import authors_damcha
from damcha_jax.interop import names as names_lib
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.generator import MetricGenerator

D, H, F, N, WIDTHS = 12, 3, 10, 2, (5, 6)
GENERATED = dict(use_M=True, use_mlp=True)
OPTIONS = {
    "mha": dict(use_M=False),
    "static": dict(use_M=True),
    "own": dict(GENERATED),
    "shared_bayesian": dict(GENERATED, share_mlp=True, off_diag_mode="bayesian"),
    "own_separate_B": dict(GENERATED, off_diag_mode="separate_B", free_M=True),
    "shared_bias": dict(GENERATED, share_mlp=True, use_layer_bias=True, compact_rank=2),
}


def _stack(options: dict[str, Any]) -> tuple[Any, names_lib.NameMap, Any]:
  stack = authors_damcha.make_transformer(D, H, F, N, WIDTHS, options)
  names = authors_damcha.transformer_names(N, len(WIDTHS), options)
  shapes = jax.eval_shape(lambda: stack.init(jax.random.key(0), jnp.zeros((1, 4, D))))["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
  return params, names, shapes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_there_and_back_is_the_identity(options: dict[str, Any]) -> None:
  params, names, shapes = _stack(options)
  arrays = names_lib.to_arrays(params, names)
  assert sum(array.size for array in arrays.values()) == sum(
      leaf.size for leaf in jax.tree.leaves(params)
  )
  back = names_lib.from_arrays(arrays, names, shapes)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_shapes_are_those_of_torch() -> None:
  params, names, _ = _stack(OPTIONS["shared_bias"])
  shapes = {name: array.shape for name, array in names_lib.to_arrays(params, names).items()}
  shared = "decoder.shared_mlp_module."
  assert shapes[f"{shared}mlp.0.weight"] == (5, D)
  assert shapes[f"{shared}mlp.6.weight"] == (2 * D * 2, 6)
  assert shapes[f"{shared}layer_scales"] == (N, 16)
  assert shapes["decoder.layers.1.self_attn.out_proj.weight"] == (D, D)
  assert shapes["decoder.layers.1.ff.net.0.weight"] == (F, D)
  assert not any("_own_mlp" in name for name in shapes)


def test_names_that_do_not_fit_are_all_listed() -> None:
  params, names, shapes = _stack(OPTIONS["mha"])
  arrays = names_lib.to_arrays(params, names)
  del arrays["decoder.layers.0.ln1.bias"], arrays["decoder.layers.1.ln2.weight"]
  arrays["head.weight"] = np.zeros(3)
  with pytest.raises(names_lib.CheckpointNameError) as caught:
    names_lib.from_arrays(arrays, names, shapes)
  for name in ("decoder.layers.0.ln1.bias", "decoder.layers.1.ln2.weight", "head.weight"):
    assert name in str(caught.value)


def test_a_wrong_shape_is_named() -> None:
  params, names, shapes = _stack(OPTIONS["mha"])
  arrays = names_lib.to_arrays(params, names)
  name = "decoder.layers.0.ff.net.0.weight"
  arrays[name] = arrays[name].T
  with pytest.raises(names_lib.CheckpointNameError, match=rf"{name} has shape \(12, 10\)"):
    names_lib.from_arrays(arrays, names, shapes)


def test_a_map_for_another_module_is_refused() -> None:
  params, names, _ = _stack(OPTIONS["mha"])
  arrays = names_lib.to_arrays(params, names)
  _, _, other = _stack(OPTIONS["static"])
  with pytest.raises(names_lib.CheckpointNameError, match="metric_blocks"):
    names_lib.from_arrays(arrays, names, other)


def test_the_suite_builds_its_own_modules_where_they_suffice() -> None:
  make = authors_damcha.make_generator
  assert isinstance(make(H, WIDTHS, {"free_M": True, "dropout": 0.1}), MetricGenerator)
  assert isinstance(make(H, WIDTHS, {"off_diag_scale": 0.5}), AuthorsMetricGenerator)
  attention = authors_damcha.make_attention(D, H, WIDTHS, {"use_M": True}, causal=False)
  assert isinstance(attention, DamchaAttention) and attention.context == "sequence"
  assert isinstance(
      authors_damcha.make_attention(D, H, WIDTHS, {}, causal=True), MultiHeadAttention
  )
  with pytest.raises(ValueError, match="unknown options.*off_diag_rank"):
    make(H, WIDTHS, {"off_diag_rank": 2})
