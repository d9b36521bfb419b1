"""Evaluates an image classifier on one and on eight forced CPU devices; writes FOLDER/report.json.

`python eight_devices_images.py FOLDER` adds up the validation split in batches of several sizes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
import sys

from flax import linen as nn
import jax

from configs import vit_s16
from damcha_jax.config import freeze, ImageClassificationConfig, MeshConfig
from damcha_jax.evaluation.likelihood import Evaluator
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training.image_classification import image_classification_task


def main(folder: Path) -> None:
  config = freeze(vit_s16.get_config("smoke"), ImageClassificationConfig)
  task = image_classification_task(dataclasses.replace(config, attentions="damcha"), "damcha", 0)
  params = jax.jit(lambda key: nn.unbox(task.init_params(key)))(jax.random.key(0))
  report = {}
  for num_devices in (1, 8):
    mesh = sharding_lib.make_mesh(MeshConfig(num_devices, 1, 1), jax.devices()[:num_devices])
    partitioning = sharding_lib.Partitioning(mesh, config.logical_rules)
    placed = jax.device_put(params, partitioning.replicated)
    for batch_size in (7, 16, 64):
      evaluator = Evaluator(task.eval_loss_fn, partitioning.place_global_rows, batch_size,
                            partitioning.batch_multiple, partitioning.replicated)
      name = f"{num_devices} device{'s' * (num_devices > 1)}, {batch_size}"
      report[name] = evaluator.evaluate(placed, task.eval_sources)["validation"]
  (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
