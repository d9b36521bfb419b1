"""Checkpoints of the DAMCHA authors' PyTorch models: what they hold, and as this suite's models.

The model is read off the names and shapes of the tensors. What these do not tell (the number of
heads of most models, the scales of a metric's blocks) is given as options, which are the keyword
arguments of the authors' constructors, under their names.

    imported = import_checkpoint("vit", read_tensors("vit.pt"), num_heads=6)
    logits = imported.module.apply({"params": imported.params}, images)
"""

from __future__ import annotations

from collections.abc import Mapping
import math
import re
from typing import Any, Callable, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.interop import authors_baselines
from damcha_jax.interop import authors_damcha
from damcha_jax.interop import authors_vit
from damcha_jax.interop.authors_damcha import OptionError
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.names import from_arrays
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.names import num_entries

Arrays = Mapping[str, np.ndarray]
Description = dict[str, Any]  # JSON-able; `Kind.make` builds the module from it

# Buffers that follow from the model's sizes, which torch saves along with the parameters.
_BUFFERS = re.compile(r"(.*\.)?(diag_mask|off_diag_mask|cached_M)|decoder\.pe\.pe")
# A generator that all layers share is saved once per layer, and once more by the decoder.
_SHARED = re.compile(
    r"(?:decoder\.shared_mlp_module|decoder\.layers\.\d+\.self_attn\._shared_mlp"
    r"|blocks\.\d+\.attn\._shared_mlp)\.(.*)"
)


class Imported(NamedTuple):
  """A checkpoint as a model of this suite."""

  module: nn.Module
  params: dict[str, Any]
  description: Description


class Kind(NamedTuple):
  """One family of models.

  Attributes:
    describe: (tensors, options, number of heads or None) -> description.
    defaults: the options and their defaults.
    make: description -> module.
    names: description -> names.
    inputs: description -> one example input.
  """

  describe: Callable[[Arrays, Mapping[str, Any], Optional[int]], Description]
  defaults: Mapping[str, Any]
  make: Callable[[Description], nn.Module]
  names: Callable[[Description], NameMap]
  inputs: Callable[[Description], jax.Array]


def import_checkpoint(
    kind: str, arrays: Arrays, options: Optional[Mapping[str, Any]] = None, *,
    num_heads: Optional[int] = None,
) -> Imported:
  """The tensors of a checkpoint as a model of this suite.

  Args:
    kind: a key of `KINDS`.
    arrays: every tensor by its torch name, e.g. from `read_tensors`.
    options: constructor arguments that the shapes do not tell.
    num_heads: H, where the shapes do not tell it.

  Raises:
    CheckpointNameError: names are missing or unknown (all are listed), or shapes do not fit.
    OptionError: an option is unknown, missing, or contradicted by the tensors.
  """
  arrays = without_copies(arrays)
  description = describe(kind, arrays, options or {}, num_heads)
  module = make_module(description)
  params = from_arrays(arrays, KINDS[kind].names(description), abstract_params(description))
  return Imported(module, params, description)


def describe(
    kind: str, arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int] = None
) -> Description:
  """What the model is, JSON-able; see `import_checkpoint`."""
  description = {"kind": kind, **KINDS[kind].describe(arrays, options, num_heads)}
  features, heads = description["features"], description["num_heads"]
  if heads < 1 or features % heads:
    raise OptionError(f"num_heads {heads} does not divide the width {features} of the checkpoint")
  return description


def make_module(description: Description) -> nn.Module:
  """The module that a description stands for."""
  return KINDS[description["kind"]].make(description)


def abstract_params(description: Description) -> Any:
  """Shapes of the module's parameters."""
  module, inputs = make_module(description), KINDS[description["kind"]].inputs
  init = lambda: module.init(jax.random.key(0), inputs(description))
  return nn.unbox(jax.eval_shape(init)["params"])


def without_copies(arrays: Arrays) -> dict[str, np.ndarray]:
  """The tensors without buffers, and those of a shared generator once, under their first name.

  Raises:
    CheckpointNameError: the copies of a shared generator differ.
  """
  kept: dict[str, np.ndarray] = {}
  first: dict[str, str] = {}
  shared = sorted((name for name in arrays if _SHARED.fullmatch(name)), key=_shared_order)
  for name in [*(name for name in arrays if not _SHARED.fullmatch(name)), *shared]:
    if _BUFFERS.fullmatch(name):
      continue
    if match := _SHARED.fullmatch(name):
      original = first.setdefault(match[1], name)
      if original != name:
        if not np.array_equal(arrays[original], arrays[name]):
          raise CheckpointNameError(
              f"{name} differs from {original}, though one generator is shared by all layers"
          )
        continue
    kept[name] = arrays[name]
  return kept


