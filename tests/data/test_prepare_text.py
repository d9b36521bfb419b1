"""Preparing WMT14 and CommonGen, from a stand-in for TFDS's catalogue and from an archive."""

import json
import lzma
import zipfile

import pytest
import tensorflow_datasets as tfds

from damcha_jax.data import prepare, text_pairs
from damcha_jax.data.text_pairs import Example, Published, load_pairs

CONCEPTS = [f"concept{n}" for n in range(6)]


class Records(list):

  def __getitems__(self, indices):
    return [self[index] for index in indices]


class Builder:
  """Records as TFDS gives them: bytes, and for CommonGen no references in the training part."""

  splits = {
      "wmt14": {"train": [{"en": b"A tab\there", "de": "Größe".encode()}] * 3,
                "validation": [{"en": b"v", "de": b"w"}], "test": [{"en": b"x", "de": b"y"}]},
      "commongen": {
          "train": [{"concepts": [name.encode(), b"dog"], "target": f"{name} {n}".encode(),
                     "references": []} for name in CONCEPTS for n in range(2)],
          "validation": [{"concepts": [b"cat", b"run"], "target": b"one",
                          "references": [b"one", b"two"]}]},
  }

  def __init__(self, name):
    self._name, self.config = name, None

  def download_and_prepare(self, download_config):
    self.config = download_config

  def as_data_source(self, split):
    return Records(self.splits[self._name][split])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
  names = {text_pairs.PUBLISHED[name].catalogue_name: name for name in Builder.splits}
  for name, splits in Builder.splits.items():
    counts = {split: len(records) for split, records in splits.items()}
    monkeypatch.setitem(text_pairs.PUBLISHED, name,
                        Published(text_pairs.PUBLISHED[name].catalogue_name, counts))
  monkeypatch.setattr(text_pairs.hold_out_concept_sets, "__defaults__", (2,))
  monkeypatch.setattr(tfds, "builder", lambda name, **options: Builder(names[name]))


def _prepare(name, data_dir, *options):
  return prepare.main([name, f"--data_dir={data_dir}", *options])


def test_wmt14_is_read_without_tfds_afterwards(tmp_path, capsys):
  assert _prepare("wmt14", tmp_path) == 0
  assert "wmt14/train: 3 examples" in capsys.readouterr().out
  pairs = load_pairs("wmt14", str(tmp_path), "en-de")
  assert pairs.examples("train") == (Example("A tab here", ("Größe",)),) * 3
  assert load_pairs("wmt14", str(tmp_path), "de-en").examples("test") == (Example("y", ("x",)),)


def test_commongen_reports_its_validation_split_and_holds_out_concept_sets(tmp_path):
  assert _prepare("commongen", tmp_path) == 0
  pairs = load_pairs("commongen", str(tmp_path))
  assert pairs.examples("test") == (Example("cat run", ("one", "two")),)
  held_out = pairs.examples("validation")
  assert [len(one.references) for one in held_out] == [2, 2]
  sources = [one.source for one in pairs.examples("train")]
  assert len(sources) == 8 and set(sources).isdisjoint(one.source for one in held_out)
  assert text_pairs.published_split("commongen", "test") == ("validation", None)
  assert text_pairs.published_split("commongen", "validation") == ("train", "held_out")


def _archive(folder, **changes):
  lines = {"train": [json.dumps({"concept_set": f"{name}#dog", "scene": [f"{name} 0", f"{name} 1"]})
                     for name in CONCEPTS],
           "dev": ['{"concept_set": "cat#run", "scene": ["one", "two"], }'], **changes}
  with zipfile.ZipFile(folder / "commongen_data.zip", "w") as archive:
    for split, entries in lines.items():
      archive.writestr(f"inside/commongen.{split}.jsonl", "\n".join(entries))


def test_commongen_from_a_manual_folder_is_the_same(tmp_path):
  manual = tmp_path / "manual"
  manual.mkdir()
  _archive(manual)
  assert _prepare("commongen", tmp_path / "one", f"--manual_dir={manual}") == 0
  assert _prepare("commongen", tmp_path / "two") == 0
  for split in text_pairs.SPLITS:
    assert (load_pairs("commongen", str(tmp_path / "one")).examples(split)
            == load_pairs("commongen", str(tmp_path / "two")).examples(split))


def test_what_is_prepared_is_left_alone_unless_it_is_damaged(tmp_path, capsys):
  assert _prepare("wmt14", tmp_path) == 0
  assert _prepare("wmt14", tmp_path, "--verify") == 0
  assert "already prepared, every hash verified" in capsys.readouterr().out
  path = tmp_path / "text" / "wmt14" / "test.tsv.xz"
  sound = path.read_bytes()
  other = lzma.compress(b"x\tz\n", check=lzma.CHECK_CRC32, preset=1)
  assert len(other) == len(sound)
  path.write_bytes(other)
  assert _prepare("wmt14", tmp_path, "--verify") == 0
  assert "preparing it again" in capsys.readouterr().err and path.read_bytes() == sound
  path.write_bytes(sound[:-1])
  assert _prepare("wmt14", tmp_path) == 0
  assert path.read_bytes() == sound
  assert [one.name for one in path.parent.parent.iterdir()] == ["wmt14"]


def test_what_cannot_be_prepared_is_one_line(tmp_path, capsys, monkeypatch):
  def fails(*options, **more):
    raise RuntimeError("no network")

  manual = tmp_path / "manual"
  manual.mkdir()
  cases = [(["wmt14", f"--manual_dir={manual}"], "fetch http://www.statmt.org/wmt13/")]
  _archive(manual, dev=[])
  cases.append((["commongen", f"--manual_dir={manual}"], "has no validation part"))
  cases.append((["wmt14"], "no network; without a network, fetch http"))
  monkeypatch.setattr(tfds, "builder", fails)
  for arguments, message in cases:
    assert _prepare(arguments[0], tmp_path / "data", *arguments[1:]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
  (manual / "commongen_data.zip").write_bytes(b"no archive")
  assert _prepare("commongen", tmp_path / "data", f"--manual_dir={manual}") == 1
  _archive(manual, train=['{"concept_set": "a#b", "scene": ["c"]}'])
  assert _prepare("commongen", tmp_path / "data", f"--manual_dir={manual}") == 1
  assert "has 1 train examples, not the 12 published" in capsys.readouterr().err
