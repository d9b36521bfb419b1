"""Traces of some updates of a run, for TensorBoard's profiler, Perfetto or xprof."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import contextvars
from pathlib import Path
import re
import sys
from typing import Any, Optional

import jax

from damcha_jax.config import ConfigError


class _Request:
  """Updates that are to be traced, and whether any was."""

  def __init__(self, updates: range):
    self.updates, self.is_met = updates, False


_REQUEST: contextvars.ContextVar[_Request] = contextvars.ContextVar(
    "profiled_updates", default=_Request(range(0)))


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
  """Runs in this context trace these updates; that none of them did is said at the end."""
  request = _Request(updates or range(0))
  token = _REQUEST.set(request)
  try:
    yield
  finally:
    _REQUEST.reset(token)
  if request.updates and not request.is_met:
    print(f"note: nothing was traced: no run had updates {updates.start} to {updates.stop - 1} left "
          "to make; choose earlier ones, or a new workdir", file=sys.stderr)


class Profiler:
  """Traces what its context asks for of one run, in one go; a resumed run, what is left of it."""

  def __init__(self, directory: Path):
    self._directory, self._request = directory, _REQUEST.get()
    self._tracing = False

  def before(self, update: int, state: Any) -> None:
    """To be called ahead of each update, and of the evaluation before it, and after the last one.

    Args:
      update: which one is next, from 1.
      state: what the one before gives.
    """
    if (update in self._request.updates) != self._tracing:
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
      self._request.is_met = True
    self._tracing = not self._tracing
