"""Results that no run made, for tests of what reads them."""

import json
from pathlib import Path


def row(attention: str, metric: str, value: float | None, **fields) -> dict:
  split = fields.get("split", "test")
  return {"name": f"{attention}/{split}", "metric": metric, "value": value, "unit": "1",
          "seeds": [0, 1], "paper": None, "attention": attention, "dataset": "mix",
          "split": split, "variant": None, "spread": 0.01, "comparable": False, **fields}


def write(root: Path, experiment: str, config: str, rows: list[dict], /, **settings) -> Path:
  """A folder with a summary; `settings` are values of its config.json."""
  folder = root / config.replace(":", "-")
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(settings))
  (folder / "summary.json").write_text(json.dumps(
      {"experiment": experiment, "config": config, "status": "ok", "rows": rows}))
  return folder


def table5(attention: str, value: float, comparable: bool = True, dataset: str = "mix") -> dict:
  """A row of Table 5's losses."""
  return row(attention, "nats_per_token", value, split="validation", dataset=dataset, paper=1.0,
             comparable=comparable)
