"""The comparators as the DAMCHA authors' repository simplifies them (`models/baselines.py`).

Tables 1 and 2 of the paper compare with these. Each class says how it differs from the attention
that it is named for, which has its own module. All have biased projections, scores scaled by
1 / sqrt(K), and initial values of their own parts as in the authors' code.
"""

from __future__ import annotations

import math
from typing import Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention import core
from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.attention.damcha import FutureLeakError
from damcha_jax.attention.mha import project_heads
from damcha_jax.attention.mma import hide_from_heads
from damcha_jax.metric.generator import INITIALIZERS
from damcha_jax.metric.options import check_integers


class AuthorsTHA(AttentionBase):
  """Heads mixed by one matrix before and one after the softmax.

    y = concat_g (sum_h softmax(sum_h' (Q_h' K_h'^T / sqrt(K)) P_h'h) R_hg) V_g  W_O

  The original has no biases and no 1 / sqrt(K), starts its mixers at random, not at the identity,
  and may have other numbers of heads on either side of a mixer.
  """

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    identity = lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)
    shape = (self.num_heads, self.num_heads)
    before_HG = self.weight("mix_scores", identity, shape, "heads", None)
    after_HG = self.weight("mix_weights", identity, shape, "heads", None)
    mix = lambda mixer_HG: lambda x_BHTS, rows: jnp.einsum("bhts,hg->bgts", x_BHTS, mixer_HG)
    return self.attend_and_project(
        *project_heads(self, inputs),
        inputs,
        deterministic,
        dropout_rng,
        sow_weights,
        compose_scores=mix(before_HG),
        compose_weights=mix(after_HG),
    )


class AuthorsDCMHA(AttentionBase):
  """Scores mixed across heads by weights that each query makes for itself.

    A = Q K^T / sqrt(K);  a = softmax_h(W_2 tanh(W_1 x_t));  g = sigmoid(W_g x_t)
    A'_gts = g_tg sum_h a_thg A_hts + (1 - g_tg) A_gts;  y = concat_g softmax(A'_g) V_g  W_O

  The original also mixes after the softmax and by what the keys make, adds instead of blending, and
  has low-rank mixing matrices without a softmax.

  Attributes:
    router_rank: width of the tanh layer; None means max(4, H / 2).
  """

  router_rank: Optional[int] = None

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "router_rank", optional=True)

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    x_BTD, num_heads = inputs.query_BTD, self.num_heads
    rank = self.router_rank or max(4, num_heads // 2)
    hidden_BTR = nn.tanh(_torch_dense(self, "router_hidden", rank, "embed", None)(x_BTD))
    mixing = _torch_dense(self, "router", num_heads**2, None, None)(hidden_BTR)
    mixing_BTHG = mixing.reshape(*x_BTD.shape[:2], num_heads, num_heads)
    mixing_BTHG = jax.nn.softmax(_at_least_float32(mixing_BTHG), axis=-2)
    gate_BTG = _torch_dense(self, "gate", num_heads, "embed", "heads")(x_BTD)
    gate_BTG = nn.sigmoid(_at_least_float32(gate_BTG))

    def compose(scores_BHTS: Array, rows: core.Rows) -> Array:
      composed_BGTS = jnp.einsum("bthg,bhts->bgts", rows(mixing_BTHG), scores_BHTS)
      gate_BGT1 = jnp.swapaxes(rows(gate_BTG), 1, 2)[..., None]
      return gate_BGT1 * composed_BGTS + (1.0 - gate_BGT1) * scores_BHTS

    return self.attend_and_project(
        *project_heads(self, inputs),
        inputs,
        deterministic,
        dropout_rng,
        sow_weights,
        compose_scores=compose,
    )


class AuthorsColMHA(AttentionBase):
  """Queries and keys of every head are mixtures of all heads' projections.

    q_g = sum_h C_gh x W_Q^h;  k_g = sum_h E_gh x W_K^h
    y = concat_g softmax(q_g k_g^T / sqrt(K)) V_g  W_O

  C and E start at I + 0.01 N. The original instead lets all heads share the columns of one pair of
  projections and reweighs these per head; its shared dimension is free.
  """

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    head_features = self.head_features(self.qkv_features or inputs.query_BTD.shape[-1])

    def mixed(name: str, x: Array) -> Array:
      init = lambda key, shape, dtype: (
          jnp.eye(*shape, dtype=dtype) + 0.01 * jax.random.normal(key, shape, dtype)
      )
      shape = (self.num_heads, self.num_heads)
      mixer_GH = self.weight(f"combine_{name}", init, shape, "heads", None)
      projected_BTHK = self.project(name, head_features=head_features, use_bias=False)(x)
      return jnp.einsum("gh,bthk->btgk", mixer_GH, projected_BTHK)

    return self.attend_and_project(
        mixed("query", inputs.query_BTD),
        mixed("key", inputs.key_BSD),
        self.project("value", head_features=head_features)(inputs.value_BSD),
        inputs,
        deterministic,
        dropout_rng,
        sow_weights,
    )


class AuthorsMMA(AttentionBase):
  """Multi-head attention whose heads see different parts of the sequence.

    head h, by h mod 4:  0 and 2: all keys up to the query;  1: the last `window` of them;
    3: the query's own key and all after it;  with `causal`, its own alone (so y = v)

  The original has four blocks of heads, and a window to both sides in an encoder.

  Attributes:
    window: number of keys that local heads see, the query's own included.
    allow_future_leak: let the heads of group 3 see the future although the module is causal, as the
      authors' first public code did.
  """

  window: int = 8
  allow_future_leak: bool = False

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "window")
    if self.allow_future_leak and self.decode:
      raise FutureLeakError("allow_future_leak cannot decode: the future is not known yet")

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    if not inputs.is_self:
      raise ValueError(
          "authors_mma compares positions within one sequence; for cross-attention use mha"
      )
    query_BTHK, key_BSHK, value_BSHK = project_heads(self, inputs)
    position_BT = self.positions(inputs)
    keys = self.remember(
        key_BSHK,
        value_BSHK,
        inputs,
        hide_future=not self.allow_future_leak,
        position=jnp.broadcast_to(position_BT, query_BTHK.shape[:2]),
    )
    past_BTS = position_BT[:, :, None] - keys.extra["position"][:, None, :]
    seen_GBTS = jnp.stack([past_BTS >= 0, (past_BTS >= 0) & (past_BTS < self.window),
                           past_BTS >= 0, past_BTS <= 0])
    group_H = jnp.arange(self.num_heads) % len(seen_GBTS)
    group_mask_BHTS = jnp.swapaxes(seen_GBTS[group_H], 0, 1)
    keys = hide_from_heads(keys, group_mask_BHTS)
    output_BTHK = self.attend(
        query_BTHK, keys, inputs, deterministic, dropout_rng, sow_weights
    )
    return self.project_out(output_BTHK, inputs)


