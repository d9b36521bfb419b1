"""Verdicts on the paper's claims: they follow the rows, and the paper's tables where these decide."""

import copy

import made_up_results
from made_up_results import row, table5
import pytest

from experiments import claims
from experiments import claims_of_costs as costs
from experiments import claims_of_runs as runs
from experiments import claims_of_tables as tables
from experiments import paper_tables
from experiments.claims import (Absent, Claim, Evidence, INCONSISTENT, NEEDS_HARDWARE,
                                NOT_REPRODUCED, NOT_RUN, REPRODUCED)
from experiments.paper_claims import CLAIMS
from experiments.results import ResultsError, read_results

PAPER = paper_tables.read_paper()


def _evidence(tmp_path, experiment, config, rows, paper=PAPER):
  made_up_results.write(tmp_path, experiment, config, rows)
  return Evidence(read_results(tmp_path), paper)


def _changed(path, value):
  """The paper with another figure."""
  paper = copy.deepcopy(PAPER)
  tree = paper
  for key in path[:-1]:
    tree = tree[key]
  assert path[-1] in tree
  tree[path[-1]] = value
  return paper


LOSSES = [pair for pair in tables.table5(("Mix",), ("MHA",)) if "cross_entropy" in pair[0]]


@pytest.mark.parametrize("ours, status", [(1.05, REPRODUCED), (1.2, NOT_REPRODUCED)])
def test_runs_of_the_papers_size_decide(tmp_path, ours, status):
  evidence = _evidence(tmp_path, "gpt2_enwik8", "mix:paper",
                       [table5("mha", 1.1), table5("damcha", ours)])
  verdict = tables.better(LOSSES)(evidence)
  assert verdict.status == status and str(ours) in verdict.evidence
  assert "python -m experiments.gpt2_enwik8 --config=configs/mix.py" in evidence.commands


def test_smaller_runs_do_not_decide(tmp_path):
  rows = [table5("mha", 1.1, False), table5("damcha", 1.25, False)]
  verdict = tables.better(LOSSES)(_evidence(tmp_path, "gpt2_enwik8", "mix:cpu", rows))
  assert verdict.status == NEEDS_HARDWARE and "1.25" in verdict.evidence
  assert "cannot decide" in verdict.evidence


def test_a_pair_that_is_missing_leaves_a_claim_open(tmp_path):
  rows = [table5("mha", 1.1), table5("damcha", 1.0)]
  evidence = _evidence(tmp_path, "gpt2_enwik8", "mix:paper", rows)
  assert tables.better(tables.table5(("Mix",)))(evidence).status == NEEDS_HARDWARE


def test_the_papers_own_table_may_contradict_a_claim():
  paper = _changed(("table5", "Mix", "cross_entropy", "DAMCHA"), 1.5)
  verdict = tables.better(LOSSES)(Evidence([], paper))
  assert verdict.status == INCONSISTENT and "1.5" in verdict.evidence
  assert tables.better(LOSSES)(Evidence([], PAPER)).status == NEEDS_HARDWARE


@pytest.mark.parametrize("judge, path, value, status", [
    (tables.mix_percentages, ("table5", "Mix", "cross_entropy", "DAMCHA"), 1.04, INCONSISTENT),
    (tables.perplexities, ("table5", "Mix", "perplexity", "MHA"), 3.2, INCONSISTENT),
    (tables.perplexities, ("table5", "Mix", "perplexity", "MHA"), 2.98, REPRODUCED),
    (tables.largest_on_mix, ("table5", "Text8", "cross_entropy", "DAMCHA"), 0.9, INCONSISTENT),
    (tables.same_memory, ("table2", "CIFAR-100", "DAMCHA", "memory"), 204.7, REPRODUCED),
    (tables.same_memory, ("table2", "CIFAR-100", "DAMCHA", "memory"), 3.0, INCONSISTENT),
    (tables.narrowing, ("table6", "DAMCHA", "top5_epoch500"), 95.1, NEEDS_HARDWARE),
    (tables.narrowing, ("table6", "DAMCHA", "top5_epoch500"), 96.23, INCONSISTENT),
])
def test_verdicts_on_the_tables_follow_their_figures(judge, path, value, status):
  assert judge(Evidence([], _changed(path, value))).status == status


