"""The command line of every program here: flags, configs, exit statuses, one-line errors.

Exit statuses: 0 done, 2 bad usage or configuration, 1 anything else the user can act on. Either
failure is one line on stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib.util
from pathlib import Path
import re
import signal
import sys
from typing import Any, Optional

from absl import flags
import jax
from ml_collections import ConfigDict, config_flags

from damcha_jax.config import ConfigError, unknown_key_message
from damcha_jax.errors import until_nobody_reads, UserError
from damcha_jax.training import processes
from damcha_jax.training.profiling import parse_updates, profiled
from experiments.allocator import keep_freed_memory


def launch(train_and_evaluate: Callable[[ConfigDict, Path], Any], experiment: str,
           reads: Optional[str] = None) -> None:
  """Parses the command line and calls `train_and_evaluate(config, workdir)`.

  Args:
    train_and_evaluate: runs the experiment.
    experiment: its name.
    reads: the experiment whose configs it runs on, if not its own.
  """
  with user_errors():
    config, workdir, joined = parse_all(sys.argv, experiment)
    expected = reads or experiment
    if config.experiment != expected:
      raise ConfigError(f"{config.name}.py configures 'python -m experiments.{config.experiment}'; "
                        f"experiments.{experiment} takes a config of experiment '{expected}'")
    with joined:
      if jax.default_backend() == "cpu":
        keep_freed_memory()
      train_and_evaluate(config, workdir)


def parse(argv: Sequence[str], experiment: Optional[str] = None,
          values: Optional[flags.FlagValues] = None) -> tuple[ConfigDict, Path]:
  """The config, with its overrides, and the workdir, absolute, that a command line names.

  Args:
    argv: the command line.
    experiment: its name, if not that of the config.
    values: flags of the program's own, which are parsed too.

  Raises:
    ConfigError: the command line cannot be understood.
  """
  return parse_all(argv, experiment, values)[:2]


def parse_all(argv: Sequence[str], experiment: Optional[str] = None,
              values: Optional[flags.FlagValues] = None,
              ) -> tuple[ConfigDict, Path, contextlib.AbstractContextManager[None]]:
  """`parse`, and the context of the run: its processes, if there are several, and its trace."""
  _check_utf8(argv)
  values = flags.FlagValues() if values is None else values
  holder = config_flags.DEFINE_config_file(
      "config", help_string="config file and size, such as configs/mix.py:cpu; "
      "--config.KEY=VALUE overrides one of its values", flag_values=values, sys_argv=list(argv))
  workdir = flags.DEFINE_string(
      "workdir", None, "where results go; by default runs/<experiment>/<config>-<size>",
      flag_values=values)
  run = _define_run(values)
  if any(argument in ("-h", "--help", "-help") for argument in argv[1:]):
    print(f"{sys.modules['__main__'].__doc__ or argv[0]}\n{values.get_help()}")
    sys.exit(0)
  _check_overrides(argv)
  try:
    rest = values(argv)
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    raise ConfigError(error) from error
  if len(rest) > 1:
    raise ConfigError(f"unexpected argument '{rest[1]}'; options start with --")
  config = holder.value
  if config is None:
    raise ConfigError("--config is missing; name a config file, such as configs/mix.py:cpu")
  default = f"runs/{experiment or config.experiment}/{config.name}-{config.size}"
  path = Path(workdir.value or default).absolute()
  return config, path, run(path)


def _define_run(values: flags.FlagValues) -> Callable[[Path], Any]:
  """Defines the flags of a run's processes and trace; returns its context in a workdir."""
  distributed = flags.DEFINE_bool(
      "distributed", False, "one of several processes, as on a TPU pod or under Slurm, which tell "
      "the three values below themselves", flag_values=values)
  address = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0",
                                flag_values=values)
  number = flags.DEFINE_integer("num_processes", None, "how many there are", flag_values=values,
                                lower_bound=1)
  index = flags.DEFINE_integer("process_id", None, "which one this is, from 0", flag_values=values,
                               lower_bound=0)
  timeout = flags.DEFINE_integer("process_timeout", 300, "seconds to wait for another process",
                                 flag_values=values, lower_bound=1)

  profile = flags.DEFINE_string(
      "profile", None, "updates of which each run keeps a trace in its folder profile/, such as "
      "10-12", flag_values=values)

  @contextlib.contextmanager
  def run(workdir: Path) -> Iterator[None]:
    updates = None if profile.value is None else parse_updates(profile.value)
    given = (address.value, number.value, index.value)
    alone = not distributed.value and given == (None, None, None)
    joined = (contextlib.nullcontext() if alone
              else processes.connected(workdir, *given, timeout.value))
    with joined, profiled(updates):
      yield

  return run


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
  """Turns a user's mistake into one line on stderr and its exit status."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as during the imports
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which would end it without a word
    signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    with until_nobody_reads():
      yield
  except ConfigError as error:
    _fail(2, error)
  except UserError as error:
    _fail(error.exit_status, error)
  except OSError as error:  # where no better message was prepared: long names, rights, full disks
    _fail(1, f"{error.filename or 'a file'}: {error.strerror or error}; check its path, its "
             "permissions and the free space")
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    _fail(1, f"there is not enough memory ({error}); lower batch_size or the sizes of the model "
             "and its inputs")
  except KeyboardInterrupt:  # outside training, which answers the signal itself
    _fail(1, "interrupted; run the same command again to go on")


def _fail(status: int, message: Any) -> None:
  print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
  sys.exit(status)


def _check_utf8(argv: Sequence[str]) -> None:
  """Raises `ConfigError` for what no file of a run could hold, such as the name of a file."""
  for argument in argv:
    try:
      argument.encode()
    except UnicodeEncodeError as error:
      raise ConfigError(f"argument {argument!r} is no UTF-8; rename the file") from error


def _check_overrides(argv: Sequence[str]) -> None:
  """Raises `ConfigError` if the config file cannot be loaded or lacks a key that is overridden."""
  matches = [re.match(r"--?config(?:=(.*)|$)", argument) for argument in argv]
  for index, match in enumerate(matches):
    if not match:
      continue
    value = match[1] if match[1] is not None else "".join(argv[index + 1:index + 2])
    keys = set(_keys(load_config(value)))
    for argument in argv:
      override = re.match(r"--?(?:no)?config\.([^=]+)", argument)
      if override and override[1] not in keys:
        raise ConfigError(unknown_key_message(override[1], keys))


def load_config(value: str) -> ConfigDict:
  """The config that `--config=value` names, such as configs/mix.py:cpu.

  Raises:
    ConfigError: it cannot be loaded.
  """
  path, _, size = value.partition(":")
  remedy = "name an experiment's file, such as configs/mix.py:cpu"
  spec = importlib.util.spec_from_file_location("config_file", path)
  if spec is None or not Path(path).is_file():
    raise ConfigError(f"config file '{path}' is not there; name a Python file, such as "
                      "configs/mix.py:cpu")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not callable(getattr(module, "get_config", None)):
      raise ConfigError(f"it has no get_config(); {remedy}")
    config = module.get_config(*([size] if size else []))
  except TypeError as error:  # as of a file that others call with arguments of their own
    raise ConfigError(f"config file '{value}': {error}; {remedy}") from error
  except Exception as error:  # whatever a user's own file may raise
    raise ConfigError(f"config file '{value}': {error}") from error
  if not isinstance(config, ConfigDict) or not {"experiment", "name", "size"} <= set(config):
    raise ConfigError(f"config file '{value}': it gives no ConfigDict with experiment, name and "
                      f"size; {remedy}")
  return config


def _keys(config: ConfigDict, prefix: str = "") -> Iterator[str]:
  for key, value in config.items():
    yield prefix + key
    if isinstance(value, ConfigDict):
      yield from _keys(value, f"{prefix}{key}.")


def parse_options(values: flags.FlagValues, argv: Sequence[str], doc: str,
                  required: Sequence[str] = ()) -> flags.FlagValues:
  """`values`, parsed; `--help` prints `doc` and what they are.

  Raises:
    ConfigError: the command line cannot be understood, or lacks what is required.
  """
  if any(argument in ("-h", "--help", "-help") for argument in argv[1:]):
    print(f"{doc}\n{values.get_help()}")
    sys.exit(0)
  _check_utf8(argv)
  try:
    rest = values(argv)
  except flags.Error as error:
    raise ConfigError(error) from error
  if len(rest) > 1:
    raise ConfigError(f"unexpected argument '{rest[1]}'; options start with --")
  for name in required:
    if not values[name].value:
      raise ConfigError(f"--{name} is missing; {values[name].help}")
  return values
