"""Every claim of the paper that can be tested, in its order, and what decides each."""

from __future__ import annotations

from experiments import claims_of_costs as costs
from experiments import claims_of_runs as runs
from experiments import claims_of_study as study
from experiments import claims_of_tables as tables
from experiments.claims import Claim, NEEDS_HARDWARE, REPORT
from experiments.claims_of_study import losses, with_study
from experiments.claims_of_tables import Percent, better, table1, table2, table3, table5, table6
from experiments.paper_tables import COSTS, SPEED, TABLE2, TABLE6, TABLES

THEORY = ("python -m experiments.theory --config=configs/theory.py",)
ROWSUM = ("python -m experiments.rowsum --config=configs/mix.py:cpu",)
SYNTHETIC = ("python -m experiments.synthetic --config=configs/synthetic.py:cpu",)
STUDY = ("python -m experiments.study --config=configs/study_cpu.py",)
ANALYSIS = ("python -m experiments.gpt2_enwik8 --config=configs/mix.py:cpu",
            "python -m experiments.analysis --workdir=runs/gpt2_enwik8/mix-cpu")
SHIFT = ("head -c 90000000 enwik8 > shift.txt && tail -c 10000000 text8 >> shift.txt",
         "python -m experiments.gpt2_enwik8 --config=configs/enwik8.py --config.dataset=shift.txt",
         "python -m experiments.gpt2_enwik8 --config=configs/enwik8.py")
IMAGES = ("python -m experiments.image_generation --config=configs/cifar10.py:cpu",)
BLOCKS = ("python -m experiments.ablations --config=configs/table3.py:cpu",)


def _of(table: str, *parts: str) -> tuple[str, ...]:
  return tuple(dict.fromkeys(map(TABLES[table].command, parts)))


_T1, _T1_IMAGES = _of("table1", *tables.SETS), _of("table1", *tables.IMAGES)
_T1_TEXTS = _of("table1", *tables.TEXTS)
_T3, _T4 = _of("table3", *tables.SETS), _of("table4", *tables.SETS)
_T5 = _of("table5", *tables.TABLE5_SETS)
_EVERYWHERE = [pair for dataset in tables.SETS for pair in table1(dataset)]


def _row(dataset: str, variant: str, column: str) -> tuple[str, ...]:
  return "table4", dataset, variant, column


def _printed4(*claimed: tuple[float, str, str, str]) -> list[Percent]:
  return [Percent(percent, _row(dataset, "DAMCHA", column), _row(dataset, variant, column), True)
          for percent, dataset, variant, column in claimed]


_STATIC, _UNSHARED = "w/o $f(x)$+share", "w/o share"
_PRINTED4 = _printed4(
    (2.37, "CIFAR-10", _STATIC, "mean"), (17.59, "CIFAR-10", _STATIC, "top50"),
    (0.58, "CIFAR-10", _UNSHARED, "mean"), (19.59, "CIFAR-10", _UNSHARED, "top50"),
    (8.66, "CIFAR-100", _STATIC, "mean"), (15.25, "CIFAR-100", _STATIC, "top50"),
    (10.95, "CIFAR-100", _UNSHARED, "mean"), (7.77, "CIFAR-100", _UNSHARED, "top50"),
    (10.54, "WMT", _STATIC, "mean"), (6.43, "WMT", _STATIC, "top50"),
    (11.57, "WMT", _UNSHARED, "mean"), (5.54, "WMT", _UNSHARED, "top50"),
    (26.77, "CommonGen", _STATIC, "mean"), (13.99, "CommonGen", _STATIC, "top50"),
    (17.99, "CommonGen", _UNSHARED, "mean"), (14.78, "CommonGen", _UNSHARED, "top50"))
_FULL4 = [(_row(dataset, "DAMCHA", column), _row(dataset, variant, column))
          for dataset in tables.SETS for variant in (_STATIC, _UNSHARED)
          for column in ("mean", "top50")]
