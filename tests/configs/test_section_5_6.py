"""The synthetic study's config says what Section 5.6 does, and refuses what cannot be."""

import dataclasses
import json

import pytest

from configs import synthetic
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError, freeze, to_dict
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.models.lookup import DAMCHA_VARIANTS, TOLD, matched_mlp_features, num_params
from damcha_jax.training.synthetic import synthetic_task


def _frozen(size="paper"):
  return freeze(synthetic.get_config(size), SyntheticConfig)


def test_it_is_two_tasks_over_entanglement_and_dimension_with_every_attention():
  config = _frozen()
  assert config.task_names == ("classification", "retrieval")
  assert set(config.attention_names) <= {*ATTENTIONS, *DAMCHA_VARIANTS, TOLD}
  assert len(config.attention_names) == 12 + len(DAMCHA_VARIANTS) + 1
  assert len(config.entanglements) > 3 and len(config.dimensions) > 3 and len(config.seeds) >= 5
  assert (config.damcha.form, config.damcha.preset, len(config.damcha.widths)) == (
      "head_slice", "paper", 8)  # 5.1: a 9-layer MLP
  assert config.entanglements_at(config.dimension) == config.entanglements
  assert config.entanglements_at(config.dimensions[0]) == (0.0, 1.0)


def test_minutes_on_two_cores_keep_the_attentions_and_five_seeds():
  config = _frozen("cpu")
  assert config.attention_names == _frozen().attention_names and len(config.seeds) == 5
  assert config.entanglements[0] == 0.0 and config.entanglements[-1] == 1.0


@pytest.mark.parametrize("size", synthetic.SIZES)
def test_every_size_freezes_and_survives_json(size):
  config = _frozen(size)
  assert (config.name, config.size, config.experiment) == ("synthetic", size, "synthetic")
  assert freeze(json.loads(json.dumps(to_dict(config))), SyntheticConfig) == config


def test_an_unknown_size_is_refused():
  with pytest.raises(ValueError, match="unknown size 'huge'; choose one of paper, cpu, smoke"):
    synthetic.get_config("huge")


@pytest.mark.parametrize("task", ["classification", "retrieval"])
@pytest.mark.parametrize("attention", [*ATTENTIONS, *DAMCHA_VARIANTS])
def test_models_have_the_parameters_of_mha_to_one_hidden_unit(task, attention):
  config = _frozen("cpu")
  hidden = matched_mlp_features(config, task, 16, attention)
  count = lambda name, hidden: num_params(config, task, 16, name, hidden)
  unit = count("mha", 2) - count("mha", 1)
  assert hidden >= config.model.mlp_features // 4
  assert abs(count(attention, hidden) - count("mha", config.model.mlp_features)) <= unit / 2


@pytest.mark.parametrize("change, message", [
    ({"tasks": "classification,sorting"}, "unknown task 'sorting' in config key 'tasks'; choose"),
    ({"attentions": "mha,mha"}, "'attentions' must name at least one entry and none twice"),
    ({"seeds": []}, "config key 'seeds' must name at least one entry"),
    ({"seeds": [-1]}, "'seeds' must hold numbers from 0"),
    ({"entanglements": [0.5, 1.0]}, "'entanglements' must ascend from 0, the control, to at most"),
    ({"entanglements": [0.0, 2.0]}, "'entanglements' must ascend from 0, the control, to at most"),
    ({"dimensions": [16]}, "'dimensions' must ascend and hold dimension=32"),
    ({"num_steps": 0}, "config key 'num_steps' is 0; it must be positive"),
    ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm=1.0 would make seeds"),
    ({"damcha": {"block_ablation_eval": "diagonal"}}, "this experiment ablates no blocks"),
    ({"retrieval": {"num_item": 3}}, "unknown config key 'retrieval.num_item'; the nearest valid "
     "key is 'retrieval.num_items'"),
    ({"retrieval": {"separation": 0.0}}, "'retrieval.separation' is 0.0; it must be positive"),
    ({"retrieval": {"separation": float("inf")}}, "'retrieval.separation' is inf; it must be"),
    ({"entanglements": [0.0, 0.5, 0.50000001]}, "'entanglements' must ascend from 0"),
    ({"checkpoint": {"keep_best": -1}}, "checkpoint.keep_best=-1 must be at least 0"),
    ({"damcha": {"widths": (0,)}}, "'damcha.widths' must hold positive widths"),
    ({"dcmha": {"rank": 0}}, "'dcmha.rank' must be positive"),
    ({"moa": {"cv_coefficient": float("nan")}}, "moa.cv_coefficient=nan must be at least 0"),
    ({"model": {"mlp_features": 10**6}}, "'model.mlp_features' is 1000000; it must be positive"),
    ({"model": {"symbol_features": 0}}, "'model.symbol_features' is 0; it must be positive"),
])
def test_a_wrong_value_is_named_with_the_remedy(change, message):
  values = to_dict(_frozen())
  for key, value in change.items():
    values[key] = {**values[key], **value} if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    freeze(values, SyntheticConfig)
  assert message in str(error.value)


def test_an_option_that_no_array_takes_is_refused_as_the_task_is_made():
  config = _frozen("smoke")
  config = dataclasses.replace(config, damcha=dataclasses.replace(config.damcha, stride=10**13))
  with pytest.raises(ConfigError, match="damcha cannot be built"):
    synthetic_task(config, "retrieval", 8, "damcha")
