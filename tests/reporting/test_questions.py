"""The study's answers: computed from rows, with intervals, and never claimed of a single seed."""

import json

import made_up_results
from made_up_results import row
import pytest

from damcha_jax.config.study import SETS, VARIANTS
from damcha_jax.evaluation.intervals import student_quantile
from experiments import claims
from experiments import claims_of_study
from experiments import paper_tables
from experiments import questions
from experiments.claims import Evidence
from experiments.document import Figure, Heading, Paragraph, Table, to_markdown
from experiments.paper_claims import CLAIMS
from experiments.questions import Comparison, Question
from experiments.results import read_results

PAPER = paper_tables.read_paper()
LOSSES = [row(name, "nats_per_token", loss, dataset="mix", seeds=[0, 1, 2])
          for name, loss in (("mha", 1.5), ("dcmha", 1.7), ("damcha", 1.6))]


def _less(variant, baseline, value, half=None, spread=None):
  seeds = [0] if half is None else [0, 1, 2]
  metric = f"nats_minus_{baseline}"
  return [row(variant, metric, value, seeds=seeds, spread=spread),
          row(variant, f"{metric}_ci95", half, seeds=[], spread=None)]


def _one(rows, variant="damcha", baseline="mha"):
  question = Question("key", "Is it?", (Comparison("it", "mix", variant, baseline),))
  found = questions.differences(question, rows)
  return found[0] if found else None


@pytest.mark.parametrize("value, half, verdict", [
    (-0.1, 0.05, "lower"), (0.1, 0.05, "higher"), (0.1, 0.2, "undecided"),
    (-0.1, 0.2, "undecided")])
def test_the_interval_decides(value, half, verdict):
  one = _one([*LOSSES, *_less("damcha", "mha", value, half, 0.01)])
  assert (one.value, one.half, one.seeds, one.verdict) == (value, half, 3, verdict)


def test_one_seed_decides_nothing_where_none_tells_the_spread():
  one = _one([*LOSSES, *_less("damcha", "mha", -0.5)])
  assert one.half is None and one.verdict == "no interval"


def test_one_seed_has_the_spread_of_the_pairs_of_several():
  """Three variants of three seeds: their differences' mean variance has 4 degrees of freedom."""
  pairs = [("mha", "dcmha", 0.01), ("mha", "damcha", 0.02), ("dcmha", "damcha", 0.03)]
  rows = [*LOSSES, row("damcha_static", "nats_per_token", 1.62, seeds=[0]),
          *_less("damcha_static", "damcha", 0.06)]
  for one, other, spread in pairs:
    rows += _less(one, other, 0.1, 0.05, spread) + _less(other, one, -0.1, 0.05, spread)
  found = _one(rows, "damcha_static", "damcha")
  expected = student_quantile(4, 0.95) * ((0.01**2 + 0.02**2 + 0.03**2) / 3)**0.5
  assert found.half == pytest.approx(expected) and found.verdict == "higher"


def test_pairs_count_once_and_need_not_be_all():
  """Two pairs with a variant in common have (S - 1) 2^2 / (1 + 1 + 2 / 4) degrees of freedom."""
  pairs = {("damcha_robust", "mha"): 0.01, ("damcha", "mha"): 0.02, ("mha", "damcha"): 0.02,
           ("tha", "mha"): 9.0}  # at a rate that was not tuned for it, which may fail
  rows = [*LOSSES, row("damcha_static", "nats_per_token", 1.62, seeds=[0]),
          *_less("damcha_static", "damcha", 0.06)]
  for (one, other), spread in pairs.items():
    rows += _less(one, other, 0.1, 0.05, spread)
  expected = student_quantile(3, 0.95) * ((0.01**2 + 0.02**2) / 2)**0.5
  assert _one(rows, "damcha_static", "damcha").half == pytest.approx(expected)


def test_the_differences_of_two_seeds_of_the_pair_are_enough():
  """Where no row pairs them, but both have the same seeds."""
  rows = [row("authors_mma", "nats_per_token", 1.5, seeds=[0]),
          row("authors_mma_future", "nats_per_token", 1.25, seeds=[0])]
  assert _one(rows, "authors_mma_future", "authors_mma").value == -0.25
  rows[0]["seeds"] = [0, 1]
  assert _one(rows, "authors_mma_future", "authors_mma") is None


@pytest.mark.parametrize("changed", [
    dict(split="validation"), dict(variant="sample_text"), dict(dataset="text"), dict(value=None)])
