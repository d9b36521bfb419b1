"""Typed configuration of the synthetic tasks (paper Section 5.6)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from damcha_jax.config.conversion import names_differ, require
from damcha_jax.config.sections import (AttentionsConfig, CheckpointConfig, EvaluationConfig,
                                        LoggingConfig, MeshConfig, OptimizerConfig,
                                        check_attentions, check_num_layers)

TASKS = ("classification", "retrieval")
MAX_SIZE = 10**6  # more of anything takes more memory, or precision, than there is
MAX_FEATURES = 4096  # of models of which there is one for every entanglement and seed


@dataclasses.dataclass(frozen=True)
class LookupConfig:
  """One task: N items, Q queries, C symbols, and the model that reads it."""

  num_items: int
  num_queries: int
  num_classes: int
  separation: float
  causal: bool
  damcha_context: Literal["prefix", "sequence", "learned"]


@dataclasses.dataclass(frozen=True)
class LookupModelConfig:
  """N layers, H heads; the width is what a task's features and symbols take."""

  num_layers: int
  num_heads: int
  symbol_features: int  # of each head's slice, beside its subspace
  mlp_features: int  # with MHA; the others' is what gives them as many parameters
  initializer: Literal["gpt2", "lecun"]
  attention_implementation: Literal["auto", "plain", "xla", "cudnn"]
  dtype: Literal["float32", "bfloat16"]
  param_dtype: Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class SyntheticConfig(AttentionsConfig):
  """The study: every attention on every task over entanglements and feature dimensions.

  What `damcha.context` is, a task says.
  """

  experiment: str
  name: str  # of the config file
  size: str
  tasks: str  # comma-separated
  attentions: str  # comma-separated
  seeds: tuple[int, ...]
  entanglements: tuple[float, ...]  # ascending from 0, at `dimension`
  dimension: int
  dimensions: tuple[int, ...]  # ascending, `dimension` among them; others at both ends of the above
  num_steps: int
  batch_size: int
  num_held_out: int  # sequences of the validation and of the test split
  classification: LookupConfig
  retrieval: LookupConfig
  model: LookupModelConfig
  full_width_rank: int  # of the update of damcha_full_width
  optimizer: OptimizerConfig
  mesh: MeshConfig
  logical_rules: tuple[tuple[str, Any], ...]
  evaluation: EvaluationConfig
  checkpoint: CheckpointConfig
  logging: LoggingConfig
  prng_impl: Literal["threefry2x32", "rbg", "unsafe_rbg"]

  def __post_init__(self):
    for name, values in (("tasks", self.task_names), ("attentions", self.attention_names),
                         ("seeds", self.seeds)):
      require(0 < len(values) == len(set(values)),
              f"config key '{name}' must name at least one entry and none twice, not {values}")
    for task in self.task_names:
      require(task in TASKS,
              f"unknown task '{task}' in config key 'tasks'; choose from {', '.join(TASKS)}")
    require(all(0 <= seed < 2**63 for seed in self.seeds),
            f"config key 'seeds' must hold numbers from 0 to 2^63 - 1, not {self.seeds}")
    self._check_grid()
    self._check_sizes()
    check_attentions(self)
    require(self.optimizer.clip_norm == 0,
            f"optimizer.clip_norm={self.optimizer.clip_norm} would make seeds that are trained "
            "together depend on one another; use 0")
    require(self.damcha.block_ablation_train == self.damcha.block_ablation_eval == "full",
            "this experiment ablates no blocks; use damcha.block_ablation_train='full' and "
            "damcha.block_ablation_eval='full'")

  def _check_grid(self) -> None:
    strengths, dimensions = self.entanglements, self.dimensions
    require(len(strengths) > 1 and strengths[0] == 0 and strengths[-1] <= 1
            and list(strengths) == sorted(set(strengths)) and names_differ(strengths),
            f"config key 'entanglements' must ascend from 0, the control, to at most 1, not "
            f"{strengths}")
    require(self.dimension in dimensions and list(dimensions) == sorted(set(dimensions)),
            f"config key 'dimensions' must ascend and hold dimension={self.dimension}, not "
            f"{dimensions}")

  def _check_sizes(self) -> None:
    model = self.model
    positive = {"num_steps": self.num_steps, "batch_size": self.batch_size,
                "num_held_out": self.num_held_out, "full_width_rank": self.full_width_rank,
                "dimensions": self.dimensions[0],
                **{f"{task}.{name}": getattr(self.lookup(task), name) for task in TASKS
                   for name in ("num_items", "num_queries", "num_classes", "separation")}}
    for name, value in positive.items():
      require(0 < value <= MAX_SIZE,
              f"config key '{name}' is {value}; it must be positive, and at most {MAX_SIZE}")
    for name in ("num_layers", "num_heads", "symbol_features", "mlp_features"):
      value = getattr(model, name)
      require(0 < value <= MAX_FEATURES, f"config key 'model.{name}' is {value}; it must be "
              f"positive, and at most {MAX_FEATURES:,}")
    require(self.dimensions[-1] <= MAX_FEATURES, f"config key 'dimensions' has "
            f"{self.dimensions[-1]}; it must be at most {MAX_FEATURES:,}")
    check_num_layers("model", model.num_layers)

  @property
  def task_names(self) -> tuple[str, ...]:
    return tuple(self.tasks.split(","))

  @property
  def attention_names(self) -> tuple[str, ...]:
    return tuple(self.attentions.split(","))

  def lookup(self, task: str) -> LookupConfig:
    return {"classification": self.classification, "retrieval": self.retrieval}[task]

  def entanglements_at(self, dimension: int) -> tuple[float, ...]:
    """All of them at the main dimension, both ends at the others."""
    ends = (self.entanglements[0], self.entanglements[-1])
    return self.entanglements if dimension == self.dimension else ends
