"""The parameters of a trained decoder as a .safetensors file.

  python -m experiments.export --workdir=runs/gpt2_enwik8/mix-cpu --attention=damcha \
    --output=damcha.safetensors

The tensors have the names of the model's parameters, such as stack/layer_0/attention/value/kernel,
layers unrolled; the file's metadata hold the run's config. It is for
`damcha_jax.interop.parameters` to read.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
from pathlib import Path
import sys

from absl import flags
import jax

from damcha_jax.config import ConfigError, DecoderConfig, freeze, to_dict
from damcha_jax.interop.parameters import write_params
from damcha_jax.training import restore
from experiments import command_line
from experiments import common
from experiments.sample import find_runs


def main(argv: Sequence[str]) -> None:
  options = parse(argv)
  directory, *others = find_runs(Path(options.workdir).absolute(), options.attention,
                                 options.run_seed)
  if others:
    raise ConfigError(f"workdir {options.workdir} has several attentions; name one by --attention")
  run = restore.describe_run(directory)
  cls = common.CONFIG_CLASSES.get(str(run.config.get("experiment")))
  if cls is None or not issubclass(cls, DecoderConfig):
    raise ConfigError(f"{directory} is no run of a decoder")
  config = freeze({**run.config, "attentions": run.name, "seeds": (run.seed,)}, cls)
  _, step, params = restore.restore_decoder(
      directory, config, run.name, options.checkpoint,
      lambda line: print(f"note: {line}", file=sys.stderr))
  write_params(options.output, params, {
      "config": json.dumps(to_dict(config)), "attention": run.name, "step": str(step)})
  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f"{options.output}: {run.name}, step {step}, {num_params:,} parameters")


def parse(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("workdir", None, "name the directory that training wrote, or one run's",
                      **define)
  flags.DEFINE_string("output", None, "name the file to write", **define)
  flags.DEFINE_string("attention", None, "whose parameters, if there are several", **define)
  flags.DEFINE_integer("run_seed", None, "the run's seed; by default the lowest", **define)
  flags.DEFINE_enum("checkpoint", "best", restore.CHECKPOINTS, "which checkpoint", **define)
  return command_line.parse_options(values, argv, __doc__, required=("workdir", "output"))


if __name__ == "__main__":
  with command_line.user_errors():
    main(sys.argv)
