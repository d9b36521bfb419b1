"""What is true of DAMCHA at a size that two CPU cores finish: variants x data sets x seeds.

  python -m experiments.study --config=configs/study_cpu.py

Learning rates are tuned first, each variant's over the same factors, and beyond them while an end
is the best. Every (set, variant) has a folder, which is a workdir of its family; summaries are made
from the `result.json` and `metrics.jsonl` in them, so the same command makes them again from a copy
without checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import math
from pathlib import Path
import statistics
import time
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import freeze
from damcha_jax.config.study import StudyConfig, VARIANTS
from damcha_jax.errors import DataError, NonFiniteError, WorkdirError
from damcha_jax.evaluation.intervals import bootstrap, half_width
from damcha_jax.reporting import Measurement
from damcha_jax.training import loop
from damcha_jax.training import state as state_lib
from damcha_jax.training.flops import model_flops_per_step
from damcha_jax.training.image_generation import image_generation_task
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.reevaluation import reevaluate
from damcha_jax.training.restore import is_whole, recorded
from damcha_jax.training.result import read_result
from damcha_jax.training.task import Task
from damcha_jax.training.text_generation import text_generation_task
from damcha_jax.training.workdir import Workdir
from damcha_jax.training.writer import format_duration
from experiments import command_line
from experiments import common
from experiments import questions

MAKE_TASK = {"gpt2_enwik8": language_model_task, "image_generation": image_generation_task,
             "text_generation": text_generation_task}
UNITS = {"nats_per_token": "nats/token"}
# A byte is a token of the language models alone.
UNITS_OF = {"gpt2_enwik8": {**UNITS, "bits_per_byte": "bits/byte"},
            "image_generation": {**UNITS, "bits_per_token": "bits/token"},
            "text_generation": UNITS}
EXTENSIBLE = ("sets", "variants", "replicated", "exploratory", "seeds")
BASELINES = ("mha", "dcmha", "damcha", "damcha_robust")
TUNING = "tuning"
# Files and folders, and what makes them.
NOT_SHIPPED = {"webster.txt": "dictionary --out=~/.cache/damcha_jax",
               "more_pairs": "more_pairs --out=~/.cache/damcha_jax/more_pairs"}
# In which a run that its family's own command trained may differ.
NO_PART_OF_TRAINING = ("size", "logging")
Cell = tuple[str, str]  # set, variant
Scores = dict[tuple[Cell, float], float]  # by factor
Key = tuple[str, str, str, Optional[str], int]  # set, variant, split, part of it, seed


class Run(NamedTuple):
  """One training run."""

  set: str
  variant: str
  config: Any  # the family's, of this run alone
  seed: int
  directory: Path

  @property
  def name(self) -> str:
    return f"{self.set}, {self.variant}, seed {self.seed}"

  def task(self) -> Task:
    return MAKE_TASK[self.config.experiment](self.config, self.config.attentions, self.seed)

  def is_complete(self) -> bool:
    """Whether it has a result, with whatever learning rate: which is its own, tuning tells."""
    return (self.directory / "result.json").exists()

  def result(self) -> Optional[dict[str, Any]]:
    """Its `result.json`, or None where it is not trained to the end.

    Raises:
      WorkdirError: it cannot be read, or is that of another run or configuration.
    """
    workdir = Workdir(self.directory)
    result = read_result(workdir, name=self.config.attentions, seed=self.seed,
                         num_steps=self.config.num_steps)
    if result is not None:
      workdir.check_config(self.config, self.config.attentions, self.seed, NO_PART_OF_TRAINING)
    return result


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Tunes and trains all that is left; writes `summary.json` and `figures/`."""
  config = freeze(config, StudyConfig)
  check(config)
  _check_first_seed(config, Workdir(workdir))
  common.claim(Workdir(workdir), config, EXTENSIBLE)
  scores = tune(config, workdir)
  factors = winners(scores)
  for (name, variant), own in _cells(config, factors).items():
    common.claim(Workdir(workdir / name / variant), own)
  runs = list(_runs(config, workdir, factors))
  _train(runs)
  if not common.is_primary():
    return []
  shifted = list(_shifted(config, workdir, runs))
  return summarize(config, workdir, [*runs, *shifted], scores)


