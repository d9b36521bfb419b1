"""Evaluates generation runs again from what they drew, such as with weights that came later.

  python -m experiments.evaluate --workdir=runs/cifar10 --metrics.inception_weights=inception.pth

Nothing is trained, and nothing is drawn that is there. Every `--metrics.KEY=VALUE` replaces a value
of the runs' `config.metrics` (of ablations, on all data sets that have the key), from now on: the
runs' own record stays as it is, the summary is written again, and `evaluation.json` keeps the values
for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import re
import sys
from typing import Any

from damcha_jax import reporting
from damcha_jax.config import AblationsConfig, ConfigError, freeze
from damcha_jax.errors import UserError, WorkdirError
from damcha_jax.training.workdir import Workdir
from experiments import ablations
from experiments import command_line
from experiments import common
from experiments import image_generation
from experiments import metrics
from experiments import text_generation

# Experiment -> what loads the weights that metrics need, and what makes the summary with them.
FAMILIES = {
    "image_generation": (image_generation.inception_features, image_generation.summarize),
    "text_generation": (text_generation.bart_scorer, text_generation.summarize),
}


def main(argv: Sequence[str]) -> list[reporting.Row]:
  workdir, changes = parse(argv)
  config = metrics.changed(metrics.latest(_config(workdir), workdir), changes)
  if isinstance(config, AblationsConfig):
    weights = ablations.load_weights(config)
    _require(weights.values(), [getattr(config, name)["metrics"] for name in config.dataset_names])
    rows = ablations.summarize(config, workdir, weights)
  else:
    load, summarize = FAMILIES[config.experiment]
    weights = load(config.metrics)
    _require([weights], [dataclasses.asdict(config.metrics)])
    rows = summarize(config, workdir, common.read_results(config, workdir), weights)
  metrics.remember(workdir, changes)
  return rows


def _require(loaded: Iterable[tuple[Any, str]], sections: Sequence[Mapping[str, Any]]) -> None:
  """Raises `UserError` for weights that are named but not there: nothing is written then."""
  for (weights, why), section in zip(loaded, sections, strict=True):
    named = any(value for key, value in section.items() if key.endswith("_weights")
                and isinstance(value, str))
    if weights is None and named:
      raise UserError(f"{why}; --metrics.KEY_weights=null does without")


def parse(argv: Sequence[str]) -> tuple[Path, dict[str, Any]]:
  """The workdir and the values to replace.

  Raises:
    ConfigError: the command line cannot be understood.
  """
  workdir, changes = None, {}
  for argument in argv[1:]:
    match = re.fullmatch(r"--(workdir|metrics\.\w+)=(.*)", argument)
    if argument in ("-h", "--help"):
      print(__doc__)
      sys.exit(0)
    if not match:
      raise ConfigError(f"unexpected argument '{argument}'; use --workdir=DIR and "
                        "--metrics.KEY=VALUE")
    if match[1] == "workdir":
      workdir = Path(match[2]).absolute()
    else:
      changes[match[1].removeprefix("metrics.")] = _value(match[2])
  if workdir is None:
    raise ConfigError("--workdir is missing; name the directory that training wrote")
  return workdir, changes


def _config(workdir: Path) -> Any:
  contents, known = Workdir(workdir).read_config(), (*FAMILIES, "ablations")
  if contents is None or contents.get("experiment") not in known:
    raise WorkdirError(f"{workdir} holds no runs of {', '.join(known)}; name the directory that "
                       "training wrote")
  return freeze(contents, common.CONFIG_CLASSES[contents["experiment"]])


def _value(text: str) -> Any:
  """True, false, null and numbers as JSON has them, in any case; everything else is a string."""
  try:
    return json.loads(text.lower().replace("none", "null"))
  except ValueError:
    return text


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
