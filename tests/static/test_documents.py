"""The code of documents runs, and what they refer to is there."""

import ast
import dataclasses
from pathlib import Path
import re
import typing

import pytest

from docs import make_api
from experiments import common
from tests import documents
from tests.documents import ROOT, TEXTS

API = "api.md"  # quotes signatures, which are no program


@pytest.mark.parametrize("name", [
    name if name == "README.md" else pytest.param(name, marks=pytest.mark.families)
    for name in TEXTS if name != API and documents.blocks("python", name)])
def test_code_runs(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  scope = {}
  for code in documents.blocks("python", name):
    exec(code, scope)  # pylint: disable=exec-used
  assert len(scope) > 1


@pytest.mark.parametrize("name", TEXTS)
def test_references_are_to_what_there_is(name):
  text = TEXTS[name]
  folder = ROOT if name == "README.md" else ROOT / "docs"
  missing = [link for link in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[\w-]*)?\)", text)
             if not (folder / link).exists()]
  missing += [f"{file}::{test}" for file, test in re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)
              if test not in _defined(ROOT / file)]
  sections = {} if name == API else _sections()
  keys = re.findall(r"`(\w+)\.(?!jsonl?`)(\w+)(?:=\w+)?`", text)
  missing += [f"{section}.{key}" for section, key in keys if key not in sections.get(section, (key,))]
  missing += [module for module in re.findall(r"`((?:damcha_jax|experiments)(?:\.\w+)+)`", text)
              if not _exists(module)]
  assert missing == []


def test_a_reference_to_nothing_is_noticed():
  assert _exists("damcha_jax.attention.ATTENTIONS") and _exists("damcha_jax.sampling")
  assert not _exists("damcha_jax.attention.Nothing") and not _exists("damcha_jax.nothing.at_all")
  assert "stride" in _sections()["damcha"] and "strides" not in _sections()["damcha"]
  assert "test_code_runs" in _defined(Path(__file__))
  assert "test_nothing" not in _defined(Path(__file__))


def _sections() -> dict[str, set[str]]:
  """The keys of every section of a training experiment's config, by its name."""
  sections: dict[str, set[str]] = {}
  for cls in common.CONFIG_CLASSES.values():
    for name, hint in typing.get_type_hints(cls).items():
      for part in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(part):
          sections.setdefault(name, set()).update(field.name for field in dataclasses.fields(part))
  return sections


def _defined(path: Path) -> set[str]:
  """What a module defines, imports or assigns at its top; nothing if there is no such module."""
  if not path.is_file():
    return set()
  names = set()
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.ImportFrom):
      names |= {alias.asname or alias.name for alias in node.names}
    names |= {target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)}
    names |= {getattr(node, "name", ""), getattr(getattr(node, "target", None), "id", "")}
  return names


def _exists(name: str) -> bool:
  """Whether a dotted name is a package, a module, or what one of these defines."""
  path = ROOT / name.replace(".", "/")
  module = lambda path: path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  return module(path).is_file() or path.name in _defined(module(path.parent))


def test_the_reference_is_what_the_docstrings_say():
  assert TEXTS[API] == make_api.reference(), "run `python docs/make_api.py`"
