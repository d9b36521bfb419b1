"""Options and fixtures of the whole suite."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

# Compiling takes most of the tests' time. Their programs are tiny, so optimising them would not pay,
# and the same ones recur, also in the processes that tests start. Set before jax reads it.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="damcha_jax_test_cache_")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
      "--golden_dir",
      default=None,
      help="folder whose .npz files tests/golden checks, subfolders included;"
      " default: tests/golden/fixtures",
  )
