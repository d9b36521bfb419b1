"""What is true of DAMCHA at a size that two CPU cores finish: a study of our own.

  python -m experiments.study --config=configs/study_cpu.py

Every attention that the paper compares, and DAMCHA with the robust preset and at full width, on
four data sets with three seeds each at matched parameters, MHA, DCMHA and DAMCHA also on the
mixture's two parts; besides, with one seed and called exploratory, variants of our own, what single
parts of the method are worth, matched FLOPs, and looks into the future. Twelve to eighteen hours on
two cores; the same command resumes after a kill and says what is left. `--config.replicated=
--config.exploratory=` leaves out all but the core, and both take others, as images/damcha_static,
of `damcha_jax.config.study.VARIANTS`.

The sets are the samples that ship with the package. Others are larger corpora that
`python -m damcha_jax.data.make_samples` makes of Debian packages: `dictionary`, `dictionary_text8`
and `dictionary_mix` (`dictionary --out=~/.cache/damcha_jax`), and `more_pairs`
(`more_pairs --out=~/.cache/damcha_jax/more_pairs`). Their cells are added by, for one,
`--config.replicated=dictionary_mix/mha,dictionary_mix/damcha`.

  python -m experiments.study --config=configs/study_cpu.py:smoke

Some five minutes, of which most is compilation; a few steps of small models, every part of the
program once.
"""

from collections.abc import Iterable

import ml_collections

from configs import cifar10
from configs import commongen
from configs import enwik8
from configs import mix
from configs import text8
from configs import wmt14

SIZES = ("paper", "smoke")
SETS = {"mix": mix, "mix_decontaminated": mix, "text": enwik8, "text8": text8,
        "dictionary": enwik8, "dictionary_text8": text8, "dictionary_mix": mix,
        "images": cifar10, "pairs": wmt14, "more_pairs": wmt14, "concepts": commongen}
FOLDER = "~/.cache/damcha_jax"  # of what `make_samples` is told to put there
# Sections have these from the config as a whole.
COMMON = ("experiment", "name", "size", "attentions", "seeds")
CORE = "mha,dcmha,damcha,damcha_robust,damcha_full_width,tha,colmha,moa,mma"
PARTS = ("static", "unshared", "stack", "blocks", "diagonal", "initializer", "residual",
         "normalized", "prefix", "future", "flops", "robust_flops")
OWN = ("full_width_robust", "mixed", "decayed")


def get_config(size: str = "paper") -> ml_collections.ConfigDict:
  """The study; `paper` is its whole size.

  Raises:
    ValueError: `size` is none of `SIZES`.
  """
  if size not in SIZES:
    raise ValueError(f"unknown size '{size}'; choose one of {', '.join(SIZES)}")
  config = ml_collections.ConfigDict()
  config.experiment = "study"
  config.name = "study_cpu"
  config.size = size
  config.sets = "mix,images,pairs,concepts"  # comma-separated; the core, as the next two
  config.variants = CORE
  config.seeds = (0, 1, 2)
  config.replicated = ",".join(_replicated())  # SET/VARIANT with all seeds
  config.exploratory = ",".join(_exploratory())  # with the first seed alone
  config.shift = "text/text8"  # Section 1: how attention copes with a shift of distribution
  # A grid whose end is the best goes on beyond it. A seed of its own, so that no run profits.
  config.tuning = ml_collections.ConfigDict(dict(
      sets="mix,images,pairs,concepts", seed=100, factors=(0.5, 1.0, 2.0)))
  for name, module in SETS.items():
    section = module.get_config("smoke" if size == "smoke" else "cpu")
    with section.unlocked():
      for key in COMMON:
        del section[key]
      section.logging.tensorboard = False
    config[name] = section
  config.mix_decontaminated.data.decontaminate = True
  config.dictionary.dataset = f"{FOLDER}/webster.txt"
  config.dictionary_text8.dataset = f"text8:{FOLDER}/webster.txt"
  config.dictionary_mix.dataset = f"mix:{FOLDER}/webster.txt"
  config.more_pairs.dataset = f"{FOLDER}/more_pairs"
  if size == "smoke":
    shrink_to_smoke(config)
  return config.lock()


def _replicated() -> Iterable[str]:
  for name in ("text", "text8"):  # does the gain grow on the mixture?
    yield from (f"{name}/{attention}" for attention in ("mha", "dcmha", "damcha"))


def _exploratory() -> Iterable[str]:
  """By question; what is in the core is trained once."""
  yield from (f"mix_decontaminated/{attention}" for attention in ("mha", "dcmha", "damcha"))
  yield from (f"mix/damcha_{part}" for part in (*PARTS, *OWN))
  yield from ("mix/authors_mma", "mix/authors_mma_future")


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  config.sets = "mix,concepts"
  config.variants = "mha,damcha"
  config.seeds = (0, 1)
  config.replicated = ""
  config.exploratory = "mix/damcha_flops,text/mha,text/damcha"
  config.tuning.sets = "mix"
  config.tuning.factors = (0.5, 1.0)