class AuthorsMoA(AttentionBase):
  """H of E = H `expert_factor` heads per token, chosen by a router.

    e_1 .. e_H = the experts with the highest r_e = x_t w_e + b_e;  g = softmax(r_e1 .. r_eH)
    y_t = concat_j (g_j o_t^{e_j})  W_O,  o^e = softmax(Q_e K_e^T / sqrt(K)) V_e

  All experts attend, so nothing is saved; equal ranks, not equal experts, share a part of W_O. The
  original's experts share keys and values, have an output projection each, are gated by the softmax
  over all, and are balanced by auxiliary losses. The chosen experts and their gates are sown as
  `top_experts` and `gates`.

  Attributes:
    expert_factor: experts per head.
  """

  expert_factor: int = 2

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "expert_factor")

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    num_experts = self.num_heads * self.expert_factor
    features = self.qkv_features or inputs.query_BTD.shape[-1]

    def project(name: str, x_BTD: Array) -> Array:
      shape = (num_experts, x_BTD.shape[-1], self.head_features(features))
      kernel_EDK = self.weight(name, _flat_xavier_uniform, shape, "heads", "embed", "head_dim")
      x_BTD = x_BTD if self.dtype is None else x_BTD.astype(self.dtype)
      return jnp.einsum("btd,edk->btek", x_BTD, kernel_EDK, precision=self.precision)

    router = _torch_dense(self, "router", num_experts, "embed", None)
    logits_BTE = _at_least_float32(router(inputs.query_BTD))
    logits_BTH, expert_BTH = jax.lax.top_k(logits_BTE, self.num_heads)
    gate_BTH = jax.nn.softmax(logits_BTH)
    self.sow("intermediates", "top_experts", expert_BTH)
    self.sow("intermediates", "gates", gate_BTH)
    keys = self.remember(
        project("key", inputs.key_BSD), project("value", inputs.value_BSD), inputs
    )
    output_BTEK = self.attend(
        project("query", inputs.query_BTD), keys, inputs, deterministic, dropout_rng, sow_weights
    )
    output_BTHK = jnp.take_along_axis(output_BTEK, expert_BTH[..., None], axis=2)
    gate_BTH = gate_BTH.astype(output_BTHK.dtype)
    return self.project_out(output_BTHK * gate_BTH[..., None], inputs)


def _torch_dense(
    attention: AttentionBase, name: str, features: int, rows: Optional[str], columns: Optional[str]
):
  """A linear layer with PyTorch's initial values."""

  def dense(x: Array) -> Array:
    initializers, fan_in = INITIALIZERS["torch"], x.shape[-1]
    return nn.Dense(
        features,
        dtype=attention.dtype,
        param_dtype=attention.param_dtype,
        kernel_init=attention.axes(initializers.hidden_kernel(fan_in), rows, columns),
        bias_init=attention.axes(initializers.hidden_bias(fan_in), columns),
        precision=attention.precision,
        name=name,
    )(x)

  return dense


def _flat_xavier_uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Glorot's bound for [E, D, K] read as one matrix of E D rows."""
  bound = math.sqrt(6 / (math.prod(shape[:-1]) + shape[-1]))
  return jax.random.uniform(key, shape, dtype, -bound, bound)


def _at_least_float32(x: Array) -> Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
