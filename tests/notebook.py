"""Notebooks as tests see them: code cells, run in order in a Python without a notebook around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "launch" / "colab.ipynb"


def read() -> dict[str, Any]:
  return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells() -> list[str]:
  return ["".join(cell["source"]) for cell in read()["cells"] if cell["cell_type"] == "code"]


def program(**parameters: Any) -> str:
  """All code cells as one program, in which parameters have other values after the first cell."""
  first, *others = code_cells()
  changed = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
  return "\n\n".join([first, changed, *others])
