"""What an authors' checkpoint holds, told from the names and shapes of its tensors.

Each `describe_*` takes the tensors, the options that shapes do not tell (keyword arguments of the
authors' constructors) and the number of heads or None, and returns the sizes and options of the
model, JSON-able.
"""

from __future__ import annotations

from collections.abc import Mapping
import math
import re
from typing import Any, Optional

import numpy as np

from damcha_jax.interop import authors_baselines
from damcha_jax.interop import authors_damcha
from damcha_jax.interop import authors_vit
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.names import num_entries
from damcha_jax.interop.names import shape_of
from damcha_jax.interop.options import check_heads
from damcha_jax.interop.options import known_options
from damcha_jax.interop.options import OptionError

Arrays = Mapping[str, np.ndarray]
TRANSFORMER_OPTIONS = {
    **authors_damcha.GENERATOR_DEFAULTS, **authors_damcha.TRANSFORMER_DEFAULTS
}


def _consistent(
    options: Mapping[str, Any], inferred: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Options completed by what the tensors tell; a contradiction is an OptionError."""
  options = {name: value for name, value in options.items() if value is not None}
  known = known_options({**inferred, **options}, defaults)
  for name, value in inferred.items():
    if known[name] != value:
      raise OptionError(f"option {name}={known[name]!r}, but the checkpoint has {name}={value!r}")
  return known


def _describe_generator(
    arrays: Arrays, prefix: str, features: int, options: Mapping[str, Any]
) -> tuple[list[int], dict[str, Any], Optional[int]]:
  """Widths, options and, where its tensors tell, number of heads of a StructuredMLPForM."""
  own = {name.removeprefix(prefix) for name in arrays if name.startswith(prefix)}
  rows = {
      int(match[1]): shape_of(arrays, prefix + name, 2)[0]
      for name in own
      if (match := re.fullmatch(r"mlp\.(\d{1,9})\.weight", name))
  }
  if not rows:
    raise CheckpointNameError(f"the checkpoint has no '{prefix}mlp.0.weight'")
  *widths, last = (rows[index] for index in sorted(rows))
  inferred: dict[str, Any] = dict(off_diag_mode="mlp")
  num_heads = None
  if "B" in own:
    inferred["off_diag_mode"], num_heads = "separate_B", shape_of(arrays, f"{prefix}B", 3)[0]
  elif "off_diag_alpha" in own:
    bayesian = "off_diag_alpha_logvar" in own
    inferred["off_diag_mode"] = "bayesian" if bayesian else "linear_comb"
    num_heads = shape_of(arrays, f"{prefix}off_diag_alpha", 3)[0]
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
    inferred.update(use_layer_bias=True, n_layers=shape_of(arrays, f"{prefix}layer_scales", 2)[0],
                    layer_bias_rank=shape_of(arrays, f"{prefix}layer_bias_U", 2)[1])
  return widths, inferred, num_heads


def _heads(given: Optional[int], told: Optional[int], features: int) -> int:
  """H, from an option or the tensors."""
  if given is None and told is None:
    raise OptionError("the shapes of this checkpoint do not tell the number of heads; give"
                      " num_heads")
  if given is not None and told is not None and given != told:
    raise OptionError(f"num_heads {given}, but the checkpoint has {told} heads")
  num_heads = told if given is None else given
  check_heads(num_heads, features)
  return num_heads


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
  return widths, inferred, _heads(num_heads, told, features)


def describe_transformer(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> dict[str, Any]:
  """Of a TransformerPC."""
  first = "decoder.layers.0."
  mlp_features, features = shape_of(arrays, f"{first}ff.net.0.weight", 2)
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
      options=_consistent(options, inferred, TRANSFORMER_OPTIONS),
  )


def describe_vit(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> dict[str, Any]:
  """Of a VisionTransformer."""
  features, num_channels, patch_size, _ = shape_of(arrays, "patch_embed.proj.weight", 4)
  num_tokens = shape_of(arrays, "pos_embed", 3)[1]
  mlp_features, _ = shape_of(arrays, "blocks.0.mlp.0.weight", 2)
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
      num_classes=shape_of(arrays, "head.weight", 2)[0],
  )


def describe_baseline(
    arrays: Arrays, options: Mapping[str, Any], num_heads: Optional[int]
) -> dict[str, Any]:
  """Of a BaselineTransformer."""
  mlp_features, features = shape_of(arrays, "decoder.layers.0.ff.net.0.weight", 2)
  prefix = "decoder.layers.0.self_attn."
  shape = lambda name: shape_of(arrays, prefix + name, 3 if name == "W_q" else 2)
  inferred: dict[str, Any] = {}
  told = None
  if f"{prefix}pre_proj.weight" in arrays:
    baseline, told = "tha", shape("pre_proj.weight")[0]
  elif f"{prefix}combine_q" in arrays:
    baseline, told = "colmha", shape("combine_q")[0]
  elif f"{prefix}gate_proj.weight" in arrays:
    baseline, told = "dcmha", shape("gate_proj.weight")[0]
    inferred["router_rank"] = shape("router.0.weight")[0]
  elif f"{prefix}W_q" in arrays:
    num_experts, _, head_features = shape("W_q")
    baseline, told = "moa", features // head_features
    if num_experts < told or not told:
      raise CheckpointNameError(f"{prefix}W_q has {num_experts} experts of width {head_features},"
                                f" which are no heads of a model of width {features}")
    inferred["expert_factor"] = num_experts // told
  else:  # has the names of multi-head attention
    baseline = "mma"
  return dict(
      baseline=baseline,
      features=features,
      num_heads=_heads(num_heads, told, features),
      mlp_features=mlp_features,
      num_layers=num_entries("decoder.layers.", arrays),
      options=_consistent(options, inferred, authors_baselines.BASELINE_DEFAULTS),
  )
