"""What documents say of results is what `results/` holds."""

import functools
import math
import re

import pytest

from configs import cifar10
from configs import commongen
from configs import speed
from configs import table4
from configs import vit_s16
from configs import wmt14
from tests import published
from tests.documents import TEXTS


def test_what_is_said_of_image_classification():
  top = {(row["attention"], row["split"], row["metric"]): row["value"] for row in published.summary(
      "vit_s16_cpu") if row["variant"] == "epoch20"}
  of_split = {name: {split: top[name, split, "top1"] for split in ("validation", "train")}
              for name in ("mha", "damcha")}
  mha, damcha = of_split["mha"]["validation"], of_split["damcha"]["validation"]
  error = max(math.sqrt(value * (100 - value) / 365) for value in (mha, damcha))
  sizes = [published.num_params("vit_s16_cpu")[name] / 1e3 for name in ("mha", "damcha")]
  text = " ".join(TEXTS["README.md"].split())
  for ours in (
      "{:.0f}k and {:.0f}k parameters, MHA had".format(*sizes),
      f"MHA had {mha:.1f}% top-1 and {top['mha', 'validation', 'top5']:.1f}% top-5 on 365 images",
      f"DAMCHA {damcha:.1f}% and {top['damcha', 'validation', 'top5']:.1f}%",
      f"a standard error of up to {error:.1f} points",
      "on training images {:.1f}% and {:.1f}% top-1".format(
          of_split["mha"]["train"], of_split["damcha"]["train"])):
    assert ours in text


def test_what_is_said_of_blocks_that_are_left_out():
  losses = {row["variant"]: row["value"] for row in published.summary("table3_cpu")
            if row["metric"] == "nats_per_token" and row["split"] == "test"}
  text = " ".join(TEXTS["README.md"].split())
  order = ("", "-off_diagonal", "-diagonal", "-shifted")
  nine, one = ([losses[f"depth{depth}{suffix}"] for suffix in order] for depth in (9, 1))
  for ours in ("with 9 layers {:.3f} with all blocks, {:.3f} without the diagonal ones, {:.3f} with "
               "these alone, {:.3f} with the control".format(*nine),
               "with one layer {:.3f}, {:.3f}, {:.3f} and {:.3f}".format(*one)):
    assert ours in text


@pytest.mark.parametrize("text, keys", [
    ("takes {:.3f} GFLOPs with multi-head attention, {:.3f} with head slices and {:.3f} with full",
     [("d_forms", name, "gflops", "T=256, D=128, H=8")
      for name in ("mha", "damcha_head_slice", "damcha_full_width")]),
    ("loses {:.2f} of its norm", [("c1_strictness", "low_rank_metric", "best_error", "rank=8")]),
    ("score_error` {:.2f} and", [("c1_strictness", "mha", "score_error", "T=16, D=32, H=4")]),
    ("outside the block, {:.2f} at H=4",
     [("c1_head_slice", "damcha_head_slice", "metric_residual", "T=16, D=32, H=4")]),
    ("({:.1f} against {:.1f} at K=8 and rank 2)",
     [("c2_contexts", "adaptive_low_rank", "excess_risk", "K=8, rank=2, condition=1"),
      ("c2_contexts", "static", "bound_from_rank", "K=8, rank=2, condition=1")]),
    ("static metric of rank k has {:.1f} and of full rank {:.1f}",
     [("c2_generator", "static", "lower_bound", f"rank={rank}") for rank in (4, 16)]),
    ("{:.1f} at rank k",
     [("c2_contexts", "static", "bound_from_rank", "K=1, rank=4, condition=1")]),
    ("that is {:.1f} of {:.1f}, and adapting is worth the other {:.1f}",
     [("c2_contexts", "static", "bound_from_rank", "K=4, rank=4, condition=1"),
      ("c2_contexts", "static", "excess_risk", "K=4, rank=4, condition=1"),
      ("c2_contexts", "static", "excess_risk", "K=4, rank=16, condition=1")]),
    ("have {:.0f} where static",
     [("c2_heterogeneity", "adaptive_head_slice", "excess_risk", "heterogeneity=0")]),
    ("has {:.0f} if contexts do not differ, and {:.0f} against {:.0f} if they",
     [("c2_heterogeneity", "static", "excess_risk", "heterogeneity=0"),
      ("c2_heterogeneity", "adaptive_head_slice", "excess_risk", "heterogeneity=2"),
      ("c2_heterogeneity", "static", "excess_risk", "heterogeneity=2")]),
    ("reaches {:.2f} where",
     [("c2_generator", "trained_generator", "excess_risk", "signal=2")]),
    ("the trained generator has {:.2f}, the static bound being {:.2f}",
     [("c2_generator", "trained_generator", "excess_risk", "signal=0"),
      ("c2_generator", "static", "lower_bound", "rank=16")]),
    ("{:.2f} near M*, {:.2f} at R=10, {:.4f} at R=1000",
     [("c2_growth", "softmax", "growth_constant", f"R={radius}") for radius in (0.01, 10, 1000)]),
    ("0 up to k + 1 = 9 tokens, {:.2f} at 16, {:.2f} at 128",
     [("c1_head_slice", "damcha_head_slice", "score_residual", f"T={length}")
      for length in (16, 128)])])
