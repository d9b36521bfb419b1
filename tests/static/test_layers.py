"""Imports point one way: metric, attention <- models <- training <- experiments."""

import ast
from collections.abc import Iterator
from pathlib import Path
import sys

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("damcha_jax", "configs", "experiments", "tests")

BASE = ("damcha_jax.errors", "damcha_jax.files")
# Folder or file -> (other packages it may import, parts of the project it may import). The longest
# prefix of a file's path decides.
RULES = {
    "damcha_jax": ({"jax", "flax", "numpy"}, {"damcha_jax"}),
    "damcha_jax/config": ({"ml_collections"}, {"damcha_jax.config"}),
    "damcha_jax/errors.py": (set(), set()),
    "damcha_jax/files.py": (set(), {*BASE}),
    "damcha_jax/metric": ({"jax", "flax", "numpy"},
                          {"damcha_jax.metric", "damcha_jax.attention"}),
    "damcha_jax/attention": ({"jax", "flax", "numpy"},
                             {"damcha_jax.metric", "damcha_jax.attention"}),
    "damcha_jax/models": ({"jax", "flax"},
                          {"damcha_jax.metric", "damcha_jax.attention", "damcha_jax.models",
                           "damcha_jax.config"}),
    "damcha_jax/data": ({"numpy", "tensorflow_datasets", "array_record"},
                        {"damcha_jax.data", "damcha_jax.config", *BASE}),
    "damcha_jax/data/emoji.py": ({"numpy", "fontTools", "PIL"},
                                 {"damcha_jax.data", *BASE}),
    "damcha_jax/data/builders": ({"numpy", "tensorflow_datasets", "PIL"},
                                 {"damcha_jax.data"}),
    **{f"damcha_jax/data/{file}": (
        {"numpy", "PIL", *packages},
        {"damcha_jax.data", "damcha_jax.config", *BASE})
       for file, packages in (("augmentation.py", ()),
                              ("imagenet.py", ("tensorflow_datasets", "array_record")),
                              ("labelled_images.py", ("absl", "grain")))},
    "damcha_jax/data/tokenizers.py": ({"tokenizers"}, {"damcha_jax.data", *BASE}),
    "damcha_jax/data/prepare.py": ({"numpy", "tensorflow", "tensorflow_datasets", "array_record"},
                                   {"damcha_jax.data", "damcha_jax.config", *BASE}),
    "damcha_jax/evaluation": ({"jax", "flax", "numpy", "sacrebleu", "scipy", "tokenizers"},
                              {"damcha_jax.evaluation", "damcha_jax.interop.tensor_files",
                               "damcha_jax.config", *BASE}),
    "damcha_jax/training": ({"jax", "flax", "numpy", "optax", "orbax", "tensorboardX"},
                            {"damcha_jax.training", "damcha_jax.models", "damcha_jax.data",
                             "damcha_jax.attention.activations",
                             "damcha_jax.evaluation", "damcha_jax.analysis.geometry",
                             "damcha_jax.analysis.complexity", "damcha_jax.config", *BASE}),
    "damcha_jax/analysis": ({"jax", "flax", "numpy"},
                            {"damcha_jax.metric", "damcha_jax.attention", "damcha_jax.models",
                             "damcha_jax.analysis"}),
    "damcha_jax/analysis/plots.py": ({"matplotlib", "numpy"}, {"damcha_jax.training.workdir"}),
    "damcha_jax/analysis/pictures.py": (
        {"matplotlib", "numpy"}, {"damcha_jax.analysis.plots", "damcha_jax.training.workdir"}),
    "damcha_jax/interop": ({"jax", "flax", "numpy", "orbax"},
                           {"damcha_jax.metric", "damcha_jax.attention", "damcha_jax.models",
                            "damcha_jax.interop", "damcha_jax.config", *BASE}),
    "damcha_jax/theory": ({"jax", "flax", "numpy", "optax"},
                          {"damcha_jax.metric", "damcha_jax.attention", "damcha_jax.models",
                           "damcha_jax.interop", "damcha_jax.analysis.closed_forms",
                           "damcha_jax.theory"}),
    "damcha_jax/theory/figures.py": ({"matplotlib"}, {"damcha_jax.training.workdir"}),
    "damcha_jax/reporting.py": ({"matplotlib", "numpy"}, {"damcha_jax.training"}),
    "configs": ({"ml_collections"}, {"configs"}),
    "experiments": ({"jax", "flax", "numpy", "absl", "ml_collections"},
                    {"damcha_jax", "experiments"}),
    **{f"experiments/{file}.py": (  # which read or make pictures
        {"jax", "numpy", "absl", "ml_collections", "PIL"}, {"damcha_jax", "experiments"})
       for file in ("image_pipeline", "vit_picture")},
}


def _files(*folders: str) -> list[Path]:
  return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _imports(tree: ast.Module) -> Iterator[str]:
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative imports hide which layer is meant"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _offences(file: str, source: str) -> list[str]:
  prefix = max((rule for rule in RULES if file == rule or file.startswith(rule + "/")), key=len)
  packages, parts = RULES[prefix]
  offences = []
  for name in _imports(ast.parse(source)):
    package = name.split(".")[0]
    if package in FOLDERS:
      allowed = any(name == part or name.startswith(part + ".") for part in parts)
    else:
      allowed = package in packages or package in sys.stdlib_module_names
    if not allowed:
      offences.append(name)
  return offences


@pytest.mark.parametrize("path", _files("damcha_jax", "configs", "experiments"),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports_only_what_its_layer_may(path):
  assert _offences(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file, source", [
    ("damcha_jax/attention/mha.py", "from damcha_jax.models import decoder"),
    ("damcha_jax/models/decoder.py", "import optax"),
    ("damcha_jax/data/sources.py", "from damcha_jax.models.decoder import DecoderLM"),
    ("damcha_jax/data/sources.py", "import tensorflow as tf"),
    ("damcha_jax/training/loop.py", "def f():\n  import tensorflow_datasets"),
    ("damcha_jax/training/loop.py", "from ml_collections import ConfigDict"),
    ("damcha_jax/theory/growth.py", "from damcha_jax.training import loop"),
    ("damcha_jax/sampling.py", "from absl import flags"),
    ("configs/mix.py", "from damcha_jax import config"),
])
def test_the_check_catches_a_planted_offence(file, source):
  assert _offences(file, source)