_PRINTED5 = [
    Percent(percent, ("table5", dataset, metric, "DAMCHA"), ("table5", dataset, metric, "DCMHA"))
    for percent, dataset, metric in (
        (1.90, "Enwik8", "cross_entropy"), (2.10, "Enwik8", "perplexity"),
        (1.90, "Text8", "cross_entropy"), (1.75, "Text8", "perplexity"),
        (3.70, "Mix", "cross_entropy"), (4.08, "Mix", "perplexity"))]


def _top50(dataset: str, rival: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  metric = tables.QUALITY[dataset][1]
  return ("table1", dataset, "DAMCHA", metric), ("table1", dataset, rival, metric)


_BEST_DIAGONAL = [(("table3", "DAMCHA", "CIFAR-10", "top50", full),
                   ("table3", "Diagonal-only", "CIFAR-10", "top50", diagonal))
                  for full in tables.DEPTHS for diagonal in tables.DEPTHS]
_THREE = "THA", "DCMHA", "MoA"
_LARGEST_ON_MIX = with_study(tables.largest_on_mix, losses(
    study.PRESETS, study.BASELINES, (*study.TEXTS, "mix_decontaminated")), study.on_mixture())

CLAIMS = (
    # Abstract and introduction.
    Claim("Abstract", "DAMCHA outperforms every competing attention consistently, across the "
          "benchmarks (Tables 1, 5 and 6, every cell).",
          with_study(better([*_EVERYWHERE, *table5(), *table6()]),
                     losses(study.PRESETS, study.BASELINES)), (*_T1, *_T5, TABLE6)),
    Claim("Abstract", "Learning the full cross-head matrix captures interactions between heads "
          "that the diagonal blocks lack.", with_study(runs.equal_updates, study.blocks),
          (*ROWSUM, *BLOCKS, *STUDY)),
    Claim("Abstract", "The metric adapts dynamically to the input.", runs.adapts,
          (*STUDY, *_of("table4", "CIFAR-10"))),
    Claim("Abstract", "Computation is comparable to multi-head attention's, or less.",
          costs.comparable("gflops", "Operations"), (TABLE2, COSTS)),
    Claim("Section 1", "The number of parameters stays comparable to multi-head attention's.",
          costs.comparable("num_params", "Parameters"), (TABLE2, COSTS)),
    Claim("Section 1", "The gains cost no significant memory.",
          costs.memory, (TABLE2, COSTS, SPEED)),
    Claim("Section 1", "Gains are stronger on mixed data sets.",
          _LARGEST_ON_MIX, _T5),
    Claim("Section 1", "DAMCHA adapts better where the distribution shifts (trained on enwik8, "
          "tested on text8).", study.shifted, (*SHIFT, *STUDY), NEEDS_HARDWARE),
    # Sections 3 and 4, Appendix C.
    Claim("Section 3.3", "RowSum raises the bound on the rank of a head's metric, and so relieves "
          "the low-rank bottleneck (also Sections 1 and 3.4).", runs.rank, THEORY),
    Claim("Section 3.3", "As a drop-in replacement it adds negligible overhead.", costs.latency,
          (TABLE2, COSTS, SPEED)),
    Claim("Section 3.4", "A generator for each layer overfits severely; sharing one mitigates it.",
          study.less_overfitting, STUDY),
    Claim("Section 3.4", "Sharing the generator reduces the number of parameters.",
          study.fewer_parameters, STUDY),
    Claim("Section 3.4, Appendix G", "With a shared generator layers do not pull against each "
          "other, which makes training stable.", with_study(
              runs.layers_agree, losses(("damcha_unshared", "damcha_stack"), ("damcha",))),
          (*ANALYSIS, *STUDY)),
    Claim("Section 4, Theorem C.1", "DAMCHA contains multi-head attention strictly.",
          runs.embedding, THEORY),
    Claim("Section 4, Theorem C.2", "DAMCHA's optimal risk is no larger than multi-head "
          "attention's.", runs.risk_no_larger, THEORY),
    Claim("Section 4, Theorem C.2", "Where no static metric of low rank fits all contexts, "
          "the risk is less by at least the bound.", runs.risk_bound, THEORY),
    Claim("Appendix C.2, Assumption 3", "The curvature that the theorem needs is standard.",
          runs.curvature, THEORY),
    Claim("Appendix C.2, Assumption 4", "The generator can tell contexts apart.",
          runs.context_seen, THEORY),
    # Section 5.1.
    Claim("Section 5.1", "On CIFAR-10 DAMCHA has the lowest mean MSE and FID, on CIFAR-100 the "
          "best mean FID, and on both the best FID@Top-50.",
          better([*table1("CIFAR-10", metrics=("mse_mean", "fid_mean", "fid_top50")),
                  *table1("CIFAR-100", metrics=("fid_mean", "fid_top50"))]), _T1_IMAGES),
    Claim("Section 5.1", "FID@Top-50 on CIFAR-10 is 31.1% below multi-head attention's and 25.8% "
          "below that of MMA, the best baseline.",
          tables.percentages(Percent(31.1, *_top50("CIFAR-10", "MHA")),
                             Percent(25.8, *_top50("CIFAR-10", "MMA")),
                             then=table1("CIFAR-10", metrics=("fid_top50",))), _T1_IMAGES[:1]),
    Claim("Section 5.1", "Mean squared error between samples and test pictures measures the "
          "quality of generation.", runs.pixel_error, (*IMAGES, *_T1_IMAGES)),
    Claim("Section 5.1", "DAMCHA has the best BARTScore and BARTScore@Top-50 on both text sets, "
          "and on CommonGen the lowest mean NLL.",
          better([*table1("WMT", metrics=tables.QUALITY["WMT"]),
                  *table1("CommonGen", metrics=("nll_mean", *tables.QUALITY["CommonGen"]))]),
          _T1_TEXTS),
    Claim("Section 5.1", "BARTScore on WMT improves by 35.7% on average and 22.0% on Top-50.",
          tables.percentages(
              Percent(35.7, ("table1", "WMT", "DAMCHA", "bartscore_mean"),
                      ("table1", "WMT", "MHA", "bartscore_mean")),
              Percent(22.0, *_top50("WMT", "MHA")),
              then=table1("WMT", ("MHA",), tables.QUALITY["WMT"])), _T1_TEXTS[:1]),
    Claim("Section 5.1", "Margins over multi-head attention are substantially larger on Top-50 "
          "than on average, consistently.", tables.margins, _T1),
    Claim("Section 5.1, Figures 3 and 4", "The distributions of scores are shifted to the better "
          "and narrower than multi-head attention's.", tables.narrower, _T1),
    Claim("Section 5.1, Appendix F", "In training DAMCHA learns progressively to make its metric "
          "depend on the input.", runs.evolves, ANALYSIS),
    # Section 5.2.
    Claim("Section 5.2, Table 2", "The GFLOPs of Table 2.", tables.gflops_equal, (TABLE2,)),
    Claim("Section 5.2, Table 2", "They are those of the models of Section 5.1.",
          tables.of_section_5_1, (TABLE2,)),
    Claim("Section 5.2", "DAMCHA needs less memory than THA, DCMHA and MoA on images and "
          "CommonGen, and on WMT the least of all.",
          tables.order_here([*table2("memory", ("CIFAR-10", "CIFAR-100", "CommonGen"), _THREE),
                             *table2("memory", ("WMT",), tables.RIVALS[1:])],
                            "The paper names neither its device nor its unit of memory."),
          (TABLE2,)),
    Claim("Section 5.2", "DAMCHA's memory on CIFAR-10 and CIFAR-100, one model at one length.",
          tables.same_memory, (REPORT,)),
    Claim("Section 5.2", "On WMT DAMCHA takes the fewest GFLOPs of all.",
          tables.order_here(table2("gflops", ("WMT",), tables.RIVALS[1:]),
                            "The counts are those of any machine."), (TABLE2,)),
    Claim("Section 5.2", "On WMT DAMCHA is much faster than THA, DCMHA, MMA and MoA.",
          tables.order_here(table2("latency_ms", ("WMT",), ("THA", "DCMHA", "MMA", "MoA")),
                            "The paper does not name its device."), (TABLE2,)),
    Claim("Section 5.2", "The improvements are not due to a larger model.",
          with_study(costs.comparable("num_params", "Parameters"),
                     losses(("damcha_flops", "damcha_robust_flops"), ("mha",))),
          (TABLE2, *STUDY)),
    # Section 5.3.
    Claim("Section 5.3, Table 4", "Each percentage printed in Table 4.",
          tables.percentages(*_PRINTED4, then=_FULL4), _T4),
    Claim("Section 5.3, Table 4", "Removing both the generator and sharing degrades the most.",
          better([(_row(dataset, _UNSHARED, column), _row(dataset, _STATIC, column))
                  for dataset in tables.SETS for column in ("mean", "top50")]), _T4),
    Claim("Section 5.3, Table 4", "Generator and sharing both help, on every data set.",
          with_study(better(_FULL4), losses(("damcha_static", "damcha_unshared"), ("damcha",))),
          _T4),
    Claim("Section 5.3, Table 4", "Without the generator Top-50 degrades more than the average, on "
          "every data set.", tables.ablation_margins, _T4),
    Claim("Section 5.3", "One model, DAMCHA with a 9-layer generator, has one FID and one "
          "BARTScore in Tables 1, 3 and 4.", tables.one_model, (REPORT,)),
    Claim("Section 5.3, Table 3", "The deeper the generator, the better, consistently and on every "
          "data set.", tables.deeper, _T3),
    Claim("Section 5.3, Table 3", "Inference with diagonal blocks alone is worse than with all.",
          better([pair for column in ("top50", "mean")
                  for pair in table3("DAMCHA", "Diagonal-only", column)]), _T3),
    Claim("Section 5.3, Table 3", "On CIFAR-10 the best FID@Top-50 with diagonal blocks alone is "
          "worse than the worst with all.", better(_BEST_DIAGONAL), _T3[:1]),
    Claim("Section 5.3, Table 3", "Inference with off-diagonal blocks alone is worse than with "
          "diagonal ones alone.",
          better([pair for column in ("top50", "mean")
                  for pair in table3("Diagonal-only", "Off-diagonal-only", column)]), _T3),
    Claim("Section 5.3", "So off-diagonal blocks hold interactions between heads that are "
          "essential.", with_study(runs.equal_updates, study.blocks),
          (*ROWSUM, *BLOCKS, *STUDY)),
    # Section 5.4.
    Claim("Section 5.4, Table 5", "DAMCHA has a lower loss and perplexity than MHA and DCMHA on "
          "all three data sets.", with_study(
              better(table5()), losses(study.PRESETS, study.BASELINES, study.TEXTS),
              losses(("damcha_future",), ("damcha",), ("mix",)),
              losses(("authors_mma_future", "authors_mma"), ("mha",), ("mix",))),
          _T5),
    Claim("Section 5.4", "On Mix the loss is 5.19% below MHA's and 3.70% below DCMHA's.",
          tables.mix_percentages, _of("table5", "Mix")),
    Claim("Section 5.4, Table 5", "Each percentage printed in Table 5.",
          tables.percentages(*_PRINTED5, then=table5(rivals=("DCMHA",))), _T5),
    Claim("Section 5.4, Table 5", "Perplexities are exponentials of the losses.",
          tables.perplexities, (REPORT,)),
    Claim("Section 5.4", "The gains are largest on Mix.", _LARGEST_ON_MIX, _T5),
    Claim("Section 5.4", "DCMHA is the best of the baselines in Table 1, which is why Tables 5 "
          "and 6 have no other.", with_study(tables.best_baseline, losses(
              ("dcmha", "tha", "colmha", "mma", "moa"), ("mha",))), (REPORT,)),
    # Sections 5.5 and 5.6.
    Claim("Section 5.5, Table 6", "DAMCHA has the highest accuracy at every evaluation.",
          better(table6()), (TABLE6,)),
    Claim("Section 5.5", "DAMCHA leads DCMHA most at epoch 100, and less at 500.",
          tables.narrowing, (TABLE6,)),
    Claim("Section 5.6", "DAMCHA's advantage grows with the entanglement of subspaces.",
          runs.grows("gap_slope_entanglement", ("classification", "retrieval")), SYNTHETIC),
    Claim("Section 5.6", "In the classification it grows with the number of features.",
          runs.grows("gap_slope_log2_dimension", ("classification",)), SYNTHETIC),
    Claim("Section 5.6", "Without entanglement DAMCHA keeps up with multi-head attention.",
          runs.no_penalty, SYNTHETIC),
    # Appendix D.
    Claim("Appendix D.2", "The generator runs once whatever the number of layers.",
          costs.amortised, THEORY),
    Claim("Appendix D.3, Table 7", "The complexities of Table 7.", costs.table7, (*THEORY, COSTS)),
    Claim("Appendix D.3", "A layer of DAMCHA is cheaper than multi-head attention's, by its "
          "scores.", costs.cheaper_scores, THEORY),
    Claim("Appendix D.4", "A layer has 2 D^2 parameters, multi-head attention's 4 D^2.",
          costs.layer_parameters, THEORY),
    Claim("Appendix D.4", "The stack saves 2 N D^2 parameters less those of the generator, a net "
          "saving.", costs.saving, THEORY),
    # Appendix K.
    Claim("Appendix K", "The gap to multi-head attention is the sum of a structural and a dynamic "
          "part.", runs.additive, THEORY),
    Claim("Appendix K", "THA has worse means of MSE, FID and NLL than DAMCHA on every data set.",
          better([*(pair for dataset in tables.IMAGES
                    for pair in table1(dataset, ("THA",), ("mse_mean", "fid_mean"))),
                  *(pair for dataset in tables.TEXTS
                    for pair in table1(dataset, ("THA",), ("nll_mean",)))]), _T1),
    Claim("Appendix K", "THA needs more memory than DAMCHA and is slower.",
          tables.order_here([*table2("memory", tables.SETS, ("THA",)),
                             *table2("latency_ms", tables.SETS, ("THA",))],
                            "The paper names neither device nor unit."), (TABLE2,)),
    Claim("Appendix K", "DAMCHA is better than DCMHA by every metric of the generation experiments "
          "and of GPT-2.",
          with_study(better([*(pair for dataset in tables.SETS
                               for pair in table1(dataset, ("DCMHA",))),
                             *table5(rivals=("DCMHA",))]),
                     losses(study.PRESETS, ("dcmha",))), (*_T1, *_T5)),
    Claim("Appendix K", "DAMCHA needs less memory than DCMHA and is faster.",
          tables.order_here([*table2("memory", tables.SETS, ("DCMHA",)),
                             *table2("latency_ms", tables.SETS, ("DCMHA",))],
                            "The paper names neither device nor unit."), (TABLE2,)),
    Claim("Appendix K", "DAMCHA has better FID@Top-50 and BARTScore@Top-50 than ColMHA.",
          better([_top50(dataset, "ColMHA") for dataset in tables.SETS]), _T1),
    Claim("Appendix K", "MoA needs the most memory and the most GFLOPs of all.",
          tables.order_here([(("table2", dataset, method, metric),
                              ("table2", dataset, "MoA", metric))
                             for metric in ("memory", "gflops") for dataset in tables.SETS
                             for method in ("THA", "DCMHA", "ColMHA", "MMA", "DAMCHA")],
                            "The paper names neither device nor unit."), (TABLE2,)),
)
