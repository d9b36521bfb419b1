"""Formulas for what one attention layer costs, to hold against what `complexity` counts.

T tokens of one sequence, width D, H heads, K = D / H. FLOPs are those of matrix products, 2 for a
multiply-add, over all of the T x T scores (a causal mask halves nothing here). They are written
from each attention's definition, and know nothing of the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple, Optional


class Size(NamedTuple):
  """T, D and H of one attention layer."""

  length: int
  features: int
  num_heads: int


class Form(NamedTuple):
  """Parameters and matrix-product FLOPs."""

  params: int
  flops: int

  def __add__(self, other: Form) -> Form:
    return Form(self.params + other.params, self.flops + other.flops)


def mha(size: Size, use_bias: bool = False) -> Form:
  """4 D^2 parameters; 8 T D^2 + 4 T^2 D."""
  T, D, _ = size
  return Form(4 * D**2 + 4 * D * use_bias, 8 * T * D**2 + 4 * T**2 * D)


def damcha(size: Size, use_bias: bool = False) -> Form:
  """Head-slice form without its generator: 2 D^2 parameters; 4 T D^2 + 2 T D K + 4 T^2 D."""
  T, D, H = size
  return Form(2 * D**2 + 2 * D * use_bias, 4 * T * D**2 + 2 * T * D * (D // H) + 4 * T**2 * D)


def generator(
    size: Size,
    widths: Sequence[int],
    parameterization: str = "blocks",
    fuse_rowsum: bool = True,
    num_contexts: int = 1,
) -> Form:
  """f_theta, D -> widths -> M: sum of fan-in * fan-out, twice that per context.

  The last layer has D^2 outputs, or D K of them where RowSum is stored ('rowsum') or fused.
  """
  _, D, H = size
  hidden = sum(a * b for a, b in zip([D, *widths], widths))
  fan_in, summed = [D, *widths][-1], D * D // H
  stored = summed if parameterization == "rowsum" else D**2
  computed = summed if fuse_rowsum else stored
  return Form(
      hidden + sum(widths) + (fan_in + 1) * stored,
      2 * num_contexts * (hidden + fan_in * computed),
  )


def layer_bias(size: Size, rank: int, num_layers: int) -> Form:
  """(P * s_l) Q^T: parameters of all the layers, FLOPs of one, 2 r D^2."""
  _, D, _ = size
  return Form(2 * D * rank + num_layers * rank, 2 * rank * D**2)


def tha(size: Size, use_bias: bool = False) -> Form:
  """mha + 2 H^2 parameters; mha + 4 T^2 H^2."""
  T, _, H = size
  return mha(size, use_bias) + Form(2 * H**2, 4 * T**2 * H**2)


def dcmha(size: Size, use_bias: bool = False, static: bool = False) -> Form:
  """mha + 20 D H + 64 H^2 parameters; mha + 40 T D H + 128 T H^2 + 32 H T^2.

  Its gates do 8 H T^2 operations more, elementwise. The static part adds 2 H^2 parameters and
  4 T^2 H^2.
  """
  T, D, H = size
  dynamic = Form(20 * D * H + 64 * H**2, 40 * T * D * H + 128 * T * H**2 + 32 * H * T**2)
  return mha(size, use_bias) + dynamic + Form(2 * H**2 * static, 4 * T**2 * H**2 * static)


def colmha(
    size: Size,
    key_features: Optional[int] = None,
    use_bias: bool = True,
    content_bias: bool = False,
) -> Form:
  """2 D Dk + H Dk + 2 D^2 parameters; 4 T D Dk + 2 T^2 H Dk + 2 T^2 D + 4 T D^2, Dk = D by default.

  The content bias adds D H parameters and 2 T D H, and takes the place of those of keys and
  queries; biases are 2 D, and these 2 Dk.
  """
  T, D, H = size
  Dk = key_features or D
  key_biases = 0 if content_bias else 2 * Dk
  shared = Form(2 * D * Dk + H * Dk, 4 * T * D * Dk + 2 * T**2 * H * Dk)
  values = Form(2 * D**2 + (2 * D + key_biases) * use_bias, 4 * T * D**2 + 2 * T**2 * D)
  return shared + values + Form(D * H * content_bias, 2 * T * D * H * content_bias)


def moa(
    size: Size,
    num_experts: Optional[int] = None,
    num_chosen: Optional[int] = None,
    head_features: Optional[int] = None,
    dense: bool = False,
) -> Form:
  """D E + 2 E D d + 2 D d parameters; 2 T D E + 4 T D d k + 4 T D d + 4 T^2 k d.

  E = 2H experts, k = H of them chosen per token, each d = K wide; one key and one value for all. A
  `dense` dispatch projects with all E experts.
  """
  T, D, H = size
  E, k, d = num_experts or 2 * H, num_chosen or H, head_features or D // H
  projected = E if dense else k
  return Form(
      D * E + 2 * E * D * d + 2 * D * d,
      2 * T * D * E + 4 * T * D * d * projected + 4 * T * D * d + 4 * T**2 * k * d,
  )


def authors_dcmha(size: Size, use_bias: bool = True) -> Form:
  """A router D -> R = max(4, H/2) -> H^2 with a gate D -> H, and one mixing of the scores."""
  T, D, H = size
  R = max(4, H // 2)
  router = D * R + R * H**2 + D * H
  return mha(size, use_bias) + Form(router + R + H**2 + H, 2 * T * router + 2 * T**2 * H**2)


def authors_colmha(size: Size, use_bias: bool = True) -> Form:
  """Two H x H matrices that mix heads of queries and keys, which have no biases: mha + 4 T D H."""
  T, D, H = size
  return mha(size) + Form(2 * D * use_bias + 2 * H**2, 4 * T * D * H)


def authors_moa(size: Size, use_bias: bool = True) -> Form:
  """2H experts without biases computed densely: 14 T D^2 + 8 T^2 D + 4 T D H."""
  T, D, H = size
  return Form(
      7 * D**2 + 2 * D * H + (D + 2 * H) * use_bias,
      14 * T * D**2 + 8 * T**2 * D + 4 * T * D * H,
  )


# What the attentions of the paper cost with the defaults of their modules, by their names in
# `ATTENTIONS`; `damcha` without its generator.
FORMS: dict[str, Callable[..., Form]] = {
    "mha": functools.partial(mha, use_bias=True),
    "damcha": functools.partial(damcha, use_bias=True),
    "tha": tha,
    "dcmha": dcmha,
    "colmha": colmha,
    "moa": functools.partial(moa, dense=True),
    "mma": functools.partial(mha, use_bias=True),
    "authors_tha": functools.partial(tha, use_bias=True),
    "authors_dcmha": authors_dcmha,
    "authors_colmha": authors_colmha,
    "authors_moa": authors_moa,
    "authors_mma": functools.partial(mha, use_bias=True),
}


def stack(layer: Form, size: Size, num_layers: int, mlp_features: int) -> Form:
  """N layers with their feed-forward parts, D -> F -> D, and two LayerNorms each."""
  T, D, _ = size
  F = mlp_features
  feed_forward = Form(2 * D * F + F + D + 4 * D, 4 * T * D * F)
  return Form(*(num_layers * part for part in layer + feed_forward))
