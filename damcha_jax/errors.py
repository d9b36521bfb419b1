"""Errors that a command line prints as one line, `error: ...`, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import logging
import os
import sys


class UserError(Exception):
  """Something the user can act on; the message is one line that names the value and the remedy."""

  exit_status = 1


class DataError(UserError):
  """A corpus is missing, incomplete or not what its hash says."""


class CheckpointError(UserError):
  """A checkpoint cannot be written or none of those present can be read."""


class WorkdirError(UserError):
  """The working directory belongs to another configuration, is in use, or cannot be written."""


class Interrupted(UserError):
  """A signal asked the run to stop; its state is saved and the same command resumes it."""


class NonFiniteError(UserError):
  """A loss, gradient or parameter is NaN or infinite; the last good checkpoint is kept."""


@contextlib.contextmanager
def until_nobody_reads() -> Iterator[None]:
  """Ends the program without a traceback once what reads its output, such as `head`, is gone.

  The exit status is a shell's for a program that SIGPIPE ends.
  """
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed once more at exit
    sys.exit(141)


@functools.cache
def silence_orbax_threads() -> None:
  """For whoever tells in one line what saving and restoring raise: no error is in the threads alone.

  So neither its logged tracebacks are needed, nor those of other coroutines of an operation that
  failed, nor of storage callbacks that find its event loop closed.
  """
  logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
  previous = sys.unraisablehook

  def hook(unraisable):
    code = getattr(unraisable.object, "cr_code", None)
    if str(unraisable.exc_value) != "Event loop is closed" and not (
        code is not None and "orbax" in code.co_filename):
      previous(unraisable)

  sys.unraisablehook = hook
