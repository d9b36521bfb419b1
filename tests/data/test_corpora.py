"""What each dataset name gives: sizes and hashes of the sample, one's own files, and Mix."""

import dataclasses
import hashlib
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from damcha_jax.config import ConfigError, DataConfig
from damcha_jax.data import corpora, prepared, sources, text8
from damcha_jax.data.baselines import gzip9_bits_per_byte
from damcha_jax.data.decontamination import find_overlap
from damcha_jax.data.sources import TrainWindows, load_corpus
from damcha_jax.data.text8 import clean_wikitext
from damcha_jax.errors import DataError

SAMPLE = {  # (bytes, md5), as published in samples/README.md
    ("sample_text", "train"): (9943447, "e14eec51bf602544f5359da80ef1f838"),
    ("sample_text", "validation"): (552414, "ffaa4aba72d63da89c0419f0f85190ca"),
    ("sample_text", "test"): (552414, "60ed7d1f009ab8c479d26fdb378e162c"),
    ("sample_text8", "train"): (7689736, "8e4829f9623551c2aec21722a487f027"),
    ("sample_text8", "validation"): (469599, "b10f5ff4e68aa704dac9d7738ff3a92d"),
    ("sample_text8", "test"): (491170, "12be76f758d96802a3fad000085727f8"),
}
GZIP9 = {"sample_text": 2.638, "sample_text8": 2.312}
SAMPLES_DIR = sources.SAMPLE_FILE.parent


def _config(data_dir="/nonexistent", decontaminate=False):
  return DataConfig(data_dir=str(data_dir), decontaminate=decontaminate,
                    max_held_out_bytes=None)


@pytest.mark.parametrize("name", ["sample_text", "sample_text8"])
def test_sample_hashes(name):
  corpus = load_corpus(name, _config())
  assert corpus.name == name and corpus.notes == ()
  for split in corpora.SPLITS:
    ((source, array),) = getattr(corpus, split).items()
    assert source == name and array.dtype == np.uint8 and array.ndim == 1
    assert (len(array), hashlib.md5(array).hexdigest()) == SAMPLE[name, split]
    assert not (array == sources.BOS).any()
    assert SAMPLE[name, split][1] in (SAMPLES_DIR / "README.md").read_text()
  assert round(gzip9_bits_per_byte(corpus.validation[name]), 3) == GZIP9[name]


def test_sample_text8_is_letters_and_single_spaces():
  for array in load_corpus("sample_text8", _config()).test.values():
    text = array.tobytes()
    assert set(text) == set(b" abcdefghijklmnopqrstuvwxyz") and b"  " not in text


def test_the_samples_are_small_and_carry_their_licence():
  assert sum(path.stat().st_size for path in SAMPLES_DIR.iterdir()) < 8e6
  assert b"PYTHON SOFTWARE FOUNDATION LICENSE" in (
      SAMPLES_DIR / "LICENSE.python_docs").read_bytes()


def test_sample_mix_has_both_sources():
  corpus = load_corpus("sample_mix", _config())
  for split in corpora.SPLITS:
    assert list(getattr(corpus, split)) == ["sample_text", "sample_text8"]


def test_sample_mix_decontaminated_shares_no_passage_with_what_is_held_out():
  corpus = load_corpus("sample_mix", _config(decontaminate=True))
  plain = load_corpus("sample_mix", _config())
  cleaned = load_corpus("sample_text8", _config())
  held_out = [cleaned.validation["sample_text8"].tobytes(), cleaned.test["sample_text8"].tobytes()]
  assert corpus.train["sample_text"] is plain.train["sample_text"]
  (note,) = corpus.notes
  lost = len(plain.train["sample_text8"]) - len(corpus.train["sample_text8"])
  assert 0 < lost and f"dropped {lost:,} of 7,689,736 bytes" in note
  assert find_overlap(corpus.train["sample_text8"], held_out) == []


def test_held_out_parts_can_be_shortened_and_training_is_not():
  whole = load_corpus("sample_mix", _config())
  short = load_corpus("sample_mix", dataclasses.replace(_config(), max_held_out_bytes=1000))
  for split in ("validation", "test"):
    for source, array in getattr(short, split).items():
      np.testing.assert_array_equal(array, getattr(whole, split)[source][:1000])
  assert {source: len(array) for source, array in short.train.items()} == {
      source: len(array) for source, array in whole.train.items()}


