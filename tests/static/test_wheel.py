"""The wheel holds the library and its sample data, nothing else."""

import configparser
import os
from pathlib import Path
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests import library_tests

ROOT = Path(__file__).parents[2]

_BUILD = ("import sys, setuptools.build_meta as backend; "
          "print(backend.build_wheel(sys.argv[1]))")


@pytest.fixture(scope="module", name="wheel")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
  tmp_path = tmp_path_factory.mktemp("release")
  source, wheels = tmp_path / "source", tmp_path / "wheels"
  source.mkdir()
  wheels.mkdir()
  for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  for name in ("damcha_jax", "configs", "experiments", "tests"):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
  # In the environment's own setuptools: building must not need a network here.
  subprocess.run([sys.executable, "-c", _BUILD, str(wheels)], cwd=source, check=True,
                 capture_output=True)
  (wheel,) = wheels.glob("*.whl")
  return wheel


def test_wheel_holds_the_library_alone(wheel):
  with zipfile.ZipFile(wheel) as archive:
    files = {name for name in archive.namelist() if ".dist-info/" not in name}
  expected = {str(path.relative_to(ROOT)) for path in (ROOT / "damcha_jax").rglob("*.py")}
  expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "damcha_jax/data/samples").rglob("*")
               if path.is_file()}
  assert files == expected


@pytest.mark.families
def test_the_library_passes_its_tests_outside_the_tree(wheel, tmp_path):
  """A few of those that `launch/release.sh` runs, with the packages of this environment."""
  outside, installed = tmp_path / "outside", tmp_path / "installed"
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(installed)
  library_tests.main(str(outside))
  probe = outside / "tests" / "test_where.py"
  probe.write_text("import damcha_jax\n\n\ndef test_where():\n"
                   f"  assert damcha_jax.__file__.startswith({str(installed)!r})\n")
  done = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
       "tests/test_where.py", "tests/metric/test_generator.py", "tests/data/test_text_pairs.py",
       "tests/interop/test_tensor_files.py"],
      cwd=outside, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True,
      text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr


def test_library_tests_need_nothing_of_the_tree():
  names = {str(path.relative_to(ROOT / "tests")) for path in library_tests.library_tests()}
  assert {"attention/test_attention.py", "metric/test_generator.py", "golden/test_golden.py",
          "interop/test_tensor_files.py", "evaluation/test_bart.py"} <= names
  assert not any(name.startswith(("static/", "configs/", "end_to_end/")) for name in names)


def test_version_is_the_same_everywhere():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  version = setup["metadata"]["version"]
  assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
  assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_pin_every_requirement():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  wanted = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
  names = {line.split(">")[0].strip().lower().replace("_", "-") for line in wanted.splitlines()
           if ">" in line}
  for file in ("constraints-py311.txt", "constraints-py312.txt"):
    pinned = {line.split("==")[0].lower().replace("_", "-")
              for line in (ROOT / "launch" / file).read_text(encoding="utf-8").splitlines()
              if "==" in line}
    assert len(names) > 10 and names <= pinned, file
