"""The DAMCHA authors' PyTorch modules in this package's terms: which module, which parameter.

A `NameMap` says for every torch name which leaf of our parameter tree it is and how its axes line
up. The correspondence is linear, so one map carries parameters and gradients, in both directions:

    names = attention_names(options)
    params = from_torch(state_dict_as_numpy, names, template)
    state_dict = to_torch(params, names)

Options are the keyword arguments of the authors' constructors, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.generator import StaticMetric
from damcha_jax.models.stack import BlockStack


class CheckpointNameError(ValueError):
  """Torch names or shapes that do not fit the module they are loaded into."""


class Leaf(NamedTuple):
  """Where a torch tensor goes.

  Attributes:
    path: keys from the root of our parameter tree.
    axes: how many of our axes each axis of the tensor joins, in the order of our axes.
    transpose: torch keeps the joined axes in reverse order, as nn.Linear does.
  """

  path: tuple[str, ...]
  axes: tuple[int, ...]
  transpose: bool = False


NameMap = Mapping[str, Leaf]

# Constructor arguments of the authors' generator, with their defaults. Those of initial values
# (off_diag_alpha_init) do not matter to a checkpoint but are kept, so that training can go on.
_GENERATOR_DEFAULTS = dict(
    off_diag_mode="mlp",
    off_diag_alpha_init=0.1,
    diag_scale=1.0,
    off_diag_scale=1.0,
    n_layers=4,
    use_layer_bias=False,
    layer_bias_rank=16,
    compact_rank=0,
    free_M=False,
)
_ATTENTION_DEFAULTS = dict(use_M=False, use_mlp=False, bias=True, layer_idx=0)
_TRANSFORMER_DEFAULTS = dict(use_M=False, use_mlp=False, share_mlp=False)
# Accepted by the authors' constructors, without effect on what the modules compute.
_INERT = ("use_multihead_M", "dev_mode", "dropout")


def from_torch(
    arrays: Mapping[str, np.ndarray], names: NameMap, template: Any
) -> dict[str, Any]:
  """Arrays under torch names -> our parameter tree.

  Args:
    arrays: every tensor of the module, as numpy arrays.
    names: of the module.
    template: a parameter tree with the shapes to fill, e.g. from `jax.eval_shape(module.init, ..)`.

  Raises:
    CheckpointNameError: names are missing or unknown (all are listed), or a shape does not fit.
  """
  missing, unknown = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
  if missing or unknown:
    raise CheckpointNameError(
        f"the checkpoint does not fit the module: missing {missing or 'nothing'}, unknown"
        f" {unknown or 'nothing'}; check the options it was trained with"
    )
  shapes = _flatten(nn.unbox(template))
  unfilled = sorted("/".join(path) for path in set(shapes) - {leaf.path for leaf in names.values()})
  if unfilled:
    raise CheckpointNameError(f"no torch tensor fills the parameters {unfilled}")
  params: dict[str, Any] = {}
  for name, leaf in names.items():
    if leaf.path not in shapes:
      raise CheckpointNameError(f"{name}: the module has no parameter {'/'.join(leaf.path)}")
    shape = shapes[leaf.path].shape
    array, expected = np.asarray(arrays[name]), _torch_shape(shape, leaf)
    if array.shape != expected:
      raise CheckpointNameError(f"{name} has shape {array.shape}, but the module needs {expected}")
    *parents, last = leaf.path
    node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parents, params)
    node[last] = jnp.asarray((array.T if leaf.transpose else array).reshape(shape))
  return params


def to_torch(params: Any, names: NameMap) -> dict[str, np.ndarray]:
  """Our parameter tree (or a gradient of its structure) -> arrays under torch names."""
  leaves = _flatten(nn.unbox(params))
  arrays = {}
  for name, leaf in names.items():
    array = np.asarray(leaves[leaf.path])
    shape = _torch_shape(array.shape, leaf)
    arrays[name] = array.reshape(shape[::-1]).T if leaf.transpose else array.reshape(shape)
  return arrays


def _torch_shape(shape: tuple[int, ...], leaf: Leaf) -> tuple[int, ...]:
  joined, start = [], 0
  for count in leaf.axes:
    joined.append(int(np.prod(shape[start : start + count])))
    start += count
  if start != len(shape):
    raise CheckpointNameError(f"{'/'.join(leaf.path)} has {len(shape)} axes, not {start}")
  return tuple(joined[::-1] if leaf.transpose else joined)


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {tuple(str(key.key) for key in path): leaf for path, leaf in paths}


def _linear(name: str, path: tuple[str, ...], kernel_axes: tuple[int, int], bias: bool = True):
  leaves = {f"{name}.weight": Leaf((*path, "kernel"), kernel_axes, transpose=True)}
  if bias:
    leaves[f"{name}.bias"] = Leaf((*path, "bias"), kernel_axes[1:])
  return leaves


def _known(options: Mapping[str, Any], *defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Options with defaults filled in; an unknown one is an error."""
  known = {name: value for group in defaults for name, value in group.items()}
  unknown = sorted(set(options) - set(known) - set(_INERT))
  if unknown:
    raise ValueError(f"unknown options {unknown}; the authors' module has {sorted(known)}")
  return {**known, **{name: value for name, value in options.items() if name in known}}