def test_gzip9_formula():
  array = np.frombuffer(bytes(range(256)) * 4, np.uint8)
  compressed = subprocess.run(["gzip", "-9", "-n"], input=array.tobytes(), check=True,
                              capture_output=True).stdout
  assert gzip9_bits_per_byte(array) == 8 * len(compressed) / 1024
  with pytest.raises(ValueError, match="no bytes"):
    gzip9_bits_per_byte(array[:0])


def test_own_file_is_split_in_order(tmp_path):
  path = tmp_path / "own.txt"
  path.write_bytes(bytes(range(1, 201)))
  corpus = load_corpus(str(path), _config())
  parts = [getattr(corpus, split)[str(path)] for split in corpora.SPLITS]
  assert [len(part) for part in parts] == [180, 10, 10]
  assert np.concatenate(parts).tobytes() == path.read_bytes()


def test_own_file_is_cleaned_and_mixed_split_by_split(tmp_path):
  path = tmp_path / "own.txt"
  path.write_text("".join(f"* Entry {number}: {'ABC' * number}\n" for number in range(200)))
  own, cleaned = load_corpus(str(path), _config()), load_corpus(f"text8:{path}", _config())
  mixed = load_corpus(f"mix:{path}", _config())
  for split in corpora.SPLITS:
    (array,), (clean,) = getattr(own, split).values(), getattr(cleaned, split).values()
    assert clean.tobytes() == text8.normalize(array.tobytes())
    for one, part in zip((array, clean), getattr(mixed, split).values(), strict=True):
      assert np.array_equal(one, part)
  assert own.hashes == cleaned.hashes == mixed.hashes
  path.write_text("another text " * 100)
  (changed,) = load_corpus(f"text8:{path}", _config()).train.values()
  assert changed.tobytes().startswith(b"another text another")


def test_own_mix_is_decontaminated_as_it_was_cleaned(tmp_path):
  path = tmp_path / "own.txt"
  words = np.random.default_rng(0).integers(0, 1000, 5000)
  lines = "".join(f"Word-{word},\n" for word in words)
  path.write_text(lines + lines[-2000:] * 2)  # ends on what training has
  plain, cut = (load_corpus(f"mix:{path}", _config(decontaminate=one)) for one in (False, True))
  (raw, cleaned), (raw_cut, cleaned_cut) = plain.train.values(), cut.train.values()
  assert np.array_equal(raw, raw_cut) and len(cleaned_cut) < len(cleaned)


@pytest.mark.parametrize("dataset, message", [
    ("text8:", "'text8:' or 'mix:' is the path of a text file; add it"), ("mix:enwik9", "unknown dataset 'enwik9'"),
    *((f"{kind}:{name}", f"path of a text file, not the dataset '{name}'; use '{name}' alone")
      for kind, name in (("text8", "enwik8"), ("mix", "mix"), ("mix", "sample_text")))])
def test_only_paths_are_cleaned_and_mixed(dataset, message):
  with pytest.raises(ConfigError, match=message):
    load_corpus(dataset, _config())


def test_own_file_of_which_cleaning_leaves_nothing(tmp_path):
  path = tmp_path / "own.txt"
  path.write_text("日本語" * 100)
  load_corpus(str(path), _config())
  for kind in ("text8", "mix"):
    with pytest.raises(DataError, match="nothing of the train part of the text file .*own.txt"):
      load_corpus(f"{kind}:{path}", _config())


@pytest.mark.parametrize("content, message", [
    (b"", "is empty"), (b"x" * 10, "only 10 bytes"), (b"ab\0" * 50, "NUL byte at offset 2.*unpacked")])
