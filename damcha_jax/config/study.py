"""The config of the study: variants of attentions on several data sets, learning rates tuned."""

from __future__ import annotations

from collections.abc import Mapping
import copy
import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from damcha_jax.config.conversion import (ConfigError, freeze, names_differ, require,
                                          unknown_key_message)
from damcha_jax.config.decoder import DecoderConfig, LanguageModelConfig
from damcha_jax.config.image_generation import ImageGenerationConfig
from damcha_jax.config.text_generation import TextGenerationConfig

# Set -> the experiment that it is of, the class of that one's config, and its config file.
SETS = {
    "mix": ("gpt2_enwik8", LanguageModelConfig, "mix"),
    "mix_decontaminated": ("gpt2_enwik8", LanguageModelConfig, "mix"),
    "text": ("gpt2_enwik8", LanguageModelConfig, "enwik8"),
    "text8": ("gpt2_enwik8", LanguageModelConfig, "text8"),
    "dictionary": ("gpt2_enwik8", LanguageModelConfig, "enwik8"),
    "dictionary_text8": ("gpt2_enwik8", LanguageModelConfig, "text8"),
    "dictionary_mix": ("gpt2_enwik8", LanguageModelConfig, "mix"),
    "images": ("image_generation", ImageGenerationConfig, "cifar10"),
    "pairs": ("text_generation", TextGenerationConfig, "wmt14"),
    "more_pairs": ("text_generation", TextGenerationConfig, "wmt14"),
    "concepts": ("text_generation", TextGenerationConfig, "commongen"),
}
# What a set's section has from the study as a whole.
COMMON = ("experiment", "name", "size", "attentions", "seeds")


class Variant(NamedTuple):
  """An attention with options.

  Attributes:
    attention: its name.
    changes: the set's config keys that differ, by path.
    tuned_as: the variant whose learning rate it takes; None: it has one of its own.
    flops_of: the variant as whose training its own takes as many FLOPs, by its number of steps;
      None: as many steps.
  """

  attention: str
  changes: Mapping[str, Any] = MappingProxyType({})
  tuned_as: Optional[str] = "damcha"
  flops_of: Optional[str] = None


VARIANTS = {
    "mha": Variant("mha", tuned_as=None),
    "dcmha": Variant("dcmha", tuned_as=None),
    "damcha": Variant("damcha", tuned_as=None),
    "damcha_robust": Variant("damcha", {"damcha.preset": "robust"}, tuned_as=None),
    **{name: Variant(name, tuned_as="mha") for name in ("tha", "colmha", "moa", "mma")},
    # The same training budget in FLOPs rather than in steps.
    "damcha_flops": Variant("damcha", flops_of="mha"),
    "damcha_robust_flops": Variant("damcha", {"damcha.preset": "robust"}, "damcha_robust", "mha"),
    # What the parts of the method are worth.
    "damcha_static": Variant("damcha", {"damcha.metric": "static"}),
    "damcha_unshared": Variant("damcha", {"damcha.sharing": "none"}),
    "damcha_stack": Variant("damcha", {"damcha.sharing": "stack"}),
    "damcha_blocks": Variant("damcha", {"damcha.parameterization": "blocks"}),
    "damcha_diagonal": Variant("damcha", {"damcha.parameterization": "blocks",
                                          "damcha.block_ablation_train": "diagonal",
                                          "damcha.block_ablation_eval": "diagonal"}),
    "damcha_initializer": Variant("damcha", {"damcha.initializer": "variance_preserving"}),
    "damcha_residual": Variant("damcha", {"damcha.residual": True}),
    "damcha_normalized": Variant("damcha", {"damcha.normalize_context": True}),
    "damcha_prefix": Variant("damcha", {"damcha.stride": 1}),
    # A metric that starts as MHA's and is moved by the context, of low rank.
    "damcha_full_width": Variant("damcha", {"damcha.form": "full_width", "damcha.update_rank": 1},
                                 "mha"),
    "damcha_full_width_robust": Variant("damcha", {
        "damcha.form": "full_width", "damcha.update_rank": 1, "damcha.preset": "robust"}, "mha"),
    # Slices of a learned mixture, with a generator smaller by as many parameters; a context in which
    # the distant past fades.
    "damcha_mixed": Variant("damcha", {"damcha.mix_slices": True, "damcha.widths": (12,) * 8}),
    "damcha_mixed_robust": Variant("damcha", {
        "damcha.mix_slices": True, "damcha.widths": (12,) * 8, "damcha.preset": "robust"},
                                   "damcha_robust"),
    "damcha_decayed": Variant("damcha", {"damcha.half_life": 8.0, "damcha.preset": "robust"},
                              "damcha_robust"),
    "damcha_mixed_decayed": Variant("damcha", {
        "damcha.mix_slices": True, "damcha.widths": (12,) * 8, "damcha.half_life": 8.0,
        "damcha.preset": "robust"}, "damcha_robust"),
    # How much a look into the future is worth.
    "damcha_future": Variant("damcha", {"damcha.context": "sequence",
                                        "damcha.allow_future_leak": True}),
    "authors_mma": Variant("authors_mma", tuned_as="mha"),
    "authors_mma_future": Variant("authors_mma", {"authors.allow_future_leak": True}, "mha"),
}


