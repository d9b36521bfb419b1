"""A run's update as shapes alone: what is lowered, compiled and counted with nothing allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
import jax.numpy as jnp

from damcha_jax.config import DecoderConfig, ImageClassificationConfig, TextGenerationConfig
from damcha_jax.training import optimizer as optimizer_lib
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training import state as state_lib
from damcha_jax.training.decoder import decoder_task
from damcha_jax.training.flops import model_flops_per_step
from damcha_jax.training.image_classification import classifier_task
from damcha_jax.training.step import make_train_step, TrainStep
from damcha_jax.training.task import Task


class AbstractUpdate(NamedTuple):
  """An update that nobody has to run.

  Attributes:
    task: what is trained.
    targets: shapes and shardings of the train state.
    batch: those of the batch.
    step: the jitted `(state, batch) -> (state, metrics)`, for `step.lower(targets, batch)`.
  """

  task: Task
  targets: state_lib.TrainState
  batch: Mapping[str, jax.ShapeDtypeStruct]
  step: TrainStep

  def flops(self) -> int:
    """Of the model, as MFU counts them."""
    return model_flops_per_step(self.task, self.targets.params, self.batch)


def abstract_update(task: Task, config: Any, mesh: Mesh | AbstractMesh,
                    batch: Mapping[str, Any]) -> AbstractUpdate:
  """The update of `task` on a mesh, which may be of devices that are not there.

  Args:
    task: what is trained; its data is not read.
    config: as `loop.train` takes it.
    mesh: of the axes `sharding.AXES`.
    batch: arrays or shapes, [B, ..] each, of the whole batch.

  Raises:
    ConfigError: the configuration cannot run on the mesh.
  """
  sharding_lib.check_batch_size(config.batch_size, config.optimizer.accumulation_steps, mesh)
  partitioning = sharding_lib.Partitioning(mesh, config.logical_rules)
  optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps,
                                           task.parameter_groups, task.ema_decay)
  root = state_lib.root_key(0, config.prng_impl)
  targets = state_lib.sharded_targets(state_lib.abstract_state(task, optimizer, root), partitioning)
  schedule = optimizer_lib.learning_rate_schedule(config.optimizer, config.num_steps)
  step = make_train_step(task, optimizer, schedule, root, partitioning, targets,
                         config.optimizer.accumulation_steps)
  placed = {name: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=partitioning.batch)
            for name, rows in batch.items()}
  return AbstractUpdate(task, targets, placed, step)


def abstract_run(config: DecoderConfig | ImageClassificationConfig, attention: str,
                 mesh: Mesh | AbstractMesh) -> AbstractUpdate:
  """`abstract_update` of one run of an experiment, without its data.

  Raises:
    ConfigError: the model cannot be built, or cannot run on the mesh.
  """
  if isinstance(config, ImageClassificationConfig):
    task = classifier_task(config, attention, train_source=None, eval_sources={}, probe={})
    size = config.model.image_size
    batch = {"inputs": ((size, size, 3), jnp.uint8), "targets": ((), jnp.int32),
             "weights": ((), jnp.float32)}
  else:
    task = decoder_task(config, attention, train_source=None, eval_sources={}, metrics_of=dict,
                        probe={})
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if isinstance(config, TextGenerationConfig):  # whose rows are padded, and may be packed
      dtypes["padding_mask"] = jnp.bool_
      if config.data.packing:
        dtypes["segment_ids"] = jnp.int32
    batch = {name: ((config.context_length,), dtype) for name, dtype in dtypes.items()}
  return abstract_update(task, config, mesh, {
      name: jax.ShapeDtypeStruct((config.batch_size, *shape), dtype)
      for name, (shape, dtype) in batch.items()})
