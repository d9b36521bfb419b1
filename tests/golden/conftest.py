"""One test per golden file."""

from __future__ import annotations

import pathlib

import pytest

_FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  if "golden_path" not in metafunc.fixturenames:
    return
  folder = pathlib.Path(metafunc.config.getoption("golden_dir") or _FIXTURES)
  paths = sorted(folder.rglob("*.npz"))
  if not paths:
    raise pytest.UsageError(f"--golden_dir={folder}: no .npz file there or in its subfolders")
  metafunc.parametrize("golden_path", paths, ids=[str(path.relative_to(folder)) for path in paths])
