"""What is compared for each kind of golden file: `CHECKERS[meta['module']](golden)`."""

from __future__ import annotations

from collections.abc import Callable
import re
from typing import Any, Optional

from flax import linen as nn
from golden_file import GoldenFile
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.interop import authors_damcha
from damcha_jax.interop import names as names_lib
from damcha_jax.metric import context as context_lib
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.blocks import join_blocks
from damcha_jax.models.layers import sinusoidal_positions

CHECKERS: dict[str, Callable[[GoldenFile], None]] = {}

_GENERATOR_OUTPUT = re.compile(
    r"(M|head_metrics_causal|head_metrics_noncausal)(?:_(diag|off_diag)_only)?(?:_layer(\d+))?"
)
_ABLATIONS = {None: "full", "diag": "diagonal", "off_diag": "off_diagonal"}


def checks(kind: str) -> Callable:
  def register(checker: Callable[[GoldenFile], None]) -> Callable[[GoldenFile], None]:
    CHECKERS[kind] = checker
    return checker

  return register


def abstract_params(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
  return jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs))["params"]


def _contexts(x_BTD: jax.Array, causal: bool, mask_BT: Optional[jax.Array]) -> jax.Array:
  """Contexts [B, D] or, causal, [B, T, D]; the originals give padded columns one as well."""
  if not causal:
    return context_lib.sequence_context(x_BTD, mask_BT).vectors_BCD[:, 0]
  vectors_BCD = context_lib.prefix_contexts(x_BTD, 1, mask_BT).vectors_BCD
  if mask_BT is None:
    return vectors_BCD
  count_BT = jnp.cumsum(mask_BT.astype(jnp.int32), axis=1)
  latest_BTD = jnp.take_along_axis(vectors_BCD, jnp.maximum(count_BT - 1, 0)[..., None], axis=1)
  return jnp.where((count_BT > 0)[..., None], latest_BTD, 0.0)


def _padding_mask(golden: GoldenFile) -> Optional[jax.Array]:
  return golden.input("padding_mask") if golden.has_input("padding_mask") else None


def _load_generator(golden: GoldenFile) -> tuple[nn.Module, Any, names_lib.NameMap]:
  meta, options = golden.meta, golden.options
  if "off_diag_mode" in meta:
    options["off_diag_mode"] = meta["off_diag_mode"]
  widths = tuple(meta["hidden_dims"])
  generator = authors_damcha.make_generator(meta["n_heads"], widths, options)
  names = authors_damcha.generator_names(len(widths), options)
  template = abstract_params(generator, jnp.zeros((1, meta["d_model"])))
  return generator, names_lib.from_arrays(golden.params(), names, template), names


def generator_kl(generator: nn.Module, params: Any) -> jax.Array:
  if not isinstance(generator, AuthorsMetricGenerator):
    return jnp.zeros(())
  return generator.apply({"params": params}, method="kl_divergence")


@checks("StructuredMLPForM.head_metrics")
def check_head_metrics(golden: GoldenFile) -> None:
  """Contexts, M and head metrics of a generator, causal or not, with or without padding."""
  generator, params, names = _load_generator(golden)
  causal, mask_BT = golden.meta["causal"], _padding_mask(golden)
  layer = golden.meta.get("layer_idx_for_grad", 0)
  context = _contexts(golden.input("x"), causal, mask_BT)
  golden.compare("context", context)
  blocks = generator.apply({"params": params}, context, layer, method="blocks")
  golden.compare("M", join_blocks(blocks))

  def head_metrics(params: Any, x_BTD: jax.Array) -> tuple[jax.Array]:
    return (generator.apply({"params": params}, _contexts(x_BTD, causal, mask_BT), layer),)

  golden.compare("head_metrics", golden.compare_gradients(head_metrics, params, names)[0])


