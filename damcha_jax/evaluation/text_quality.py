"""Quality of generated texts: likelihood, overlap with references and BARTScore (paper Table 1).

BARTScore is a likelihood under an English model, so which text is predicted from which must be
named, and German texts have no score.

    scorer, reason = optional(lambda: BartScorer(directory))
    report = text_report(generated, scorer=scorer, no_scorer=reason,
                         direction="reference_to_hypothesis", ranking="per_token")

Axes: N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Optional

import numpy as np

from damcha_jax.evaluation.bart import BartScorer
from damcha_jax.evaluation.bart import Scores
from damcha_jax.evaluation.image_quality import top_by_likelihood
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.report import Report

# What BARTScore predicts from what; `f_score` is the mean of the last two.
DIRECTIONS = (
    "source_to_hypothesis", "reference_to_hypothesis", "hypothesis_to_reference", "f_score"
)
_LANGUAGE = "en"  # BART's


@dataclasses.dataclass(frozen=True)
class GeneratedTexts:
  """What a model generated for the examples of a split, and how likely it finds the truth.

  Attributes:
    hypotheses: one text per example.
    references: one or more true texts per example.
    sources: what they were generated from.
    log_likelihoods_N: of the hypotheses, in nats.
    num_tokens_N: of the hypotheses.
    nll_N: negative log-likelihoods of the references, in nats.
    nll_tokens_N: of the references.
    source_language: of the sources.
    language: of hypotheses and references.
  """

  hypotheses: Sequence[str]
  references: Sequence[Sequence[str]]
  sources: Sequence[str]
  log_likelihoods_N: np.ndarray
  num_tokens_N: np.ndarray
  nll_N: np.ndarray
  nll_tokens_N: np.ndarray
  source_language: str = "en"
  language: str = "en"


def text_report(
    generated: GeneratedTexts,
    *,
    scorer: Optional[BartScorer],
    direction: str,
    ranking: str,
    no_scorer: str,
) -> Report:
  """Every metric of generated texts; those that cannot be computed say why.

  Args:
    generated: the texts.
    scorer: for BARTScore; None where there are no weights.
    direction: one of `DIRECTIONS`.
    ranking: `per_token` or `summed`, how the likelihood of hypotheses ranks them.
    no_scorer: why there is no scorer, for the notes.

  Raises:
    ValueError: an unknown direction or ranking.
  """
  if direction not in DIRECTIONS:
    raise ValueError(f"direction '{direction}' is none of {', '.join(DIRECTIONS)}")
  report = Report()
  report.distribution("nll", "nats per token", lambda: np.asarray(generated.nll_N)
                      / np.asarray(generated.nll_tokens_N))
  report.distribution("nll_summed", "nats", lambda: generated.nll_N)
  for name in ("bleu", "chrf"):
    overlap = functools.cache(functools.partial(corpus_overlap, name, generated))
    report.number(name, "0 .. 100", lambda: overlap()[0], note=lambda: overlap()[1])

  @functools.cache
  def scores() -> Scores:
    if scorer is None:
      raise MetricError(no_scorer)
    return bart_scores(scorer, direction, generated)

  top = lambda: top_by_likelihood(generated.log_likelihoods_N, generated.num_tokens_N, ranking)
  report.distribution("bartscore", "nats per token", lambda: scores().values_N,
                      lambda: "; ".join((direction, *scores().notes)))
  report.number("bartscore_top50", "nats per token", lambda: scores().values_N[top()].mean(),
                lambda: "; ".join((direction, f"ranking {ranking}", *scores().notes)))
  return report


def bart_scores(scorer: BartScorer, direction: str, generated: GeneratedTexts) -> Scores:
  """BARTScore of each hypothesis; the mean over its references where these take part, [N].

  Raises:
    MetricError: no texts, other numbers of them, or a language that the model does not read.
  """
  hypotheses, references = list(generated.hypotheses), _references(generated)
  languages = {"hypotheses": generated.language}
  if direction == "source_to_hypothesis":
    languages["sources"] = generated.source_language
  for kind, language in languages.items():
    if language != _LANGUAGE:
      raise MetricError(f"BARTScore's model reads '{_LANGUAGE}', and the {kind} are '{language}'")
  if direction == "source_to_hypothesis":
    return scorer.score(list(generated.sources), hypotheses)
  index_R = np.repeat(np.arange(len(hypotheses)), [len(texts) for texts in references])
  repeated = [hypotheses[index] for index in index_R]
  flat = [text for texts in references for text in texts]
  pairs = {"reference_to_hypothesis": (flat, repeated), "hypothesis_to_reference": (repeated, flat)}
  chosen = list(pairs.values()) if direction == "f_score" else [pairs[direction]]
  results = [scorer.score(*pair) for pair in chosen]
  values_R = np.mean([result.values_N for result in results], axis=0)
  values_N = np.bincount(index_R, values_R) / np.bincount(index_R)
  return Scores(values_N, tuple(dict.fromkeys(note for one in results for note in one.notes)))


def corpus_overlap(name: str, generated: GeneratedTexts) -> tuple[float, str]:
  """Corpus BLEU or chrF, 0 .. 100, and sacreBLEU's signature of how it was computed.

  Args:
    name: `bleu` or `chrf`.
    generated: the texts.

  Raises:
    MetricError: no texts, other numbers of them, or sacrebleu is not installed.
  """
  try:
    from sacrebleu.metrics import BLEU, CHRF
  except ImportError as error:
    raise MetricError(f"{name} needs the sacrebleu package; run"
                      " pip install 'damcha-jax[generation]'") from error
  references, metric = _references(generated), {"bleu": BLEU, "chrf": CHRF}[name]()
  # sacreBLEU takes the first references of all examples, then the second ones, ..
  streams = [[texts[index] if index < len(texts) else None for texts in references]
             for index in range(max(map(len, references)))]
  score = metric.corpus_score(list(generated.hypotheses), streams).score
  return score, str(metric.get_signature())


def _references(generated: GeneratedTexts) -> list[list[str]]:
  hypotheses, references = generated.hypotheses, [list(texts) for texts in generated.references]
  if not len(hypotheses) or len(hypotheses) != len(references):
    raise MetricError(f"{len(hypotheses)} hypotheses and {len(references)} sets of references do"
                      " not make pairs")
  for index, texts in enumerate(references):
    if not texts:
      raise MetricError(f"example {index} has no reference")
  return references
