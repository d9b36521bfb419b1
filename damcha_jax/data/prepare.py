"""Prepares the real corpora for training and for TFDS.

  python -m damcha_jax.data.prepare enwik8|text8|mix [--data_dir=DIR] [--manual_dir=DIR] [--verify]

Downloads the published archive, or takes it from a manual folder, and makes two things of it:
`<data_dir>/bytes/<name>/`, the memory-mapped arrays that training reads, and
`<data_dir>/<name>/1.0.0/`, ArrayRecord files for `tfds.load`. A corpus that is already there is
left alone; `--verify` hashes every byte of it, and makes it again if one is wrong. A preparation
that is killed leaves nothing that would be read.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
from pathlib import Path
import shutil
import sys
from typing import Optional

from damcha_jax.data import archives, corpora, prepared
from damcha_jax.errors import DataError, UserError

_RECORDS_AT_ONCE = 1024


def main(argv: Optional[list[str]] = None) -> int:
  """Exit status: 0 prepared, 1 missing or damaged data, 2 bad usage."""
  parser = argparse.ArgumentParser(prog="python -m damcha_jax.data.prepare",
                                   description=__doc__.split("\n", maxsplit=1)[0])
  parser.add_argument("name", choices=corpora.PREPARABLE)
  parser.add_argument("--data_dir", default=prepared.DEFAULT_DATA_DIR,
                      help="where prepared data goes (default: %(default)s)")
  parser.add_argument("--manual_dir", help="folder with files fetched by hand; nothing is "
                      "downloaded then")
  parser.add_argument("--verify", action="store_true", help="hash every byte that is prepared")
  args = parser.parse_args(argv)
  status = 0
  for name in corpora.MIX if args.name == "mix" else (args.name,):
    try:
      prepare(name, args.data_dir, args.manual_dir, args.verify)
    except UserError as error:
      print(f"error: {error}", file=sys.stderr)
      status = error.exit_status
    except KeyboardInterrupt:
      print("error: interrupted; the same command starts again", file=sys.stderr)
      return 1
  return status


def prepare(name: str, data_dir: str, manual_dir: Optional[str] = None,
            verify: bool = False) -> None:
  """Prepares corpus `name` unless it is there already, and prints what is there.

  Raises:
    DataError: the source file is missing or wrong, or the data cannot be written.
  """
  corpus = corpora.CORPORA[name]
  folder = prepared.prepared_dir(name, data_dir)
  if folder.exists() and _is_sound(name, data_dir, verify):
    print(f"{name}: already prepared" + (", every hash verified" if verify else ""))
  else:
    path, data = _obtain(corpus, data_dir, manual_dir)
    # The arrays come last: where they are, the records are too.
    _write_records(name, data_dir, path.parent)
    prepared.write_prepared(name, data_dir, data)
    prepared.verify_prepared(name, data_dir)
  for split, facts in prepared.read_metadata(name, data_dir)["splits"].items():
    print(f"{name}/{split}: {facts['num_bytes']:,} bytes, md5 {facts['md5']}, in {folder}")


def _is_sound(name: str, data_dir: str, verify: bool) -> bool:
  try:
    if verify:
      prepared.verify_prepared(name, data_dir)
      _verify_records(name, data_dir)
    else:
      prepared.load_prepared(name, data_dir)
  except DataError as error:
    print(f"{error.args[0].split('; run ')[0]}; preparing it again", file=sys.stderr)
    return False
  return True


def _obtain(corpus: corpora.ByteCorpus, data_dir: str,
            manual_dir: Optional[str]) -> tuple[Path, bytes]:
  """Path and verified content of the corpus's file, from the manual folder or the network."""
  if manual_dir is not None:
    path = archives.find(corpus, Path(manual_dir).expanduser())
    if path is None:
      raise DataError(f"neither {corpus.archive} nor {corpus.name} is in {manual_dir}; "
                      + corpora.how_to_get(corpus.name, data_dir, manual_dir))
  else:
    downloads = Path(data_dir).expanduser() / "downloads"
    path = archives.find(corpus, downloads)
    if path is None:
      print(f"{corpus.name}: downloading {corpus.url}", flush=True)
      try:
        path = archives.download(corpus, downloads)
      except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {corpus.url} to {downloads}: {error}; "
                        + corpora.how_to_get(corpus.name, data_dir)) from error
  return path, archives.read_verified(corpus, path)


def _builder(name: str, data_dir: str):
  """The corpus's TFDS builder; the one place that imports tensorflow_datasets."""
  try:
    import tensorflow_datasets as tfds
    import array_record.python.array_record_module  # pylint: disable=unused-import
    from damcha_jax.data.builders import enwik8, text8
  except ImportError as error:
    raise DataError(f"preparing data needs a package that is not installed ({error}); run "
                    "pip install 'damcha-jax[prepare]'") from error
  tfds.disable_progress_bar()
  builders = {"enwik8": enwik8.Enwik8, "text8": text8.Text8}
  return builders[name](data_dir=str(Path(data_dir).expanduser()), file_format="array_record")


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
  """Raises DataError unless the records of all splits, joined, are the published file."""
  builder = _builder(name, data_dir)
  whole = hashlib.md5()
  try:
    for split in corpora.SPLITS:
      records = builder.as_data_source(split=split)
      for first in range(0, len(records), _RECORDS_AT_ONCE):
        indices = range(first, min(first + _RECORDS_AT_ONCE, len(records)))
        for record in records.__getitems__(list(indices)):
          whole.update(record["bytes"])
  except Exception as error:  # each file format and TFDS itself have errors of their own
    raise DataError(f"the records in {builder.data_dir} cannot be read: {error}") from error
  if whole.hexdigest() != corpora.CORPORA[name].md5:
    raise DataError(f"the records in {builder.data_dir} have md5 {whole.hexdigest()}, not "
                    f"{corpora.CORPORA[name].md5}")


if __name__ == "__main__":
  sys.exit(main())
