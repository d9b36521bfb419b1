"""AdamW with warm-up, cosine decay, global-norm clipping and groups that cover every parameter.

A `rowsum` generator stores the sum of H blocks that always receive equal gradients (the paper's
RowSum, Section 3.3, is linear). To train the same function as the H blocks, its leaf takes H times
the learning rate, 1/H of the decoupled weight decay (so that the product, which shrinks each block
by the same factor, stays), and counts H times in the squared global norm. `ParameterGroup.copies`
carries that H.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import optax

from damcha_jax.config import ConfigError, OptimizerConfig
from damcha_jax.training.sharding import path_name
from damcha_jax.training.task import ParameterGroup

PyTree = Any
Groups = tuple[ParameterGroup, ...]


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Linear warm-up, then half a cosine down to `end_learning_rate_factor` of the peak.

  Update n (from 0) uses `(n+1)/warmup_steps` of the peak while `n < warmup_steps`, so that the
  first update already moves; the last of `num_steps` updates uses the end value.
  """
  if not 0 <= config.warmup_steps < max(num_steps, 1):
    raise ConfigError(f"optimizer.warmup_steps {config.warmup_steps} must be at least 0 and less "
                      f"than num_steps {num_steps}; lower it or train longer")
  peak, end_factor = config.learning_rate, config.end_learning_rate_factor
  decay_steps = max(num_steps - 1 - config.warmup_steps, 1)

  def schedule(count):
    warmup = (count + 1) / max(config.warmup_steps, 1)
    progress = jnp.clip((count - config.warmup_steps) / decay_steps, 0.0, 1.0)
    cosine = end_factor + (1 - end_factor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return peak * jnp.where(count < config.warmup_steps, warmup, cosine)

  return schedule


class AveragedParams(NamedTuple):
  """The part of the optimizer's state that holds averaged parameters."""

  params: PyTree


def make_optimizer(config: OptimizerConfig, num_steps: int, groups: Groups,
                   ema_decay: Optional[float] = None) -> optax.GradientTransformation:
  """AdamW: clip by global norm, Adam, decoupled weight decay by group, scheduled learning rate.

  `clip_norm` 0 turns clipping off. Decay is decoupled and scaled by the learning rate, as in
  `optax.adamw` and `torch.optim.AdamW`. With an `ema_decay` the state also holds `AveragedParams`.

  Raises:
    ConfigError: the schedule is impossible (see `learning_rate_schedule`).
  """
  schedule = learning_rate_schedule(config, num_steps)
  averaging = () if ema_decay is None else (_average_params(ema_decay),)
  return optax.chain(
      _clip_by_global_norm(config.clip_norm, groups),
      optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
      _add_decayed_weights(config.weight_decay, groups),
      _scale_by_copies(groups),
      optax.scale_by_learning_rate(schedule),
      *averaging)


def averaged_params(opt_state: PyTree) -> Optional[PyTree]:
  """The averaged parameters in the state of `make_optimizer`, or None without `ema_decay`."""
  return next((part.params for part in opt_state if isinstance(part, AveragedParams)), None)


def global_norm(tree: PyTree, groups: Groups) -> jax.Array:
  """`sqrt(sum_leaves copies * |leaf|^2)`: the norm of the tree with every copy written out."""
  return jnp.sqrt(sum(leaf_square_norms(tree, groups)))


def leaf_square_norms(tree: PyTree, groups: Groups) -> list[jax.Array]:
  """`copies * |leaf|^2` of each leaf, in tree order and at least in float32."""
  def square(path, leaf):
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return group_of(path_name(path), groups).copies * jnp.sum(jnp.square(wide))
  return jax.tree.leaves(jax.tree_util.tree_map_with_path(square, tree))


def group_of(name: str, groups: Groups) -> ParameterGroup:
  """The first group whose pattern is found in the path `name`.

  Raises:
    ConfigError: no group covers the parameter.
  """
  for group in groups:
    if re.search(group.pattern, name):
      return group
  raise ConfigError(f"parameter '{name}' is in no parameter group; add a pattern that covers it to "
                    f"the task's groups: {', '.join(group.pattern for group in groups)}")


def check_groups(params: PyTree, groups: Groups) -> None:
  """Raises `ConfigError` unless every parameter is in a group."""
  jax.tree_util.tree_map_with_path(lambda path, _: group_of(path_name(path), groups), params)


def _clip_by_global_norm(max_norm: float, groups: Groups) -> optax.GradientTransformation:
  def clip(updates, params):
    del params
    if max_norm <= 0:
      return updates
    scale = max_norm / jnp.maximum(global_norm(updates, groups), max_norm)
    return jax.tree.map(lambda update: (update * scale).astype(update.dtype), updates)
  return optax.stateless(clip)


def _add_decayed_weights(weight_decay: float, groups: Groups) -> optax.GradientTransformation:
  def add(path, update, param):
    group = group_of(path_name(path), groups)
    return update + (weight_decay / group.copies) * param if group.decay else update
  return optax.stateless(
      lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def _scale_by_copies(groups: Groups) -> optax.GradientTransformation:
  def scale(path, update):
    return group_of(path_name(path), groups).copies * update
  return optax.stateless(
      lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def _average_params(decay: float) -> optax.GradientTransformation:
  """average = decay average + (1 - decay) parameters, after each update; first the initial ones."""
  def init(params):
    # Copies, for the state is donated, and no buffer can be given away twice.
    return AveragedParams(jax.tree.map(jnp.copy, params))

  def update(updates, state, params):
    average = jax.tree.map(
        lambda average, param, update: (
            decay * average + (1 - decay) * (param + update)).astype(average.dtype),
        state.params, params, updates)
    return updates, AveragedParams(average)

  return optax.GradientTransformation(init, update)
