"""What a model family must say about itself to be trained by `damcha_jax.training.loop`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Optional, Protocol

import jax
import numpy as np

PyTree = Any
Batch = dict[str, np.ndarray]
Sums = dict[str, jax.Array]


class TrainSource(Protocol):
  """Training data indexed by step, so that a resumed run needs no iterator state."""

  def batch_at(self, step: int) -> Batch:
    """This process's rows of the batch that update number `step` (from 0) consumes."""


class EvalSource(Protocol):
  """A finite split, read in order."""

  def __len__(self) -> int:
    """The number of examples."""

  def batch(self, start: int, batch_size: int) -> Batch:
    """Examples `start ..`, padded with zero-weight rows up to `batch_size` rows."""


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
  """How the optimizer treats the parameters whose path matches `pattern`.

  Attributes:
    pattern: regular expression searched for in the path, e.g. `layers_0/attention/value/kernel`.
      The first group that matches wins and every parameter must match one.
    decay: whether decoupled weight decay applies.
    copies: the number of equal-gradient copies one stored leaf stands for. It is H for the output
      layer of a `rowsum` generator, whose leaf is the sum of H blocks that always receive equal
      updates: learning rate times H, weight decay divided by H, squared norm times H in clipping.
  """

  pattern: str
  decay: bool
  copies: int = 1


@dataclasses.dataclass(frozen=True)
class Task:
  """One model on one data set.

  Attributes:
    name: what is trained, e.g. the attention's name; recorded with the run.
    model: the module, kept for whoever wants to apply the trained parameters.
    init_params: `rng -> params`, boxed by `nn.with_logical_partitioning`. Called under jit.
    loss_fn: `(params, batch, dropout_rng or None) -> (loss_sum, sums)`. The loss that is minimised
      is `loss_sum / sums['weight']`, both added up over the whole batch before dividing. `sums` is
      a dict of scalars.
    eval_loss_fn: `(params, batch) -> sums` with one number per example in each entry, `[B]`, so
      that totals can be taken in float64 in an order that does not depend on the batch size.
    train_source: training batches by step.
    eval_sources: `split -> source`. A name `split/part` also counts towards the pooled `split`.
    metrics_of: `sums -> metrics`, for sums that are added over any number of examples.
    selection_metric: the metric of split `validation` by which the best checkpoint is chosen;
      lower is better.
    parameter_groups: the optimizer's treatment of every parameter.
    diagnostics: `params -> {name: scalar}`, recorded before the first update and with every
      evaluation under split `diagnostics`; may be empty.
    ema_decay: of an exponential moving average of the parameters over updates, which is then what
      is evaluated and diagnosed; None: the parameters themselves.
    data_hashes: by name, of the files that the data come from and of the tokenizer; recorded with
      the run, which goes on with these only.
    unit: what `sums['weight']` counts, for the speed that is recorded, `<unit>_per_second`.
  """

  name: str
  model: Any
  init_params: Callable[[jax.Array], PyTree]
  loss_fn: Callable[[PyTree, Batch, Optional[jax.Array]], tuple[jax.Array, Sums]]
  eval_loss_fn: Callable[[PyTree, Batch], Sums]
  train_source: TrainSource
  eval_sources: Mapping[str, EvalSource]
  metrics_of: Callable[[Mapping[str, float]], dict[str, float]]
  selection_metric: str
  parameter_groups: tuple[ParameterGroup, ...]
  diagnostics: Callable[[PyTree], Mapping[str, jax.Array]] = lambda params: {}
  ema_decay: Optional[float] = None
  data_hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unit: str = "tokens"
