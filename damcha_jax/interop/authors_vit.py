"""The DAMCHA authors' Vision Transformer: our module and its torch names."""

from __future__ import annotations

from collections.abc import Mapping
import functools
from types import MappingProxyType
from typing import Any

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.interop.authors_damcha import attention_names
from damcha_jax.interop.authors_damcha import generator_names
from damcha_jax.interop.authors_damcha import generator_options
from damcha_jax.interop.authors_damcha import GENERATOR_DEFAULTS
from damcha_jax.interop.authors_damcha import make_attention
from damcha_jax.interop.authors_damcha import make_generator
from damcha_jax.interop.authors_damcha import shares_generator
from damcha_jax.interop.authors_damcha import TRANSFORMER_DEFAULTS
from damcha_jax.interop.names import below
from damcha_jax.interop.names import layer_norm
from damcha_jax.interop.names import Leaf
from damcha_jax.interop.names import linear
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.names import Packed
from damcha_jax.interop.options import known_options
from damcha_jax.models.layers import make_initializers
from damcha_jax.models.stack import BlockStack
from damcha_jax.models.vit import VisionTransformer

VIT_DEFAULTS = {"off_diag_mode": GENERATOR_DEFAULTS["off_diag_mode"], **TRANSFORMER_DEFAULTS}
# The authors start all of it from N(0, 0.02^2), the generator too.
_GENERATOR_FIELDS = MappingProxyType({"initializer": "vit"})


def make_vit(
    features: int,
    num_heads: int,
    mlp_features: int,
    num_layers: int,
    widths: tuple[int, ...],
    options: Mapping[str, Any],
    *,
    image_size: int,
    patch_size: int,
    num_classes: int,
) -> VisionTransformer:
  """The authors' VisionTransformer(.., embed_dim=features, mlp_hidden=widths, **options).

  Images are [B, rows, columns, channels] here. A shared generator makes one metric from the class
  token and patches after the positions are added; an unshared one, from norm1(x) of its layer.

  Raises:
    OptionError: an unknown option.
  """
  options = known_options(options, VIT_DEFAULTS)
  generator = None
  if shares_generator(options):
    attention = functools.partial(
        DamchaAttention, num_heads=num_heads, causal=False, context="sequence"
    )
    generator = functools.partial(
        make_generator, num_heads, widths, generator_options(options), **_GENERATOR_FIELDS
    )
  else:
    options = {name: value for name, value in options.items() if name != "share_mlp"}
    attention = functools.partial(
        make_attention,
        features,
        num_heads,
        widths,
        options,
        causal=False,
        generator_fields=_GENERATOR_FIELDS,
    )
  initializers = make_initializers("vit", num_layers)
  stack = functools.partial(
      BlockStack,
      num_layers=num_layers,
      attention=attention,
      mlp_features=mlp_features,
      generator=generator,
      sharing="stack",
      context="sequence",
      causal=False,
      initializers=initializers,
  )
  return VisionTransformer(
      stack, features, image_size, patch_size, num_classes, initializers=initializers
  )


def vit_names(num_layers: int, num_widths: int, options: Mapping[str, Any]) -> NameMap:
  """Torch names of a VisionTransformer."""
  options = known_options(options, VIT_DEFAULTS)
  shares = shares_generator(options)
  if options["use_M"]:
    own = {name: value for name, value in options.items() if name != "share_mlp"}
    attention = attention_names(num_widths, own, shares)
  else:
    attention = _torch_attention_names()
  names: dict[str, Leaf | Packed] = {
      "cls_token": Leaf(("class",), (0, 0, 1)),
      "pos_embed": Leaf(("positions",), (0, 1, 1)),
      # Ours is [rows, columns, in, out], torch's [out, in, rows, columns].
      "patch_embed.proj.weight": Leaf(("patch_embed", "kernel"), (1, 1, 1, 1), order=(3, 2, 0, 1)),
      "patch_embed.proj.bias": Leaf(("patch_embed", "bias"), (1,)),
      **layer_norm("norm", ("norm",)),
      **linear("head", ("head",), (1, 1)),
  }
  block = {
      **below("attn.", ("attention",), attention),
      **layer_norm("norm1", ("attention_norm",)),
      **layer_norm("norm2", ("mlp_norm",)),
      **linear("mlp.0", ("mlp", "in"), (1, 1)),
      **linear("mlp.3", ("mlp", "out"), (1, 1)),
  }
  for index in range(num_layers):
    names.update(below(f"blocks.{index}.", ("stack", f"layer_{index}"), block))
  if shares:
    shared = generator_names(num_widths, generator_options(options))
    names.update(below("blocks.0.attn._shared_mlp.", ("stack", "generator"), shared))
  return names


def _torch_attention_names() -> NameMap:
  """Torch's own nn.MultiheadAttention, which packs the three input projections."""
  parts = ("query", "key", "value")
  return {
      "in_proj_weight": Packed(
          tuple(Leaf((part, "kernel"), (1, 2), order=(1, 0)) for part in parts)
      ),
      "in_proj_bias": Packed(tuple(Leaf((part, "bias"), (2,)) for part in parts)),
      **linear("out_proj", ("out",), (2, 1)),
  }
