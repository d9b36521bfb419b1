"""What trained models made of their metrics, gradients and attention: Figure 8, Appendices F to H.

  python -m experiments.analysis --workdir=runs/gpt2_enwik8/mix-cpu
  python -m experiments.analysis --workdir=runs/gpt2_enwik8/mix-cpu --attentions=damcha --steps=2500

Reads the checkpoints of any experiment that trains models, and writes only into <workdir>/analysis.
docs/analysis.md defines what is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
import sys
from typing import Any, Optional

from absl import flags
from flax import linen as nn
import jax
import numpy as np

from damcha_jax import reporting
from damcha_jax.analysis import geometry
from damcha_jax.analysis import gradient_flow
from damcha_jax.analysis import probe
from damcha_jax.config import ConfigError
from damcha_jax.reporting import Measurement
from damcha_jax.training.task import Batch, Task
from damcha_jax.training.workdir import Workdir, write_atomically, writing
from experiments import analysis_figures
from experiments import command_line
from experiments.analysis_runs import Choice, find_runs, Run
from experiments.findings import Findings, Snapshot

METRICS = "metrics and blocks"
# What is printed of all that `summary.json` holds.
PRINTED = {"metric_distance", "effective_rank", "rank_max", "asymmetry", "adaptivity",
           "diagonal_share", "block_drift", "block_spread_max", "grad_norm_metric",
           "grad_norm_values_and_output", "grad_norm_feed_forward", "grad_alignment"}


def main(argv: Sequence[str]) -> list[reporting.Row]:
  options = parse(argv)
  workdir = Path(options.workdir).absolute()
  config, runs = find_runs(workdir, _choice(options))
  directory = Workdir(workdir / "analysis")
  with directory.locked():
    return _analyse(config, runs, directory, options)


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("workdir", None, "name the directory that training wrote", **define)
  flags.DEFINE_list("attentions", None, "which, comma-separated; by default all", **define)
  flags.DEFINE_list("seeds", None, "which, comma-separated; by default all", **define)
  flags.DEFINE_list("steps", None, "of which checkpoints, besides the initial values (0); by "
                    "default of all that are kept", **define)
  flags.DEFINE_integer("num_examples", 16, "how many training and held-out examples", lower_bound=1,
                       **define)
  flags.DEFINE_list("layers", None, "whose attention is drawn, from 0; by default up to three",
                    **define)
  flags.DEFINE_list("heads", None, "whose attention is drawn, from 0; by default up to four",
                    **define)
  return command_line.parse_options(values, argv, __doc__, required=("workdir",))


def _choice(options: flags.FlagValues) -> Choice:
  return Choice(options.attentions, _numbers(options, "seeds"), _numbers(options, "steps"),
                options.num_examples)


def _numbers(options: flags.FlagValues, name: str) -> Optional[list[int]]:
  given = options[name].value
  if given == []:
    raise ConfigError(f"--{name}= names none; leave it out, or name some")
  try:
    return None if given is None else [int(text) for text in given]
  except ValueError as error:
    raise ConfigError(f"--{name}={','.join(given)} must hold whole numbers") from error


def _analyse(config: Any, runs: Sequence[Run], directory: Workdir,
             options: flags.FlagValues) -> list[reporting.Row]:
  shown = {name: _numbers(options, name) for name in ("layers", "heads")}
  texts, numbers, measurements, last = [], {}, [], set()
  for run in runs:
    found = find(run, _choice(options), shown["layers"], shown["heads"])
    captions = analysis_figures.draw(directory.path / "figures", found)
    texts.append(_text(found, captions))
    numbers[run.name] = found.as_json()
    _write_arrays(directory.path / f"{run.name}.npz", found)
    measurements += _measurements(found)
    last.add(found.at(found.last))
  rows = reporting.summary_rows(measurements, False, lambda _: None)
  directory.write_json("analysis.json", numbers)
  write_atomically(directory.path / "report.md",
                   "\n\n".join([f"# Analysis of {config.name}:{config.size}", *texts]) + "\n")
  reporting.write_summary(directory.path / "summary.json", "analysis",
                          f"{config.name}:{config.size}", rows)
  print(reporting.format_table([row for row in rows if row["variant"] in last
                                and row["metric"] in PRINTED]))
  print(f"\nFigures, numbers and report.md are in {directory.path}")
  return rows


def find(run: Run, choice: Choice, layers: Optional[Sequence[int]] = None,
         heads: Optional[Sequence[int]] = None) -> Findings:
  """All that is found out about a run."""
  task, held_out = run.task, run.held_out(choice.num_examples)
  batch = run.training_batch(choice.num_examples)
  one = {name: rows[:1] for name, rows in held_out.items()}
  # Before what takes its time.
  layers, heads = _pick_attention(task, one, layers, heads)
  diagnose = jax.jit(task.diagnostics)
  snapshots, initial_blocks = [], []
  for step, params in run.checkpoints(choice.steps):
    metrics = probe.metrics(task.model, task.loss_fn, params, held_out)
    if step == 0:
      initial_blocks = geometry.stored_blocks(params)
    snapshots.append(_snapshot(task, step, params, metrics, diagnose(params), initial_blocks,
                               batch))
  weights = probe.attention_weights(task.model, task.loss_fn, params, one)
  chosen = {layer: weights[layer][0] for layer in layers}
  return Findings(run.name, run.attention, run.seed, run.dataset, run.variant, snapshots, chosen,
                  tuple(heads), dict(_absent(run, metrics, snapshots[-1], chosen)))


def _pick_attention(task: Task, batch: Batch, layers: Optional[Sequence[int]],
                    heads: Optional[Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
  """Whose attention is drawn."""
  params = nn.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  num_heads = probe.num_heads(task.model, task.loss_fn, params, batch)
  layers = _pick("layers", layers, list(num_heads), 3)
  most = min((num_heads[layer] for layer in layers), default=0)
  return layers, _pick("heads", heads, range(most), 4)


def _snapshot(task: Task, step: int, params: Any, metrics: probe.Metrics,
              diagnostics: Mapping[str, Any], initial_blocks: Sequence[Any],
              batch: Batch) -> Snapshot:
  gradients = gradient_flow.gradient_norms(task.loss_fn, params, batch)
  several = len(gradients.by_layer) > 1 and gradient_flow.shared_generator(params) is not None
  return Snapshot(
      step,
      {layer: _geometry(m, diagnostics.get(f"adaptivity/layer_{layer}"))
       for layer, m in metrics.m.items() if _is_square(m)},
      metrics.block_energy,
      geometry.block_drift(initial_blocks, geometry.stored_blocks(params))
      if metrics.block_energy else {},
      gradients,
      gradient_flow.contributions(task.model, task.loss_fn, params, batch) if several else None)


def _geometry(m: np.ndarray, adaptivity: Optional[Any]) -> geometry.LayerGeometry:
  """Adaptivity is what training records, on the same examples, where it does."""
  found = geometry.layer_geometry(m)
  return found if adaptivity is None else found._replace(adaptivity=float(adaptivity))


def _is_square(m: np.ndarray) -> bool:
  return m.shape[-1] == m.shape[-2]


def _pick(flag: str, asked: Optional[Sequence[int]], there: Sequence[int],
          most: int) -> Sequence[int]:
  """What is asked for, or some from all over."""
  if asked is None:
    return analysis_figures.spread(there, most)
  for one in asked:
    if there and one not in there:
      raise ConfigError(f"--{flag}={one} is not there: they are {there[0]} to {there[-1]}")
  return asked if there else ()


def _absent(run: Run, metrics: probe.Metrics, last: Snapshot,
            weights: Mapping[int, np.ndarray]) -> Iterator[tuple[str, str]]:
  """What cannot be shown of a run, and why."""
  if not metrics.m:
    yield METRICS, f"{run.attention} compares tokens by no metric of this kind"
  elif not last.geometry:
    yield METRICS, "the full-width form keeps its update in factors, which are not square"
  elif not metrics.block_energy:
    yield "blocks", "the run stores only their sums (damcha.parameterization='rowsum')"
  if last.contributions is None:
    yield "layers' contributions to a shared generator", "no generator is shared by several layers"
  if not weights:
    yield "attention maps", f"{run.attention} has no layer of attention"


def _write_arrays(path: Path, found: Findings) -> None:
  with writing(path):
    with open(path, "wb") as file:
      np.savez_compressed(file, **found.arrays())


def _text(found: Findings, captions: dict[str, str]) -> str:
  parts = [f"## {found.title}"]
  for name, caption in captions.items():
    parts.append(f"![{caption}](figures/{name}.png)")  # which shows its caption
  parts += [f"Not shown: {what}, because {why}." for what, why in found.absent.items()]
  return "\n\n".join(parts)


def _measurements(found: Findings) -> Iterator[Measurement]:
  """By step, and by step and layer."""
  for snapshot in found.snapshots:
    measure: Callable[..., Measurement] = (
        lambda split, metric, value, layer=None, variant=found.at(snapshot): Measurement(
            found.attention, found.dataset, split, metric, value, _unit(metric), found.seed,
            variant if layer is None else f"{variant}, layer {layer}"))
    by_layer = found.geometry_numbers(snapshot)
    for layer, numbers in by_layer.items():
      for metric, value in numbers.items():
        yield measure("validation", metric, value, layer)
    for metric in next(iter(by_layer.values()), {}):
      values = [numbers[metric] for numbers in by_layer.values()]
      yield measure("validation", metric,
                    float(max(values) if metric == "rank_max" else np.mean(values)))
    for metric, value in snapshot.drift.items():
      yield measure("train", metric, value)
    yield from _gradients(snapshot, measure)
  for what, why in found.absent.items():
    if what == METRICS:
      yield Measurement(found.attention, found.dataset, "validation", "effective_rank", None, "1",
                        found.seed, found.at(found.last), why)


def _unit(metric: str) -> str:
  return "nats" if metric.startswith("grad_norm") else "1"


def _gradients(snapshot: Snapshot, measure: Callable[..., Measurement]) -> Iterator[Measurement]:
  name = lambda part: "grad_norm_" + part.replace(",", "").replace("-", "_").replace(" ", "_")
  norms = snapshot.gradients
  for layer, parts in norms.by_layer.items():
    for part, value in parts.items():
      yield measure("train", name(part), value, layer)
  totals: dict[str, float] = {}
  for parts in (*norms.by_layer.values(), norms.outside):
    for part, value in parts.items():
      totals[part] = totals.get(part, 0.0) + value**2
  for part, square in totals.items():
    yield measure("train", name(part), square**0.5)
  if snapshot.contributions is not None:
    for layer, value in enumerate(snapshot.contributions.norm_N):
      yield measure("train", "grad_norm_own_generator", float(value), layer)
    yield measure("train", "grad_alignment", snapshot.contributions.alignment)


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
