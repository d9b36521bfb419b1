"""Several processes of one run: who is there, who is missing, and an end for all when one is lost.

JAX connects the processes; what it says of one that is missing names none and comes as a crash. So
each process also beats in a file of the workdir, which all of them share, and whoever waits for
another says for whom, and gives up in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import ctypes
import os
from pathlib import Path
import re
import signal
import socket
import sys
import threading
import time
from typing import Any, Optional

import jax
from jax._src.distributed import global_state

from damcha_jax.config import ConfigError
from damcha_jax.errors import UserError, WorkdirError
from damcha_jax.training.workdir import lock_file, writing

_FOLDER = ".processes"
_DONE = "done"
_A_DAY = 24 * 3600
_PATIENCE = 20  # seconds that a process that failed waits for the others to end
# What a collective operation says that has lost a peer, on one backend or another.
_CONNECTION = re.compile("connection|gloo|nccl|peer|unavailable|deadline|coordination", re.IGNORECASE)
_KEPT: list[Any] = []  # handlers of signals, which C does not keep alive


@contextlib.contextmanager
def connected(workdir: Path, coordinator_address: Optional[str], num_processes: Optional[int],
              process_id: Optional[int], timeout: int) -> Iterator[None]:
  """Joins the run's processes; enter before anything else touches JAX's devices.

  What is None is found out from the environment, as on TPU pods and under Slurm.

  Args:
    workdir: shared by all processes.
    coordinator_address: HOST:PORT of process 0.
    num_processes: how many there are.
    process_id: this one, from 0.
    timeout: seconds to wait for another process, at the start and later.

  Raises:
    ConfigError: the processes cannot be told from what is given.
    UserError: process 0 cannot be found by its name, its port is taken, or another process has the
      number of this one.
  """
  if coordinator_address is not None:
    _check_address(coordinator_address, process_id == 0, timeout)
  watch = None
  if num_processes is not None and process_id is not None:  # else not known before JAX has found out
    if not 0 <= process_id < num_processes:
      raise ConfigError(f"--process_id={process_id} must be from 0 to {num_processes - 1}, one less "
                        "than --num_processes")
    watch = _Watch(workdir, num_processes, process_id, timeout)
    watch.start()
  try:
    # Longer than ours, which says more. A process that is done waits for those that are not.
    jax.distributed.initialize(coordinator_address, num_processes, process_id,
                               initialization_timeout=timeout + 60,
                               heartbeat_timeout_seconds=timeout + 60,
                               shutdown_timeout_seconds=_A_DAY)
  except (RuntimeError, TypeError, ValueError) as error:
    raise ConfigError(f"cannot join the run's processes ({error}); give --coordinator_address, "
                      "--num_processes and --process_id") from error
  if watch is None:
    watch = _Watch(workdir, jax.process_count(), jax.process_index(), timeout)
    watch.start()
  watch.all_have_started(global_state.coordinator_address)  # which JAX may have found out
  _before_abort(watch.end_without_coordinator)
  try:
    yield
  except BaseException as error:
    if _lost_connection(error):
      watch.find_out_who_is_lost()
    watch.give_up(error)
    raise
  watch.say_done()


class Beats:
  """The beats of all processes, as one of them sees them.

  A process is missing if its file has not changed for `timeout` seconds on this machine's clock, so
  clocks need not agree.
  """

  def __init__(self, folder: Path, num_processes: int, process_id: int, timeout: float,
               clock: Callable[[], float] = time.monotonic):
    self._folder, self._process_id, self._clock = folder, process_id, clock
    self._timeout = timeout
    self._name = f"{socket.gethostname()}:{os.getpid()}"
    self._number = 0
    others = [number for number in range(num_processes) if number != process_id]
    self._seen = {number: self._read(number) for number in others}  # may be an earlier run's
    self._since = dict.fromkeys(others, clock())
    self._heard: set[int] = set()

  def beat(self, done: bool = False) -> None:
    """Tells the others that this process lives, or that it will beat no more."""
    self._number += 1
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._folder / str(self._process_id)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f"{self._name} {_DONE if done else self._number}", encoding="utf-8")
    os.replace(temporary, path)

  def listen(self) -> None:
    for number, seen in self._seen.items():
      now = self._read(number)
      if now != seen:
        self._seen[number], self._since[number] = now, self._clock()
        self._heard.add(number)

  def silent(self) -> list[str]:
    """Who has not beaten for `timeout` seconds."""
    return self.described(number for number, since in self._since.items()
                          if self._clock() - since > self._timeout
                          and not (number in self._heard and self._seen[number].endswith(_DONE)))

  def not_started(self) -> list[str]:
    return self.described(number for number in self._seen if number not in self._heard)

  def described(self, numbers: Iterable[int]) -> list[str]:
    """Their names, with host and process id where they have been heard."""
    return [f"process {number}" + (f" ({self._seen[number].split()[0]})"
                                   if number in self._heard and self._seen[number] else "")
            for number in numbers]

  def _read(self, number: int) -> str:
    try:
      return (self._folder / str(number)).read_text(encoding="utf-8")
    except OSError:
      return ""


class _Watch:
  """A thread that beats, listens, and ends this process when another is lost."""

  def __init__(self, workdir: Path, num_processes: int, process_id: int, timeout: int):
    self._beats = Beats(workdir / _FOLDER, num_processes, process_id, timeout)
    self._what = f"process {process_id} of {num_processes}"
    self._timeout = timeout
    self._coordinator_address = ""
    self._starting, self._done, self._failed = True, False, False
    self._lock = lock_file(workdir / _FOLDER / f"{process_id}.lock")  # held until the process ends
    if self._lock is None:
      raise WorkdirError(f"{self._what} is there already in {workdir}; give each process another "
                         "--process_id, or wait for that one to end")
    with writing(workdir / _FOLDER):
      self._beats.beat()

  def start(self) -> None:
    threading.Thread(target=self._run, name="processes", daemon=True).start()

  def all_have_started(self, coordinator_address: str) -> None:
    self._coordinator_address = coordinator_address
    self._starting = False

  def say_done(self) -> None:
    self._done = True
    with contextlib.suppress(OSError):
      self._beats.beat(done=True)

  def give_up(self, error: BaseException) -> None:
    """Lets the others miss this process, and ends it soon even if they do not end."""
    self._failed = True
    status = 2 if isinstance(error, ConfigError) else getattr(error, "exit_status", 1)
    timer = threading.Timer(min(_PATIENCE, self._timeout), os._exit, (status,))
    timer.daemon = True
    timer.start()

  def _run(self) -> None:
    pause, told = min(5.0, self._timeout / 5), time.monotonic()
    while not self._failed:
      time.sleep(pause)
      with contextlib.suppress(OSError):  # a full disk: the run itself will say so
        self._beats.beat(self._done)
      self._beats.listen()
      silent = self._beats.silent()
      if silent:
        self._end(silent, f"has not heard of it for {self._timeout} s")
      waiting = self._beats.not_started()
      if self._starting and waiting and time.monotonic() - told > 10:
        told = time.monotonic()
        print(f"note: {self._what} waits for {', '.join(waiting)}", file=sys.stderr, flush=True)

  def find_out_who_is_lost(self) -> None:
    """Ends this process in one line that names who is lost; returns if nobody is."""
    deadline = time.monotonic() + 1.5 * self._timeout  # by then the thread has told
    while time.monotonic() < deadline:
      self.end_without_coordinator()
      time.sleep(0.1)

  def end_without_coordinator(self) -> None:
    """Ends this process in one line if process 0 is lost, where JAX keeps all in touch."""
    if not _listens(self._coordinator_address):
      self._beats.listen()
      self._end(self._beats.described([0]), "cannot reach it")

  def _end(self, lost: list[str], why: str) -> None:
    did = "did not start" if self._starting else "was lost"
    print(f"error: {', '.join(lost)} {did}: {self._what} {why}; start all processes again: they go "
          "on from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may hang in a collective operation


def _lost_connection(error: Optional[BaseException]) -> bool:
  """Whether a collective operation that lost a peer is what an error is, or comes from."""
  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError) and _CONNECTION.search(str(error)):
      return True
    error = error.__cause__ or error.__context__
  return False


def _before_abort(call: Callable[[], None]) -> None:
  """Calls `call` where this process is about to be aborted, which goes on when that returns.

  JAX aborts a process that has lost process 0, from a thread of its own. Python's handlers of
  signals run in the main thread, which does not come to it.
  """
  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: call())
  _KEPT.append(handler)
  set_handler = ctypes.CDLL(None).signal
  set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
  set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _check_address(address: str, is_own: bool, timeout: float) -> None:
  """Raises what JAX would end the process for without a word, or with a stack in C++."""
  host, port = _host_and_port(address)
  deadline = time.monotonic() + timeout
  while True:  # the name of a pod is known once that has started
    try:
      socket.getaddrinfo(host, port)
      break
    except (OSError, UnicodeError) as error:
      if time.monotonic() > deadline:
        raise UserError(f"--coordinator_address={address}: no host of this name is found ({error}) "
                        f"in {timeout} s; give the name or number of process 0's host") from error
    time.sleep(min(1, timeout / 5))
  if is_own and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:  # which may be another
    try:
      socket.create_server(("", port)).close()
    except OSError as error:
      raise UserError(f"--coordinator_address={address}: process 0 cannot listen at its port "
                      f"({error.strerror}); give another port to all processes") from error


def _host_and_port(address: str) -> tuple[str, int]:
  """Of 'host:1234', '10.0.0.1:1234' or '[::1]:1234'."""
  host, _, port = address.rpartition(":")
  if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
    raise ConfigError(f"--coordinator_address={address} is no HOST:PORT, such as 10.0.0.1:1234")
  return host.removeprefix("[").removesuffix("]"), int(port)


def _listens(address: str) -> bool:
  try:
    with socket.create_connection(_host_and_port(address), timeout=1):
      return True
  except TimeoutError:  # busy
    return True
  except OSError:
    return False