def test_what_the_paper_prints_of_mix_is_computed_anew():
  text = tables.mix_percentages(Evidence([], PAPER)).evidence
  assert "4.59%, not 5.19%" in text and "3.7% to 5.5%" in text


def test_three_figures_of_one_model_are_found():
  verdict = tables.one_model(Evidence([], PAPER))
  assert verdict.status == INCONSISTENT
  assert "CIFAR-10 FID mean 331.891, 229.84, 227.641" in verdict.evidence


def test_percentages_allow_for_the_rounding_of_figures():
  path = ("table4", "WMT", "DAMCHA", "top50")
  worse = (*path[:2], "w/o $f(x)$+share", "top50")
  judge = tables.percentages(tables.Percent(6.43, path, worse, True), then=[(path, worse)])
  assert judge(Evidence([], PAPER)).status == NEEDS_HARDWARE  # 6.42 of the rounded ones
  assert judge(Evidence([], _changed(path, -4.66))).status == INCONSISTENT


@pytest.mark.parametrize("apart, status", [(1e-8, NOT_REPRODUCED), (1e-2, REPRODUCED)])
def test_blocks_are_judged_by_their_updates(tmp_path, apart, status):
  rows = [row("damcha", "update_size", 0.02), row("damcha", "update_difference", apart)]
  assert runs.equal_updates(_evidence(tmp_path, "rowsum", "mix:cpu", rows)).status == status


@pytest.mark.parametrize("slope, half, status", [
    (0.2, 0.1, REPRODUCED), (0.05, 0.1, NOT_REPRODUCED), (-0.2, 0.1, NOT_REPRODUCED)])
def test_an_advantage_grows_if_its_slope_does_beyond_the_interval(tmp_path, slope, half, status):
  rows = [row("damcha", "gap_slope_entanglement", slope, dataset="retrieval"),
          row("damcha", "gap_slope_entanglement_ci95", half, dataset="retrieval")]
  evidence = _evidence(tmp_path, "synthetic", "synthetic:cpu", rows)
  assert runs.grows("gap_slope_entanglement", ("retrieval",))(evidence).status == status


@pytest.mark.parametrize("narrow, wide, status", [
    (1.0, 5.0, "holds only under Section 5.1 with W = 2N"),
    (1.0, 1.0, REPRODUCED), (2.0, 5.0, NOT_REPRODUCED)])
def test_a_claim_may_hold_under_a_condition(tmp_path, narrow, wide, status):
  rows = [row(name, "num_params", value, variant=variant)
          for variant, ratio in (("section_5_1", narrow), ("section_5_1_wide", wide))
          for name, value in (("mha", 100.0), ("damcha", 100.0 * ratio))]
  evidence = _evidence(tmp_path, "efficiency", "table2:paper", rows)
  assert costs.comparable("num_params", "Parameters")(evidence).status == status


def test_times_are_those_of_the_same_rounds(tmp_path):
  """Medians of all rounds may differ by what else the machine did."""
  rows = [row(name, metric, value, variant="section_5_1")
          for name, values in (("mha", (1.0, 1.0, 1.0)), ("damcha", (2.0, 1.05, 0.9)))
          for metric, value in zip(("latency", "latency_ratio", "gflops"), values)]
  verdict = costs.latency(_evidence(tmp_path, "efficiency", "table2:paper", rows))
  assert verdict.status == REPRODUCED and "1.05" in verdict.evidence


def test_costs_are_also_those_of_whole_decoders(tmp_path):
  made_up_results.write(tmp_path, "efficiency", "speed:paper", [
      row(f"damcha_{name}", f"{metric}_to_mha", value, variant="large")
      for name, value in (("stride64", 1.05), ("prefix", 1.3))
      for metric in ("step_time", "evaluation_time", "peak_memory")])
  evidence = _evidence(tmp_path, "efficiency", "table2:paper", [
      row(name, metric, value) for name, value in (("mha", 1.0), ("damcha", 2.0))
      for metric in ("latency_ratio", "peak_memory")])
  assert costs.latency(evidence).status == (
      "holds only under decoder `large` with `damcha_stride64`")
  memory = costs.memory(evidence)
  assert memory.status == NOT_REPRODUCED and "decoder `large` 1.05 to 1.3" in memory.evidence