def check(config: StudyConfig) -> None:
  """Raises `ConfigError` or `DataError` for a run that cannot be trained, before any is."""
  tuned = {cell: config.family_config(*cell) for cell in config.tuned}
  cells = _cells(config, dict.fromkeys(config.tuned, 1.0))
  shifted = (_shifted_config(config, own) for (name, _), own in cells.items()
             if name in config.shift_sets[:1])
  for own in (*{**tuned, **cells}.values(), *shifted):
    seed = own.seeds[0]
    try:
      loop.check(MAKE_TASK[own.experiment](own, own.attentions, seed), own, seed)
    except DataError as error:
      maker = NOT_SHIPPED.get(Path(own.dataset).name)
      if maker is None:
        raise
      raise DataError(f"{error}; 'python -m damcha_jax.data.make_samples {maker}' makes it, or leave "
                      "its cells out") from error


def _check_first_seed(config: StudyConfig, workdir: Workdir) -> None:
  """Raises `WorkdirError` if the workdir's exploratory cells have another seed, before it is claimed."""
  present = workdir.read_config() or {}
  seeds = present["seeds"] if isinstance(present.get("seeds"), list) else []
  if present.get("exploratory") and seeds and seeds[0] != config.seeds[0]:
    named = ",".join(map(str, dict.fromkeys((*seeds, *config.seeds))))
    raise WorkdirError(f"the exploratory cells of workdir {workdir.path} have its first seed, "
                       f"{seeds[0]}; name that first, as --config.seeds={named}, or choose another "
                       "workdir")


def tune(config: StudyConfig, workdir: Path) -> Scores:
  """The validation loss of each tuned variant with each factor of its learning rate.

  An end of the grid that is the best is no optimum: the grid goes on beyond it until it is not.
  """
  num_later = sum(not run.is_complete() for run in _runs(config, workdir, {}))
  factors = {cell: sorted(config.tuning.factors) for cell in config.tuned}
  scores: Scores = {}
  while True:
    runs = {(cell, factor): _tuning_run(config, workdir, *cell, factor)
            for cell, grid in factors.items() for factor in grid if (cell, factor) not in scores}
    if not runs:
      return scores
    _train(list(runs.values()), num_later, may_diverge=True)
    scores |= {key: math.inf if run.result() is None else _validation(run)
               for key, run in runs.items()}
    for cell, best in winners(scores).items():
      if _stands_out(best, {factor: scores[cell, factor] for factor in factors[cell]}):
        factors[cell] = _widened(factors[cell], best)


def _tuning_run(config: StudyConfig, workdir: Path, name: str, variant: str, factor: float) -> Run:
  seed = config.tuning.seed
  return Run(name, f"{variant} x {factor:g}", config.family_config(name, variant, factor, (seed,)),
             seed, workdir / TUNING / name / f"{variant}-{factor:g}")


def _stands_out(best: float, scores: Mapping[float, float]) -> bool:
  """Whether a wider grid may tell more: not where factors score alike, unless all diverged."""
  return scores[best] == math.inf or list(scores.values()).count(scores[best]) == 1


def _widened(grid: list[float], best: float) -> list[float]:
  """The ascending `grid`, with one factor beyond its end if that is `best`; two have no inside."""
  if len(grid) > 2 and best == grid[0]:
    return [grid[0]**2 / grid[1], *grid]
  if len(grid) > 2 and best == grid[-1]:
    return [*grid, grid[-1]**2 / grid[-2]]
  return grid


def winners(scores: Scores) -> dict[Cell, float]:
  """The factor with the lowest score, of each tuned (set, variant)."""
  best: dict[Cell, tuple[float, float]] = {}
  for (cell, factor), score in scores.items():
    best[cell] = min(best.get(cell, (score, factor)), (score, factor))
  return {cell: factor for cell, (_, factor) in best.items()}


def _validation(run: Run) -> float:
  return run.result()["best"]["metrics"]["validation"]["nats_per_token"]


def _cells(config: StudyConfig, factors: Mapping[Cell, float]) -> dict[Cell, Any]:
  """The family's config of each (set, variant); what takes no tuned factor has 1."""
  cells = {}
  for (name, variant), seeds in config.cells.items():
    factor = factors.get(config.rate_of(name, variant), 1.0)
    own = config.family_config(name, variant, factor, seeds)
    reference = VARIANTS[variant].flops_of
    if reference:
      cost, budget = _flops(own), _flops(config.family_config(name, reference))
      own = dataclasses.replace(own, num_steps=round(own.num_steps * budget / cost))
    cells[name, variant] = own
  return cells


