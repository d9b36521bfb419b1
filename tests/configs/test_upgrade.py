"""Configs that earlier versions wrote are those of the same runs."""

import json

import pytest

from configs import mix
from damcha_jax.config import freeze, to_dict, upgraded
from damcha_jax.config.upgrade import _ADDED
from damcha_jax.training.workdir import Workdir


def _without_added(contents):
  return {name: {key: value for key, value in section.items() if (name, key) not in
                 {(section, key) for section, key, _ in _ADDED}}
          if isinstance(section, dict) else section for name, section in contents.items()}


@pytest.mark.parametrize("size", mix.gpt2.SIZES)
def test_keys_that_were_added_have_the_values_that_the_configs_have(size):
  today = to_dict(freeze(mix.get_config(size)))
  old = _without_added(today)
  assert old != today
  assert upgraded(old) == today
  assert upgraded(today) == today


def test_what_was_chosen_stays():
  contents = {"damcha": {"static_part": False}, "tha": 3, "size": "cpu"}
  found = upgraded(contents)
  assert found["damcha"]["static_part"] is False and found["damcha"]["residual"] is None
  assert found["tha"] == 3 and "authors" not in found
  assert contents == {"damcha": {"static_part": False}, "tha": 3, "size": "cpu"}


def test_a_run_of_an_earlier_version_resumes(tmp_path):
  config = freeze(mix.get_config("smoke"))
  directory = Workdir(tmp_path)
  directory.claim(config, "mha", 0)
  old = _without_added(json.loads((tmp_path / "config.json").read_text()))
  (tmp_path / "config.json").write_text(json.dumps(old))
  directory.check_config(config, "mha", 0)
