"""The DAMCHA authors' versions of the comparators: our modules and their torch names."""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

from flax import linen as nn

from damcha_jax.attention import authors
from damcha_jax.interop.authors_damcha import decoder_names
from damcha_jax.interop.names import Leaf
from damcha_jax.interop.names import linear
from damcha_jax.interop.names import NameMap
from damcha_jax.interop.options import known_options
from damcha_jax.models.stack import BlockStack

BASELINE_DEFAULTS = dict(router_rank=None, local_window=8, expert_factor=2)
# Option -> (whose it is, its name here).
_OPTION_OF = dict(
    router_rank=("dcmha", "router_rank"),
    local_window=("mma", "window"),
    expert_factor=("moa", "expert_factor"),
)
_CLASSES = dict(
    tha=authors.AuthorsTHA,
    dcmha=authors.AuthorsDCMHA,
    colmha=authors.AuthorsColMHA,
    mma=authors.AuthorsMMA,
    moa=authors.AuthorsMoA,
)
BASELINES = tuple(_CLASSES)


def make_baseline_attention(
    baseline: str, num_heads: int, options: Mapping[str, Any], **module_fields: Any
) -> nn.Module:
  """The authors' attention named `baseline`, causal unless `module_fields` say otherwise.

  As in their constructors, options of other baselines are accepted without effect.

  Raises:
    OptionError: an unknown option.
  """
  options = known_options(options, BASELINE_DEFAULTS)
  own = {
      ours: options[name] for name, (owner, ours) in _OPTION_OF.items() if owner == baseline
  }
  return _CLASSES[baseline](num_heads, **{"causal": True, **own, **module_fields})


def baseline_attention_names(baseline: str) -> NameMap:
  """Torch names of the attention."""
  out = linear("out_proj", ("out",), (2, 1))
  if baseline == "moa":
    kernels = {f"W_{name[0]}": Leaf((name,), (1, 1, 1)) for name in ("query", "key", "value")}
    return {**kernels, **linear("router", ("router",), (1, 1)), **out}
  value = linear("W_v", ("value",), (1, 2))
  if baseline == "colmha":
    return {
        **linear("W_shared_q", ("query",), (1, 2), bias=False),
        **linear("W_shared_k", ("key",), (1, 2), bias=False),
        "combine_q": Leaf(("combine_query",), (1, 1)),
        "combine_k": Leaf(("combine_key",), (1, 1)),
        **value,
        **out,
    }
  query_and_key = {
      **linear("W_q", ("query",), (1, 2)),
      **linear("W_k", ("key",), (1, 2)),
  }
  own: dict[str, Leaf] = {}
  if baseline == "tha":
    own["pre_proj.weight"] = Leaf(("mix_scores",), (1, 1), order=(1, 0))
    own["post_proj.weight"] = Leaf(("mix_weights",), (1, 1), order=(1, 0))
  elif baseline == "dcmha":
    own.update(linear("router.0", ("router_hidden",), (1, 1)))
    own.update(linear("router.2", ("router",), (1, 1)))
    own.update(linear("gate_proj", ("gate",), (1, 1)))
  return {**query_and_key, **value, **own, **out}


def make_baseline_transformer(
    baseline: str,
    num_heads: int,
    mlp_features: int,
    num_layers: int,
    options: Mapping[str, Any],
) -> BlockStack:
  """The authors' BaselineTransformer(baseline, .., n_heads, d_ff, n_layers, **options).

  A causal post-LN stack over vectors to which `sinusoidal_positions` have been added. Unlike
  theirs, it gives padded queries no attention output.

  Raises:
    OptionError: an unknown option.
  """
  attention = functools.partial(make_baseline_attention, baseline, num_heads, options)
  return BlockStack(
      num_layers, attention, mlp_features, norm_placement="post", sow_layers=True
  )


def baseline_transformer_names(baseline: str, num_layers: int) -> NameMap:
  """Torch names of a BaselineTransformer."""
  return decoder_names(num_layers, baseline_attention_names(baseline))
