"""The prepare command: every source, every fault, and a kill at every stage."""

import dataclasses
import functools
import hashlib
import http.server
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from damcha_jax.config import DataConfig
from damcha_jax.data import archives, corpora, prepare, prepared
from damcha_jax.data.sources import load_corpus
from damcha_jax.errors import DataError

ROOT = Path(__file__).parents[2]
TEXT = np.random.default_rng(0).integers(97, 123, 20_001).astype(np.uint8).tobytes()


def _tiny(text=TEXT, **changes):
  return dataclasses.replace(corpora.CORPORA["enwik8"], num_bytes=len(text),
                             md5=hashlib.md5(text).hexdigest(), **changes)


@pytest.fixture(autouse=True)
def tiny_enwik8(monkeypatch):
  monkeypatch.setitem(corpora.CORPORA, "enwik8", _tiny(url="http://127.0.0.1:9/enwik8.zip"))


@pytest.fixture
def records(monkeypatch):
  """Leaves TFDS out where the records are beside the point: (calls to write, to verify)."""
  calls = []
  monkeypatch.setattr(prepare, "_write_records", lambda *args: calls.append("write"))
  monkeypatch.setattr(prepare, "_verify_records", lambda *args: calls.append("verify"))
  return calls


@pytest.fixture
def manual(tmp_path):
  folder = tmp_path / "manual"
  folder.mkdir()
  return folder


