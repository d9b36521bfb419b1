"""All metrics of generated images, each beside its control on real ones (paper Tables 1, 3 and 4).

    features_fn, reason = optional(lambda: InceptionFeatures(load_inception(path), "tf"))
    evaluator = ImageEvaluator(test, train, features_fn=features_fn, no_features=reason)
    controls = evaluator.controls()
    report = evaluator.evaluate(GeneratedImages(samples, log_likelihoods_N))
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Optional

import numpy as np

from damcha_jax.evaluation import frechet
from damcha_jax.evaluation import image_quality
from damcha_jax.evaluation.image_quality import TOP
from damcha_jax.evaluation.inception import InceptionFeatures
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.report import Report

_ERROR_UNIT = "squared error of the range"
_DISTANCE_UNIT = "squared distance"


@dataclasses.dataclass(frozen=True)
class GeneratedImages:
  """What a model generated.

  Attributes:
    images: uint8 [N, H, W] or [N, H, W, 3].
    log_likelihoods_N: of the whole images, in nats. All have as many tokens, so these rank as the
      mean over the tokens does.
    completed: completions of the upper rows of real images.
    truth: those images.
    num_given_rows: how many rows were given.
  """

  images: np.ndarray
  log_likelihoods_N: np.ndarray
  completed: Optional[np.ndarray] = None
  truth: Optional[np.ndarray] = None
  num_given_rows: int = 0


class ImageEvaluator:
  """Compares generated images with a test set, whose features are computed once."""

  def __init__(
      self,
      reference: np.ndarray,
      real: np.ndarray,
      *,
      features_fn: Optional[InceptionFeatures],
      no_features: str,
      cache: Optional[str | Path] = None,
  ):
    """Creates an evaluator.

    Args:
      reference: the test set, uint8.
      real: other real images in random order, such as some of the training set, for the controls.
      features_fn: images -> features; None where there are no weights.
      no_features: why there are none, for the notes.
      cache: a file that keeps the features of `reference`.
    """
    self._reference = reference
    self._real = real
    self._features_fn = features_fn
    self._no_features = no_features
    self._cache = cache

  def controls(self) -> Report:
    """What real images give in place of generated ones.

    `mse_unrelated` stands beside `mse_unpaired_mean`, `fid_real` beside `fid` at the same number of
    samples only, `fid_real_group_*` beside `fid_group_*` and `fid_top50`, `kid_real` beside `kid`,
    `kid_real_group_*` beside `kid_top50`, `diversity_real` beside `diversity`.
    """
    report, features = Report(), functools.cache(lambda: self._features(self._real))
    report.number("mse_unrelated", _ERROR_UNIT,
                  lambda: image_quality.mse_unrelated(self._reference))
    report.number("fid_real", _DISTANCE_UNIT, lambda: self._fid(features()),
                  self._count(self._real))
    report.distribution("fid_real_group", _DISTANCE_UNIT, lambda: self._grouped(features()))
    report.number("kid_real", "squared discrepancy", lambda: self._kid(features()))
    report.distribution("kid_real_group", "squared discrepancy", lambda: np.array(
        [self._kid(group) for group in frechet.groups(features())]))
    report.number("diversity_real", "distance", lambda: frechet.diversity(features()))
    return report

  def evaluate(self, generated: GeneratedImages) -> Report:
    """Every metric of generated images; those that cannot be computed say why."""
    report, features = Report(), functools.cache(lambda: self._features(generated.images))
    top = lambda: features()[self._top(generated)]
    self._pixels(report, generated)
    report.number("fid", _DISTANCE_UNIT, lambda: self._fid(features()),
                  self._count(generated.images))
    report.distribution("fid_group", _DISTANCE_UNIT, lambda: self._grouped(features()))
    report.number("fid_top50", _DISTANCE_UNIT, lambda: self._fid(top()),
                  self._count(generated.images[:TOP]))
    report.number("kid", "squared discrepancy", lambda: self._kid(features()))
    report.number("kid_top50", "squared discrepancy", lambda: self._kid(top()))
    report.distribution("feature_distance", _DISTANCE_UNIT, lambda: self._pairs(features()))
    report.number("diversity", "distance", lambda: frechet.diversity(features()))
    return report

  def _pixels(self, report: Report, generated: GeneratedImages) -> None:
    report.distribution(
        "mse_unpaired", _ERROR_UNIT,
        lambda: image_quality.mse_unpaired(generated.images, self._reference),
    )
    report.distribution("mse_completion", _ERROR_UNIT, lambda: _completion(generated))
    report.number("mse_samples", _ERROR_UNIT,
                  lambda: image_quality.mse_unrelated(generated.images),
                  "between two samples; a sampler that is as diverse as the data has mse_unrelated")
    report.number("nll_variation_correlation", "Spearman's rho", lambda: image_quality.spearman(
        -np.asarray(generated.log_likelihoods_N), image_quality.total_variation(generated.images)))

  def _top(self, generated: GeneratedImages) -> np.ndarray:
    if len(generated.log_likelihoods_N) != len(generated.images):
      raise MetricError(f"{len(generated.images)} images and {len(generated.log_likelihoods_N)}"
                        " log-likelihoods do not belong together")
    return image_quality.top_by_likelihood(generated.log_likelihoods_N, None, "summed")

  def _features(self, images: np.ndarray) -> np.ndarray:
    if self._features_fn is None:
      raise MetricError(self._no_features)
    return self._features_fn(images)

  @functools.cached_property
  def _reference_features(self) -> frechet.Reference:
    if self._features_fn is None:
      raise MetricError(self._no_features)
    key = {
        "weights": self._features_fn.weights_sha256,
        "mode": self._features_fn.mode,
        "images": hashlib.sha256(np.ascontiguousarray(self._reference).tobytes()).hexdigest(),
    }
    return frechet.cached_reference(self._cache, key, lambda: self._features(self._reference))

  @functools.cached_property
  def _reference_similarity(self) -> float:
    return frechet.kernel_self_similarity(self._reference_features.features_MF)

  def _fid(self, features_NF: np.ndarray) -> float:
    statistics = frechet.statistics(features_NF)
    return frechet.frechet_distance(statistics, self._reference_features.statistics)

  def _grouped(self, features_NF: np.ndarray) -> np.ndarray:
    return frechet.grouped_frechet_distances(features_NF, self._reference_features.statistics)

  def _kid(self, features_NF: np.ndarray) -> float:
    reference_MF = self._reference_features.features_MF
    return frechet.kernel_distance(features_NF, reference_MF, self._reference_similarity)

  def _pairs(self, features_NF: np.ndarray) -> np.ndarray:
    reference_MF = self._reference_features.features_MF
    num = min(len(features_NF), len(reference_MF))
    return frechet.feature_distance(features_NF[:num], reference_MF[:num])

  def _count(self, images: np.ndarray) -> str:
    mode = self._features_fn.mode if self._features_fn else "none"
    return f"{len(images)} samples against {len(self._reference)}, Inception mode {mode}"


def _completion(generated: GeneratedImages) -> np.ndarray:
  if generated.completed is None or generated.truth is None:
    raise MetricError("no images were completed")
  return image_quality.mse_completion(
      generated.completed, generated.truth, generated.num_given_rows)
