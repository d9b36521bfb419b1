"""Options of converted models: which there are, and which values make sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp

from damcha_jax.errors import UserError
from damcha_jax.metric.authors import OFF_DIAGONAL_MODES
from damcha_jax.metric.generator import PRESETS
from damcha_jax.models.stack import SHARINGS


class OptionError(UserError, ValueError):
  """An option that a model does not have, or that its checkpoint contradicts."""

  exit_status = 2


class Rule(NamedTuple):
  """What an option may be."""

  holds: Callable[[Any], bool]
  wanted: str


def _integer(least: int) -> Rule:
  most = 2**31 - 1  # positions and sizes are int32
  return Rule(lambda value: type(value) is int and least <= value <= most,
              f"an integer from {least} to {most}")


def _one_of(choices: Iterable[str]) -> Rule:
  choices = tuple(choices)
  return Rule(lambda value: value in choices, f"one of {', '.join(choices)}")


def _number(holds: Callable[[float], bool], wanted: str) -> Rule:
  return Rule(lambda value: type(value) in (int, float) and holds(value), wanted)


_LARGEST = float(jnp.finfo(jnp.float32).max)
_FACTOR = _number(lambda value: abs(value) <= _LARGEST, "a finite number")
SIZE = _integer(1)
_FLAG = Rule(lambda value: type(value) is bool, "true or false")
RULES: Mapping[str, Rule] = dict(
    # GPT-2 and what it becomes.
    gelu=_one_of(("tanh", "exact")),
    dropout_rate=_number(lambda value: 0 <= value < 1, "at least 0 and below 1"),
    update_rank=_integer(0),
    stride=SIZE,
    widths=Rule(lambda value: all(map(SIZE.holds, value)), "positive integers"),
    sharing=_one_of(SHARINGS),
    preset=_one_of(PRESETS),
    # The authors' constructors.
    off_diag_mode=_one_of(OFF_DIAGONAL_MODES),
    off_diag_alpha_init=_number(lambda value: 0 <= value <= _LARGEST, "finite and at least 0"),
    diag_scale=_FACTOR,
    off_diag_scale=_FACTOR,
    n_layers=SIZE,
    layer_bias_rank=SIZE,
    compact_rank=_integer(0),
    layer_idx=_integer(0),
    router_rank=Rule(lambda value: value is None or SIZE.holds(value), SIZE.wanted),
    local_window=SIZE,
    expert_factor=SIZE,
    **dict.fromkeys(("use_layer_bias", "free_M", "use_M", "use_mlp", "share_mlp", "bias"), _FLAG),
)
# Accepted by the authors' constructors, without effect on what the modules compute.
_INERT = ("use_multihead_M", "dev_mode", "dropout")


def known_options(
    options: Mapping[str, Any], *defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Options with defaults filled in.

  Raises:
    OptionError: an unknown option, or a value that makes no sense.
  """
  known = {name: value for group in defaults for name, value in group.items()}
  unknown = sorted(set(options) - set(known) - set(_INERT))
  if unknown:
    raise OptionError(f"unknown options {unknown}; the authors' module has {sorted(known)}")
  own = {name: value for name, value in options.items() if name in known}
  check_values(own)
  return {**known, **own}


def check_values(options: Mapping[str, Any]) -> None:
  """Raises OptionError for the first value that makes no sense."""
  for name, value in options.items():
    if not RULES[name].holds(value):
      raise OptionError(f"option {name}={value!r} must be {RULES[name].wanted}")


def check_heads(num_heads: int, features: int) -> None:
  """Raises OptionError unless H heads can share the width D."""
  if num_heads < 1 or features % num_heads:
    raise OptionError(f"num_heads {num_heads} does not divide the checkpoint's width {features};"
                      f" give a positive divisor of {features}")
