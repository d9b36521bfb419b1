"""Keys that configs gained after the first runs were written, so that those runs stay usable."""

from __future__ import annotations

from typing import Any

# Section, key and the value with which a model is what it was before the key was there.
_ADDED = (
    ("damcha", "static_part", True),
    ("damcha", "half_life", None),
    ("damcha", "mix_slices", False),
    ("damcha", "initializer", None),
    ("damcha", "residual", None),
    ("damcha", "normalize_context", None),
    ("tha", "key_head_features", None),
    ("tha", "value_head_features", None),
    ("authors", "router_rank", None),
    ("authors", "expert_factor", 2),
    ("authors", "local_window", 8),
)


def upgraded(contents: dict[str, Any]) -> dict[str, Any]:
  """The contents of a `config.json`, whatever version wrote it, with today's keys."""
  contents = dict(contents)
  for section, key, value in _ADDED:
    if isinstance(contents.get(section), dict):
      contents[section] = {key: value, **contents[section]}
  return contents
