"""Finds or downloads published archives, and reads corpora only if size and hash are right."""

from __future__ import annotations

import hashlib
import http.client
import os
from pathlib import Path
import tempfile
from typing import Optional, Protocol
import urllib.request
import zipfile
import zlib

from damcha_jax.data.corpora import ByteCorpus
from damcha_jax.errors import DataError

_TIMEOUT_S = 60
_BLOCK = 1 << 20


class Source(Protocol):
  """What is published under a name, in an archive at a URL."""

  name: str
  url: str
  archive: str  # the file's name


def find(corpus: Source, folder: Path) -> Optional[Path]:
  """The archive in `folder`, or the file of its name, or None."""
  for name in (corpus.name, corpus.archive):
    if (folder / name).is_file():
      return folder / name
  return None


def download(corpus: Source, folder: Path) -> Path:
  """Fetches the archive into `folder`, where it appears whole or not at all.

  Raises:
    OSError or http.client.HTTPException: no network, an HTTP error, or a lost connection.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with urllib.request.urlopen(corpus.url, timeout=_TIMEOUT_S) as response:
    expected = response.headers.get("Content-Length")
    handle, partial = tempfile.mkstemp(dir=folder, prefix=corpus.archive + ".", suffix=".partial")
    try:
      with open(handle, "wb") as file:
        while block := response.read(_BLOCK):
          file.write(block)
        if expected is not None and file.tell() != int(expected):
          raise http.client.IncompleteRead(b"", int(expected) - file.tell())
      os.replace(partial, folder / corpus.archive)
    except BaseException:
      os.unlink(partial)
      raise
  return folder / corpus.archive


def read_verified(corpus: ByteCorpus, path: Path) -> bytes:
  """The corpus's bytes out of its file or archive.

  Raises:
    DataError: the archive is incomplete, or the size or the md5 of its content is wrong.
  """
  again = f"delete it and fetch {corpus.url} again (md5 of '{corpus.name}': {corpus.md5})"
  try:
    # By content, for TFDS stores a download under a name of its own.
    if zipfile.is_zipfile(path):
      with zipfile.ZipFile(path) as archive:
        data = archive.read(corpus.name)
    elif path.suffix == ".zip":
      raise zipfile.BadZipFile("not a zip archive, or one cut short")
    else:
      data = path.read_bytes()
  except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    raise DataError(f"{path} cannot be read: {error}; {again}") from error
  if len(data) != corpus.num_bytes:
    raise DataError(f"{path} holds {len(data):,} bytes, not {corpus.num_bytes:,}; {again}")
  md5 = hashlib.md5(data).hexdigest()
  if md5 != corpus.md5:
    raise DataError(f"{path} holds data of md5 {md5}, not {corpus.md5}; {again}")
  return data
