"""Mixed multi-head self-attention (Cui et al. 2019, WNGT): MHA whose heads see differently.

    y = concat_i softmax(mask_i(X W_Q^i (X W_K^i)^T / sqrt(K))) X W_V^i  W_O

A quarter of the heads each sees

    global   every token             local    tokens at a distance of at most w
    past     tokens up to the own    future   tokens from the own on

all of them the own token. In a causal decoder each is cut down to the past, so that a future head
sees its own token alone: o = v.
"""

from __future__ import annotations

from typing import Callable, Optional

from flax import linen as nn
import jax.numpy as jnp

from damcha_jax.attention import masks
from damcha_jax.attention.base import Array, AttentionBase, Inputs, Keys
from damcha_jax.attention.mha import project_heads
from damcha_jax.metric.options import check_integers

GROUPS = ("global", "local", "past", "future")


class MixedMultiHeadAttention(AttentionBase):
  """MMA; the parameters of multi-head attention, biases included: 4 D^2 + 4 D.

  Which of the paper's "forward" and "backward" heads looks ahead differs between sources, so groups
  are named by what they see. Groups are blocks of consecutive heads. Initial values are
  Xavier-uniform, whatever the model's (unless `kernel_init` is given). Distances count real tokens
  of the own row or segment. Self-attention only.

  Attributes beyond AttentionBase's:
    local_window: w.
    groups: what the first, second, .. group of heads sees; four of GROUPS, each once.
  """

  local_window: int = 8
  groups: tuple[str, ...] = GROUPS
  kernel_init: Callable = nn.initializers.xavier_uniform()

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "local_window", least=0)  # 0: the own token alone
    if sorted(map(str, self.groups)) != sorted(GROUPS):
      raise ValueError(f"groups {self.groups} must hold each of {', '.join(GROUPS)} once")
    if self.num_heads % len(GROUPS):
      raise ValueError(f"num_heads {self.num_heads} is not a multiple of the {len(GROUPS)} groups"
                       " of mixed multi-head attention; choose one that is")

  @nn.compact
  def __call__(
      self,
      inputs_q: Array,
      inputs_k: Optional[Array] = None,
      inputs_v: Optional[Array] = None,
      *,
      mask: Optional[Array] = None,
      padding_mask: Optional[Array] = None,
      query_padding_mask: Optional[Array] = None,
      key_padding_mask: Optional[Array] = None,
      segment_ids: Optional[Array] = None,
      bias: Optional[Array] = None,
      deterministic: Optional[bool] = None,
      dropout_rng: Optional[Array] = None,
      sow_weights: bool = False,
      source_mask: Optional[Array] = None,
  ) -> Array:
    """As AttentionBase; `source_mask` [B, T] marks a prefix whose tokens see each other both ways.

    That is for text that is written after a source: with causal=True, tokens of the source see the
    whole source through the global, local and future heads. Decoding takes in a source in one call.
    """
    inputs = self.prepare(
        inputs_q, inputs_k, inputs_v, mask, padding_mask, query_padding_mask, key_padding_mask,
        segment_ids, bias,
    )
    if not inputs.is_self:
      raise ValueError("mixed multi-head attention orders the tokens of one text; use mha for"
                       " cross-attention")
    return self.compute(inputs, deterministic, dropout_rng, sow_weights, source_mask)

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
      source_mask: Optional[Array] = None,
  ) -> Array:
    shape = inputs.query_BTD.shape[:2]
    query_BTHK, key_BSHK, value_BSHK = project_heads(self, inputs)
    position_BT = self.positions(inputs)
    # Positions do not order tokens that count for nothing, nor two runs of one segment; columns do.
    column_T = jnp.arange(shape[1]) + (
        self.get_variable("cache", "cache_index") if self._decoding() else 0)
    token = {"position": jnp.broadcast_to(position_BT, shape),
             "column": jnp.broadcast_to(column_T, shape)}
    if self.decode:
      token["source"] = jnp.zeros(shape, bool)
    if source_mask is not None:
      token["source"] = source_mask.astype(bool)
    keys = self.remember(key_BSHK, value_BSHK, inputs, hide_future=False, **token)
    visible_BGTS = visible_to_groups(
        self.groups, self.local_window, position_BT, keys.extra["position"])
    if self.causal or self.decode:
      visible_BGTS &= self._not_future(token, keys.extra)[:, None]
    heads = jnp.repeat(visible_BGTS, self.num_heads // len(GROUPS), axis=1)
    keys = hide_from_heads(keys, heads)
    output_BTHK = self.attend(query_BTHK, keys, inputs, deterministic, dropout_rng, sow_weights)
    return self.project_out(output_BTHK, inputs)

  def _not_future(self, queries: dict[str, Array], keys: dict[str, Array]) -> Array:
    """[B, T, S]: keys up to the query's own, and the whole source from within it."""
    seen_BTS = keys["column"][:, None, :] <= queries["column"][:, :, None]
    if "source" in queries:
      seen_BTS |= queries["source"][:, :, None] & keys["source"][:, None, :]
    return seen_BTS


def hide_from_heads(keys: Keys, visible_BHTS: Array) -> Keys:
  """The keys with a mask of every head, in addition to the one they have."""
  mask_BHTS, num_heads = keys.mask_BHTS, visible_BHTS.shape[1]
  if mask_BHTS is not None and mask_BHTS.shape[1] not in (1, num_heads):
    raise ValueError(f"mask is for {mask_BHTS.shape[1]} heads, but {num_heads} attend; give it one"
                     " for all, or one for each")
  return keys._replace(mask_BHTS=masks.combine(mask_BHTS, visible_BHTS))


def visible_to_groups(
    groups: tuple[str, ...], window: int, query_BT: Array, key_BS: Array
) -> Array:
  """Which keys each group of heads sees by their positions, [B, G, T, S]."""
  ahead_BTS = key_BS[:, None, :] - query_BT[:, :, None]
  seen = {
      "global": jnp.ones_like(ahead_BTS, bool),
      "local": jnp.abs(ahead_BTS) <= window,
      "past": ahead_BTS <= 0,
      "future": ahead_BTS >= 0,
  }
  return jnp.stack([seen[group] for group in groups], axis=1)
