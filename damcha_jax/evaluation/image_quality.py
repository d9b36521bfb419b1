"""Quality of generated images by their pixels and by their likelihoods, each with its control.

Mean squared errors are in units of the whole range of a pixel, 0 .. 1. Without its control a value
says little: a sample compared with an unrelated image gives about twice the variance of the data,
some 0.126 for CIFAR-10 in colour, however good it is, and the likeliest images are the flattest ones.

Axes: N images, H height, W width, C channels. Images are uint8 [N, H, W] or [N, H, W, C].
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.report import require_finite

TOP = 50  # the paper's Top-50
RANKINGS = ("per_token", "summed")


def mse_completion(completed: np.ndarray, truth: np.ndarray, num_given_rows: int) -> np.ndarray:
  """Mean squared error over the rows that a model completed, the upper ones being given, [N].

  Raises:
    MetricError: no images, other shapes or dtypes, or the given rows differ.
  """
  completed, truth = _pixels("completed images", completed), _pixels("images", truth)
  if completed.shape != truth.shape:
    raise MetricError(f"completions of shape {completed.shape} do not fit images of {truth.shape}")
  if not 0 <= num_given_rows < truth.shape[1]:
    raise MetricError(f"{num_given_rows} given rows of {truth.shape[1]} leave nothing to complete")
  if (completed[:, :num_given_rows] != truth[:, :num_given_rows]).any():
    raise MetricError("the completions do not keep the rows that were given")
  squares = np.square(completed - truth)[:, num_given_rows:]
  return squares.mean(tuple(range(1, squares.ndim)))


def mse_unpaired(samples: np.ndarray, reference: np.ndarray) -> np.ndarray:
  """Mean squared error of sample i to reference image i, [N]: the paper's MSE.

  Nothing relates the two, so its control is `mse_unrelated` of the reference. Of the longer set,
  what goes beyond the other is left out.

  Raises:
    MetricError: no images, or other shapes or dtypes.
  """
  samples, reference = _pixels("samples", samples), _pixels("reference images", reference)
  if samples.shape[1:] != reference.shape[1:]:
    raise MetricError(f"samples of {samples.shape[1:]} do not fit images of {reference.shape[1:]}")
  num = min(len(samples), len(reference))
  return np.square(samples[:num] - reference[:num]).mean(tuple(range(1, samples.ndim)))


def mse_unrelated(images: np.ndarray) -> float:
  """Mean squared error between two different images of a set, over all pairs.

      2 N / (N - 1) * mean over pixels of the variance over images

  Of real images it is the control of `mse_unpaired`, of samples their diversity in pixels.

  Raises:
    MetricError: fewer than two images, or of another dtype.
  """
  images = _pixels("images", images)
  if len(images) < 2:
    raise MetricError("at least 2 images are needed for a pair, and there is 1")
  return float(2 * images.var(axis=0, ddof=1).mean())


def total_variation(images: np.ndarray) -> np.ndarray:
  """Mean absolute difference between neighbours along rows and columns, 0 .. 1, [N].

  Raises:
    MetricError: no images, of another dtype, or of a single pixel.
  """
  images = _pixels("images", images)
  if min(images.shape[1:3]) < 2:
    raise MetricError(f"images of {images.shape[1:3]} pixels have no neighbours along both axes")
  axes = tuple(range(1, images.ndim))
  return sum(np.abs(np.diff(images, axis=axis)).mean(axes) for axis in (1, 2)) / 2


def spearman(x_N: np.ndarray, y_N: np.ndarray) -> float:
  """Spearman's rank correlation, ties sharing their mean rank.

  Of the negative log-likelihoods and the total variation of images it says how far likelihood
  measures flatness.

  Raises:
    MetricError: fewer than two samples, other numbers of them, all alike, or not finite.
  """
  x_N, y_N = require_finite("the first variable", x_N), require_finite("the second variable", y_N)
  if x_N.ndim != 1 or x_N.shape != y_N.shape or len(x_N) < 2:
    raise MetricError(f"a correlation needs two samples or more, not {x_N.shape} and {y_N.shape}")
  ranks = [ranks_N - ranks_N.mean() for ranks_N in (_ranks(x_N), _ranks(y_N))]
  norms = [np.linalg.norm(ranks_N) for ranks_N in ranks]
  if not all(norms):
    raise MetricError("a correlation needs samples that differ, and all are alike")
  return float(ranks[0] @ ranks[1] / (norms[0] * norms[1]))


def top_by_likelihood(
    log_likelihoods_N: np.ndarray, num_tokens_N: Optional[np.ndarray], ranking: str, num: int = TOP
) -> np.ndarray:
  """Indices of the `num` samples that the model finds likeliest, best first.

  Args:
    log_likelihoods_N: of whole samples, in nats.
    num_tokens_N: of each sample; None where all have as many.
    ranking: `summed` ranks by the log-likelihood, which favours short samples; `per_token` by the
      mean over the tokens. For samples of equal length they are the same.
    num: how many.

  Raises:
    MetricError: fewer samples than that, or some are not finite.
    ValueError: an unknown ranking.
  """
  if ranking not in RANKINGS:
    raise ValueError(f"ranking '{ranking}' is none of {', '.join(RANKINGS)}")
  scores_N = require_finite("the log-likelihoods", log_likelihoods_N)
  if len(scores_N) < num:
    raise MetricError(f"the top {num} need as many samples, and there are {len(scores_N)}")
  if ranking == "per_token" and num_tokens_N is not None:
    num_tokens_N = np.asarray(num_tokens_N)
    if num_tokens_N.shape != scores_N.shape or (num_tokens_N < 1).any():
      raise MetricError("each sample needs its number of tokens, 1 or more")
    scores_N = scores_N / num_tokens_N
  return np.argsort(-scores_N, kind="stable")[:num]


def _pixels(name: str, images: np.ndarray) -> np.ndarray:
  """uint8 images as float64 in 0 .. 1."""
  images = np.asarray(images)
  if images.dtype != np.uint8 or images.ndim not in (3, 4):
    raise MetricError(f"{name} must be uint8 [N, H, W] or [N, H, W, C], not {images.dtype} of shape"
                      f" {list(images.shape)}")
  if not images.size:
    raise MetricError(f"there are no {name}")
  return images / 255


def _ranks(values_N: np.ndarray) -> np.ndarray:
  _, group_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[group_N]
