"""What the study says of claims: with intervals, at its own size, and never of the paper's."""

import made_up_results
from made_up_results import row, table5
import pytest

from experiments import claims
from experiments import claims_of_study as study
from experiments import claims_of_tables as tables
from experiments import paper_tables
from experiments.claims import (Absent, Claim, Evidence, NEEDS_HARDWARE, NOT_REPRODUCED, NOT_RUN,
                                REPRODUCED, UNDECIDED, Verdict)
from experiments.paper_claims import CLAIMS
from experiments.results import read_results

PAPER = paper_tables.read_paper()
SECTIONS = {name: {"dataset": "sample_" + name.partition("_")[0]} for name in study.SETS}


def less(variant, baseline, dataset, value, half=None):
  """A difference with its interval, of three seeds, or of one that has none."""
  seeds = [0] if half is None else [0, 1, 2]
  metric = f"nats_minus_{baseline}"
  return [row(variant, metric, value, dataset=dataset, seeds=seeds),
          row(variant, f"{metric}_ci95", half, dataset=dataset, seeds=[], spread=None)]


def _results(tmp_path, rows, config="study_cpu:paper"):
  made_up_results.write(tmp_path, "study", config, rows, **SECTIONS)
  return read_results(tmp_path)


def _evidence(tmp_path, rows):
  return Evidence(_results(tmp_path, rows), PAPER)


def _judge(results, judge, absent=NOT_RUN):
  return claims.judge([Claim("1", "text", judge, ("run",), absent)], results, PAPER)[0]


def test_each_set_has_its_difference_with_the_interval(tmp_path):
  rows = [*less("damcha", "mha", "mix", -0.2, 0.1), *less("damcha", "mha", "images", 0.3, 0.1),
          *less("damcha", "mha", "pairs", 0.05, 0.1), *less("damcha", "dcmha", "text", -0.1)]
  text = study.losses(("damcha",), study.BASELINES)(_evidence(tmp_path, rows))
  for part in ("`damcha` less `mha`: mix -0.2 ± 0.1 (lower)", "images 0.3 ± 0.1 (higher)",
               "pairs 0.05 ± 0.1 (undecided)", "`damcha` less `dcmha`: text -0.1 (one seed)"):
    assert part in text
  assert study.losses(("damcha_stack",), ("mha",))(_evidence(tmp_path / "none", rows)) == ""


def _mixture(gains, halves, names=study.TEXTS):
  return [one for name, gain, half in zip(names, gains, halves)
          for one in (row("mha", "nats_per_token", 2.0, dataset=name),
                      *less("damcha", "mha", name, -gain, half))]


@pytest.mark.parametrize("gains, halves, word", [
    ((0.1, 0.1, 0.4), (0.01, 0.01, 0.01), "(largest on mix)"),
    ((0.1, 0.4, 0.1), (0.01, 0.01, 0.01), "(not largest on mix)"),
    ((0.1, 0.1, 0.4), (0.01, 0.01, 0.9), "(undecided)"),
    ((0.1, 0.1, 0.4), (None, None, 0.01), "(undecided, since some are of a single seed)"),
])
def test_gains_on_the_mixture_are_held_against_those_on_its_parts(tmp_path, gains, halves, word):
  text = study.on_mixture()(_evidence(tmp_path, _mixture(gains, halves)))
  assert f"mix {50 * gains[2]:.2f}%" in text and word in text


def test_each_corpus_has_a_mixture_of_its_own(tmp_path):
  rows = _mixture((0.1, 0.1, 0.4), (0.01,) * 3) + _mixture((0.1, 0.4, 0.1), (0.01,) * 3,
                                                           study.DICTIONARY)
  evidence = _evidence(tmp_path, rows)
  assert "(largest on mix)" in study.on_mixture()(evidence)
  assert "(not largest on dictionary_mix)" in study.on_mixture(study.DICTIONARY)(evidence)


@pytest.mark.parametrize("shift, plain, status", [
    ((-0.3, 0.1), (-0.1, 0.05), REPRODUCED), ((-0.1, 0.05), (-0.3, 0.1), NOT_REPRODUCED),
    ((0.3, 0.1), (0.4, 0.1), NOT_REPRODUCED), ((-0.3, 0.3), (-0.1, 0.1), UNDECIDED),
    ((-0.3, None), (-0.1, None), UNDECIDED)])
def test_a_shift_of_distribution_is_judged_by_intervals(tmp_path, shift, plain, status):
  rows = [*less("damcha", "mha", study.SHIFT, *shift), *less("damcha", "mha", "text", *plain)]
  one = _judge(_results(tmp_path, rows), study.shifted)
  seeds = "1 seed" if shift[1] is None else "3 seeds"
  assert one.status == f"{status} (`study_cpu:paper`, sample data, {seeds})"


def _lead(attention, dataset, value):
  return {**table5(attention, value, False, dataset), "split": "test"}


@pytest.mark.parametrize("ours, status", [(0.9, REPRODUCED), (1.05, NOT_REPRODUCED)])
def test_files_that_the_claim_is_about_come_first(tmp_path, ours, status):
  for dataset, losses in (("enwik8", (1.1, 1.0)), ("shift.txt", (1.1, ours))):
    made_up_results.write(tmp_path / dataset, "gpt2_enwik8", "enwik8:paper", [
        _lead(name, dataset, loss) for name, loss in zip(("mha", "damcha"), losses)],
                          dataset=dataset)
  results = _results(tmp_path, less("damcha", "mha", study.SHIFT, 0.5, 0.1))
  assert _judge(results, study.shifted).verdict.status == status


