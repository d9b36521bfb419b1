"""A trained multi-head attention as a full-width DAMCHA that computes the same function.

Multi-head attention is the full-width DAMCHA whose metric is m_i = W_Q^i (W_K^i)^T whatever the
context (paper Appendix C.1). With the adaptive update starting at zero, scores are the same up to
rounding, and learning goes on from there: the update's gradient is not zero.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.errors import UserError
from damcha_jax.models.decoder import init_params
from damcha_jax.models.decoder import make_decoder

# What a full-width DAMCHA has and multi-head attention has not, wherever it is in the tree.
_ADAPTIVE = ("generator", "update_key", "context")
_LAST_LAYER = ("out_kernel", "out_bias")


class ConversionError(UserError, ValueError):
  """Parameters that cannot be those of a DAMCHA that computes the same function."""


def mha_to_damcha(mha_params: Any, damcha_params: Any) -> Any:
  """The parameters of a DAMCHA model that computes what the multi-head model does.

  Works on one attention as on whole models, whose layers may be stacked for scanning, and whose
  generator may be shared or not; both trees must agree in that.

  Args:
    mha_params: trained parameters.
    damcha_params: initial ones of the same model with form='full_width' DAMCHA, of any update_rank;
      they keep what is their own, and their logical axis names.

  Raises:
    ConversionError: the models differ in more than the attention, or the update does not start at
      zero.
  """
  trained, initial = _by_path(mha_params), _by_path(nn.unbox(damcha_params))
  homeless = sorted("/".join(path) for path in set(trained) - set(initial))
  if homeless:
    raise ConversionError(
        f"the DAMCHA model has no parameters {homeless}; it needs form='full_width' with its static"
        " part, and the same depth, scanning and biases"
    )
  for path, value in trained.items():
    if value.shape != initial[path].shape:
      raise ConversionError(
          f"{'/'.join(path)} has shape {value.shape}, but {initial[path].shape} in the DAMCHA model"
      )
  for path in set(initial) - set(trained):
    if not any(key in _ADAPTIVE for key in path):
      raise ConversionError(f"the multi-head model has no parameter {'/'.join(path)}")
    if path[-1] in _LAST_LAYER and jnp.any(initial[path]):
      raise ConversionError(
          f"{'/'.join(path)} is not zero: the metric's update would change the function; convert"
          " to initial parameters of form='full_width'"
      )
  values = nn.unbox(damcha_params)
  values = jax.tree_util.tree_map_with_path(
      lambda path, value: trained.get(_keys(path), value).astype(value.dtype), values
  )
  return nn.meta.replace_boxed(damcha_params, values)


def decoder_to_damcha(mha_params: Any, config: Any, rng: jax.Array) -> Any:
  """Parameters for `make_decoder(config, "damcha")` from those of `make_decoder(config, "mha")`.

  Args:
    mha_params: trained parameters.
    config: a frozen experiment config with damcha.form='full_width'.
    rng: for the initial values of what is new.

  Raises:
    ConversionError: `config` does not give such a model.
  """
  model = make_decoder(config, "damcha")
  tokens_BT = jnp.zeros((1, 1), jnp.int32)
  initial = jax.jit(lambda rng: init_params(model, rng, tokens_BT))(rng)
  return mha_to_damcha(mha_params, initial)


def _by_path(tree: Any) -> dict[tuple[str, ...], jax.Array]:
  paths, _ = jax.tree_util.tree_flatten_with_path(nn.unbox(tree))
  return {_keys(path): leaf for path, leaf in paths}


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(str(key.key) for key in path)
