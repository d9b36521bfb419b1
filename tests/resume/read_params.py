"""Reads the parameters of the newest checkpoint: `python read_params.py WORKDIR`."""

from __future__ import annotations

from pathlib import Path
import sys

from damcha_jax.training.restore import one_device_targets, restore_params
from tiny_task import tiny_task


if __name__ == "__main__":
  found, _ = restore_params(Path(sys.argv[1]), one_device_targets(tiny_task().init_params), "last",
                            "nats_per_token", print)
  print(found)