def _gaps(unshared, shared, seeds, spread=0.01):
  return [row(name, "generalization_gap", gap, split="train", seeds=list(range(count)),
              spread=spread if count > 1 else None)
          for name, gap, count in zip(("damcha_unshared", "damcha"), (unshared, shared), seeds)]


@pytest.mark.parametrize("unshared, shared, seeds, status", [
    (0.5, 0.1, (3, 3), REPRODUCED), (0.1, 0.5, (3, 3), NOT_REPRODUCED),
    (0.102, 0.1, (3, 3), UNDECIDED), (0.5, 0.1, (1, 3), REPRODUCED),
    # Half an interval is 4.303 s sqrt(1 + 1 / 3) = 0.0497.
    (0.149, 0.1, (1, 3), UNDECIDED), (0.151, 0.1, (1, 3), REPRODUCED),
    (0.5, 0.1, (1, 1), UNDECIDED)])
def test_overfitting_is_judged_beyond_the_interval(tmp_path, unshared, shared, seeds, status):
  evidence = _evidence(tmp_path, _gaps(unshared, shared, seeds))
  assert study.less_overfitting(evidence).status == status


@pytest.mark.parametrize("unshared, status", [(9.0, REPRODUCED), (7.0, NOT_REPRODUCED)])
def test_counts_have_no_interval(tmp_path, unshared, status):
  rows = [row("damcha_unshared", "num_params", unshared, seeds=[0]),
          row("damcha", "num_params", 8.0)]
  assert study.fewer_parameters(_evidence(tmp_path, rows)).status == status


def test_blocks_between_heads_are_judged_by_training_without_them(tmp_path):
  rows = [*less("damcha_blocks", "damcha", "mix", 0.01), *less("damcha_diagonal", "damcha", "mix",
                                                              0.25)]
  text = study.blocks(_evidence(tmp_path, rows))
  assert "mix 0.25 (one seed)" in text and "less all blocks: 0.24." in text


def _decide(verdict):
  def decide(evidence):
    if verdict is None:
      raise Absent
    return verdict
  return study.with_study(decide, study.losses(("damcha",), ("mha",)))


def test_the_study_leaves_a_verdict_and_says_its_size_data_and_seeds(tmp_path):
  results = _results(tmp_path, less("damcha", "mha", "mix", -0.2, 0.1))
  one = _judge(results, _decide(Verdict(REPRODUCED, "As claimed.")))
  assert one.status == REPRODUCED
  assert one.verdict.evidence.startswith(
      "As claimed. At the study's size (`study_cpu:paper`, sample data, 3 seeds): Test loss")
  assert one.commands == ("python -m experiments.study --config=configs/study_cpu.py",)
  partly = study.with_study(lambda _: Verdict(REPRODUCED, "As claimed."), study.on_mixture())
  assert _judge(_results(tmp_path / "text", _mixture((0.1,) * 3, (None,) * 3)[1:]),
                partly).verdict.evidence == "As claimed."
  alone = _judge(results, _decide(None))
  assert alone.status == f"{UNDECIDED} (`study_cpu:paper`, sample data, 3 seeds)"
  assert _judge([], _decide(None)).status == NOT_RUN


ABOUT_THE_STUDY = [
    *(one for name in study.SETS for variant in study.PRESETS for baseline in study.BASELINES
      for one in less(variant, baseline, name, -0.123, 0.01)),
    *(one for variant in ("damcha_unshared", "damcha_static", "damcha_diagonal", "damcha_blocks",
                          "damcha_future") for one in less(variant, "damcha", "mix", 0.456)),
    *less("damcha_flops", "mha", "mix", 0.456),
    *(row(name, "nats_per_token", 2.0, dataset=text) for name in study.BASELINES
      for text in study.TEXTS),
    *less("damcha", "mha", study.SHIFT, -0.3, 0.01),
    *_gaps(0.5, 0.1, (1, 3))]


def test_no_study_decides_what_is_about_the_papers_own_sizes(tmp_path):
  before = claims.judge(CLAIMS, [], PAPER)
  after = claims.judge(CLAIMS, _results(tmp_path, ABOUT_THE_STUDY), PAPER)
  told = [one for one in after if "study_cpu:paper" in one.verdict.evidence + one.status]
  assert len(told) >= 12
  for one, other in zip(before, after):
    assert one.status == other.status or "(`study_cpu:paper`, sample data," in other.status
  by_text = {one.claim.text: one for one in after}
  for words in ("outperforms every", "stronger on mixed", "where the distribution shifts",
                "overfits severely", "makes training stable", "full cross-head matrix",
                "lower loss and perplexity", "due to a larger model", "sharing both help"):
    (claim,) = [text for text in by_text if words in text]
    assert "study_cpu" in by_text[claim].verdict.evidence + by_text[claim].status, claim


def test_a_study_of_a_few_steps_is_no_evidence(tmp_path):
  results = _results(tmp_path, ABOUT_THE_STUDY, "study_cpu:smoke")
  before, after = (claims.judge(CLAIMS, one, PAPER) for one in ([], results))
  assert [one.verdict for one in before] == [one.verdict for one in after]


def test_tables_alone_leave_the_mixture_to_the_papers_hardware():
  assert tables.largest_on_mix(Evidence([], PAPER)).status == NEEDS_HARDWARE
