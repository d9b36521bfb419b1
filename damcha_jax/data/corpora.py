"""The facts about the real corpora: where they come from, their sizes, hashes and splits."""

from __future__ import annotations

import dataclasses
from typing import Optional

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class ByteCorpus:
  """One file of bytes, as it is published."""

  name: str  # also the file's name
  url: str  # of the zip archive that holds the file
  num_bytes: int
  md5: str  # of the uncompressed file
  license: str

  @property
  def archive(self) -> str:
    return self.name + ".zip"


CORPORA = {
    corpus.name: corpus for corpus in (
        ByteCorpus("enwik8", "http://mattmahoney.net/dc/enwik8.zip", 100_000_000,
                   "a1fa5ffddb56f4953e226637dabbb36a",
                   "Wikipedia text, GNU Free Documentation License"),
        ByteCorpus("text8", "http://mattmahoney.net/dc/text8.zip", 100_000_000,
                   "3bea1919949baf155f99411df5fada7e",
                   "Wikipedia text, GNU Free Documentation License"),
    )
}

MIX = ("enwik8", "text8")
PREPARABLE = (*CORPORA, "mix")


def split_bounds(num_bytes: int) -> dict[str, tuple[int, int]]:
  """First and past-the-end byte of each split: 90%, 5%, 5% in order (90/5/5M for 100M)."""
  a, b = num_bytes * 90 // 100, num_bytes * 95 // 100
  return {"train": (0, a), "validation": (a, b), "test": (b, num_bytes)}


def how_to_get(name: str, data_dir: str, manual_dir: Optional[str] = None) -> str:
  """What to fetch, its hash, where to put it, and what runs without it; one line."""
  corpus = CORPORA[name]
  folder = manual_dir or "DIR"
  return (f"fetch {corpus.url} on a machine with a network (the file '{corpus.name}' inside has "
          f"{corpus.num_bytes:,} bytes, md5 {corpus.md5}), put {corpus.archive} or {corpus.name} "
          f"into {folder} and run 'python -m damcha_jax.data.prepare {name} "
          f"--data_dir={data_dir} --manual_dir={folder}'; or use the sample text that ships "
          f"with the package: --config=configs/{name}.py:cpu")
