"""Hugging Face GPT-2 weights as this suite's language model, and that as a full-width DAMCHA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
from pathlib import Path
import re
import reprlib
from types import MappingProxyType
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.config import DamchaConfig, freeze, ModelConfig, upgraded
from damcha_jax.errors import CheckpointError
from damcha_jax.interop.mha_to_damcha import decoder_to_damcha
from damcha_jax.interop.names import below
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.names import layer_norm
from damcha_jax.interop.names import Leaf
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.names import num_entries
from damcha_jax.interop.names import Packed
from damcha_jax.interop.names import same
from damcha_jax.interop.names import shape_of
from damcha_jax.interop.options import check_heads
from damcha_jax.interop.options import known_options
from damcha_jax.interop.options import OptionError
from damcha_jax.interop.options import RULES
from damcha_jax.interop.options import SIZE
from damcha_jax.models.decoder import DecoderLM
from damcha_jax.models.decoder import make_decoder

GPT2_DEFAULTS = MappingProxyType(dict(
    gelu="tanh",  # 'gelu_new' in the released config.json
    dropout_rate=0.1,  # embd_pdrop and resid_pdrop there; used when training goes on
))
# Of the DAMCHA that the weights are turned into; not the paper's, which has no such conversion.
DAMCHA_DEFAULTS = MappingProxyType(dict(
    update_rank=16,
    stride=64,  # as in configs/gpt2.py
    widths=(64, 64),
    sharing="generator",
    preset="robust",  # the paper's initial values would hardly follow the context
))
_GELU_NAMES = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
# Entries of config.json without which, or with other values, the model computes something else.
_REQUIRED = dict(
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
)
# Entries of config.json -> what they are called in a description.
_SIZES = dict(n_layer="num_layers", n_embd="features", n_inner="mlp_features",
              vocab_size="vocab_size", n_positions="context_length")


class Told(NamedTuple):
  """What a config.json says: H, options, and sizes that the tensors tell as well."""

  num_heads: Optional[int] = None
  options: Mapping[str, Any] = MappingProxyType({})
  sizes: Mapping[str, int] = MappingProxyType({})


def clean(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The tensors without masks, without the copy of the tied embedding, and without a prefix.

  Raises:
    CheckpointNameError: the output layer is not the embedding.
  """
  arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
  head = arrays.pop("lm_head.weight", None)
  if head is not None and "wte.weight" in arrays and not same(head, arrays["wte.weight"]):
    raise CheckpointNameError("lm_head.weight differs from wte.weight, but GPT-2 ties the two")
  mask = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
  return {name: array for name, array in arrays.items() if not mask.fullmatch(name)}


def describe(
    arrays: Mapping[str, np.ndarray], options: Mapping[str, Any], num_heads: Optional[int]
) -> dict[str, Any]:
  """The sections `model` and `context_length` of a config, from the tensors.

  Raises:
    CheckpointNameError: a tensor that every GPT-2 has is missing.
    OptionError: an unknown option, or no number of heads.
  """
  options = known_options(options, GPT2_DEFAULTS)
  vocab_size, features = shape_of(arrays, "wte.weight", 2)
  if num_heads is None:
    raise OptionError("the shapes of GPT-2 do not tell the number of heads; give num_heads, or keep"
                      " config.json beside the weights")
  check_heads(num_heads, features)
  model = ModelConfig(
      num_layers=num_entries("h.", arrays),
      num_heads=num_heads,
      features=features,
      mlp_features=shape_of(arrays, "h.0.mlp.c_fc.weight", 2)[1],
      vocab_size=vocab_size,
      positions="learned",
      norm_placement="pre",
      tie_embeddings=True,
      initializer="gpt2",
      attention_dropout_rate=0.0,
      remat=False,
      scan_layers=False,
      attention_implementation="auto",
      dtype="float32",
      param_dtype="float32",
      **options,
  )
  context_length = shape_of(arrays, "wpe.weight", 2)[0]
  return dict(
      attention="mha", context_length=context_length, model=dataclasses.asdict(model), damcha=None
  )


def make_module(description: Mapping[str, Any]) -> DecoderLM:
  """The DecoderLM of a description."""
  return make_decoder(_sections(description), description["attention"])


