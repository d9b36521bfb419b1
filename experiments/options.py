"""Command lines that name no config: options with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence
import sys

from absl import flags

from damcha_jax.config import ConfigError


def parse(values: flags.FlagValues, argv: Sequence[str], doc: str,
          required: Sequence[str] = ()) -> flags.FlagValues:
  """`values`, parsed; `--help` prints `doc` and what they are.

  Raises:
    ConfigError: the command line cannot be understood, or lacks what is required.
  """
  if any(argument in ("-h", "--help", "-help") for argument in argv[1:]):
    print(f"{doc}\n{values.get_help()}")
    sys.exit(0)
  try:
    rest = values(argv)
  except flags.Error as error:
    raise ConfigError(error) from error
  if len(rest) > 1:
    raise ConfigError(f"unexpected argument '{rest[1]}'; options start with --")
  for name in required:
    if values[name].value is None:
      raise ConfigError(f"--{name} is missing; {values[name].help}")
  return values