# --- the metric generator: StructuredMLPForM ---


def make_generator(
    num_heads: int,
    widths: tuple[int, ...],
    options: Mapping[str, Any],
    layer_index: int = 0,
    **module_fields: Any,
) -> nn.Module:
  """The authors' StructuredMLPForM(d_model, n_heads, hidden_dims, **options).

  The suite's own MetricGenerator where `options` ask for nothing else, AuthorsMetricGenerator
  otherwise.

  Args:
    num_heads: H.
    widths: hidden widths of the MLP.
    options: keyword arguments of the authors' class.
    layer_index: the layer whose bias is added where a call names none.
    **module_fields: Linen's `name` or `parent`.

  Raises:
    ValueError: an unknown option.
  """
  options = _known(options, _GENERATOR_DEFAULTS)
  unscaled = options["diag_scale"] == options["off_diag_scale"] == 1.0
  plain = options["off_diag_mode"] == "mlp" and not options["compact_rank"]
  if plain and unscaled and not options["use_layer_bias"]:
    return MetricGenerator(num_heads, tuple(widths), parameterization="blocks", **module_fields)
  return AuthorsMetricGenerator(
      num_heads,
      tuple(widths),
      off_diagonal=options["off_diag_mode"],
      alpha_std=options["off_diag_alpha_init"],
      compact_rank=options["compact_rank"],
      free_metric=options["free_M"],
      layer_bias_rank=options["layer_bias_rank"] if options["use_layer_bias"] else 0,
      num_layers=options["n_layers"],
      diagonal_scale=options["diag_scale"],
      off_diagonal_scale=options["off_diag_scale"],
      layer_index=layer_index,
      **module_fields,
  )


def generator_names(
    num_widths: int,
    options: Mapping[str, Any],
    prefix: str = "",
    path: tuple[str, ...] = (),
) -> dict[str, Leaf]:
  """Torch names of a StructuredMLPForM under `prefix`, for a generator at `path` of our tree."""
  options = _known(options, _GENERATOR_DEFAULTS)
  leaves: dict[str, Leaf] = {}
  for index in range(num_widths):  # each Linear is followed by GELU and Dropout
    leaves.update(_linear(f"mlp.{3 * index}", (*path, f"hidden_{index}"), (1, 1)))
  last = f"mlp.{3 * num_widths}"
  leaves[f"{last}.weight"] = Leaf((*path, "out_kernel"), (1, 4), transpose=True)
  leaves[f"{last}.bias"] = Leaf((*path, "out_bias"), (4,))
  mode = options["off_diag_mode"]
  if mode in ("linear_comb", "bayesian"):
    leaves["off_diag_alpha"] = Leaf((*path, "alpha"), (1, 1, 1))
  if mode == "bayesian":
    leaves["off_diag_alpha_logvar"] = Leaf((*path, "alpha_logvar"), (1, 1, 1))
  if mode == "separate_B":
    leaves["B"] = Leaf((*path, "separate_blocks"), (1, 1, 2))
  if options["use_layer_bias"]:
    leaves["layer_bias_U"] = Leaf((*path, "bias_left"), (1, 1))
    leaves["layer_bias_V"] = Leaf((*path, "bias_right"), (1, 1))
    leaves["layer_scales"] = Leaf((*path, "bias_scales"), (1, 1))
  return {prefix + name: leaf for name, leaf in leaves.items()}


# --- the attention: MBasedAttention ---


def make_attention(
    features: int,
    num_heads: int,
    widths: tuple[int, ...],
    options: Mapping[str, Any],
    causal: bool,
    **module_fields: Any,
) -> nn.Module:
  """The authors' MBasedAttention(d_model, n_heads, mlp_hidden_dims, **options).

  `use_M=False` is multi-head attention, `use_mlp=False` the static metric. Padded queries and
  masks as in `AttentionBase`; pass an explicit `padding_mask` along with any other mask, since
  here a mask alone would also decide which tokens enter the context.

  Raises:
    ValueError: an unknown option.
  """
  known = _known(options, _GENERATOR_DEFAULTS, _ATTENTION_DEFAULTS)
  common = dict(num_heads=num_heads, causal=causal, use_bias=known["bias"], **module_fields)
  if not known["use_M"]:
    return MultiHeadAttention(**common)
  if known["use_mlp"]:
    generator = make_generator(
        num_heads, widths, _generator_part(known), known["layer_idx"], parent=None
    )
  else:
    generator = StaticMetric(num_heads, features, parent=None)
  context = "prefix" if causal else "sequence"
  return DamchaAttention(**common, generator=generator, context=context)