def test_theory(text, keys):
  ours = text.format(*(published.value("theory", *key) for key in keys))
  assert ours in " ".join(TEXTS["theory.md"].split())


def test_sizes_and_ranges_of_the_theory():
  value = lambda *key: [row["value"] for (*given, variant), row in published.rows("theory").items()
                        if tuple(given) == key[:3] and key[3] in variant]
  sizes = [value("d_forms", name, "num_params", "")[0]
           for name in ("mha", "damcha_head_slice", "damcha_full_width")]
  rounding = [max(value("c1_embedding", "damcha_full_width", "scores_error",
                        f"constant metric, {dtype}")) for dtype in ("float32", "float64")]
  excess, bound = (value("c2_contexts", "static", metric, "condition=4")
                   for metric in ("excess_risk", "lower_bound"))
  ratios = [one / other for one, other in zip(excess, bound, strict=True) if other]
  dropped = [value("synthetic", name, "table7_residual", part)[0]
             for name, part in (("damcha", "generator"), ("damcha", "softmax"))]
  text = " ".join(TEXTS["theory.md"].split())
  for ours in (
      "{:.0f}k, {:.0f}k and {:.1f}M parameters".format(
          sizes[0] / 1e3, sizes[1] / 1e3, sizes[2] / 1e6),
      "{:.0e} in float32, {:.0e} in float64".format(*rounding).replace("e-0", "e-"),
      f"the excess is {min(ratios):.1f} to {max(ratios):.1f} times the bound",
      f"{min(dropped):.3f} to {max(dropped):.3f} for the softmax and the generator"):
    assert ours in text


def test_speeds():
  """Of several decoders the figure that is furthest from the aim, and the aim is on its side."""
  found = re.findall(r"^\| ([\w ]+) \| (\w+) \| (\w+) \| (at \w+) [\d.]+ \| (?:at \w+ )?([\d.]+) "
                     r"\|$", speed.__doc__, flags=re.MULTILINE)
  assert len(found) == 13
  for variant, metric, decoder, side, here in found:
    values = [row["value"] for row in published.summary("speed")
              if row["metric"] == metric and decoder in (row["attention"], "all")
              and variant in (row["variant"], "all with steps")]
    worst = max(values) if side == "at most" else min(values)
    digits = len(here.partition(".")[2])
    rounded = worst if digits else math.floor(worst)
    assert here == f"{rounded:.{digits}f}", (variant, metric)


def test_speeds_of_the_readme():
  rows = {(row["variant"], row["attention"], row["metric"]): row["value"]
          for row in published.summary("speed")}
  gpt2 = lambda name, metric="step_time_ratio": rows["gpt2_layer", name, metric]
  small = lambda name: " and ".join(f"{rows[decoder, name, 'step_time_to_mha']:.1f}"
                                    for decoder in ("d128_t64", "d128_t256"))
  medians = gpt2("damcha_prefix_stack", "step_time") / gpt2("flax", "step_time")
  prefix = ("damcha_prefix_stack", "damcha_prefix_generator")
  memory = max(rows["gpt2_t2048", name, "peak_memory_to_mha"] for name in prefix)
  cached = min(value for (_, _, metric), value in rows.items() if metric == "cache_speedup")
  missed = ("d128_t256", "damcha_prefix_stack")
  text = " ".join(TEXTS["README.md"].split())
  for ours in (
      "a step took {:.2f} of plain Flax's with stride 64, {:.2f} with the exact prefix for the whole "
      "stack ({:.2f} as the ratio of the two medians), {:.2f} with one for each layer and {:.2f} "
      "with MHA".format(gpt2("damcha_stride64"), gpt2(prefix[0]), medians, gpt2(prefix[1]),
                        gpt2("mha")),
      "of MHA's step DAMCHA's three were {:.2f}, {:.2f} and {:.2f}".format(
          *(gpt2(name, "step_time_to_mha") for name in ("damcha_stride64", *prefix))),
      f"the exact prefix needed {memory:.2f} times the memory of MHA",
      f"a cached token took 1/{math.floor(cached)} of the time of running the window again, or less",
      f"at 64 and 256 tokens {small(prefix[0])} times as long with the exact prefix for the whole "
      f"stack, {small(prefix[1])} times with one for each layer, and still "
      f"{small('damcha_stride64')} times with stride 64",
      "{:.2f} times MHA's step where at most 1.5 is wanted ({:.2f} of plain Flax's)".format(
          rows[*missed, "step_time_to_mha"], rows[*missed, "step_time_ratio"])):
    assert ours in text


