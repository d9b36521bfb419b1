"""What documents say of results is what `results/` holds."""

import functools
import json
import math
import re

import pytest

from configs import cifar10
from configs import commongen
from configs import speed
from configs import table4
from configs import vit_s16
from configs import wmt14
from tests.documents import ROOT, TEXTS


@functools.cache
def _summary(folder):
  path = ROOT / "results" / folder / "summary.json"
  return json.loads(path.read_text(encoding="utf-8"))["rows"]


@functools.cache
def _rows(folder):
  return {(row["dataset"], row["attention"], row["metric"], row["variant"]): row
          for row in _summary(folder) if row["split"] == "test"}


def _value(folder, *key):
  return _rows(folder)[key]["value"]


COLUMNS = {"mix of texts": "mix", "images": "images", "sentence pairs": "pairs",
           "concept sets": "concepts"}


def _losses(dataset):
  """By attention, with the spread where there are several seeds."""
  return {attention: f"{row['value']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] else "")
          for (data, attention, metric, variant), row in _rows("cpu").items()
          if (data, metric, variant) == (dataset, "nats_per_token", None)}


def test_the_table_of_losses():
  table = re.search(r"^\| attention \|.*?\n\n", TEXTS["README.md"], flags=re.DOTALL | re.MULTILINE)
  header, _, *lines = ([cell.strip(" `") for cell in line.strip("|").split("|")]
                       for line in table[0].strip().splitlines())
  attentions = [line[0] for line in lines]
  assert header[1:] == list(COLUMNS)
  for dataset, cells in zip(COLUMNS.values(), list(zip(*lines))[1:], strict=True):
    losses = _losses(dataset)
    assert list(cells) == [losses.get(attention, "–") for attention in attentions], dataset
    assert set(losses) <= set(attentions) or dataset == "mix"  # whose variants are in docs/study.md


def test_what_is_said_of_the_study():
  losses = _rows("cpu")
  less = lambda name, other, dataset, sign="+": " ± ".join(
      (f"{losses[dataset, name, f'nats_minus_{other}', None]['value']:{sign}.3f}",
       f"{losses[dataset, name, f'nats_minus_{other}_ci95', None]['value']:.3f}"))
  sets = list(COLUMNS.values())
  names = ("mha", "dcmha", "damcha")
  bits = [losses["mix", name, "bits_per_byte", None]["value"] for name in names]
  sizes = [_num_params("cpu", "mix")[name] / 1e3 for name in names]
  adaptivity = {row["dataset"]: row for row in _summary("cpu") if (
      row["attention"], row["metric"]) == ("damcha_full_width", "adaptivity")}
  with_spread = lambda row: f"{row['value']:.2f} ± {row['spread']:.2f}"
  text = " ".join(TEXTS["README.md"].split())
  for ours in (
      "ends at {:.0e} on the mix, and on the others at {}, {} and {} (".format(
          adaptivity[sets[0]]["value"], *(with_spread(adaptivity[one]) for one in sets[1:])),
      "{} on the mix, {} on images, {} on pairs and {} on concept sets".format(
          *(less("damcha", "mha", dataset) for dataset in sets)),
      "{:.3f} for MHA, {:.3f} for DCMHA and {:.3f} for DAMCHA".format(*bits),
      "with {:.0f}k, {:.0f}k and {:.0f}k parameters".format(*sizes),
      "ahead of DAMCHA by {} on the mix, {} on images and {} on pairs".format(
          *(less("damcha_full_width", "damcha", dataset).lstrip("-") for dataset in sets[:3])),
      "(in the order of the table): {}, {}, {} and {}".format(
          *(less("damcha_full_width", "mha", dataset) for dataset in sets))):
    assert ours in text
  larger = _rows("cpu_dictionary")
  for name, words in (("dictionary", "on a dictionary"),
                      ("dictionary_text8", "on the same cleaned as text8"),
                      ("dictionary_mix", "on the mix of both")):
    value, half = (larger[name, "damcha", f"nats_minus_mha{end}", None]["value"]
                   for end in ("", "_ci95"))
    assert f"{value:+.3f} ± {half:.3f} {words}" in text
  more = lambda name, other: "{:+.3f} ± {:.3f}".format(
      *(_value("cpu_more_pairs", "more_pairs", name, f"nats_minus_{other}{end}", None)
        for end in ("", "_ci95")))
  assert f"it is {more('damcha', 'mha')}; less DCMHA, {more('damcha', 'dcmha')}." in text
  assert f"on pairs ({more('mma', 'mha')} with more of them)" in text


def test_who_uses_the_context_at_full_width():
  best = {path: json.loads(path.read_text(encoding="utf-8"))["best"]["metrics"]
          for path in (ROOT / "results" / "cpu").glob("*/damcha_full_width/*/seed*/result.json")}
  adaptive = {path for path, metrics in best.items() if metrics["diagnostics"]["adaptivity"] > 0.1}
  (one,) = adaptive
  of_set = [path for path in best if path.parts[:-2] == one.parts[:-2]]
  assert len(of_set) == 3 and one.parts[-5] == "concepts"
  assert max(of_set, key=lambda path: best[path]["test"]["nats_per_token"]) == one


