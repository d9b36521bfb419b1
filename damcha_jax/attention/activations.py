"""Where activations live on a mesh. Without being told, XLA may spread them as it does weights."""

from __future__ import annotations

from collections.abc import Callable
import contextvars
import functools
from typing import Any, Optional

import jax
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array

_SHARDING: contextvars.ContextVar[Optional[NamedSharding]] = contextvars.ContextVar(
    "activation_sharding", default=None)


def sharded_like(batch: NamedSharding, function: Callable[..., Any]) -> Callable[..., Any]:
  """The function, in whose models the rows of activations lie where those of the batch do."""

  @functools.wraps(function)
  def placed(*arguments: Any) -> Any:
    token = _SHARDING.set(batch)
    try:
      return function(*arguments)
    finally:
      _SHARDING.reset(token)

  return placed


def sharding() -> Optional[NamedSharding]:
  """That of a batch's rows, as the caller of the model asked for; None: nobody did."""
  return _SHARDING.get()


def constrain(x: Array) -> Array:
  """x [B, ..] in the sharding that the caller of the model asked for, or as it is."""
  return _constrain(x, ())


def constrain_rows(x: Array) -> Array:
  """`constrain`, where XLA may divide the other axes of x as it likes.

  What has one row for the whole batch stays where it is.
  """
  return x if x.shape[0] == 1 else _constrain(x, (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))


def _constrain(x: Array, others: tuple[Any, ...]) -> Array:
  batch = _SHARDING.get()
  if batch is None:
    return x
  return jax.lax.with_sharding_constraint(
      x, NamedSharding(batch.mesh, PartitionSpec(batch.spec[0], *others)))
