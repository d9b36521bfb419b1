"""Random command lines of every experiment: a run that could start, or one line why not."""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path
import sys

from hypothesis import given, HealthCheck, Phase, settings, strategies
from ml_collections import ConfigDict
import pytest

from experiments import command_line
from experiments import common

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "gpt2_enwik8": ("mix", "enwik8", "text8"), "image_generation": ("cifar10", "cifar100"),
    "text_generation": ("wmt14", "commongen"), "vit_imagenet": ("vit_s16",),
    "ablations": ("table3", "table4"), "efficiency": ("costs", "speed"), "study": ("study_cpu",),
    "synthetic": ("synthetic",), "theory": ("theory",)}
NUMBERS = ("0", "1", "2", "3", "7", "64", "-1", "-2", "2147483648", "9223372036854775808", "1e30",
           "0.5", "1.0", "-0.5", "1e-300", "nan", "inf", "-inf", "10000000000000000000000000000000")
WORDS = ("None", "True", "False", "", ",", "mha", "mha,mha", "damcha,tha", "static", "full",
         "x" * 300, "none", "sequence", "diagonal", "rowsum", "bfloat16", "off_diagonal", "../..", "caf\u00e9",
         "sinusoidal", "post", "nearest", "[1]", "{}")
TUPLES = ("()", "(0,)", "(1, 1)", "(-1,)", "(3, 2, 1)", "('a',)", "((1, 2), (3,))", "(None,)", "((",
          "(1e30,)", "(0, 1, 2, 3)")


# Of many attentions, few: building them all takes long. What is drawn later wins.
_FEW = {name: ["--config.attentions=mha,damcha"] for name in ("costs", "synthetic")}


class Started(Exception):
  """The run would now write into its workdir."""


def _keys(name: str) -> dict[str, object]:
  """Dotted keys and values of a config; sections as well."""
  def walk(config, prefix):
    for key, value in config.items():
      yield prefix + key, value
      if isinstance(value, ConfigDict):
        yield from walk(value, f"{prefix}{key}.")
  return dict(walk(command_line.load_config(str(ROOT / f"configs/{name}.py:smoke")), ""))


def _values(value: object) -> strategies.SearchStrategy[str]:
  """What to try in place of a value: of its kind, mostly."""
  if isinstance(value, bool):
    likely = ("True", "False")
  elif isinstance(value, (int, float)):
    likely = NUMBERS
  elif isinstance(value, tuple):
    likely = TUPLES
  else:
    likely = WORDS
  anything = strategies.sampled_from(NUMBERS + WORDS + TUPLES)
  return strategies.sampled_from(likely) | strategies.sampled_from(likely) | anything


@strategies.composite
def command_lines(draw: strategies.DrawFn) -> tuple[str, list[str]]:
  experiment = draw(strategies.sampled_from(list(CONFIGS)))
  name = draw(strategies.sampled_from(CONFIGS[experiment]))
  keys = _keys(name)
  chosen = draw(strategies.lists(strategies.sampled_from(list(keys)), min_size=1, max_size=3))
  overrides = [f"--config.{key}={draw(_values(keys[key]))}" for key in chosen]
  strange = draw(strategies.sampled_from([None] * 9 + [
      "--config.modle.features=1", "--noconfig.model", "--config.", "--config.=1", "--config.seeds",
      "stray", "--workdir", "--no_such_flag=1", "--config=configs/nothing.py", "--config"]))
  return experiment, [f"--config={ROOT}/configs/{name}.py:smoke", *_FEW.get(name, ()), *overrides,
                      *([strange] if strange else ())]


def _check(experiment: str, arguments: list[str], workdir: Path) -> None:
  module = importlib.import_module(f"experiments.{experiment}")
  errors, status = io.StringIO(), None
  with pytest.MonkeyPatch.context() as patch:
    def started(*unused, **also_unused):
      raise Started
    patch.setattr(common, "claim", started)
    patch.setattr(sys, "argv", [experiment, f"--workdir={workdir}", *arguments])
    patch.chdir(workdir.parent)  # data_dir may be anything
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
      try:
        command_line.launch(module.train_and_evaluate, experiment)
      except Started:
        return
      except SystemExit as end:
        status = end.code
  *notes, last_line = errors.getvalue().splitlines()
  assert status in (1, 2) and last_line.startswith("error: ") and len(last_line) > 20
  assert all(note.startswith("note: ") for note in notes)
  assert not workdir.exists()


FUZZED = settings(derandomize=True, database=None, deadline=None,
                  phases=(Phase.explicit, Phase.generate, Phase.shrink),
                  suppress_health_check=list(HealthCheck))


@settings(FUZZED, max_examples=40)
@given(command=command_lines())
def test_a_fuzzed_command_line_starts_or_says_why_not(tmp_path_factory, command):
  _check(*command, tmp_path_factory.getbasetemp() / "never_written")


@pytest.mark.families
@settings(FUZZED, max_examples=500)
@given(command=command_lines())
def test_many_fuzzed_command_lines_start_or_say_why_not(tmp_path_factory, command):
  _check(*command, tmp_path_factory.getbasetemp() / "never_written")
