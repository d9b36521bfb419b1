"""Prepares WMT14 and CommonGen from TFDS's catalogue, as folders that training reads without it.

`<data_dir>/text/<name>/` gets a compressed file for each split and metadata.json with counts and
hashes; it appears whole, by one rename, or not at all. TFDS's own builders of these sets need
TensorFlow, which is why nothing but this module makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import itertools
import json
import lzma
from pathlib import Path
import shutil
import sys
import tempfile
from typing import Any, Optional
import zipfile

from damcha_jax.data import text_pairs
from damcha_jax.data.text_pairs import PUBLISHED, Example
from damcha_jax.errors import DataError
from damcha_jax.files import expanded

_AT_ONCE = 10_000
_PRESET = 1  # of xz: a gigabyte takes a minute, and half as long again to read
# What a machine without a network needs in its manual folder.
URLS = {
    "wmt14": ("http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
              "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
              "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
              "http://data.statmt.org/wmt19/translation-task/dev.tgz"),
    "commongen": ("https://storage.googleapis.com/huggingface-nlp/datasets/common_gen/"
                  "commongen_data.zip",),
}


def prepare(name: str, data_dir: str, manual_dir: Optional[str] = None,
            verify: bool = False) -> None:
  """Prepares set `name` unless it is there already, and prints what is there.

  Raises:
    DataError: the data is missing, or not what was published, or cannot be written.
  """
  folder = text_pairs.prepared_dir(name, data_dir)
  if folder.exists() and _is_sound(name, folder, data_dir, verify):
    print(f"{name}: already prepared" + (", every hash verified" if verify else ""))
  else:
    splits = _published(name, data_dir, manual_dir)
    if name == "commongen":
      train, held_out = text_pairs.hold_out_concept_sets(splits["train"])
      splits = {"train": train, "validation": held_out, "test": splits["validation"]}
    _write(name, folder, splits)
    text_pairs.check_prepared(name, folder, data_dir, contents=True)
  metadata = json.loads((folder / text_pairs.METADATA).read_text(encoding="utf-8"))
  for split, facts in metadata["splits"].items():
    print(f"{name}/{split}: {facts['num_examples']:,} examples, md5 {facts['md5']}, in {folder}")


def _is_sound(name: str, folder: Path, data_dir: str, verify: bool) -> bool:
  try:
    text_pairs.check_prepared(name, folder, data_dir, contents=verify)
  except DataError as error:
    print(f"{error.args[0].split('; run ')[0]}; preparing it again", file=sys.stderr)
    return False
  return True


def _published(name: str, data_dir: str,
               manual_dir: Optional[str]) -> dict[str, Sequence[Example]]:
  """The splits that have references, as they are published.

  Raises:
    DataError: they cannot be had, or have other numbers of examples.
  """
  if manual_dir is not None:
    missing = [url for url in URLS[name]
               if not (expanded(manual_dir) / url.rpartition("/")[2]).is_file()]
    if missing:
      raise DataError(f"not all files of '{name}' are in {manual_dir}; fetch "
                      f"{' and '.join(missing)} on a machine with a network and put them there, or use the sample that "
                      f"ships with the package: --config=configs/{name}.py:cpu")
  if name == "commongen" and manual_dir is not None:
    # TFDS has no checksums of these files and so does not find them in the folder.
    splits = _read_commongen(expanded(manual_dir) / URLS[name][0].rpartition("/")[2])
  else:
    splits = _from_catalogue(name, data_dir, manual_dir)
  for split, expected in PUBLISHED[name].num_examples.items():
    if len(splits[split]) != expected:
      raise DataError(f"'{name}' has {len(splits[split]):,} {split} examples, not the "
                      f"{expected:,} published; delete what was downloaded and fetch it again")
  return splits


def _from_catalogue(name: str, data_dir: str,
                    manual_dir: Optional[str]) -> dict[str, list[Example]]:
  published = PUBLISHED[name]
  try:
    import tensorflow_datasets as tfds
    # These register the builders.
    import tensorflow_datasets.text  # pylint: disable=unused-import
    import tensorflow_datasets.translate  # pylint: disable=unused-import

    tfds.disable_progress_bar()
    builder = tfds.builder(published.catalogue_name, file_format="array_record",
                           data_dir=str(expanded(data_dir)))
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=manual_dir))
    example = {"wmt14": _wmt14_example, "commongen": _commongen_example}[name]
    return {split: [example(record) for record in _each(builder.as_data_source(split=split))]
            for split in published.num_examples}
  except ImportError as error:
    raise DataError(f"preparing '{name}' needs a package that is not installed ({error}); run "
                    "pip install 'damcha-jax[prepare]'") from error
  except Exception as error:  # TFDS, its downloads and file formats have many kinds
    raise DataError(f"TFDS cannot prepare {published.catalogue_name}: {error}; without a network, "
                    f"fetch {' and '.join(URLS[name])} elsewhere and pass --manual_dir") from error


def _each(records: Any) -> Iterator[Any]:
  for first in range(0, len(records), _AT_ONCE):
    yield from records.__getitems__(list(range(first, min(first + _AT_ONCE, len(records)))))


def _text(value: Any) -> str:
  return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _wmt14_example(record: Any) -> Example:
  return Example(_text(record["en"]), (_text(record["de"]),))


def _commongen_example(record: Any) -> Example:
  references = [_text(one) for one in record["references"]] or [_text(record["target"])]
  return Example(" ".join(map(_text, record["concepts"])), tuple(references))


def _read_commongen(path: Path) -> dict[str, list[Example]]:
  """The published archive, as TFDS reads it: training sentences one by one."""
  splits: dict[str, list[Example]] = {}
  try:
    with zipfile.ZipFile(path) as archive:
      for member in archive.namelist():
        split = {"commongen.train.jsonl": "train", "commongen.dev.jsonl": "validation"}.get(
            member.rpartition("/")[2])
        for line in archive.read(member).decode("utf-8").split("\n") if split else ():
          if line.strip():
            entry = json.loads(line.replace(", }", "}"))  # of which some are no JSON
            source, sentences = entry["concept_set"].replace("#", " "), tuple(entry["scene"])
            whole = [Example(source, sentences)]
            splits.setdefault(split, []).extend(
                (Example(source, (one,)) for one in sentences) if split == "train" else whole)
  except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
    raise DataError(f"{path} cannot be read: {error}; fetch {URLS['commongen'][0]} again"
                    ) from error
  missing = {"train", "validation"} - set(splits)
  if missing:
    raise DataError(f"{path} has no {' and no '.join(sorted(missing))} part; fetch "
                    f"{URLS['commongen'][0]} again")
  return splits


def _write(name: str, folder: Path, splits: dict[str, Sequence[Example]]) -> None:
  """Writes the splits, replacing what is there."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{name}.*.partial"):  # of a preparation that was killed
      shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder.parent))
    partial.chmod(0o755)
    facts = {split: _write_split(partial / f"{split}.tsv.xz", examples)
             for split, examples in splits.items()}
    (partial / text_pairs.METADATA).write_text(
        json.dumps({"format": text_pairs.FORMAT, "name": name, "splits": facts}, indent=2))
    if folder.exists():
      folder.rename(partial / "replaced")
    partial.rename(folder)
    shutil.rmtree(folder / "replaced", ignore_errors=True)
  except OSError as error:
    raise DataError(f"cannot write {folder}: {error}; free some space or choose another "
                    "--data_dir") from error


def _write_split(path: Path, examples: Iterable[Example]) -> dict[str, Any]:
  digest, count, examples = hashlib.md5(), 0, iter(examples)
  with lzma.open(path, "wb", check=lzma.CHECK_CRC32, preset=_PRESET) as file:
    while chunk := list(itertools.islice(examples, _AT_ONCE)):
      data = text_pairs.encode(chunk)
      digest.update(data)
      file.write(data)
      count += len(chunk)
  return {"num_examples": count, "md5": digest.hexdigest(),
          "compressed_bytes": path.stat().st_size}
