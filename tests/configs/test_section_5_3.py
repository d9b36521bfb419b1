"""The ablations' configs are Tables 3 and 4, and each variant changes what it is named for."""

import dataclasses
import importlib
import json

import pytest

from configs import ablations
from configs import generation
from configs import table3
from configs import table4
from damcha_jax.config import AblationsConfig, ConfigError, freeze, to_dict
from damcha_jax.config.ablations import COMMON, DATASETS

TABLES = {"table3": table3, "table4": table4}


def _frozen(name, size="paper"):
  return freeze(TABLES[name].get_config(size), AblationsConfig)


def _damcha(config, variant, dataset="cifar10", inference="full"):
  return config.family_config(dataset, variant, inference).damcha


def test_table_3_is_five_depths_with_three_kinds_of_inference_and_a_control_on_four_sets():
  config = _frozen("table3")
  assert config.dataset_names == tuple(DATASETS) and len(config.cells) == 4 * 5 * (3 + 1)
  for dataset in DATASETS:
    for layers in (1, 3, 5, 7, 9):  # "with 1, 3, 5, 7, 9 hidden layers"
      damcha = _damcha(config, f"depth{layers}", dataset)
      assert (damcha.widths, damcha.parameterization) == ((20,) * layers, "blocks")
  assert {inference for _, _, inference in config.cells} == {
      "full", "diagonal", "off_diagonal", "shifted"}
  assert _damcha(config, "depth3", inference="diagonal") == dataclasses.replace(
      _damcha(config, "depth3"), block_ablation_eval="diagonal")


def test_depth_can_count_linear_layers_as_5_1_does():
  config = dataclasses.replace(_frozen("table3"), depth_reading="linear")
  assert [len(_damcha(config, f"depth{layers}").widths) for layers in (1, 9)] == [0, 8]
  unchanged = importlib.import_module("configs.cifar10").get_config().damcha
  assert _damcha(config, "depth9").widths == unchanged.widths


def test_table_4_changes_one_thing_at_a_time():
  config = _frozen("table4")
  full = _damcha(config, "full")
  assert (full.metric, full.sharing, full.preset) == ("generated", "generator", "paper")
  changes = {"static": {"metric": "static"}, "unshared": {"sharing": "none"}, "full": {},
             "rowsum": {"parameterization": "rowsum"}, "robust": {"preset": "robust"}}
  assert config.variant_names == tuple(changes) and len(config.cells) == 4 * 5
  for variant, change in changes.items():
    assert _damcha(config, variant) == dataclasses.replace(full, **change)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dataset", DATASETS)
def test_a_section_is_the_config_of_its_own_file(name, dataset):
  own = importlib.import_module(f"configs.{dataset}").get_config().to_dict()
  section = TABLES[name].get_config()[dataset].to_dict()
  assert set(own) - set(section) == set(COMMON) == set(ablations.COMMON)
  own["damcha"]["parameterization"] = "blocks"
  assert section == {key: value for key, value in own.items() if key not in COMMON}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", generation.SIZES)
def test_every_size_freezes_and_survives_json(name, size):
  config = _frozen(name, size)
  again = freeze(json.loads(json.dumps(to_dict(config))), AblationsConfig)
  assert (config.name, config.size) == (name, size) and again.cells == config.cells
  for cell in config.cells:
    assert again.family_config(*cell) == config.family_config(*cell)
    own = config.family_config(*cell)
    assert own.dataset.startswith("sample_") == (size in ("cpu", "smoke"))
    assert (own.attentions, own.seeds, own.size) == ("damcha", (0,), size)


def test_rowsum_has_no_blocks_to_leave_out():
  config = dataclasses.replace(_frozen("table4"), inference="full,diagonal")
  assert [cell for cell in config.cells if "rowsum" in cell] == [
      (dataset, "rowsum", "full") for dataset in DATASETS]


@pytest.mark.parametrize("change, message", [
    ({"datasets": "cifar10,mnist"}, "unknown entry 'mnist' in config key 'datasets'; choose from"),
    ({"variants": "depth0"}, "unknown entry 'depth0' in config key 'variants'; choose from full,"),
    ({"variants": "full,full"}, "config key 'variants' names an entry twice: full,full"),
    ({"inference": "diagonal"}, "config key 'inference' must begin with 'full'"),
    ({"inference": "full,upper"}, "unknown entry 'upper' in config key 'inference'"),
    ({"depth_reading": "both"}, "'depth_reading' must be one of 'hidden', 'linear', not 'both'"),
    ({"cifar10": {"seeds": (1,)}}, "config key 'cifar10.seeds' has no effect; use 'seeds'"),
    ({"cifar10": {"num_step": 1}},
     "unknown config key 'cifar10.num_step'; the nearest valid key is 'cifar10.num_steps'"),
    ({"cifar10": {"num_steps": "1"}}, "config key 'cifar10.num_steps' must be int"),
    ({"cifar10": {"batch_size": 0}}, "in section 'cifar10': config key 'batch_size' must be"),
    ({"cifar10": 3}, "config key 'cifar10' must be dict"),
    ({"seeds": (-1,)}, "'seeds' must hold numbers from 0"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = {**to_dict(_frozen("table3", "smoke")), "datasets": "cifar10"}
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values, AblationsConfig)
  assert message in str(error.value)


def test_a_depth_needs_a_width_and_left_out_blocks_need_blocks():
  values = {**to_dict(_frozen("table3", "smoke")), "datasets": "cifar10"}
  values["cifar10"]["damcha"]["widths"] = ()
  with pytest.raises(ConfigError, match="'cifar10.damcha.widths' is empty; the width of depth1"):
    freeze(values, AblationsConfig)
  values["cifar10"]["damcha"].update(widths=(4,), parameterization="rowsum")
  with pytest.raises(ConfigError, match="keeps no single blocks to ablate; use 'blocks'"):
    freeze(values, AblationsConfig)
