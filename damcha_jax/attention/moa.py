"""Mixture of attention heads (Zhang et al. 2022, arXiv 2210.05144; yikangshen/MoA).

    p = softmax(x W_g),   e_1 .. e_k the experts of the k largest p
    y_t = sum_j p[e_j] softmax_s(x_t W_Q[e_j] . k_s / sqrt(K)) v_s W_O[e_j]

Every query chooses k of E heads; all of them share one key and one value head (multi-query).
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.metric.options import check_finite
from damcha_jax.metric.options import check_integers

DISPATCHES = ("dense", "sorted")


class Routing(NamedTuple):
  """Which experts each query chose: the k largest probabilities, in descending order."""

  logits_BTE: Array
  probs_BTE: Array  # zero for padded queries
  gates_BTJ: Array
  experts_BTJ: Array


class MixtureOfHeadsAttention(AttentionBase):
  """MoA; D E + 2 E D K + 2 D K parameters, no biases.

  Auxiliary losses are sown into the collection `losses`, multiplied by their coefficients, under
  the names `switch_loss`, `z_loss` and `cv_loss`; see `auxiliary_losses`. Initial values are the
  original's, whatever the model's (unless `kernel_init` is given): Xavier-uniform for each expert,
  with gain 1 / sqrt(2) for key and value, zero for the router.

  Attributes beyond AttentionBase's:
    num_experts: E. None: 2 num_heads.
    experts_per_token: k. None: num_heads.
    expert_features: K. None: the width over num_heads.
    renormalize: divide the gates by their sum, through which no gradient flows.
    switch_coefficient, z_coefficient, cv_coefficient: of the losses; 0 leaves one out.
    dispatch: 'dense' computes the projections of all experts and keeps the chosen ones, which any
      backend does well and shards; 'sorted' computes the chosen ones alone, with queries sorted by
      expert (`jax.lax.ragged_dot`: fast on TPU, slow on CPU, not under vmap). Same numbers.
  """

  num_experts: Optional[int] = None
  experts_per_token: Optional[int] = None
  expert_features: Optional[int] = None
  renormalize: bool = False
  switch_coefficient: float = 0.01
  z_coefficient: float = 0.001
  cv_coefficient: float = 0.0
  dispatch: str = "dense"
  use_bias: bool = False
  kernel_init: Optional[Callable] = None

  def __post_init__(self):
    super().__post_init__()
    if self.dispatch not in DISPATCHES:
      raise ValueError(f"dispatch {self.dispatch!r} is not one of {', '.join(DISPATCHES)}")
    if self.use_bias:
      raise ValueError("the experts of mixture of attention heads have no biases: use_bias=False")
    check_integers(self, "num_experts", "experts_per_token", "expert_features", optional=True)
    check_finite(self, "switch_coefficient", "z_coefficient", "cv_coefficient", least=0)
    num_experts, num_chosen = self._num_experts, self._num_chosen
    if num_chosen > num_experts:
      raise ValueError(f"experts_per_token {num_chosen} exceeds num_experts {num_experts}; choose"
                       " at most as many")
    if self.cv_coefficient and num_experts < 2:
      raise ValueError("one expert has no variance to keep small: use cv_coefficient=0")

  @property
  def _num_experts(self) -> int:
    return self.num_experts or 2 * self.num_heads

  @property
  def _num_chosen(self) -> int:
    return self.experts_per_token or self.num_heads

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    features, num_experts = inputs.query_BTD.shape[-1], self._num_experts
    width = self.expert_features or self.head_features(self.qkv_features or features)
    per_expert = nn.initializers.variance_scaling(
        1.0, "fan_avg", "uniform", in_axis=-2, out_axis=-1, batch_axis=0
    )
    experts_EDK = self.weight("query_kernel", self.kernel_init or per_expert,
                              (num_experts, features, width), "experts", "embed", "head_dim")
    experts_EKD = self.weight(
        "out_kernel", self.out_kernel_init or self.kernel_init or per_expert,
        (num_experts, width, self.out_features or features), "experts", "head_dim", "embed")
    half = nn.initializers.variance_scaling(0.5, "fan_avg", "uniform")
    shared = dict(features=width, kernel_init=self.kernel_init or half, use_bias=False)
    key_BSK = self.project_shared("key", **shared)(inputs.key_BSD)
    value_BSK = self.project_shared("value", **shared)(inputs.value_BSD)
    routing = self._route(inputs)

    dtype = self.dtype or inputs.query_BTD.dtype
    chosen = (routing.experts_BTJ, self.dispatch, self.precision)
    query_BTJK = choose_projections(
        inputs.query_BTD.astype(dtype), experts_EDK.astype(dtype), *chosen)
    keys = self.remember(key_BSK[:, :, None], value_BSK[:, :, None], inputs)
    output_BTJK = self.attend(
        query_BTJK, keys, inputs, deterministic, dropout_rng, sow_weights, 1 / math.sqrt(width)
    )
    gates_BTJ = routing.gates_BTJ
    if self.renormalize:
      total_BT1 = jax.lax.stop_gradient(gates_BTJ.sum(-1, keepdims=True))
      gates_BTJ = gates_BTJ / jnp.where(total_BT1 > 0, total_BT1, 1.0)
    output_BTJK = output_BTJK * gates_BTJ[..., None].astype(output_BTJK.dtype)
    output_BTD = sum_projections(output_BTJK, experts_EKD.astype(output_BTJK.dtype), *chosen)
    return self.without_padded_queries(output_BTD, inputs)

  def _route(self, inputs: Inputs) -> Routing:
    """Chooses experts, in float32, and sows the auxiliary losses."""
    x_BTD, valid_BT = inputs.query_BTD, inputs.valid_query_BT
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    router_DE = self.param("router_kernel", self.axes(nn.initializers.zeros, "embed", None),
                           (x_BTD.shape[-1], self._num_experts), self.param_dtype)
    logits_BTE = jnp.einsum("btd,de->bte", x_BTD.astype(wide), router_DE.astype(wide))
    probs_BTE = jax.nn.softmax(logits_BTE)
    if valid_BT is not None:
      probs_BTE = jnp.where(valid_BT.astype(bool)[..., None], probs_BTE, 0.0)
    gates_BTJ, experts_BTJ = jax.lax.top_k(probs_BTE, self._num_chosen)
    routing = Routing(logits_BTE, probs_BTE, gates_BTJ, experts_BTJ)
    self.sow("intermediates", "routing", routing)
    coefficients = dict(switch_loss=self.switch_coefficient, z_loss=self.z_coefficient,
                        cv_loss=self.cv_coefficient)
    for name, loss in auxiliary_losses(routing).items():
      if coefficients[name]:
        self.sow("losses", name, coefficients[name] * loss)
    return routing


def auxiliary_losses(routing: Routing) -> dict[str, Array]:
  """What keeps the experts in balance and the router's logits small; scalars, without coefficients.

    switch_loss   E sum_e (P_e / sum P) (n_e / sum n): P_e the sum of p_e, n_e the choices of e
    z_loss        mean of logsumexp(logits)^2, over padding too, as in the original
    cv_loss       variance (with E - 1) over squared mean of the experts' sums of gates

  Padded queries choose no expert. Gradients flow through P, the logits and the gates.
  """
  _, _, gates_BTJ, experts_BTJ = routing
  num_experts = routing.probs_BTE.shape[-1]
  chosen_BTJE = jax.nn.one_hot(experts_BTJ, num_experts, dtype=gates_BTJ.dtype)
  counts_E = jnp.sum(chosen_BTJE * (gates_BTJ > 0)[..., None], axis=(0, 1, 2))
  gates_E = jnp.sum(chosen_BTJE * gates_BTJ[..., None], axis=(0, 1, 2))
  probs_E = routing.probs_BTE.sum((0, 1))
  share = lambda x_E: x_E / jnp.maximum(x_E.sum(), 1e-12)  # as torch's normalize
  gates_E = share(gates_E)
  return dict(
      switch_loss=num_experts * jnp.sum(share(probs_E) * share(counts_E)),
      z_loss=jnp.mean(jax.nn.logsumexp(routing.logits_BTE, axis=-1) ** 2),
      cv_loss=jnp.var(gates_E, ddof=1) / (jnp.mean(gates_E) ** 2 + 1e-10),
  )


def choose_projections(
    x_BTD: Array, kernels_EDK: Array, experts_BTJ: Array, dispatch: str, precision: Any = None
) -> Array:
  """x W[e_j] of every chosen expert, [B, T, J, K]."""
  if dispatch == "dense":
    all_BTEK = jnp.einsum("btd,edk->btek", x_BTD, kernels_EDK, precision=precision)
    return jnp.take_along_axis(all_BTEK, experts_BTJ[..., None], axis=2)
  x_BTJD = jnp.broadcast_to(x_BTD[:, :, None], (*experts_BTJ.shape, x_BTD.shape[-1]))
  return _sorted_product(x_BTJD, kernels_EDK, experts_BTJ, precision)


def sum_projections(
    x_BTJK: Array, kernels_EKD: Array, experts_BTJ: Array, dispatch: str, precision: Any = None
) -> Array:
  """sum_j x_j W[e_j], [B, T, D]."""
  if dispatch == "dense":
    zeros_EK = jnp.zeros((kernels_EKD.shape[0], x_BTJK.shape[-1]), x_BTJK.dtype)
    place = lambda experts_J, x_JK: zeros_EK.at[experts_J].set(x_JK, unique_indices=True)
    all_BTEK = jax.vmap(jax.vmap(place))(experts_BTJ, x_BTJK)
    return jnp.einsum("btek,ekd->btd", all_BTEK, kernels_EKD, precision=precision)
  return _sorted_product(x_BTJK, kernels_EKD, experts_BTJ, precision).sum(2)


def _sorted_product(x_BTJI: Array, kernels_EIO: Array, experts_BTJ: Array, precision: Any) -> Array:
  """x_j W[e_j] for each j by one product per expert over the rows that chose it."""
  num_experts, _, num_outputs = kernels_EIO.shape
  experts_N = experts_BTJ.reshape(-1)
  order_N = jnp.argsort(experts_N, stable=True)
  counts_E = jnp.bincount(experts_N, length=num_experts).astype(jnp.int32)
  x_NI = x_BTJI.reshape(-1, x_BTJI.shape[-1])
  y_NO = jax.lax.ragged_dot(x_NI[order_N], kernels_EIO, counts_E, precision=precision)
  return y_NO[jnp.argsort(order_N)].reshape(*experts_BTJ.shape, num_outputs)