def _zip(folder, text=TEXT):
  with zipfile.ZipFile(folder / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("enwik8", text)
  return folder / "enwik8.zip"


def _run(*args):
  return prepare.main(["enwik8", *(str(arg) for arg in args)])


def _loaded(data_dir):
  corpus = load_corpus("enwik8", DataConfig(str(data_dir), False, None))
  return b"".join(getattr(corpus, split)["enwik8"].tobytes() for split in corpora.SPLITS)


def _one_error_line(capsys):
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")
  return line


@pytest.mark.parametrize("packed", [True, False])
def test_from_a_manual_folder(tmp_path, manual, records, capsys, packed):
  if packed:
    _zip(manual)
  else:
    (manual / "enwik8").write_bytes(TEXT)
  args = ("--data_dir", tmp_path, "--manual_dir", manual)
  assert _run(*args) == 0
  assert _loaded(tmp_path) == TEXT
  md5 = hashlib.md5(TEXT[:18000]).hexdigest()
  assert f"enwik8/train: 18,000 bytes, md5 {md5}" in capsys.readouterr().out
  assert _run(*args) == 0
  assert "already prepared" in capsys.readouterr().out
  assert records == ["write"]
  assert _run(*args, "--verify") == 0
  assert "every hash verified" in capsys.readouterr().out and records == ["write", "verify"]


def test_splits_are_memory_mapped(tmp_path):
  prepared.write_prepared("enwik8", tmp_path, TEXT)
  array = prepared.load_prepared("enwik8", tmp_path)["train"]
  while not isinstance(array, np.memmap):
    array = array.base
    assert array is not None


def test_missing_files_are_named(tmp_path, manual, capsys):
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 1
  line = _one_error_line(capsys)
  corpus = corpora.CORPORA["enwik8"]
  for fact in ("enwik8.zip", corpus.url, corpus.md5, str(manual), str(tmp_path), ":cpu"):
    assert fact in line


def test_without_a_network(tmp_path, capsys):
  assert _run("--data_dir", tmp_path) == 1  # nothing listens on the discard port
  line = _one_error_line(capsys)
  corpus = corpora.CORPORA["enwik8"]
  for fact in ("cannot download", corpus.url, corpus.md5, "--manual_dir=DIR", ":cpu"):
    assert fact in line


@pytest.mark.parametrize("fault, message", [
    ("short", "holds 20,000 bytes, not 20,001"), ("flipped", "holds data of md5"),
    ("cut", "cannot be read"), ("other", "cannot be read: .*no item named")])
def test_wrong_files_are_refused(tmp_path, manual, capsys, fault, message):
  if fault == "short":
    (manual / "enwik8").write_bytes(TEXT[:-1])
  elif fault == "flipped":
    _zip(manual, b"!" + TEXT[1:])
  elif fault == "cut":
    path = _zip(manual)
    path.write_bytes(path.read_bytes()[:-100])
  else:
    with zipfile.ZipFile(manual / "enwik8.zip", "w") as archive:
      archive.writestr("something", TEXT)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 1
  line = _one_error_line(capsys)
  assert re.search(message, line) and corpora.CORPORA["enwik8"].md5 in line
  with pytest.raises(DataError, match="not prepared"):
    _loaded(tmp_path)


@pytest.mark.parametrize("args", [["enwik9"], [], ["enwik8", "--no_such_flag"]])
def test_bad_usage_is_exit_status_2(args, capsys):
  with pytest.raises(SystemExit) as stop:
    prepare.main(args)
  assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


def test_mix_reports_both(tmp_path, manual, capsys):
  assert prepare.main(["mix", "--data_dir", str(tmp_path), "--manual_dir", str(manual)]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and "enwik8.zip" in line and "text8.zip" in line


class _Handler(http.server.SimpleHTTPRequestHandler):
  truncate = False

  def log_message(self, *args):
    pass

  def copyfile(self, source, outputfile):
    data = source.read()
    outputfile.write(data[:len(data) // 2] if self.truncate else data)


@pytest.fixture
def server(manual, monkeypatch):
  """Serves the manual folder over loopback, and is the corpus's published address."""
  handler = functools.partial(_Handler, directory=str(manual))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{running.server_port}/enwik8.zip"
    monkeypatch.setitem(corpora.CORPORA, "enwik8", _tiny(url=url))
    yield
    running.shutdown()
    thread.join()


def test_download(tmp_path, manual, server, records):
  _zip(manual)
  assert _run("--data_dir", tmp_path) == 0
  assert _loaded(tmp_path) == TEXT
  assert os.listdir(tmp_path / "downloads") == ["enwik8.zip"]


def test_a_lost_connection_leaves_no_file(tmp_path, manual, server, monkeypatch, capsys):
  _zip(manual)
  monkeypatch.setattr(_Handler, "truncate", True)
  assert _run("--data_dir", tmp_path) == 1
  assert "cannot download" in _one_error_line(capsys)
  assert os.listdir(tmp_path / "downloads") == []


def test_an_http_error_is_one_line(tmp_path, server, capsys):
  assert _run("--data_dir", tmp_path) == 1
  assert "404" in _one_error_line(capsys)


@pytest.mark.parametrize("damage", ["cut", "gone", "metadata", "other_corpus"])
def test_damage_is_found_on_loading_and_repaired(tmp_path, manual, records, damage):
  prepared.write_prepared("enwik8", tmp_path, TEXT)
  folder = prepared.prepared_dir("enwik8", tmp_path)
  if damage == "cut":
    (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:-1])
  elif damage == "gone":
    (folder / "test.npy").unlink()
  elif damage == "metadata":
    (folder / "metadata.json").write_text('{"format": 1')
  else:
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps({**metadata, "md5": "0" * 32}))
  with pytest.raises(DataError, match="is damaged.*damcha_jax.data.prepare enwik8"):
    _loaded(tmp_path)
  _zip(manual)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 0
  assert _loaded(tmp_path) == TEXT
  assert os.listdir(folder.parent) == ["enwik8"] and not (folder / "replaced").exists()


def test_a_flipped_bit_is_found_by_verify(tmp_path, manual, records, capsys):
  prepared.write_prepared("enwik8", tmp_path, TEXT)
  path = prepared.prepared_dir("enwik8", tmp_path) / "train.npy"
  data = bytearray(path.read_bytes())
  data[-1] ^= 1
  path.write_bytes(data)
  _zip(manual)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual, "--verify") == 0
  assert "train.npy has md5" in capsys.readouterr().err
  assert _loaded(tmp_path) == TEXT


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, manual, records, monkeypatch, capsys):
  def full(*args):
    raise OSError(28, "No space left on device")
  monkeypatch.setattr(prepared, "_sync", full)
  _zip(manual)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 1
  assert "No space left on device" in _one_error_line(capsys)
  assert os.listdir(tmp_path / "bytes") == []