@checks("StructuredMLPForM")
def check_generator(golden: GoldenFile) -> None:
  """A generator's options: M, head metrics, block-only outputs, each layer, and the KL term."""
  generator, params, names = _load_generator(golden)
  x_BTD, mask_BT = golden.input("x"), _padding_mask(golden)

  def output(params: Any, match: re.Match) -> jax.Array:
    what, blocks_only, layer = match.groups()
    ablated = generator.clone(block_ablation=_ABLATIONS[blocks_only])
    context = _contexts(x_BTD, what == "head_metrics_causal", mask_BT)
    method = "blocks" if what == "M" else "__call__"
    metric = ablated.apply({"params": params}, context, int(layer or 0), method=method)
    return join_blocks(metric) if what == "M" else metric

  matches = {name: _GENERATOR_OUTPUT.fullmatch(name) for name in golden.outputs()}
  matches = {name: match for name, match in matches.items() if match}
  outputs = jax.jit(lambda params: {name: output(params, matches[name]) for name in matches})
  for name, actual in outputs(params).items():
    golden.compare(name, actual)
  golden.compare("kl", generator_kl(generator, params))
  layer = golden.meta["layer_idx_for_grad"]

  def head_metrics(params: Any, x_BTD: jax.Array) -> tuple[jax.Array]:
    return (generator.apply({"params": params}, _contexts(x_BTD, True, mask_BT), layer),)

  golden.compare_gradients(head_metrics, params, names)


@checks("MBasedAttention")
def check_attention(golden: GoldenFile) -> None:
  """Outputs and weights of one attention; a name's suffix says which masks were on."""
  meta, options = golden.meta, golden.options
  widths, x_BTD = tuple(meta["hidden_dims"]), golden.input("x")
  names = authors_damcha.attention_names(len(widths), options)

  def make(causal: bool) -> nn.Module:
    return authors_damcha.make_attention(
        meta["d_model"], meta["n_heads"], widths, options, causal
    )

  params = names_lib.from_arrays(golden.params(), names, abstract_params(make(True), x_BTD))

  def attend(params: Any, x_BTD: jax.Array, suffix: str) -> tuple[jax.Array, jax.Array]:
    causal, masks = _attention_masks(golden, suffix)
    y_BTD, state = make(causal).apply(
        {"params": params}, x_BTD, **masks, sow_weights=True, mutable=["intermediates"]
    )
    return y_BTD, state["intermediates"]["attention_weights"][0]

  for suffix in sorted(name[1:] for name in golden.outputs() if re.match(r"y(_|$)", name)):
    if not suffix and "out/loss" in golden.keys:
      plain = lambda params, x_BTD: attend(params, x_BTD, "")
      y_BTD, weights_BHTS = golden.compare_gradients(plain, params, names)
    else:
      y_BTD, weights_BHTS = jax.jit(attend, static_argnums=2)(params, x_BTD, suffix)
    golden.compare(f"y{suffix}", y_BTD)
    causal, masks = _attention_masks(golden, suffix)
    real_queries = None
    if causal and options.get("use_mlp") and masks["padding_mask"] is not None:
      # A padded query has no metric here; its output is zero in both.
      real_queries = masks["padding_mask"][:, None, :, None]
    golden.compare(f"weights{suffix}", weights_BHTS, where=real_queries)


def _attention_masks(golden: GoldenFile, suffix: str) -> tuple[bool, dict[str, Any]]:
  """Causality and mask arguments of the outputs named `y<suffix>`."""
  words = suffix.split("_")[1:]
  unknown = set(words) - {"bool", "int", "float", "causal", "pad"}
  if unknown:
    pytest.fail(f"out/y{suffix}: no check knows the mask {sorted(unknown)}")
  causal = "causal" in words or (not words and golden.meta.get("is_causal", False))
  masks: dict[str, Any] = {"padding_mask": None}
  if not words or "pad" in words:
    masks["padding_mask"] = _padding_mask(golden)
  for kind in {"bool", "int", "float"} & set(words):
    mask = golden.input(f"attn_mask_{kind}")
    mask = mask[:, None] if mask.ndim == 3 else mask
    masks["bias" if kind == "float" else "mask"] = mask if kind == "float" else mask.astype(bool)
    if masks["padding_mask"] is None:  # only padding, not a mask, decides the originals' contexts
      masks["padding_mask"] = jnp.ones(golden.input("x").shape[:2], bool)
  return causal, masks


