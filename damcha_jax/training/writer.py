"""What a run tells: `metrics.jsonl` (the record), TensorBoard (a viewer) and a progress line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import json
from pathlib import Path
import sys
import time
from typing import Any, Optional, TextIO

from damcha_jax.config import ConfigError
from damcha_jax.errors import WorkdirError
from damcha_jax.training.workdir import (checksum, is_number, read_text, write_atomically,
                                         writing)

Record = dict[str, Any]


class MetricsWriter:
  """Appends one JSON object per line; each has `step` (completed updates) and `split`.

  On opening, records that a resumed run will write again are dropped: those past `last_step`, those
  of split `test` (written at the very end) and a last line torn by a crash.
  """

  def __init__(self, path: Path, last_step: int, enabled: bool = True,
               tensorboard_dir: Optional[Path] = None, needed: Mapping[str, str] = {}):
    """Opens the file for appending.

    Args:
      path: of the file.
      last_step: the completed updates of the run that goes on.
      enabled: whether this process writes.
      tensorboard_dir: where TensorBoard's records go as well, if anywhere.
      needed: by split, the number that each of its records must have.

    Raises:
      WorkdirError: the file cannot be read or written, or a line is no such record.
    """
    self._path = path
    self._enabled = enabled
    present = read_text(path, errors="replace") or ""
    self.records = [record for record in _parse(path, present, needed)
                    if record["step"] <= last_step and record["split"].split("/")[0] != "test"]
    self._file = None
    self._tensorboard = None
    if not enabled:
      return
    kept = "".join(map(_line, self.records))
    if kept != present:
      write_atomically(path, kept)
    with writing(path):
      # Unbuffered: after a failed write nothing is left that closing would try to write again.
      self._file = open(path, "ab", buffering=0)
    if tensorboard_dir is not None:
      self._tensorboard = _open_tensorboard(tensorboard_dir, last_step + 1)

  def write(self, record: Record) -> None:
    """Appends a record and hands it to the operating system, so that a killed process keeps it."""
    self.records.append(record)
    if not self._enabled:
      return
    line = _line(record).encode("utf-8")
    with writing(self._path):
      while line:
        line = line[self._file.write(line):]
    if self._tensorboard is not None:
      for key, value in record.items():
        if key not in ("step", "split") and value is not None:
          self._tensorboard.add_scalar(f"{record['split']}/{key}", value, record["step"])

  def fingerprint(self) -> dict[str, int]:
    """What tells, with a checkpoint, that the records up to now are those of today."""
    return {"num_records": len(self.records), "records_crc32": checksum(self.records)}

  def begins_with(self, num_records: Optional[int] = None,
                  records_crc32: Optional[int] = None) -> bool:
    """Whether the records begin with those of a `fingerprint`; of none, as in old files, always."""
    return num_records is None or checksum(self.records[:num_records]) == records_crc32

  def close(self) -> None:
    if self._tensorboard is not None:
      self._tensorboard.close()
    if self._file is not None:
      self._file.close()


def _line(record: Record) -> str:
  return json.dumps(record) + "\n"


def _parse(path: Path, text: str, needed: Mapping[str, str]) -> list[Record]:
  records, lines = [], text.split("\n")
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      if not _is_record(record, needed):
        raise ValueError("no record")
      records.append(record)
    except (RecursionError, ValueError) as error:
      # Only what follows the last newline, or a last line that a crash filled up, can be torn.
      if any(rest.strip() for rest in lines[number:]):
        raise WorkdirError(f"{path} line {number} is not a record; restore the file, or remove it "
                           "and the checkpoints beside it to train afresh") from error
      break
  return records


def _is_record(value: Any, needed: Mapping[str, str]) -> bool:
  if not (isinstance(value, dict) and type(value.get("step")) is int
          and isinstance(value.get("split"), str)):
    return False
  return value["split"] not in needed or is_number(value.get(needed[value["split"]]))


def _open_tensorboard(directory: Path, purge_step: int):
  try:
    import tensorboardX  # pylint: disable=import-outside-toplevel
  except ImportError as error:
    raise ConfigError("logging.tensorboard needs the package tensorboardX; install it or set "
                      "logging.tensorboard to False") from error
  with writing(directory):
    return tensorboardX.SummaryWriter(str(directory), purge_step=purge_step)


class Progress:
  """One line that is rewritten on a terminal, plain lines elsewhere."""

  def __init__(self, name: str, enabled: bool = True, stream: Optional[TextIO] = None):
    self._name = name
    self._enabled = enabled
    self._stream = stream or sys.stderr
    self._width = 0

  def note(self, text: str) -> None:
    """A line that stays."""
    self._print(text, stays=True)

  def update(self, text: str) -> None:
    """The current state; on a terminal the next line overwrites it."""
    self._print(text, stays=not self._stream.isatty())

  def close(self) -> None:
    """Leaves a terminal at the start of a fresh line."""
    if self._enabled and self._width:
      self._write("\n")
      self._width = 0

  def _print(self, text: str, stays: bool) -> None:
    if not self._enabled:
      return
    text = f"[{self._name}] {text}"
    start = "\r" if self._width else ""
    self._write(start + text.ljust(self._width) + ("\n" if stays else ""))
    self._width = 0 if stays else len(text)

  def _write(self, text: str) -> None:
    # A log on a full disk or a closed terminal must not end the training.
    with contextlib.suppress(OSError):
      self._stream.write(text)
      self._stream.flush()


class Throttled:
  """Passes a call on if the last one that was is `seconds` ago; the first counts from creation."""

  def __init__(self, call: Callable[..., None], seconds: float = 5.0,
               clock: Callable[[], float] = time.monotonic):
    self._call = call
    self._seconds = seconds
    self._clock = clock
    self._last = clock()

  def __call__(self, *arguments: Any) -> None:
    if self._clock() - self._last >= self._seconds:
      self._last = self._clock()
      self._call(*arguments)


def format_duration(seconds: float) -> str:
  """`75 -> '1:15'`, `3675 -> '1:01:15'`."""
  minutes, seconds = divmod(int(round(seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
