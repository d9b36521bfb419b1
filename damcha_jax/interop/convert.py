"""Converts a PyTorch checkpoint to an Orbax checkpoint of this suite's parameters.

  python -m damcha_jax.interop.convert vit.pt --kind=vit --num_heads=6 --output=vit
  python -m damcha_jax.interop.convert decoder.npz --kind=transformer --num_heads=8 \\
      --output=decoder off_diag_scale=0.5
  python -m damcha_jax.interop.convert gpt2/model.safetensors --kind=gpt2 --to_damcha \\
      --output=gpt2-damcha update_rank=8

Kinds are the DAMCHA authors' `transformer` (TransformerPC), `vit` (VisionTransformer) and
`baseline` (BaselineTransformer), and Hugging Face's `gpt2`. OUTPUT gets `model.json`, which says
what the model is, and `params/`; `load_converted` makes the model of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import json
import os
from pathlib import Path
import shutil
import sys
from typing import Any, Optional

import jax
import orbax.checkpoint as ocp

from damcha_jax.config import ConfigError
from damcha_jax.errors import CheckpointError, silence_orbax_threads, until_nobody_reads, UserError
from damcha_jax.files import expanded
from damcha_jax.interop import gpt2
from damcha_jax.interop.options import check_values
from damcha_jax.interop.options import OptionError
from damcha_jax.interop.tensor_files import read_tensors
from damcha_jax.interop.torch_checkpoints import abstract_params
from damcha_jax.interop.torch_checkpoints import import_checkpoint
from damcha_jax.interop.torch_checkpoints import Imported
from damcha_jax.interop.torch_checkpoints import KINDS
from damcha_jax.interop.torch_checkpoints import make_module


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Exit status: 0 converted, 1 a file that cannot be read, used or written, 2 wrong usage."""
  parser = argparse.ArgumentParser(
      prog="python -m damcha_jax.interop.convert",
      description=__doc__.split("\n", maxsplit=1)[0],
  )
  parser.add_argument("checkpoint", help=".pt, .pth, .bin, .npz or .safetensors")
  parser.add_argument("options", nargs="*", metavar="OPTION=VALUE",
                      help="what the tensors do not tell, by the name of the argument there")
  parser.add_argument("--kind", required=True, choices=KINDS)
  parser.add_argument("--num_heads", type=int, help="where the tensors do not tell it")
  parser.add_argument("--output", required=True, help="a new directory")
  parser.add_argument("--to_damcha", action="store_true",
                      help="make the attention a full-width DAMCHA of the same function (gpt2)")
  parser.add_argument("--seed", type=int, default=0,
                      help="of what --to_damcha adds, from 0 to 2^63 - 1 (default: %(default)s)")
  args = parser.parse_intermixed_args(argv)
  try:
    print(convert(args))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_status
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    first = (str(error).strip().splitlines() or ["out of memory"])[0]
    print(f"error: the model cannot be made here: {first}; choose smaller options, or a machine"
          " with more memory", file=sys.stderr)
    return 1
  return 0


