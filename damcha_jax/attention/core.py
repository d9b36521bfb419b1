"""Scores, softmax and values: the part that every attention here shares.

    y_t = sum_s softmax_s(q_t . k_s * scale) v_s

Softmax runs in float32 whatever the compute dtype; a query that sees no key gets zeros.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import jax
import jax.numpy as jnp

from damcha_jax.attention import masks

Array = jax.Array

IMPLEMENTATIONS = ("auto", "plain", "xla", "cudnn")


def attention_weights(
    query_BTHK: Array,
    key_BSHK: Array,
    *,
    scale: float,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    is_causal: bool = False,
    precision: Any = None,
) -> Array:
  """softmax(q k^T * scale + bias) as [B, H, T, S] in float32, zero where masked."""
  scores_BHTS = jnp.einsum(
      "bthk,bshk->bhts",
      query_BTHK,
      key_BSHK,
      precision=precision,
      preferred_element_type=jnp.promote_types(query_BTHK.dtype, jnp.float32),
  )
  scores_BHTS = scores_BHTS * scale
  if bias is not None:
    scores_BHTS = scores_BHTS + bias.astype(scores_BHTS.dtype)
  return masked_softmax(scores_BHTS, visible(mask, is_causal, scores_BHTS.shape))


def visible(mask: Optional[Array], is_causal: bool, shape: tuple[int, ...]) -> Optional[Array]:
  causal = masks.causal(shape[-2], shape[-1]) if is_causal else None
  return masks.combine(mask, causal)


def masked_softmax(scores_BHTS: Array, mask: Optional[Array]) -> Array:
  """Softmax over keys in float32; masked keys, and all keys of a blind query, weigh zero."""
  scores_BHTS = scores_BHTS.astype(jnp.promote_types(scores_BHTS.dtype, jnp.float32))
  if mask is None:
    return jax.nn.softmax(scores_BHTS)
  scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(scores_BHTS.dtype).min)
  return jnp.where(mask, jax.nn.softmax(scores_BHTS), 0.0)


def attend(
    query_BTHK: Array,
    key_BSHK: Array,
    value_BSHK: Array,
    *,
    scale: float,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    is_causal: bool = False,
    implementation: str = "auto",
    dropout: Optional[Callable[[Array], Array]] = None,
    sow: Optional[Callable[[Array], Any]] = None,
    precision: Any = None,
) -> Array:
  """Scaled dot-product attention [B, T, H, K] by the implementation that is asked for.

  Args:
    query_BTHK, key_BSHK, value_BSHK: value may have another width than key ('plain' only).
    scale: factor on the dot products.
    bias: finite, added to the scaled dot products, broadcastable to [B, H, T, S].
    mask: boolean, broadcastable to [B, H, T, S]; True means visible.
    is_causal: hide keys after the query's position as well.
    implementation: 'plain' (einsum), 'xla' or 'cudnn' (`jax.nn.dot_product_attention`), or 'auto':
      cuDNN on a GPU where it applies, else plain. All agree within rounding.
    dropout: applied to the weights ('plain' only).
    sow: receives the weights ('plain' only).

  Raises:
    ValueError: unknown implementation, or a fused one asked for what only 'plain' can do.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
  needs_plain = dropout is not None or sow is not None
  needs_plain |= query_BTHK.shape[-1] != value_BSHK.shape[-1]
  if implementation == "auto":
    fused = not needs_plain and _cudnn_applies(query_BTHK)
    implementation = "cudnn" if fused else "plain"
  if implementation == "plain":
    weights_BHTS = attention_weights(
        query_BTHK,
        key_BSHK,
        scale=scale,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        precision=precision,
    )
    if sow is not None:
      sow(weights_BHTS)
    weights_BHTS = weights_BHTS.astype(value_BSHK.dtype)
    if dropout is not None:
      weights_BHTS = dropout(weights_BHTS)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS, value_BSHK, precision=precision)
  if needs_plain:
    raise ValueError(
        f"implementation {implementation!r} can neither drop nor return weights, nor use values of"
        " another width than keys; use implementation='plain' (or 'auto')"
    )
  output_BTHK = jax.nn.dot_product_attention(
      query_BTHK,
      key_BSHK,
      value_BSHK,
      bias=None if bias is None else bias.astype(query_BTHK.dtype),
      mask=mask,
      scale=scale,
      is_causal=is_causal,
      implementation=implementation,
  )
  if mask is None:
    return output_BTHK
  num_queries, num_keys = query_BTHK.shape[1], key_BSHK.shape[1]
  sees_BHT = visible(mask, is_causal, (num_queries, num_keys)).any(-1)
  return jnp.where(jnp.swapaxes(sees_BHT, -1, -2)[..., None], output_BTHK, 0)


def _cudnn_applies(query_BTHK: Array) -> bool:
  half = query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
  return half and query_BTHK.shape[-1] <= 128 and jax.default_backend() == "gpu"
