"""The wheel holds the library and its sample data, nothing else."""

import configparser
from pathlib import Path
import shutil
import subprocess
import sys
import zipfile

ROOT = Path(__file__).parents[2]

_BUILD = ("import sys, setuptools.build_meta as backend; "
          "print(backend.build_wheel(sys.argv[1]))")


def test_wheel_holds_the_library_alone(tmp_path):
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
  with zipfile.ZipFile(wheel) as archive:
    files = {name for name in archive.namelist() if ".dist-info/" not in name}
  expected = {str(path.relative_to(ROOT)) for path in (ROOT / "damcha_jax").rglob("*.py")}
  expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "damcha_jax/data/samples").rglob("*")
                   if path.is_file()}
  assert files == expected


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
