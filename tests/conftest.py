"""Options and fixtures of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
      "--golden_dir",
      default=None,
      help="folder whose .npz files tests/golden checks, subfolders included;"
      " default: tests/golden/fixtures",
  )
