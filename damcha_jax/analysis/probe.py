"""What a model makes of a batch beyond its loss: metrics, their blocks, and attention weights.

Looks at any model with an unrolled BlockStack, by way of its task's loss, which knows how the model
reads a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import re
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.attention.base import AttentionBase
from damcha_jax.attention.damcha import MetricContext
from damcha_jax.metric.context import Contexts
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.generator import StaticMetric

Array = jax.Array
PyTree = Any
LossFn = Callable[[PyTree, Mapping[str, Array], Optional[Array]], tuple[Array, dict[str, Array]]]


class Metrics(NamedTuple):
  """The metrics of a batch's contexts by layer; those of a stack that shares one are layer 0's.

  Attributes:
    m: [E, H, K, L] of E contexts that some token uses, at most 8 of each row; E = 1 if static.
    block_energy: [H, H], mean over the first row's contexts of ||M_ij||_F^2. Empty where only sums
      of blocks are stored.
  """

  m: dict[int, np.ndarray]
  block_energy: dict[int, np.ndarray]


def metrics(model: nn.Module, loss_fn: LossFn, params: PyTree,
            batch: Mapping[str, np.ndarray]) -> Metrics:
  """The metrics that a model compares tokens by; none for an attention without any."""
  m, block_energy, used = jax.device_get(_metrics(model, loss_fn, params, batch))
  keep = lambda m_BCHKL: m_BCHKL[used[0]] if used else m_BCHKL.reshape(-1, *m_BCHKL.shape[2:])
  return Metrics({layer: keep(m[layer]) for layer in sorted(m)}, block_energy)


def attention_weights(model: nn.Module, loss_fn: LossFn, params: PyTree,
                      batch: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
  """What each query gives each key, by layer: [B, H, T, S], as the values are weighted."""
  weights = jax.device_get(_weights(model, loss_fn, params, batch))
  return {layer: weights[layer] for layer in sorted(weights)}


def num_heads(model: nn.Module, loss_fn: LossFn, params: PyTree,
              batch: Mapping[str, np.ndarray]) -> dict[int, int]:
  """Of how many heads `attention_weights` has weights, by layer, without computing any."""
  shapes = jax.eval_shape(functools.partial(_weights, model, loss_fn), params, batch)
  return {layer: shapes[layer].shape[1] for layer in sorted(shapes)}


# With static arguments, so that all checkpoints of a run share what is compiled.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _metrics(model: nn.Module, loss_fn: LossFn, params: PyTree,
             batch: Mapping[str, Array]) -> tuple[PyTree, PyTree, list[Array]]:
  """m [B, C', H, K, L] and block energies by layer, and the contexts in use, if not all are."""
  seen = _Seen()
  sown = by_layer(_intermediates(model, loss_fn, params, batch, seen), "metric")
  return {**seen.static, **sown}, seen.block_energy, seen.used[:1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(model: nn.Module, loss_fn: LossFn, params: PyTree,
             batch: Mapping[str, Array]) -> dict[int, Array]:

  def ask(next_fun, args, kwargs, context):
    asked = {}
    if isinstance(context.module, AttentionBase) and context.method_name == "__call__":
      asked["sow_weights"] = True
    return next_fun(*args, **kwargs, **asked)

  return by_layer(_intermediates(model, loss_fn, params, batch, ask), "attention_weights")


def by_layer(intermediates: Mapping[str, Any], name: str) -> dict[int, Array]:
  """What was sown as `name`, by the number of the layer that did; 0 outside layers."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(intermediates):
    names = [entry.key for entry in path if hasattr(entry, "key")]
    if names[-1] == name:
      found[layer_of(names) or 0] = leaf
  return found


def layer_of(names: Any) -> Optional[int]:
  """The number of the layer that a path leads through, None outside layers."""
  return next((int(name[6:]) for name in names if re.fullmatch(r"layer_\d+", name)), None)


def _intermediates(model: nn.Module, loss_fn: LossFn, params: PyTree, batch: Mapping[str, Array],
                   interceptor: Callable[..., Any]) -> Mapping[str, Any]:
  """What the model sows when it is called as the loss calls it."""
  calls: list[tuple[tuple, dict[str, Any]]] = []

  def record(next_fun, args, kwargs, context):
    if not calls and context.method_name == "__call__":  # the outermost module's is the first
      calls.append((args, kwargs))
    return next_fun(*args, **kwargs)

  with nn.intercept_methods(record):
    loss_fn(params, batch, None)
  args, kwargs = calls[0]
  with nn.intercept_methods(interceptor):
    _, state = model.apply({"params": params}, *args, **kwargs, mutable=["intermediates", "losses"])
  return state.get("intermediates", {})


class _Seen:
  """Intercepts what no module sows: static metrics, blocks, and which contexts are in use."""

  def __init__(self):
    self.static: dict[int, Array] = {}
    self.block_energy: dict[int, Array] = {}
    self.used: list[Array] = []  # [B, C'], as `Metric.sow` thins contexts out

  def __call__(self, next_fun, args, kwargs, context):
    output, module = next_fun(*args, **kwargs), context.module
    if context.method_name != "__call__" or kwargs.get("return_blocks"):
      return output
    if isinstance(module, MetricContext) and output.column_BT is not None:
      self.used.append(_used(output))
    elif isinstance(module, StaticMetric):
      layer = layer_of(module.path) or 0
      self.static[layer] = output[None, None]
      self._measure_blocks(module, layer)
    elif isinstance(module, MetricGenerator):
      contexts, layer = args[0], args[1] if len(args) > 1 else None
      self._measure_blocks(module, layer or 0, contexts[0])
    return output

  def _measure_blocks(self, module: nn.Module, layer: int, *contexts: Array) -> None:
    if module.parameterization == "blocks":
      own, variables = module.unbind()
      blocks = own.apply({"params": variables["params"]}, *contexts, return_blocks=True)
      energy = jnp.sum(blocks**2, axis=(-3, -1))
      self.block_energy[layer] = energy.reshape(-1, *energy.shape[-2:]).mean(0)


def _used(contexts: Contexts) -> Array:
  num_contexts = contexts.vectors_BCD.shape[1]
  context_BT = contexts.column_BT // contexts.stride
  used_BC = (context_BT[:, :, None] == jnp.arange(num_contexts)).any(1)
  return used_BC[:, ::-(-num_contexts // 8)]
