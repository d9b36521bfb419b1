"""What `results/` holds, for tests of what documents say of it."""

import functools
import json

from tests.documents import ROOT


@functools.cache
def summary(folder):
  path = ROOT / "results" / folder / "summary.json"
  return json.loads(path.read_text(encoding="utf-8"))["rows"]


@functools.cache
def rows(folder):
  return {(row["dataset"], row["attention"], row["metric"], row["variant"]): row
          for row in summary(folder) if row["split"] == "test"}


def value(folder, *key):
  return rows(folder)[key]["value"]


def num_params(folder, dataset=None):
  return {row["attention"]: row["value"] for row in summary(folder)
          if row["metric"] == "num_params" and dataset in (row["dataset"], None)}
