"""Tensors under another framework's names <-> this package's parameter trees.

A `NameMap` says for every foreign name which leaf of our parameter tree it is, or which leaves, and
how their axes line up. The correspondence is linear, so one map carries parameters and gradients,
in both directions:

    params = from_arrays(state_dict_as_numpy, names, template)
    state_dict = to_arrays(params, names)
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.errors import UserError


class CheckpointNameError(UserError, ValueError):
  """Foreign names or shapes that do not fit the module they are loaded into."""


class Leaf(NamedTuple):
  """Where a tensor goes.

  Attributes:
    path: keys from the root of our parameter tree.
    axes: how many of our axes each joined axis takes, in the order of our axes; 0 for an axis of
      length 1 that we do not have.
    order: the tensor's axes in terms of the joined ones, as for `np.transpose`; () keeps them.
  """

  path: tuple[str, ...]
  axes: tuple[int, ...]
  order: tuple[int, ...] = ()


class Packed(NamedTuple):
  """Several leaves of equal shape in one tensor, one after the other along `axis`."""

  leaves: tuple[Leaf, ...]
  axis: int = 0


NameMap = Mapping[str, Leaf | Packed]
_Shapes = Mapping[tuple[str, ...], Any]


def from_arrays(arrays: Mapping[str, np.ndarray], names: NameMap, template: Any) -> dict[str, Any]:
  """Arrays under foreign names -> our parameter tree.

  Args:
    arrays: every tensor of the module.
    names: of the module.
    template: a parameter tree with the shapes to fill, e.g. from `jax.eval_shape(module.init, ..)`.

  Raises:
    CheckpointNameError: names are missing or unknown (all are listed), a shape does not fit, or a
      number is not finite.
  """
  missing, unknown = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
  if missing or unknown:
    raise CheckpointNameError(
        f"the checkpoint does not fit the module: missing {missing or 'nothing'}, unknown"
        f" {unknown or 'nothing'}; check the options it was trained with"
    )
  shapes = _flatten(nn.unbox(template))
  filled = {leaf.path for entry in names.values() for leaf in _leaves(entry)}
  unfilled = sorted("/".join(path) for path in set(shapes) - filled)
  if unfilled:
    raise CheckpointNameError(f"no tensor fills the parameters {unfilled}")
  params: dict[str, Any] = {}
  for name, entry in names.items():
    leaves = _leaves(entry)
    array, expected = np.asarray(arrays[name]), _shape(name, entry, shapes)
    if array.shape != expected:
      raise CheckpointNameError(f"{name} has shape {array.shape}, but the module needs {expected}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise CheckpointNameError(f"{name} holds {array.dtype}, not floating-point numbers")
    parts = [array] if isinstance(entry, Leaf) else np.split(array, len(leaves), entry.axis)
    for leaf, part in zip(leaves, parts, strict=True):
      *parents, last = leaf.path
      node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parents, params)
      joined = part.transpose(np.argsort(leaf.order)) if leaf.order else part
      target = shapes[leaf.path]
      node[last] = jnp.asarray(_cast(name, joined.reshape(target.shape), target.dtype))
  return params


def to_arrays(params: Any, names: NameMap) -> dict[str, np.ndarray]:
  """Our parameter tree (or a gradient of its structure) -> arrays under foreign names."""
  values = _flatten(nn.unbox(params))

  def tensor(leaf: Leaf) -> np.ndarray:
    array = np.asarray(values[leaf.path])
    joined = array.reshape(_joined_shape(array.shape, leaf))
    return joined.transpose(leaf.order) if leaf.order else joined

  return {
      name: tensor(entry)
      if isinstance(entry, Leaf)
      else np.concatenate([tensor(leaf) for leaf in entry.leaves], entry.axis)
      for name, entry in names.items()
  }


def below(prefix: str, path: tuple[str, ...], names: NameMap) -> dict[str, Leaf | Packed]:
  """The names of a module that sits under `prefix` there and at `path` here."""
  move = lambda leaf: leaf._replace(path=(*path, *leaf.path))
  return {
      prefix + name: move(entry)
      if isinstance(entry, Leaf)
      else entry._replace(leaves=tuple(map(move, entry.leaves)))
      for name, entry in names.items()
  }


def linear(name: str, path: tuple[str, ...], kernel_axes: tuple[int, int], bias: bool = True):
  """Names of torch's nn.Linear, whose weight is [out, in]."""
  leaves = {f"{name}.weight": Leaf((*path, "kernel"), kernel_axes, order=(1, 0))}
  if bias:
    leaves[f"{name}.bias"] = Leaf((*path, "bias"), kernel_axes[1:])
  return leaves


