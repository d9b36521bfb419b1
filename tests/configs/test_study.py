"""The study's config: which cells it has, what a variant changes, and what it refuses."""

import dataclasses

from ml_collections import ConfigDict
import pytest

from configs import study_cpu
from damcha_jax.config import ConfigError, freeze
from damcha_jax.config.study import StudyConfig, VARIANTS
from damcha_jax.errors import DataError
from experiments import study


def _config(**changes):
  config = study_cpu.get_config()
  with config.unlocked():
    config.update(ConfigDict(changes))
  return freeze(config, StudyConfig)


def test_the_core_and_what_is_replicated_have_all_seeds_and_what_is_exploratory_the_first():
  cells = _config(seeds=(3, 4), replicated="text8/dcmha",
                  exploratory="mix/damcha_static,text8/mha,text8/dcmha").cells
  assert cells["images", "damcha_robust"] == (3, 4)
  assert cells["mix", "mha"] == (3, 4)
  assert cells["text8", "dcmha"] == (3, 4)
  assert cells["mix", "damcha_static"] == cells["text8", "mha"] == (3,)


def test_variants_differ_from_their_attention_in_what_they_name_alone():
  config = _config()
  for name, variant in VARIANTS.items():
    own = config.family_config("mix", name)
    assert own.attentions == variant.attention
    plain = dataclasses.asdict(config.family_config("mix", "mha"))
    flat = dataclasses.asdict(own)
    changed = {f"{section}.{key}" for section, values in flat.items() if isinstance(values, dict)
               for key in values if values[key] != plain[section][key]}
    assert changed == set(variant.changes), name


def test_the_factor_scales_the_learning_rate_alone():
  config = _config()
  once, twice = (config.family_config("pairs", "damcha", factor) for factor in (1.0, 2.0))
  assert twice.optimizer.learning_rate == 2 * once.optimizer.learning_rate
  assert dataclasses.replace(twice, optimizer=once.optimizer) == once


def test_every_variant_whose_rate_another_takes_is_tuned():
  assert _config(sets="mix", variants="damcha_robust", replicated="",
                 exploratory="text/tha").tuned == (
      ("mix", "damcha_robust"), ("mix", "mha"))


def test_rates_are_tuned_on_the_set_itself_or_on_one_of_its_experiment():
  config = _config(tuning=dict(sets="text,pairs"))
  assert config.rate_of("text", "tha") == ("text", "mha")
  assert config.rate_of("mix", "damcha") == ("text", "damcha")
  assert config.rate_of("concepts", "damcha_static") == ("pairs", "damcha")
  assert config.rate_of("images", "mha") is None


@pytest.mark.parametrize("changes, message", [
    (dict(sets="mix,mix"), "names an entry twice"),
    (dict(sets="mixx"), "unknown set 'mixx'"),
    (dict(variants="damcha_best"), "unknown variant 'damcha_best'"),
    (dict(exploratory="mix"), "'exploratory' must hold entries like mix/damcha"),
    (dict(replicated="mix"), "'replicated' must hold entries like mix/damcha"),
    (dict(replicated="text/mha,text/mha"), "'replicated' names an entry twice"),
    (dict(exploratory="mix/damcha,"), "empty entry: 'mix/damcha,'; remove the comma"),
    (dict(sets="mix,"), "empty entry"),
    (dict(sets=""), "'sets' is empty; name at least one"),
    (dict(seeds=(0, 100)), "tuning.seed=100 is one of the seeds"),
    (dict(tuning=dict(factors=(1.0, -1.0))), "factors above 0"),
    (dict(tuning=dict(factors=(0.5, 0.50000001))), "different factors above 0"),
    (dict(tuning=dict(factors=(1e300,))), "optimizer.learning_rate"),
    (dict(tuning=dict(seed=-1)), "numbers from 0 to"),
    (dict(tuning=dict(sets="mix,mixed")), "unknown set 'mixed'"),
    (dict(shift="text"), "like text/text8"),
    (dict(shift="text//text8"), "like text/text8"),
    (dict(shift="text/text"), "two different sets of bytes"),
    (dict(shift="mix/images"), "two different sets of bytes"),
    (dict(mix=dict(seeds=(1,))), "'mix.seeds' has no effect"),
    (dict(mix=dict(num_step=3)), "'mix.num_step'"),
])
def test_what_cannot_run_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    _config(**changes)


@pytest.mark.parametrize("changes", [
    dict(shift="mix/dictionary"), dict(tuning=dict(sets="dictionary"))])
def test_data_of_every_run_are_looked_for_before_any_is_trained(tmp_path, changes):
  config = study_cpu.get_config("smoke")
  with config.unlocked():
    config.update(ConfigDict(dict(sets="mix", variants="mha", exploratory="", **changes)))
    config.dictionary.dataset = str(tmp_path / "nothing.txt")
  with pytest.raises(DataError, match="nothing.txt"):
    study.check(freeze(config, StudyConfig))


@pytest.mark.parametrize("name, maker", [
    ("dictionary_mix", "make_samples dictionary --out=~/.cache/damcha_jax'"),
    ("more_pairs", "make_samples more_pairs --out=~/.cache/damcha_jax/more_pairs'")])
def test_what_does_not_ship_says_how_it_is_made(tmp_path, name, maker, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  config = study_cpu.get_config("smoke")
  with config.unlocked():
    config.sets, config.variants, config.exploratory = name, "mha", ""
    config.tuning.sets = name
  with pytest.raises(DataError, match=f"{maker} makes it"):
    study.check(freeze(config, StudyConfig))
