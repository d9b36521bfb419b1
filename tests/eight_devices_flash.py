"""Fused attention on a 2x2x2 mesh of forced CPU devices against the plain path on one.

A mesh deadlocks JAX's interpreter of kernels on some of its versions, so the kernel's place is
taken by its definition; but what the training loop makes of DAMCHA is lowered for TPUs with the
kernel itself. `python eight_devices_flash.py FOLDER` writes FOLDER/report.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
import sys

import jax
import numpy as np

from damcha_jax.attention import DamchaAttention, MultiHeadAttention, core, flash
from damcha_jax.attention.activations import sharded_like
from damcha_jax.config import MeshConfig
from damcha_jax.training import loop
from damcha_jax.training import sharding as sharding_lib
from damcha_jax.training.language_model import language_model_task
from lm_run import tiny_language_model, write_corpus


def num_kernels(folder: Path) -> dict[str, int]:
  """In the programs for TPUs of what the loop runs beside training."""
  jax.default_backend = lambda: "tpu"
  config = tiny_language_model(write_corpus(folder / "corpus.txt"), scan_layers=True)
  config = dataclasses.replace(
      config, context_length=128, mesh=MeshConfig(2, 2, 2), attentions="damcha",
      model=dataclasses.replace(config.model, attention_implementation="pallas"))
  run = loop._Run(language_model_task(config, "damcha", 0), config, None, 0, None, None)
  program = jax.export.export(run.diagnostics, platforms=["tpu"])(run.targets.params)
  return {"diagnostics": program.mlir_module().count("@tpu_custom_call")}


def main(folder: Path) -> None:
  kernels = num_kernels(folder)
  shapes = set()

  def kernel(*heads_first, causal, sm_scale, block_sizes):
    del block_sizes
    shapes.update(x.shape for x in heads_first)
    output_BTHK = core.attend(*(x.swapaxes(1, 2) for x in heads_first), scale=sm_scale,
                              is_causal=causal, implementation="plain")
    return output_BTHK.swapaxes(1, 2)

  flash.kernels.flash_attention = kernel
  partitioning = sharding_lib.Partitioning(sharding_lib.make_mesh(MeshConfig(2, 2, 2)), ())
  x = np.random.default_rng(0).normal(size=(8, 128, 24)).astype(np.float32)
  report = {}
  for num_heads in (4, 3):  # the second is no multiple of the tensor axis
    for name, module in {"mha": MultiHeadAttention(num_heads, causal=True),
                         "damcha": DamchaAttention(num_heads, stride=64, causal=True)}.items():
      params = module.init(jax.random.key(0), x)["params"]
      gradient = lambda module: jax.grad(
          lambda params, x: (module.apply({"params": params}, x)**2).sum(), (0, 1))
      expected = gradient(module.copy(implementation="plain"))(params, x)
      shapes.clear()
      fused = sharded_like(partitioning.batch, gradient(module.copy(implementation="pallas")))
      actual = jax.jit(fused, in_shardings=(partitioning.replicated, partitioning.batch))(params, x)
      size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
      report[f"{name} with {num_heads} heads"] = dict(
          shapes=sorted(shapes),
          difference=float(max(np.abs(a - b).max() for a, b in zip(
              jax.tree.leaves(jax.device_get(actual)), jax.tree.leaves(expected))) / size))
  (folder / "report.json").write_text(json.dumps(dict(kernels=kernels, gradients=report)))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
