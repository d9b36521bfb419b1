"""What the byte corpora's TFDS builders have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from damcha_jax.data import archives, corpora

RECORD_BYTES = 512  # the paper's context length


class ByteCorpusBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Records of up to RECORD_BYTES bytes, in order: a split's records joined are the split.

  The published file comes from `manual_dir` (as NAME or NAME.zip) or from its URL, and its size
  and md5 are verified. MANUAL_DOWNLOAD_INSTRUCTIONS stays unset, because TFDS would then insist
  on the manual folder.
  """

  VERSION = tfds.core.Version("1.0.0")
  RELEASE_NOTES = {"1.0.0": "Split 90/5/5 in order."}

  @property
  def corpus(self) -> corpora.ByteCorpus:
    return corpora.CORPORA[self.name]

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=self,
        description=f"{self.corpus.num_bytes:,} bytes of {self.corpus.license}, split 90/5/5.",
        homepage="http://mattmahoney.net/dc/textdata.html",
        license=self.corpus.license,
        features=tfds.features.FeaturesDict({
            "bytes": tfds.features.Tensor(shape=(None,), dtype=np.uint8,
                                          encoding=tfds.features.Encoding.BYTES),
            "offset": tfds.features.Scalar(np.int64, doc="of the record in the whole file"),
        }),
        disable_shuffling=True)

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
    # The public `manual_dir` refuses a builder without MANUAL_DOWNLOAD_INSTRUCTIONS.
    manual_dir = dl_manager._manual_dir
    path = archives.find(self.corpus, Path(manual_dir)) if manual_dir else None
    path = path or Path(dl_manager.download(self.corpus.url))
    data = np.frombuffer(archives.read_verified(self.corpus, path), np.uint8)
    return {split: self._generate_examples(data, a, b)
            for split, (a, b) in corpora.split_bounds(len(data)).items()}

  def _generate_examples(self, data: np.ndarray, first: int,
                         end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for offset in range(first, end, RECORD_BYTES):
      yield offset, {"bytes": data[offset:min(offset + RECORD_BYTES, end)], "offset": offset}
