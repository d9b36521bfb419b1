"""Every command that documents and docstrings give can be parsed."""

import argparse
import ast
import importlib
from pathlib import Path
import re
import runpy
import shlex
import sys

import pytest

from damcha_jax.config import freeze
from damcha_jax.config.efficiency import EfficiencyConfig
from damcha_jax.config.study import StudyConfig
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.config.theory import TheoryConfig
from experiments import command_line
from experiments import common
from tests import documents

ROOT = Path(__file__).parents[2]


def _commands() -> list[str]:
  text = [block for name in documents.TEXTS for block in documents.blocks("bash", name)]
  for prose in (*documents.TEXTS.values(), (ROOT / "results" / "README.md").read_text("utf-8")):
    text += (" ".join(command.split()) for command in re.findall("`(python -m [^`]+)`", prose))
  for folder in ("configs", "experiments"):
    for path in (ROOT / folder).glob("*.py"):
      text.append(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
  lines = [command.strip() for line in "\n".join(text).splitlines()
           for command in line.split("  #")[0].split(" && ")]
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
  if program == "bash" or arguments[0].endswith(".py"):
    assert (ROOT / arguments[0]).is_file()
  elif program == "pip":
    assert arguments[0] == "install"
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
  elif hasattr(module := importlib.import_module(arguments[1]), "parse"):
    module.parse(arguments[1:])
  else:
    config, _ = command_line.parse(arguments[1:])
    classes = {**common.CONFIG_CLASSES, "efficiency": EfficiencyConfig, "theory": TheoryConfig,
               "synthetic": SyntheticConfig, "study": StudyConfig}
    freeze(config, classes[config.experiment])