@pytest.mark.parametrize("of_mean, of_each, status", [
    (6.0, 8.0, "holds only under the structural part being what rank costs the contexts' mean "
               "metric"),
    (6.0, 6.0, REPRODUCED), (7.0, 8.0, NOT_REPRODUCED)])
def test_two_parts_add_up_by_what_the_structural_one_is_of(tmp_path, of_mean, of_each, status):
  rank, full = (f"K=2, rank={rank}, condition=1" for rank in (1, 4))
  rows = [row(attention, metric, value, dataset="c2_contexts", variant=variant)
          for attention, metric, variant, value in (
              ("static", "excess_risk", rank, 10.0), ("static", "excess_risk", full, 4.0),
              ("static", "bound_from_rank", rank, of_mean),
              ("adaptive_low_rank", "excess_risk", rank, of_each))]
  assert runs.additive(_evidence(tmp_path, "theory", "theory:paper", rows)).status == status


@pytest.mark.parametrize("paper, robust, spread, status", [
    (0.5, 0.6, 0.1, REPRODUCED), (0.001, 0.6, 0.1, "holds only under `preset=robust` on mix"),
    (0.101, 0.6, 0.1, "holds only under `preset=robust` on mix"), (0.101, 0.6, None, REPRODUCED),
    (0.001, 0.002, 0.1, NOT_REPRODUCED)])
def test_adaptivity_is_judged_by_preset_and_set_and_for_most_seeds(tmp_path, paper, robust, spread, status):
  rows = [row("damcha", "adaptivity", paper, spread=spread),
          row("damcha_robust", "adaptivity", robust, spread=spread)]
  assert runs.adapts(_evidence(tmp_path, "study", "study_cpu:paper", rows)).status == status


@pytest.mark.parametrize(("value", "spread", "status"), [
    (0.9, 0.01, claims.REPRODUCED), (0.72, 0.01, claims.UNDECIDED), (0.5, 0.01, claims.NOT_REPRODUCED),
    (0.9, 0.1, claims.UNDECIDED), (0.9, None, claims.REPRODUCED)])
def test_layers_agree_beyond_the_interval_over_seeds(tmp_path, value, spread, status):
  """Of two layers, orthogonal gradients give 0.707."""
  rows = [row("damcha", "grad_norm_own_generator", 1.0, variant=f"step 9, layer {layer}")
          for layer in range(2)]
  rows += [row("damcha", "grad_alignment", value, variant="step 9", spread=spread)]
  assert runs.layers_agree(_evidence(tmp_path, "analysis", "mix:cpu", rows)).status == status


def _table2(value):
  return [row(f"authors_{name.lower()}", "peak_memory", 2.0, dataset="wmt14", variant=None)
          for name in ("THA", "DCMHA")] + [row("damcha", "peak_memory", value, dataset="wmt14")]


@pytest.mark.parametrize("ours, status", [(1.0, REPRODUCED), (3.0, NOT_REPRODUCED)])
def test_an_order_is_judged_by_what_is_measured_here(tmp_path, ours, status):
  evidence = _evidence(tmp_path, "efficiency", "table2:paper", _table2(ours))
  pairs = tables.table2("memory", ("WMT",), ("THA", "DCMHA"))
  assert tables.order_here(pairs, "")(evidence).status == status


@pytest.mark.parametrize("value, status", [(0.35864, REPRODUCED), (0.36, NOT_REPRODUCED)])
def test_gflops_have_to_equal_to_the_last_decimal(tmp_path, value, status):
  names = {dataset: name for name, dataset in paper_tables.efficiency.TABLE2_DATASETS.items()}
  methods = {name: key for key, name in paper_tables.efficiency.TABLE2_METHODS.items()}
  rows = [row(methods[method], "gflops", figures["gflops"], dataset=names[dataset],
              comparable=True)
          for dataset, by_method in PAPER["table2"].items()
          for method, figures in by_method.items()]
  (ours,) = [one for one in rows if (one["attention"], one["dataset"]) == ("damcha", "wmt14")]
  ours["value"] = value
  evidence = _evidence(tmp_path, "efficiency", "table2:paper", rows)
  assert tables.gflops_equal(evidence).status == status