def _verdict(name, dataset):
  """Whether an attention is told from MHA, and on which side."""
  value, half = (_value("cpu", dataset, name, f"nats_minus_mha{end}", None) for end in ("", "_ci95"))
  return "ahead" if value < -half else "behind" if value > half else "-"


def test_what_is_said_of_every_attention():
  sets = list(COLUMNS.values())
  verdicts = {name: [_verdict(name, dataset) for dataset in sets]
              for name in ("damcha", "dcmha", "colmha", "moa", "mma")}
  assert verdicts == {
      "damcha": ["behind", "behind", "behind", "ahead"], "dcmha": ["behind", "-", "behind", "-"],
      "colmha": ["-", "-", "ahead", "ahead"], "moa": ["behind"] * 4, "mma": ["-", "-", "ahead", "-"]}
  loss = lambda dataset, name: _value("cpu", dataset, name, "nats_per_token", None)
  names = {name for data, name, metric, _ in _rows("cpu") if metric == "nats_per_token"
           and data == "images"}
  for dataset in sets:
    assert min(names, key=lambda name, data=dataset: loss(data, name)) != "damcha"
  assert loss("concepts", "colmha") < loss("concepts", "damcha") < loss("concepts", "mha")
  less = lambda name, dataset: "{:+.3f} ± {:.3f}".format(
      *(_value("cpu", dataset, name, f"nats_minus_mha{end}", None) for end in ("", "_ci95")))
  own_rate = _value("cifar10_cpu_others", "sample_images", "tha", "nats_per_token", None)
  first = json.loads((ROOT / "results/cpu/images/mma/mma/seed0/result.json").read_text())["best"][
      "metrics"]["test"]["nats_per_token"]
  assert own_rate < loss("images", "tha") and first < min(loss("images", name) for name in names)
  text = " ".join(TEXTS["README.md"].split())
  for ours in (f"see their neighbours or themselves alone, {less('mma', 'pairs')} on pairs",
               f"`colmha` {less('colmha', 'concepts')} on concept sets and "
               f"{less('colmha', 'pairs')} on pairs",
               f"on images with the config's ({own_rate:.3f}, `results/cifar10_cpu_others`)",
               f"`mma`'s first seed on images alone, {first:.3f}, would have made it the best"):
    assert ours in text


def test_what_tuning_changed():
  text = " ".join(TEXTS["README.md"].split())
  differences = {}
  for dataset, untuned, base, factor, words in (
      ("images", "cifar10_cpu", cifar10, 8, "eight times the config's rate, MHA gains"),
      ("concepts", "commongen_cpu", commongen, 2, "at twice theirs, MHA gains")):
    rates = {row["attention"]: row["value"] for row in _summary("cpu")
             if (row["dataset"], row["metric"]) == (dataset, "learning_rate")}
    assert rates["mha"] == rates["damcha"] == factor * base.get_config("cpu").optimizer.learning_rate
    before, after = ({name: _value(folder, name_of_data, name, "nats_per_token", None)
                      for name in ("mha", "damcha", "dcmha")}
                     for folder, name_of_data in ((untuned, f"sample_{dataset}"), ("cpu", dataset)))
    gains = {name: before[name] - after[name] for name in before}
    assert f"{words} {gains['mha']:.3f} and DAMCHA {gains['damcha']:.3f} (" in text
    differences[dataset] = [losses["damcha"] - losses["mha"] for losses in (before, after)]
    assert dataset != "images" or gains["dcmha"] < 0  # "worse than untuned"
  assert "the difference between them {:.1f} times as large".format(
      differences["images"][1] / differences["images"][0]) in text
  assert differences["concepts"][0] > 0 > differences["concepts"][1]  # "turns it round"


def test_how_long_the_study_trained():
  paths = (path for path in (ROOT / "results" / "cpu").rglob("result.json")
           if "shift" not in path.parts)  # which evaluates runs once more
  seconds = sum(json.loads(path.read_text(encoding="utf-8"))["train_seconds"] for path in paths)
  assert f"records add up to {seconds / 3600:.1f}, on a shared machine" in " ".join(
      TEXTS["README.md"].split())


def test_what_gzip_makes_of_the_mix():
  """And that MHA and DAMCHA end below it, as they should of a right installation."""
  lines = (ROOT / "damcha_jax" / "data" / "samples" / "README.md").read_text(encoding="utf-8")
  pooled = {}
  for split in ("test", "validation"):
    parts = [(int(size.replace(",", "")), float(bits)) for size, bits in re.findall(
        rf"^\| `sample_text8?` \| {split} \| ([\d,]+) \| `\w+` \| ([\d.]+) \|$", lines,
        flags=re.MULTILINE)]
    assert len(parts) == 2
    pooled[split] = sum(size * bits for size, bits in parts) / sum(size for size, _ in parts)
  assert ("{test:.2f} bits per byte on the test part of `mix` and {validation:.2f} on validation"
          .format(**pooled)) in " ".join(TEXTS["recipes.md"].split())
  for name in ("mha", "damcha"):
    assert _value("cpu", "mix", name, "bits_per_byte", None) < pooled["test"]