def _subprocess(code, *args):
  """Runs code in a new process in which enwik8 is the tiny corpus."""
  corpus = corpora.CORPORA["enwik8"]
  setup = (f"import os, signal, sys\n"
           f"from damcha_jax.data import corpora, prepare, prepared\n"
           f"corpora.CORPORA['enwik8'] = corpora.ByteCorpus(**{dataclasses.asdict(corpus)!r})\n")
  return subprocess.run([sys.executable, "-c", setup + code, *map(str, args)], cwd=ROOT,
                        capture_output=True, text=True, timeout=120, check=False)


KILL = """
seen = []
real = {target}
def stop(*args, **kwargs):
  seen.append(1)
  if len(seen) == {call}:
    os.kill(os.getpid(), signal.SIGKILL)
  return real(*args, **kwargs)
{target} = stop
prepare._write_records = lambda *args: None
prepare.main(['enwik8', '--data_dir', sys.argv[1], '--manual_dir', sys.argv[2]])
"""


@pytest.mark.parametrize("target, call", [("prepared._sync", 1), ("prepared._sync", 4),
                                          ("os.rename", 1)])
def test_a_killed_preparation_is_not_read(tmp_path, manual, records, target, call):
  _zip(manual)
  done = _subprocess(KILL.format(target=target, call=call), tmp_path, manual)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert os.listdir(tmp_path / "bytes")  # it was killed at work
  with pytest.raises(DataError, match="not prepared"):
    _loaded(tmp_path)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 0
  assert _loaded(tmp_path) == TEXT and os.listdir(tmp_path / "bytes") == ["enwik8"]


BUILD = """
main = ['enwik8', '--data_dir', sys.argv[1], '--manual_dir', sys.argv[2]]
assert prepare.main(main) == 0
assert prepare.main(main + ['--verify']) == 0
import numpy as np
import tensorflow_datasets as tfds
import damcha_jax.data.builders.enwik8
builder = tfds.builder('enwik8', data_dir=sys.argv[1])
splits = {split: builder.as_data_source(split=split) for split in corpora.SPLITS}
for name, array in prepared.load_prepared('enwik8', sys.argv[1]).items():
  joined = np.concatenate([record['bytes'] for record in splits[name]])
  assert np.array_equal(joined, array), name
print([len(split) for split in splits.values()], splits['validation'][1]['offset'])
(records,) = [path for path in os.listdir(builder.data_dir) if 'test' in path]
with open(os.path.join(builder.data_dir, records), 'r+b') as file:
  file.truncate(100)
assert prepare.main(main + ['--verify']) == 0
assert prepare.main(main + ['--verify']) == 0
print('tensorflow' in sys.modules)
"""


def test_tfds_records_without_tensorflow(tmp_path, manual):
  _zip(manual)
  done = _subprocess(BUILD, tmp_path, manual)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert "[36, 2, 2] 18512" in lines and lines[-1] == "False"
  assert lines[-5].endswith("every hash verified")
  assert done.stderr.count("preparing it again") == 1


LOAD = """
import tensorflow_datasets as tfds
import damcha_jax.data.builders.enwik8
splits = tfds.data_source('enwik8', data_dir=sys.argv[1],
                          builder_kwargs={'file_format': 'array_record'})
print(sum(len(record['bytes']) for split in splits.values() for record in split))
"""


def test_a_builder_that_was_killed_is_run_again(tmp_path, manual):
  _zip(manual)
  code = KILL.format(target="archives.read_verified", call=2)  # the second one is the builder's
  code = "from damcha_jax.data import archives\n" + code.replace("prepare._write_records", "unused")
  done = _subprocess(code, tmp_path, manual)
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert "incomplete" in " ".join(os.listdir(tmp_path / "enwik8"))
  with pytest.raises(DataError, match="not prepared"):
    _loaded(tmp_path)
  assert _run("--data_dir", tmp_path, "--manual_dir", manual) == 0
  assert _run("--data_dir", tmp_path, "--manual_dir", manual, "--verify") == 0
  assert _loaded(tmp_path) == TEXT


def test_tfds_downloads_by_itself(tmp_path, manual, server):
  _zip(manual)
  done = _subprocess(LOAD, tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == str(len(TEXT))


def test_find_prefers_the_unpacked_file(manual):
  corpus = corpora.CORPORA["enwik8"]
  assert archives.find(corpus, manual) is None
  path = _zip(manual)
  assert archives.find(corpus, manual) == path
  (manual / "enwik8").write_bytes(TEXT)
  assert archives.find(corpus, manual) == manual / "enwik8"
