"""The whole tree: everything parses, every config key is read, nothing names one machine."""

import ast
import dataclasses
from pathlib import Path
import re
import subprocess
import typing

from damcha_jax.config import AttentionsConfig
from damcha_jax.config.ablations import DATASETS
from damcha_jax.config.efficiency import EfficiencyConfig
from damcha_jax.config.synthetic import SyntheticConfig, TASKS
from damcha_jax.config.theory import TheoryConfig
from damcha_jax.training import sharding
from experiments import common

ROOT = Path(__file__).parents[2]
SKIPPED = {"__pycache__", "build", "dist", "runs"}


def _files() -> list[Path]:
  """Every file of the project; environments, caches and results are not part of it."""
  found = []
  for path in sorted(ROOT.rglob("*")):
    parts = path.relative_to(ROOT).parts
    hidden = parts[0].startswith(".") and parts[0] not in (".ci", ".gitignore")
    if path.is_file() and not hidden and not SKIPPED & set(parts) and ".egg-info" not in str(path):
      found.append(path)
  return found


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError:
    return ""  # binary


def test_every_python_file_parses():
  for path in _files():
    if path.suffix == ".py":
      ast.parse(_text(path), filename=str(path))


def test_every_shell_script_parses():
  scripts = [path for path in _files() if _text(path).startswith("#!/usr/bin/env bash")
             or path.suffix == ".sh"]
  assert len(scripts) >= 4
  for path in scripts:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_no_file_names_a_path_of_one_machine():
  # Written in pieces, so that this file does not match itself.
  folders = "|".join(["ro" + "ot", "ho" + "me", "wo" + "rk"])
  pattern = re.compile(rf"(?<![\w.$}}~-])/({folders})/")
  offences = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in _files()
              if path.parent.name != "samples"
              for line in _text(path).splitlines() if pattern.search(line)]
  assert offences == []


def _fields(cls: type) -> set[str]:
  names = set()
  for field in dataclasses.fields(cls):
    hint = typing.get_type_hints(cls)[field.name]
    names.add(field.name)
    for part in (hint, *typing.get_args(hint)):  # of a tuple of sections, say
      if dataclasses.is_dataclass(part):
        names |= _fields(part)
  return names


def test_every_config_key_is_read():
  read = set()
  for folder in ("damcha_jax", "experiments"):
    for path in (ROOT / folder).rglob("*.py"):
      # Ablations' keys become those of other experiments where they are defined.
      if path.parent.name != "config" or path.name == "ablations.py":
        read |= {node.attr for node in ast.walk(ast.parse(_text(path)))
                 if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
  if "attention_names" in read:  # a property that reads it
    read.add("attentions")
  if {"task_names", "lookup"} <= read:  # likewise
    read |= {"tasks", *TASKS}
  if "milestones" in read:  # likewise
    read.add("milestone_epochs")
  read |= set(sharding.AXES) | set(DATASETS)  # sections whose keys are read by these names
  read |= {field.name for field in dataclasses.fields(AttentionsConfig)}  # likewise
  for cls in (*common.CONFIG_CLASSES.values(), EfficiencyConfig, SyntheticConfig, TheoryConfig):
    assert _fields(cls) - read == set()
