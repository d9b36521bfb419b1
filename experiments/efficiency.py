"""What each attention costs: Section 5.2 (Table 2), Table 7 and Appendix D.4.

  python -m experiments.efficiency --config=configs/table2.py
  python -m experiments.efficiency --config=configs/costs.py
  python -m experiments.efficiency --config=configs/speed.py

GFLOPs and parameters are counted in the modules that are built; peak memory is the compiled
program's; times are measured here, all attentions in turn. The paper's figures stand beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import ConfigError, freeze
from damcha_jax.config.efficiency import DecoderShapeConfig, EfficiencyConfig, ShapeConfig
from damcha_jax.reporting import Measurement
from damcha_jax.training.workdir import Workdir
from experiments import command_line
from experiments import common
from experiments import scaling
from experiments import speed
from experiments.contender import make_contenders, measure

# The paper's names of what Table 2 compares, and of its columns.
TABLE2_METHODS = {"authors_tha": "THA", "authors_dcmha": "DCMHA", "authors_colmha": "ColMHA",
                  "authors_mma": "MMA", "authors_moa": "MoA", "damcha": "DAMCHA"}
TABLE2_DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "common_gen": "CommonGen",
                   "wmt14": "WMT"}
# The sizes at which it was measured (the authors' first public commit); tokens by dataset.
TABLE2_SIZES = {"batch_size": 1, "num_layers": 4, "num_heads": 8, "features": 128,
                "mlp_features": 256, "damcha_widths": ()}
TABLE2_LENGTHS = {"cifar10": 64, "cifar100": 64, "common_gen": 128, "wmt14": 256}
TABLE2_METRICS = {"gflops": "gflops", "peak_memory": "memory", "latency": "latency_ms"}


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Counts and measures, and writes `summary.json` and `figures/` into `workdir`.

  What is measured at one shape is kept in `<workdir>/<dataset>-<variant>/result.json`, along one
  axis in `<workdir>/scaling-<axis>/result.json`, with whole decoders in
  `<workdir>/speed-<variant>/result.json`; an interrupted run goes on with the next.
  """
  config = freeze(config, EfficiencyConfig)
  check(config)
  common.claim(Workdir(workdir), config)
  table2 = json.loads(common.PAPER.read_text(encoding="utf-8"))["table2"]
  # Times mean something beside those of the same rounds only, so an added attention or seed measures
  # all anew.
  kept = functools.partial(common.kept, attentions=config.attentions, seeds=list(config.seeds))
  findings = []
  for shape in config.shapes:
    findings += kept(workdir / "-".join(filter(None, (shape.dataset, shape.variant))), lambda: [
        _beside(table2, one) for one in measure(config, shape, make_contenders(config, shape))])
  if config.scaling is not None:
    findings += kept(workdir / "formulas", lambda: scaling.formulas(config))
    for axis in scaling.AXES:
      findings += kept(workdir / f"scaling-{axis}", lambda: scaling.along(config, axis))
  for shape in _decoder_shapes(config):
    findings += kept(workdir / f"speed-{shape.variant}", lambda: [
        (one, None) for one in speed.measure(config, shape, speed.make_decoders(config, shape))])
  rows = _rows(findings, config)
  if common.is_primary():
    if config.scaling is not None:
      scaling.plot(rows, workdir / "figures")
    reporting.write_summary(workdir / "summary.json", config.experiment,
                            f"{config.name}:{config.size}", rows)
    # What was measured along an axis is in the figures.
    print(reporting.format_table([row for row in rows if not scaling.is_point(row)]))
    print(f"\nResults are in {workdir}")
  return rows


def check(config: EfficiencyConfig) -> None:
  """Raises `ConfigError` for what cannot be built at a shape or a size, before any is measured."""
  for shape in (*config.shapes, *scaling.all_shapes(config)):
    make_contenders(config, shape)
  for shape in _decoder_shapes(config):
    speed.make_decoders(config, shape)
  if any(shape.measured == "train_step" for shape in config.shapes) and (
      "mha" not in config.attention_names):
    raise ConfigError("step times are relative to mha; add it to config key 'attentions'")


def _decoder_shapes(config: EfficiencyConfig) -> Sequence[DecoderShapeConfig]:
  return () if config.speed is None else config.speed.shapes


def _beside(table2: dict[str, Any], one: Measurement) -> common.Finding:
  """A measurement with the paper's figure, if Table 2 has one."""
  if one.variant is not None or one.metric not in TABLE2_METRICS:
    return one, None
  methods = table2.get(TABLE2_DATASETS.get(one.dataset), {})
  figure = methods.get(TABLE2_METHODS.get(one.attention), {}).get(TABLE2_METRICS[one.metric])
  if figure is not None and one.metric != "gflops":
    notes = filter(None, (one.note, "the paper names neither its device nor its unit of memory"))
    one = dataclasses.replace(one, note="; ".join(notes))
  return one, figure


def _rows(findings: list[common.Finding], config: EfficiencyConfig) -> list[reporting.Row]:
  figures = dict(findings)
  rows = reporting.summary_rows(figures, False, figures.get)
  of_its_size = {shape.dataset for shape in config.shapes if is_table2s(shape)}
  for row in rows:  # counts at Table 2's sizes hold anywhere; times and memory are this machine's
    row["comparable"] = (row["metric"] == "gflops" and row["paper"] is not None
                         and row["dataset"] in of_its_size)
  return rows


def is_table2s(shape: ShapeConfig) -> bool:
  """Whether it has the sizes of Table 2, so that counts can be held against the paper's."""
  return (shape.variant is None and shape.context_length == TABLE2_LENGTHS.get(shape.dataset)
          and all(getattr(shape, name) == size for name, size in TABLE2_SIZES.items()))


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "efficiency")
