"""Image generation on CIFAR-10 and CIFAR-100: Section 5.1, Table 1.

  python -m experiments.image_generation --config=configs/cifar10.py:cpu
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import operator
from pathlib import Path
from typing import Any, Optional

from ml_collections import ConfigDict
import numpy as np

from damcha_jax import reporting
from damcha_jax.config import ImageGenerationConfig, freeze
from damcha_jax.config.image_generation import ImageMetricsConfig
from damcha_jax.data.images import ImageData, load_image_data
from damcha_jax.evaluation.image_report import GeneratedImages, ImageEvaluator
from damcha_jax.evaluation.inception import InceptionFeatures, load_inception
from damcha_jax.evaluation.report import Report, optional
from damcha_jax.image_samples import ImageSamples, sample_images
from damcha_jax.reporting import Measurement
from damcha_jax.training.image_generation import image_generation_task
from damcha_jax.training.workdir import Workdir, write_arrays
from experiments import command_line
from experiments import common
from experiments import metrics

UNITS = {"nats_per_token": "nats/token", "bits_per_token": "bits/token",
         "nats_per_image": "nats/image"}
REAL = "real_images"  # whose rows are the controls
# A sample stands beside the figure of what it stands in for, so the config's name decides.
TABLE1_DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
# The paper's MSE is 2 variances of the data, what two unrelated images give.
TABLE1_METRICS = {
    **{f"mse_unpaired_{statistic}": f"mse_{statistic}" for statistic in ("mean", "q25", "q75")},
    **{f"fid_group_{statistic}": f"fid_{statistic}" for statistic in ("mean", "q25", "q75")},
    "fid_top50": "fid_top50"}
# What Section 5.1 states; with these on its data, our figures can be held against Table 1.
SECTION_5_1 = {"num_steps": 50 * 45_000 // 128, "batch_size": 128, "context_length": 1024,
               "model.num_layers": 10, "model.num_heads": 8, "model.features": 512,
               "optimizer.learning_rate": 3e-4, "optimizer.weight_decay": 0.0,
               "data.image_size": 32, "data.colour": "grey", "data.max_held_out_images": None}
# Scores by sample, as Figure 4 and Appendix E show them, and that of completions.
DISTRIBUTIONS = {
    "fid_group": ("FID of groups of 50 samples", "squared distance of features"),
    "feature_distance": ("distance of a sample from a test image", "squared distance of features"),
    "mse_unpaired": ("MSE between a sample and a test image", "range²"),
    "mse_completion": ("MSE of completed images", "range²"),
}
# What is printed of all that `summary.json` holds.
PRINTED = {*UNITS, *common.COSTS, "adaptivity", "mse_unpaired_mean", "mse_unrelated",
           "mse_completion_mean", "fid_group_mean", "fid_real_group_mean", "fid_top50", "kid"}
NUM_SHOWN = 100


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Trains, samples and evaluates every attention and seed; writes `summary.json`, `figures/`."""
  config = freeze(config, ImageGenerationConfig)
  evaluated = metrics.latest(config, workdir)
  features = inception_features(evaluated.metrics)
  if features[0] is None and common.is_primary():
    common.note(f"{features[1]}; rows that need them have no value")
  results = common.run_suite(config, workdir, image_generation_task)
  return summarize(evaluated, workdir, results, features) if common.is_primary() else []


