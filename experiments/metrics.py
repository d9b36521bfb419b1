"""How runs were last evaluated, which may be otherwise than their config said when they began.

`experiments.evaluate` changes values of `config.metrics`, such as paths of weights that came later.
A workdir keeps them in `evaluation.json`, so that what is summarised next, as when a seed is added,
has them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from damcha_jax.config import ConfigError, freeze, to_dict, unknown_key_message
from damcha_jax.training.workdir import Workdir

_FILE = "evaluation.json"


def latest(config: Any, workdir: Path) -> Any:
  """The config with the metrics of the latest evaluation in the workdir.

  Raises:
    ConfigError: a value cannot be.
    WorkdirError: the record cannot be read.
  """
  return changed(config, _changes(workdir))


def remember(workdir: Path, changes: Mapping[str, Any]) -> None:
  """Keeps the values for later evaluations; those of other keys stay as they are."""
  Workdir(workdir).write_json(_FILE, {"metrics": {**_changes(workdir), **changes}})


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
  """The config with other `metrics`; those of every data set that has the key, in ablations.

  Raises:
    ConfigError: a key is unknown, or a value cannot be.
  """
  if not changes:
    return config
  contents = to_dict(config)
  names = getattr(config, "dataset_names", ())
  sections = [contents[name]["metrics"] for name in names] or [contents["metrics"]]
  keys = {key: None for section in sections for key in section}  # ordered
  for key, value in changes.items():
    if key not in keys:
      raise ConfigError(unknown_key_message(f"metrics.{key}", [f"metrics.{name}" for name in keys]))
    for section in sections:
      if key in section:
        section[key] = value
  return freeze(contents, type(config))


def _changes(workdir: Path) -> dict[str, Any]:
  record = Workdir(workdir).read_json(_FILE, keys=("metrics",))
  return {} if record is None else record["metrics"]
