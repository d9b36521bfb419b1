"""A checkpoint written by an earlier version, which every later one must still read.

`python tests/resume/golden_checkpoint.py` (with PYTHONPATH=.:tests) writes it anew. Do that only
for a change that breaks old checkpoints on purpose. The weights are NumPy's, so that no change of
JAX's random numbers reaches them.
"""

from __future__ import annotations

import json
from pathlib import Path

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from damcha_jax.config import CheckpointConfig
from damcha_jax.models.decoder import init_params, make_decoder
from damcha_jax.training.checkpoint import Checkpointer
from damcha_jax.training.decoder import parameter_groups
from damcha_jax.training.optimizer import make_optimizer
from damcha_jax.training.state import TrainState
import lm_run

FOLDER = Path(__file__).parent / "golden"
STEP = 7


class Golden:
  """The tiny DAMCHA decoder of the tests, and the state that is saved."""

  def __init__(self):
    config = lm_run.tiny_language_model(Path("unused.txt"), scan_layers=True)
    self.model = make_decoder(config, "damcha")
    self.tokens_BT = np.random.default_rng(1).integers(1, 256, (2, config.context_length))
    optimizer = make_optimizer(config.optimizer, config.num_steps, parameter_groups(config))

    def state(key: jax.Array) -> TrainState:
      params = nn.unbox(init_params(self.model, key, jnp.asarray(self.tokens_BT)))
      return TrainState(jnp.int32(STEP), params, optimizer.init(params))

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self.targets = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        jax.eval_shape(state, jax.random.key(0)))

  def state(self) -> TrainState:
    rng = np.random.default_rng(0)
    fill = lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype)
    filled = jax.tree.map(fill, self.targets)
    return filled.replace(step=jnp.int32(STEP))

  def logits(self, params) -> np.ndarray:
    """Logits [B, V] after the last token."""
    return np.asarray(self.model.apply({"params": params}, self.tokens_BT)[:, -1], np.float64)

  def checkpointer(self, folder: Path) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(1, 1, 0), self.targets, print)


def main() -> None:
  golden = Golden()
  state = golden.state()
  checkpointer = golden.checkpointer(FOLDER / "checkpoints")
  checkpointer.save(STEP, state)
  checkpointer.wait()
  checkpointer.close()
  for marker in FOLDER.rglob("commit_success.txt"):
    marker.write_text("complete\n", encoding="utf-8")  # in place of a path of one machine
  logits = golden.logits(state.params)[:, :8].round(5).tolist()
  (FOLDER / "logits.json").write_text(json.dumps(logits) + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
