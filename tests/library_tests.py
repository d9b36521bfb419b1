"""The tests of the library alone, which run outside this tree against an installed wheel.

  python -m tests.library_tests FOLDER

Copies them, with what they import and the fixtures beside them, into FOLDER. A test is one of these
if neither it nor a helper that it imports needs the experiments, their configs or the files of the
tree.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
import shutil
import sys

ROOT = Path(__file__).parents[1]
_OF_THE_TREE = ("configs", "experiments", "docs", "tests.documents", "tests.library_tests")


def main(folder: str) -> None:
  files = library_tests()
  for path in (*files, *_helpers(), ROOT / "tests/conftest.py", ROOT / "setup.cfg",
               *(fixture for file in files for fixture in _fixtures(file.parent))):
    target = Path(folder) / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)
  print(f"{len(files)} files of tests in {folder}")


def library_tests() -> list[Path]:
  return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _is_of_the_library(path)]


def _helpers() -> list[Path]:
  return [path for path in sorted((ROOT / "tests").rglob("*.py"))
          if not path.name.startswith("test_") and _is_of_the_library(path)]


def _fixtures(folder: Path) -> list[Path]:
  return [path for path in folder.rglob("*")
          if path.is_file() and path.suffix not in (".py", ".pyc")]


@functools.cache
def _is_of_the_library(path: Path) -> bool:
  text = path.read_text(encoding="utf-8")
  if "ROOT" in text or ".parents[" in text or "eight_devices" in text:
    return False
  imported = [name for node in ast.walk(ast.parse(text)) for name in _imported(node)]
  if any(name == part or name.startswith(part + ".") for name in imported for part in _OF_THE_TREE):
    return False
  modules = {path.parent / f"{name}.py" for name in imported}
  modules |= {ROOT / "tests" / f"{name}.py" for name in imported}
  modules |= {ROOT / (name.replace(".", "/") + ".py") for name in imported
              if name.startswith("tests.")}
  return all(_is_of_the_library(module) for module in modules - {path} if module.is_file())


def _imported(node: ast.AST) -> list[str]:
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
  return []


if __name__ == "__main__":
  main(*sys.argv[1:])
