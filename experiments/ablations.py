"""What the parts of DAMCHA are worth: Section 5.3, Tables 3 and 4.

  python -m experiments.ablations --config=configs/table3.py:cpu
  python -m experiments.ablations --config=configs/table4.py:cpu

A variant is an experiment of its data set's family with some keys of `damcha` changed, in a folder
of its own that the family's commands read. Blocks are left out of variants that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import AblationsConfig, for_any_device, freeze
from damcha_jax.config.ablations import depth
from damcha_jax.reporting import Measurement
from damcha_jax.training.image_generation import image_generation_task
from damcha_jax.training.reevaluation import drift_of_blocks, reevaluate
from damcha_jax.training.text_generation import text_generation_task
from damcha_jax.training.workdir import Workdir, write_atomically
from experiments import ablations_report
from experiments import command_line
from experiments import common
from experiments import image_generation
from experiments import metrics
from experiments import text_generation


class Family(NamedTuple):
  """What an experiment trains, evaluates and draws with."""

  make_task: Callable[..., Any]
  load_weights: Callable[[Any], Any]
  summarize: Callable[..., list[reporting.Row]]
  paper_names: dict[str, str]  # of its data sets
  distributions: dict[str, tuple[str, str]]


FAMILIES = {
    "image_generation": Family(
        image_generation_task, image_generation.inception_features, image_generation.summarize,
        image_generation.TABLE1_DATASETS, image_generation.DISTRIBUTIONS),
    "text_generation": Family(
        text_generation_task, text_generation.bart_scorer, text_generation.summarize,
        text_generation.TABLE1_DATASETS, text_generation.DISTRIBUTIONS),
}
EXTENSIBLE = ("datasets", "variants", "inference", "seeds")
# The paper's names, and the metrics of its two columns.
TABLE3_INFERENCE = {"full": "DAMCHA", "diagonal": "Diagonal-only",
                    "off_diagonal": "Off-diagonal-only"}
TABLE4_VARIANTS = {"static": "w/o $f(x)$+share", "unshared": "w/o share", "full": "DAMCHA"}
COLUMNS = {"fid_group_mean": "mean", "fid_top50": "top50", "bartscore_mean": "mean",
           "bartscore_top50": "top50"}


class Cell(NamedTuple):
  """One evaluation of one variant on one data set."""

  variant: str
  inference: str
  config: Any  # the family's
  trained_in: Path

  @property
  def name(self) -> str:
    return self.variant if self.inference == "full" else f"{self.variant}-{self.inference}"

  @property
  def directory(self) -> Path:
    return self.trained_in.with_name(self.name)

  @property
  def family(self) -> Family:
    return FAMILIES[self.config.experiment]

  @property
  def has_drift(self) -> bool:
    """Whether it is trained, and has blocks."""
    return self.inference == "full" and self.config.damcha.parameterization == "blocks"


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Trains and evaluates every variant; writes `summary.json`, `report.md` and `figures/`."""
  config = freeze(config, AblationsConfig)
  cells = [cell for part in _cells(config, workdir).values() for cell in part]
  trained = [(cell, common.checked_tasks(cell.config, cell.directory, cell.family.make_task))
             for cell in cells if cell.inference == "full"]
  evaluated = metrics.latest(config, workdir)
  weights = load_weights(evaluated)
  common.claim(Workdir(workdir), config, EXTENSIBLE)
  for cell, tasks in trained:
    common.train_tasks(cell.config, cell.directory, tasks)
    if cell.has_drift and common.is_primary():
      for (attention, seed), task in tasks.items():
        drift_of_blocks(task, cell.config, common.run_dir(cell.directory, attention, seed), seed,
                        common.note)
  if not common.is_primary():
    return []
  for cell in cells:
    if cell.inference != "full":
      _reevaluate(cell)
  return summarize(evaluated, workdir, weights)


def load_weights(config: AblationsConfig) -> dict[str, tuple[Any, str]]:
  """What the metrics of each data set need, or None and why there is none."""
  weights = {}
  for dataset, (cell, *_) in _cells(config, Path()).items():
    weights[dataset] = cell.family.load_weights(cell.config.metrics)
    if weights[dataset][0] is None and common.is_primary():
      common.note(f"{dataset}: {weights[dataset][1]}; rows that need them have no value")
  return weights