@checks("TransformerPC")
def check_transformer(golden: GoldenFile) -> None:
  """A decoder stack: output, every layer's output, with padding, the metrics and the KL term."""
  meta, options = golden.meta, golden.options
  num_layers, widths = meta["n_layers"], tuple(meta["hidden_dims"])
  stack = authors_damcha.make_transformer(
      meta["d_model"], meta["n_heads"], meta["d_ff"], num_layers, widths, options
  )
  names = authors_damcha.transformer_names(num_layers, len(widths), options)
  x_BTD = golden.input("x")
  params = names_lib.from_arrays(golden.params(), names, abstract_params(stack, x_BTD))

  def run(params: Any, x_BTD: jax.Array, mask_BT: Optional[jax.Array] = None):
    y_BTD, state = stack.apply(
        {"params": params},
        add_positions(x_BTD),
        padding_mask=mask_BT,
        mutable=["intermediates"],
    )
    return y_BTD, jnp.stack(state["intermediates"]["layer_outputs"])

  y_BTD, hidden_NBTD = golden.compare_gradients(run, params, names)
  golden.compare("y", y_BTD)
  golden.compare("hidden", hidden_NBTD)
  if golden.has_input("padding_mask"):
    golden.compare("y_pad", jax.jit(run)(params, x_BTD, golden.input("padding_mask"))[0])
  inputs_NBTD = jnp.concatenate([add_positions(x_BTD)[None], hidden_NBTD[:-1]])
  golden.compare("get_M", _metric_matrices(golden, params, inputs_NBTD))
  if "out/kl" in golden.keys:
    golden.compare("kl", sum(generator_kl(*each) for each in _generators(golden, params)))


def add_positions(x_BTD: jax.Array) -> jax.Array:
  return x_BTD + sinusoidal_positions(jnp.arange(x_BTD.shape[1]), x_BTD.shape[2])


def _generators(golden: GoldenFile, params: Any) -> list[tuple[nn.Module, Any]]:
  """The stack's generators with their parameters: none, the shared one, or one per layer."""
  meta, options = golden.meta, golden.options
  if not (options.get("use_M") and options.get("use_mlp")):
    return []
  share = options.pop("share_mlp", False)
  options = {name: value for name, value in options.items() if name not in ("use_M", "use_mlp")}
  options["n_layers"] = meta["n_layers"]
  generator = authors_damcha.make_generator(
      meta["n_heads"], tuple(meta["hidden_dims"]), options
  )
  if share:
    return [(generator, params["generator"])]
  layers = (params[f"layer_{index}"] for index in range(meta["n_layers"]))
  return [(generator, layer["attention"]["generator"]) for layer in layers]


def _metric_matrices(golden: GoldenFile, params: Any, inputs_NBTD: jax.Array) -> jax.Array:
  """M [N, D, D] of each layer at the context of the last token, averaged over the batch."""
  meta, options = golden.meta, golden.options
  if not options.get("use_M"):
    return np.zeros(0, np.float32)
  layers = range(meta["n_layers"])
  generators = _generators(golden, params)
  if not generators:
    static = [params[f"layer_{layer}"]["attention"]["generator"] for layer in layers]
    return jnp.stack([join_blocks(each["metric_blocks"]) for each in static])
  contexts_NBD = inputs_NBTD.mean(2)
  if len(generators) == 1 and options.get("share_mlp"):
    generators *= meta["n_layers"]
    # The originals keep one context per generator, the last that it was called with.
    last = -1 if options.get("use_layer_bias") else 0
    contexts_NBD = jnp.broadcast_to(contexts_NBD[last], contexts_NBD.shape)
  return jnp.stack([
      join_blocks(generator.apply({"params": own}, context_BD, layer, method="blocks")).mean(0)
      for layer, (generator, own), context_BD in zip(layers, generators, contexts_NBD)
  ])
