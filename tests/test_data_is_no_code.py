"""Files are data: nothing that is read is run, and no name in a file leads out of its folder."""

import ast
from pathlib import Path
import pickle

import numpy as np
import pytest

from configs import mix
from damcha_jax import image_samples
from damcha_jax.config import ConfigError, freeze
from damcha_jax.data.arrays import kept_arrays, map_array
from damcha_jax.training import loop
from tests.resume import faults
from tiny_task import tiny_task

ROOT = Path(__file__).parents[1]
# What runs or unpacks whatever a file says, and where one may be: a config file is a program of the
# user's own, and the reader of .pt files admits tensors and plain containers only.
FORBIDDEN = {"eval", "exec", "exec_module", "extract", "extractall", "unpack_archive", "Unpickler",
             "_Unpickler", "system"}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch",
           "yaml"}
ADMITTED = {("damcha_jax/interop/tensor_files.py", "pickle"),
            ("damcha_jax/interop/tensor_files.py", "_Unpickler"),
            ("experiments/command_line.py", "exec_module")}


def _uses(path):
  """Forbidden calls, modules and options of a source file."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from {name.name.split(".")[0] for name in node.names} & MODULES
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield from {node.module.split(".")[0]} & MODULES
    elif isinstance(node, ast.Attribute):
      yield from {node.attr} & FORBIDDEN
    elif isinstance(node, ast.Name):
      yield from {node.id} & FORBIDDEN
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
      if not (isinstance(node.value, ast.Constant) and node.value.value is False):
        yield "allow_pickle"


def test_no_source_runs_or_unpacks_what_a_file_says():
  found = {(str(path.relative_to(ROOT)), use) for folder in ("damcha_jax", "experiments", "configs")
           for path in (ROOT / folder).rglob("*.py") for use in _uses(path)}
  assert found == ADMITTED


class _Bomb:
  """Whoever unpickles it makes a folder."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return Path.mkdir, (self.path,)


def test_arrays_of_objects_are_refused_unopened(tmp_path):
  went_off = tmp_path / "went_off"
  objects = np.array([_Bomb(went_off)], object)
  np.save(tmp_path / "a.npy", objects)
  np.savez(tmp_path / image_samples.FILE, images=objects)
  with pytest.raises(ValueError, match="a.npy is damaged"):
    map_array(tmp_path / "a.npy")
  np.save(tmp_path / "b-ids.npy", objects)
  np.save(tmp_path / "b-crc32.npy", objects)
  with pytest.raises(ValueError, match="b-ids.npy is damaged"):
    kept_arrays(tmp_path / "b", ("ids",), lambda: pytest.fail("made again"))
  assert image_samples.read_samples(tmp_path, {}) is None
  assert not went_off.exists()
  np.load(tmp_path / "a.npy", allow_pickle=True)  # it was no dud
  assert went_off.is_dir()


def test_a_resumed_run_unpickles_nothing(tmp_path, monkeypatch):
  faults.interrupt(tmp_path, 3)
  for name in ("load", "loads", "Unpickler"):
    monkeypatch.setattr(pickle, name, lambda *unused, **also: pytest.fail("something was unpickled"))
  assert loop.train(tiny_task(), faults.CONFIG, tmp_path, seed=0)["num_steps"] == 8


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "mha/../..", "mha\0", ""])
def test_names_of_attentions_are_no_paths(name):
  config = mix.get_config("smoke")
  config.attentions = f"mha,{name}"
  with pytest.raises(ConfigError, match="attentions"):
    freeze(config)
