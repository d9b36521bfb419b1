"""Data-adaptive Mahalanobis cross-head attention (paper Section 3).

Head-slice form, with X_i the i-th of H slices of the layer input and c the context:

    M(c) = f_theta(c),  m_i = sum_j M_ij(c),  S_i = X_i m_i X_i^T / sqrt(K)

so queries are X_i m_i, keys X_i, and any scaled-dot-product kernel applies. The metric acts on the
query side, which is what makes a metric per query causal and its keys cacheable.

Full-width form (Appendix C.1), which contains multi-head attention: m_i is D x D,

    S_i = (X m_i + 1 u_i^T) X^T / sqrt(K),  m_i = W_Q^i (W_K^i)^T + U_i(c) V_i^T,  u_i = W_K^i b_Q^i

with a static part that stays factored and an adaptive update of rank `update_rank`.
"""

from __future__ import annotations

import math
from typing import Any, Optional

from flax import linen as nn
import jax.numpy as jnp

from damcha_jax.attention import masks
from damcha_jax.attention.activations import constrain
from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.attention.metric import make_metric
from damcha_jax.attention.metric import Metric
from damcha_jax.metric import context as context_lib
from damcha_jax.metric.context import Contexts
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.options import check_integers
from damcha_jax.metric.options import check_positive

CONTEXTS = ("prefix", "sequence", "learned")
FORMS = ("head_slice", "full_width")


class FutureLeakError(ValueError):
  """A causal model was about to be built on a context that contains the future."""


def check_no_future_leak(context: str, causal: Optional[bool], allow_future_leak: bool) -> None:
  """Raises FutureLeakError for a `sequence` context in anything not declared non-causal."""
  if context == "sequence" and causal is not False and not allow_future_leak:
    raise FutureLeakError(
        f"context='sequence' with causal={causal} leaks the future: every metric would contain the"
        " mean of the whole sequence; use context='prefix', or declare causal=False for an encoder,"
        " or pass allow_future_leak=True to study the leak"
    )


class MetricContext(nn.Module):
  """Makes the contexts of a layer input; holds the learned vector or the running mean of decoding.

  With a `half_life` in tokens, earlier tokens count less in a prefix mean, by a half-life that each
  feature learns, from this one.
  """

  kind: str = "prefix"
  stride: int = 1
  decode: bool = False
  half_life: Optional[float] = None

  @nn.compact
  def __call__(
      self,
      x_BTD: Array,
      valid_BT: Optional[Array] = None,
      segment_ids_BT: Optional[Array] = None,
  ) -> Contexts:
    batch_size, length, features = x_BTD.shape
    if self.kind == "learned":
      vector_D = self.param("vector", nn.initializers.normal(1.0), (features,))
      return Contexts(vector_D[None, None], None, stride=max(length, 1))
    if not length:  # no token has a metric, and no mean exists
      return Contexts(jnp.zeros((batch_size, 1, features), x_BTD.dtype), None, stride=1)
    if self.kind == "sequence":
      return context_lib.sequence_context(x_BTD, valid_BT, segment_ids_BT)
    half_life_D = None
    if self.half_life is not None:
      factor_D = jnp.exp(self.param("log_half_life", nn.initializers.zeros, (features,)))
      half_life_D = self.half_life * factor_D
    if not self.decode:
      return context_lib.prefix_contexts(x_BTD, self.stride, valid_BT, segment_ids_BT, half_life_D)
    initialised = self.has_variable("cache", "prefix")
    state = self.variable(
        "cache", "prefix", context_lib.empty_state, batch_size, features, x_BTD.dtype
    )
    if not initialised:
      return context_lib.prefix_contexts(x_BTD, self.stride, valid_BT, segment_ids_BT, half_life_D)
    contexts, state.value = context_lib.continue_prefix(
        x_BTD, self.stride, valid_BT, context_lib.PrefixState(*state.value), half_life_D
    )
    return contexts


