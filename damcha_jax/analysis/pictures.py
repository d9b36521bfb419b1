"""A picture beside what a Vision Transformer attends to in it, and how it compares patches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
import textwrap

import numpy as np

from damcha_jax.analysis.plots import tiles
from damcha_jax.training.workdir import writing

_PANEL = 1.7  # inches


def patch_attention(weights_HTS: np.ndarray, pooling: str) -> np.ndarray:
  """How much what is classified takes from each patch, [H, rows, columns].

  That is the class token's weights, or with the pooling 'mean' the mean over queries.
  """
  by_patch_HS = weights_HTS[:, 0, 1:] if pooling == "class" else weights_HTS.mean(1)
  side = round(by_patch_HS.shape[-1] ** 0.5)
  return by_patch_HS.reshape(len(by_patch_HS), side, side)


def draw(path: Path, title: str, caption: str, image_YXC: np.ndarray,
         attention: Mapping[int, np.ndarray], metric: Mapping[int, np.ndarray]) -> None:
  """Writes a PNG and an SVG: by layer the picture, heads' attention and the metric, if any.

  Args:
    path: of both files, without their suffixes.
    title: of the figure.
    caption: a sentence that says what is to be seen.
    image_YXC: the picture as the model sees it, uint8.
    attention: by layer, [H, rows, columns] of patches.
    metric: by layer, m [H, K, L]; of some layers, or none.
  """
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  num_heads = len(next(iter(attention.values())))
  num_columns = 1 + num_heads + bool(metric)
  figure = Figure(figsize=(_PANEL * num_columns, _PANEL * len(attention) + 1.1),
                  layout="constrained")
  grid = figure.subplots(len(attention), num_columns, squeeze=False)
  height, width = image_YXC.shape[:2]
  for axes, (layer, heads) in zip(grid, attention.items()):
    axes[0].imshow(image_YXC, extent=(0, width, height, 0))
    axes[0].imshow(heads.mean(0), cmap="magma", alpha=0.5, extent=(0, width, height, 0))
    axes[0].set_title("mean of heads", fontsize=10)
    axes[0].set_ylabel(f"layer {layer}", fontsize=11)
    for head, (panel, values) in enumerate(zip(axes[1:], heads)):
      drawn = panel.imshow(values, cmap="magma", vmin=0.0, vmax=heads.max())
      panel.set_title(f"head {head}", fontsize=10)
    figure.colorbar(drawn, ax=list(axes[1:1 + num_heads]), label="weight [1]", shrink=0.8)
    if layer in metric:
      limit = np.abs(metric[layer]).max()
      drawn = axes[-1].imshow(tiles(metric[layer]), cmap="RdBu_r", vmin=-limit, vmax=limit)
      axes[-1].set_title("m of all heads", fontsize=10)
      figure.colorbar(drawn, ax=axes[-1], label="entry [1]", shrink=0.8)
    elif metric:
      axes[-1].set_visible(False)
    for panel in axes:
      panel.set(xticks=[], yticks=[])
  figure.suptitle(title, fontsize=13, parse_math=False)
  figure.supxlabel(textwrap.fill(caption, round(14 * _PANEL * num_columns)), fontsize=10)
  for suffix in (".png", ".svg"):
    file = path.with_name(path.name + suffix)
    with writing(file):
      file.parent.mkdir(parents=True, exist_ok=True)
      figure.savefig(file, dpi=150)