def names(description: Mapping[str, Any]) -> NameMap:
  """Hugging Face's names; its Conv1D kernels are [in, out], as ours."""
  conv = lambda name, path, axes: {
      f"{name}.weight": Leaf((*path, "kernel"), axes),
      f"{name}.bias": Leaf((*path, "bias"), axes[1:]),
  }
  parts = ("query", "key", "value")
  layer = {
      **layer_norm("ln_1", ("attention_norm",)),
      **layer_norm("ln_2", ("mlp_norm",)),
      "attn.c_attn.weight": Packed(
          tuple(Leaf(("attention", part, "kernel"), (1, 2)) for part in parts), axis=1
      ),
      "attn.c_attn.bias": Packed(tuple(Leaf(("attention", part, "bias"), (2,)) for part in parts)),
      **conv("attn.c_proj", ("attention", "out"), (2, 1)),
      **conv("mlp.c_fc", ("mlp", "in"), (1, 1)),
      **conv("mlp.c_proj", ("mlp", "out"), (1, 1)),
  }
  entries: dict[str, Leaf | Packed] = {
      "wte.weight": Leaf(("embed", "embedding"), (1, 1)),
      "wpe.weight": Leaf(("positions",), (1, 1)),
      **layer_norm("ln_f", ("norm",)),
  }
  for index in range(description["model"]["num_layers"]):
    entries.update(below(f"h.{index}.", ("stack", f"layer_{index}"), layer))
  return entries


def read_config(weights: Path) -> Told:
  """What the config.json beside the weights says, if there is one.

  Raises:
    CheckpointError: it is not that of a GPT-2 that the language model here can be.
  """
  path = weights.with_name("config.json")
  if not path.exists():
    return Told()
  try:
    contents = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(contents, dict) or "n_head" not in contents:
      raise ValueError("it has no n_head")
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointError(f"{path} is not the config.json of a GPT-2 ({error}); repair it, or move"
                          " it away and give --num_heads") from error

  def value(name: str, default: Any, holds: Callable[[Any], bool], wanted: str) -> Any:
    found = contents.get(name, default)
    if not holds(found):
      raise CheckpointError(f"{path} has {name}={reprlib.repr(found)}, not {wanted}; correct it, or"
                            " move the file away and give what it told as options")
    return found

  for name, only in _REQUIRED.items():
    value(name, only, lambda found: found == only, f"{only}, the only one that can be had here")
  activation = value("activation_function", "gelu_new",
                     lambda found: isinstance(found, str) and found in _GELU_NAMES,
                     f"one of {', '.join(_GELU_NAMES)}")
  dropout_rate = value("resid_pdrop", GPT2_DEFAULTS["dropout_rate"], *RULES["dropout_rate"])
  num_heads = value("n_head", None, *SIZE)
  sizes = {name: value(name, None, *SIZE) for name in _SIZES if contents.get(name) is not None}
  options = dict(gelu=_GELU_NAMES[activation], dropout_rate=float(dropout_rate))
  return Told(num_heads, options, sizes)


def check_sizes(description: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
  """Raises CheckpointError if a config.json tells other sizes than the tensors."""
  held = {"context_length": description["context_length"], **description["model"]}
  for name, size in sizes.items():
    if held[_SIZES[name]] != size:
      raise CheckpointError(f"config.json has {name}={size}, but the tensors have"
                            f" {held[_SIZES[name]]}; put the file of these weights beside them")


def to_damcha(
    params: Any, description: Mapping[str, Any], options: Mapping[str, Any], seed: int = 0
) -> tuple[Any, dict[str, Any]]:
  """Parameters and description of a full-width DAMCHA that computes the same function.

  Args:
    params: of the multi-head model.
    description: of the multi-head model.
    options: entries of `DAMCHA_DEFAULTS`.
    seed: of the initial values of what is new.

  Raises:
    OptionError: an unknown option, or a value that makes no sense.
  """
  options, features = known_options(options, DAMCHA_DEFAULTS), description["model"]["features"]
  if options["update_rank"] > features:
    raise OptionError(f"option update_rank={options['update_rank']} exceeds the width {features};"
                      " choose at most that")
  damcha = DamchaConfig(
      form="full_width",
      metric="generated",
      context="prefix",
      parameterization="rowsum",
      half_life=None,
      mix_slices=False,
      static_part=True,
      initializer=None,
      residual=None,
      normalize_context=None,
      block_ablation_train="full",
      block_ablation_eval="full",
      allow_future_leak=False,
      **options,
  )
  description = {**description, "attention": "damcha", "damcha": dataclasses.asdict(damcha)}
  converted = decoder_to_damcha(params, _sections(description), jax.random.key(seed))
  return nn.unbox(converted), description


def tokens(description: Mapping[str, Any]) -> jax.Array:
  """An example input."""
  del description
  return jnp.zeros((1, 1), jnp.int32)


def _sections(description: Mapping[str, Any]) -> Any:
  """What `make_decoder` reads of a config."""
  damcha = description["damcha"]
  return SimpleNamespace(
      model=freeze(description["model"], ModelConfig),
      context_length=description["context_length"],
      damcha=(None if damcha is None
              else freeze(upgraded({"damcha": damcha})["damcha"], DamchaConfig)),
  )
