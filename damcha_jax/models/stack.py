"""A stack of Transformer blocks that share one metric generator (paper Section 3.4)."""

from __future__ import annotations

from typing import Any, Callable, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp

from damcha_jax.attention.damcha import check_no_future_leak
from damcha_jax.attention.damcha import MetricContext
from damcha_jax.attention.metric import make_metric
from damcha_jax.attention.metric import Metric
from damcha_jax.models.layers import Block
from damcha_jax.models.layers import Initializers
from damcha_jax.models.layers import make_initializers

Array = jax.Array

SHARINGS = ("generator", "stack", "none")


class BlockStack(nn.Module):
  """N blocks over token vectors, [B, T, D] -> [B, T, D].

  How the blocks' metrics come about when a `generator` is given:

    generator  one set of generator parameters; each layer makes its metric from its own input
    stack      one metric, made from the stack's input, for all layers (the authors' code)

  Without one, each attention keeps what it has ('none': a generator per layer; static; other
  attentions). With `scan_layers` the blocks' parameters are stacked on a leading axis under
  `layers`, the compile time does not grow with depth, and the numbers are those of the unrolled
  stack, whose blocks are `layer_0` .. `layer_{N-1}`; see `stack_layers`.

  Attributes:
    attention: makes a block's attention, e.g. functools.partial(DamchaAttention, num_heads=8).
    generator: makes the shared generator.
    context, stride, half_life, causal, allow_future_leak: of the shared metric, as in
      DamchaAttention.
    remat: recompute each block in the backward pass.
    sow_layers: store each block's output under `intermediates` (unrolled stacks only).
    stochastic_depth_rate: how often training leaves out a branch of the last block; that of the
      others falls linearly to 0 at the first.
  """

  num_layers: int
  attention: Callable[..., nn.Module]
  mlp_features: int
  generator: Optional[Callable[..., nn.Module]] = None
  sharing: str = "generator"
  context: str = "prefix"
  stride: int = 1
  half_life: Optional[float] = None
  causal: Optional[bool] = True
  allow_future_leak: bool = False
  norm_placement: str = "pre"
  dropout_rate: float = 0.0
  initializers: Initializers = make_initializers("lecun", 1)
  gelu: str = "exact"
  remat: bool = False
  scan_layers: bool = False
  decode: bool = False
  partitioned: bool = False
  sow_layers: bool = False
  stochastic_depth_rate: float = 0.0
  dtype: Any = None
  param_dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    if self.sharing not in SHARINGS:
      raise ValueError(f"sharing {self.sharing!r} is not one of {', '.join(SHARINGS)}")
    if self.generator is not None:
      check_no_future_leak(self.context, self.causal, self.allow_future_leak)

  @nn.compact
  def __call__(
      self,
      x_BTD: Array,
      *,
      padding_mask: Optional[Array] = None,
      segment_ids: Optional[Array] = None,
      deterministic: bool = True,
  ) -> Array:
    generator = None if self.generator is None else self.generator(name="generator")
    metric = None
    if generator is not None and self.sharing == "stack":
      make = MetricContext(self.context, self.stride, self.decode, self.half_life, name="context")
      metric = make_metric(generator, make(x_BTD, padding_mask, segment_ids), shared=True)
      metric.sow(self)
      generator = None
    if self.scan_layers:
      return self._scan(x_BTD, padding_mask, segment_ids, metric, generator, deterministic)
    block_class = nn.remat(Block) if self.remat else Block
    for index in range(self.num_layers):
      block = self._block(block_class, generator, deterministic, name=f"layer_{index}")
      x_BTD = block(x_BTD, index, padding_mask, segment_ids, metric)
      if self.sow_layers:
        self.sow("intermediates", "layer_outputs", x_BTD)
    return x_BTD

  def _block(
      self,
      block_class: Callable[..., nn.Module],
      generator: Optional[nn.Module],
      deterministic: bool,
      name: str,
  ) -> nn.Module:
    return block_class(
        self.attention,
        self.mlp_features,
        self.norm_placement,
        self.dropout_rate,
        self.initializers,
        generator,
        deterministic,
        self.gelu,
        self.stochastic_depth_rate / max(self.num_layers - 1, 1),
        self.partitioned,
        self.dtype,
        self.param_dtype,
        name=name,
    )

  def _scan(
      self,
      x_BTD: Array,
      padding_mask_BT: Optional[Array],
      segment_ids_BT: Optional[Array],
      metric: Optional[Metric],
      generator: Optional[nn.Module],
      deterministic: bool,
  ) -> Array:
    # Under scan the shared parameters are a broadcast input: a scope cannot be shared with blocks
    # whose own parameters are stacked.
    template, generator_params = None, None
    if generator is not None:
      if self.is_initializing():
        generator(x_BTD[:, :1].astype(jnp.float32))
      template = self.generator(parent=None)
      generator_params = nn.meta.unbox(generator.variables["params"])
    block_class = nn.remat(Block, prevent_cse=False) if self.remat else Block

    def body(block, carry_BTD, index, *broadcast):
      return block(carry_BTD, index, *broadcast), None

    scan = nn.scan(
        body,
        variable_axes={"params": 0, "cache": 0, "intermediates": 0, "losses": 0},
        split_rngs={"params": True, "dropout": True, "alpha": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
        length=self.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    block = self._block(block_class, template, deterministic, name="layers")
    x_BTD, _ = scan(
        block,
        x_BTD,
        jnp.arange(self.num_layers),
        padding_mask_BT,
        segment_ids_BT,
        metric,
        generator_params,
    )
    return x_BTD


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
  """Parameters of an unrolled stack as those of the scanned one: `layer_i` -> `layers` [N, ..].

  Descends to wherever the stack is; logical axis names gain 'layers' in front.
  """
  names = sorted(
      (name for name in params if name.startswith("layer_")), key=lambda name: int(name[6:])
  )
  rest = {
      name: stack_layers(value) if isinstance(value, dict) else value
      for name, value in params.items()
      if name not in names
  }
  if not names:
    return rest
  stacked = jax.tree.map(_stack_leaves, *(params[name] for name in names), is_leaf=_is_boxed)
  return {**rest, "layers": stacked}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `stack_layers`, for unboxed parameters."""
  unstacked = {}
  for name, value in params.items():
    if name != "layers":
      unstacked[name] = unstack_layers(value) if isinstance(value, dict) else value
      continue
    for index in range(jax.tree.leaves(value)[0].shape[0]):
      unstacked[f"layer_{index}"] = jax.tree.map(lambda leaf: leaf[index], value)
  return unstacked


def _is_boxed(leaf: Any) -> bool:
  return isinstance(leaf, nn.meta.AxisMetadata)


def _stack_leaves(*leaves: Any) -> Any:
  if not _is_boxed(leaves[0]):
    return jnp.stack(leaves)
  stacked = jnp.stack([leaf.value for leaf in leaves])
  return leaves[0].replace(value=stacked, names=("layers", *leaves[0].names))
