"""Collaborative multi-head attention (Cordonnier et al. 2020, arXiv 2006.16362).

    y_t = concat_h softmax_s((q_t * m_h) . k_s * scale + c_h . x_s * scale) V_h  W_O

with q = X W_Q and k = X W_K of width Dk, which all heads share; head h weighs their features by its
row m_h of the mixing matrix M [H, Dk]. Two published forms:

    epfml     q and k without bias, the content bias c, scale 1 / sqrt(Dk / H)
    fairseq   q and k with bias, no content bias, scale 1 / sqrt(D / H) whatever Dk
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

from flax import linen as nn
import jax.numpy as jnp

from damcha_jax.attention.base import Array, AttentionBase, Inputs
from damcha_jax.metric.options import check_integers

FORMS = ("epfml", "fairseq")
MIXING_INITS = ("xavier_uniform", "normal", "blocks")


class CollaborativeAttention(AttentionBase):
  """ColMHA; 2 D Dk + H Dk + D H + 2 (D^2 + D) parameters in the epfml form.

  The fairseq form (epfml/collaborative-attention's companion for training from scratch) has
  2 (D Dk + Dk) + H Dk + 2 (D^2 + D). Initial values are the originals', whatever the model's
  (unless `kernel_init` is given): in the fairseq form Xavier-uniform, for queries, keys and values
  with gain 1 / sqrt(2) if Dk = D; in the epfml form PyTorch's, uniform up to 1 / sqrt(fan-in), and
  zero biases. Queries are mixed, so that decoding caches one key of width Dk for all heads.

  Attributes beyond AttentionBase's:
    form: 'fairseq' (for decoders) or 'epfml' (for encoders and for turning a trained MHA into it).
    key_features: Dk. None: the width D.
    mixing_init: of M. 'xavier_uniform', 'normal' (sigma 0.2) or 'blocks', which gives every head
      its own Dk / H features, as in MHA. None: xavier_uniform (fairseq), normal (epfml).
  """

  form: str = "fairseq"
  key_features: Optional[int] = None
  mixing_init: Optional[str] = None
  kernel_init: Optional[Callable] = None

  def __post_init__(self):
    super().__post_init__()
    check_integers(self, "key_features", optional=True)
    if self.form not in FORMS:
      raise ValueError(f"form {self.form!r} is not one of {', '.join(FORMS)}")
    if self.mixing_init not in (None, *MIXING_INITS):
      raise ValueError(f"mixing_init {self.mixing_init!r} is not one of {', '.join(MIXING_INITS)}")

  def compute(
      self,
      inputs: Inputs,
      deterministic: Optional[bool],
      dropout_rng: Optional[Array],
      sow_weights: bool,
  ) -> Array:
    features = self.qkv_features or inputs.query_BTD.shape[-1]
    key_features = self.key_features or features
    init, out_init = self._initializers(same_width=key_features == features)
    shared = dict(
        features=key_features, kernel_init=init, use_bias=self.use_bias and self.form == "fairseq"
    )
    query_BTC = self.project_shared("query", **shared)(inputs.query_BTD)
    key_BSC = self.project_shared("key", **shared)(inputs.key_BSD)
    head_features = self.head_features(features)
    value_BSHK = self.project("value", head_features=head_features, kernel_init=init)(
        inputs.value_BSD
    )
    mixing_HC = self.weight("mixing_kernel", self._mixing_init(), (self.num_heads, key_features),
                            "heads", "head_dim")
    query_BTHC = query_BTC[:, :, None, :] * mixing_HC.astype(query_BTC.dtype)
    scale_features = key_features if self.form == "epfml" else features
    scale = 1.0 / math.sqrt(scale_features / self.num_heads)
    extra = {}
    if self.form == "epfml":
      content = nn.Dense(
          self.num_heads,
          use_bias=False,
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          kernel_init=self.axes(init, "embed", "heads"),
          precision=self.precision,
          name="content",
      )
      extra["content"] = content(inputs.key_BSD) * scale
    keys = self.remember(key_BSC[:, :, None, :], value_BSHK, inputs, **extra)
    bias = inputs.bias_BHTS
    if extra:
      content_BHTS = keys.extra["content"].swapaxes(1, 2)[:, :, None, :]
      bias = content_BHTS if bias is None else bias + content_BHTS
    output_BTHK = self.attend(
        query_BTHC, keys, inputs, deterministic, dropout_rng, sow_weights, scale, bias=bias
    )
    return self.project_out(output_BTHK, inputs, out_init)

  def _initializers(self, same_width: bool) -> tuple[Callable, Callable]:
    """Of what projects the inputs, and of the output projection."""
    uniform = lambda scale, fan: nn.initializers.variance_scaling(scale, fan, "uniform")
    if self.kernel_init is not None:
      return self.kernel_init, self.kernel_init
    if self.form == "epfml":
      return uniform(1 / 3, "fan_in"), uniform(1 / 3, "fan_in")
    return uniform(0.5 if same_width else 1.0, "fan_avg"), uniform(1.0, "fan_avg")

  def _mixing_init(self) -> Callable:
    name = self.mixing_init or ("normal" if self.form == "epfml" else "xavier_uniform")
    if name == "blocks":
      return _blocks
    return nn.initializers.normal(0.2) if name == "normal" else nn.initializers.xavier_uniform()


def _blocks(key: Any, shape: tuple[int, int], dtype: Any) -> Array:
  """[H, Dk]: 1 where the feature is among the head's own Dk / H."""
  del key
  num_heads, key_features = shape
  if key_features % num_heads:
    raise ValueError(f"mixing_init='blocks' shares key_features {key_features} out among"
                     f" {num_heads} heads; choose a multiple")
  return jnp.repeat(jnp.eye(num_heads, dtype=dtype), key_features // num_heads, axis=1)