def layer_norm(name: str, path: tuple[str, ...]) -> dict[str, Leaf]:
  """Names of torch's nn.LayerNorm."""
  return {
      f"{name}.weight": Leaf((*path, "scale"), (1,)),
      f"{name}.bias": Leaf((*path, "bias"), (1,)),
  }


def num_entries(prefix: str, arrays: Mapping[str, Any]) -> int:
  """How many indices `prefix0.`, `prefix1.`, .. the names have, counted from 0 without a gap."""
  indices = {
      name[len(prefix) :].split(".")[0] for name in arrays if name.startswith(prefix)
  }
  count = 0
  while str(count) in indices:
    count += 1
  return count


def shape_of(arrays: Mapping[str, np.ndarray], name: str, num_axes: int) -> tuple[int, ...]:
  """The shape of a tensor that every model of a kind has.

  Raises:
    CheckpointNameError: it is missing, empty, or has another number of axes.
  """
  if name not in arrays:
    raise CheckpointNameError(
        f"the checkpoint has no '{name}', so it is of another kind; it has"
        f" {', '.join(sorted(arrays)[:8])}, .."
    )
  if arrays[name].ndim != num_axes:
    raise CheckpointNameError(f"{name} has shape {arrays[name].shape}, not {num_axes} axes, so the"
                              " checkpoint is of another kind, or damaged")
  if not arrays[name].size:
    raise CheckpointNameError(f"{name} has shape {arrays[name].shape} and holds no numbers; the"
                              " checkpoint is damaged")
  return arrays[name].shape


def same(left: np.ndarray, right: np.ndarray) -> bool:
  """Whether two tensors hold the same, be it numbers or not."""
  if left.shape != right.shape:
    return False
  return bool(np.all((left == right) | ((left != left) & (right != right))))


def _cast(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
  """The tensor in another dtype, provided that its numbers are finite there."""
  with np.errstate(over="ignore"):
    cast = array.astype(dtype)
  wrong = ~np.isfinite(cast)
  if wrong.any():
    raise CheckpointNameError(
        f"{name} holds {array[wrong][0]}, and {wrong.sum() - 1} more numbers that are not finite in"
        f" {np.dtype(dtype)}: its training diverged, or it is damaged; take another checkpoint"
    )
  return cast


def _leaves(entry: Leaf | Packed) -> tuple[Leaf, ...]:
  return (entry,) if isinstance(entry, Leaf) else entry.leaves


def _shape(name: str, entry: Leaf | Packed, shapes: _Shapes) -> tuple[int, ...]:
  """The shape that the tensor must have."""
  parts = []
  for leaf in _leaves(entry):
    if leaf.path not in shapes:
      raise CheckpointNameError(f"{name}: the module has no parameter {'/'.join(leaf.path)}")
    joined = _joined_shape(shapes[leaf.path].shape, leaf)
    parts.append(tuple(joined[axis] for axis in leaf.order) if leaf.order else joined)
  if isinstance(entry, Leaf):
    return parts[0]
  shape = list(parts[0])
  shape[entry.axis] = sum(part[entry.axis] for part in parts)
  return tuple(shape)


def _joined_shape(shape: tuple[int, ...], leaf: Leaf) -> tuple[int, ...]:
  joined, start = [], 0
  for count in leaf.axes:
    joined.append(int(np.prod(shape[start : start + count], dtype=int)))
    start += count
  if start != len(shape):
    raise CheckpointNameError(f"{'/'.join(leaf.path)} has {len(shape)} axes, not {start}")
  return tuple(joined)


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {tuple(str(key.key) for key in path): leaf for path, leaf in paths}
