"""What the paper proves, checked by computing it: Section 4, Appendices C and D.

  python -m experiments.theory --config=configs/theory.py

C.1: multi-head attention inside DAMCHA, and what each form cannot express. C.2: excess risks of
static and adaptive metrics beside the theorem's bound, and its assumptions. D: costs beside their
formulas, as `experiments.efficiency` finds them. `docs/theory.md` says which row is about what.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

# Before NumPy is loaded. Its matrices here are so small that threads only wait for each other: on a
# machine that does something else, for minutes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pylint: disable=wrong-import-position
from ml_collections import ConfigDict

from damcha_jax import reporting
from damcha_jax.config import freeze
from damcha_jax.config.theory import TheoryConfig
from damcha_jax.training.workdir import Workdir
from experiments import command_line
from experiments import common
from experiments import efficiency
from experiments import theory_figures
from experiments import theory_findings

# Each is found for every seed.
PARTS = {"embedding": theory_findings.embedding, "strictness": theory_findings.strictness,
         "contexts": theory_findings.contexts, "generator": theory_findings.generator,
         "growth": theory_findings.softmax_growth}
# Points of a figure, or said by another row.
_NOT_PRINTED = ("output_error", "best_error", "bound_from_rank", "excess_risk_upper")


def train_and_evaluate(config: ConfigDict, workdir: Path) -> list[reporting.Row]:
  """Checks all, and writes `summary.json` and `figures/` into `workdir`.

  What a part finds with a seed is kept in `<workdir>/<part>/seed<k>/result.json`; an interrupted
  run goes on with the next. `<workdir>/costs` is a workdir of `experiments.efficiency`.
  """
  costs, config = config.costs, freeze(config, TheoryConfig)
  efficiency.check(config.costs)
  common.claim(Workdir(workdir), config, extensible=("seeds",))
  findings = []
  for part, find in PARTS.items():
    for seed in config.seeds:
      findings += common.kept(workdir / part / f"seed{seed}",
                              functools.partial(find, config, seed))
  findings += common.kept(workdir / "forms",
                          functools.partial(theory_findings.full_width_costs, config))
  figures = dict(findings)
  rows = reporting.summary_rows(figures, False, figures.get)
  if common.is_primary():
    print(reporting.format_table([_by_attention(row) for row in rows
                                  if row["metric"] not in _NOT_PRINTED]) + "\n")
  rows += efficiency.train_and_evaluate(costs, workdir / "costs")
  if common.is_primary():
    theory_figures.draw(rows, config, workdir / "figures")
    reporting.write_summary(workdir / "summary.json", config.experiment,
                            f"{config.name}:{config.size}", rows)
    print(f"\nThe summary of all and its figures are in {workdir}")
  return rows


def _by_attention(row: reporting.Row) -> reporting.Row:
  """So that a block of the table has the variants of one attention."""
  return {**row, "attention": row["variant"], "variant": row["attention"]}


if __name__ == "__main__":
  command_line.launch(train_and_evaluate, "theory")