def summarize(config: ImageGenerationConfig, workdir: Path, results: common.Results,
              features: tuple[Optional[InceptionFeatures], str], *,
              trained_in: Optional[Path] = None, show: bool = True) -> list[reporting.Row]:
  """Samples and evaluates runs that are trained, and writes `summary.json` and `figures/`.

  Args:
    config: of the runs, or of an evaluation that uses their parameters differently.
    workdir: holds or gets all that is drawn and written.
    results: of training, or of that evaluation.
    features: from `inception_features`.
    trained_in: the workdir of the runs, where it is another.
    show: whether to print the table.
  """
  with Workdir(workdir).locked():  # not for two at a time
    trained_in = trained_in or workdir
    data = load_image_data(config.dataset, config.data)
    features_fn, why = features
    samples = {(attention, seed): sample_images(
        config, attention, seed, common.run_dir(workdir, attention, seed), data,
        lambda line, run=f"{attention} seed {seed}": common.note(f"[{run}] {line}"),
        result, common.run_dir(trained_in, attention, seed))
               for (attention, seed), result in results.items()}
    evaluator = ImageEvaluator(
        data.decode(data.tokens["test"]),
        data.decode(data.tokens["train"][:config.sampling.num_samples]),
        features_fn=features_fn, no_features=why, cache=workdir / "reference_features.npz")
    measurements = [*common.trained(config, results, UNITS),
                    *evaluate(config, workdir, data, evaluator, samples)]
    paper = json.loads(common.PAPER.read_text(encoding="utf-8"))["table1"]
    rows = common.beside_table1(reporting.summary_rows(
        measurements, comparable(config), lambda one: _figure(paper, config.name, one)))
    _draw(workdir, data, samples)
    reporting.plot_learning_curves(workdir / "figures" / "validation.png",
                                   common.validation_curves(trained_in, results), "nats_per_token",
                                   f"Validation loss on {config.dataset}")
    common.plot_scores(workdir / "figures", config.dataset, common.run_dirs(workdir, results),
                       DISTRIBUTIONS)
    reporting.write_summary(workdir / "summary.json", config.experiment,
                            f"{config.name}:{config.size}", rows)
    if show:
      common.print_rows(rows, PRINTED, comparable(config), workdir)
    return rows


def inception_features(metrics: ImageMetricsConfig) -> tuple[Optional[InceptionFeatures], str]:
  """Images -> features, or None and why there are none."""
  if metrics.inception_weights is None:
    return None, "Inception's weights are not given (config.metrics.inception_weights)"
  return optional(lambda: InceptionFeatures(
      load_inception(metrics.inception_weights, allow_other_weights=metrics.allow_other_weights),
      metrics.inception_mode))


def evaluate(config: ImageGenerationConfig, workdir: Path, data: ImageData,
             evaluator: ImageEvaluator, samples: dict[tuple[str, int], ImageSamples]
             ) -> Iterator[Measurement]:
  """Every metric of every run's samples, and the controls; scores by image go to `scores.npz`."""
  truth = data.decode(data.tokens["test"])
  for (attention, seed), one in samples.items():
    report = evaluator.evaluate(GeneratedImages(
        one.images, one.log_likelihoods, completed=one.completed,
        truth=truth[:len(one.completed)], num_given_rows=one.num_given_rows))
    write_arrays(common.run_dir(workdir, attention, seed) / "scores.npz",
                 {"log_likelihoods": one.log_likelihoods, **report.samples})
    yield from _measurements(report, attention, config.dataset, seed)
  yield from _measurements(evaluator.controls(), REAL, config.dataset, None)


def _measurements(report: Report, attention: str, dataset: str,
                  seed: Optional[int]) -> Iterator[Measurement]:
  for metric, (value, unit, note) in report.metrics.items():
    yield Measurement(attention, dataset, "test", metric, value, unit, seed, note=note)


def _figure(table1: dict[str, Any], name: str, one: Measurement) -> Optional[float]:
  if one.split != "test" or one.metric not in TABLE1_METRICS:
    return None
  methods = table1.get(TABLE1_DATASETS.get(name), {})
  figures = {method.lower(): values for method, values in methods.items()}
  return figures.get(one.attention.removeprefix("authors_"), {}).get(TABLE1_METRICS[one.metric])


def comparable(config: ImageGenerationConfig) -> bool:
  """Whether data and size are the paper's."""
  return config.dataset in TABLE1_DATASETS and all(
      operator.attrgetter(key)(config) == value for key, value in SECTION_5_1.items())


def _draw(workdir: Path, data: ImageData, samples: dict[tuple[str, int], ImageSamples]) -> None:
  """Grids of samples, and of pairs: a test image at the left, its completion at the right."""
  truth = data.decode(data.tokens["test"])
  for (attention, seed), one in samples.items():
    figures = workdir / "figures"
    reporting.write_image_grid(figures / f"samples-{attention}-seed{seed}.png",
                               one.images[:NUM_SHOWN], num_columns=10)
    num = min(NUM_SHOWN // 2, len(one.completed))
    pairs = np.concatenate([truth[:num], one.completed[:num]], axis=2)
    reporting.write_image_grid(figures / f"completions-{attention}-seed{seed}.png",
                               pairs, num_columns=5)


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "image_generation")
