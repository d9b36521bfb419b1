"""Options and fixtures of the whole suite."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Iterator
import os
from pathlib import Path
import shutil
import sys
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


# Linux grants a process 65,530 mappings of memory and ends it with a segmentation fault, if not with
# worse, beyond them. Every compiled program takes some, and jax keeps the programs of all tests.
_MAPPINGS = Path("/proc/self/maps")
_MOST_MAPPINGS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
      "--golden_dir",
      default=None,
      help="folder whose .npz files tests/golden checks, subfolders included;"
      " default: tests/golden/fixtures",
  )


@pytest.fixture(name="let_programs_go", scope="module", autouse=True)
def _let_programs_go() -> Iterator[None]:
  yield
  if ("jax" in sys.modules and _MAPPINGS.exists()
      and _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS):
    sys.modules["jax"].clear_caches()


@pytest.fixture(name="fault")
def _fault(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
  """`fault(kind, outcome)` counts an injected fault in the table that ends the tests' output."""
  return lambda kind, outcome: record_property("fault", (kind, outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  kinds: dict[str, Counter[str]] = {}
  for report in terminalreporter.getreports("passed"):
    for name, value in report.user_properties:
      if name == "fault" and report.when == "call":
        kind, outcome = value
        kinds.setdefault(kind, Counter())[outcome] += 1
  if kinds:
    terminalreporter.section(f"{sum(map(Counter.total, kinds.values()))} faults injected")
  for kind, outcomes in sorted(kinds.items()):
    what = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    terminalreporter.write_line(f"{kind:46} {outcomes.total():4}  {what}")