def _runs(config: StudyConfig, workdir: Path, factors: Mapping[Cell, float]) -> Iterator[Run]:
  """All runs but tuning's, every cell's first seed before any cell's second."""
  cells = _cells(config, factors)
  for rank in range(len(config.seeds)):
    for (name, variant), own in cells.items():
      for attention, seed, single in list(common.runs(own))[rank:rank + 1]:
        yield Run(name, variant, single, seed,
                  common.run_dir(workdir / name / variant, attention, seed))


def _shifted(config: StudyConfig, workdir: Path, runs: Iterable[Run]) -> Iterator[Run]:
  """What is trained on one set, evaluated on the other."""
  for run in runs:
    if run.set in config.shift_sets[:1]:
      other = _shifted_config(config, run.config)
      evaluated = run._replace(set=" to ".join(config.shift_sets), config=other, directory=workdir
                               / "shift" / run.directory.relative_to(workdir))
      reevaluate(evaluated.task(), other, run.directory, evaluated.directory, run.seed, common.note)
      yield evaluated


def _shifted_config(config: StudyConfig, own: Any) -> Any:
  return dataclasses.replace(own, dataset=getattr(config, config.shift_sets[1])["dataset"])


def _flops(config: Any) -> int:
  """Of the model, per step."""
  task = MAKE_TASK[config.experiment](config, config.attentions, 0)
  params = nn.unbox(jax.eval_shape(task.init_params, state_lib.root_key(0, config.prng_impl)))
  return model_flops_per_step(task, params, task.train_source.batch_at(0))


def _train(runs: list[Run], num_later: int = 0, may_diverge: bool = False) -> None:
  """Trains what is not trained yet, and says how much is left; `num_later` runs come after."""
  recorded = [result["train_seconds"] for result in map(Run.result, runs) if result]
  whole: list[float] = []  # with what is no training: compiling, evaluating
  untrained = _untrained(runs)
  for index, run in enumerate(untrained):
    num_left = len(untrained) - index + num_later
    left = lambda each: format_duration(num_left * statistics.fmean(each))
    time_left = (f", about {left(whole)}" if whole else f", more than {left(recorded)}"
                 if recorded else "")
    common.note(f"{run.name}; runs left: {num_left}{time_left}")
    start = time.monotonic()
    with contextlib.suppress(NonFiniteError) if may_diverge else contextlib.nullcontext():
      loop.train(run.task(), run.config, run.directory, run.seed)
    whole.append(time.monotonic() - start)


def _untrained(runs: Iterable[Run]) -> list[Run]:
  return [run for run in runs if run.result() is None]


def summarize(config: StudyConfig, workdir: Path, runs: list[Run],
              scores: Scores) -> list[reporting.Row]:
  """Rows, table and figures of what is trained."""
  measurements = [one for run in runs for one in _measurements(run)]
  losses = {(one.dataset, one.attention, one.split, one.variant, one.seed): one.value
            for one in measurements
            if one.metric == "nats_per_token" and one.split != "train"}
  differences = list(_differences(losses))
  rows = reporting.summary_rows([*measurements, *differences, *_of_tuning(config, scores)], False,
                                lambda _: None)
  reporting.write_summary(workdir / "summary.json", config.experiment,
                          f"{config.name}:{config.size}", rows)
  _plot(workdir / "figures", runs, rows)
  questions.plot(workdir / "figures", rows)
  printed = {"nats_per_token", "bits_per_byte", "num_params", "nats_minus_mha", "nats_minus_damcha"}
  common.print_rows([row for row in rows if row["split"] != "validation"], printed, False, workdir)
  return rows


