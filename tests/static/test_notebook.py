"""The notebook: it parses without a notebook around it, holds no outputs, and names what exists."""

import ast
import re

from experiments import command_line
import notebook


def test_code_is_plain_python_and_nothing_was_run():
  cells = notebook.read()["cells"]
  for cell in cells:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
      ast.parse("".join(cell["source"]))
  assert len({cell["id"] for cell in cells}) == len(cells) > 10
  assert all(len(line) <= 100 for source in notebook.code_cells() for line in source.splitlines())


def test_commands_and_options_exist():
  text = "\n".join(notebook.code_cells())
  modules = re.findall(r'"-m", "experiments\.(\w+)"', text)
  assert modules == ["gpt2_enwik8", "sample"]
  assert all((notebook.ROOT / "experiments" / f"{module}.py").is_file() for module in modules)
  options = re.findall(r'"(--config\.[^"]+)"', text)
  assert len(options) > 10
  command_line.parse(["gpt2_enwik8", f"--config={notebook.ROOT}/configs/mix.py:cpu", *options])


def test_the_first_cell_holds_the_parameters():
  first = notebook.code_cells()[0]
  names = [node.targets[0].id for node in ast.parse(first).body]
  assert names == ["SOURCE", "SIZE", "WORKDIR"]
