"""Keys that configs gained after the first runs were written, so that those runs stay usable."""

from __future__ import annotations

from typing import Any

# Section, key and the value with which a model is what it was before the key was there. The section
# itself may be new, as that of an attention.
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
  # Some hold configs of other experiments, as studies and ablations do.
  contents = {key: upgraded(value) if isinstance(value, dict) else value
              for key, value in contents.items()}
  for section, key, value in _ADDED:
    # A config with one attention's section has them all, also those of attentions that came later.
    found = contents.get(section, {} if "mma" in contents else None)
    if isinstance(found, dict):
      contents[section] = {key: value, **found}
  return contents
