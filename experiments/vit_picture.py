"""What trained Vision Transformers see in a picture: attention, metric and the likeliest classes.

  python -m experiments.vit_picture --workdir=runs/vit_imagenet/vit_s16-cpu
  python -m experiments.vit_picture --workdir=runs/vit_imagenet/vit_s16-cpu --image=photo.jpg --attentions=damcha

Of the last checkpoint of each run, on any picture that Pillow reads, or else on one of the held-out
images. Writes only into <workdir>/analysis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any, Optional

from absl import flags
import jax
import numpy as np
from PIL import Image

from damcha_jax.analysis import pictures
from damcha_jax.analysis import probe
from damcha_jax.config import ConfigError, ImageClassificationConfig
from damcha_jax.data.augmentation import held_out_image, rgb_on_white
from damcha_jax.data.labelled_images import load_labelled_images
from damcha_jax.errors import DataError, WorkdirError
from damcha_jax.training import restore
from damcha_jax.training.image_classification import TOP
from damcha_jax.training.task import Batch
from damcha_jax.training.workdir import Workdir
from experiments import analysis_figures
from experiments import command_line
from experiments.analysis_runs import Choice, find_runs, Run

MOST_LAYERS, MOST_HEADS = 4, 4


def main(argv: Sequence[str]) -> dict[str, Any]:
  options = parse(argv)
  workdir = Path(options.workdir).absolute()
  config, runs = find_runs(workdir, Choice(options.attentions, _numbers(options.seeds)))
  if not isinstance(config, ImageClassificationConfig):
    raise WorkdirError(f"{workdir} holds no runs of vit_imagenet; name a directory that does")
  batch, name = _batch(config, runs[0], options.image, options.index)
  directory = Workdir(workdir / "analysis")
  with directory.locked():
    found = {run.name: _look(config, run, batch, name, directory.path) for run in runs}
    directory.write_json(f"picture-{name}.json", found)
  for run, seen in found.items():
    print(f"{run}: " + ", ".join(f"{one['name']} {one['probability']:.1%}"
                                 for one in seen["likeliest"]))
  print(f"\nFigures, arrays and numbers are in {directory.path}")
  return found


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("workdir", None, "name the directory that training wrote", **define)
  flags.DEFINE_string("image", None, "a picture; by default a held-out image", **define)
  flags.DEFINE_integer("index", 0, "of the held-out image", lower_bound=0, **define)
  flags.DEFINE_list("attentions", None, "which, comma-separated; by default all", **define)
  flags.DEFINE_list("seeds", None, "which, comma-separated; by default all", **define)
  return command_line.parse_options(values, argv, __doc__, required=("workdir",))


def _numbers(given: Optional[Sequence[str]]) -> Optional[list[int]]:
  try:
    return None if given is None else [int(text) for text in given]
  except ValueError as error:
    raise ConfigError(f"--seeds={','.join(given)} must hold whole numbers") from error


def _batch(config: ImageClassificationConfig, run: Run, path: Optional[str],
           index: int) -> tuple[Batch, str]:
  """The picture as a batch of one, and its name."""
  source = run.task.eval_sources["validation"]
  if path is None:
    if index >= len(source):
      raise ConfigError(f"--index={index} is not below {len(source)}, the number of images")
    return source.batch(index, 1), f"held_out-{index}"
  try:
    with Image.open(path) as image:
      pixels = held_out_image(rgb_on_white(image), config.model.image_size, config.data.resize)
  except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
    raise DataError(f"{path} cannot be read as a picture: {error}; name another") from error
  return {"inputs": pixels[None], "targets": np.zeros(1, np.int32),
          "weights": np.ones(1, np.float32)}, Path(path).stem


def _look(config: ImageClassificationConfig, run: Run, batch: Batch, name: str,
          directory: Path) -> dict[str, Any]:
  """Draws a run's figure, writes its arrays, and returns step and likeliest classes."""
  last = restore.kept_steps(run.directory)[0]
  step, params = list(run.checkpoints([last]))[-1]
  task = run.task
  weights = probe.attention_weights(task.model, task.loss_fn, params, batch)
  attention = {layer: pictures.patch_attention(weights_BHTS[0], config.model.pooling)
               for layer, weights_BHTS in weights.items()}
  metric = {layer: m_EHKL[0] for layer, m_EHKL in
            probe.metrics(task.model, task.loss_fn, params, batch).m.items()}
  logits_BC = jax.jit(task.model.apply)({"params": params}, batch["inputs"])
  probabilities_C = np.asarray(jax.nn.softmax(logits_BC[0]), np.float64)
  images = load_labelled_images(config.dataset, config.data.data_dir)
  likeliest = [{"class": index, "name": images.class_name(index),
                "probability": float(probabilities_C[index])}
               for index in np.argsort(-probabilities_C)[:TOP].tolist()]

  layers = analysis_figures.spread(list(attention), MOST_LAYERS)
  heads = analysis_figures.spread(list(range(config.model.num_heads)), MOST_HEADS)
  if attention:
    pictures.draw(
        directory / "figures" / f"picture-{name}-{run.name}",
        f"{run.name} at step {step}: {likeliest[0]['name']} with "
        f"{likeliest[0]['probability']:.0%}",
        "How much what is classified takes from each patch of the picture, by layer and head; on "
        "the picture, the mean over all heads."
        + (" At the right the metric of this picture that each head compares tokens by, head 0 top "
           "left, red positive and blue negative." if metric else ""),
        batch["inputs"][0], {layer: attention[layer][heads] for layer in layers}, metric)
  arrays = {f"attention-layer_{layer}": values for layer, values in attention.items()}
  arrays |= {f"metric-layer_{layer}": values for layer, values in metric.items()}
  np.savez_compressed(directory / f"picture-{name}-{run.name}.npz", **arrays)
  return {"step": step, "likeliest": likeliest}


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