def test_the_largest_run_is_asked_first(tmp_path):
  for config, value in (("mix:smoke", 1.0), ("mix:paper", 2.0), ("mix:cpu", 3.0)):
    made_up_results.write(tmp_path, "rowsum", config, [row("damcha", "update_size", value)])
  evidence = Evidence(read_results(tmp_path), PAPER)
  assert evidence.value("rowsum", metric="update_size") == 2.0
  assert list(evidence.commands) == ["python -m experiments.rowsum --config=configs/mix.py"]


def test_a_row_without_a_value_is_no_evidence(tmp_path):
  evidence = _evidence(tmp_path, "rowsum", "mix:cpu", [row("damcha", "update_size", None)])
  with pytest.raises(Absent):
    evidence.value("rowsum", metric="update_size")


def test_without_results_nothing_is_said_to_be_run():
  judged = claims.judge(CLAIMS, [], PAPER)
  assert {one.verdict.status for one in judged} <= {
      INCONSISTENT, NEEDS_HARDWARE, NOT_RUN, REPRODUCED}
  for one in judged:
    assert one.claim.commands
    if one.verdict.status == NOT_RUN:
      assert not one.commands
    if one.verdict.status == REPRODUCED:  # of the paper's tables alone
      assert one.commands == (claims.REPORT,)


def test_an_absent_result_has_the_status_that_the_claim_names():
  def absent(evidence):
    raise Absent
  (one,) = claims.judge([Claim("1", "text", absent, ("run",), NEEDS_HARDWARE)], [], PAPER)
  assert one.verdict.status == NEEDS_HARDWARE and one.commands == ()


def test_rows_that_do_not_go_together_are_named_and_faults_of_ours_are_not_hidden(tmp_path):
  rows = [row("mha", "table7_residual", 0.0, variant="table7 scores")]  # and no totals
  made_up_results.write(tmp_path, "efficiency", "costs:paper", rows)
  with pytest.raises(ResultsError, match="the rows of costs-paper do not tell .*complexities"):
    claims.judge(CLAIMS, read_results(tmp_path), PAPER)
  with pytest.raises(ZeroDivisionError):
    claims.judge([Claim("1", "text", lambda _: 1 / 0, ("run",))], [], PAPER)


def test_table_6_is_filled_by_the_last_two_milestones(tmp_path):
  rows = [row("damcha", "top1", value, split="validation", variant=f"epoch {epoch}", paper=1.0)
          for epoch, value in ((1, 10.0), (5, 20.0))]
  result = read_results(made_up_results.write(tmp_path, "gpt2_enwik8", "mix:cpu", rows))[0]
  found = paper_tables.locate([result._replace(experiment="vit_imagenet")])
  assert {path[-1]: one["value"] for path, [(_, one)] in found.items()} == {
      "top1_epoch100": 10.0, "top1_epoch500": 20.0}


@pytest.mark.parametrize("variant, section, path", [
    ("depth3-diagonal", "cifar10", ("table3", "Diagonal-only", "CIFAR-10", "top50", "3")),
    ("depth9", "cifar100", ("table3", "DAMCHA", "CIFAR-100", "top50", "9")),
    ("depth9-shifted", "cifar10", None),
    ("static", "cifar10", ("table4", "CIFAR-10", "w/o $f(x)$+share", "top50")),
    ("static", "cifar100", ("table4", "CIFAR-100", "w/o $f(x)$+share", "top50")),
    ("robust", "cifar10", None),
    ("static", "another", None),
])
def test_ablations_find_their_cells_by_section_whatever_the_data(tmp_path, variant, section, path):
  rows = [row("damcha", "fid_top50", 3.0, variant=variant, dataset="sample_images",
              section=section)]
  made_up_results.write(tmp_path, "ablations", "table4:cpu", rows,
                        cifar10={"dataset": "sample_images"},
                        cifar100={"dataset": "sample_images"})
  assert list(paper_tables.locate(read_results(tmp_path))) == ([path] if path else [])


