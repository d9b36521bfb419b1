"""From a ConfigDict, or the JSON of an earlier run, to frozen dataclasses, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import difflib
import math
import typing
from typing import Any, Literal

import ml_collections

# Of normal numbers in float32.
_TINY, _HUGE = 2.0**-126, 2.0**127
_LARGEST_EXPONENT = 30  # of 10: what is divided by it stays a normal number

class ConfigError(ValueError):
  """A configuration that cannot be run; the message names the value and the remedy."""


def freeze(config: ml_collections.ConfigDict | Mapping[str, Any], cls: type,
           prefix: str = "") -> Any:
  """Turns a ConfigDict, or the contents of a `config.json`, into `cls`.

  Args:
    config: all values.
    cls: a dataclass of an experiment.
    prefix: for messages, where the config is a section of another.

  Raises:
    ConfigError: a key is missing, unknown or of the wrong type, or values do not fit each other.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  try:
    return _freeze(config, cls, prefix)
  except ConfigError as error:
    if not prefix or f"'{prefix}" in str(error):
      raise
    raise ConfigError(f"in section '{prefix.rstrip('.')}': {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
  """The config as plain JSON-able containers, as written to `config.json`."""
  return dataclasses.asdict(config)


def unknown_key_message(key: str, valid: Iterable[str]) -> str:
  nearest = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.0)
  return f"unknown config key '{key}'; the nearest valid key is '{nearest[0]}'"


def require(condition: bool, message: str) -> None:
  """Raises `ConfigError` unless the condition holds."""
  if not condition:
    raise ConfigError(message)


def names_differ(values: Iterable[float]) -> bool:
  """Whether values can be told apart in the names that rows and folders have from them."""
  values = list(values)
  return len({f"{value:g}" for value in values}) == len(values)


def require_rule(rule: Any, prefix: str = "") -> None:
  """Raises `ConfigError` unless tokens can be drawn by a rule's `temperature`, `top_k` and `top_p`.

  Devices compute in float32, in which smaller numbers are 0 and larger ones infinite.
  """
  require(rule.temperature == 0 or _TINY <= rule.temperature <= _HUGE,
          f"{prefix}temperature={rule.temperature} must be at least 0 (0: no randomness), and where "
          f"above it from {_TINY:.3g} to {_HUGE:.3g}")
  require(rule.top_k >= 0, f"{prefix}top_k={rule.top_k} must be at least 0 (0: all)")
  require(_TINY <= rule.top_p <= 1,
          f"{prefix}top_p={rule.top_p} must be above 0 and at most 1 (1: all), and not below "
          f"{_TINY:.3g}")


def require_length_penalty(penalty: float, max_tokens: int, prefix: str = "") -> None:
  """Raises `ConfigError` unless beams of up to `max_tokens` can be compared in float32."""
  largest = math.inf if max_tokens == 1 else _LARGEST_EXPONENT / math.log10(max_tokens)
  require(0 <= penalty < math.inf and penalty <= largest,
          f"{prefix}length_penalty={penalty} must be at least 0, and at most {largest:.3g} for texts "
          f"of {max_tokens} tokens")


def _freeze(config: Mapping[str, Any], cls: type, prefix: str) -> Any:
  hints = typing.get_type_hints(cls)
  for key in config:
    if key not in hints:
      raise ConfigError(unknown_key_message(prefix + key, [prefix + name for name in hints]))
  values = {}
  for name, hint in hints.items():
    if name not in config:
      raise ConfigError(f"config key '{prefix}{name}' is missing; add it to the config file")
    values[name] = _convert(config[name], hint, prefix + name)
  return cls(**values)


def _convert(value: Any, hint: Any, name: str) -> Any:
  if hint is Any:
    return tuple(value) if isinstance(value, list) else value
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ConfigError(f"config key '{name}' must be a section, not {value!r}")
    return _freeze(value, hint, prefix=name + ".")
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal:
    if value not in options:
      choices = ", ".join(map(repr, options))
      raise ConfigError(f"config key '{name}' must be one of {choices}, not {value!r}")
    return value
  if origin is typing.Union:  # Optional[...]
    return None if value is None else _convert(value, options[0], name)
  if origin is tuple:
    if not isinstance(value, (tuple, list)):
      raise ConfigError(f"config key '{name}' must be a tuple, not {value!r}")
    hints = options[:1] * len(value) if options[-1] is Ellipsis else options
    if len(value) != len(hints):
      raise ConfigError(f"config key '{name}' must hold entries of {len(hints)}, not {value!r}")
    return tuple(_convert(entry, hint, name) for entry, hint in zip(value, hints, strict=True))
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:  # `is`: a bool is an int to isinstance
    raise ConfigError(f"config key '{name}' must be {hint.__name__}, not {value!r}")
  if hint is int and abs(value) > 2**63:
    raise ConfigError(f"config key '{name}' is {value}; no number reaches beyond 2^63")
  return value
