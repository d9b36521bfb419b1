"""What experiments left in a folder: every `summary.json`, with the command that makes it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import functools
import json
import os
from pathlib import Path
import shlex
from typing import Any, NamedTuple, Optional

from damcha_jax.config import ConfigError
from damcha_jax.errors import UserError
from damcha_jax.reporting import Row
from damcha_jax.training.workdir import is_number, read_text
from experiments import command_line
from experiments import common

ROOT = common.PAPER.parents[1]
SUMMARY, CONFIG, FIGURES, CHECKPOINTS = "summary.json", "config.json", "figures", "checkpoints"
ANALYSIS = "analysis"  # the folder, and the experiment
SMOKE = "smoke"  # a few steps, which show that a program runs and nothing else
SIZES = ("paper", "cpu", SMOKE)  # what counts more comes first
_FIELDS = {"name": str, "metric": str, "unit": str, "attention": str, "dataset": str, "split": str,
           "seeds": list, "comparable": bool}
_NUMBERS = ("value", "spread", "paper")


class ResultsError(UserError):
  """A summary cannot be read, or nothing tells how it was made."""


class Result(NamedTuple):
  """One summary.

  Attributes:
    folder: where it is.
    name: that folder, as seen from where all results are.
    experiment: which program made it.
    config: the name of its config and the size, such as 'mix:cpu'.
    command: what makes it again.
    settings: its `config.json`.
    rows: what it measured.
    figures: the files beside it, one of each.
  """

  folder: Path
  name: str
  experiment: str
  config: str
  command: str
  settings: Mapping[str, Any]
  rows: list[Row]
  figures: list[Path]

  @property
  def size(self) -> str:
    return self.config.partition(":")[2] or SIZES[0]

  def data(self, row: Row) -> list[str]:
    """The data that a row is of; one of several sets has the name of the config's section."""
    sections = row.get("section", row["dataset"]).split(" to ")
    found = [self.settings.get(section) for section in sections]
    return [one["dataset"] if isinstance(one, dict) and "dataset" in one else row["dataset"]
            for one in found]


def by_size(results: Iterable[Result]) -> list[Result]:
  """What counts more first."""
  return sorted(results, key=lambda one: (SIZES + (one.size,)).index(one.size))


def read_results(root: Path) -> list[Result]:
  """All results under `root`, in order of their folders.

  A summary below another one is a part of it, whose rows the outer one has; but for an analysis,
  which is made of what is around it, be that done or not.

  Raises:
    ResultsError: one cannot be read, or was made by no program of this suite.
  """
  if not root.is_dir():
    raise ResultsError(f"{root} is no folder; name the one that holds the workdirs or results")
  results: dict[Path, Result] = {}
  for folder in _folders(root):
    outer = next((results[parent] for parent in folder.parents if parent in results), None)
    if folder.name == ANALYSIS and not (folder / CONFIG).is_file():
      results[folder] = _read(folder, root, outer or _interrupted(_around(folder, root)))
    elif outer is None:
      results[folder] = _read(folder, root, None)
  return list(results.values())


def unfinished(root: Path) -> Iterator[Path]:
  """Workdirs under `root` that have no summary yet, and so are no results."""
  for directory, folders, files in os.walk(root):
    if SUMMARY in files or CONFIG in files:
      folders.clear()  # are parts of it
      if SUMMARY not in files:
        yield Path(directory)


def _folders(root: Path) -> Iterator[Path]:
  for directory, folders, files in os.walk(root):
    folders[:] = sorted(set(folders) - {CHECKPOINTS})
    if SUMMARY in files:
      yield Path(directory)


def _around(folder: Path, root: Path) -> Path:
  """The nearest workdir that an analysis is in; the folder above it where there is none."""
  above = folder.parents[:len(folder.relative_to(root).parts)]
  return next((one for one in above if (one / CONFIG).is_file()), folder.parent)


def _interrupted(workdir: Path) -> Result:
  """The run around an analysis that has no summary: what made it, and no rows."""
  path = workdir / CONFIG
  settings = _object(path)
  experiment, name, size = (settings.get(key) for key in ("experiment", "name", "size"))
  if not (_is_experiment(experiment) and isinstance(name, str) and isinstance(size, str)):
    raise ResultsError(f"{path} is no config of this suite's experiments; move the analysis beside "
                       "it elsewhere")
  config = f"{name}:{size}"
  return Result(workdir, workdir.name, experiment, config,
                _command(path, experiment, config, settings), settings, [], [])


def _is_experiment(name: Any) -> bool:
  return (isinstance(name, str) and name.isidentifier()
          and (ROOT / "experiments" / f"{name}.py").is_file())