def test_which_runs_fail():
  """A seed whose loss is far above what the others of its attention have."""
  failed = {}
  for path in (ROOT / "results" / "cpu").glob("*/*/*/seed*/result.json"):
    dataset, variant = path.parts[-5:-3]
    loss = json.loads(path.read_text(encoding="utf-8"))["best"]["metrics"]["test"]["nats_per_token"]
    failed.setdefault((dataset, variant), []).append(loss)
  failed = {cell: sum(loss > min(losses) + 0.25 for loss in losses)
            for cell, losses in failed.items() if len(losses) == 3}
  assert {cell: number for cell, number in failed.items() if number} == {
      ("images", "dcmha"): 1, ("images", "damcha_robust"): 2, ("mix", "tha"): 1,
      ("concepts", "damcha_robust"): 1, ("concepts", "damcha_full_width"): 1, ("concepts", "tha"): 1}


def test_what_is_said_of_image_classification():
  top = {(row["attention"], row["split"], row["metric"]): row["value"] for row in _summary(
      "vit_s16_cpu") if row["variant"] == "epoch20"}
  of_split = {name: {split: top[name, split, "top1"] for split in ("validation", "train")}
              for name in ("mha", "damcha")}
  mha, damcha = of_split["mha"]["validation"], of_split["damcha"]["validation"]
  error = max(math.sqrt(value * (100 - value) / 365) for value in (mha, damcha))
  sizes = [_num_params("vit_s16_cpu")[name] / 1e3 for name in ("mha", "damcha")]
  text = " ".join(TEXTS["README.md"].split())
  for ours in (
      "{:.0f}k and {:.0f}k parameters, MHA had".format(*sizes),
      f"MHA had {mha:.1f}% top-1 and {top['mha', 'validation', 'top5']:.1f}% top-5 on 365 images",
      f"DAMCHA {damcha:.1f}% and {top['damcha', 'validation', 'top5']:.1f}%",
      f"a standard error of up to {error:.1f} points",
      "on training images {:.1f}% and {:.1f}% top-1".format(
          of_split["mha"]["train"], of_split["damcha"]["train"])):
    assert ours in text


def _num_params(folder, dataset=None):
  return {row["attention"]: row["value"] for row in _summary(folder)
          if row["metric"] == "num_params" and dataset in (row["dataset"], None)}


def test_how_far_parameters_are_matched():
  excess = {}
  table = re.findall(r"^\| `(\w+)` \|", TEXTS["README.md"], flags=re.MULTILINE)
  for dataset in COLUMNS.values():
    sizes = _num_params("cpu", dataset)
    for name in set(sizes) & set(table):
      excess[dataset, name] = sizes[name] / sizes["mha"] - 1
  furthest = max(map(abs, excess.values()))
  assert f"within {furthest:.0%} of MHA's" in TEXTS["README.md"]


def test_what_is_said_of_blocks_that_are_left_out():
  losses = {row["variant"]: row["value"] for row in _summary("table3_cpu")
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
  ours = text.format(*(_value("theory", *key) for key in keys))
  assert ours in " ".join(TEXTS["theory.md"].split())


def test_sizes_and_ranges_of_the_theory():
  value = lambda *key: [row["value"] for (*given, variant), row in _rows("theory").items()
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
    values = [row["value"] for row in _summary("speed")
              if row["metric"] == metric and decoder in (row["attention"], "all")
              and variant in (row["variant"], "all with steps")]
    worst = max(values) if side == "at most" else min(values)
    digits = len(here.partition(".")[2])
    rounded = worst if digits else math.floor(worst)
    assert here == f"{rounded:.{digits}f}", (variant, metric)


def test_speeds_of_the_readme():
  rows = {(row["variant"], row["attention"], row["metric"]): row["value"]
          for row in _summary("speed")}
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
  gap, half = (_value("synthetic_cpu", task, attention, name, variant)
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
    accuracies = [f"{_value('synthetic_cpu', task, name, 'accuracy', variant):.3f}"
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
  right = {(name, entanglement): _value("synthetic_cpu", "classification", name, "accuracy",
                                        f"e{entanglement}_d32")
           for name in ("mha", "damcha", "optimum") for entanglement in (0, 1)}
  assert f"{right['mha', 0]:.2f}" == f"{right['damcha', 0]:.2f}"
  assert ("both had {:.2f} right on the classification without entanglement, where the best is "
          "{:.2f}, and {:.2f} and {:.2f} with all of it".format(
              right["mha", 0], right["optimum", 0], right["mha", 1], right["damcha", 1])
          ) in " ".join(TEXTS["README.md"].split())
  slope = functools.partial(_gap, attention="damcha", variant="trend")
  sizes = {(row["dataset"], row["variant"], row["attention"]): row["value"]
           for row in _summary("synthetic_cpu") if row["metric"] == "num_params"}
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
