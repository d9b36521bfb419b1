"""An audit for dependence on the future, on other documents and on padding.

Two forms, because each sees what the other may miss. *Perturbation*: whatever output t must not see
is replaced by something else, small, large or huge, and output t must stay exactly the same; this
finds jumps, such as a mask that flips. *Gradient*: d output[t] / d input[s] must be exactly zero;
this finds leaks too small to survive rounding, and says which input leaks.

  report = audit(lambda x: attention.apply(variables, x), x_BTD)
  assert_causal(lambda tokens: model.apply(variables, tokens), tokens_BT)

A leak can hide behind parameters that start at zero; `audit_module` therefore audits a Flax module
at random parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any, Callable, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Function = Callable[[Array], Array]

FORMS = ("perturbation", "gradient")
SCALES = (1.0, 30.0, 1000.0)  # of the perturbations of real-valued inputs, in turn


class DependenceError(AssertionError):
  """An output depends on inputs that it must not see."""


@dataclasses.dataclass(frozen=True)
class Leak:
  """Output `output` of a row depends on an input that it must not see.

  `inputs` are the leaking positions where the form can tell (gradient), else all that were changed.
  """

  form: str
  row: int
  output: int
  inputs: tuple[int, ...]
  size: float

  def __str__(self) -> str:
    inputs = ", ".join(map(str, self.inputs[:8])) + (", .." if len(self.inputs) > 8 else "")
    verb = "depends on" if self.form == "gradient" else "changes with"
    return (f"row {self.row}: output {self.output} {verb} input {inputs} "
            f"({self.form} {self.size:.3g})")


@dataclasses.dataclass(frozen=True)
class CausalityReport:
  """What an audit found.

  Attributes:
    leaks: the forbidden dependences, at most one per row, output position and form.
    response: the largest gradient (or change) through what may be seen. Zero means that the
      outputs do not depend on the inputs at all, and the audit says nothing.
  """

  leaks: tuple[Leak, ...]
  response: float

  @property
  def is_causal(self) -> bool:
    return not self.leaks

  def __str__(self) -> str:
    if not self.leaks:
      return f"no forbidden dependence (largest permitted response {self.response:.3g})"
    shown = "; ".join(map(str, self.leaks[:5]))
    more = f"; and {len(self.leaks) - 5} more" if len(self.leaks) > 5 else ""
    return f"{len(self.leaks)} forbidden dependences: {shown}{more}"


def may_see(
    batch_size: int,
    length: int,
    *,
    causal: bool = True,
    segment_ids: Optional[Array] = None,
    padding_mask: Optional[Array] = None,
) -> np.ndarray:
  """[B, T, S]: may output t depend on input s?

  Not on the future (if `causal`), on another segment, or on padding. Outputs at padded positions
  mean nothing and may depend on anything.
  """
  allowed_BTS = np.ones((batch_size, length, length), bool)
  if causal:
    allowed_BTS &= np.tril(np.ones((length, length), bool))
  if segment_ids is not None:
    segment_ids = np.asarray(segment_ids)
    allowed_BTS &= segment_ids[:, :, None] == segment_ids[:, None, :]
  if padding_mask is not None:
    padding_mask = np.asarray(padding_mask, bool)
    allowed_BTS = (allowed_BTS & padding_mask[:, None, :]) | ~padding_mask[:, :, None]
  return allowed_BTS


def audit(
    apply_fn: Function,
    inputs: Array,
    *,
    causal: bool = True,
    segment_ids: Optional[Array] = None,
    padding_mask: Optional[Array] = None,
    positions: Optional[Sequence[int]] = None,
    forms: Sequence[str] = FORMS,
    num_perturbations: int = len(SCALES),
    vocab_size: Optional[int] = None,
    seed: int = 0,
    tolerance: float = 0.0,
) -> CausalityReport:
  """Looks for outputs that depend on inputs which `may_see` forbids.

  Args:
    apply_fn: maps inputs [B, T, ..] to outputs [B, T, ..], deterministically.
    inputs: token ids (an integer array [B, T]) or vectors [B, T, D]. The gradient form of a token
      model differentiates by the output of its first `nn.Embed` over the tokens.
    causal, segment_ids, padding_mask: what outputs may depend on; see `may_see`.
    positions: the output positions to audit; by default all.
    forms: which of 'perturbation' and 'gradient'.
    num_perturbations: how many random replacements of the forbidden inputs to try.
    vocab_size: replacements of tokens are below it; by default that of the first `nn.Embed` over
      the tokens, or the largest token is the last where there is none.
    seed: of the random replacements and cotangents.
    tolerance: changes and gradients up to it pass. Exact dependence needs none.

  Raises:
    ValueError: options under which nothing could be found, outputs that are not finite or do not
      match the inputs, or a token model without an `nn.Embed` in sight.
  """
  unknown = [form for form in forms if form not in FORMS]
  if unknown or not forms:
    raise ValueError(f"forms must be among {', '.join(FORMS)}, not {', '.join(map(repr, unknown))}")
  inputs = jnp.asarray(inputs)
  batch_size, length = inputs.shape[:2]
  allowed_BTS = may_see(batch_size, length, causal=causal, segment_ids=segment_ids,
                        padding_mask=padding_mask)
  positions = range(length) if positions is None else positions
  _check_can_find(allowed_BTS, positions, num_perturbations, tolerance)

  @jax.jit
  def changed_fn(replacement, mask_BT):
    mask = mask_BT.reshape(*mask_BT.shape, *(1,) * (inputs.ndim - 2))
    return apply_fn(jnp.where(mask, replacement, inputs))

  base = np.asarray(changed_fn(inputs, np.zeros((batch_size, length), bool)))
  if base.shape[:2] != (batch_size, length) or not np.isfinite(base).all():
    raise ValueError(f"outputs must be finite and [{batch_size}, {length}, ..], not {base.shape}"
                     + ("" if np.isfinite(base).all() else " with values that are not finite"))
  leaks, response = [], 0.0
  if "perturbation" in forms:
    if vocab_size is None and jnp.issubdtype(inputs.dtype, jnp.integer):
      vocab_size = _vocab_size(apply_fn, inputs)
    replacements = [_replacement(inputs, number, vocab_size, seed)
                    for number in range(num_perturbations)]
    changes = _changes(changed_fn, replacements, base, allowed_BTS, positions)
    found, seen = _leaks("perturbation", changes, allowed_BTS, tolerance)
    leaks, response = leaks + found, max(response, seen)
  if "gradient" in forms:
    gradients = _gradients(apply_fn, inputs, positions, seed)
    found, seen = _leaks("gradient", gradients, allowed_BTS, tolerance)
    leaks, response = leaks + found, max(response, seen)
  return CausalityReport(tuple(leaks), response)


def _check_can_find(allowed_BTS: np.ndarray, positions: Sequence[int], num_perturbations: int,
                    tolerance: float) -> None:
  """Raises ValueError if an audit with these options would pass whatever the function does."""
  length = allowed_BTS.shape[1]
  outside = [position for position in positions if not 0 <= position < length]
  if outside or not len(positions):
    raise ValueError(f"positions must be at least one of 0 .. {length - 1}, not "
                     f"{outside or list(positions)}")
  if allowed_BTS[:, list(positions)].all():
    raise ValueError("these outputs may depend on every input, so there is nothing to audit; use"
                     " longer inputs, later inputs being hidden, or masks")
  if num_perturbations < 1:
    raise ValueError(f"num_perturbations must be at least 1, not {num_perturbations}")
  if not 0 <= tolerance < np.inf:
    raise ValueError(f"tolerance must be finite and at least 0, not {tolerance}")


def assert_causal(apply_fn: Function, inputs: Array, **options: Any) -> CausalityReport:
  """`audit`, raising if it finds anything, or could not have.

  Raises:
    DependenceError: there is a forbidden dependence, or outputs do not depend on inputs at all.
    ValueError: as `audit`.
  """
  report = audit(apply_fn, inputs, **options)
  if not report.is_causal:
    raise DependenceError(str(report))
  if report.response == 0.0:
    raise DependenceError("the outputs do not depend on the inputs at all, so nothing was audited;"
                          " use random parameters")
  return report


def audit_module(
    module: nn.Module, inputs: Array, *, seed: int = 0, std: float = 0.5, kwargs: Any = None,
    **options: Any,
) -> CausalityReport:
  """`audit` of a Flax module at random parameters, none of which is zero.

  Args:
    module: called as `module(inputs, **kwargs)`.
    inputs: as in `audit`.
    seed: of the parameters and the audit.
    std: standard deviation of the parameters.
    kwargs: further arguments of the call, such as masks; `segment_ids` and `padding_mask` among
      them also say what outputs may depend on.
    **options: of `audit`.
  """
  kwargs = dict(kwargs or {})
  for name in ("segment_ids", "padding_mask"):
    if name in kwargs:
      options.setdefault(name, kwargs[name])
  variables = random_variables(module, inputs, seed=seed, std=std, **kwargs)
  return audit(lambda x: module.apply(variables, x, **kwargs), inputs, seed=seed, **options)


def random_variables(
    module: nn.Module, *args: Any, seed: int = 0, std: float = 0.5, **kwargs: Any
) -> dict[str, Any]:
  """Variables for `module(*args, **kwargs)`: normal parameters, zeros in other collections."""
  init = functools.partial(module.init, jax.random.key(0), **kwargs)
  shapes = nn.unbox(jax.eval_shape(init, *args))
  rng = np.random.default_rng(seed)

  def fill(path: Any, shape: Any) -> Array:
    is_param = path[0].key == "params"
    values = std * rng.standard_normal(shape.shape) if is_param else np.zeros(shape.shape)
    return jnp.asarray(values, shape.dtype)

  return jax.tree_util.tree_map_with_path(fill, shapes)


def _leaks(
    form: str, dependences: Iterator[tuple[int, np.ndarray, np.ndarray]], allowed_BTS: np.ndarray,
    tolerance: float,
) -> tuple[list[Leak], float]:
  """Sorts (output position, forbidden sizes [B, S], permitted response) into leaks and response."""
  leaks, response = {}, 0.0
  for output, sizes_BS, seen in dependences:
    response = max(response, seen)
    for row, sizes_S in enumerate(sizes_BS):
      sizes_S = np.where(allowed_BTS[row, output], 0.0, sizes_S)
      size = float(sizes_S.max(initial=0.0))
      known = leaks.get((row, output))
      if size > tolerance and (known is None or known.size < size):
        inputs = tuple(np.flatnonzero(sizes_S > tolerance).tolist())
        leaks[row, output] = Leak(form, row, output, inputs, size)
  return list(leaks.values()), response


def _changes(
    changed_fn: Callable[[np.ndarray, np.ndarray], Array], replacements: Sequence[np.ndarray],
    base: np.ndarray, allowed_BTS: np.ndarray, positions: Sequence[int],
) -> Iterator[tuple[int, np.ndarray, float]]:
  """How far output t moves when all that it must not see is replaced."""
  for replacement in replacements:
    everything = np.asarray(changed_fn(replacement, np.ones(allowed_BTS.shape[:2], bool)))
    response = float(np.nan_to_num(np.abs(everything - base).astype(np.float32)).max())
    for output in positions:
      hidden_BS = ~allowed_BTS[:, output]
      if not hidden_BS.any():
        continue
      moved = np.asarray(changed_fn(replacement, hidden_BS))[:, output] - base[:, output]
      moved_B = np.abs(moved.astype(np.float32)).reshape(len(moved), -1).max(-1)
      # NaN would pass every comparison.
      moved_B = np.where(np.isnan(moved_B), np.inf, moved_B)
      yield output, np.where(hidden_BS, moved_B[:, None], 0.0), response


def _replacement(inputs: Array, number: int, vocab_size: Optional[int], seed: int) -> np.ndarray:
  """Other inputs: tokens that all differ, or vectors moved by noise at one of the SCALES."""
  rng = np.random.default_rng([seed, number])
  if jnp.issubdtype(inputs.dtype, jnp.integer):
    shift = rng.integers(1, vocab_size, inputs.shape)
    return ((np.asarray(inputs) + shift) % vocab_size).astype(inputs.dtype)
  # Added, not put in place of the inputs: these may come from the same generator, and be equal.
  noise = SCALES[number % len(SCALES)] * rng.standard_normal(inputs.shape)
  return (np.asarray(inputs, np.float64) + noise).astype(inputs.dtype)


def _gradients(
    apply_fn: Function, inputs: Array, positions: Sequence[int], seed: int
) -> Iterator[tuple[int, np.ndarray, float]]:
  """Size of d(random projection of output t) / d input s, for every s."""
  function, point = apply_fn, inputs
  if jnp.issubdtype(inputs.dtype, jnp.integer):
    function, point = _over_embeddings(apply_fn, inputs)

  @jax.jit
  def gradient(direction, output):
    outputs, pullback = jax.vjp(function, point)
    mask_T = jnp.arange(outputs.shape[1]) == output
    cotangent = direction * mask_T.reshape(1, -1, *(1,) * (outputs.ndim - 2))
    grad = jnp.abs(pullback(cotangent.astype(outputs.dtype))[0].astype(jnp.float32))
    return grad.reshape(*grad.shape[:2], -1).max(-1)

  shape = jax.eval_shape(apply_fn, inputs).shape
  direction = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
  for output in positions:
    sizes_BS = np.asarray(gradient(direction, output))
    sizes_BS = np.where(np.isnan(sizes_BS), np.inf, sizes_BS)
    yield output, sizes_BS, float(sizes_BS[:, output].max())


def _vocab_size(apply_fn: Function, tokens_BT: Array) -> int:
  """That of the embedding of the tokens, or as large as the tokens need."""
  sizes = []

  def note_size(call, args, kwargs, context):
    if _embeds(context, args, tokens_BT):
      sizes.append(context.module.num_embeddings)
    return call(*args, **kwargs)

  with nn.intercept_methods(note_size):
    jax.eval_shape(apply_fn, tokens_BT)
  return sizes[0] if sizes else max(int(tokens_BT.max()) + 1, 2)


def _embeds(context: Any, args: Any, tokens_BT: Array) -> bool:
  """Whether an intercepted call is that of an embedding of the tokens."""
  return (isinstance(context.module, nn.Embed) and context.method_name == "__call__"
          and args[0].shape == tokens_BT.shape)


def _over_embeddings(apply_fn: Function, tokens_BT: Array) -> tuple[Function, Array]:
  """The function of what is added to the token embeddings, and the point zero [B, T, D]."""

  def intercepted(shift: Optional[Array]) -> tuple[Array, Array]:
    shapes = []

    def add_shift(call, args, kwargs, context):
      embedding = call(*args, **kwargs)
      if shapes or not _embeds(context, args, tokens_BT):
        return embedding
      shapes.append(embedding)
      return embedding if shift is None else embedding + shift.astype(embedding.dtype)

    with nn.intercept_methods(add_shift):
      outputs = apply_fn(tokens_BT)
    if not shapes:
      raise ValueError("no nn.Embed is applied to the tokens inside the function; audit a function"
                       " of vectors, or leave 'gradient' out of forms")
    return outputs, shapes[0]

  embedding = jax.eval_shape(lambda: intercepted(None)[1])
  return lambda shift: intercepted(shift)[0], jnp.zeros(embedding.shape, embedding.dtype)
