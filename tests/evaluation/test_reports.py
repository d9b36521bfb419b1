"""Reports name every metric, and one that cannot be computed stops no other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from damcha_jax.errors import UserError
from damcha_jax.evaluation import frechet
from damcha_jax.evaluation import image_quality
from damcha_jax.evaluation import text_quality
from damcha_jax.evaluation.bart import Scores
from damcha_jax.evaluation.image_report import GeneratedImages
from damcha_jax.evaluation.image_report import ImageEvaluator
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.report import optional
from damcha_jax.evaluation.report import Report


def test_a_report_keeps_values_and_reasons() -> None:
  report = Report()
  report.number("good", "nats", lambda: 2, "a note")
  report.number("bad", "nats", lambda: float("nan"))

  def missing() -> float:
    raise UserError("no weights")

  assert optional(missing) == (None, "no weights") and optional(lambda: 3) == (3, "")
  report.number("missing", "nats", missing, lambda: pytest.fail("there is no value to describe"))
  report.distribution("spread", "nats", lambda: np.arange(5), lambda: "of five")
  report.distribution("none", "nats", lambda: np.zeros(0))
  report.distribution("nan", "nats", lambda: np.array([0, np.inf]))
  actual = {name: (metric.value, metric.note) for name, metric in report.metrics.items()}
  assert actual["good"] == (2, "a note")
  assert actual["bad"] == (None, "the value is nan")
  assert actual["missing"] == (None, "no weights")
  assert [actual[f"spread_{name}"] for name in ("mean", "q25", "q75")] == [
      (2, "of five"), (1, "of five"), (3, "of five")]
  assert actual["none_q25"] == (None, "there are no samples")
  assert actual["nan_mean"][0] is None and "1 of 2 samples" in actual["nan_mean"][1]
  assert list(report.samples) == ["spread"]
  with pytest.raises(ZeroDivisionError):
    report.number("bug", "nats", lambda: 1 / 0)


class _MeanFeatures:
  """Stands in for Inception: means of the image's rows."""

  mode, weights_sha256 = "tf", "hash"

  def __init__(self):
    self.num_images = 0

  def __call__(self, images: np.ndarray) -> np.ndarray:
    self.num_images += len(images)
    return images.mean(2, dtype=np.float64) / 255


def _images(num: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 256, (num, 4, 4), np.uint8)


def _generated(num: int = 120) -> GeneratedImages:
  images = _images(num, 2)
  likelihoods_N = -image_quality.total_variation(images)  # flat images are likely
  truth = _images(5, 3)
  completed = np.where(np.arange(4)[:, None] < 2, truth, 0).astype(np.uint8)
  return GeneratedImages(images, likelihoods_N, completed, truth, 2)


def test_image_metrics_and_their_controls() -> None:
  reference, real, features_fn = _images(150, 0), _images(120, 1), _MeanFeatures()
  evaluator = ImageEvaluator(reference, real, features_fn=features_fn, no_features="")
  generated = _generated()
  report, controls = evaluator.evaluate(generated), evaluator.controls()
  for metric in {**report.metrics, **controls.metrics}.values():
    assert metric.value is not None, metric
  assert features_fn.num_images == 150 + 120 + 120  # each set once
  value = lambda name: report.metrics[name].value
  features = lambda images: images.mean(2) / 255
  statistics = frechet.statistics(features(reference))
  fid = lambda images: frechet.frechet_distance(frechet.statistics(features(images)), statistics)
  top_N = np.argsort(-generated.log_likelihoods_N)[:50]
  assert value("fid") == pytest.approx(fid(generated.images))
  assert value("fid_top50") == pytest.approx(fid(generated.images[top_N]))
  assert controls.metrics["fid_real"].value == pytest.approx(fid(real))
  assert report.metrics["fid_top50"].note == "50 samples against 150, Inception mode tf"
  assert value("nll_variation_correlation") == pytest.approx(1)
  assert report.samples["mse_unpaired"].shape == (120,)
  assert report.samples["mse_completion"].shape == (5,)
  assert report.samples["fid_group"].shape == (2,)
  # Samples and real images come from one distribution here.
  expected = controls.metrics["mse_unrelated"].value
  assert value("mse_unpaired_mean") == pytest.approx(expected, rel=0.1)
  assert value("mse_samples") == pytest.approx(expected, rel=0.1)
  assert value("diversity") == pytest.approx(controls.metrics["diversity_real"].value, rel=0.1)


def test_without_weights_pixel_metrics_remain() -> None:
  evaluator = ImageEvaluator(_images(60, 0), _images(60, 1), features_fn=None, no_features="absent")
  for report in (evaluator.evaluate(_generated(60)), evaluator.controls()):
    for name, metric in report.metrics.items():
      if name.startswith(("fid", "kid", "feature", "diversity")):
        assert (metric.value, metric.note) == (None, "absent")
      else:
        assert metric.value is not None, metric


def test_few_samples_and_nan_likelihoods_cost_only_what_needs_them() -> None:
  evaluator = ImageEvaluator(_images(60, 0), _images(60, 1), features_fn=_MeanFeatures(),
                             no_features="")
  generated = dataclasses.replace(_generated(49), completed=None)
  metrics = evaluator.evaluate(generated).metrics
  assert {name for name, metric in metrics.items() if metric.value is None} == {
      "fid_top50", "kid_top50", *(f"{name}_{statistic}" for name in ("fid_group", "mse_completion")
                                  for statistic in ("mean", "q25", "q75"))}
  assert "there are 49" in metrics["fid_top50"].note
  likelihoods_N = _generated(60).log_likelihoods_N.copy()
  likelihoods_N[7] = np.nan
  generated = dataclasses.replace(_generated(60), log_likelihoods_N=likelihoods_N)
  metrics = evaluator.evaluate(generated).metrics
  assert "first in sample 7" in metrics["fid_top50"].note
  assert metrics["fid"].value is not None