@dataclasses.dataclass(frozen=True)
class TuningConfig:
  """Each variant with a learning rate of its own is trained once with each factor of the set's.

  A set takes its factors from itself if it is one of `sets`, else from the first of them that is of
  its experiment. Where there is none, it keeps its own rate, which was not tuned.
  """

  sets: str  # comma-separated, of SETS
  seed: int  # none of the study's
  factors: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class StudyConfig:
  """Every variant on every set with every seed, and further cells with all or the first of them.

  A set's section is the config of its experiment without `COMMON`.
  """

  experiment: str
  name: str  # of the config file
  size: str
  sets: str  # comma-separated, of SETS
  variants: str  # comma-separated, of VARIANTS
  seeds: tuple[int, ...]
  replicated: str  # comma-separated SET/VARIANT, with every seed; may be empty
  exploratory: str  # the same, with the first seed alone
  shift: str  # SET/OTHER: what is trained on a set is tested on another too; may be empty
  tuning: TuningConfig
  mix: dict
  mix_decontaminated: dict
  text: dict
  text8: dict
  dictionary: dict
  dictionary_text8: dict
  dictionary_mix: dict
  images: dict
  pairs: dict
  more_pairs: dict
  concepts: dict

  def __post_init__(self):
    may_be_empty = dict(replicated=self.replicated, exploratory=self.exploratory)
    for key, entries in {"sets": self.sets, "variants": self.variants, **may_be_empty,
                         "tuning.sets": self.tuning.sets}.items():
      names = entries.split(",")
      require(len(set(names)) == len(names),
              f"config key '{key}' names an entry twice: {entries}")
      require(entries != "" or key in may_be_empty,
              f"config key '{key}' is empty; name at least one")
      require(all(names) or entries == "",
              f"config key '{key}' has an empty entry: '{entries}'; remove the comma")
    require(len(set(self.seeds)) == len(self.seeds) > 0,
            f"config key 'seeds' must name at least one and none twice, not {self.seeds}")
    require(all(0 <= seed < 2**63 for seed in (*self.seeds, self.tuning.seed)),
            "config keys 'seeds' and 'tuning.seed' must hold numbers from 0 to 2^63 - 1, not "
            f"{self.seeds} and {self.tuning.seed}")
    require(self.tuning.seed not in self.seeds,
            f"tuning.seed={self.tuning.seed} is one of the seeds; what is tuned on a seed does "
            "well on it")
    require(len(self.tuning.factors) > 0 and names_differ(self.tuning.factors)
            and all(factor > 0 for factor in self.tuning.factors),
            f"config key 'tuning.factors' must hold different factors above 0, not "
            f"{self.tuning.factors}")
    require(self.shift == "" or (self.shift.count("/") == 1 and len(self.shift_sets) == 2),
            f"config key 'shift' must be empty or like text/text8, not '{self.shift}'")
    for name in (*self.tuning.sets.split(","), *self.shift_sets, *(one for one, _ in self.cells)):
      require(name in SETS, f"unknown set '{name}'; choose from {', '.join(SETS)}")
    require(len(set(self.shift_sets)) in (0, 2)
            and all(SETS[name][0] == "gpt2_enwik8" for name in self.shift_sets),
            f"config key 'shift' must name two different sets of bytes, not '{self.shift}'")
    for name in self.variant_names:
      require(name in VARIANTS, f"unknown variant '{name}'; choose from {', '.join(VARIANTS)}")
    for name, variant in self.cells:
      self.family_config(name, variant)
    for name, variant in self.tuned:
      for factor in self.tuning.factors:
        self.family_config(name, variant, factor)

  @property
  def cells(self) -> dict[tuple[str, str], tuple[int, ...]]:
    """The seeds of each (set, variant)."""
    cells = {(one, variant): self.seeds
             for one in self.sets.split(",") for variant in self.variants.split(",")}
    for key, seeds in (("replicated", self.seeds), ("exploratory", self.seeds[:1])):
      for cell in filter(None, getattr(self, key).split(",")):
        one, separator, variant = cell.partition("/")
        require(bool(separator),
                f"config key '{key}' must hold entries like mix/damcha, not '{cell}'")
        cells.setdefault((one, variant), seeds)
    return cells

  @property
  def shift_sets(self) -> tuple[str, ...]:
    """Trained on, tested on; or nothing."""
    return tuple(filter(None, self.shift.split("/")))

  @property
  def variant_names(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(variant for _, variant in self.cells))

  @property
  def tuned(self) -> tuple[tuple[str, str], ...]:
    """(set, variant) of which learning rates are tuned."""
    return tuple(dict.fromkeys(filter(None, (self.rate_of(*cell) for cell in self.cells))))

  def rate_of(self, name: str, variant: str) -> Optional[tuple[str, str]]:
    """The tuned (set, variant) whose factor set `name` and `variant` take; None: there is none."""
    sets = self.tuning.sets.split(",")
    of_family = [one for one in sets if SETS[one][0] == SETS[name][0]]
    if not of_family:
      return None
    return name if name in sets else of_family[0], VARIANTS[variant].tuned_as or variant

  def family_config(self, name: str, variant: str, factor: float = 1.0,
                    seeds: tuple[int, ...] = (0,)) -> DecoderConfig:
    """The config with which the family of set `name` trains `variant`.

    Args:
      name: of the set.
      variant: of VARIANTS.
      factor: of the set's learning rate.
      seeds: of the runs.

    Raises:
      ConfigError: a section lacks a key, has another, or values that do not go together.
    """
    section = copy.deepcopy(getattr(self, name))
    experiment, cls, file = SETS[name]
    for key in COMMON:
      require(key not in section, f"config key '{name}.{key}' has no effect; use '{key}'")
    for path, value in VARIANTS[variant].changes.items():
      _replace(section, path, value, name)
    config = freeze({**section, "experiment": experiment, "name": file, "size": self.size,
                     "attentions": VARIANTS[variant].attention, "seeds": seeds}, cls,
                    prefix=f"{name}.")
    return dataclasses.replace(config, optimizer=dataclasses.replace(
        config.optimizer, learning_rate=factor * config.optimizer.learning_rate))


def _replace(section: dict[str, Any], path: str, value: Any, name: str) -> None:
  *parents, key = path.split(".")
  for parent in parents:
    section = section.get(parent)
    if not isinstance(section, dict):
      raise ConfigError(f"config key '{name}.{parent}' is missing; add it to the config file")
  if key not in section:
    raise ConfigError(unknown_key_message(f"{name}.{path}", [f"{name}.{one}" for one in section]))
  section[key] = value
