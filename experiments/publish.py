"""Copies what is worth keeping of a workdir: no checkpoints, thinned curves, small figures.

  python -m experiments.publish --workdir=runs/theory/theory-paper --out=results/theory

Of the workdir, and of its analysis, it takes the summary, configuration, versions and figures: of
each the SVG, or where that is large the PNG, or neither, and then names it. Of every run, and of
every evaluation that a run's checkpoints were put to, it takes configuration, result, and of
`metrics.jsonl` all that was evaluated and about `--max_records` training steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import json
from pathlib import Path
import shutil
import sys

from absl import flags

from damcha_jax.config import ConfigError
from damcha_jax.training.workdir import read_text, write_atomically, writing
from experiments import command_line
from experiments import common
from experiments.results import (ANALYSIS, CHECKPOINTS, FIGURES, ResultsError, SUMMARY,
                                 figures_of, read_results)

OF_WORKDIR = (SUMMARY, "config.json", "versions.json", "report.md")
CURVES = "metrics.jsonl"
OF_RUN = (CURVES, "config.json", "result.json", "drift.json")
MAX_BYTES = 200_000  # of a figure


def main(argv: Sequence[str]) -> None:
  values = parse(argv)
  publish(Path(values.workdir).absolute(), Path(values.out).absolute(), values.max_records)


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("workdir", None, "name the directory that an experiment wrote", **define)
  flags.DEFINE_string("out", None, "name a new folder, such as results/theory", **define)
  flags.DEFINE_integer("max_records", 200, "training steps to keep of each run's curve",
                       lower_bound=2, **define)
  return command_line.parse_options(values, argv, __doc__, required=("workdir", "out"))


def publish(workdir: Path, out: Path, max_records: int) -> None:
  """Copies into `out`, which must not exist yet.

  Raises:
    ConfigError: it does, or lies in the workdir.
    ResultsError: the workdir holds no summary of its own, or a broken one.
  """
  if out.exists():
    raise ConfigError(f"{out} is there already; remove it, or choose another --out")
  if out.resolve().is_relative_to(workdir.resolve()):
    raise ConfigError(f"{out} lies in the workdir; choose another --out")
  if not (workdir / SUMMARY).is_file():
    raise ResultsError(f"{workdir} has no {SUMMARY}; name a directory whose experiment is done")
  read_results(workdir)
  try:
    with writing(out):
      for path in (*_of_workdir(workdir), *_of_runs(workdir)):
        target = out / path.relative_to(workdir)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == CURVES:
          write_atomically(target, _curve(path, max_records))
        else:
          if path.suffix == ".json":
            _check(path)
          shutil.copyfile(path, target)
  except BaseException:
    shutil.rmtree(out, ignore_errors=True)  # a part would be taken for the whole, and is in the way
    raise
  print(f"Published {workdir} in {out}")


def _of_workdir(folder: Path) -> Iterator[Path]:
  yield from _files(folder, OF_WORKDIR)
  for figure in figures_of(folder):
    formats = (figure, figure.with_suffix(".png"))
    small = [path for path in formats if path.is_file() and path.stat().st_size <= MAX_BYTES]
    if small:
      yield small[0]
    else:
      common.note(f"{figure} is larger than {MAX_BYTES:,} bytes and left out")


def _of_runs(folder: Path) -> Iterator[Path]:
  """Those of the folders below, wherever they are."""
  for inner in sorted(folder.iterdir()):
    if inner.is_dir() and not inner.is_symlink() and inner.name not in (CHECKPOINTS, FIGURES):
      if inner.name == ANALYSIS:
        yield from _of_workdir(inner)
      elif _is_run(inner):
        yield from _files(inner, OF_RUN)
      yield from _of_runs(inner)


def _is_run(folder: Path) -> bool:
  """Whether something was trained there, or evaluated, which leaves no curve."""
  return (folder / CURVES).is_file() or all((folder / name).is_file()
                                            for name in ("config.json", "result.json"))


def _files(folder: Path, names: Sequence[str]) -> Iterator[Path]:
  return (folder / name for name in names if (folder / name).is_file())


def _check(path: Path) -> None:
  with _damage_named(path):
    json.loads(read_text(path))


def _curve(path: Path, max_records: int) -> str:
  with _damage_named(path):
    return thinned(read_text(path), max_records)


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
  try:
    yield
  except (KeyError, TypeError, ValueError) as error:
    raise ResultsError(f"{path} is damaged ({error}); run the command of its workdir again, which "
                       "repairs it") from error


def thinned(text: str, max_records: int) -> str:
  """A curve with every record of an evaluation, and evenly spaced ones of training, ends included.
  """
  lines = text.splitlines(keepends=True)
  training = [index for index, line in enumerate(lines) if json.loads(line)["split"] == "train"]
  last = len(training) - 1
  spaced = {training[round(last * step / (max_records - 1))] for step in range(max_records)
            } if last >= max_records else set(training)
  dropped = set(training) - spaced
  return "".join(line for index, line in enumerate(lines) if index not in dropped)


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
