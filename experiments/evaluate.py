"""Evaluates generation runs again from what they drew, such as with weights that came later.

  python -m experiments.evaluate --workdir=runs/cifar10 --metrics.inception_weights=inception.pth

Nothing is trained, and nothing is drawn that is there. Every `--metrics.KEY=VALUE` replaces a value
of the runs' `config.metrics` (of ablations, on all data sets that have the key); the runs' own
record stays as it is, the summary is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
from pathlib import Path
import re
import sys
from typing import Any

from damcha_jax import reporting
from damcha_jax.config import AblationsConfig, ConfigError, freeze, to_dict, unknown_key_message
from damcha_jax.errors import WorkdirError
from damcha_jax.training.workdir import Workdir
from experiments import ablations
from experiments import common
from experiments import image_generation
from experiments import text_generation

# Experiment -> what loads the weights that metrics need, and what makes the summary with them.
FAMILIES = {
    "image_generation": (image_generation.inception_features, image_generation.summarize),
    "text_generation": (text_generation.bart_scorer, text_generation.summarize),
}


def main(argv: Sequence[str]) -> list[reporting.Row]:
  workdir, changes = parse(argv)
  config = _config(workdir, changes)
  if isinstance(config, AblationsConfig):
    return ablations.summarize(config, workdir, ablations.load_weights(config))
  load, summarize = FAMILIES[config.experiment]
  return summarize(config, workdir, common.read_results(config, workdir), load(config.metrics))


def parse(argv: Sequence[str]) -> tuple[Path, dict[str, str]]:
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
      changes[match[1].removeprefix("metrics.")] = match[2]
  if workdir is None:
    raise ConfigError("--workdir is missing; name the directory that training wrote")
  return workdir, changes


def _config(workdir: Path, changes: dict[str, str]) -> Any:
  contents, known = Workdir(workdir).read_config(), (*FAMILIES, "ablations")
  if contents is None or contents.get("experiment") not in known:
    raise WorkdirError(f"{workdir} holds no runs of {', '.join(known)}; name the directory that "
                       "training wrote")
  cls = common.CONFIG_CLASSES[contents["experiment"]]
  config = freeze(contents, cls)
  contents = to_dict(config)
  names = config.dataset_names if isinstance(config, AblationsConfig) else ()
  sections = [contents[name]["metrics"] for name in names] or [contents["metrics"]]
  keys = {key: None for section in sections for key in section}  # ordered
  for key, text in changes.items():
    if key not in keys:
      raise ConfigError(unknown_key_message(f"metrics.{key}", [f"metrics.{name}" for name in keys]))
    for section in sections:
      if key in section:
        section[key] = _value(text)
  return freeze(contents, cls)


def _value(text: str) -> Any:
  """True, false, null and numbers as JSON has them, in any case; everything else is a string."""
  try:
    return json.loads(text.lower().replace("none", "null"))
  except ValueError:
    return text


if __name__ == "__main__":
  with common.user_errors():
    main(sys.argv)
