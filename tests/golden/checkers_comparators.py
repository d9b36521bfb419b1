"""The five comparators against their original implementations, in float64.

These files have no `meta`: a parameter that only one kind has says which it is. Outputs `y_*`,
their weights `attn_*` and so on are found by name, so that files with other sizes or fewer outputs fit.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, Optional

from checkers import checks
from flax import linen as nn
from golden_file import GoldenFile
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.attention import CollaborativeAttention
from damcha_jax.attention import DynamicallyComposableAttention
from damcha_jax.attention import MixedMultiHeadAttention
from damcha_jax.attention import MixtureOfHeadsAttention
from damcha_jax.attention import TalkingHeadsAttention
from damcha_jax.attention import dcmha
from damcha_jax.attention import mma

EXACT = 1e-10
_KINDS: list[str] = []


def kind_of(golden: GoldenFile) -> Optional[str]:
  """The parameter by which the file is recognised."""
  return next((kind for kind in _KINDS if kind in golden.keys), None)


def checks_param(name: str) -> Callable:
  """Registers a checker, run with float64, for the files with this parameter."""
  kind = f"param/{name}"
  _KINDS.append(kind)

  def register(checker: Callable[[GoldenFile], None]) -> Callable[[GoldenFile], None]:
    @functools.wraps(checker)
    def in_float64(golden: GoldenFile) -> None:
      with jax.enable_x64(True):
        checker(golden)

    return checks(kind)(in_float64)

  return register


class Run:
  """One call of a module, everything it sows included."""

  def __init__(self, module: nn.Module, params: Any, x: np.ndarray, **kwargs: Any):
    apply = jax.jit(functools.partial(
        module.apply, sow_weights=True, mutable=["intermediates", "losses"], **kwargs))
    self.y, state = apply({"params": params}, jnp.asarray(x))
    self.sown = {**state.get("intermediates", {}), **state.get("losses", {})}

  def __getitem__(self, name: str) -> Any:
    return self.sown[name][0]


def _run(golden: GoldenFile, module: nn.Module, params: Any, variant: str, x: Any = None) -> Run:
  """The call that made `y_{variant}`: nomask, causal, window4, or any that has a mask_{variant}."""
  x = golden.array("x") if x is None else x
  name, pad = re.fullmatch(r"(.*?)(_pad)?", variant).groups()
  padding = {"padding_mask": jnp.asarray(~golden.array("pad_mask"))} if pad else {}
  window = re.fullmatch(r"window(\d+)", name)
  if name == "nomask":
    return Run(module.copy(causal=False), params, x, **padding)
  if f"mask_{name}" in golden.keys and name != "causal" and not window:
    return Run(module, params, x, mask=jnp.asarray(golden.array(f"mask_{name}")), **padding)
  length = x.shape[1]
  visible = np.tril(np.ones((length, length), bool))
  if window:
    visible &= ~np.tril(visible, -int(window[1]))
    module = module.copy(window=int(window[1]))
  if f"mask_{name}" in golden.keys:
    golden.match(f"mask_{name}", visible, 0.0)
  return Run(module.copy(causal=True), params, x, **padding)


def _variants(golden: GoldenFile, skip: str = r"$") -> list[str]:
  names = [key[2:] for key in golden.keys if key.startswith("y_")]
  return sorted(name for name in names if not re.match(skip, name))


def _linear(weight: np.ndarray, bias: Optional[np.ndarray], *heads: int) -> dict[str, np.ndarray]:
  """A torch Linear [out, in] as a kernel [in, *heads] with its bias."""
  params = {"kernel": weight.T.reshape(weight.shape[1], *heads)}
  return params if bias is None else {**params, "bias": bias.reshape(heads)}


@checks_param("Pl")
def check_tha(golden: GoldenFile) -> None:
  """Outputs, and the logits, weights and mixed weights that led to them."""
  params = golden.params()
  (_, hk, dk), (hs, hv), dv = params["Wq"].shape, params["Pw"].shape, params["Wv"].shape[-1]
  module = TalkingHeadsAttention(
      hk, num_key_heads=hk, num_softmax_heads=hs, num_value_heads=hv, key_head_features=dk,
      value_head_features=dv)
  kernels = dict(query="Wq", key="Wk", value="Wv", out="Wo")
  ours = {name: {"kernel": params[theirs]} for name, theirs in kernels.items()}
  ours.update(scores_kernel=params["Pl"], weights_kernel=params["Pw"])
  for variant in _variants(golden):
    run = _run(golden, module, ours, variant)
    golden.match(f"y_{variant}", run.y, EXACT)
    sown = dict(logits="attention_scores", weights="attention_softmax", mixed="attention_weights")
    for theirs, name in sown.items():
      if f"{theirs}_{variant}" in golden.keys:
        actual = run[name]
        if theirs == "logits" and variant != "nomask":
          actual += np.where(golden.array(f"mask_{variant}"), 0.0, -1e9)
        golden.match(f"{theirs}_{variant}", actual, EXACT)


@checks_param("dyn_w_proj/qkw")
def check_dcmha_flax(golden: GoldenFile) -> None:
  """The Vision Transformer's module: outputs, weights, dynamic parts, and compositions alone."""
  params = golden.params()
  _, _, hidden, rows, num_heads = params["dyn_w_proj/qkw"].shape
  features = len(params["query_dense/kernel"])
  has = lambda name: name in params
  module = DynamicallyComposableAttention(
      num_heads, rank=rows // 2, gelu="tanh", use_bias=has("query_dense/bias"),
      static=has("pre_proj/w"), qk_norm="layer" if has("query_ln/scale") else None)
  dense = lambda name: {
      kind: params[f"{name}/{kind}"] for kind in ("kernel", "bias") if has(f"{name}/{kind}")}
  ours = {name: dense(f"{name}_dense") for name in ("query", "key", "value")}
  ours["out"] = dense("o_dense")
  ours["out"]["kernel"] = ours["out"]["kernel"].reshape(num_heads, -1, features)
  for name in ("query", "key") if module.qk_norm else ():
    ours[f"{name}_norm"] = {"scale": params[f"{name}_ln/scale"]}
  ours["composition"] = dict(
      in_kernel=params["dyn_w_proj/dw1/kernel"].reshape(features, 4, hidden),
      out_kernel=params["dyn_w_proj/qkw"][0],
      gate_kernel=params["dyn_w_proj/dd/kernel"].reshape(features, 4, num_heads))
  if module.static:
    ours["composition"].update(
        {f"{stage}_kernel": params[f"{stage}_proj/w"][0] for stage in dcmha.STAGES})
  for variant in _variants(golden):
    run = _run(golden, module, ours, variant)
    golden.match(f"y_{variant}", run.y, EXACT)
    if f"attn_{variant}" in golden.keys:
      golden.match(f"attn_{variant}", run["attention_weights"], EXACT)
  _check_composition(golden, module, ours["composition"], EXACT)


