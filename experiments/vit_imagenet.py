"""Image classification with ViT-S/16 on ImageNet-1K: Section 5.5, Table 6.

  python -m experiments.vit_imagenet --config=configs/vit_s16.py:cpu
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import operator
from pathlib import Path
from typing import Any, Optional

from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import freeze, ImageClassificationConfig
from damcha_jax.errors import WorkdirError
from damcha_jax.reporting import Measurement
from damcha_jax.training.image_classification import image_classification_task, PROBED_SPLIT
from damcha_jax.training.restore import recorded
from experiments import command_line
from experiments import common

UNITS = {"top1": "%", "top5": "%", "nats_per_image": "nats/image"}
# What Section 5.5 states; with these on its data, our figures can be held against Table 6.
SECTION_5_5 = {"dataset": "imagenet2012", "num_steps": 500 * 1_251, "batch_size": 1024,
               "steps_per_epoch": 1_251, "milestone_epochs": (100, 500),
               "model.num_layers": 12, "model.num_heads": 6, "model.features": 384,
               "model.image_size": 224, "model.patch_size": 16, "optimizer.learning_rate": 1e-3,
               "data.max_held_out_images": None}
PRINTED = {*UNITS, *common.COSTS, "top1_gap", "adaptivity"}


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Trains and evaluates every attention and seed; writes `summary.json` and `figures/`."""
  config = freeze(config, ImageClassificationConfig)
  results = common.run_suite(config, workdir, image_classification_task)
  return summarize(config, workdir, results) if common.is_primary() else []


def summarize(config: ImageClassificationConfig, workdir: Path,
              results: common.Results) -> list[reporting.Row]:
  """The summary of runs that are trained."""
  paper = json.loads(common.PAPER.read_text(encoding="utf-8"))["table6"]
  rows = reporting.summary_rows(_measurements(config, workdir, results), comparable(config),
                                lambda one: _figure(paper, config, one))
  for metric, quantity in (("top1", "top-1 accuracy [%]"), ("nats_per_image", "nats per image")):
    reporting.plot_learning_curves(workdir / "figures" / f"validation-{metric}.png",
                                   common.validation_curves(workdir, results, metric), quantity,
                                   f"Validation on {config.dataset}")
  reporting.write_summary(workdir / "summary.json", config.experiment,
                          f"{config.name}:{config.size}", rows)
  common.print_rows(rows, PRINTED, comparable(config), workdir)
  return rows


def _measurements(config: ImageClassificationConfig, workdir: Path,
                  results: common.Results) -> Iterator[Measurement]:
  """Quality at every milestone, held out and on training images, their gap, and costs."""
  note = None if config.ema_decay is None else (
      f"of weights averaged with ema_decay={config.ema_decay}")
  for (attention, seed), result in results.items():
    path = common.run_dir(workdir, attention, seed) / "metrics.jsonl"
    for variant, step in config.milestones.items():
      measured = lambda split, metric, value, unit, variant=variant: Measurement(
          attention, config.dataset, split, metric, value, unit, seed, variant, note)
      for metric, unit in UNITS.items():
        held_out, training = (_at(path, metric, split, step)
                              for split in ("validation", PROBED_SPLIT))
        yield measured("validation", metric, held_out, unit)
        yield measured("train", metric, training, unit)
        yield measured("validation", f"{metric}_gap", held_out - training, unit)
      if recorded(path, "adaptivity", "diagnostics"):  # of generated metrics alone
        adaptivity = _at(path, "adaptivity", "diagnostics", step)
        yield measured("validation", "adaptivity", adaptivity, "1")
    for metric, unit in common.COSTS.items():
      yield Measurement(attention, config.dataset, "train", metric, result[metric], unit, seed)


def _at(path: Path, metric: str, split: str, step: int) -> float:
  values = recorded(path, metric, split)
  if step not in values:
    raise WorkdirError(f"{path} has no {metric} on '{split}' at step {step}: its records are lost; "
                       "use another workdir")
  return values[step]


def _figure(table6: dict[str, Any], config: ImageClassificationConfig,
            one: Measurement) -> Optional[float]:
  """The paper's, of the epoch that a milestone is or stands in for: the last one, or one before."""
  epochs = dict(zip(reversed(config.milestones), ("epoch500", "epoch100")))
  if one.split != "validation" or one.variant is None:
    return None
  methods = {method.lower(): values for method, values in table6.items()}
  return methods.get(one.attention, {}).get(f"{one.metric}_{epochs.get(one.variant)}")


def comparable(config: ImageClassificationConfig) -> bool:
  """Whether data and size are the paper's."""
  return all(operator.attrgetter(key)(config) == value for key, value in SECTION_5_5.items())


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "vit_imagenet")