def convert(args: argparse.Namespace) -> str:
  """Does what the command line asks for; one line on what was written.

  Raises:
    UserError: the file or the options do not give a model, or the output exists.
    ConfigError: options that do not go together.
  """
  output = _new_directory(args.output)
  if not 0 <= args.seed < 2**63:
    raise OptionError(f"--seed={args.seed} must be from 0 to 2^63 - 1")
  if args.to_damcha and args.kind != "gpt2":
    raise OptionError(f"--to_damcha is for --kind=gpt2, not {args.kind}")
  defaults = dict(KINDS[args.kind].defaults)
  new_defaults = gpt2.DAMCHA_DEFAULTS if args.to_damcha else {}
  options = parse_options(args.options, {**defaults, **new_defaults})
  own = {name: value for name, value in options.items() if name in defaults}
  arrays, num_heads, told = read_tensors(args.checkpoint), args.num_heads, gpt2.Told()
  if args.kind == "gpt2":
    told = gpt2.read_config(expanded(args.checkpoint))
    if None not in (num_heads, told.num_heads) and num_heads != told.num_heads:
      raise OptionError(f"--num_heads={num_heads}, but config.json has n_head={told.num_heads};"
                        " leave the option out, or correct the file")
    num_heads = told.num_heads if num_heads is None else num_heads
    own = {**told.options, **own}
  imported = import_checkpoint(args.kind, arrays, own, num_heads=num_heads)
  params, description = imported.params, imported.description
  if args.kind == "gpt2":
    gpt2.check_sizes(description, told.sizes)
  if args.to_damcha:
    new = {name: value for name, value in options.items() if name in new_defaults}
    params, description = gpt2.to_damcha(params, description, new, args.seed)
  save_converted(output, params, description)
  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  return f"{output}: {args.kind}, {num_params:,} parameters"


def _new_directory(name: str) -> Path:
  try:
    output = expanded(name).absolute()
    exists = output.exists()
  except (OSError, UserError, ValueError) as error:
    raise UserError(f"--output={name!r} cannot be a directory: {error}; choose another") from error
  if exists:
    raise UserError(f"{output} exists; choose another --output, or remove it")
  return output


def parse_options(pairs: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Values of `name=value` pairs, typed like the defaults; None stands for an integer.

  Raises:
    OptionError: an unknown name, one given twice, or a value of another type or out of range.
  """
  options = {}
  for pair in pairs:
    name, equals, text = pair.partition("=")
    if not equals or name not in defaults:
      raise OptionError(f"unknown option '{pair}'; there are {', '.join(sorted(defaults))}, each"
                        " with =value")
    if name in options:
      raise OptionError(f"option {name} is given twice; give it once")
    try:
      options[name] = _parse(text, defaults[name])
    except ValueError:
      wanted = "an integer" if defaults[name] is None else f"like {defaults[name]!r}"
      raise OptionError(f"option {pair} must be {wanted}") from None
  check_values(options)
  return options


def _parse(text: str, default: Any) -> Any:
  if isinstance(default, bool):
    if text.lower() not in ("true", "false"):
      raise ValueError(text)
    return text.lower() == "true"
  if isinstance(default, tuple):
    return tuple(int(part) for part in text.split(",") if part)
  return (int if default is None else type(default))(text)


def save_converted(output: Path, params: Any, description: Mapping[str, Any]) -> None:
  """Writes a model's parameters and description; a failure leaves nothing behind.

  Raises:
    CheckpointError: it cannot be written.
  """
  partial = output.with_name(f".{output.name}.{os.getpid()}")
  silence_orbax_threads()
  try:
    partial.mkdir(parents=True)
    (partial / "model.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(partial / "params", params)
    partial.rename(output)
  except Exception as error:  # Orbax and its storage raise many kinds
    first = (str(error).strip().splitlines() or [""])[0]
    raise CheckpointError(f"cannot write {output}: {first}; free space, check permissions, or"
                          " choose another --output") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def load_converted(directory: str | Path) -> Imported:
  """The model that the command wrote.

  Raises:
    CheckpointError: `directory` is not what the command writes, or is damaged.
  """
  directory = expanded(directory).absolute()
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  silence_orbax_threads()
  try:
    description = json.loads((directory / "model.json").read_text(encoding="utf-8"))
    targets = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        abstract_params(description),
    )
    with ocp.StandardCheckpointer() as checkpointer:
      params = checkpointer.restore(directory / "params", targets)
  except Exception as error:  # Orbax and its storage raise many kinds
    first = (str(error).strip().splitlines() or [""])[0]
    raise CheckpointError(f"{directory} holds no converted model, or a damaged one"
                          f" ({type(error).__name__}: {first})") from error
  return Imported(make_module(description), params, description)


if __name__ == "__main__":
  with until_nobody_reads():
    sys.exit(main())