def test_own_file_that_cannot_be_used(tmp_path, content, message):
  path = tmp_path / "own.txt"
  path.write_bytes(content)
  with pytest.raises(DataError, match=message) as error:
    load_corpus(str(path), _config())
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_datasets_that_are_not_there(tmp_path):
  with pytest.raises(DataError, match="missing.txt cannot be read"):
    load_corpus(str(tmp_path / "missing.txt"), _config())
  os.mkfifo(tmp_path / "pipe.txt")
  for path in (tmp_path, tmp_path / "pipe.txt"):
    with pytest.raises(DataError, match="cannot be read as a text file: it is a folder, pipe"):
      load_corpus(str(path), _config())
  with pytest.raises(ConfigError, match="unknown dataset 'enwik9'; use one of enwik8, text8"):
    load_corpus("enwik9", _config())


@pytest.mark.parametrize("name", ["enwik8", "text8", "mix"])
def test_unprepared_data_says_what_to_do(tmp_path, name):
  with pytest.raises(DataError) as error:
    load_corpus(name, _config(tmp_path))
  text = str(error.value)
  first = corpora.CORPORA["enwik8" if name == "mix" else name]
  for fact in (first.url, first.md5, first.archive, "100,000,000", str(tmp_path),
               f"python -m damcha_jax.data.prepare {first.name}", ":cpu"):
    assert fact in text
  assert "\n" not in text
  if name == "mix":
    assert f"python -m damcha_jax.data.prepare mix --data_dir={tmp_path}" in text
    assert "configs/mix.py:cpu" in text


def test_published_facts():
  assert {name: corpus.md5 for name, corpus in corpora.CORPORA.items()} == {
      "enwik8": "a1fa5ffddb56f4953e226637dabbb36a", "text8": "3bea1919949baf155f99411df5fada7e"}
  assert {name: b - a for name, (a, b) in corpora.split_bounds(100_000_000).items()} == {
      "train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}


def _dump(num_pages):
  rng = np.random.default_rng(0)
  words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 9)))
           for _ in range(3000)]
  page = '<page><title>{}</title><text xml:space="preserve">{}</text></page>\n'
  return "".join(
      page.format(i, " ".join(f"[[{words[w]}]]" if w % 9 == 0 else words[w]
                              for w in rng.integers(0, 3000, 300)))
      for i in range(num_pages)).encode()


def test_mix_of_one_dump_is_decontaminated(tmp_path, monkeypatch):
  """As in the real pair: the cleaned corpus goes on 1.4 times as far into the same dump."""
  dump = _dump(560)
  texts = {"enwik8": dump[:len(dump) * 10 // 14], "text8": clean_wikitext(dump)}
  for name, text in texts.items():
    corpus = dataclasses.replace(corpora.CORPORA[name], num_bytes=len(text),
                                 md5=hashlib.md5(text).hexdigest())
    monkeypatch.setitem(corpora.CORPORA, name, corpus)
    prepared.write_prepared(name, tmp_path, text)

  plain, cut = load_corpus("mix", _config(tmp_path)), load_corpus("mix", _config(tmp_path, True))
  first = len(clean_wikitext(plain.train["enwik8"].tobytes()))
  last = len(clean_wikitext(texts["enwik8"]))
  held_out = texts["text8"][first:last]  # where the articles lie, known from the construction
  assert held_out in plain.train["text8"].tobytes()
  remaining = cut.train["text8"].tobytes()
  for i in range(0, len(held_out) - 64, 61):
    assert held_out[i:i + 64] not in remaining
  assert len(held_out) <= len(plain.train["text8"]) - len(remaining) < len(held_out) + 2500
  assert "decontaminated text8: dropped" in cut.notes[0] and "1 range(s)" in cut.notes[0]
  assert np.array_equal(cut.train["enwik8"], plain.train["enwik8"])
  assert cut.validation.keys() == plain.validation.keys() == {"enwik8", "text8"}
  targets = TrainWindows(cut.train, 8, 32, seed=0).batch_at(0)["targets"]
  letters = [set(row.tobytes()[::4]) <= set(b" abcdefghijklmnopqrstuvwxyz") for row in targets]
  assert letters[1::2] == [True] * 4


def test_training_reads_data_without_tfds_or_tensorflow():
  code = ("import sys, damcha_jax.data.sources; "
          "print([m for m in ('tensorflow', 'tensorflow_datasets') if m in sys.modules])")
  done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                        cwd=Path(__file__).parents[2])
  assert done.stdout.strip() == "[]"
