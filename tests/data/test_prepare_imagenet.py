"""Preparing ImageNet, with a stand-in for TFDS's builder, which would need TensorFlow."""

import types

import pytest
import tensorflow_datasets as tfds

from damcha_jax.data import imagenet, prepare, prepare_imagenet
import labelled_records


class Builder:
  """Writes small records where TFDS's own would."""

  def __init__(self, data_dir):
    self._data_dir, self.manual_dir = data_dir, None

  def download_and_prepare(self, download_config):
    self.manual_dir = download_config.manual_dir
    labelled_records.write_records(self._data_dir)


def _pretend(monkeypatch, has_tensorflow):
  monkeypatch.setattr(prepare_imagenet, "importlib", types.SimpleNamespace(
      util=types.SimpleNamespace(find_spec=lambda name: name if has_tensorflow else None)))


@pytest.fixture(name="built", autouse=True)
def _built(monkeypatch):
  built = []

  def builder(name, file_format, data_dir):
    assert (name, file_format) == ("imagenet2012", "array_record")
    built.append(Builder(data_dir))
    return built[-1]

  monkeypatch.setattr(tfds, "builder", builder)
  _pretend(monkeypatch, has_tensorflow=True)
  monkeypatch.setattr(imagenet, "NUM_IMAGES", labelled_records.NUM_IMAGES)
  monkeypatch.setattr(imagenet, "ARCHIVES", dict.fromkeys(imagenet.ARCHIVES, 3))
  monkeypatch.setattr(imagenet, "NUM_CLASSES", 9)
  return built


@pytest.fixture(name="manual")
def _manual(tmp_path):
  folder = tmp_path / "manual"
  folder.mkdir()
  for name in imagenet.ARCHIVES:
    (folder / name).write_bytes(b"tar")
  return folder


def _prepare(data_dir, *options):
  return prepare.main(["imagenet2012", f"--data_dir={data_dir}", *map(str, options)])


def test_it_is_prepared_once_and_counted(tmp_path, manual, built, capsys):
  assert _prepare(tmp_path, f"--manual_dir={manual}") == 0
  out = capsys.readouterr().out
  assert "imagenet2012/train: 22 images" in out and "imagenet2012/validation: 9 images" in out
  assert [one.manual_dir for one in built] == [str(manual)]
  assert _prepare(tmp_path) == 0
  assert "imagenet2012: already prepared\n" in capsys.readouterr().out and len(built) == 1


def test_verifying_decodes_every_image_and_counts_classes(tmp_path, manual, built, capsys,
                                                          monkeypatch):
  monkeypatch.setattr(prepare_imagenet, "_IMAGES_OF_A_CLASS", 1)
  assert _prepare(tmp_path, f"--manual_dir={manual}") == 0
  assert _prepare(tmp_path, "--verify") == 0
  assert "already prepared, every image verified" in capsys.readouterr().out
  monkeypatch.setattr(prepare_imagenet, "_IMAGES_OF_A_CLASS", 2)
  assert _prepare(tmp_path, "--verify") == 1  # and nothing to make it again from
  assert "has other than 2 validation images of some class" in capsys.readouterr().err
  assert len(built) == 1 and _prepare(tmp_path) == 0


def test_damaged_records_are_made_again(tmp_path, manual, built, capsys):
  labelled_records.write_records(tmp_path, damaged=3)
  assert _prepare(tmp_path) == 0 and not built
  assert _prepare(tmp_path, "--verify", f"--manual_dir={manual}") == 0
  assert "image n3.JPEG (record" in capsys.readouterr().err and len(built) == 1


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / "ILSVRC2012_img_val.tar").unlink(),
     "and ILSVRC2012_img_val.tar is not in "),
    (lambda folder: (folder / "ILSVRC2012_img_train.tar").write_bytes(b"ta"),
     "ILSVRC2012_img_train.tar has 2 bytes, not 3; fetch it again"),
])
def test_archives_that_are_missing_or_cut_short_are_named(tmp_path, manual, built, capsys, change,
                                                          message):
  change(manual)
  assert _prepare(tmp_path, f"--manual_dir={manual}") == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and message in line and "https://image-net.org" in line
  assert not built


def test_without_a_folder_or_tensorflow_it_is_said(tmp_path, manual, capsys, monkeypatch):
  assert _prepare(tmp_path) == 1
  assert "is not in any --manual_dir; register at" in capsys.readouterr().err
  _pretend(monkeypatch, has_tensorflow=False)
  assert _prepare(tmp_path, f"--manual_dir={manual}") == 1
  assert "pip install 'damcha-jax[prepare]'" in capsys.readouterr().err