def _cells(config: AblationsConfig, workdir: Path) -> dict[str, list[Cell]]:
  """By data set."""
  cells: dict[str, list[Cell]] = {}
  for dataset, variant, inference in config.cells:
    cells.setdefault(dataset, []).append(
        Cell(variant, inference, config.family_config(dataset, variant, inference),
             workdir / dataset / variant))
  return cells


def _reevaluate(cell: Cell) -> None:
  """Likelihoods of what is trained when blocks are left out."""
  common.claim(Workdir(cell.directory), cell.config)
  for attention, seed, own in common.runs(cell.config):
    reevaluate(cell.family.make_task(for_any_device(own), attention, seed), own,
               common.run_dir(cell.trained_in, attention, seed),
               common.run_dir(cell.directory, attention, seed), seed, common.note)


def summarize(config: AblationsConfig, workdir: Path,
              weights: dict[str, tuple[Any, str]]) -> list[reporting.Row]:
  """Samples and evaluates what is trained; `weights` are from `load_weights`.

  Rows name the config's section that they are of, as `section`.
  """
  paper = json.loads(common.PAPER.read_text(encoding="utf-8"))
  rows = []
  for dataset, cells in _cells(config, workdir).items():
    directories: dict[str, dict[str, list[Path]]] = {}
    for cell in cells:
      results = common.read_results(cell.config, cell.directory)
      found = cell.family.summarize(cell.config, cell.directory, results, weights[dataset],
                                    trained_in=cell.trained_in, show=False)
      added = list(_rows(cell, found, paper, controls=cell is cells[-1]))
      if cell.has_drift:
        added += reporting.summary_rows(_drifts(cell), False, lambda _: None)
      # Several sets may stand on the same sample.
      rows += [{**row, "section": dataset} for row in added]
      by_variant = directories.setdefault(cell.inference, {})
      by_variant[cell.variant] = common.run_dirs(cell.directory, results)["damcha"]
    for inference, by_variant in directories.items():
      common.plot_scores(workdir / "figures" / dataset / inference,
                         f"{cells[0].config.dataset}, inference {inference}", by_variant,
                         cells[0].family.distributions)
  reporting.write_summary(workdir / "summary.json", config.experiment,
                          f"{config.name}:{config.size}", rows)
  report = ablations_report.report(config, rows)
  write_atomically(workdir / "report.md", report)
  print(f"{report}\nResults are in {workdir}")
  return rows


def _rows(cell: Cell, found: list[reporting.Row], paper: dict[str, Any],
          controls: bool) -> Iterator[reporting.Row]:
  """The family's rows under the cell's name, beside Table 3 or 4; `controls` come once."""
  for row in found:
    if row["attention"] != "damcha":
      if controls:
        yield row
    elif cell.inference == "full" or row["split"] != "train":
      yield {**row, "paper": _figure(cell, row["metric"], paper),
             "variant": ", ".join(filter(None, (cell.name, row["variant"])))}


def _figure(cell: Cell, metric: str, paper: dict[str, Any]) -> Optional[float]:
  dataset, column = cell.family.paper_names[cell.config.name], COLUMNS.get(metric)
  if depth(cell.variant) is not None and cell.inference in TABLE3_INFERENCE:
    figures = paper["table3"][TABLE3_INFERENCE[cell.inference]][dataset]
    return figures.get(column, {}).get(str(depth(cell.variant)))
  if cell.inference == "full" and cell.variant in TABLE4_VARIANTS:
    return paper["table4"][dataset][TABLE4_VARIANTS[cell.variant]].get(column)
  return None


def _drifts(cell: Cell) -> Iterator[Measurement]:
  for attention, seed, own in common.runs(cell.config):
    drift = Workdir(common.run_dir(cell.directory, attention, seed)).read_json(
        "drift.json", ablations_report.DRIFT)
    for metric in ablations_report.DRIFT:
      yield Measurement(attention, own.dataset, "train", metric, drift[metric], "1", seed,
                        cell.name)


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "ablations")
