"""Text from trained language models, streamed to the terminal.

  python -m experiments.sample --workdir=runs/gpt2_enwik8/mix-cpu --prompt="The "

Every attention in the workdir writes, unless --attention names one. What is not given on the
command line comes from the run's own config.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
import dataclasses
from pathlib import Path
import statistics
import sys
import time
from typing import Any, Optional

from absl import flags
import numpy as np

from damcha_jax.config import ConfigError, freeze
from damcha_jax.errors import WorkdirError
from damcha_jax.sampling import Sampler, row_keys
from damcha_jax.training import restore
from experiments import command_line

OPTIONS = ("prompt", "num_tokens", "temperature", "top_k", "top_p")  # fields of config.sampling


def main(argv: Sequence[str]) -> None:
  options = parse(argv)
  for run in find_runs(Path(options.workdir).absolute(), options.attention, options.run_seed):
    _write(run, options)


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("workdir", None, "name the directory that training wrote, or one run's",
                      **define)
  flags.DEFINE_string("attention", None, "whose text; by default every attention's", **define)
  flags.DEFINE_integer("run_seed", None, "the run's seed; by default the lowest", **define)
  flags.DEFINE_enum("checkpoint", "best", restore.CHECKPOINTS, "which checkpoint", **define)
  flags.DEFINE_string("prompt", None, "the text to continue", **define)
  flags.DEFINE_integer("num_tokens", None, "how many bytes to write", lower_bound=1, **define)
  flags.DEFINE_integer("num_samples", 1, "how many continuations", lower_bound=1, **define)
  flags.DEFINE_float("temperature", None, "0 takes the most probable byte", **define)
  flags.DEFINE_integer("top_k", None, "sample among the k most probable; 0: all", **define)
  flags.DEFINE_float("top_p", None, "sample among the most probable p; 1: all", **define)
  flags.DEFINE_integer("seed", 0, "seed of the sampling", lower_bound=0, **define)
  return command_line.parse_options(values, argv, __doc__, required=("workdir",))


def find_runs(workdir: Path, attention: Optional[str], seed: Optional[int]) -> list[Path]:
  """The directories of the runs that are asked for: one of each attention."""
  if not (workdir / "config.json").is_file():
    raise WorkdirError(f"workdir {workdir} holds no run; name the directory that training wrote")
  found: dict[str, dict[int, Path]] = {}
  own = [workdir / "config.json"] if (workdir / "checkpoints").is_dir() else []
  for path in own or sorted(workdir.glob("*/seed*/config.json")):
    run = restore.describe_run(path.parent)
    found.setdefault(run.name, {})[run.seed] = path.parent
  chosen = [runs[min(runs) if seed is None else seed] for name, runs in found.items()
            if attention in (None, name) and (seed is None or seed in runs)]
  if not chosen:
    there = ", ".join(f"{name} seed {one}" for name, runs in found.items() for one in sorted(runs))
    raise ConfigError(f"workdir {workdir} has no run of --attention={attention or 'any'} "
                      f"--run_seed={'any' if seed is None else seed}; it has {there or 'none yet'}")
  return chosen


def _write(directory: Path, options: flags.FlagValues) -> None:
  """Loads one run's model and prints what it writes."""
  run = restore.describe_run(directory)
  config = freeze({**run.config, "attentions": run.name, "seeds": (run.seed,)})
  given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
  rule = dataclasses.replace(config.sampling, **given)
  model, step, params = restore.restore_decoder(
      directory, config, run.name, options.checkpoint,
      lambda line: print(f"note: {line}", file=sys.stderr))
  sampler = Sampler(model, rule.temperature, rule.top_k, rule.top_p)
  if options.num_samples == 1:
    which = f"{options.checkpoint} checkpoint, step {step}"
  else:
    which = f"{options.checkpoint} checkpoint, step {step}, {options.num_samples} samples"
  choice = (f"temperature {rule.temperature}, top_k {rule.top_k}, top_p {rule.top_p}, "
            f"seed {options.seed}" if rule.temperature else "the most probable byte each time")
  print(f"--- {run.name}, seed {run.seed}, {which}: {choice}")
  rows = range(options.num_samples)
  prompts = [list(rule.prompt.encode("utf-8", "surrogateescape"))] * len(rows)
  stream = sampler.stream(params, prompts, rule.num_tokens, row_keys(options.seed, rows))
  seconds: list[float] = []
  tokens_N1B = _timed((samples.tokens_BN for samples in stream), seconds)
  if len(rows) == 1:
    print(rule.prompt, end="", flush=True)
    for text in _decoded(tokens[0, 0] for tokens in tokens_N1B):
      print(text, end="", flush=True)
    print()
  else:
    tokens_BN = np.concatenate(list(tokens_N1B), axis=1)
    for row in rows:
      print(f"[{row}] {rule.prompt}{''.join(_decoded(tokens_BN[row]))}")
  # The median: compilations are in some of the steps.
  print(f"--- {len(rows) * rule.num_tokens} bytes, once compiled "
        f"{len(rows) / statistics.median(seconds):,.0f} bytes/s")


def _timed(items: Iterator[Any], seconds: list[float]) -> Iterator[Any]:
  """The items, and the time that each took to come."""
  while True:
    start = time.perf_counter()
    try:
      item = next(items)
    except StopIteration:
      return
    seconds.append(time.perf_counter() - start)
    yield item


def _decoded(tokens: Iterator[int]) -> Iterator[str]:
  """Bytes as text, each character as soon as it is complete.

  Bytes that are no UTF-8 and characters that would steer the terminal become U+FFFD.
  """
  decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
  for token in tokens:
    yield "".join(map(_visible, decoder.decode(bytes([token]))))
  yield decoder.decode(b"", final=True)


def _visible(character: str) -> str:
  return character if character.isprintable() or character in "\n\t" else "\ufffd"


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
