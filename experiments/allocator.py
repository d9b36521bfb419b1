"""The memory of a CPU that trains."""

from __future__ import annotations

import ctypes

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
  """Has glibc keep what is freed for the next allocation, as far as it is the process's allocator.

  On a CPU, XLA allocates the buffers of every step anew. By default glibc takes large ones from the
  operating system and gives them back at once, and the kernel clears every page when it is touched
  again: a tenth of a step at GPT-2's width, a quarter of a step of `:cpu` models.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):  # another C library, another operating system
    return
  # One arena, because those of threads hold no large allocations.
  for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
    mallopt(option, value)