def _gap(task, attention, variant, metric="gap_to_mha"):
  gap, half = (published.value("synthetic_cpu", task, attention, name, variant)
               for name in (metric, f"{metric}_ci95"))
  return f"{gap:+.3f} +- {half:.3f}"


def test_accuracies_on_the_synthetic_tasks():
  """Cells that are empty or name no task go on with the line before."""
  task = dimension = None
  found = re.findall(r"^\| *(?:(\w+), (\d+))? *\| ([\d.]+) \| ([\d.]+ \| [\d.]+ \| [\d.]+ \| \S+ "
                     r"\+- [\d.]+) \|$", TEXTS["synthetic.md"], flags=re.MULTILINE)
  assert len(found) == 8
  for *shape, entanglement, cells in found:
    task, dimension = shape if shape[0] else (task, dimension)
    variant = f"e{entanglement}_d{dimension}"
    accuracies = [f"{published.value('synthetic_cpu', task, name, 'accuracy', variant):.3f}"
                  for name in ("optimum", "mha", "damcha")]
    assert cells == " | ".join((*accuracies, _gap(task, "damcha", variant))), (task, variant)


def test_gaps_on_the_synthetic_tasks():
  found = re.findall(r"^\| `(\w+)` \| (.* \+- .*) \|$", TEXTS["synthetic.md"], flags=re.MULTILINE)
  assert len(found) == 14
  for attention, cells in found:
    assert cells == " | ".join(_gap(task, attention, f"e{entanglement}_d32")
                               for task in ("classification", "retrieval")
                               for entanglement in (0, 1)), attention


def test_what_is_said_of_the_synthetic_tasks():
  right = {(name, entanglement): published.value("synthetic_cpu", "classification", name,
                                                 "accuracy", f"e{entanglement}_d32")
           for name in ("mha", "damcha", "optimum") for entanglement in (0, 1)}
  assert f"{right['mha', 0]:.2f}" == f"{right['damcha', 0]:.2f}"
  assert ("both had {:.2f} right on the classification without entanglement, where the best is "
          "{:.2f}, and {:.2f} and {:.2f} with all of it".format(
              right["mha", 0], right["optimum", 0], right["mha", 1], right["damcha", 1])
          ) in " ".join(TEXTS["README.md"].split())
  slope = functools.partial(_gap, attention="damcha", variant="trend")
  sizes = {(row["dataset"], row["variant"], row["attention"]): row["value"]
           for row in published.summary("synthetic_cpu") if row["metric"] == "num_params"}
  furthest = max(abs(size / sizes[*cell, "mha"] - 1)
                 for (*cell, name), size in sizes.items() if name != "told")
  text = " ".join(TEXTS["synthetic.md"].split())
  for ours in (
      "the slope over entanglement is {} in the classification and {} in retrieval, that over "
      "doublings of D in the classification {}.".format(
          slope("classification", metric="gap_slope_entanglement"),
          slope("retrieval", metric="gap_slope_entanglement"),
          slope("classification", metric="gap_slope_log2_dimension")),
      f"by a gap of {_gap('retrieval', 'damcha', 'e0_d16')}, which",
      f"matched to within {furthest:.1%} of MHA's"):
    assert ours in text


def test_how_many_attentions_the_smallest_sizes_train():
  images, pairs, concepts, classes = (
      len(config.get_config("smoke").attentions.split(","))
      for config in (cifar10, wmt14, commongen, vit_s16))
  assert images == pairs == concepts
  assert (f"`:smoke` trains {images} attentions on images or texts and {classes} in image "
          "classification") in " ".join(TEXTS["README.md"].split())


def test_the_checkpoints_that_the_readme_looks_at_are_kept():
  """Those of the middle of training are not."""
  steps = re.search(r"experiments.analysis .*table4-cpu/cifar10/full --steps=(\S+)",
                    TEXTS["README.md"])[1]
  assert steps == f"0,{table4.get_config('cpu').cifar10.num_steps}"
