"""Talking-heads attention (Shazeer et al. 2020, arXiv 2003.02436; tensorflow/mesh).

    J_n = X W_Q^n (X W_K^n)^T                    n of hk heads; no 1 / sqrt(K)
    W_m = softmax(mask(sum_n J_n P_l[n, m]))     m of h heads
    y = sum_v (sum_m W_m P_w[m, v]) X W_V^v W_O^v   v of hv heads

The heads talk to each other before and after the softmax, and may be of another number each time.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

from flax import linen as nn
import jax.numpy as jnp

from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.metric.options import check_integers


class TalkingHeadsAttention(AttentionBase):
  """Talking-heads attention; 4 D^2 + hk h + h hv parameters where all heads make up the width D.

  Without scaled scores, without biases, and dropout drops a key for all queries of a row and head
  (with `broadcast_dropout`), as in the original. Initial values are the original's, whatever the
  model's (unless `kernel_init` is given): a normal distribution cut off at 2 sigma, sigma not
  corrected for the cut, with sigma 1 / sqrt(D K) for W_Q, 1 / sqrt(D) for W_K and W_V,
  1 / sqrt(hv K) for W_O, 1 / sqrt(hk) for P_l and 1 / sqrt(h) for P_w.

  A mask or bias that tells heads apart has h heads.

  Attributes beyond AttentionBase's:
    num_key_heads: hk, of queries and keys. None: num_heads.
    num_softmax_heads: h. None: num_heads.
    num_value_heads: hv. None: num_heads.
    key_head_features, value_head_features: K of a key or value head. None: the width over their
      number.
    query_chunk: queries whose scores are in memory at a time; None: all.
  """

  num_key_heads: Optional[int] = None
  num_softmax_heads: Optional[int] = None
  num_value_heads: Optional[int] = None
  key_head_features: Optional[int] = None
  value_head_features: Optional[int] = None
  query_chunk: Optional[int] = 128
  use_bias: bool = False
  kernel_init: Optional[Callable] = None

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "num_key_heads", "num_softmax_heads", "num_value_heads",
                   "key_head_features", "value_head_features", "query_chunk", optional=True)

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    num_key_heads = self.num_key_heads or self.num_heads
    num_softmax_heads = self.num_softmax_heads or self.num_heads
    num_value_heads = self.num_value_heads or self.num_heads
    features = inputs.query_BTD.shape[-1]
    key_features = self.key_head_features or self.head_features(
        self.qkv_features or features, num_key_heads
    )
    value_features = self.value_head_features or self.head_features(
        self.qkv_features or features, num_value_heads
    )

    def project(name: str, x: Array, num_heads: int, head_features: int, fan_in: int) -> Array:
      init = self.kernel_init or _cut_normal(fan_in)
      return self.project(name, num_heads, head_features, kernel_init=init)(x)

    query_BTNK = project(
        "query", inputs.query_BTD, num_key_heads, key_features, features * key_features
    )
    key_BSNK = project(
        "key", inputs.key_BSD, num_key_heads, key_features, inputs.key_BSD.shape[-1]
    )
    value_BSVK = project(
        "value", inputs.value_BSD, num_value_heads, value_features, inputs.value_BSD.shape[-1]
    )
    scores_NM = self.weight("scores_kernel", _cut_normal(num_key_heads),
                            (num_key_heads, num_softmax_heads), None, None)
    weights_MV = self.weight("weights_kernel", _cut_normal(num_softmax_heads),
                             (num_softmax_heads, num_value_heads), None, None)

    def mix(kernel_NM: Array) -> Callable:
      return lambda x_BNTS, rows: jnp.einsum(
          "bnts,nm->bmts", x_BNTS, kernel_NM.astype(x_BNTS.dtype), precision=self.precision
      )

    output_BTVK = self.attend(
        query_BTNK,
        self.remember(key_BSNK, value_BSVK, inputs),
        inputs,
        deterministic,
        dropout_rng,
        sow_weights,
        scale=1.0,
        compose_scores=mix(scores_NM),
        compose_weights=mix(weights_MV),
        weight_heads=num_value_heads,
        query_chunk=self.query_chunk,
    )
    return self.project_out(output_BTVK, inputs, _cut_normal(num_value_heads * value_features))

  def _dropout_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, shape[3]) if self.broadcast_dropout else shape


def _cut_normal(fan_in: int) -> Callable:
  return nn.initializers.truncated_normal(1 / math.sqrt(fan_in))
