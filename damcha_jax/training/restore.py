"""Trained parameters without the rest of the train state, for whoever only uses a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from damcha_jax.config import DecoderConfig, for_any_device
from damcha_jax.errors import CheckpointError, silence_orbax_threads, WorkdirError
from damcha_jax.models.decoder import DecoderLM, init_params, make_decoder
from damcha_jax.models.stack import unstack_layers
from damcha_jax.training.checkpoint import checksums, one_line
from damcha_jax.training.sharding import path_name
from damcha_jax.training.result import read_result
from damcha_jax.training.workdir import Workdir, is_number

PyTree = Any
CHECKPOINTS = ("best", "last")


class RunDescription(NamedTuple):
  """What a run's `config.json` says: which attention (or task) with which seed, and the config."""

  name: str
  seed: int
  config: dict[str, Any]  # without `attentions` and `seeds`


def describe_run(directory: Path) -> RunDescription:
  """Reads the `config.json` of one run's directory.

  Raises:
    WorkdirError: there is none, or it is not a run's.
  """
  contents = Workdir(directory).read_config()
  run = contents.pop("run", None) if contents is not None else None
  if not (isinstance(run, dict) and isinstance(run.get("name"), str)
          and type(run.get("seed")) is int):
    raise WorkdirError(f"{directory} is not the directory of a run; name one that training wrote")
  return RunDescription(run["name"], run["seed"], contents)


def restore_params(directory: Path, abstract_params: PyTree, which: str | int,
                   selection_metric: str, note: Callable[[str], None]) -> tuple[int, PyTree]:
  """The step and parameters of a run's best or last checkpoint, or that of a step.

  Nothing is written. Of best and last ones, a checkpoint that cannot be read, or whose checksums
  differ, is named in a note and passed over.

  Args:
    directory: the run's own directory.
    abstract_params: `ShapeDtypeStruct`s of the parameters, with the shardings that they shall have.
    which: 'best' (which `result.json` reports, and before there is one the first of the lowest
      validation metric among those kept), 'last', or the step that `result.json` reports.
    selection_metric: key of that metric in `metrics.jsonl`.
    note: prints one line.

  Raises:
    CheckpointError: no checkpoint is readable, or not that of the step.
  """
  if isinstance(which, int):
    try:
      return which, restore_step(directory, which, abstract_params)
    except CheckpointError as error:
      raise CheckpointError(f"{error}, and result.json reports step {which}; restore the files, or "
                            "remove result.json, and the command that trained the run evaluates "
                            "the best that is left") from error
  steps = kept_steps(directory)
  if which == "best":
    scores = validation_scores(directory / "metrics.jsonl", selection_metric)
    # What was never evaluated comes last, the newest of it first; of equals the first is best.
    steps.sort(key=lambda step: (scores.get(step, float("inf")), step if step in scores else -step))
    result = read_result(Workdir(directory))
    if result is not None and steps:
      reported = result["best"]["step"]
      steps = [reported, *(step for step in steps if step != reported)]
    elif steps and not scores.keys() & set(steps):
      note(f"no checkpoint has a {selection_metric} in {directory / 'metrics.jsonl'}: taking the "
           "last")
  for step in steps:
    try:
      return step, restore_step(directory, step, abstract_params)
    except CheckpointError as error:
      note(f"{error}; trying the next")
  raise CheckpointError(f"no {'readable ' if steps else ''}checkpoint in {directory}; train first: "
                        "the command that made the directory goes on where it stopped")


def one_device_targets(init: Callable[[jax.Array], PyTree]) -> PyTree:
  """What `restore_params` takes to put the parameters that `init(key)` makes on one device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
      nn.unbox(jax.eval_shape(init, jax.random.key(0))))


def restore_decoder(directory: Path, config: DecoderConfig, attention: str, which: str | int,
                    note: Callable[[str], None]) -> tuple[DecoderLM, int, PyTree]:
  """The decoder of a run, made for sampling, with the step and parameters of a checkpoint.

  It has unrolled layers, which decode faster than scanned ones and compute the same, its parameters
  lie on one device, and that need not be of the kind which the run's attention was trained on.

  Raises:
    CheckpointError: no checkpoint is readable.
  """
  config = for_any_device(config)
  model = make_decoder(config, attention)
  targets = one_device_targets(
      lambda key: init_params(model, key, jnp.zeros((1, 1), jnp.int32)))
  step, params = restore_params(directory, targets, which, "nats_per_token", note)
  unrolled = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=False))
  return (make_decoder(unrolled, attention, evaluation=True, decode=True), step,
          unstack_layers(params) if config.model.scan_layers else params)


def kept_steps(directory: Path) -> list[int]:
  """Steps of a run's finished checkpoints, newest first."""
  checkpoints = directory / "checkpoints"  # in which unfinished ones have no number for a name
  names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
  return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def validation_scores(path: Path, metric: str) -> dict[int, float]:
  """A metric on the validation split by step; see `recorded`."""
  return recorded(path, metric, "validation")


def recorded(path: Path, metric: str, split: str) -> dict[int, float]:
  """A metric on a split by step, from what is readable of a `metrics.jsonl`."""
  return {record["step"]: record[metric] for record in _records(path)
          if record is not None and record["split"] == split and is_number(record.get(metric))}


def is_whole(path: Path) -> bool:
  """Whether every line of a `metrics.jsonl` can be read, but for a last one torn by a crash."""
  return None not in list(_records(path))[:-1]


def _records(path: Path) -> Iterator[Optional[dict[str, Any]]]:
  """Of each line; None for what is no record, as is the torn last line of a run that is going on."""
  text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
  for line in text.splitlines():
    try:
      record = json.loads(line)
      yield record if isinstance(record.get("step"), int) and "split" in record else None
    except (AttributeError, ValueError):
      yield None


def restore_step(directory: Path, step: int, abstract_params: PyTree) -> PyTree:
  """The parameters of one checkpoint; see `restore_params`.

  Raises:
    CheckpointError: it is missing, unreadable, or its checksums differ.
  """
  silence_orbax_threads()
  path = directory / "checkpoints" / str(step)
  item = {"params": abstract_params}
  try:
    with ocp.PyTreeCheckpointer() as checkpointer:
      params = checkpointer.restore(path / "state", args=ocp.args.PyTreeRestore(
          item, restore_args=ocp.checkpoint_utils.construct_restore_args(item),
          partial_restore=True))["params"]
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
      expected = checkpointer.restore(path / "meta")["checksums"]
  except Exception as error:  # Orbax and its storage raise many kinds
    raise CheckpointError(f"checkpoint {path} is unreadable ({one_line(error)})") from error
  leaves, _ = jax.tree_util.tree_flatten_with_path({"params": params})
  for (leaf_path, _), checksum in zip(leaves, checksums(params)):
    name = path_name(leaf_path)
    if expected.get(name) != checksum:
      raise CheckpointError(f"checkpoint {path} is corrupt (the checksum of '{name}' differs)")
  return params
