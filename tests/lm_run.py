"""Trains the real decoder in a process of its own: `python lm_run.py WORKDIR CORPUS KILL_AT`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import signal
import sys
from typing import Any

from configs import enwik8
from damcha_jax.config import LanguageModelConfig, freeze
from damcha_jax.training import loop
from damcha_jax.training.language_model import language_model_task
from damcha_jax.training.task import Task


def tiny_language_model(corpus: Path, scan_layers: bool) -> LanguageModelConfig:
  """Two DAMCHA layers of width 16 over a text file, with dropout."""
  config = freeze(enwik8.get_config("smoke"))
  model = dataclasses.replace(config.model, num_layers=2, num_heads=2, features=16,
                              mlp_features=32, dropout_rate=0.1, scan_layers=scan_layers)
  return dataclasses.replace(
      config, dataset=str(corpus), model=model, num_steps=12, batch_size=8, context_length=16,
      damcha=dataclasses.replace(config.damcha, stride=2, widths=(8, 8)),
      optimizer=dataclasses.replace(config.optimizer, accumulation_steps=2),
      evaluation=dataclasses.replace(config.evaluation, every_steps=6, batch_size=32),
      checkpoint=dataclasses.replace(config.checkpoint, every_steps=3, keep_last=2),
      logging=dataclasses.replace(config.logging, every_steps=1, tensorboard=False))


def write_corpus(path: Path, num_bytes: int = 20_000) -> Path:
  text = " ".join(f"{n} times {n % 7} is {n * (n % 7)}." for n in range(num_bytes // 10))
  path.write_bytes(text.encode()[:num_bytes])
  return path


class KilledSource:
  """Passes batches on, and kills the process, as `kill -9` does, instead of batch `kill_at`."""

  def __init__(self, source: Any, kill_at: int):
    self._source, self._kill_at = source, kill_at

  def batch_at(self, step: int) -> dict[str, Any]:
    if step == self._kill_at:
      os.kill(os.getpid(), signal.SIGKILL)
    return self._source.batch_at(step)


def with_kill(task: Task, kill_at: int) -> Task:
  return dataclasses.replace(task, train_source=KilledSource(task.train_source, kill_at))


if __name__ == "__main__":
  workdir, corpus, kill = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
  run_config = tiny_language_model(corpus, scan_layers=True)
  loop.train(with_kill(language_model_task(run_config, "damcha", seed=0), kill), run_config,
             workdir, seed=0)