def attention_names(
    num_widths: int,
    options: Mapping[str, Any],
    prefix: str = "",
    path: tuple[str, ...] = (),
    shares: bool = False,
) -> dict[str, Leaf]:
  """Torch names of an MBasedAttention under `prefix`; `shares`: its generator is another's."""
  known = _known(options, _GENERATOR_DEFAULTS, _ATTENTION_DEFAULTS)
  bias, generator_path = known["bias"], (*path, "generator")
  names = {
      **_linear(f"{prefix}W_v", (*path, "value"), (1, 2), bias),
      **_linear(f"{prefix}out_proj", (*path, "out"), (2, 1), bias),
  }
  if not known["use_M"]:
    names.update(_linear(f"{prefix}W_q", (*path, "query"), (1, 2), bias))
    names.update(_linear(f"{prefix}W_k", (*path, "key"), (1, 2), bias))
  elif not known["use_mlp"]:
    names[f"{prefix}M0"] = Leaf((*generator_path, "metric_blocks"), (2, 2))
  elif not shares:
    own = f"{prefix}_own_mlp."
    names.update(generator_names(num_widths, _generator_part(known), own, generator_path))
  return names


def _generator_part(options: Mapping[str, Any]) -> dict[str, Any]:
  return {name: options[name] for name in _GENERATOR_DEFAULTS if name in options}


# --- the decoder: TransformerPC ---


def make_transformer(
    features: int,
    num_heads: int,
    mlp_features: int,
    num_layers: int,
    widths: tuple[int, ...],
    options: Mapping[str, Any],
) -> BlockStack:
  """The authors' TransformerPC(d_model, n_heads, d_ff, n_layers, mlp_hidden=widths, **options).

  A causal post-LN stack over vectors to which `sinusoidal_positions` have been added. Its outputs
  per layer are sown as `layer_outputs`. A shared generator makes one metric from the stack's input,
  or, with a layer bias, one per layer from the layer's input.

  Raises:
    ValueError: an unknown option.
  """
  options = _known(options, _GENERATOR_DEFAULTS, _TRANSFORMER_DEFAULTS)
  options["n_layers"] = num_layers
  share_mlp = options.pop("share_mlp")
  generator = None
  if share_mlp and options["use_M"] and options["use_mlp"]:
    attention = functools.partial(DamchaAttention, num_heads=num_heads, causal=True)
    generator = functools.partial(make_generator, num_heads, widths, _generator_part(options))
  else:
    # Called once per layer, so that every layer gets a generator of its own.
    attention = functools.partial(
        make_attention, features, num_heads, widths, options, causal=True
    )
  return BlockStack(
      num_layers,
      attention,
      mlp_features,
      generator=generator,
      sharing="generator" if options["use_layer_bias"] else "stack",
      norm_placement="post",
      sow_layers=True,
  )


def transformer_names(
    num_layers: int, num_widths: int, options: Mapping[str, Any]
) -> dict[str, Leaf]:
  """Torch names of a TransformerPC, for the BlockStack that `make_transformer` returns."""
  options = _known(options, _GENERATOR_DEFAULTS, _TRANSFORMER_DEFAULTS)
  share_mlp = options.pop("share_mlp")
  shares = share_mlp and options["use_M"] and options["use_mlp"]
  names: dict[str, Leaf] = {}
  if shares:
    names.update(
        generator_names(
            num_widths,
            _generator_part(options),
            "decoder.shared_mlp_module.",
            ("generator",),
        )
    )
  for index in range(num_layers):
    torch, path = f"decoder.layers.{index}.", (f"layer_{index}",)
    names.update(
        attention_names(
            num_widths, options, f"{torch}self_attn.", (*path, "attention"), shares=shares
        )
    )
    names.update(_linear(f"{torch}ff.net.0", (*path, "mlp", "in"), (1, 1)))
    names.update(_linear(f"{torch}ff.net.3", (*path, "mlp", "out"), (1, 1)))
    for torch_norm, norm in (("ln1", "attention_norm"), ("ln2", "mlp_norm")):
      names[f"{torch}{torch_norm}.weight"] = Leaf((*path, norm, "scale"), (1,))
      names[f"{torch}{torch_norm}.bias"] = Leaf((*path, norm, "bias"), (1,))
  return names
