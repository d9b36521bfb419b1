"""Trains the tiny task in a process of its own: `python tiny_run.py WORKDIR`."""

from __future__ import annotations

from pathlib import Path
import sys
import time

from damcha_jax.config import CheckpointConfig, EvaluationConfig
from damcha_jax.training import loop
from experiments import command_line
from tiny_task import TinyConfig, tiny_task

# Slow enough for a signal to come in the middle, with saves and evaluations close to each other.
CONFIG = TinyConfig(num_steps=80, checkpoint=CheckpointConfig(3, keep_last=2, keep_best=1),
                    evaluation=EvaluationConfig(every_steps=10, batch_size=7))


if __name__ == "__main__":
  with command_line.user_errors():
    loop.train(tiny_task(on_batch=lambda step, batch: time.sleep(0.02)), CONFIG, Path(sys.argv[1]),
               seed=0)
