"""Dynamically composable multi-head attention (Xiao et al. 2024, arXiv 2405.08553; DCFormer).

    y_t = sum_s compose(softmax(mask(compose(q_t . k_s / sqrt(K), pre))), post) v_s

    compose(A)[n] = A[n] + sum_m A[m] W[m, n]                     static
                  + sum_i (sum_m A[m] w1[i, m]) w2[i, n]          dynamic, for query t and for key s
                  + A[n] g[n]                                     gate, for query t and for key s

with w1, w2 and g made from the query's or the key's own token, in four slots: before and after the
softmax, for queries and for keys:

    w1, w2 = rms_norm(u_1..R), u_R+1..2R,  u = gelu(x W_1) W_2,  g = tanh(x W_g)

Scores are composed before they are masked, and composed weights do not add up to 1.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import masks
from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.attention.core import Rows
from damcha_jax.attention.mha import project_heads
from damcha_jax.metric.options import check_integers

Side = dict[str, Array]  # of queries or keys: 'w1', 'w2' [B, T, R, H] and 'gate' [B, T, H], if any
STAGES = ("pre", "post")  # before and after the softmax
_EPSILON = 1e-6


class DynamicallyComposableAttention(AttentionBase):
  """DCMHA; 4 D^2 + 20 D H + 64 H^2 parameters at rank 2, 2 H^2 more with static, 2 K with qk_norm.

  Initial values are the original's, whatever the model's (unless `kernel_init` is given):
  projections of variance 1 / fan-in, W_1 of 2 / (D + 2RH), and the rest so small that heads hardly
  mix at first. No biases, as in its language models; its Vision Transformer has them (`use_bias`),
  the static part and qk_norm='layer'.

  Cross-attention makes the compositions of keys from `inputs_k`; no window and no rope there.

  Attributes beyond AttentionBase's:
    static, dynamic, gate: which parts of the composition there are.
    rank: R.
    gelu: 'tanh' (the Flax code) or 'exact' (the PyTorch code).
    qk_norm: None, or 'rms' or 'layer' to normalise queries and keys, without bias.
    rope: rotate queries and keys by their position, halves of a head paired, base 10000.
    window: how many keys, its own included, a query sees; None: all.
    query_chunk: queries whose scores are in memory at a time; None: all.
  """

  static: bool = False
  dynamic: bool = True
  gate: bool = True
  rank: int = 2
  gelu: str = "tanh"
  qk_norm: Optional[str] = None
  rope: bool = False
  window: Optional[int] = None
  query_chunk: Optional[int] = 128
  use_bias: bool = False
  kernel_init: Callable = nn.initializers.variance_scaling(1.0, "fan_in", "normal")

  def __post_init__(self):
    super().__post_init__()
    if self.gelu not in ("tanh", "exact"):
      raise ValueError(f"gelu {self.gelu!r} is neither 'tanh' nor 'exact'")
    if self.qk_norm not in (None, "rms", "layer"):
      raise ValueError(f"qk_norm {self.qk_norm!r} is neither None nor 'rms' nor 'layer'")
    check_integers(self, "rank")
    check_integers(self, "window", "query_chunk", optional=True)
    if self.window is not None and self.causal is False:
      raise ValueError("window counts keys up to the query's own: it needs causal=True, or a mask")

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    if not inputs.is_self and (self.rope or self.window is not None):
      raise ValueError("rope and window need positions in one text, which cross-attention has not;"
                       " use rope=False and window=None")
    query_BTHK, key_BSHK, value_BSHK = project_heads(self, inputs)
    query_BTHK = self._norm("query_norm", query_BTHK)
    key_BSHK = self._norm("key_norm", key_BSHK)
    positions_BT = self.positions(inputs)
    if self.rope:
      query_BTHK, key_BSHK = rotate(query_BTHK, positions_BT), rotate(key_BSHK, positions_BT)
    queries, keys = Composition(
        self.num_heads, self.rank, self.static, self.dynamic, self.gate, self.gelu,
        self.partitioned, self.dtype, self.param_dtype, name="composition",
    )(inputs.query_BTD, inputs.key_BSD)
    statics = {stage: side.pop("static", None) for stage, side in queries.items()}
    extra = {f"{stage}_{name}": x for stage in STAGES for name, x in keys[stage].items()}
    if self.window is not None:
      extra["position"] = jnp.broadcast_to(positions_BT, inputs.query_BTD.shape[:2])
    remembered = self.remember(key_BSHK, value_BSHK, inputs, **extra)
    extra = remembered.extra
    if self.window is not None:
      distance_BTS = positions_BT[:, :, None] - extra["position"][:, None, :]
      mask_BHTS = masks.combine(remembered.mask_BHTS, (distance_BTS < self.window)[:, None])
      remembered = remembered._replace(mask_BHTS=mask_BHTS)

    def composed(stage: str) -> Callable:
      key_side = {name: extra[f"{stage}_{name}"] for name in keys[stage]}

      def hook(x_BHTS: Array, rows: Rows) -> Array:
        return compose(x_BHTS, jax.tree.map(rows, queries[stage]), key_side, statics[stage])

      return hook

    output_BTHK = self.attend(
        query_BTHK, remembered, inputs, deterministic, dropout_rng, sow_weights,
        compose_scores=composed("pre"), compose_weights=composed("post"),
        query_chunk=self.query_chunk,
    )
    return self.project_out(output_BTHK, inputs)

  def _norm(self, name: str, x_BTHK: Array) -> Array:
    if self.qk_norm is None:
      return x_BTHK
    options = dict(epsilon=_EPSILON, dtype=self.dtype, param_dtype=self.param_dtype, name=name,
                   scale_init=self.axes(nn.initializers.ones, "norm"))
    if self.qk_norm == "rms":
      return nn.RMSNorm(**options)(x_BTHK)
    return nn.LayerNorm(use_bias=False, **options)(x_BTHK)


class Composition(nn.Module):
  """Makes what composes heads: {'pre': Side, 'post': Side} of the queries, and of the keys.

  The queries' sides also hold 'static' W [H, H], if there is one.
  """

  num_heads: int
  rank: int = 2
  static: bool = False
  dynamic: bool = True
  gate: bool = True
  gelu: str = "tanh"
  partitioned: bool = False
  dtype: Optional[jnp.dtype] = None
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, query_BTD: Array, key_BSD: Array) -> tuple[dict[str, Side], dict[str, Side]]:
    features, num_heads = query_BTD.shape[-1], self.num_heads
    if key_BSD.shape[-1] != features:
      raise ValueError(f"queries and keys share what composes heads, but have {features} and"
                       f" {key_BSD.shape[-1]} features; project one of them")
    hidden = 2 * self.rank * num_heads
    kernels = {}
    if self.dynamic:
      # Slots: pre queries, pre keys, post queries, post keys.
      kernels["in"] = self._kernel("in_kernel", math.sqrt(2 / (features + hidden)),
                                   (features, 4, hidden), "embed", None, "mlp")
      sigma = 0.02 / (math.sqrt(hidden) * (num_heads + self.rank))
      kernels["out"] = self._kernel("out_kernel", sigma, (4, hidden, 2 * self.rank, num_heads),
                                    None, "mlp", None, None)
    if self.gate:
      kernels["gate"] = self._kernel("gate_kernel", 0.005 * math.sqrt(2 / (features + num_heads)),
                                     (features, 4, num_heads), "embed", None, None)
    queries, keys = self._sides(query_BTD, kernels, 0), self._sides(key_BSD, kernels, 1)
    if self.static:
      for stage in STAGES:
        queries[stage]["static"] = self._kernel(
            f"{stage}_kernel", 0.1 / math.sqrt(num_heads), (num_heads, num_heads), None, None)
    return queries, keys

  def _sides(self, x_BTD: Array, kernels: dict[str, Array], first: int) -> dict[str, Side]:
    sides = {stage: {} for stage in STAGES}
    if self.dynamic:
      slots = slice(first, None, 2)
      hidden_BTCJ = jnp.einsum("btd,dcj->btcj", x_BTD, kernels["in"][:, slots])
      hidden_BTCJ = jax.nn.gelu(hidden_BTCJ, approximate=self.gelu == "tanh")
      w_BTCRH = jnp.einsum("btcj,cjrh->btcrh", hidden_BTCJ, kernels["out"][slots])
      w1_BTCRH, w2_BTCRH = jnp.split(w_BTCRH, 2, axis=-2)
      w1_BTCRH = _rms_normalised(w1_BTCRH)
      for index, stage in enumerate(STAGES):
        sides[stage].update(w1=w1_BTCRH[:, :, index], w2=w2_BTCRH[:, :, index])
    if self.gate:
      gate_BTCH = jnp.tanh(jnp.einsum("btd,dch->btch", x_BTD, kernels["gate"][:, first::2]))
      for index, stage in enumerate(STAGES):
        sides[stage]["gate"] = gate_BTCH[:, :, index]
    return sides

  def _kernel(
      self, name: str, sigma: float, shape: tuple[int, ...], *axes: Optional[str]
  ) -> Array:
    init = nn.initializers.normal(sigma)
    if self.partitioned:
      init = nn.with_logical_partitioning(init, axes)
    kernel = self.param(name, init, shape, self.param_dtype)
    return kernel if self.dtype is None else kernel.astype(self.dtype)


def compose(
    x_BMTS: Array, query: Side, key: Side, static_MN: Optional[Array] = None
) -> Array:
  """Scores or weights with their heads mixed, [B, H, T, S] -> [B, H, T, S]: the equation above."""
  query, key = (jax.tree.map(lambda w: w.astype(x_BMTS.dtype), side) for side in (query, key))
  composed_BNTS = x_BMTS
  if static_MN is not None:
    composed_BNTS += jnp.einsum("bmts,mn->bnts", x_BMTS, static_MN.astype(x_BMTS.dtype))
  if "w1" in query:
    for row in range(query["w1"].shape[2]):  # a loop keeps intermediates at [B, T, S]
      of_query_BTS = jnp.einsum("bmts,btm->bts", x_BMTS, query["w1"][:, :, row])
      of_key_BTS = jnp.einsum("bmts,bsm->bts", x_BMTS, key["w1"][:, :, row])
      composed_BNTS += jnp.einsum("bts,btn->bnts", of_query_BTS, query["w2"][:, :, row])
      composed_BNTS += jnp.einsum("bts,bsn->bnts", of_key_BTS, key["w2"][:, :, row])
  if "gate" in query:
    gate_BHT, gate_BHS = (side["gate"].swapaxes(1, 2) for side in (query, key))
    composed_BNTS += x_BMTS * gate_BHT[..., None] + x_BMTS * gate_BHS[:, :, None]
  return composed_BNTS


def rotate(x_BTHK: Array, positions_BT: Array) -> Array:
  """Rotary positions: features k and k + K/2 turn by the angle position / 10000^(2k/K)."""
  half = x_BTHK.shape[-1] // 2
  if x_BTHK.shape[-1] % 2:
    raise ValueError(f"rope pairs the features of a head, whose number {x_BTHK.shape[-1]} is odd")
  wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
  rates_K = 10000.0 ** (-jnp.arange(half, dtype=wide) / half)
  angles_BTHK = positions_BT[:, :, None, None].astype(wide) * rates_K
  cos, sin = jnp.cos(angles_BTHK), jnp.sin(angles_BTHK)
  first, second = jnp.split(x_BTHK.astype(wide), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTHK.dtype)


def _rms_normalised(x: Array) -> Array:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + _EPSILON)
  return (wide * scale).astype(x.dtype)