class DamchaAttention(AttentionBase):
  """Drop-in for `nn.MultiHeadDotProductAttention` whose similarity is a generated metric.

  Parameters: value and out as in multi-head attention (2 D^2), and the generator's, unless one is
  shared.

  Attributes beyond AttentionBase's:
    generator: an unbound metric module (MetricGenerator, StaticMetric, ...); attentions of one
      model that are given the same instance share its parameters. None makes a MetricGenerator
      with its defaults.
    context: 'prefix' (mean of the tokens so far; causal), 'sequence' (mean of all tokens; needs
      causal=False) or 'learned' (a trainable vector).
    stride: with 'prefix', tokens per context; 1 is the exact running mean.
    half_life: with 'prefix', not the paper's: tokens after which one counts half in the mean, at
      first; every feature learns its own. None: all count alike.
    mix_slices: 'head_slice' only, not the paper's: heads compare slices of X W, with one D x D
      matrix for queries and keys, where the paper's head sees K of X's D features alone.
    form: 'head_slice' (the paper's attention) or 'full_width' (contains multi-head attention).
    update_rank: 'full_width' only: rank of the adaptive part, None for a full D x D one, 0 for none.
    static_part: 'full_width' only: keep the factored W_Q W_K^T.
    allow_future_leak: permit a causal model on 'sequence' contexts, to study the leak.

  Raises:
    FutureLeakError: 'sequence' context in a module not declared causal=False, or, where the values
      of the mask are known (outside jit), with one that hides the future.
    ValueError: options, widths or masks that do not go together.
  """

  generator: Optional[nn.Module] = None
  context: str = "prefix"
  stride: int = 1
  half_life: Optional[float] = None
  mix_slices: bool = False
  form: str = "head_slice"
  update_rank: Optional[int] = None
  static_part: bool = True
  allow_future_leak: bool = False

  def __post_init__(self):
    super().__post_init__()
    for name, value, allowed in (("context", self.context, CONTEXTS), ("form", self.form, FORMS)):
      if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    check_integers(self, "stride")
    check_integers(self, "update_rank", least=0, optional=True)
    check_positive(self, "half_life")
    if self.generator is not None and not isinstance(self.generator, nn.Module):
      raise ValueError(f"generator {self.generator!r} must be a module, such as"
                       " MetricGenerator(num_heads)")
    if self.half_life is not None and self.context != "prefix":
      raise ValueError(f"half_life is for context='prefix', not context={self.context!r}")
    if self.mix_slices and self.form != "head_slice":
      raise ValueError("mix_slices is for form='head_slice'; the full width has no slices")
    if self.form == "head_slice" and self.update_rank is not None:
      raise ValueError("update_rank is for form='full_width'; the head-slice metric is K x K")
    if self.form == "full_width" and self.update_rank == 0 and not self.static_part:
      raise ValueError("update_rank=0 without static_part leaves no metric at all")
    check_no_future_leak(self.context, self.causal, self.allow_future_leak)
    if self.context == "sequence" and self.decode:
      raise FutureLeakError("context='sequence' cannot decode: the whole sequence is not known yet")

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
      metric: Optional[Metric] = None,
      shared_generator: Optional[nn.Module] = None,
      layer_index: Any = None,
      deterministic: Optional[bool] = None,
      dropout_rng: Optional[Array] = None,
      sow_weights: bool = False,
  ) -> Array:
    """Attends from `inputs_q` [B, T, D] to `inputs_k`, `inputs_v` [B, S, D]; see AttentionBase.

    The context comes from `inputs_q`, and restarts with each document of a packed row, whether
    `segment_ids` or a `mask` that splits the row says so (while decoding there is one). A stack
    that shares passes `metric` (one metric for all its layers) or `shared_generator` (bound, to be
    applied to this layer's own contexts). `layer_index` reaches the generator, should that have a
    part per layer.
    """
    inputs = self.prepare(
        inputs_q, inputs_k, inputs_v, mask, padding_mask, query_padding_mask, key_padding_mask,
        segment_ids, bias,
    )
    if self.context == "sequence" and not self.allow_future_leak and inputs.is_self:
      if masks.is_concrete_causal(mask):
        raise FutureLeakError(
            "a causal mask with context='sequence' leaks the future through the metric; use"
            " context='prefix'"
        )
    dtype = self.dtype or inputs.query_BTD.dtype
    # Whole rows, which the values need anyway, and not each head's slices on its own device.
    query_BTD, key_BSD = (constrain(x.astype(dtype)) for x in (inputs.query_BTD, inputs.key_BSD))
    if metric is None:
      metric = self._metric(self._with_documents(inputs, mask), shared_generator, layer_index)
    if self.form == "head_slice":
      query, key, scale = self._head_slices(query_BTD, key_BSD, metric)
    else:
      query, key, scale = self._full_width(query_BTD, key_BSD, metric)
    value_BSHK = self.project("value")(inputs.value_BSD)
    return self.attend_and_project(
        query, key, value_BSHK, inputs, deterministic, dropout_rng, sow_weights, scale=scale
    )

  def _with_documents(self, inputs: Inputs, mask: Optional[Array]) -> Inputs:
    """What the mask keeps apart, the metric must not mix: a mean is not masked by itself."""
    batch_size, length = inputs.query_BTD.shape[:2]
    # Also where `attention(x, x)` is no longer known to be self-attention, as under remat.
    if (mask is None or inputs.segment_ids_BT is not None or self.decode or not length
        or inputs.key_BSD.shape[1] != length):
      return inputs
    documents_BT = masks.documents(inputs.mask_BHTS, batch_size, length)
    return inputs._replace(segment_ids_BT=documents_BT)

  def _metric(
      self, inputs: Inputs, generator: Optional[nn.Module], layer_index: Any
  ) -> Optional[Metric]:
    if self.form == "full_width" and self.update_rank == 0:
      return None
    if generator is None:
      generator = self.generator
      if generator is None:
        generator = self._default_generator(inputs.query_BTD.shape[-1])
      if not generator.adaptive:
        return Metric(generator(), None)
    make = MetricContext(self.context, self.stride, self.decode, self.half_life, name="context")
    contexts = make(
        inputs.query_BTD, inputs.valid_query_BT, inputs.segment_ids_BT
    )
    metric = make_metric(generator, contexts, layer_index)
    metric.sow(self)
    return metric

  def _default_generator(self, features: int) -> MetricGenerator:
    self.head_features(features)
    full_width = {}
    if self.form == "full_width":
      columns = features if self.update_rank is None else self.update_rank
      full_width = dict(row_features=features, column_features=columns, zero_output=True)
    return MetricGenerator(
        self.num_heads,
        partitioned=self.partitioned,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        name="generator",
        **full_width,
    )

  def _head_slices(
      self, query_BTD: Array, key_BSD: Array, metric: Metric
  ) -> tuple[Array, Array, float]:
    features = query_BTD.shape[-1]
    if key_BSD.shape[-1] != features:
      raise ValueError(
          f"the head-slice form compares slices of equal width, but queries have {features} and"
          f" keys {key_BSD.shape[-1]} features; project one of them, or use form='full_width'"
      )
    head_features = self.head_features(features)
    if self.mix_slices:
      mix = self.project_shared("mix", features, use_bias=False, kernel_init=self.kernel_init)
      query_BTD, key_BSD = mix(query_BTD), mix(key_BSD)
    slices = lambda x: x.reshape(*x.shape[:2], self.num_heads, head_features)
    query_BTHK = metric.apply(slices(query_BTD))
    return query_BTHK, slices(key_BSD), 1.0 / math.sqrt(head_features)

  def _full_width(
      self, query_BTD: Array, key_BSD: Array, metric: Optional[Metric]
  ) -> tuple[Array, Array, float]:
    queries, keys = [], []
    head_features = self.head_features(self.qkv_features or query_BTD.shape[-1])
    if self.static_part:
      queries.append(self.project("query", head_features=head_features)(query_BTD))
      keys.append(self.project("key", head_features=head_features)(key_BSD))
    if metric is not None:
      update_BTHR = metric.apply(query_BTD[:, :, None, :])
      queries.append(update_BTHR)
      keys.append(self._update_keys(key_BSD, query_BTD.shape[-1]))
      if update_BTHR.shape[2:] != keys[-1].shape[2:]:
        raise ValueError(
            f"the generator's update is for (heads, rank) {update_BTHR.shape[2:]}, not"
            f" {keys[-1].shape[2:]}; give it row_features={query_BTD.shape[-1]},"
            f" column_features={keys[-1].shape[3]} and num_heads={keys[-1].shape[2]}"
        )
    scale = 1.0 / math.sqrt(head_features)
    return jnp.concatenate(queries, -1), jnp.concatenate(keys, -1), scale

  def _update_keys(self, key_BSD: Array, query_features: int) -> Array:
    if self.update_rank is None:
      if key_BSD.shape[-1] != query_features:
        raise ValueError("a full D x D metric needs queries and keys of equal width; set update_rank")
      return jnp.repeat(key_BSD[:, :, None, :], self.num_heads, axis=2)
    return nn.DenseGeneral(
        (self.num_heads, self.update_rank),
        use_bias=False,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        precision=self.precision,
        kernel_init=self.axes(self.kernel_init, "embed", "heads", "head_dim"),
        name="update_key",
    )(key_BSD)
