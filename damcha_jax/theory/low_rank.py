"""What a head of width K cannot express: Appendix C.1, Step 2.

Multi-head attention's metric A B^T has rank at most K. By Eckart and Young the nearest to M is
its truncated singular value decomposition, at the distance

    min_{A, B [D, K]} ||M - A B^T||_F = sqrt(sum_{j > K} sigma_j(M)^2)

which is positive if and only if rank(M) > K. Two metrics with the same scores on all inputs of two
tokens or more are the same matrix; on inputs that span only a subspace, their restrictions are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

Array = jax.Array


def truncation_error(metric: np.ndarray, rank: int) -> np.ndarray:
  """sqrt(sum_{j > rank} sigma_j^2) of metrics [.., D, D]: no metric of that rank is nearer."""
  sizes = np.linalg.svd(metric, compute_uv=False)
  return np.sqrt(np.sum(sizes[..., rank:] ** 2, -1))


def truncate(metric: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
  """The A, B [.., D, rank] with A B^T nearest to metrics [.., D, D]."""
  left, sizes, right = np.linalg.svd(metric)
  root = np.sqrt(sizes[..., None, :rank])
  return left[..., :rank] * root, np.swapaxes(right, -1, -2)[..., :rank] * root


def trained_errors(
    metric: np.ndarray, rank: int, num_starts: int, num_steps: int, learning_rate: float, seed: int
) -> np.ndarray:
  """Distances ||M - A B^T||_F [num_starts] that Adam reaches from random A, B [D, rank].

  Args:
    metric: M [D, D].
    learning_rate: at the first update; it falls to zero along a cosine.
  """
  features = metric.shape[0]
  factors = jax.random.normal(jax.random.key(seed), (num_starts, 2, features, rank)) / rank**0.5
  scale = np.linalg.norm(metric) / features  # trains entries of about 1, whatever M's are
  metric_DD = jnp.asarray(metric / scale, factors.dtype)
  factors = np.asarray(_train(metric_DD, factors, num_steps, learning_rate), np.float64)
  left, right = factors[:, 0], np.swapaxes(factors[:, 1], 1, 2)
  return np.linalg.norm(metric - scale * left @ right, axis=(1, 2))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _train(metric_DD: Array, factors: Array, num_steps: int, learning_rate: float) -> Array:
  optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))

  def loss(factors: Array) -> Array:
    found = jnp.einsum("ndk,nek->nde", factors[:, 0], factors[:, 1])
    return jnp.sum((metric_DD - found) ** 2)

  def step(carry: tuple, _: None) -> tuple[tuple, None]:
    factors, state = carry
    updates, state = optimizer.update(jax.grad(loss)(factors), state)
    return (factors + updates, state), None

  (factors, _), _ = jax.lax.scan(step, (factors, optimizer.init(factors)), None, num_steps)
  return factors
