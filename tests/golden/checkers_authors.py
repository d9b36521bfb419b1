"""The DAMCHA authors' Vision Transformer and their versions of the comparators."""

from __future__ import annotations

from typing import Any

from checkers import abstract_params, add_positions, checks
from flax import linen as nn
from golden_file import GoldenFile
import jax
import jax.numpy as jnp

from damcha_jax.interop import authors_baselines
from damcha_jax.interop import authors_vit
from damcha_jax.interop.names import from_arrays
from damcha_jax.interop.torch_checkpoints import import_checkpoint
from damcha_jax.interop.torch_checkpoints import KINDS


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


def _check_baseline(baseline: str) -> None:
  """Outputs under the causal mask, with padding, and without a mask; MoA's router."""

  def check(golden: GoldenFile) -> None:
    meta, options = golden.meta, {**golden.meta.get("defaults", {}), **golden.options}
    x_BTD = golden.input("x")
    names = authors_baselines.baseline_attention_names(baseline)

    def make(**fields: Any) -> nn.Module:
      return authors_baselines.make_baseline_attention(
          baseline, meta["n_heads"], options, **fields
      )

    params = from_arrays(golden.params(), names, abstract_params(make(), x_BTD))

    def attend(params: Any, x_BTD: jax.Array, mask: Any = None, **fields: Any):
      mask = None if mask is None else (mask if mask.ndim == 2 else mask[:, None])
      y_BTD, state = make(**fields).apply(
          {"params": params}, x_BTD, bias=mask, mutable=["intermediates"]
      )
      return y_BTD, state.get("intermediates", {})

    causal = lambda params, x_BTD: attend(params, x_BTD)
    y_BTD, intermediates = golden.compare_gradients(causal, params, names)
    golden.compare("y_causal", y_BTD)
    if "out/top_idx" in golden.keys:
      golden.compare("top_idx", intermediates["top_experts"][0])
      golden.compare("gate", intermediates["gates"][0])
    _check_masks(golden, jax.jit(attend, static_argnames=_FIELDS), params, baseline)

  checks(_MODULES[baseline])(check)


_FIELDS = ("causal", "allow_future_leak")
_MODULES = dict(
    tha="THAAttention",
    dcmha="DCMHAAttention",
    colmha="CollaborativeAttention",
    mma="MMAAttention",
    moa="MoAAttention",
)


def _check_masks(golden: GoldenFile, attend: Any, params: Any, baseline: str) -> None:
  x_BTD = golden.input("x")
  mask_TS = golden.input("attn_mask_causal")
  # Given as a mask, to a module that is not causal by itself, it must do the same.
  golden.compare("y_causal", attend(params, x_BTD, mask_TS, causal=False)[0])
  padding_BT = golden.input("padding_mask")
  padded, _ = attend(params, x_BTD, golden.input("attn_mask_causal_pad"), causal=False)
  # A padded query of theirs that sees no key averages all values, masked ones and future ones too.
  real = padding_BT[..., None] if baseline == "mma" else None
  golden.compare("y_causal_pad", padded, where=real)
  # Without a mask MoA is causal all the same, and one group of MMA's heads sees the future.
  no_mask = dict(causal=baseline == "moa")
  if baseline == "mma":
    no_mask = dict(causal=True, allow_future_leak=True)
  golden.compare("y_nomask", attend(params, x_BTD, **no_mask)[0])


for _name in authors_baselines.BASELINES:
  _check_baseline(_name)


@checks("BaselineTransformer")
def check_baseline_transformer(golden: GoldenFile) -> None:
  """Output, every layer's output, and the output with padding at the real tokens."""
  options = {**golden.meta.get("defaults", {}), **golden.options}
  options.pop("baseline", None)  # the tensors tell
  imported = import_checkpoint(
      "baseline", golden.params(), options, num_heads=golden.meta["n_heads"]
  )
  stack, params = imported.module, imported.params
  names = KINDS["baseline"].names(imported.description)
  x_BTD = golden.input("x")

  def run(params: Any, x_BTD: jax.Array, mask_BT: Any = None) -> tuple[jax.Array, jax.Array]:
    y_BTD, state = stack.apply(
        {"params": params}, add_positions(x_BTD), padding_mask=mask_BT, mutable=["intermediates"]
    )
    return y_BTD, jnp.stack(state["intermediates"]["layer_outputs"])

  y_BTD, hidden_NBTD = golden.compare_gradients(run, params, names)
  golden.compare("y", y_BTD)
  if "out/hidden" in golden.keys:
    golden.compare("hidden", hidden_NBTD)
  if golden.has_input("padding_mask"):
    # Theirs lets padded queries attend, which no real token sees.
    mask_BT = golden.input("padding_mask")
    golden.compare("y_pad", jax.jit(run)(params, x_BTD, mask_BT)[0], where=mask_BT[..., None])
