"""SIGTERM and SIGINT as a request that the loop answers between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Optional

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
  """Context manager that notes SIGTERM and SIGINT; the second of one kind acts as it would have.

  With several processes the request must take effect at the same step everywhere, which JAX's
  preemption service arranges; it listens to SIGTERM itself, and is given SIGINT as one.
  """

  def __init__(self):
    self.signal_name: Optional[str] = None
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> StopRequest:
    # Python runs handlers in the main thread only and refuses to install them elsewhere.
    if threading.current_thread() is threading.main_thread():
      handlers = (dict.fromkeys(_SIGNALS, self._note) if jax.process_count() == 1
                  else {signal.SIGINT: self._pass_on})
      self._previous = {number: signal.signal(number, handlers[number]) for number in handlers}
    return self

  def __exit__(self, *unused) -> None:
    while self._previous:
      signal.signal(*self._previous.popitem())

  def requested(self, step: int) -> bool:
    """Whether to stop at `step`; every process gets the same answer for the same step."""
    if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
      self.signal_name = "a signal"  # to any of the processes
    return self.signal_name is not None

  def _note(self, number: int, frame: Optional[FrameType]) -> None:
    del frame
    self.signal_name = signal.Signals(number).name
    signal.signal(number, self._previous.pop(number))
    # Not `print`, in the midst of which the signal may have come.
    os.write(2, f"\nnote: {self.signal_name}: saves and stops once what it does is done, such as "
             "compiling; the same signal again ends it without saving\n".encode())

  def _pass_on(self, number: int, frame: Optional[FrameType]) -> None:
    del frame
    signal.signal(number, self._previous.pop(number))
    os.kill(os.getpid(), signal.SIGTERM)
