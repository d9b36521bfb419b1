"""What the README says of the study is what `results/` holds."""

import json
import re

from configs import cifar10
from configs import commongen
from tests import published
from tests.documents import ROOT, TEXTS


COLUMNS = {"mix of texts": "mix", "images": "images", "sentence pairs": "pairs",
           "concept sets": "concepts"}


def _losses(dataset):
  """By attention, with the spread where there are several seeds."""
  return {attention: f"{row['value']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] else "")
          for (data, attention, metric, variant), row in published.rows("cpu").items()
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
  losses = published.rows("cpu")
  less = lambda name, other, dataset, sign="+": " ± ".join(
      (f"{losses[dataset, name, f'nats_minus_{other}', None]['value']:{sign}.3f}",
       f"{losses[dataset, name, f'nats_minus_{other}_ci95', None]['value']:.3f}"))
  sets = list(COLUMNS.values())
  names = ("mha", "dcmha", "damcha")
  bits = [losses["mix", name, "bits_per_byte", None]["value"] for name in names]
  sizes = [published.num_params("cpu", "mix")[name] / 1e3 for name in names]
  adaptivity = {row["dataset"]: row for row in published.summary("cpu") if (
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
  larger = published.rows("cpu_dictionary")
  for name, words in (("dictionary", "on a dictionary"),
                      ("dictionary_text8", "on the same cleaned as text8"),
                      ("dictionary_mix", "on the mix of both")):
    value, half = (larger[name, "damcha", f"nats_minus_mha{end}", None]["value"]
                   for end in ("", "_ci95"))
    assert f"{value:+.3f} ± {half:.3f} {words}" in text
  sets_of_text = [
      "{:+.3f} ± {:.3f}".format(*(larger[name, "damcha", f"nats_minus_dcmha{end}", None]["value"]
                                  for end in ("", "_ci95")))
      for name in ("dictionary", "dictionary_text8", "dictionary_mix")]
  assert "; less DCMHA, {}, {} and {}. With".format(*sets_of_text) in text
  more = lambda name, other: "{:+.3f} ± {:.3f}".format(
      *(published.value("cpu_more_pairs", "more_pairs", name, f"nats_minus_{other}{end}", None)
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
  value, half = (published.value("cpu", dataset, name, f"nats_minus_mha{end}", None)
                 for end in ("", "_ci95"))
  return "ahead" if value < -half else "behind" if value > half else "-"


def test_what_is_said_of_every_attention():
  sets = list(COLUMNS.values())
  verdicts = {name: [_verdict(name, dataset) for dataset in sets]
              for name in ("damcha", "dcmha", "tha", "colmha", "moa", "mma")}
  assert verdicts == {
      "damcha": ["behind", "behind", "behind", "ahead"], "dcmha": ["behind", "-", "behind", "-"],
      "tha": ["-", "-", "behind", "behind"],
      "colmha": ["-", "-", "ahead", "ahead"], "moa": ["behind"] * 4, "mma": ["-", "-", "ahead", "-"]}
  loss = lambda dataset, name: published.value("cpu", dataset, name, "nats_per_token", None)
  names = {name for data, name, metric, _ in published.rows("cpu") if metric == "nats_per_token"
           and data == "images"}
  for dataset in sets:
    assert min(names, key=lambda name, data=dataset: loss(data, name)) != "damcha"
  assert loss("concepts", "colmha") < loss("concepts", "damcha") < loss("concepts", "mha")
  less = lambda name, dataset: "{:+.3f} ± {:.3f}".format(
      *(published.value("cpu", dataset, name, f"nats_minus_mha{end}", None) for end in ("", "_ci95")))
  own_rate = published.value("cifar10_cpu_others", "sample_images", "tha", "nats_per_token", None)
  first, of_tha = (json.loads((ROOT / f"results/cpu/images/{name}/{name}/seed0/result.json").read_text())
                   ["best"]["metrics"]["test"]["nats_per_token"] for name in ("mma", "tha"))
  assert first < min(loss("images", name) for name in names)
  text = " ".join(TEXTS["README.md"].split())
  for ours in (f"see their neighbours or themselves alone, {less('mma', 'pairs')} on pairs",
               f"`colmha` {less('colmha', 'concepts')} on concept sets and "
               f"{less('colmha', 'pairs')} on pairs",
               f"its first seed gains {of_tha - own_rate:.3f} at the config's ({own_rate:.3f}, `results/",
               f"`mma`'s first seed on images alone, {first:.3f}, would have made it the best"):
    assert ours in text


def test_what_tuning_changed():
  text = " ".join(TEXTS["README.md"].split())
  differences = {}
  for dataset, untuned, base, factor, words in (
      ("images", "cifar10_cpu", cifar10, 8, "eight times the config's rate, MHA gains"),
      ("concepts", "commongen_cpu", commongen, 2, "at twice theirs, MHA gains")):
    rates = {row["attention"]: row["value"] for row in published.summary("cpu")
             if (row["dataset"], row["metric"]) == (dataset, "learning_rate")}
    assert rates["mha"] == rates["damcha"] == factor * base.get_config("cpu").optimizer.learning_rate
    before, after = ({name: published.value(folder, name_of_data, name, "nats_per_token", None)
                      for name in ("mha", "damcha", "dcmha")}
                     for folder, name_of_data in ((untuned, f"sample_{dataset}"), ("cpu", dataset)))
    gains = {name: before[name] - after[name] for name in before}
    assert f"{words} {gains['mha']:.3f} and DAMCHA {gains['damcha']:.3f} (" in text
    differences[dataset] = [losses["damcha"] - losses["mha"] for losses in (before, after)]
    assert dataset != "images" or gains["dcmha"] < 0  # "worse than untuned"
  assert "the difference between them {:.1f} times as large".format(
      differences["images"][1] / differences["images"][0]) in text
  assert differences["concepts"][0] > 0 > differences["concepts"][1]  # "reverses their order"


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
    assert published.value("cpu", "mix", name, "bits_per_byte", None) < pooled["test"]


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


def test_how_far_parameters_are_matched():
  excess = {}
  table = re.findall(r"^\| `(\w+)` \|", TEXTS["README.md"], flags=re.MULTILINE)
  for dataset in COLUMNS.values():
    sizes = published.num_params("cpu", dataset)
    for name in set(sizes) & set(table):
      excess[dataset, name] = sizes[name] / sizes["mha"] - 1
  furthest = max(map(abs, excess.values()))
  assert f"within {furthest:.0%} of MHA's" in TEXTS["README.md"]


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
FIRST_SECTIONS = r"Abstract|Section 1|Section 3(?:\.\d)?"


def test_the_table_of_claims():
  claims = TEXTS["claims.md"]
  counted = [sum(map(int, re.findall(rf"[ \n](\d+) {what}", claims.partition("\nAll claims")[0])))
             for what in ("claims:", "inconsistent", "needs", "reproduced", "not", "holds", "undecided")]
  assert ("Of the paper's {} claims that can be tested, its own tables contradict {} and only its own "
          "sizes decide {}; of the others {} are reproduced, {} are not, {} hold under a condition and "
          "{} are undecided.".format(*counted) in " ".join(TEXTS["README.md"].split()))
  theirs = re.findall(rf"^\| (\d+)\. (?:{FIRST_SECTIONS})(?:, .*?)? \| .*? \| (.*?) \|$", claims,
                      flags=re.MULTILINE)
  ours = re.findall(r"^\| \[(\d+)\]\(docs/claims.md#(.*?)\) \| .*? \| (.*?) \| (.*?) \|$",
                    TEXTS["README.md"], flags=re.MULTILINE)
  assert [row[0] for row in ours] == [number for number, _ in theirs]
  for (number, anchor, status, why), (_, verdict) in zip(ours, theirs, strict=True):
    assert verdict.startswith(status.removesuffix("a condition")), number
    heading, section = re.search(rf"^### (Claim {number}: .*?)$(.*?)(?=^### |\Z)", claims,
                                 flags=re.DOTALL | re.MULTILINE).groups()
    assert anchor == re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    known = [float(figure) for figure in NUMBER.findall(section)]
    for stated in NUMBER.findall(re.sub("Section 5.1|width 128|GPT-2", "", why)):
      digits = len(stated.partition(".")[2])
      assert any(f"{figure:.{digits}f}" == stated for figure in known), (number, stated)
