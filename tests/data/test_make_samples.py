"""The script that makes the sample data, on packages made here."""

import gzip
import lzma
import shutil
import subprocess

import pytest

from damcha_jax.data import make_samples

needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")


def _package(tmp_path, name, files):
  root = tmp_path / name
  for path, content in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
  (root / "DEBIAN").mkdir()
  (root / "DEBIAN" / "control").write_text(
      f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n")
  debs = tmp_path / "debs"
  debs.mkdir(exist_ok=True)
  subprocess.run(["dpkg-deb", "-b", root, debs / f"{name}_1_all.deb"], check=True,
                 capture_output=True)
  return debs


@needs_dpkg
def test_text_is_joined_in_path_order(tmp_path, capsys):
  sources = "usr/share/doc/python3.11/html/_sources/"
  debs = _package(tmp_path, "python3.11-doc", {
      sources + "b.rst.txt": b"last, without a line end", sources + "a/z.rst.txt": b"second\n",
      sources + "a/B.rst.txt": b"first\n", sources + "other.png": b"not text",
      "usr/share/doc/python3.11-doc/copyright": b"the licence\n"})
  text = b"first\nsecond\nlast, without a line end\n"
  packed = []
  for out in (tmp_path / "one", tmp_path / "two"):
    assert make_samples.main(["text", f"--out={out}", f"--debs={debs}"]) == 0
    packed.append((out / make_samples.TEXT_FILE).read_bytes())
    assert sorted(path.name for path in out.iterdir()) == [
        make_samples.TEXT_LICENSE, make_samples.TEXT_FILE]
    assert (out / make_samples.TEXT_LICENSE).read_bytes() == b"the licence\n"
  assert lzma.decompress(packed[0]) == text and packed[0] == packed[1]
  assert f"{len(text)} bytes" in capsys.readouterr().out


@needs_dpkg
def test_dictionary(tmp_path):
  text = b"Damascene: of Damascus.\n" * 100
  debs = _package(tmp_path, "dict-gcide", {
      "usr/share/dictd/gcide.dict.dz": gzip.compress(text)})
  out = tmp_path / "corpora"
  assert make_samples.main(["dictionary", f"--out={out}", f"--debs={debs}"]) == 0
  assert [path.read_bytes() for path in out.iterdir()] == [text]


def test_what_cannot_work_is_one_line(tmp_path, capsys):
  assert make_samples.main(["text", f"--out={tmp_path}", f"--debs={tmp_path}"]) == 1
  assert capsys.readouterr().err == f"error: no python3.11-doc_*.deb in {tmp_path}\n"
  (tmp_path / "python3.11-doc_1_all.deb").write_bytes(b"broken")
  assert make_samples.main(["text", f"--out={tmp_path}", f"--debs={tmp_path}"]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: 'dpkg-deb")
  with pytest.raises(SystemExit) as stop:
    make_samples.main(["dictionary"])
  assert stop.value.code == 2
