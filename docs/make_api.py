"""Writes docs/api.md from the signatures and docstrings of the library's public modules.

  python docs/make_api.py

Nothing is imported: the text of the modules is parsed. A test holds the file against this program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _attentions() -> tuple[str, ...]:
  """The modules of the attentions, in the order of `ATTENTIONS`."""
  text = (ROOT / "damcha_jax/attention/__init__.py").read_text(encoding="utf-8")
  nodes = ast.parse(text).body
  origin = {alias.name: node.module.removeprefix("damcha_jax.").replace(".", "/")
            for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
  registry = next(node.value for node in nodes if isinstance(node, ast.Assign))
  return tuple(dict.fromkeys(origin[cls.id] for cls in registry.values))


MODULES = (
    "attention/__init__", "attention/base", *_attentions(), "attention/core", "metric/generator",
    "metric/context", "metric/blocks", "metric/authors", "models/decoder", "models/vit",
    "models/stack", "models/attentions", "training/task", "training/loop", "training/optimizer",
    "training/sharding", "training/plan", "analysis/causality", "analysis/complexity",
    "analysis/closed_forms", "analysis/geometry", "analysis/gradient_flow", "analysis/probe",
    "interop/convert", "interop/mha_to_damcha", "interop/tensor_files", "interop/torch_checkpoints",
    "evaluation/likelihood", "evaluation/frechet", "evaluation/image_quality",
    "evaluation/text_quality", "evaluation/bart", "sampling", "decoding", "errors",
)
_HEAD = """# API reference

Made by `python docs/make_api.py` from signatures and docstrings; edit those. Axes of arrays are
named by one capital each, as in [method.md](method.md). What a name beginning with an underscore
marks as private, and modules that are not listed, may change.
"""


def main() -> None:
  (ROOT / "docs/api.md").write_text(reference(), encoding="utf-8")


def reference() -> str:
  """The contents of docs/api.md."""
  names = {module: "damcha_jax." + module.removesuffix("/__init__").replace("/", ".")
           for module in MODULES}
  contents = [f"- [{name}](#{name.replace('.', '')})" for name in names.values()]
  sections = [part for module, name in names.items() for part in _module(module, name)]
  return "\n".join([_HEAD, *contents, *sections])


def _module(module: str, name: str) -> Iterator[str]:
  tree = ast.parse((ROOT / f"damcha_jax/{module}.py").read_text(encoding="utf-8"))
  yield f"\n## {name}\n"
  yield from _docstring(tree)
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and _is_public(node):
      yield from _entry(node.name, _function(node), node)
    elif isinstance(node, ast.ClassDef) and _is_public(node):
      yield from _entry(node.name, _class(node), node)
      for method in node.body:
        if isinstance(method, ast.FunctionDef) and (
            _is_public(method) or method.name == "__call__") and ast.get_docstring(method):
          yield from _entry(f"{node.name}.{method.name}", _function(method), method)


def _entry(title: str, signature: str, node: ast.AST) -> Iterator[str]:
  yield f"\n### {title}\n"
  yield f"```python\n{signature}\n```\n"
  yield from _docstring(node)


def _docstring(node: ast.AST) -> Iterator[str]:
  text = ast.get_docstring(node)
  if text:
    yield f"```text\n{text}\n```"


def _function(node: ast.FunctionDef) -> str:
  """The line `def` without its body, one argument a line if it would be long."""
  returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
  line = f"def {node.name}({ast.unparse(node.args)}){returns}"
  if len(line) <= 100:
    return line
  defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults
  parts = [_argument(arg, default) for arg, default in zip(node.args.args, defaults)]
  if node.args.vararg:
    parts.append(f"*{ast.unparse(node.args.vararg)}")
  elif node.args.kwonlyargs:
    parts.append("*")
  parts += [_argument(arg, default)
            for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults)]
  if node.args.kwarg:
    parts.append(f"**{ast.unparse(node.args.kwarg)}")
  return "\n".join([f"def {node.name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
  equals = " = " if arg.annotation else "="
  return ast.unparse(arg) + ("" if default is None else equals + ast.unparse(default))


def _class(node: ast.ClassDef) -> str:
  """The line `class` and the fields."""
  bases = ", ".join(ast.unparse(base) for base in node.bases)
  fields = [f"  {ast.unparse(part)}" for part in node.body
            if isinstance(part, ast.AnnAssign) and not part.target.id.startswith("_")]
  return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *fields])


def _is_public(node: ast.FunctionDef | ast.ClassDef) -> bool:
  return not node.name.startswith("_")


if __name__ == "__main__":
  main()