def test_rows_of_something_else_answer_nothing(changed):
  rows = [{**one, **changed} for one in LOSSES]
  assert _one(rows) is None


def test_blocks_left_out_need_all_kinds_of_inference(tmp_path):
  rows = [row("damcha", "nats_per_token", value, variant=f"depth9{suffix}", section="cifar10")
          for suffix, value in (("", 3.0), ("-off_diagonal", None), ("-diagonal", 3.0),
                                ("-shifted", 3.0))]
  made_up_results.write(tmp_path, "ablations", "table3:cpu", rows)
  assert not questions.of_ablation(Evidence(read_results(tmp_path), PAPER))


def test_every_comparison_is_of_the_study():
  names = {question.key for question in questions.QUESTIONS}
  assert len(names) == len(questions.QUESTIONS)
  for question in questions.QUESTIONS:
    assert len({one.name for one in question.comparisons}) == len(question.comparisons)
    for one in question.comparisons:
      assert {one.variant, one.baseline} <= set(VARIANTS)
      assert one.set in (*SETS, claims_of_study.SHIFT)
  asked = {one.variant for question in questions.QUESTIONS for one in question.comparisons}
  unasked = set(VARIANTS) - asked - {"mha", "dcmha"}
  assert not unasked, f"add {unasked} to a question in experiments/questions.py"


def test_studies_of_one_size_on_other_sets_answer_together(tmp_path):
  for sets, name in (("mix", "mix"), ("dictionary", "dictionary_mix")):
    rows = [{**one, "dataset": name} for one in (*LOSSES, *_less("damcha", "mha", 0.1, 0.05, 0.01))]
    folder = made_up_results.write(tmp_path / sets, "study", "study_cpu:paper", rows, sets=sets)
    questions.plot(folder / "figures", rows)
  blocks = questions.blocks(read_results(tmp_path), PAPER)
  start = next(index for index, block in enumerate(blocks)
               if isinstance(block, Heading) and "grow on the mixture" in block.text)
  _, sentence, table, *figures = blocks[start:start + 5]
  assert "on mix +0.1" in sentence.text and "on dictionary_mix +0.1" in sentence.text
  assert [line[0] for line in table.rows if "dcmha" not in line[0]] == [
      "`damcha` less `mha` on mix", "`damcha` less `mha` on dictionary_mix"]
  assert [command.rpartition("sets=")[2] for command in table.commands] == ["dictionary", "mix"]
  assert len({figure.path for figure in figures}) == 2


def test_an_answer_has_a_sentence_a_table_and_a_figure(tmp_path):
  rows = [*LOSSES, *_less("damcha", "mha", 0.1, 0.05, 0.01),
          *_less("damcha", "dcmha", -0.1, 0.2, 0.1),
          row("mha", "num_params", 100, split="train"),
          row("damcha", "num_params", 102, split="train")]
  folder = made_up_results.write(tmp_path, "study", "study_cpu:paper", rows)
  questions.plot(folder / "figures", rows)
  blocks = questions.blocks(read_results(tmp_path), PAPER)
  start = next(index for index, block in enumerate(blocks) if isinstance(block, Heading))
  _, sentence, table, figure = blocks[start:start + 4]
  assert sentence == Paragraph("Higher, so worse: `damcha` less `mha` on mix +0.1 ± 0.05. "
                               "Undecided: `damcha` less `dcmha` on mix -0.1 ± 0.2.")
  assert table.rows[0] == ("`damcha` less `mha` on mix", "`mha`", "1.6 ± 0.01", "1.5 ± 0.01",
                           "+0.1000", "± 0.05", "+6.7%", "3", "+2.0%", "higher")
  assert isinstance(table, Table) and table.commands[0].startswith("python -m experiments.study")
  assert isinstance(figure, Figure) and figure.path == folder / "figures/question-baselines.svg"
  page = to_markdown("Title", blocks, tmp_path)
  assert "](study_cpu-paper/figures/question-baselines.svg)" in page
  assert "None of it was run here." in page


def test_blocks_left_out_are_told_beside_the_control(tmp_path):
  rows = [row("damcha", "nats_per_token", 3 + index / 10, variant=f"depth9{suffix}", seeds=[0],
              spread=None, section="cifar10", dataset="sample_images")
          for index, suffix in enumerate(("", "-off_diagonal", "-diagonal", "-shifted"))]
  made_up_results.write(tmp_path, "ablations", "table3:cpu", rows)
  evidence = Evidence(read_results(tmp_path), PAPER)
  assert questions.of_ablation(evidence) == (
      "Blocks left out at inference, test loss: cifar10, depth9: 3 with all blocks, 3.1 with all "
      "but the diagonal ones, 3.2 with the diagonal ones alone, 3.3 with one other of each row "
      "alone.")