def test_an_empty_split_is_named() -> None:
  evaluator = ImageEvaluator(_images(0, 0), _images(60, 1), features_fn=_MeanFeatures(),
                             no_features="")
  metrics = evaluator.evaluate(_generated(60)).metrics
  assert metrics["mse_unpaired_mean"].note == "there are no reference images"
  assert "there are 0" in metrics["fid"].note and "there are 0" in metrics["kid"].note
  assert metrics["diversity"].value is not None


class _LengthScorer:
  """Stands in for BART: minus the lengths of source and target, once and twice, in tenths."""

  def score(self, sources: list[str], targets: list[str]) -> Scores:
    assert len(sources) == len(targets)
    values = [-(len(source) + 2 * len(target)) / 10 for source, target in zip(sources, targets)]
    return Scores(np.array(values), ("1 of 2 sources were cut to 9 tokens",))


def _texts(num: int = 2) -> text_quality.GeneratedTexts:
  return text_quality.GeneratedTexts(
      hypotheses=["the cat sat on the mat", "a dog runs"] * (num // 2),
      references=[["the cat sat on a mat", "a cat sat"], ["a dog runs"]] * (num // 2),
      sources=["cat mat sit", "dog run"] * (num // 2),
      log_likelihoods_N=np.array([-8.0, -6.0] * (num // 2)),
      num_tokens_N=np.array([8, 3] * (num // 2)),
      nll_N=np.array([4.0, 9.0] * (num // 2)),
      nll_tokens_N=np.array([8, 3] * (num // 2)),
  )


def _report(texts: text_quality.GeneratedTexts, **options) -> Report:
  options = {"scorer": _LengthScorer(), "no_scorer": "", "direction": "reference_to_hypothesis",
             "ranking": "per_token", **options}
  return text_quality.text_report(texts, **options)


def test_text_metrics() -> None:
  report = _report(_texts(100))
  for metric in report.metrics.values():
    assert metric.value is not None, metric
  assert report.metrics["nll_mean"].value == pytest.approx((0.5 + 3) / 2)
  assert report.metrics["nll_summed_q75"].value == 9
  first = -np.mean([20 + 2 * 22, 9 + 2 * 22]) / 10  # over both references
  np.testing.assert_allclose(report.samples["bartscore"][:2], [first, -3.0])
  assert report.metrics["bartscore_top50"].value == pytest.approx(first)
  summed = _report(_texts(100), ranking="summed").metrics["bartscore_top50"]
  assert summed.value == pytest.approx(-3.0)
  assert summed.note == ("reference_to_hypothesis; ranking summed;"
                         " 1 of 2 sources were cut to 9 tokens")
  assert report.metrics["bleu"].note.startswith("nrefs:var|")


@pytest.mark.parametrize("direction, expected", [
    ("source_to_hypothesis", -(7 + 2 * 10) / 10),
    ("hypothesis_to_reference", -3.0),
    ("f_score", -3.0),
])
def test_directions(direction: str, expected: float) -> None:
  scores = text_quality.bart_scores(_LengthScorer(), direction, _texts())
  assert scores.values_N[1] == pytest.approx(expected)
  assert len(scores.notes) == 1
  with pytest.raises(ValueError, match="direction 'back' is none of"):
    _report(_texts(), direction="back")


def test_overlap_is_that_of_sacrebleu() -> None:
  # Worked out by hand: 8 of 9 words match a reference, 5 of 7 pairs, 3 of 5 triples, 1 of 3
  # quadruples; the closest references have as many words.
  bleu, signature = text_quality.corpus_overlap("bleu", _texts())
  assert bleu == pytest.approx(100 * (8 / 9 * 5 / 7 * 3 / 5 * 1 / 3) ** 0.25)
  assert "tok:13a" in signature
  same = dataclasses.replace(_texts(), hypotheses=["a cat sat", "a dog runs"])
  assert text_quality.corpus_overlap("chrf", same)[0] == pytest.approx(100)


def test_other_languages_and_missing_weights_have_no_bartscore() -> None:
  german = dataclasses.replace(_texts(), language="de")
  metrics = _report(german).metrics
  assert metrics["bartscore_mean"].value is None
  assert "hypotheses are 'de'" in metrics["bartscore_mean"].note
  assert metrics["bleu"].value is not None
  from_german = dataclasses.replace(_texts(), source_language="de")
  assert _report(from_german).metrics["bartscore_mean"].value is not None
  with pytest.raises(MetricError, match="sources are 'de'"):
    text_quality.bart_scores(_LengthScorer(), "source_to_hypothesis", from_german)
  metrics = _report(_texts(), scorer=None, no_scorer="absent").metrics
  assert metrics["bartscore_top50"].note == metrics["bartscore_q25"].note == "absent"


def test_texts_without_partners_are_named() -> None:
  none = dataclasses.replace(_texts(), hypotheses=[], references=[])
  assert "0 hypotheses and 0" in _report(none).metrics["chrf"].note
  lonely = dataclasses.replace(_texts(), references=[["a"], []])
  assert "example 1 has no reference" in _report(lonely).metrics["bartscore_mean"].note
