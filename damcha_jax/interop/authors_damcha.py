"""The DAMCHA authors' metric generator, attention and decoder: our modules and their torch names.

Options are the keyword arguments of the authors' constructors, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from types import MappingProxyType
from typing import Any

from flax import linen as nn

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.interop.names import below
from damcha_jax.interop.names import layer_norm
from damcha_jax.interop.names import Leaf
from damcha_jax.interop.names import linear
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.names import Packed
from damcha_jax.interop.options import known_options
from damcha_jax.metric.authors import AuthorsMetricGenerator
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.generator import StaticMetric
from damcha_jax.models.stack import BlockStack

# Constructor arguments of the authors' generator, with their defaults. Those of initial values
# (off_diag_alpha_init) do not matter to a checkpoint but are kept, so that training can go on.
GENERATOR_DEFAULTS = dict(
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
TRANSFORMER_DEFAULTS = dict(use_M=False, use_mlp=False, share_mlp=False)


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
    **module_fields: of both our generators, or Linen's `name` or `parent`.

  Raises:
    OptionError: an unknown option.
  """
  options = known_options(options, GENERATOR_DEFAULTS)
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


def generator_names(num_widths: int, options: Mapping[str, Any]) -> NameMap:
  """Torch names of a StructuredMLPForM."""
  options = known_options(options, GENERATOR_DEFAULTS)
  names: dict[str, Leaf] = {}
  for index in range(num_widths):  # each Linear is followed by GELU and Dropout
    names.update(linear(f"mlp.{3 * index}", (f"hidden_{index}",), (1, 1)))
  last = f"mlp.{3 * num_widths}"
  names[f"{last}.weight"] = Leaf(("out_kernel",), (1, 4), order=(1, 0))
  names[f"{last}.bias"] = Leaf(("out_bias",), (4,))
  mode = options["off_diag_mode"]
  if mode in ("linear_comb", "bayesian"):
    names["off_diag_alpha"] = Leaf(("alpha",), (1, 1, 1))
  if mode == "bayesian":
    names["off_diag_alpha_logvar"] = Leaf(("alpha_logvar",), (1, 1, 1))
  if mode == "separate_B":
    names["B"] = Leaf(("separate_blocks",), (1, 1, 2))
  if options["use_layer_bias"]:
    names["layer_bias_U"] = Leaf(("bias_left",), (1, 1))
    names["layer_bias_V"] = Leaf(("bias_right",), (1, 1))
    names["layer_scales"] = Leaf(("bias_scales",), (1, 1))
  return names


# --- the attention: MBasedAttention ---


def make_attention(
    features: int,
    num_heads: int,
    widths: tuple[int, ...],
    options: Mapping[str, Any],
    causal: bool,
    generator_fields: Mapping[str, Any] = MappingProxyType({}),
    **module_fields: Any,
) -> nn.Module:
  """The authors' MBasedAttention(d_model, n_heads, mlp_hidden_dims, **options).

  `use_M=False` is multi-head attention, `use_mlp=False` the static metric. Padded queries and
  masks as in `AttentionBase`; pass an explicit `padding_mask` along with any other mask, since
  here a mask alone would also decide which tokens enter the context.

  Raises:
    OptionError: an unknown option.
  """
  known = known_options(options, GENERATOR_DEFAULTS, _ATTENTION_DEFAULTS)
  common = dict(num_heads=num_heads, causal=causal, use_bias=known["bias"], **module_fields)
  if not known["use_M"]:
    return MultiHeadAttention(**common)
  if known["use_mlp"]:
    generator = make_generator(
        num_heads,
        widths,
        generator_options(known),
        known["layer_idx"],
        parent=None,
        **generator_fields,
    )
  else:
    generator = StaticMetric(num_heads, features, parent=None)
  context = "prefix" if causal else "sequence"
  return DamchaAttention(**common, generator=generator, context=context)


def attention_names(num_widths: int, options: Mapping[str, Any], shares: bool = False) -> NameMap:
  """Torch names of an MBasedAttention; `shares`: its generator is another module's."""
  known = known_options(options, GENERATOR_DEFAULTS, _ATTENTION_DEFAULTS)
  bias = known["bias"]
  names = {
      **linear("W_v", ("value",), (1, 2), bias),
      **linear("out_proj", ("out",), (2, 1), bias),
  }
  if not known["use_M"]:
    names.update(linear("W_q", ("query",), (1, 2), bias))
    names.update(linear("W_k", ("key",), (1, 2), bias))
  elif not known["use_mlp"]:
    names["M0"] = Leaf(("generator", "metric_blocks"), (2, 2))
  elif not shares:
    own = generator_names(num_widths, generator_options(known))
    names.update(below("_own_mlp.", ("generator",), own))
  return names


def generator_options(options: Mapping[str, Any]) -> dict[str, Any]:
  """Those of `options` that are the generator's."""
  return {name: options[name] for name in GENERATOR_DEFAULTS if name in options}


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
    OptionError: an unknown option.
  """
  options = known_options(options, GENERATOR_DEFAULTS, TRANSFORMER_DEFAULTS)
  options["n_layers"] = num_layers
  generator = None
  if shares_generator(options):
    attention = functools.partial(DamchaAttention, num_heads=num_heads, causal=True)
    generator = functools.partial(make_generator, num_heads, widths, generator_options(options))
  else:
    del options["share_mlp"]
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
) -> NameMap:
  """Torch names of a TransformerPC, for the BlockStack that `make_transformer` returns."""
  options = known_options(options, GENERATOR_DEFAULTS, TRANSFORMER_DEFAULTS)
  shares = shares_generator(options)
  del options["share_mlp"]
  attention = attention_names(num_widths, options, shares)
  names = decoder_names(num_layers, attention)
  if shares:
    shared = generator_names(num_widths, generator_options(options))
    names.update(below("decoder.shared_mlp_module.", ("generator",), shared))
  return names


def shares_generator(options: Mapping[str, Any]) -> bool:
  """Whether one generator serves all layers."""
  return bool(options["share_mlp"] and options["use_M"] and options["use_mlp"])


def decoder_names(num_layers: int, attention: NameMap) -> dict[str, Leaf | Packed]:
  """Torch names of the layers of a TransformerPC or BaselineTransformer, given its attention's."""
  layer = {
      **below("self_attn.", ("attention",), attention),
      **linear("ff.net.0", ("mlp", "in"), (1, 1)),
      **linear("ff.net.3", ("mlp", "out"), (1, 1)),
      **layer_norm("ln1", ("attention_norm",)),
      **layer_norm("ln2", ("mlp_norm",)),
  }
  names: dict[str, Leaf | Packed] = {}
  for index in range(num_layers):
    names.update(below(f"decoder.layers.{index}.", (f"layer_{index}",), layer))
  return names
