"""What documents say of results is what `results/` holds."""

import functools
import json
import math
import re

import pytest

from configs import speed
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


def _test_losses(column):
  """Of a column of the README's table, with the spread where there are several seeds."""
  folder, dataset = {"mix of texts": ("cpu", "mix"), "images": ("cifar10_cpu", "sample_images"),
                     "sentence pairs": ("wmt14_cpu", "sample_pairs"),
                     "concept sets": ("commongen_cpu", "sample_concepts")}[column]
  others = f"{folder}_others"
  rows = _rows(folder) | (_rows(others) if (ROOT / "results" / others).is_dir() else {})
  return {attention: f"{row['value']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] else "")
          for (data, attention, metric, variant), row in rows.items()
          if (data, metric, variant) == (dataset, "nats_per_token", None)}


def test_the_table_of_losses():
  table = re.search(r"^\| attention \|.*?\n\n", TEXTS["README.md"], flags=re.DOTALL | re.MULTILINE)
  header, _, *lines = ([cell.strip(" `") for cell in line.strip("|").split("|")]
                       for line in table[0].strip().splitlines())
  attentions = [line[0] for line in lines]
  for column, cells in zip(header[1:], list(zip(*lines))[1:], strict=True):
    losses = _test_losses(column)
    assert list(cells) == [losses.pop(attention, "–") for attention in attentions], column
    assert not losses or column == "mix of texts"  # where further variants are elsewhere


def test_what_is_said_of_the_mix():
  losses = _rows("cpu")
  interval = [losses["mix", "damcha", metric, None]["value"]
              for metric in ("nats_minus_mha", "nats_minus_mha_ci95")]
  names = ("mha", "dcmha", "damcha")
  bits = [losses["mix", name, "bits_per_byte", None]["value"] for name in names]
  sizes = [_num_params("cpu")[name] / 1e3 for name in names]
  text = " ".join(TEXTS["README.md"].split())
  for ours in ("behind MHA by {:.3f} ± {:.3f} nats".format(*interval),
               "{:.3f} for MHA, {:.3f} for DCMHA and {:.3f} for DAMCHA".format(*bits),
               "with {:.0f}k, {:.0f}k and {:.0f}k parameters".format(*sizes)):
    assert ours in text


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
      f"a standard error of {error:.1f} points",
      "on training images {:.1f}% and {:.1f}% top-1".format(
          of_split["mha"]["train"], of_split["damcha"]["train"])):
    assert ours in text


def _num_params(folder):
  return {row["attention"]: row["value"] for row in _summary(folder)
          if row["metric"] == "num_params"}


def test_how_far_parameters_are_matched():
  excess = {}
  for folder in ("cpu", "cifar10_cpu", "wmt14_cpu", "commongen_cpu"):
    others = {} if folder == "cpu" else _num_params(f"{folder}_others")
    sizes = _num_params(folder) | others
    for name, size in sizes.items():
      excess.setdefault(name, []).append(size / sizes["mha"] - 1)
  assert f"{max(excess.pop('authors_moa')):.0%} more" in " ".join(TEXTS["README.md"].split())
  furthest = max(abs(one) for several in excess.values() for one in several)
  assert f"within {furthest:.0%} of MHA's" in TEXTS["README.md"]


@pytest.mark.parametrize("text, keys", [
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


def _gap(task, attention, variant):
  gap, half = (_value("synthetic_cpu", task, attention, metric, variant)
               for metric in ("gap_to_mha", "gap_to_mha_ci95"))
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