def _mse(attention, value, **fields):
  return row(attention, "mse_unpaired_mean", value, dataset="sample_images", paper=0.1, **fields)


@pytest.mark.parametrize("config, name", [("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")])
def test_table_1_goes_by_the_config_whatever_the_data(tmp_path, config, name):
  made_up_results.write(tmp_path, "image_generation", f"{config}:cpu", [_mse("mha", 0.2)])
  assert list(paper_tables.locate(read_results(tmp_path))) == [("table1", name, "MHA", "mse_mean")]


def test_what_the_paper_measured_is_the_authors_simplified_attention(tmp_path):
  rows = [_mse("authors_tha", 0.3, comparable=True), _mse("tha", 0.1, comparable=True),
          _mse("damcha", 0.2, comparable=True)]
  made_up_results.write(tmp_path, "image_generation", "cifar10:paper", rows)
  results = read_results(tmp_path)
  found = paper_tables.locate(results)["table1", "CIFAR-10", "THA", "mse_mean"]
  assert [(one["attention"], one["comparable"]) for _, one in found] == [
      ("authors_tha", True), ("tha", False)]
  pairs = tables.table1("CIFAR-10", ("THA",), ("mse_mean",))
  verdict = tables.better(pairs)(Evidence(results, PAPER))
  assert verdict.status == REPRODUCED and "0.3" in verdict.evidence


def _judged(tmp_path, judge, experiment, config, rows, **settings):
  made_up_results.write(tmp_path, experiment, config, rows, **settings)
  (one,) = claims.judge([Claim("1", "text", judge, ("run",))], read_results(tmp_path), PAPER)
  return one


UPDATES = [row("damcha", "update_size", 0.02, dataset="sample_mix"),
           row("damcha", "update_difference", 1e-9, dataset="sample_mix")]


def test_a_few_steps_decide_nothing(tmp_path):
  one = _judged(tmp_path, runs.equal_updates, "rowsum", "mix:smoke", UPDATES)
  assert one.status == NOT_RUN and one.commands == ()


@pytest.mark.parametrize("settings, label", [
    ({}, "`mix:cpu`, sample data, 2 seeds"),
    ({"attentions": "mha"}, "`mix:cpu`, sample data, 2 seeds"),
    ({"num_steps": 3}, "`mix:cpu` with other values, sample data, 2 seeds")])
def test_what_a_small_size_decides_says_its_size_data_and_seeds(tmp_path, settings, label):
  one = _judged(tmp_path, runs.equal_updates, "rowsum", "mix:cpu", UPDATES, **settings)
  assert one.status == f"{NOT_REPRODUCED} ({label})"
  text = "\n".join(str(block) for block in claims.as_blocks([one]))
  assert text.count(label) == 2  # in the table, and with the evidence
  assert f"1 {NOT_REPRODUCED} at a small size" in text


def test_what_the_papers_size_decides_needs_no_label(tmp_path):
  made_up_results.write(tmp_path, "gpt2_enwik8", "mix:cpu",
                        [table5("mha", 1.1, False), table5("damcha", 1.0, False)])
  one = _judged(tmp_path, tables.better(LOSSES), "gpt2_enwik8", "mix:paper",
                [table5("mha", 1.1), table5("damcha", 1.05)])
  assert one.status == one.kind == REPRODUCED


def test_smaller_runs_beside_the_papers_tables_say_what_they_are(tmp_path):
  rows = [table5("mha", 1.1, False, "sample_mix"), table5("damcha", 1.25, False, "sample_mix")]
  one = _judged(tmp_path, tables.better(LOSSES), "gpt2_enwik8", "mix:cpu", rows)
  assert one.status == NEEDS_HARDWARE
  assert "(`mix:cpu`, sample data, 2 seeds)" in one.verdict.evidence


def test_one_layer_is_no_plural():
  assert tables.label(("table3", "DAMCHA", "WMT", "mean", "1")) == "DAMCHA WMT mean 1 layer"
