"""Prepares the real corpora, image sets and sets of texts for training and for TFDS.

  python -m damcha_jax.data.prepare NAME [--data_dir=DIR] [--manual_dir=DIR] [--verify]

NAME is enwik8, text8, mix, cifar10, cifar100, wmt14, commongen or imagenet2012; how the last three
are prepared `prepare_text` and `prepare_imagenet` tell. Of the others it downloads the published
archive, or takes it from a manual folder, and makes two things of it: the memory-mapped arrays that
training reads, in `<data_dir>/bytes/<name>/` or `<data_dir>/images/<name>/`, and
`<data_dir>/<name>/<version>/`, ArrayRecord files for TFDS. What is already there is left alone;
`--verify` checks every byte of it, and makes it again if one is wrong. A preparation that is killed
leaves nothing that would be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import hashlib
import http.client
from pathlib import Path
import shutil
import sys
from typing import Any, Optional

import numpy as np

from damcha_jax.data import archives, corpora, image_sets, imagenet, prepare_imagenet, prepare_text
from damcha_jax.data import prepared, prepared_images, text_pairs
from damcha_jax.errors import DataError, until_nobody_reads, UserError
from damcha_jax.files import expanded

_RECORDS_AT_ONCE = 1024


def main(argv: Optional[list[str]] = None) -> int:
  """Exit status: 0 prepared, 1 missing or damaged data, 2 bad usage."""
  parser = argparse.ArgumentParser(prog="python -m damcha_jax.data.prepare",
                                   description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("name", choices=(*corpora.PREPARABLE, *image_sets.IMAGE_SETS,
                                        *text_pairs.PUBLISHED, imagenet.NAME))
  parser.add_argument("--data_dir", default=prepared.DEFAULT_DATA_DIR,
                      help="where prepared data goes (default: %(default)s)")
  parser.add_argument("--manual_dir", help="folder with files fetched by hand; nothing is "
                      "downloaded then")
  parser.add_argument("--verify", action="store_true", help="hash every byte that is prepared")
  args = parser.parse_args(argv)
  messages, status = [], 0
  for name in corpora.MIX if args.name == "mix" else (args.name,):
    make = (prepare_text.prepare if name in text_pairs.PUBLISHED else
            prepare_imagenet.prepare if name == imagenet.NAME else prepare)
    try:
      make(name, args.data_dir, args.manual_dir, args.verify)
    except UserError as error:
      messages.append(str(error))
      status = error.exit_status
    except KeyboardInterrupt:
      print("error: interrupted; the same command starts again", file=sys.stderr)
      return 1
  if messages:
    print(f"error: {'; and '.join(messages)}", file=sys.stderr)
  return status


class _Bytes:
  """How a corpus of bytes is prepared."""

  def __init__(self, name: str, data_dir: str):
    self.source, self.folder = corpora.CORPORA[name], prepared.prepared_dir(name, data_dir)
    self.files = (self.source.archive, name)
    self._of = (name, data_dir)

  def how_to_get(self, manual_dir: Optional[str] = None) -> str:
    return corpora.how_to_get(*self._of, manual_dir)

  def read(self, path: Path) -> bytes:
    return archives.read_verified(self.source, path)

  def write(self, data: bytes) -> None:
    prepared.write_prepared(*self._of, data)

  def load(self) -> Any:
    return prepared.load_prepared(*self._of)

  def verify(self) -> None:
    prepared.verify_prepared(*self._of)

  def describe(self) -> Iterator[str]:
    for split, facts in prepared.read_metadata(*self._of)["splits"].items():
      yield f"{split}: {facts['num_bytes']:,} bytes, md5 {facts['md5']}"

  def differences(self, splits: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the records by split: joined, they should be the published file."""
    whole = hashlib.md5()
    for split in corpora.SPLITS:
      for record in _each(splits[split]):
        whole.update(record["bytes"])
    if whole.hexdigest() != self.source.md5:
      yield f"have md5 {whole.hexdigest()}, not {self.source.md5}"


