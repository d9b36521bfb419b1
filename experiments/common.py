"""What experiments share: the runs of a suite, what is reported of them, where it is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import sys
from typing import Any, Optional

import jax
import numpy as np

from damcha_jax import reporting
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import (AblationsConfig, ConfigError, for_any_device,
                               ImageClassificationConfig, ImageGenerationConfig,
                               LanguageModelConfig, TextGenerationConfig, to_dict)
from damcha_jax.errors import WorkdirError
from damcha_jax.reporting import Measurement
from damcha_jax.training import loop
from damcha_jax.training.restore import validation_scores
from damcha_jax.training.result import read_result
from damcha_jax.training.task import Task
from damcha_jax.training.workdir import Workdir, first_difference

PAPER = Path(__file__).parents[1] / "results" / "paper.json"
CONFIG_CLASSES = {"gpt2_enwik8": LanguageModelConfig, "image_generation": ImageGenerationConfig,
                  "text_generation": TextGenerationConfig, "ablations": AblationsConfig,
                  "vit_imagenet": ImageClassificationConfig}
COSTS = {"num_params": "1", "model_flops_per_step": "FLOP", "train_seconds": "s"}
Results = dict[tuple[str, int], dict[str, Any]]  # by attention and seed
Tasks = dict[tuple[str, int], Task]
Finding = tuple[Measurement, Optional[float]]  # beside the paper's figure


def run_suite(config: Any, workdir: Path, make_task: Callable[[Any, str, int], Task]) -> Results:
  """Trains every attention with every seed, each in `<workdir>/<attention>/seed<k>/`.

  Runs that are complete are only read; one that was interrupted goes on where it stopped.

  Args:
    config: a frozen config with `attentions` and `seeds` besides what `loop.train` reads.
    workdir: the suite's directory; a later call may add attentions and seeds, nothing else.
    make_task: `(config, attention, seed) -> Task`.

  Returns:
    The contents of `result.json` by (attention, seed).

  Raises:
    ConfigError: the configuration cannot run.
    WorkdirError: the directory belongs to another configuration.
  """
  tasks = checked_tasks(config, workdir, make_task)
  # Only now, so that a rejected configuration does not claim the directory.
  return train_tasks(config, workdir, tasks)


def checked_tasks(config: Any, workdir: Path,
                  make_task: Callable[[Any, str, int], Task]) -> Tasks:
  """The tasks of a suite, after every check that needs no directory; see `run_suite`.

  A run that is complete is not trained here, so it may be of another kind or number of devices.
  """
  for attention in config.attention_names:
    if attention not in ATTENTIONS:
      raise ConfigError(f"unknown attention '{attention}' in config key 'attentions'; choose from "
                        f"{', '.join(sorted(ATTENTIONS))}")
  tasks = {}
  for attention, seed, own in runs(config):
    if (run_dir(workdir, attention, seed) / "result.json").exists():
      tasks[attention, seed] = make_task(for_any_device(own), attention, seed)
    else:
      tasks[attention, seed] = make_task(own, attention, seed)
      loop.check(tasks[attention, seed], own, seed)
  return tasks


def train_tasks(config: Any, workdir: Path, tasks: Tasks) -> Results:
  """Trains what `checked_tasks` made; see `run_suite`."""
  claim(Workdir(workdir), config)
  return {(attention, seed): loop.train(tasks[attention, seed], own,
                                        run_dir(workdir, attention, seed), seed)
          for attention, seed, own in runs(config)}


def runs(config: Any) -> Iterator[tuple[str, int, Any]]:
  """Attention, seed and config of each run."""
  for attention in config.attention_names:
    for seed in config.seeds:
      yield attention, seed, dataclasses.replace(config, attentions=attention, seeds=(seed,))


def read_results(config: Any, workdir: Path) -> Results:
  """What `run_suite` returned, from the files of runs that are complete.

  Raises:
    WorkdirError: a run is not.
  """
  results = {}
  for attention, seed, _ in runs(config):
    directory = run_dir(workdir, attention, seed)
    result = read_result(Workdir(directory), name=attention, seed=seed)
    if result is None:
      raise WorkdirError(f"{directory} is not trained to the end; run the command that made it")
    results[attention, seed] = result
  return results


def run_dir(workdir: Path, attention: str, seed: int) -> Path:
  return workdir / attention / f"seed{seed}"


def trained(config: Any, results: Results, units: Mapping[str, str]) -> Iterator[Measurement]:
  """Quality of each run's best checkpoint on held-out splits, by metrics, and the run's costs.

  Args:
    config: the frozen config of the suite.
    results: as `run_suite` returns them.
    units: of each metric that is reported.
  """
  for (attention, seed), result in results.items():
    metrics_by_split = result["best"]["metrics"]
    for name, metrics in metrics_by_split.items():
      split, _, source = name.partition("/")
      if split in ("validation", "test"):
        for metric, unit in units.items():
          yield Measurement(attention, config.dataset, split, metric,
                            _reported(metrics, metric, attention, seed), unit, seed,
                            variant=source or None)
    if "diagnostics" in metrics_by_split:
      yield Measurement(attention, config.dataset, "validation", "adaptivity",
                        _reported(metrics_by_split["diagnostics"], "adaptivity", attention, seed),
                        "1", seed)
    for metric, unit in COSTS.items():
      yield Measurement(attention, config.dataset, "train", metric, result[metric], unit, seed)


def beside_table1(rows: Iterable[reporting.Row]) -> list[reporting.Row]:
  """The rows, of which those of an original are not comparable where the authors changed it.

  Table 1 measured the attentions of the authors' repository, here `authors_*`.
  """
  rows = list(rows)
  for row in rows:
    measured = f"authors_{row['attention']}"
    if row["paper"] is not None and measured in ATTENTIONS:
      row["comparable"] = False
      row["note"] = "; ".join(filter(None, (row.get("note"), f"the paper measured {measured}")))
  return rows


def print_rows(rows: Sequence[reporting.Row], printed: Collection[str], comparable: bool,
               workdir: Path) -> None:
  """The table of the metrics `printed`."""
  print(reporting.format_table([row for row in rows if row["metric"] in printed]))
  if not comparable:
    print("\nThe paper's figures are for its own data and size, which these are not.")
  print(f"\nResults are in {workdir}")


def _reported(metrics: Mapping[str, float], metric: str, attention: str, seed: int) -> float:
  if metric not in metrics:
    raise WorkdirError(f"the result.json of {attention}, seed {seed}, has no '{metric}'; remove it, "
                       "and the command that trained the run makes it again")
  return metrics[metric]


def validation_curves(workdir: Path, results: Results,
                      metric: str = "nats_per_token") -> dict[str, list[tuple[int, float]]]:
  """(step, a metric on the validation split), by the name of each run."""
  curves = {}
  for attention, seed in results:
    path = run_dir(workdir, attention, seed) / "metrics.jsonl"
    curves[f"{attention}, seed {seed}"] = list(validation_scores(path, metric).items())
  return curves


def plot_scores(figures: Path, dataset: str, directories: Mapping[str, Sequence[Path]],
                distributions: Mapping[str, tuple[str, str]]) -> None:
  """Writes `distribution-<score>` for every score by sample that runs have, methods side by side.

  Args:
    figures: the folder to write into.
    dataset: for the titles.
    directories: those of a method's runs, whose scores are pooled, by its name.
    distributions: (quantity, unit) by the name of the score in the runs' `scores.npz`. What no run
      has, for want of weights, gets no figure.
  """
  scores: dict[str, dict[str, list[np.ndarray]]] = {score: {} for score in distributions}
  for method, runs in directories.items():
    for run in runs:
      with np.load(run / "scores.npz") as entries:
        for score in distributions:
          if score in entries:
            scores[score].setdefault(method, []).append(entries[score])
  for score, by_method in scores.items():
    if by_method:
      quantity, unit = distributions[score]
      reporting.plot_distributions(
          figures / f"distribution-{score}",
          {method: np.concatenate(parts) for method, parts in by_method.items()},
          f"{quantity} on {dataset}", quantity, unit)


def run_dirs(workdir: Path, results: Results) -> dict[str, list[Path]]:
  """The directories of the runs of each attention."""
  directories: dict[str, list[Path]] = {}
  for attention, seed in results:
    directories.setdefault(attention, []).append(run_dir(workdir, attention, seed))
  return directories


def claim(directory: Workdir, config: Any,
          extensible: Sequence[str] = ("attentions", "seeds")) -> None:
  """Writes the suite's `config.json` and `versions.json`, or checks them.

  Args:
    directory: the suite's.
    config: its frozen config.
    extensible: the keys whose lists a later call may add to.
  """
  wanted = json.loads(json.dumps(to_dict(config)))
  with directory.locked():
    present = directory.read_config()
    if present is not None:
      if not all(isinstance(present.get(key), type(wanted[key])) for key in extensible):
        kind = "that of a single run" if "run" in present else "no directory of this experiment's"
        raise WorkdirError(f"workdir {directory.path} is {kind}: its config.json names no "
                           f"{' and '.join(extensible)}; name one that does, or choose another "
                           "workdir")
      missing = {key: [entry for entry in _entries(present, key)
                       if entry not in _entries(wanted, key)] for key in extensible}
      if any(missing.values()):
        names = [f"seed {entry}" if key == "seeds" else entry
                 for key, entries in missing.items() for entry in entries]
        # What it holds comes first: the first seed is that of a study's exploratory cells.
        options = [f"--config.{key}="
                   + ",".join(dict.fromkeys((*_entries(present, key), *_entries(wanted, key))))
                   for key, entries in missing.items() if entries]
        raise WorkdirError(f"workdir {directory.path} also holds {', '.join(names)}; name all it "
                           f"holds and any to add, as {' '.join(options)}, or choose another workdir")
      difference = first_difference({**present, **{key: wanted[key] for key in extensible}}, wanted)
      if difference:
        key, old, new = difference
        raise WorkdirError(f"workdir {directory.path} holds runs with {key}={old!r}, not {new!r}; "
                           "choose another workdir, or use the same value to resume")
    directory.write_json("config.json", wanted)
    directory.record_versions()


def kept(directory: Path, find: Callable[[], Iterable[Finding]], **given: Any) -> list[Finding]:
  """The findings in `directory`'s `result.json`, or new ones if it has none for what is `given`."""
  workdir = Workdir(directory)
  with workdir.locked():
    result = workdir.read_json("result.json", keys=("findings",))
    if result is None or {key: result.get(key) for key in given} != given:
      note(f"working out {'/'.join(directory.parts[-2:])}")
      findings = [(dataclasses.asdict(one), paper) for one, paper in find()]
      result = {**given, "findings": findings}
      workdir.write_json("result.json", result, sealed=True)
  return [(Measurement(**one), paper) for one, paper in result["findings"]]


def _entries(contents: Mapping[str, Any], key: str) -> list[str]:
  """Of a list of names, comma-separated, or of seeds."""
  value = contents[key]
  return [entry for entry in value.split(",") if entry] if isinstance(value, str) else [
      str(seed) for seed in value]


def note(line: str) -> None:
  print(f"note: {line}", file=sys.stderr)


def is_primary() -> bool:
  """Whether this process writes and prints for all."""
  return jax.process_index() == 0
