"""Preparing CIFAR, on an archive made here: every fault, and the records, without TensorFlow."""

import dataclasses
import hashlib
import io
import os
from pathlib import Path
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from damcha_jax.data import image_sets, prepare, prepared_images
from damcha_jax.errors import DataError

ROOT = Path(__file__).parents[2]
NUM_IMAGES = {"train": 200, "test": 100}


def _records(name, split, seed):
  """Labels and pixels, of all classes alike many, as the published files hold them."""
  rng = np.random.default_rng(seed)
  count = NUM_IMAGES[split]
  labels = [np.arange(count) % classes
            for _, classes in image_sets.IMAGE_SETS[name].label_names.values()]
  return np.column_stack([*labels, rng.integers(0, 256, (count, 3072))]).astype(np.uint8)


def _archive(folder, name, change=lambda split, records: records):
  """Writes a small archive in the published layout; the facts that describe it."""
  facts = image_sets.IMAGE_SETS[name]
  path = folder / facts.archive
  with tarfile.open(path, "w:gz") as archive:
    def add(file, data):
      member = tarfile.TarInfo(file)
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))

    for seed, (split, files) in enumerate(facts.files.items()):
      parts = np.array_split(change(split, _records(name, split, seed)), len(files))
      for file, part in zip(files, parts):
        add(file, part.tobytes())
    for file, classes in facts.label_names.values():
      add(file, "".join(f"class_{n}\n" for n in range(classes)).encode())
  data = path.read_bytes()
  return dataclasses.replace(facts, num_bytes=len(data), md5=hashlib.md5(data).hexdigest(),
                             num_images=NUM_IMAGES)


@pytest.fixture(name="manual")
def _manual(tmp_path):
  folder = tmp_path / "manual"
  folder.mkdir()
  return folder


def _run(name, tmp_path, manual, *more):
  return prepare.main([name, f"--data_dir={tmp_path}", f"--manual_dir={manual}", *more])


@pytest.fixture(name="without_records")
def _without_records(monkeypatch):
  monkeypatch.setattr(prepare, "_write_records", lambda *args: None)
  monkeypatch.setattr(prepare, "_verify_records", lambda *args: None)


def test_the_facts_are_the_published_ones():
  for image_set in image_sets.IMAGE_SETS.values():
    assert dict(image_set.num_images) == {"train": 50_000, "test": 10_000}
    assert image_set.num_bytes > 0.9 * 60_000 * 3072 and len(image_set.md5) == 32


@pytest.mark.parametrize("name", image_sets.IMAGE_SETS)
def test_images_and_labels_come_out_as_published(tmp_path, manual, monkeypatch, capsys,
                                                 without_records, name):
  monkeypatch.setitem(image_sets.IMAGE_SETS, name, _archive(manual, name))
  assert _run(name, tmp_path, manual) == 0
  assert f"{name}/train: 200 images, md5" in capsys.readouterr().out
  for seed, (split, labelled) in enumerate(prepared_images.load_images(name, tmp_path).items()):
    records = _records(name, split, seed)
    planes = labelled.images.transpose(0, 3, 1, 2).reshape(len(records), 3072)
    assert np.array_equal(planes, records[:, -3072:])
    assert np.array_equal(labelled.labels["label"], records[:, -3073])  # the fine one
  assert _run(name, tmp_path, manual, "--verify") == 0
  assert "every hash verified" in capsys.readouterr().out


@pytest.mark.parametrize("fault, message", [
    ("missing", "no cifar-10-binary.tar.gz is in"), ("short", "bytes, not"), ("flipped", "has md5"),
    ("torn", "cannot be read"), ("few", "not 200 records of 3,073"),
    ("unequal", "other than 20 train images of some label")])
def test_what_is_wrong_with_an_archive_is_one_line(tmp_path, manual, monkeypatch, capsys,
                                                   without_records, fault, message):
  def change(split, records):
    if split == "train" and fault == "few":
      return records[:-1]
    if split == "train" and fault == "unequal":
      records[0, 0] = 1
    return records

  facts = _archive(manual, "cifar10", change)
  path = manual / facts.archive
  data = path.read_bytes()
  if fault == "missing":
    path.unlink()
  elif fault == "short":
    path.write_bytes(data[:-1])
  elif fault == "flipped":
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
  elif fault == "torn":
    path.write_bytes(data[:1000])
    facts = dataclasses.replace(facts, num_bytes=1000, md5=hashlib.md5(data[:1000]).hexdigest())
  monkeypatch.setitem(image_sets.IMAGE_SETS, "cifar10", facts)
  assert _run("cifar10", tmp_path, manual) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and message in line
  with pytest.raises(DataError, match="not prepared.*fetch https.*sample images"):
    prepared_images.load_images("cifar10", tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "metadata"])
def test_damage_is_found_and_mended(tmp_path, manual, monkeypatch, capsys, without_records,
                                    damage):
  monkeypatch.setitem(image_sets.IMAGE_SETS, "cifar10", _archive(manual, "cifar10"))
  assert _run("cifar10", tmp_path, manual) == 0
  folder = prepared_images.prepared_dir("cifar10", tmp_path)
  file = folder / ("metadata.json" if damage == "metadata" else "test_images.npy")
  data = file.read_bytes()
  file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flipped" else data[:-1])
  assert _run("cifar10", tmp_path, manual, "--verify") == 0
  assert "preparing it again" in capsys.readouterr().err
  assert _run("cifar10", tmp_path, manual, "--verify") == 0
  assert capsys.readouterr().err == ""


BUILD = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from damcha_jax.data import image_sets, prepare, prepared_images
facts = image_sets.ImageSet(**{facts!r})
image_sets.IMAGE_SETS['cifar100'] = facts
main = ['cifar100', '--data_dir', sys.argv[1], '--manual_dir', sys.argv[2]]
assert prepare.main(main) == 0
assert prepare.main(main + ['--verify']) == 0
train = tfds.data_source('cifar100', data_dir=sys.argv[1], split='train',
                         builder_kwargs={{'file_format': 'array_record'}})
images = prepared_images.load_images('cifar100', sys.argv[1])['train'].images
for record in train:
  assert np.array_equal(record['image'], images[int(record['id'][-5:])])
assert train.dataset_info.features['coarse_label'].names[3] == 'class_3'
print(len(train), 'tensorflow' in sys.modules)
"""


def test_tfds_reads_the_records_without_tensorflow(tmp_path, manual):
  facts = dataclasses.asdict(_archive(manual, "cifar100"))
  done = subprocess.run([sys.executable, "-c", BUILD.format(facts=facts), tmp_path, manual],
                        cwd=ROOT, capture_output=True, text=True, check=False,
                        env={**os.environ, "NO_GCE_CHECK": "true"})
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[-1] == "200 False" and any(line.endswith("every hash verified") for line in lines)