def _read(folder: Path, root: Path, outer: Optional[Result]) -> Result:
  path = folder / SUMMARY
  summary = _object(path)
  settings = _object(folder / CONFIG) if outer is None else outer.settings
  experiment, config, rows = (summary.get(key) for key in ("experiment", "config", "rows"))
  if not (_is_experiment(experiment) and isinstance(config, str) and isinstance(rows, list)):
    raise ResultsError(f"{path} is no summary of this suite's experiments; move it elsewhere, or "
                       "run the experiment that makes it")
  for index, row in enumerate(rows):
    _check(path, index, row)
  name = folder.relative_to(root).as_posix()
  command = (_command(path, experiment, config, settings) if outer is None
             else _after(outer, folder, experiment))
  return Result(folder, root.name if name == "." else name, experiment,
                config if outer is None else outer.config, command, settings, rows,
                figures_of(folder))


def _after(outer: Result, folder: Path, experiment: str) -> str:
  """The command that made the runs around an analysis, and then its own."""
  runs = f"runs/{outer.experiment}/{outer.config.replace(':', '-')}"
  workdir = (Path(runs) / folder.parent.relative_to(outer.folder)).as_posix()
  return f"{outer.command} && python -m experiments.{experiment} --workdir={workdir}"


def _object(path: Path) -> dict[str, Any]:
  try:
    text = read_text(path)
    value = None if text is None else json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be written
  except (RecursionError, ValueError) as error:
    raise ResultsError(f"{path} is not valid JSON ({error}); make it again") from error
  if text is None:
    raise ResultsError(f"{path} is missing; without it nothing tells how the summary in its folder was "
                       "made; restore it, or move the folder away")
  if not isinstance(value, dict):
    raise ResultsError(f"{path} is not a JSON object; make it again")
  return value


def _check(path: Path, index: int, row: Any) -> None:
  if not isinstance(row, dict):
    raise ResultsError(f"{path}: row {index} is no JSON object; make the summary again")
  for key, kind in _FIELDS.items():
    if not isinstance(row.get(key), kind):
      raise ResultsError(f"{path}: row {index} has {key}={row.get(key)!r}, which is no "
                         f"{kind.__name__}; make the summary again")
  for key in ("variant", *_NUMBERS):
    if key not in row:
      raise ResultsError(f"{path}: row {index} has no {key}; make the summary again")
  for key in ("section", "variant", "note"):
    if not isinstance(row.get(key) or "", str):
      raise ResultsError(f"{path}: row {index} has {key}={row[key]!r}, which is no str; make the "
                         "summary again")
  for key in _NUMBERS:
    if row[key] is not None and not is_number(row[key]):
      raise ResultsError(f"{path}: row {index} has {key}={row[key]!r}, which is no number; make "
                         "the summary again")


def figures_of(folder: Path) -> list[Path]:
  """The pictures in `figures/`; of one drawn in both formats the lines, not the pixels.

  Raises:
    ResultsError: one is empty.
  """
  pictures = sorted((folder / FIGURES).rglob("*.svg")) + sorted((folder / FIGURES).rglob("*.png"))
  found = sorted({path.with_suffix(""): path for path in reversed(pictures) if path.is_file()
                  }.values())
  for path in found:
    if not path.stat().st_size:
      raise ResultsError(f"{path} is empty; remove it, and the command of its result draws it again")
  return found


def _command(path: Path, experiment: str, config: str, settings: Mapping[str, Any]) -> str:
  """The command line, with every value that is not its config file's."""
  name, _, size = config.partition(":")
  file = f"configs/{name}.py" + (f":{size}" if size not in ("", SIZES[0]) else "")
  try:
    defaults = _defaults(file)
  except ConfigError as error:
    raise ResultsError(f"{path} is of the config '{config}', which is not there: {error}"
                       ) from error
  values = dict(_flat(settings))
  changed = {key: values[key] for key, default in defaults.items()
             if key in values and _plain(values[key]) != _plain(default)}
  for key, value in changed.items():
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
      raise ResultsError(f"{path} was made with another '{key}' than {file} has, which no option "
                         "can tell; make it again")
  overrides = [f"--config.{key}={_flag(value)}" for key, value in changed.items()]
  return " ".join(["python -m", f"experiments.{experiment}", f"--config={file}",
                   *map(shlex.quote, overrides)])


@functools.cache
def _defaults(file: str) -> dict[str, Any]:
  """The values of a config file, by dotted key."""
  config = command_line.load_config(f"{ROOT}/{file}")
  return dict(_flat({key: value for key, value in config.to_dict().items()
                     if key not in ("experiment", "name", "size")}))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for key, inner in value.items():
    if isinstance(inner, dict):
      yield from _flat(inner, f"{prefix}{key}.")
    else:
      yield prefix + key, inner


def _plain(value: Any) -> Any:
  return json.loads(json.dumps(value))


def _flag(value: Any) -> str:
  return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
