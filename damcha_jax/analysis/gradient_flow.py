"""How the loss's gradient is spread over layers and parts, and what sharing makes of it.

The gradient of a generator that layers share is a sum (paper Section 3.4): with a copy theta_l of
the same values for every layer,

    g_l = dL / dtheta_l,   dL / dtheta = sum_l g_l

A stack without sharing would update the generator of layer l by g_l.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
import re
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.analysis.probe import layer_of
from damcha_jax.analysis.probe import LossFn
from damcha_jax.attention.metric import make_metric
from damcha_jax.models.layers import Block

Array = jax.Array
PyTree = Any

# What a parameter is for, by what its path matches first.
_PARTS = (
    ("metric", r"(^|/)(generator|metric_blocks|context)(/|$)"),
    ("values and output", r"(^|/)attention/(value|out)"),
    ("queries, keys, mixing", r"(^|/)attention/"),
    ("feed-forward", r"(^|/)mlp/"),
    ("norms", r"(^|/)\w*norm/"),
    ("embeddings and head", r""),
)
PARTS = tuple(name for name, _ in _PARTS)


class GradientNorms(NamedTuple):
  """Norms of the gradient of the mean loss.

  Attributes:
    loss: the mean loss.
    by_layer: norm of each part of each layer.
    outside: norm of each part outside the layers, such as a shared generator.
  """

  loss: float
  by_layer: dict[int, dict[str, float]]
  outside: dict[str, float]


class Contributions(NamedTuple):
  """The layers' contributions g_l to the gradient of a shared generator.

  Attributes:
    norm_N: |g_l|.
    cosine_NN: between g_l and g_k; 0 where one is 0.
    total: |sum_l g_l|, the norm of the shared generator's gradient.
    alignment: |sum_l g_l| / sum_l |g_l|: 1 where all point one way, 1 / sqrt(N) where equally long
      ones are orthogonal, 0 where they cancel.
  """

  norm_N: np.ndarray
  cosine_NN: np.ndarray
  total: float
  alignment: float


def gradient_norms(loss_fn: LossFn, params: PyTree,
                   batch: Mapping[str, np.ndarray]) -> GradientNorms:
  """Norms by layer and part, without dropout, of an unrolled model's stored parameters."""
  loss, leaves = jax.device_get(_squares(loss_fn, params, batch))
  sums: dict[tuple[Optional[int], str], float] = {}
  for path, square in jax.tree_util.tree_leaves_with_path(leaves):
    names = [entry.key for entry in path]
    key = layer_of(names), _part("/".join(names))
    sums[key] = sums.get(key, 0.0) + float(square)
  norms_of = lambda layer: {part: sums[layer, part] ** 0.5 for part in PARTS
                            if (layer, part) in sums}
  layers = sorted({layer for layer, _ in sums if layer is not None})
  return GradientNorms(float(loss), {layer: norms_of(layer) for layer in layers}, norms_of(None))


def shared_generator(params: PyTree) -> Optional[PyTree]:
  """The parameters of the generator that the layers share, None where there is none."""
  return params.get("stack", {}).get("generator")


def layer_gradients(model: nn.Module, loss_fn: LossFn, params: PyTree,
                    batch: Mapping[str, Array]) -> PyTree:
  """g_l of every layer, stacked in front: the gradients of copies of the shared generator.

  Args:
    model: with an unrolled BlockStack under the name `stack`.
    loss_fn, params, batch: its task's; `params` has a `shared_generator`.
  """
  stack = model.stack(parent=None)
  generator = stack.generator(parent=None)
  own = shared_generator(params)
  copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (stack.num_layers, *leaf.shape)), own)

  def loss(copies: PyTree) -> Array:
    def give_copy(next_fun, args, kwargs, context):
      if not isinstance(context.module, Block) or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
      x_BTD, index, padding_mask_BT, segment_ids_BT, metric = args
      copy = jax.tree.map(lambda leaf: leaf[index], copies)
      if metric is None:
        return next_fun(x_BTD, index, padding_mask_BT, segment_ids_BT, None, copy)
      metric = make_metric(generator.bind({"params": copy}), metric.contexts, shared=True)
      return next_fun(x_BTD, index, padding_mask_BT, segment_ids_BT, metric)

    with nn.intercept_methods(give_copy):
      return _mean_loss(loss_fn, params, batch)

  return jax.grad(loss)(copies)


def contributions(model: nn.Module, loss_fn: LossFn, params: PyTree,
                  batch: Mapping[str, np.ndarray]) -> Contributions:
  """Length and agreement of `layer_gradients`."""
  products_NN = _products(model, loss_fn, params, batch)
  return _agreement(np.asarray(products_NN, np.float64))


# With static arguments, so that all checkpoints of a run share what is compiled.
@functools.partial(jax.jit, static_argnums=0)
def _squares(loss_fn: LossFn, params: PyTree,
             batch: Mapping[str, Array]) -> tuple[Array, PyTree]:
  """The mean loss, and the squared norm of each leaf's gradient."""
  loss, grads = jax.value_and_grad(_mean_loss, argnums=1)(loss_fn, params, batch)
  return loss, jax.tree.map(lambda grad: jnp.sum(grad.astype(jnp.float32) ** 2), grads)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _products(model: nn.Module, loss_fn: LossFn, params: PyTree,
              batch: Mapping[str, Array]) -> Array:
  """Inner products [N, N] of the g_l."""
  grads = layer_gradients(model, loss_fn, params, batch)
  flat = [leaf.reshape(leaf.shape[0], -1).astype(jnp.float32) for leaf in jax.tree.leaves(grads)]
  return sum(jnp.einsum("np,mp->nm", leaf, leaf, precision="highest") for leaf in flat)


def _agreement(products_NN: np.ndarray) -> Contributions:
  """From the inner products of the g_l."""
  norm_N = np.sqrt(np.diag(products_NN))
  lengths_NN = norm_N[:, None] * norm_N
  cosine_NN = products_NN / np.where(lengths_NN > 0, lengths_NN, 1.0)
  total = float(np.sqrt(max(products_NN.sum(), 0.0)))
  alignment = total / max(float(norm_N.sum()), np.finfo(np.float64).tiny)
  return Contributions(norm_N, cosine_NN, total, alignment)


def _mean_loss(loss_fn: LossFn, params: PyTree, batch: Mapping[str, Array]) -> Array:
  loss_sum, sums = loss_fn(params, batch, None)
  return loss_sum / sums["weight"]


def _part(path: str) -> str:
  return next(name for name, pattern in _PARTS if re.search(pattern, path))