def test_the_baseline_is_of_the_seeds_that_are_paired(tmp_path):
  rows = [*LOSSES, row("damcha_static", "nats_per_token", 1.75, seeds=[0], spread=None),
          *_less("damcha_static", "damcha", 0.25)]
  made_up_results.write(tmp_path, "study", "study_cpu:paper", rows)
  (line,) = [line for block in questions.blocks(read_results(tmp_path), PAPER)
             if isinstance(block, Table) for line in block.rows if "without a generator" in line[0]]
  assert line[2:5] == ("1.75", "1.5", "+0.2500")  # the mean of all seeds is 1.6


def test_what_training_does_to_blocks_is_that_of_its_end(tmp_path):
  folder = made_up_results.write(tmp_path, "study", "study_cpu:paper", LOSSES)
  (folder / "analysis").mkdir()
  (folder / "analysis" / "summary.json").write_text(json.dumps({
      "experiment": "analysis", "config": "mix:cpu", "status": "ok", "rows": [
          row("damcha", metric, value * step, variant=f"step {step}") for step in (0, 20)
          for metric, value in (("block_drift", 0.1), ("block_spread", 0.01),
                                ("block_difference", 0.02))]}))
  text = questions.of_blocks(Evidence(read_results(tmp_path), PAPER))
  assert "by 2 (root mean square)" in text and "apart by 0.2, which began 0.4 apart" in text


def test_the_tuned_rates_are_told(tmp_path):
  losses = {"0.5": (1.75, None), "1": (1.5, "chosen"), "2": (None, "diverged")}
  made_up_results.write(tmp_path, "study", "study_cpu:paper", [
      row("mha", "tuning_nats_per_token", loss, split="validation", note=note,
          variant=f"learning rate x {factor}") for factor, (loss, note) in losses.items()])
  table = questions.blocks(read_results(tmp_path), PAPER)[-1]
  assert table.rows == (("mix", "`mha`", "0.5: 1.75, **1: 1.5**, 2: diverged"),)


def test_sets_that_were_not_tuned_are_named(tmp_path):
  on = lambda name, metric: row("mha", metric, 1.5, dataset=name)
  made_up_results.write(tmp_path, "study", "study_cpu:paper", [
      *(on(name, "nats_per_token") for name in ("mix", "text", "images", "pairs", "text to text8")),
      *(on(name, "tuning_nats_per_token") for name in ("mix", "concepts"))])
  first, *_ = questions.blocks(read_results(tmp_path), PAPER)
  assert first.text.endswith(" On images learning rates were not tuned, which may favour some "
                             "attentions.")


@pytest.mark.parametrize("key, value", [
    ("value", 0.0), ("value", None), ("spread", None), ("seeds", []), ("variant", None)])
def test_damaged_rows_leave_the_others_answers(key, value, tmp_path):
  rows = [*LOSSES, *_less("damcha", "mha", 0.1, 0.05, 0.01),
          row("damcha_static", "nats_per_token", 1.6, seeds=[0]),
          *_less("damcha_static", "damcha", 0.0),
          row("mha", "tuning_nats_per_token", 1.0, variant="learning rate x 1"),
          row("damcha_unshared", "num_params", 9, split="train"),
          *(row("damcha_unshared", metric, 1.0, split="train", spread=1e200)
            for metric in ("generalization_gap", "nats_per_token")),
          row("damcha", "generalization_gap", 1.0, split="train")]
  for index in range(len(rows)):
    changed = [{**one, key: value} if place == index else one for place, one in enumerate(rows)]
    made_up_results.write(tmp_path / str(index), "study", "study_cpu:paper", changed)
    results = read_results(tmp_path / str(index))
    claims.judge(CLAIMS, results, PAPER)
    text = to_markdown("Title", questions.blocks(results, PAPER), tmp_path)
    assert "`damcha`" in text or "`mha`" in text


def test_without_a_study_the_page_says_so():
  (block,) = questions.blocks([], PAPER)
  assert "not run here" in block.text and "experiments.study" in block.text


def test_a_smoke_study_is_no_evidence(tmp_path):
  made_up_results.write(tmp_path, "study", "study_cpu:smoke", LOSSES)
  assert "no evidence" in questions.blocks(read_results(tmp_path), PAPER)[0].text
