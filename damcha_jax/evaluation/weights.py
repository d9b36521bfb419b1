"""Says which weights the metrics need, and checks those that are there.

  python -m damcha_jax.evaluation.weights
  python -m damcha_jax.evaluation.weights inception FILE [--output=inception.safetensors]
  python -m damcha_jax.evaluation.weights bart DIRECTORY

Without arguments it lists what to fetch and where to put it. With a path it checks hash, tensors
and tokenizer, and with `--output` it writes the Inception tensors as .safetensors, which loads
without a pickle and keeps the hash of its source. `--allow_other_weights` takes your own weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Optional

import jax

from damcha_jax.errors import until_nobody_reads, UserError
from damcha_jax.evaluation import inception
from damcha_jax.evaluation import published
from damcha_jax.evaluation.bart import BartScorer

_LISTING = """\
{title}
  from   {url}
  size   {num_bytes:,} bytes
  sha256 {sha256}
{also}  to     {place}
  check  python -m damcha_jax.evaluation.weights {kind} {place}
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Exit status: 0 listed or sound, 1 missing, damaged or other weights, 2 wrong usage."""
  parser = argparse.ArgumentParser(prog="python -m damcha_jax.evaluation.weights",
                                   description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("kind", nargs="?", choices=("inception", "bart"))
  parser.add_argument("path", nargs="?", type=_path, help="the Inception file, or BART's directory")
  parser.add_argument("--output", type=_path, help="a .safetensors file to write (inception)")
  parser.add_argument("--allow_other_weights", action="store_true",
                      help="also take weights other than the published ones")
  args = parser.parse_args(argv)
  if (args.kind is None) != (args.path is None):
    parser.error(f"name the path of the {args.kind} weights")
  if args.output and (args.kind != "inception" or not args.output.endswith(".safetensors")):
    parser.error("--output goes with inception and names a .safetensors file")
  try:
    print(check(args) if args.kind else listing())
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_status
  return 0


def _path(text: str) -> str:
  try:
    return str(Path(text).expanduser())
  except RuntimeError as error:  # a user that does not exist
    raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def listing() -> str:
  """What to fetch, from where, and where to put it."""
  file = f"weights/{published.INCEPTION.file_name}"
  return "\n".join([
      _entry("inception", published.INCEPTION, file),
      _entry("bart", published.BART, "weights/bart-large-cnn"),
      "Any other folder does as well: the experiments are given the paths.",
  ])


def _entry(kind: str, one: published.Published, place: str) -> str:
  also = [one.url.replace(one.file_name, name) for name in one.companions]
  return _LISTING.format(kind=kind, place=place, also="".join(f"  and    {url}\n" for url in also),
                         **one._asdict())


def check(args: argparse.Namespace) -> str:
  """Reads the weights as the metrics do; one line on what was found.

  Raises:
    UserError: they are missing, damaged, or not the published ones.
  """
  allowed = dict(allow_other_weights=args.allow_other_weights)
  if args.kind == "bart":
    scorer = BartScorer(args.path, **allowed)
    longest = scorer.config.max_position_embeddings
    return _found(args.path, scorer.weights_sha256, published.BART, f"texts of {longest} tokens")
  weights = inception.load_inception(args.path, **allowed)
  num_params = sum(leaf.size for leaf in jax.tree.leaves(weights.params))
  line = _found(args.path, weights.sha256, published.INCEPTION, f"{num_params:,} parameters")
  if args.output:
    inception.convert(args.path, Path(args.output), **allowed)
    line += f"; written to {args.output}"
  return line


def _found(path: str, sha256: str, expected: published.Published, size: str) -> str:
  kind = "the published" if sha256 == expected.sha256 else "other weights for"
  return f"{path}: {kind} {expected.title}, {size}, sha256 {sha256}"


if __name__ == "__main__":
  with until_nobody_reads():
    sys.exit(main())
