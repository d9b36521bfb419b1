"""Checks of modules' options when they are made, before JAX stumbles over what they lead to."""

from __future__ import annotations

import math
import numbers
from typing import Any

from flax import linen as nn
import jax.numpy as jnp


def check_integers(module: nn.Module, *names: str, least: int = 1, optional: bool = False) -> None:
  """Raises ValueError unless the fields are integers of at least `least`, or None if `optional`."""
  for name in names:
    value = getattr(module, name)
    if value is None and optional:
      continue
    if not _is_integer(value) or value < least:
      or_none = ", or None for its default" if optional else ""
      raise ValueError(f"{name} {value!r} must be an integer of at least {least}{or_none}")


def check_widths(widths: Any) -> None:
  """Raises ValueError unless `widths` are positive integers."""
  if not isinstance(widths, (tuple, list)) or not all(
      _is_integer(width) and width >= 1 for width in widths):
    raise ValueError(f"widths {widths!r} must be a tuple of integers of at least 1, one per hidden"
                     " layer")


def check_rate(module: nn.Module, name: str) -> None:
  """Raises ValueError unless the field is a probability below 1."""
  value = getattr(module, name)
  if not _is_number(value) or not 0 <= value < 1:
    raise ValueError(f"{name} {value!r} must be at least 0 and below 1")


def check_finite(module: nn.Module, *names: str, least: float = -math.inf) -> None:
  """Raises ValueError unless the fields are finite numbers of at least `least`."""
  for name in names:
    value = getattr(module, name)
    if not _is_number(value) or not math.isfinite(value) or value < least:
      at_least = "" if least == -math.inf else f" of at least {least}"
      raise ValueError(f"{name} {value!r} must be a finite number{at_least}")


def check_positive(module: nn.Module, name: str) -> None:
  """Raises ValueError unless the field is None or a finite number above 0."""
  value = getattr(module, name)
  if value is not None and not (_is_number(value) and math.isfinite(value) and value > 0):
    raise ValueError(f"{name} {value!r} must be a finite number above 0, or None")


def check_dtypes(module: nn.Module) -> None:
  """Raises ValueError unless the module computes and keeps floating-point numbers."""
  for name in ("dtype", "param_dtype"):
    value = getattr(module, name, None)
    if value is not None and not jnp.issubdtype(value, jnp.floating):
      raise ValueError(f"{name} {jnp.dtype(value).name} must be a floating-point type, such as"
                       " float32 or bfloat16")


def _is_integer(value: Any) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)
