"""The trained models of a workdir, whichever experiment wrote it, ready to be looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import numpy as np

from damcha_jax.config import ConfigError, freeze
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.errors import CheckpointError, WorkdirError
from damcha_jax.models.stack import stack_layers, unstack_layers
from damcha_jax.training import restore
from damcha_jax.training import state as state_lib
from damcha_jax.training.image_classification import image_classification_task
from damcha_jax.training.image_generation import image_generation_task
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.synthetic import lane_of, lane_task, synthetic_task
from damcha_jax.training.task import Batch, Task
from damcha_jax.training.text_generation import text_generation_task
from damcha_jax.training.workdir import Workdir
from experiments import common

PyTree = Any
MAKE_TASK: dict[str, Callable[[Any, str, int], Task]] = {
    "gpt2_enwik8": language_model_task, "image_generation": image_generation_task,
    "text_generation": text_generation_task, "vit_imagenet": image_classification_task,
}
# Layers are looked at one by one, in float32, with weights that fused kernels never form.
_PLAIN = {"scan_layers": False, "remat": False, "attention_implementation": "plain",
          "dtype": "float32"}


class Choice(NamedTuple):
  """What is asked for; None: all there is."""

  attentions: Optional[Sequence[str]] = None
  seeds: Optional[Sequence[int]] = None
  steps: Optional[Sequence[int]] = None
  num_examples: int = 16


@dataclasses.dataclass(frozen=True)
class Run:
  """One trained model.

  Attributes:
    attention, seed, dataset, variant: as in a summary's rows.
    directory: its checkpoints'.
    task: of the model with unrolled layers.
    initial: makes the parameters that training started from.
    targets: what `restore_step` takes.
    unstacked: turns what is restored into the parameters of `task.model`.
  """

  attention: str
  seed: int
  dataset: str
  variant: Optional[str]
  directory: Path
  task: Task
  initial: Callable[[], PyTree]
  targets: PyTree
  unstacked: Callable[[PyTree], PyTree]

  @property
  def name(self) -> str:
    """Of its files."""
    where = [self.dataset, self.variant] if self.variant else []
    return "-".join([*where, self.attention, f"seed{self.seed}"])

  def checkpoints(self, steps: Optional[Sequence[int]]) -> Iterator[tuple[int, PyTree]]:
    """Steps and parameters, oldest first; the initial ones, step 0, are always there.

    A checkpoint that cannot be read is named in a note and passed over.

    Raises:
      ConfigError: a step that is asked for is not kept.
      CheckpointError: none of the checkpoints can be read.
    """
    kept = restore.kept_steps(self.directory)[::-1]
    for step in steps or ():
      if step not in (0, *kept):
        raise ConfigError(f"--steps={step} is no step that {self.directory} keeps; it has 0, "
                          f"{', '.join(map(str, kept))}")
    yield 0, self.initial()
    num_read = 0
    for step in kept if steps is None else sorted(set(steps) - {0}):
      try:
        params = restore.restore_step(self.directory, step, self.targets)
      except CheckpointError as error:
        common.note(f"{error}; going on without it")
        continue
      num_read += 1
      yield step, self.unstacked(params)
    if not num_read and set(steps or ()) != {0}:  # which asks for none
      raise CheckpointError(f"no readable checkpoint in {self.directory}; train first: the command "
                            "that made the directory goes on where it stopped")

  def training_batch(self, num_examples: int) -> Batch:
    """The first examples of the first batch."""
    batch = self.task.train_source.batch_at(0)
    return {name: rows[:num_examples] for name, rows in batch.items()}

  def held_out(self, num_examples: int) -> Batch:
    """Examples from all over the validation split, or its first source."""
    source = next(source for split, source in self.task.eval_sources.items()
                  if split.split("/")[0] == "validation")
    count = min(num_examples, len(source))
    rows = [source.batch(index * len(source) // count, 1) for index in range(count)]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def find_runs(workdir: Path, choice: Choice) -> tuple[Any, list[Run]]:
  """The workdir's frozen config, and its runs that have checkpoints.

  Raises:
    WorkdirError: the directory holds no runs that can be analysed.
    ConfigError: none of its runs is asked for.
    CheckpointError: none has a checkpoint.
  """
  config = _read_config(workdir)
  _check(choice, config)
  find = _synthetic_runs if isinstance(config, SyntheticConfig) else _suite_runs
  chosen = [(directory, make) for attention, seed, directory, make in find(config, workdir)
            if choice.attentions is None or attention in choice.attentions
            if choice.seeds is None or seed in choice.seeds]
  runs = []
  for directory, make in chosen:
    if restore.kept_steps(directory):
      runs.append(make())
    else:
      common.note(f"{directory} has no checkpoint: nothing to analyse there yet")
  if not runs:
    raise CheckpointError(f"no checkpoint in {workdir}; train first: the command that made the "
                          "directory goes on where it stopped")
  return config, runs


def _read_config(workdir: Path) -> Any:
  contents = Workdir(workdir).read_config() or {}
  experiment = contents.get("experiment")
  if experiment == "ablations":
    raise WorkdirError(f"{workdir} holds ablations, whose variants are analysed one by one; name "
                       "the folder of one, <workdir>/<dataset>/<variant>")
  if "run" in contents:
    raise WorkdirError(f"{workdir} is the directory of a single run; name the one that training "
                       "was given, and choose with --attentions and --seeds")
  if experiment == "synthetic":
    return freeze(contents, SyntheticConfig)
  if experiment not in MAKE_TASK:
    raise WorkdirError(f"{workdir} holds no runs of {', '.join(MAKE_TASK)}, synthetic; name the "
                       "directory that training wrote")
  return freeze(contents, common.CONFIG_CLASSES[experiment])


def _check(choice: Choice, config: Any) -> None:
  for flag, asked, there in (("attentions", choice.attentions, config.attention_names),
                             ("seeds", choice.seeds, config.seeds)):
    if asked is not None and not asked:
      raise ConfigError(f"--{flag}= names none; the workdir has {', '.join(map(str, there))}")
    for one in asked or ():
      if one not in there:
        raise ConfigError(f"--{flag}={one} is none of the workdir's, which are "
                          f"{', '.join(map(str, there))}")


Found = Iterator[tuple[str, int, Path, Callable[[], Run]]]  # attention, seed, directory, the run


def _suite_runs(config: Any, workdir: Path) -> Found:
  for attention, seed, own in common.runs(config):
    directory = common.run_dir(workdir, attention, seed)
    yield attention, seed, directory, lambda own=own, where=(attention, seed, directory): (
        _suite_run(own, *where))


def _suite_run(config: Any, attention: str, seed: int, directory: Path) -> Run:
  model = config.model
  plain = dataclasses.replace(config, model=dataclasses.replace(model, **_PLAIN))
  task = MAKE_TASK[config.experiment](plain, attention, seed)
  Workdir(directory).check_data(task.data_hashes)
  stored = stack_layers if model.scan_layers else lambda params: params
  return Run(
      attention, seed, config.dataset, None, directory, task,
      initial=lambda: _initial(task, state_lib.root_key(seed, config.prng_impl)),
      targets=restore.one_device_targets(lambda key: stored(nn.unbox(task.init_params(key)))),
      unstacked=unstack_layers if model.scan_layers else lambda params: params)


def _synthetic_runs(config: SyntheticConfig, workdir: Path) -> Found:
  """Models of the main dimension at the strongest entanglement."""
  dimension, entanglement = config.dimension, config.entanglements[-1]
  for task in config.task_names:
    for attention in config.attention_names:
      directory = workdir / task / f"d{dimension}" / attention
      for seed in config.seeds:
        yield attention, seed, directory, lambda where=(task, attention, seed, directory): (
            _synthetic_run(config, dimension, entanglement, *where))


def _synthetic_run(config: SyntheticConfig, dimension: int, entanglement: float, name: str,
                   attention: str, seed: int, directory: Path) -> Run:
  task = lane_task(config, name, dimension, attention, entanglement, seed)
  lanes = synthetic_task(config, name, dimension, attention)
  return Run(
      attention, seed, name, f"e{entanglement:g}_d{dimension}", directory, task,
      initial=lambda: _initial(task, state_lib.root_key(seed, config.prng_impl)),
      targets=restore.one_device_targets(lanes.init_params),
      unstacked=lambda params: lane_of(config, dimension, entanglement, seed, params))


def _initial(task: Task, root: jax.Array) -> PyTree:
  """As training made them: a scanned model has the numbers of the unrolled one."""
  return jax.jit(lambda key: nn.unbox(state_lib.initial_params(task, key)))(root)