def _shared_order(name: str) -> tuple[bool, int]:
  index = re.search(r"\d+", name)
  return not name.startswith("decoder.shared_mlp_module"), int(index[0]) if index else 0


def _require(arrays: Arrays, name: str, num_axes: int) -> tuple[int, ...]:
  """The shape of a tensor that every model of the kind has."""
  if name not in arrays:
    raise CheckpointNameError(
        f"the checkpoint has no '{name}', so it is not of this kind; it has {sorted(arrays)[:8]}, .."
    )
  if arrays[name].ndim != num_axes:
    raise CheckpointNameError(f"{name} has shape {arrays[name].shape}, not {num_axes} axes")
  return arrays[name].shape


def _consistent(
    options: Mapping[str, Any], inferred: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Options completed by what the tensors tell; a contradiction is an OptionError."""
  known = authors_damcha.known_options({**inferred, **options}, defaults)
  for name, value in inferred.items():
    if known[name] != value:
      raise OptionError(f"option {name}={known[name]!r}, but the checkpoint has {name}={value!r}")
  return known


def _describe_generator(
    arrays: Arrays, prefix: str, features: int, options: Mapping[str, Any]
) -> tuple[list[int], dict[str, Any], Optional[int]]:
  """Widths, options and, where its tensors tell, number of heads of a StructuredMLPForM."""
  own = {name.removeprefix(prefix): array for name, array in arrays.items()
         if name.startswith(prefix)}
  rows = {
      int(match[1]): array.shape[0]
      for name, array in own.items()
      if (match := re.fullmatch(r"mlp\.(\d+)\.weight", name)) and array.ndim == 2
  }
  if not rows:
    raise CheckpointNameError(f"the checkpoint has no '{prefix}mlp.0.weight'")
  *widths, last = (rows[index] for index in sorted(rows))
  inferred: dict[str, Any] = dict(off_diag_mode="mlp")
  num_heads = None
  if "B" in own:
    inferred["off_diag_mode"], num_heads = "separate_B", own["B"].shape[0]
  elif "off_diag_alpha" in own:
    bayesian = "off_diag_alpha_logvar" in own
    inferred["off_diag_mode"] = "bayesian" if bayesian else "linear_comb"
    num_heads = own["off_diag_alpha"].shape[0]
  rank, rest = divmod(last, 2 * features)
  if last == features**2:
    # A rank of D / 2 has as many outputs as a full metric; only an option can tell.
    inferred["compact_rank"] = rank if not rest and options.get("compact_rank") == rank else 0
  elif rest:
    raise CheckpointNameError(
        f"{prefix}mlp ends in {last} outputs, neither {features}^2 nor 2 x {features} x a rank"
    )
  else:
    inferred["compact_rank"] = rank
  if "layer_bias_U" in own and "layer_scales" in own:
    inferred.update(use_layer_bias=True, layer_bias_rank=own["layer_bias_U"].shape[-1])
    inferred["n_layers"] = own["layer_scales"].shape[0]
  return widths, inferred, num_heads


def _heads(given: Optional[int], told: Optional[int]) -> int:
  """H, from an option or the tensors."""
  if given is None and told is None:
    raise OptionError("the shapes of this checkpoint do not tell the number of heads; give num_heads")
  if given is not None and told is not None and given != told:
    raise OptionError(f"num_heads {given}, but the checkpoint has {told} heads")
  return told if given is None else given


def _describe_metric(
    arrays: Arrays,
    attention: str,
    shared: str,
    features: int,
    options: Mapping[str, Any],
    num_heads: Optional[int],
) -> tuple[list[int], dict[str, Any], int]:
  """Widths, options and number of heads of a stack whose first attention is at `attention`."""
  generated = [prefix for prefix in (shared, f"{attention}_own_mlp.")
               if any(name.startswith(prefix) for name in arrays)]
  widths, inferred, told = [], {}, None
  if generated:
    widths, inferred, told = _describe_generator(arrays, generated[0], features, options)
  inferred.update(
      use_M=bool(generated) or f"{attention}M0" in arrays,
      use_mlp=bool(generated),
      share_mlp=generated[:1] == [shared],
  )
  return widths, inferred, _heads(num_heads, told)


# --- TransformerPC ---


def _describe_transformer(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> Description:
  first = "decoder.layers.0."
  mlp_features, features = _require(arrays, f"{first}ff.net.0.weight", 2)
  widths, inferred, num_heads = _describe_metric(
      arrays, f"{first}self_attn.", "decoder.shared_mlp_module.", features, options, num_heads
  )
  num_layers = num_entries("decoder.layers.", arrays)
  # The decoder passes its depth to the generator, whatever a caller says.
  inferred["n_layers"] = num_layers
  return dict(
      features=features,
      num_heads=num_heads,
      mlp_features=mlp_features,
      num_layers=num_layers,
      widths=widths,
      options=_consistent(options, inferred, _TRANSFORMER_OPTIONS),
  )


def _sizes(description: Description) -> tuple[Any, ...]:
  keys = ("features", "num_heads", "mlp_features", "num_layers", "widths", "options")
  return tuple(tuple(description[key]) if key == "widths" else description[key] for key in keys)


def _stack_names(names: Callable[..., NameMap]) -> Callable[[Description], NameMap]:
  return lambda description: names(
      description["num_layers"], len(description["widths"]), description["options"]
  )


# --- VisionTransformer ---


def _describe_vit(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> Description:
  features, num_channels, patch_size, _ = _require(arrays, "patch_embed.proj.weight", 4)
  num_tokens = _require(arrays, "pos_embed", 3)[1]
  mlp_features, _ = _require(arrays, "blocks.0.mlp.0.weight", 2)
  side = math.isqrt(max(num_tokens - 1, 0))
  if side**2 != num_tokens - 1:
    raise CheckpointNameError(f"pos_embed has {num_tokens} tokens, which is no square and a class")
  attention = "blocks.0.attn."
  widths, inferred, num_heads = _describe_metric(
      arrays, attention, f"{attention}_shared_mlp.", features, options, num_heads
  )
  ours = {name: value for name, value in inferred.items() if name in authors_vit.VIT_DEFAULTS}
  return dict(
      features=features,
      num_heads=num_heads,
      mlp_features=mlp_features,
      num_layers=num_entries("blocks.", arrays),
      widths=widths,
      options=_consistent(options, ours, authors_vit.VIT_DEFAULTS),
      image_size=side * patch_size,
      patch_size=patch_size,
      num_channels=num_channels,
      num_classes=_require(arrays, "head.weight", 2)[0],
  )


def _make_vit(description: Description) -> nn.Module:
  own = {key: description[key] for key in ("image_size", "patch_size", "num_classes")}
  return authors_vit.make_vit(*_sizes(description), **own)


def _images(description: Description) -> jax.Array:
  size = description["image_size"]
  return jnp.zeros((1, size, size, description["num_channels"]))


# --- BaselineTransformer ---


def _describe_baseline(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> Description:
  mlp_features, features = _require(arrays, "decoder.layers.0.ff.net.0.weight", 2)
  prefix = "decoder.layers.0.self_attn."
  shapes = {name.removeprefix(prefix): array.shape for name, array in arrays.items()
            if name.startswith(prefix)}
  inferred: dict[str, Any] = {}
  told = None
  if "pre_proj.weight" in shapes:
    baseline, told = "tha", shapes["pre_proj.weight"][0]
  elif "combine_q" in shapes:
    baseline, told = "colmha", shapes["combine_q"][0]
  elif "gate_proj.weight" in shapes and "router.0.weight" in shapes:
    baseline, told = "dcmha", shapes["gate_proj.weight"][0]
    inferred["router_rank"] = shapes["router.0.weight"][0]
  elif len(shapes.get("W_q", ())) == 3:
    baseline, told = "moa", features // shapes["W_q"][-1]
    inferred["expert_factor"] = shapes["W_q"][0] // told
  else:  # has the names of multi-head attention
    baseline = "mma"
  return dict(
      baseline=baseline,
      features=features,
      num_heads=_heads(num_heads, told),
      mlp_features=mlp_features,
      num_layers=num_entries("decoder.layers.", arrays),
      options=_consistent(options, inferred, authors_baselines.BASELINE_DEFAULTS),
  )


def _make_baseline(description: Description) -> nn.Module:
  keys = ("baseline", "num_heads", "mlp_features", "num_layers", "options")
  return authors_baselines.make_baseline_transformer(*(description[key] for key in keys))


def _vectors(description: Description) -> jax.Array:
  return jnp.zeros((1, 2, description["features"]))


_TRANSFORMER_OPTIONS = {
    **authors_damcha.GENERATOR_DEFAULTS, **authors_damcha.TRANSFORMER_DEFAULTS
}

KINDS = {
    "transformer": Kind(
        _describe_transformer,
        _TRANSFORMER_OPTIONS,
        lambda description: authors_damcha.make_transformer(*_sizes(description)),
        _stack_names(authors_damcha.transformer_names),
        _vectors,
    ),
    "vit": Kind(
        _describe_vit,
        authors_vit.VIT_DEFAULTS,
        _make_vit,
        _stack_names(authors_vit.vit_names),
        _images,
    ),
    "baseline": Kind(
        _describe_baseline,
        authors_baselines.BASELINE_DEFAULTS,
        _make_baseline,
        lambda description: authors_baselines.baseline_transformer_names(
            description["baseline"], description["num_layers"]
        ),
        _vectors,
    ),
}
