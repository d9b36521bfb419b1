"""Traces of some updates of a run, for TensorBoard's profiler, Perfetto or xprof."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import contextvars
from pathlib import Path
import re
from typing import Any, Optional

import jax

from damcha_jax.config import ConfigError

_UPDATES: contextvars.ContextVar[Optional[range]] = contextvars.ContextVar(
    "profiled_updates", default=None)


def parse_updates(text: str) -> range:
  """'10-12' -> updates 10, 11 and 12, counted from 1.

  Raises:
    ConfigError: it says something else.
  """
  match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
  if not match or not 1 <= int(match[1]) <= int(match[2]):
    raise ConfigError(f"--profile={text} names no updates; give the first and the last, such as "
                      "10-12")
  return range(int(match[1]), int(match[2]) + 1)


@contextlib.contextmanager
def profiled(updates: Optional[range]) -> Iterator[None]:
  """Runs in this context trace these updates."""
  token = _UPDATES.set(updates)
  try:
    yield
  finally:
    _UPDATES.reset(token)


class Profiler:
  """Traces what its context asks for of one run, in one go; a resumed run, what is left of it."""

  def __init__(self, directory: Path):
    self._directory, self._updates = directory, _UPDATES.get() or range(0)
    self._tracing = False

  def before(self, update: int, state: Any) -> None:
    """To be called ahead of each update, and of the evaluation before it, and after the last one.

    Args:
      update: which one is next, from 1.
      state: what the one before gives.
    """
    if (update in self._updates) != self._tracing:
      jax.block_until_ready(state)  # earlier updates are no part of the trace, or all of it
      self._switch()

  def close(self) -> None:
    if self._tracing:
      self._switch()

  def _switch(self) -> None:
    if self._tracing:
      jax.profiler.stop_trace()
    else:
      jax.profiler.start_trace(self._directory)
    self._tracing = not self._tracing
