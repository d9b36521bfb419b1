"""Every command that the README and the docstrings give can be parsed, and its code runs."""

import argparse
import ast
from pathlib import Path
import re
import runpy
import shlex
import sys

import pytest

from damcha_jax.config import freeze
from damcha_jax.config.efficiency import EfficiencyConfig
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.config.theory import TheoryConfig
from experiments import analysis
from experiments import common
from experiments import evaluate
from experiments import export
from experiments import plan
from experiments import publish
from experiments import report
from experiments import sample
from experiments import vit_picture

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
  return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[str]:
  text = _blocks("bash")
  for folder in ("configs", "experiments"):
    for path in (ROOT / folder).glob("*.py"):
      text.append(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
  lines = [line.split("  #")[0].strip() for line in "\n".join(text).splitlines()]
  return sorted({line for line in lines if re.match(r"(python|bash|pip) ", line)})


class _Parsed(Exception):
  """Raised in place of what a command would do."""



def test_there_are_commands_for_every_config():
  for name in ("mix", "enwik8", "text8", "cifar10", "cifar100", "wmt14", "commongen", "table3",
               "table4", "vit_s16"):
    for size in ("", ":cpu", ":smoke"):
      assert any(f"--config=configs/{name}.py{size}" in command.split() for command in _commands())


@pytest.mark.parametrize("command", _commands())
def test_documented_command_parses(command, monkeypatch):
  program, *arguments = shlex.split(command)
  monkeypatch.chdir(ROOT)
  if program == "bash":
    assert (ROOT / arguments[0]).is_file()
  elif program == "pip":
    assert arguments[0] == "install"
  elif arguments[1] == "experiments.sample":
    sample.parse(arguments[1:])
  elif arguments[1] == "experiments.export":
    export.parse(arguments[1:])
  elif arguments[1] == "experiments.evaluate":
    evaluate.parse(arguments[1:])
  elif arguments[1] == "experiments.analysis":
    analysis.parse(arguments[1:])
  elif arguments[1] == "experiments.vit_picture":
    vit_picture.parse(arguments[1:])
  elif arguments[1] == "experiments.plan":
    plan.parse(arguments[1:])
  elif arguments[1] == "experiments.report":
    report.parse(arguments[1:])
  elif arguments[1] == "experiments.publish":
    publish.parse(arguments[1:])
  elif arguments[1].startswith("damcha_jax."):
    for method in ("parse_args", "parse_intermixed_args"):
      parse = getattr(argparse.ArgumentParser, method)

      def parse_and_stop(parser, given=None, namespace=None, parse=parse):
        parse(parser, given, namespace)
        raise _Parsed

      monkeypatch.setattr(argparse.ArgumentParser, method, parse_and_stop)
    monkeypatch.setattr(sys, "argv", arguments[1:])
    monkeypatch.delitem(sys.modules, arguments[1], raising=False)  # another test's import
    with pytest.raises(_Parsed):
      runpy.run_module(arguments[1], run_name="__main__")
  else:
    assert (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file()
    config, _ = common.parse(arguments[1:])
    classes = {**common.CONFIG_CLASSES, "efficiency": EfficiencyConfig, "theory": TheoryConfig,
               "synthetic": SyntheticConfig}
    freeze(config, classes[config.experiment])


def test_readme_code_runs():
  (code,) = _blocks("python")
  scope = {}
  exec(code, scope)  # pylint: disable=exec-used
  assert scope["y_BTD"].shape == scope["x_BTD"].shape
