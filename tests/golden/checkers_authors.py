"""The DAMCHA authors' Vision Transformer and their versions of the comparators."""

from __future__ import annotations

from typing import Any

from checkers import abstract_params, checks
from golden_file import GoldenFile
import jax
import jax.numpy as jnp

from damcha_jax.interop import authors_vit
from damcha_jax.interop.names import from_arrays


@checks("VisionTransformer")
def check_vit(golden: GoldenFile) -> None:
  """Logits, the patches before class token and positions, and the KL term."""
  meta, options = golden.meta, golden.options
  num_layers, widths = meta["depth"], tuple(meta["hidden_dims"])
  sizes = (meta["d_model"], meta["n_heads"], int(meta["d_model"] * meta["mlp_ratio"]), num_layers)
  vit = authors_vit.make_vit(
      *sizes,
      widths,
      options,
      image_size=meta["img_size"],
      patch_size=meta["patch_size"],
      num_classes=meta["num_classes"],
  )
  names = authors_vit.vit_names(num_layers, len(widths), options)
  channels_last = lambda x: jnp.moveaxis(x, 1, -1)
  images = channels_last(golden.input("x"))
  params = from_arrays(golden.params(), names, abstract_params(vit, images))

  def run(params: Any, x_BCYX: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, state = vit.apply(
        {"params": params},
        channels_last(x_BCYX),
        capture_intermediates=lambda module, _: module.name == "patch_embed",
        mutable=["intermediates"],
    )
    grid_BYXD = state["intermediates"]["patch_embed"]["__call__"][0]
    return logits, grid_BYXD.reshape(len(logits), -1, meta["d_model"])

  logits, patches_BTD = golden.compare_gradients(run, params, names)
  golden.compare("logits", logits)
  golden.compare("patch_tokens", patches_BTD)
