"""Text generation on WMT14 and CommonGen: Section 5.1, Table 1.

  python -m experiments.text_generation --config=configs/wmt14.py:cpu
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json
import operator
from pathlib import Path
from typing import Any, Optional

from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax import text_samples
from damcha_jax.config import TextGenerationConfig, TextMetricsConfig, freeze
from damcha_jax.data.text_pairs import published_split
from damcha_jax.evaluation.bart import BartScorer
from damcha_jax.evaluation.report import optional
from damcha_jax.evaluation.text_quality import text_report
from damcha_jax.reporting import Measurement
from damcha_jax.training.text_generation import eval_rows, load_texts, text_generation_task
from damcha_jax.training.workdir import Workdir, write_arrays
from experiments import command_line
from experiments import common
from experiments import metrics

UNITS = {"nats_per_token": "nats/token", "perplexity": "1"}
# A sample stands beside the figure of what it stands in for, so the config's name decides. The
# paper's metrics have the names of ours; its NLL is read as per token.
TABLE1_DATASETS = {"wmt14": "WMT", "commongen": "CommonGen"}
# What Section 5.1 states; with these on its data, our figures can be held against Table 1.
SECTION_5_1 = {"batch_size": 128, "model.num_layers": 10, "model.num_heads": 8,
               "model.features": 512, "optimizer.learning_rate": 3e-4,
               "optimizer.weight_decay": 0.0, "data.packing": False,
               "data.max_held_out_examples": None}
NUM_STEPS = {"wmt14": 50 * 4_508_785 // 128, "commongen": 50 * 65_325 // 128}
# Scores by example, as Figure 3 and Appendix E show them.
DISTRIBUTIONS = {
    "bartscore": ("BARTScore of what was generated", "nats per token"),
    "nll": ("NLL of the references", "nats per token"),
    "nll_summed": ("summed NLL of the references", "nats"),
}
# What is printed of all that `summary.json` holds.
PRINTED = {*UNITS, *common.COSTS, "adaptivity", "nll_mean", "nll_summed_mean", "bleu", "chrf",
           "bartscore_mean", "bartscore_top50"}


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Trains, decodes and evaluates every attention and seed; writes `summary.json`, `figures/`."""
  config = freeze(config, TextGenerationConfig)
  evaluated = metrics.latest(config, workdir)
  scorer = bart_scorer(evaluated.metrics)
  if scorer[0] is None and common.is_primary():
    common.note(f"{scorer[1]}; rows that need them have no value")
  results = common.run_suite(config, workdir, text_generation_task)
  return summarize(evaluated, workdir, results, scorer) if common.is_primary() else []


def summarize(config: TextGenerationConfig, workdir: Path, results: common.Results,
              scorer: tuple[Optional[BartScorer], str], *,
              trained_in: Optional[Path] = None, show: bool = True) -> list[reporting.Row]:
  """Decodes and evaluates runs that are trained, and writes `summary.json` and `figures/`.

  Args:
    config: of the runs, or of an evaluation that uses their parameters differently.
    workdir: holds or gets all that is made and written.
    results: of training, or of that evaluation.
    scorer: from `bart_scorer`.
    trained_in: the workdir of the runs, where it is another.
    show: whether to print a text of each attention, what was left out, and the table.
  """
  with Workdir(workdir).locked():  # not for two at a time
    trained_in = trained_in or workdir
    texts = load_texts(config)
    outputs = {(attention, seed): text_samples.generate_texts(
        config, attention, seed, common.run_dir(workdir, attention, seed), texts,
        lambda line, run=f"{attention} seed {seed}": common.note(f"[{run}] {line}"),
        result, common.run_dir(trained_in, attention, seed))
               for (attention, seed), result in results.items()}
    too_long = eval_rows(config, texts, text_samples.SPLIT).note
    if show and too_long:
      common.note(f"{published_split(config.dataset, text_samples.SPLIT)[0]} split: {too_long}")
    measurements = [*common.trained(config, results, UNITS),
                    *evaluate(config, workdir, outputs, *scorer, too_long)]
    paper = json.loads(common.PAPER.read_text(encoding="utf-8"))["table1"]
    rows = common.beside_table1(reporting.summary_rows(
        [_as_published(one) for one in measurements], comparable(config),
        lambda one: _figure(paper, config.name, one)))
    reporting.plot_learning_curves(workdir / "figures" / "validation.png",
                                   common.validation_curves(trained_in, results), "nats_per_token",
                                   f"Validation loss on {config.dataset}")
    common.plot_scores(workdir / "figures", config.dataset, common.run_dirs(workdir, results),
                       DISTRIBUTIONS)
    reporting.write_summary(workdir / "summary.json", config.experiment,
                            f"{config.name}:{config.size}", rows)
    if show:
      _show(outputs)
      common.print_rows(rows, PRINTED, comparable(config), workdir)
    return rows


