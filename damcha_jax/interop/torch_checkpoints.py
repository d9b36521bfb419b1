"""Checkpoints of PyTorch models as this suite's models: the DAMCHA authors' and GPT-2.

The model is read off the names and shapes of the tensors. What these do not tell (the number of
heads of most models, the scales of a metric's blocks) is given as options, which for the authors'
models are the keyword arguments of their constructors.

    imported = import_checkpoint("vit", read_tensors("vit.pt"), num_heads=6)
    logits = imported.module.apply({"params": imported.params}, images)
"""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import Any, Callable, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.interop import authors_baselines
from damcha_jax.interop import authors_damcha
from damcha_jax.interop import authors_shapes
from damcha_jax.interop import authors_vit
from damcha_jax.interop import gpt2
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.names import from_arrays
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.names import same

Arrays = Mapping[str, np.ndarray]
Description = dict[str, Any]  # JSON-able; `Kind.make` builds the module from it

# Buffers that follow from the model's sizes, which torch saves along with the parameters.
_BUFFERS = re.compile(r"(.*\.)?(diag_mask|off_diag_mask|cached_M)|decoder\.pe\.pe")
# A generator that all layers share is saved once per layer, and once more by the decoder.
_SHARED = re.compile(
    r"(?:decoder\.shared_mlp_module|decoder\.layers\.\d{1,9}\.self_attn\._shared_mlp"
    r"|blocks\.\d{1,9}\.attn\._shared_mlp)\.(.*)"
)


class Imported(NamedTuple):
  """A checkpoint as a model of this suite."""

  module: nn.Module
  params: dict[str, Any]
  description: Description


class Kind(NamedTuple):
  """One family of models.

  Attributes:
    clean: tensors -> those that are parameters, each once.
    describe: (tensors, options, number of heads or None) -> description.
    defaults: the options and their defaults.
    make: description -> module.
    names: description -> names.
    inputs: description -> one example input.
  """

  clean: Callable[[Arrays], Arrays]
  describe: Callable[[Arrays, Mapping[str, Any], Optional[int]], Description]
  defaults: Mapping[str, Any]
  make: Callable[[Description], nn.Module]
  names: Callable[[Description], NameMap]
  inputs: Callable[[Description], jax.Array]


def import_checkpoint(
    kind: str,
    arrays: Arrays,
    options: Optional[Mapping[str, Any]] = None,
    *,
    num_heads: Optional[int] = None,
) -> Imported:
  """The tensors of a checkpoint as a model of this suite.

  Args:
    kind: a key of `KINDS`.
    arrays: every tensor by its torch name, e.g. from `read_tensors`.
    options: what the shapes do not tell.
    num_heads: H, where the shapes do not tell it.

  Raises:
    CheckpointNameError: names are missing or unknown (all are listed), shapes do not fit, or
      numbers are not finite.
    OptionError: an option is unknown, missing, or contradicted by the tensors.
  """
  arrays = KINDS[kind].clean(arrays)
  description = {"kind": kind, **KINDS[kind].describe(arrays, options or {}, num_heads)}
  names, template = KINDS[kind].names(description), abstract_params(description)
  return Imported(make_module(description), from_arrays(arrays, names, template), description)


def make_module(description: Description) -> nn.Module:
  """The module that a description stands for."""
  return KINDS[description["kind"]].make(description)


def abstract_params(description: Description) -> Any:
  """Shapes of the module's parameters."""
  module, inputs = make_module(description), KINDS[description["kind"]].inputs(description)
  return nn.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), inputs))["params"])


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
        if not same(arrays[original], arrays[name]):
          raise CheckpointNameError(
              f"{name} differs from {original}, though one generator is shared by all layers"
          )
        continue
    kept[name] = arrays[name]
  return kept


def _shared_order(name: str) -> tuple[bool, int]:
  index = re.search(r"\d+", name)
  return not name.startswith("decoder.shared_mlp_module"), int(index[0]) if index else 0


def _sizes(description: Description) -> tuple[Any, ...]:
  keys = ("features", "num_heads", "mlp_features", "num_layers", "widths", "options")
  return tuple(tuple(description[key]) if key == "widths" else description[key] for key in keys)


def _stack_names(names: Callable[..., NameMap]) -> Callable[[Description], NameMap]:
  return lambda description: names(
      description["num_layers"], len(description["widths"]), description["options"]
  )


def _make_vit(description: Description) -> nn.Module:
  own = {key: description[key] for key in ("image_size", "patch_size", "num_classes")}
  return authors_vit.make_vit(*_sizes(description), **own)


def _images(description: Description) -> jax.Array:
  size = description["image_size"]
  return jnp.zeros((1, size, size, description["num_channels"]))


def _make_baseline(description: Description) -> nn.Module:
  keys = ("baseline", "num_heads", "mlp_features", "num_layers", "options")
  return authors_baselines.make_baseline_transformer(*(description[key] for key in keys))


def _vectors(description: Description) -> jax.Array:
  return jnp.zeros((1, 2, description["features"]))


KINDS = {
    "transformer": Kind(
        without_copies,
        authors_shapes.describe_transformer,
        authors_shapes.TRANSFORMER_OPTIONS,
        lambda description: authors_damcha.make_transformer(*_sizes(description)),
        _stack_names(authors_damcha.transformer_names),
        _vectors,
    ),
    "vit": Kind(
        without_copies,
        authors_shapes.describe_vit,
        authors_vit.VIT_DEFAULTS,
        _make_vit,
        _stack_names(authors_vit.vit_names),
        _images,
    ),
    "baseline": Kind(
        without_copies,
        authors_shapes.describe_baseline,
        authors_baselines.BASELINE_DEFAULTS,
        _make_baseline,
        lambda description: authors_baselines.baseline_transformer_names(
            description["baseline"], description["num_layers"]
        ),
        _vectors,
    ),
    "gpt2": Kind(
        gpt2.clean,
        gpt2.describe,
        gpt2.GPT2_DEFAULTS,
        gpt2.make_module,
        gpt2.names,
        gpt2.tokens,
    ),
}