def _measurements(run: Run) -> Iterator[Measurement]:
  """What one run shows, under the names of its set and variant."""
  results = {(run.config.attentions, run.seed): run.result()}
  for one in common.trained(run.config, results, UNITS_OF[run.config.experiment]):
    yield dataclasses.replace(one, attention=run.variant, dataset=run.set)
  if "final" not in run.result():  # a run that is evaluated on another set was not trained on it
    return
  losses = list(_training_losses(run).values())
  if not losses:
    common.note(f"{run.directory / 'metrics.jsonl'} is damaged or ends before the last step: the "
                f"training loss of {run.name} is left out")
  else:
    last = statistics.fmean(losses[-max(1, len(losses) // 10):])
    for metric, value in (("training_nats_per_token", last),
                          ("generalization_gap", _validation(run) - last)):
      yield Measurement(run.variant, run.set, "train", metric, value, "nats/token", run.seed,
                        note="the last tenth of what is logged, each batch before its update")
  yield Measurement(run.variant, run.set, "train", "learning_rate",
                    run.config.optimizer.learning_rate, "1", run.seed)
  yield Measurement(run.variant, run.set, "train", "num_steps", run.config.num_steps, "1", run.seed)


def _training_losses(run: Run) -> dict[int, float]:
  """By step; none where some are lost, since the others would be taken for the end."""
  path = run.directory / "metrics.jsonl"
  losses = recorded(path, "nats_per_token", "train")
  return losses if run.config.num_steps in losses and is_whole(path) else {}


def _differences(losses: Mapping[Key, float]) -> Iterator[Measurement]:
  """Paired by seed: a variant's loss less a baseline's; below 0 the variant is the better one."""
  for baseline in BASELINES:
    by_cell: dict[tuple, dict[int, float]] = {}
    for (name, variant, split, part, seed), loss in losses.items():
      other = losses.get((name, baseline, split, part, seed))
      if variant != baseline and other is not None:
        by_cell.setdefault((variant, name, split, part), {})[seed] = loss - other
    for (variant, name, split, part), by_seed in by_cell.items():
      metric = f"nats_minus_{baseline}"
      for seed, value in by_seed.items():
        yield Measurement(variant, name, split, metric, value, "nats/token", seed, part)
      yield from _intervals(variant, name, split, metric, list(by_seed.values()), part)


def _intervals(variant: str, name: str, split: str, metric: str, values: list[float],
               part: Optional[str]) -> Iterator[Measurement]:
  several = len(values) > 1
  low, high = bootstrap(values) if several else (None, None)
  found = {
      "ci95": (half_width(values) if several else None,
               "the mean is within this at a confidence of 95%, by Student's t"),
      "bootstrap_low": (low, "2.5% of the means of all resamplings of the seeds are below"),
      "bootstrap_high": (high, "2.5% of the means of all resamplings of the seeds are above")}
  for suffix, (value, note) in found.items():
    yield Measurement(variant, name, split, f"{metric}_{suffix}", value, "nats/token",
                      variant=part, note=note if several else "exploratory: one seed has no spread")


def _of_tuning(config: StudyConfig, scores: Scores) -> Iterator[Measurement]:
  chosen = winners(scores)
  for ((name, variant), factor), score in sorted(scores.items()):
    diverged = math.isinf(score)
    note = "chosen" if chosen[name, variant] == factor else "diverged" if diverged else None
    yield Measurement(variant, name, "validation", "tuning_nats_per_token",
                      None if diverged else score, "nats/token", config.tuning.seed,
                      f"learning rate x {factor:g}", note)


def _plot(figures: Path, runs: Iterable[Run], rows: list[reporting.Row]) -> None:
  """Learning curves of the first seed and differences to MHA on test, by set."""
  by_set: dict[str, list[Run]] = {}
  for run in runs:
    by_set.setdefault(run.set, []).append(run)
  for name, members in by_set.items():
    first = members[0].seed
    losses = {run.variant: _training_losses(run) for run in members if run.seed == first}
    curves = {variant: list(by_step.items()) for variant, by_step in losses.items() if by_step}
    if curves:
      reporting.plot_learning_curves(figures / f"{name}-training.png", curves, "nats_per_token",
                                     f"Training loss on {name}, seed {first}")
    chosen = {metric: {row["attention"]: row for row in rows if row["metric"] == metric
                       and (row["dataset"], row["split"], row["variant"]) == (name, "test", None)}
              for metric in ("nats_minus_mha", "nats_minus_mha_ci95")}
    bars = {variant: (row["value"], chosen["nats_minus_mha_ci95"][variant]["value"] or 0.0)
            for variant, row in chosen["nats_minus_mha"].items()
            if not variant.endswith("_future")}  # whose leak dwarfs all others
    if bars:
      reporting.plot_differences(figures / f"{name}-minus-mha", bars,
                                 f"{name}: test loss less MHA's; bars: 95% over seeds",
                                 "nats per token")


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "study")