class _Images:
  """How an image set is prepared."""

  def __init__(self, name: str, data_dir: str):
    self.source = image_sets.IMAGE_SETS[name]
    self.folder = prepared_images.prepared_dir(name, data_dir)
    self.files = (self.source.archive,)
    self._of = (name, data_dir)

  def how_to_get(self, manual_dir: Optional[str] = None) -> str:
    return image_sets.how_to_get(*self._of, manual_dir)

  def read(self, path: Path) -> dict[str, image_sets.Labelled]:
    return image_sets.read_verified(self.source, path)[0]

  def write(self, data: dict[str, image_sets.Labelled]) -> None:
    prepared_images.write_images(*self._of, data)

  def load(self) -> dict[str, image_sets.Labelled]:
    return prepared_images.load_images(*self._of)

  def verify(self) -> None:
    prepared_images.verify_images(*self._of)

  def describe(self) -> Iterator[str]:
    files = prepared_images.read_metadata(*self._of)["files"]
    for split, labelled in self.load().items():
      yield f"{split}: {len(labelled.images):,} images, md5 {files[f'{split}_images']}"

  def differences(self, splits: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the records by split: they should be the prepared images, shuffled."""
    for split, labelled in self.load().items():
      seen = np.zeros(len(labelled.images), bool)
      for record in _each(splits[split]):
        index = int(record["id"].decode().rpartition("_")[2])
        if (not np.array_equal(record["image"], labelled.images[index])
            or record["label"] != labelled.labels["label"][index]):
          yield f"have another {record['id'].decode()}"
          return
        seen[index] = True
      if not seen.all():
        yield f"lack {np.count_nonzero(~seen)} {split} images"


def _kind(name: str, data_dir: str) -> _Bytes | _Images:
  return (_Images if name in image_sets.IMAGE_SETS else _Bytes)(name, data_dir)


def prepare(name: str, data_dir: str, manual_dir: Optional[str] = None,
            verify: bool = False) -> None:
  """Prepares `name` unless it is there already, and prints what is there.

  Raises:
    DataError: the source file is missing or wrong, or the data cannot be written.
  """
  kind = _kind(name, data_dir)
  if kind.folder.exists() and _is_sound(kind, name, data_dir, verify):
    print(f"{name}: already prepared" + (", every hash verified" if verify else ""))
  else:
    path, data = _obtain(kind, data_dir, manual_dir)
    # The arrays come last: where they are, the records are too.
    _write_records(name, data_dir, path.parent)
    kind.write(data)
    kind.verify()
  for line in kind.describe():
    print(f"{name}/{line}, in {kind.folder}")


def _is_sound(kind: _Bytes | _Images, name: str, data_dir: str, verify: bool) -> bool:
  try:
    if verify:
      kind.verify()
      _verify_records(name, data_dir)
    else:
      kind.load()
  except DataError as error:
    print(f"{error.args[0].split('; run ')[0]}; preparing it again", file=sys.stderr)
    return False
  return True


def _obtain(kind: _Bytes | _Images, data_dir: str, manual_dir: Optional[str]) -> tuple[Path, Any]:
  """Path and verified content of the published file, from the manual folder or the network."""
  source = kind.source
  if manual_dir is not None:
    path = archives.find(source, expanded(manual_dir))
    if path is None:
      missing = f"neither {' nor '.join(kind.files)}" if len(kind.files) > 1 else (
          f"no {kind.files[0]}")
      raise DataError(f"{missing} is in {manual_dir}; " + kind.how_to_get(manual_dir))
  else:
    downloads = expanded(data_dir) / "downloads"
    path = archives.find(source, downloads)
    if path is None:
      print(f"{source.name}: downloading {source.url}", flush=True)
      try:
        path = archives.download(source, downloads)
      except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {source.url} to {downloads}: {error}; "
                        + kind.how_to_get()) from error
  return path, kind.read(path)


def _builder(name: str, data_dir: str):
  """The TFDS builder of `name`; the one place that imports tensorflow_datasets."""
  try:
    import tensorflow_datasets as tfds
    import array_record.python.array_record_module  # pylint: disable=unused-import
    from damcha_jax.data.builders import cifar, enwik8, text8
  except ImportError as error:
    raise DataError(f"preparing data needs a package that is not installed ({error}); run "
                    "pip install 'damcha-jax[prepare]'") from error
  tfds.disable_progress_bar()
  builders = {"enwik8": enwik8.Enwik8, "text8": text8.Text8, "cifar10": cifar.Cifar10,
              "cifar100": cifar.Cifar100}
  return builders[name](data_dir=str(expanded(data_dir)), file_format="array_record")


def _write_records(name: str, data_dir: str, source_dir: Path) -> None:
  """Makes the ArrayRecord files, unless sound ones are there."""
  builder = _builder(name, data_dir)
  import tensorflow_datasets as tfds
  try:
    if Path(builder.data_dir).exists():
      try:
        _verify_records(name, data_dir)
        return
      except DataError:
        shutil.rmtree(builder.data_dir)
        builder = _builder(name, data_dir)
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=str(source_dir)))
  except OSError as error:
    raise DataError(f"cannot write {builder.data_dir}: {error}; free some space or choose "
                    "another --data_dir") from error


def _verify_records(name: str, data_dir: str) -> None:
  """Raises DataError unless the records hold what was published."""
  builder = _builder(name, data_dir)
  kind = _kind(name, data_dir)
  try:
    splits = builder.as_data_source()
    wrong = next(kind.differences(splits), None)
  except Exception as error:  # each file format and TFDS itself have errors of their own
    raise DataError(f"the records in {builder.data_dir} cannot be read: {error}") from error
  if wrong:
    raise DataError(f"the records in {builder.data_dir} {wrong}")


def _each(records: Any) -> Iterator[Any]:
  """The records of one split, in its order."""
  for first in range(0, len(records), _RECORDS_AT_ONCE):
    indices = range(first, min(first + _RECORDS_AT_ONCE, len(records)))
    yield from records.__getitems__(list(indices))


if __name__ == "__main__":
  with until_nobody_reads():
    sys.exit(main())