@checks_param("dyn_w_proj.qkw")
def check_dcmha_torch(golden: GoldenFile) -> None:
  """The language model's module, windows and cached decoding included.

  With q_norm it also rotates queries and keys, in float32: hence the tolerance.
  """
  params, tolerance = golden.params(), 1e-5
  _, _, hidden, rows, num_heads = params["dyn_w_proj.qkw"].shape
  features = params["wo.weight"].shape[0]
  rotated = "q_norm.scale" in params
  module = DynamicallyComposableAttention(
      num_heads, rank=rows // 2, gelu="exact", static="pre_proj.w" in params, rope=rotated,
      qk_norm="rms" if rotated else None)
  kernels = np.split(params["wqkv.weight"], 3)
  ours = {name: _linear(kernel, None, num_heads, features // num_heads)
          for name, kernel in zip(("query", "key", "value"), kernels, strict=True)}
  ours["out"] = {"kernel": params["wo.weight"].T.reshape(num_heads, -1, features)}
  if rotated:
    ours["query_norm"] = {"scale": params["q_norm.scale"]}
    ours["key_norm"] = {"scale": params["k_norm.scale"]}
  ours["composition"] = dict(
      in_kernel=params["dyn_w_proj.dw1"].reshape(features, 4, hidden),
      out_kernel=params["dyn_w_proj.qkw"][0],
      gate_kernel=params["dyn_w_proj.dd"].reshape(features, 4, num_heads))
  for variant in _variants(golden, skip=r"(prefill|decode)_"):
    run = _run(golden, module, ours, variant)
    golden.match(f"y_{variant}", run.y, tolerance)
    if f"attn_{variant}" in golden.keys:
      golden.match(f"attn_{variant}", run["attention_weights"], tolerance)
  _check_composition(golden, module, ours["composition"], tolerance)
  for key in sorted(golden.keys):
    if re.fullmatch(r"x_L\d+", key):
      _check_decoding(golden, module.copy(causal=True), ours, key[2:], tolerance)


def _check_composition(
    golden: GoldenFile, module: nn.Module, params: Any, tolerance: float
) -> None:
  composition = dcmha.Composition(
      module.num_heads, module.rank, module.static, gelu=module.gelu)
  x_BTD = jnp.asarray(golden.array("x"))
  queries, keys = composition.apply({"params": params}, x_BTD, x_BTD)
  for stage in dcmha.STAGES:
    for side, parts in (("q", queries[stage]), ("k", keys[stage])):
      for part, name in (("w1", "w1"), ("w2", "w2"), ("dd", "gate")):
        key = f"dyn_{stage}_{side}{part}"
        if key in golden.keys:
          golden.match(key, parts[name].reshape(golden.array(key).shape), tolerance)
    if f"compose_{stage}_out" in golden.keys:
      query = dict(queries[stage])
      static = query.pop("static", None)
      composed = dcmha.compose(jnp.asarray(golden.array("compose_in")), query, keys[stage], static)
      golden.match(f"compose_{stage}_out", composed, tolerance)


def _check_decoding(
    golden: GoldenFile, module: nn.Module, params: Any, name: str, tolerance: float
) -> None:
  """All of x at once, then all but the last token and that from the cache."""
  x_BTD = jnp.asarray(golden.array(f"x_{name}"))
  golden.match(f"y_prefill_{name}", Run(module, params, x_BTD).y, tolerance)
  decoder = module.copy(decode=True)
  cache = decoder.init(jax.random.key(0), x_BTD)["cache"]
  step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
  _, state = step({"params": params, "cache": cache}, x_BTD[:, :-1])
  y_B1D, _ = step({"params": params, **state}, x_BTD[:, -1:])
  golden.match("y_decode_last", y_B1D, tolerance)
  if "kw_cache" in golden.keys:  # as matrices [H, H], before and after the softmax
    length = golden.array("kw_cache").shape[1]
    _, state = step({"params": params, "cache": cache}, jnp.asarray(golden.array("x")))
    cached = {key: value[:, :length] for key, value in state["cache"].items() if value.ndim > 1}
    matrices = [
        jnp.einsum("bsrm,bsrn->bsmn", cached[f"cached_{stage}_w1"], cached[f"cached_{stage}_w2"])
        + cached[f"cached_{stage}_gate"][..., None] * jnp.eye(module.num_heads)
        for stage in dcmha.STAGES]
    golden.match("kw_cache", jnp.stack(matrices, axis=2), tolerance)


def _check_colmha(golden: GoldenFile, module: nn.Module, params: Any, scale: float) -> None:
  golden.match("scale", scale, EXACT)
  for variant in _variants(golden):
    run = _run(golden, module, params, variant)
    golden.match(f"y_{variant}", run.y, EXACT)
    if f"attn_{variant}" in golden.keys:
      golden.match(f"attn_{variant}", run["attention_weights"], EXACT)
  if "mask_additive" in golden.keys:
    bias = jnp.asarray(golden.array("mask_additive"))
    golden.match("y_causal", Run(module, params, golden.array("x"), bias=bias).y, EXACT)


@checks_param("content_bias.weight")
def check_colmha_epfml(golden: GoldenFile) -> None:
  """Outputs and weights of the layer that replaces a trained one."""
  params = golden.params()
  num_heads, key_features = params["mixing"].shape
  features = params["value.weight"].shape[0]
  module = CollaborativeAttention(num_heads, form="epfml", key_features=key_features)
  dense = _linear(params["dense.weight"], params["dense.bias"], features)
  ours = dict(
      query=_linear(params["query.weight"], None, key_features),
      key=_linear(params["key.weight"], None, key_features),
      content=_linear(params["content_bias.weight"], None, num_heads),
      value=_linear(params["value.weight"], params["value.bias"], num_heads, features // num_heads),
      out={**dense, "kernel": dense["kernel"].reshape(num_heads, -1, features)},
      mixing_kernel=params["mixing"])
  _check_colmha(golden, module, ours, 1 / math.sqrt(key_features / num_heads))


@checks_param("mixing_matrix")
def check_colmha_fairseq(golden: GoldenFile) -> None:
  """Outputs of the decoder's self-attention."""
  params = golden.params()
  num_heads, key_features = params["mixing_matrix"].shape
  features = params["v_proj.weight"].shape[0]
  module = CollaborativeAttention(num_heads, form="fairseq", key_features=key_features)
  linear = lambda name, *heads: _linear(params[f"{name}.weight"], params[f"{name}.bias"], *heads)
  out = linear("out_proj", features)
  ours = dict(
      query=linear("q_proj", key_features),
      key=linear("k_proj", key_features),
      value=linear("v_proj", num_heads, features // num_heads),
      out={**out, "kernel": out["kernel"].reshape(num_heads, -1, features)},
      mixing_kernel=params["mixing_matrix"])
  _check_colmha(golden, module, ours, 1 / math.sqrt(features / num_heads))


@checks_param("q_proj.w_gate")
def check_moa(golden: GoldenFile) -> None:
  """Outputs by either dispatch, the router's choices, and the auxiliary losses."""
  params = golden.params()
  size = {name: int(golden.array(name)) for name in ("k", "E", "head_dim")}
  assert params["q_proj.experts.w"].shape[::2] == (size["E"], size["head_dim"])
  module = MixtureOfHeadsAttention(
      size["k"], num_experts=size["E"], experts_per_token=size["k"],
      expert_features=size["head_dim"], switch_coefficient=1.0, z_coefficient=1.0,
      cv_coefficient=1.0)
  ours = dict(
      router_kernel=params["q_proj.w_gate"],
      query_kernel=params["q_proj.experts.w"],
      out_kernel=params["q_proj.output_experts.w"],
      key={"kernel": params["k_proj.weight"].T},
      value={"kernel": params["v_proj.weight"].T})
  for variant in _variants(golden):
    run = _run(golden, module, ours, variant)
    golden.match(f"y_{variant}", run.y, EXACT)
    other = _run(golden, module.copy(dispatch="sorted"), ours, variant)
    golden.match(f"y_{variant}", other.y, EXACT)
    suffix = "_pad" if variant.endswith("_pad") else ""
    for name in ("switch", "z", "cv"):
      if f"aux_{name}{suffix}" in golden.keys:  # the original sums in float32
        golden.match(f"aux_{name}{suffix}", run[f"{name}_loss"], 1e-6)
    if not suffix:
      stored = dict(router_probs="probs_BTE", topk_gates="gates_BTJ", topk_idx="experts_BTJ")
      for key, field in stored.items():
        if key in golden.keys:
          golden.match(key, getattr(run["routing"], field), EXACT)


@checks_param("bq")
def check_mma(golden: GoldenFile) -> None:
  """Masks, outputs and weights of encoders and decoders, under both readings of "forward"."""
  params = golden.params()
  num_heads = params["Wq"].shape[1]
  letters = dict(query="q", key="k", value="v", out="o")
  ours = {name: {"kernel": params[f"W{letter}"], "bias": params[f"b{letter}"]}
          for name, letter in letters.items()}
  real_BT = ~golden.array("pad_mask")
  for key in sorted(golden.keys):
    named = re.fullmatch(r"masks_((encoder|decoder)_future_is_(forward|backward)_w(\d+))", key)
    if not named:
      continue
    variant, part, future, window = named.groups()
    ahead = ("future", "past") if future == "forward" else ("past", "future")
    module = MixedMultiHeadAttention(
        num_heads, groups=("global", "local", *ahead), local_window=int(window),
        causal=part == "decoder")
    run = _run_mma(golden, module, ours, variant)
    positions = jnp.arange(golden.array("x").shape[1])[None]
    visible = mma.visible_to_groups(module.groups, module.local_window, positions, positions)[0]
    if module.causal:
      visible &= jnp.tril(visible[0])
    golden.match(key, visible, 0.0)
    # What the module computes must be what these masks let through.
    seen = np.repeat(golden.array(key), num_heads // len(visible), axis=0)
    np.testing.assert_array_equal(run["attention_weights"] > 0, np.broadcast_to(
        seen, run["attention_weights"].shape))
    if f"y_pad_{variant}" in golden.keys:
      padded = Run(module, ours, golden.array("x"), padding_mask=jnp.asarray(real_BT))
      # The reference gives padded queries an output; here it is zero.
      golden.match(f"y_pad_{variant}", padded.y, EXACT, where=real_BT)
      assert not np.any(np.asarray(padded.y)[~real_BT])


def _run_mma(golden: GoldenFile, module: nn.Module, params: Any, variant: str) -> Run:
  run = Run(module, params, golden.array("x"))
  golden.match(f"y_{variant}", run.y, EXACT)
  if f"attn_{variant}" in golden.keys:
    golden.match(f"attn_{variant}", run["attention_weights"], EXACT)
  return run
