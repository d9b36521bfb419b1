"""Configs that earlier versions wrote are those of the same runs."""

import json

import pytest

from configs import mix
from damcha_jax.config import freeze, to_dict, upgrade, upgraded
from damcha_jax.training.workdir import Workdir


def _without_added(contents):
  return {name: {key: value for key, value in section.items() if (name, key) not in
                 {(section, key) for section, key, _ in upgrade._ADDED}}
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


def test_a_section_that_was_added_is_where_the_other_attentions_are(monkeypatch):
  monkeypatch.setattr(upgrade, "_ADDED", (("later", "rank", 2), ("later", "width", None)))
  mma = {"local_window": 8}
  assert upgraded({"mma": mma}) == {"mma": mma, "later": {"rank": 2, "width": None}}
  assert upgraded({"mma": mma, "later": {"rank": 3}})["later"] == {"rank": 3, "width": None}
  within = {"images": {"mma": mma}, "size": "cpu"}  # as a study has it
  assert upgraded(within)["images"] == upgraded(within["images"]) != within["images"]


def test_a_run_of_an_earlier_version_resumes(tmp_path):
  config = freeze(mix.get_config("smoke"))
  directory = Workdir(tmp_path)
  directory.claim(config, "mha", 0)
  old = _without_added(json.loads((tmp_path / "config.json").read_text()))
  (tmp_path / "config.json").write_text(json.dumps(old))
  directory.check_config(config, "mha", 0)
