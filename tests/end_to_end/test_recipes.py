"""What docs/recipes.md says of runs at paper size is what the planner says."""

import importlib
import json
import re
import subprocess
import sys

import jax
import pytest

from damcha_jax.config import freeze
from damcha_jax.training.devices import KINDS, MFU_RANGE
from damcha_jax.training.plan import plan_run
from experiments import common
from tests import documents

ROWS = re.findall(r"^\| (`[^|]+`) \| (\w+) \| ([\d,]+) \| ([\d.e]+) \| ([^|]+) \|$",
                  documents.TEXTS["recipes.md"], flags=re.MULTILINE)
LOSSES = re.findall(r"^\| (\d+) \| (\d\.\d{5}) \| (\d\.\d{5}) \|$",
                    documents.TEXTS["recipes.md"], flags=re.MULTILINE)
OTHER_LOSSES = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d\.\d{5}) \| (\d\.\d{5}) \|$",
                          documents.TEXTS["recipes.md"], flags=re.MULTILINE)
MEMORY = re.findall(r"(\d+) GiB for\s`(\w+)`", documents.TEXTS["recipes.md"])
# Where the curves of a config are, and their metric, if not in the folder of its name.
CURVES = {"synthetic": ("synthetic_cpu/classification/d32/{}", "nats_per_query")}


def _minutes(text: str) -> float:
  """'1 h 23' or '25 min' or '8'."""
  hours, minutes = re.fullmatch(r"(?:(\d+) h )?(\d+)(?: min)?", text).groups()
  return 60 * int(hours or 0) + int(minutes)


@pytest.mark.families
@pytest.mark.parametrize("configs, attention, num_params, flops, times", ROWS)
def test_the_table_is_what_the_planner_says(configs, attention, num_params, flops, times):
  names = re.findall(r"`(\w+)`", configs)
  assert names
  for name in names:
    config = importlib.import_module(f"configs.{name}").get_config()
    config = freeze(config, common.CONFIG_CLASSES[config.experiment])
    plan = plan_run(config, attention, jax.devices()[:1])
    assert plan.num_params == int(num_params.replace(",", ""))
    assert f"{plan.flops_per_step * plan.num_steps:.2e}" == flops.replace("e", "e+")
    seconds = plan.step_seconds(KINDS["a100_80gb"], 8)
    for text, expected in zip(times.split(" to "), seconds, strict=True):
      assert _minutes(text) == pytest.approx(expected * plan.num_steps / 60, abs=0.6)


@pytest.mark.families
@pytest.mark.skipif(jax.__version__ < "0.12", reason="the document says what jax 0.12 needs")
@pytest.mark.parametrize("gibibytes, config", MEMORY)
def test_memory_is_what_the_planner_says(gibibytes, config):
  command = [sys.executable, "-m", "experiments.plan", f"--config=configs/{config}.py",
             "--config.attentions=mha", "--devices=a100_80gb-8"]
  output = subprocess.run(command, cwd=documents.ROOT, check=True, text=True,
                          capture_output=True).stdout
  planned = re.search(r"^mha  .* ([\d.]+) GiB  ", output, flags=re.MULTILINE)[1]  # in all
  assert f"{float(planned):.0f}" == gibibytes, output


def test_the_table_covers_every_experiment_that_trains():
  assert len(ROWS) > 10 and MFU_RANGE == (0.15, 0.5)
  assert {config for _, config in MEMORY} == {"mix", "cifar10", "wmt14", "vit_s16"}
  assert {name for configs, *_ in ROWS for name in re.findall(r"`(\w+)`", configs)} == {
      "mix", "enwik8", "text8", "cifar10", "cifar100", "wmt14", "commongen", "vit_s16"}


def test_the_sum_for_table_3_is_that_of_its_runs():
  flops = {name: float(flops) for configs, attention, _, flops, _ in ROWS if attention == "damcha"
           for name in re.findall(r"`(\w+)`", configs)}
  total = 5 * sum(flops[name] for name in ("cifar10", "cifar100", "wmt14", "commongen"))
  assert f"{total:.1e} FLOP in all".replace("e+", "e") in documents.TEXTS["recipes.md"]


def test_the_first_losses_are_the_published_ones():
  curve = (documents.ROOT / "results/mix_cpu/first_100_steps.csv").read_text(encoding="utf-8")
  assert len(LOSSES) == 4 and {",".join(row) for row in LOSSES} <= set(curve.splitlines())


@pytest.mark.parametrize("config, step, mha, damcha", OTHER_LOSSES)
def test_the_first_losses_of_other_experiments_are_the_published_ones(config, step, mha, damcha):
  folder, metric = CURVES.get(config, (f"{config}_cpu/{{}}/seed0", "loss"))
  for attention, expected in (("mha", mha), ("damcha", damcha)):
    path = documents.ROOT / "results" / folder.format(attention) / "metrics.jsonl"
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    (loss,) = [one[metric] for one in records if (one["split"], one["step"]) == ("train", int(step))]
    assert f"{loss:.5f}" == expected, attention


def test_every_experiment_that_trains_has_its_first_losses():
  assert {config for config, *_ in OTHER_LOSSES} == {
      "cifar10", "wmt14", "commongen", "vit_s16", "synthetic"}
