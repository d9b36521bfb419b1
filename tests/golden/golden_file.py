"""A golden file, and the comparisons that keep account of what has been compared."""

from __future__ import annotations

import json
import pathlib
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.interop import names as names_lib

FORWARD_TOLERANCE = dict(atol=2e-5, rtol=1e-5)
GRADIENT_TOLERANCE = dict(atol=1e-4, rtol=1e-4)
# Softmax is invariant to a shift common to all keys, so the gradient of the key bias is rounding.
_ZERO_GRADIENTS = ("W_k.bias",)
# Kinds whose files hold the gradients of the parameters alone.
_NO_INPUT_GRADIENT = ("VisionTransformer",)

class GoldenFile:
  """Inputs, parameters, outputs and gradients of one original module.

  Every `in/`, `out/` and `grad/` key has to be used; `check_complete` fails for the rest.
  """

  def __init__(self, path: pathlib.Path):
    with np.load(path) as archive:
      arrays = {name: archive[name] for name in archive.files}
    self.meta: dict[str, Any] = json.loads(str(arrays.pop("meta"))) if "meta" in arrays else {}
    self.arrays = arrays
    self.keys = frozenset(arrays)
    self._unused = {name for name in arrays if not name.startswith("param/")}

  @property
  def options(self) -> dict[str, Any]:
    return dict(self.meta.get("options", {}))

  def params(self) -> dict[str, np.ndarray]:
    return self._below("param/")

  def outputs(self) -> list[str]:
    return sorted(self._below("out/"))

  def input(self, name: str) -> jax.Array:
    self._unused.discard(f"in/{name}")
    return jnp.asarray(self.arrays[f"in/{name}"])

  def has_input(self, name: str) -> bool:
    return f"in/{name}" in self.arrays

  def array(self, key: str) -> np.ndarray:
    """What is stored under the very `key`."""
    self._unused.discard(key)
    return self.arrays[key]

  def match(self, key: str, actual: Any, tolerance: float, where: Any = None) -> None:
    """Compares what is stored under the very `key`, absolutely and relatively."""
    expected, actual = self.array(key), np.asarray(actual)
    assert actual.shape == expected.shape, f"{key}: {actual.shape}, golden {expected.shape}"
    if where is not None:
      expected, actual = expected[where], actual[where]
    np.testing.assert_allclose(actual, expected, tolerance, tolerance, err_msg=key)

  def compare(self, name: str, actual: Any, where: Any = None) -> None:
    """Compares output `name`, or its entries `where` True (broadcast from the left)."""
    self._unused.discard(f"out/{name}")
    expected, actual = self.arrays[f"out/{name}"], np.asarray(actual)
    assert actual.shape == expected.shape, f"out/{name}: {actual.shape}, golden {expected.shape}"
    if where is not None:
      where = np.broadcast_to(np.asarray(where, bool), expected.shape)
      expected, actual = expected[where], actual[where]
    np.testing.assert_allclose(actual, expected, err_msg=f"out/{name}", **FORWARD_TOLERANCE)

  def compare_gradients(
      self,
      outputs: Callable[[Any, jax.Array], tuple[jax.Array, ...]],
      params: Any,
      names: names_lib.NameMap,
  ) -> tuple[jax.Array, ...]:
    """Compares d sum(Y^2) by the parameters and by in/x, where (Y, ...) = outputs(params, x).

    Returns:
      outputs(params, x), which come with the gradients at no further compilation.
    """

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
      results = outputs(params, x)
      return jnp.sum(results[0] ** 2), results

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, results), (by_params, by_x) = gradient(params, self.input("x"))
    # A sum of hundreds of squares: only its relative error means something.
    self._unused.discard("out/loss")
    np.testing.assert_allclose(value, self.arrays["out/loss"], rtol=1e-5, err_msg="out/loss")
    gradients = names_lib.to_arrays(by_params, names)
    stored = self._below("grad/")
    if "in/x" in stored or self.meta.get("module") not in _NO_INPUT_GRADIENT:
      gradients["in/x"] = np.asarray(by_x)
    for name, gradient in gradients.items():
      if name not in stored:  # torch stores none for a parameter that is not used
        np.testing.assert_array_equal(gradient, 0.0, err_msg=f"grad/{name} is not in the file")
        continue
      self._unused.discard(f"grad/{name}")
      tolerance = dict(GRADIENT_TOLERANCE)
      if name.endswith(_ZERO_GRADIENTS):
        tolerance["rtol"] = 0.0
      np.testing.assert_allclose(gradient, stored[name], err_msg=f"grad/{name}", **tolerance)
    return results

  def check_complete(self) -> None:
    assert not self._unused, f"nothing was compared with {sorted(self._unused)}"

  def _below(self, prefix: str) -> dict[str, np.ndarray]:
    return {
        name[len(prefix) :]: array
        for name, array in self.arrays.items()
        if name.startswith(prefix)
    }