def bart_scorer(metrics: TextMetricsConfig) -> tuple[Optional[BartScorer], str]:
  """Pairs of texts -> BARTScore, or None and why there is none."""
  if metrics.bart_weights is None:
    return None, "BART's weights are not given (config.metrics.bart_weights)"
  return optional(lambda: BartScorer(metrics.bart_weights,
                                     allow_other_weights=metrics.allow_other_weights))


def evaluate(config: TextGenerationConfig, workdir: Path,
             outputs: dict[tuple[str, int], list[text_samples.Record]],
             scorer: Optional[BartScorer], no_scorer: str,
             too_long: Optional[str] = None) -> Iterator[Measurement]:
  """Every metric of every run's outputs; scores by example go to `scores.npz`."""
  for (attention, seed), records in outputs.items():
    texts = text_samples.generated(records, config.data.languages)
    report = text_report(texts, scorer=scorer, direction=config.metrics.bart_direction,
                         ranking=config.metrics.ranking, no_scorer=no_scorer)
    # A decoder that writes the same whatever it is given has a low one.
    report.number("distinct_outputs", "fraction",
                  lambda: len(set(texts.hypotheses)) / len(texts.hypotheses))
    write_arrays(common.run_dir(workdir, attention, seed) / "scores.npz",
                 {"log_likelihoods": texts.log_likelihoods_N, "num_tokens": texts.num_tokens_N,
                  **report.samples})
    for metric, (value, unit, note) in report.metrics.items():
      yield Measurement(attention, config.dataset, text_samples.SPLIT, metric, value, unit, seed,
                        note="; ".join(filter(None, (note, too_long))) or None)


def _as_published(one: Measurement) -> Measurement:
  """The measurement under the name that the data set's publisher gives the split."""
  split, part = published_split(one.dataset, one.split)
  return dataclasses.replace(one, split=split, variant=one.variant or part)


def _figure(table1: dict[str, Any], name: str, one: Measurement) -> Optional[float]:
  methods = table1.get(TABLE1_DATASETS.get(name), {})
  figures = {method.lower(): values for method, values in methods.items()}
  return figures.get(one.attention.removeprefix("authors_"), {}).get(one.metric)


def comparable(config: TextGenerationConfig) -> bool:
  """Whether data and size are the paper's."""
  return config.num_steps == NUM_STEPS.get(config.dataset) and all(
      operator.attrgetter(key)(config) == value for key, value in SECTION_5_1.items())


def _show(outputs: dict[tuple[str, int], list[text_samples.Record]]) -> None:
  """The first example, and what each attention made of it with the first seed."""
  first = next(iter(outputs.values()))[0]
  texts = {"source": first["source"], "reference": first["references"][0]}
  for (attention, _), records in outputs.items():
    texts.setdefault(f"output of {attention}", records[0]["output"] or "(nothing)")
  for label, text in texts.items():
    print(f"{label}: {_visible(text)}")
  print()


def _visible(text: str) -> str:
  """Characters that would steer the terminal become U+FFFD."""
  return "".join(one if one.isprintable() else "\ufffd" for one in text)


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "text_generation")
