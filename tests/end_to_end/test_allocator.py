"""Memory that is kept between steps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from experiments import allocator

FAULTS = f"""
import resource, sys
import numpy as np
from {allocator.__name__} import keep_freed_memory

if sys.argv[1] == "keep":
  keep_freed_memory()
for step in range(20):
  np.empty(2**23).fill(step)  # 64 MB
  if step == 2:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_a_buffer_of_the_last_step_serves_the_next_one():
  faults = {}
  for what in ("keep", "leave"):
    done = subprocess.run([sys.executable, "-c", FAULTS, what], check=True, capture_output=True,
                          text=True)
    faults[what] = int(done.stdout)
  assert faults["keep"] < 0.01 * faults["leave"]
