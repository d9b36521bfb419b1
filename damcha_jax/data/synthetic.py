"""Generated look-ups whose answer lies across head subspaces (paper Section 5.6).

A sequence is N items, each a key x_s and a symbol y_s, and then Q queries, each of one item t,
whose answer is y_t. The D features are H subspaces of K = D / H, one for each head. Keys and
queries agree in some directions, but for noise of variance sigma^2, and all keys have the same
length there. So the posterior over items is a softmax attention with one metric, in closed form:

    p(s | query) = softmax_s(query M x_s / sigma^2),  M the projection on those directions

Entanglement e in [0, 1] says how far the heads' subspaces have to be taken together:

    classification  The relation has K directions, M = a a^T (x) I_K with a unit vector a [H] over
                    the subspaces; all else is noise. a = cos(e f) e_0 + sin(e f) u, cos(f) =
                    1 / sqrt(H), u equal on the other subspaces. At 0 subspace 0 holds the relation:
                    M has one diagonal block. At 1 all hold it in equal parts: the H x H blocks of
                    M are equal, a 1 - 1 / H of its energy off the diagonal. The examples are those
                    of e = 0 in other axes, so the optimum is the same for every e.
    retrieval       M = 1. Each subspace is shared with probability e: its keys take only two values
                    over the N <= 2^H items, in such a way that all shared subspaces together tell
                    the items apart and no single one does. In the others every item has a value of
                    its own. At 0 each subspace names the item; at 1 only all together do.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math

import numpy as np

from damcha_jax.config import ConfigError
from damcha_jax.config.synthetic import TASKS

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Lookup:
  """One task at one feature dimension.

  Attributes:
    name: one of TASKS.
    num_heads: H, the number of subspaces.
    dimension: D, features of a key.
    num_items: N; a power of 2 up to 2^H for retrieval.
    num_queries: Q.
    num_classes: C, symbols an item can have.
    separation: d^2 = F / (2 sigma^2), F the directions in which keys and queries agree: the squared
      distance, in standard deviations, at which two orthogonal keys are told apart. It sets sigma,
      so that all dimensions are about equally hard at the best.

  Raises:
    ConfigError: sizes that do not go together.
  """

  name: str
  num_heads: int
  dimension: int
  num_items: int
  num_queries: int
  num_classes: int
  separation: float

  def __post_init__(self):
    if self.name not in TASKS:
      raise ConfigError(f"unknown task '{self.name}'; choose from {', '.join(TASKS)}")
    if self.dimension % self.num_heads or self.num_heads < 2:
      raise ConfigError(f"dimension {self.dimension} is not cut into subspaces by {self.num_heads} "
                        "heads; choose two or more that divide it")
    if self.name == "retrieval" and self.num_items not in [
        2**i for i in range(1, self.num_heads + 1)]:
      raise ConfigError(f"retrieval.num_items={self.num_items} must be a power of 2 from 2 to "
                        f"2^{self.num_heads}, so that {self.num_heads} shared subspaces tell the "
                        "items apart")

  @property
  def noise(self) -> float:
    """sigma, in each direction of the relation."""
    directions = self.dimension // self.num_heads if self._is_mixed else self.dimension
    return math.sqrt(directions / (2 * self.separation))

  @property
  def _is_mixed(self) -> bool:
    return self.name == "classification"

  def metric(self, entanglement: float) -> np.ndarray:
    """M, [D, D] float64."""
    if not self._is_mixed:
      return np.eye(self.dimension)
    relation_H = self._mixing(entanglement)[:, 0]
    return np.kron(np.outer(relation_H, relation_H), np.eye(self.dimension // self.num_heads))

  def _mixing(self, entanglement: float) -> np.ndarray:
    """Orthogonal [H, H] whose first column is a: the reflection that takes e_0 there."""
    angle = entanglement * math.acos(1 / math.sqrt(self.num_heads))
    first_H = np.eye(self.num_heads)[0]
    others_H = (1 - first_H) / math.sqrt(self.num_heads - 1)
    normal_H = first_H - (math.cos(angle) * first_H + math.sin(angle) * others_H)
    length = normal_H @ normal_H
    if length == 0:
      return np.eye(self.num_heads)
    return np.eye(self.num_heads) - 2 * np.outer(normal_H, normal_H) / length

  def draw(self, rng: np.random.Generator, num_examples: int,
           entanglements: Sequence[float]) -> Batch:
    """Examples that differ by their entanglement alone.

    Returns:
      `features` float32 [B, E, N + Q, D], keys before queries; `symbols` int32 [B, N], those of the
      items; `answers` int32 [B, Q].
    """
    shape = num_examples, self.num_queries
    symbols_BN = rng.integers(0, self.num_classes, (num_examples, self.num_items), np.int32)
    items_BQ = rng.integers(0, self.num_items, shape)
    noise_BQHK = rng.standard_normal((*shape, *self._head_shape))
    keys_BENHK = (self._classes_keys if self._is_mixed else self._codes)(
        rng, num_examples, entanglements)
    queries_BEQHK = np.take_along_axis(keys_BENHK, items_BQ[:, None, :, None, None], axis=2)
    if self._is_mixed:  # only the first subspace is related, before they are mixed
      queries_BEQHK[..., 1:, :] = noise_BQHK[:, None, :, 1:]
      queries_BEQHK[..., :1, :] += self.noise * noise_BQHK[:, None, :, :1]
    else:
      queries_BEQHK += self.noise * noise_BQHK[:, None]
    features_BETHK = np.concatenate([keys_BENHK, queries_BEQHK], axis=2)
    if self._is_mixed:
      mixing_EHH = np.stack([self._mixing(entanglement) for entanglement in entanglements])
      features_BETHK = np.einsum("Ehg,bEtgk->bEthk", mixing_EHH, features_BETHK, optimize=True)
    return {"features": features_BETHK.reshape(*features_BETHK.shape[:3], -1).astype(np.float32),
            "symbols": symbols_BN,
            "answers": np.take_along_axis(symbols_BN, items_BQ, axis=1)}

  @property
  def _head_shape(self) -> tuple[int, int]:
    return self.num_heads, self.dimension // self.num_heads

  def _classes_keys(self, rng: np.random.Generator, num_examples: int,
                    entanglements: Sequence[float]) -> np.ndarray:
    """Random keys, of one length in the first subspace; the same for each entanglement."""
    keys_BNHK = rng.standard_normal((num_examples, self.num_items, *self._head_shape))
    keys_BNHK[:, :, 0] = _of_length(keys_BNHK[:, :, 0], keys_BNHK.shape[-1])
    return np.repeat(keys_BNHK[:, None], len(entanglements), axis=1)

  def _codes(self, rng: np.random.Generator, num_examples: int,
             entanglements: Sequence[float]) -> np.ndarray:
    """Keys with one of two values in subspaces that are shared, and with their own in others."""
    own_BNHK = rng.standard_normal((num_examples, self.num_items, *self._head_shape))
    own_BNHK = _of_length(own_BNHK, own_BNHK.shape[-1])
    # Item s takes, in shared subspace i, the value that bit i of its number says. With fewer bits
    # than subspaces some subspaces say the same.
    num_bits = self.num_items.bit_length() - 1
    numbers_BN = rng.permuted(np.tile(np.arange(self.num_items), (num_examples, 1)), axis=1)
    bits_BNH = (numbers_BN[..., None] >> (np.arange(self.num_heads) % num_bits)) & 1
    shared_BNHK = np.where(bits_BNH[..., None], own_BNHK[:, 1:2], own_BNHK[:, :1])
    threshold_BH = rng.random((num_examples, self.num_heads))
    return np.stack([
        np.where((threshold_BH < entanglement)[:, None, :, None], shared_BNHK, own_BNHK)
        for entanglement in entanglements], axis=1)

  def posterior(self, features_BETD: np.ndarray, symbols_BN: np.ndarray,
                entanglements: Sequence[float]) -> np.ndarray:
    """p(answer = c | sequence), [B, E, Q, C] float64: what the optimum answers with."""
    keys_BEND = features_BETD[:, :, :self.num_items].astype(np.float64)
    queries_BEQD = features_BETD[:, :, self.num_items:]
    metrics_EDD = np.stack([self.metric(entanglement) for entanglement in entanglements])
    scores_BEQN = np.einsum("bEqc,Ecd,bEnd->bEqn", queries_BEQD, metrics_EDD, keys_BEND,
                            optimize=True) / self.noise**2
    weights_BEQN = np.exp(scores_BEQN - scores_BEQN.max(-1, keepdims=True))
    weights_BEQN /= weights_BEQN.sum(-1, keepdims=True)
    return weights_BEQN @ np.eye(self.num_classes)[symbols_BN][:, None]


class Lookups:
  """Training batches with a lane for every (entanglement, seed), in that order.

  Lanes of one seed see the same draws, whatever their entanglement. Process p of P takes rows
  [p B / P, (p + 1) B / P).
  """

  def __init__(self, lookup: Lookup, entanglements: Sequence[float], seeds: Sequence[int],
               batch_size: int, process_index: int = 0, process_count: int = 1):
    self._lookup, self._entanglements, self._seeds = lookup, entanglements, seeds
    self._batch_size = batch_size
    rows = batch_size // process_count
    self._rows = slice(process_index * rows, (process_index + 1) * rows)

  def batch_at(self, step: int) -> Batch:
    """This process's rows of batch `step`, a function of (seeds, step) alone.

    `features` float32 [b, L, N + Q, D], `symbols` int32 [b, L, N], `answers` int32 [b, L, Q] and
    `weights` float32 [b].
    """
    batches = [self._lookup.draw(_generator(seed, step), self._batch_size, self._entanglements)
               for seed in self._seeds]
    batch = {"features": np.stack([one["features"] for one in batches], axis=2)}
    batch["features"] = batch["features"].reshape(
        self._batch_size, -1, *batch["features"].shape[3:])
    for name in ("symbols", "answers"):
      lanes = np.stack([one[name] for one in batches], axis=1)
      batch[name] = np.tile(lanes, (1, len(self._entanglements), 1))
    batch["weights"] = np.ones(self._batch_size, np.float32)
    return {name: rows[self._rows] for name, rows in batch.items()}


class HeldOut:
  """A finite split, the same examples for every seed; `len()` is the number of sequences."""

  def __init__(self, lookup: Lookup, entanglements: Sequence[float], num_seeds: int,
               num_examples: int, split: str):
    """`split` is 'validation' or 'test'."""
    self._lookup, self._entanglements, self._num_seeds = lookup, entanglements, num_seeds
    self._num_examples, self._split = num_examples, split

  @functools.cached_property
  def examples(self) -> Batch:
    """As `Lookup.draw` gives them."""
    # No training step is that high.
    rng = _generator(("validation", "test").index(self._split), 2**63)
    return self._lookup.draw(rng, self._num_examples, self._entanglements)

  def __len__(self) -> int:
    return self._num_examples

  def batch(self, start: int, batch_size: int) -> Batch:
    """Examples `start ..`, padded with zero-weight rows up to `batch_size` rows."""
    rows = {name: array[start:start + batch_size] for name, array in self.examples.items()}
    rows["features"] = np.repeat(rows["features"], self._num_seeds, axis=1)
    for name in ("symbols", "answers"):
      num_lanes = rows["features"].shape[1]
      rows[name] = np.repeat(rows[name][:, None], num_lanes, axis=1)
    rows["weights"] = np.ones(len(rows["symbols"]), np.float32)
    missing = batch_size - len(rows["weights"])
    return {name: np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
            for name, array in rows.items()}

  def optimum(self) -> dict[str, np.ndarray]:
    """What the posterior scores on these examples, by entanglement: [E] each.

    `accuracy` of its likeliest symbol, `expected_accuracy` (the mean of that symbol's probability,
    free of the chance in the answers) and `nats_per_query`.
    """
    posterior_BEQC = self._lookup.posterior(self.examples["features"], self.examples["symbols"],
                                            self._entanglements)
    answers_BEQ1 = np.broadcast_to(self.examples["answers"][:, None, :, None],
                                   (*posterior_BEQC.shape[:3], 1))
    true_BEQ = np.take_along_axis(posterior_BEQC, answers_BEQ1, axis=-1)[..., 0]
    right_BEQ = posterior_BEQC.argmax(-1) == answers_BEQ1[..., 0]
    return {"accuracy": right_BEQ.mean((0, 2)),
            "expected_accuracy": posterior_BEQC.max(-1).mean((0, 2)),
            "nats_per_query": -np.log(np.maximum(true_BEQ, 1e-300)).mean((0, 2))}


def _generator(seed: int, step: int) -> np.random.Generator:
  return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


def _of_length(x: np.ndarray, squared_length: float) -> np.ndarray:
  """Vectors on the last axis, scaled to one length."""
  return x * np.sqrt(squared_length / np.sum(x**2, axis=-1, keepdims=True))
