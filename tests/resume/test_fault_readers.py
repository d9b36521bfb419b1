"""Damaged files that are kept for the next time: read as they were, made again, or refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from damcha_jax import image_samples, text_samples
from damcha_jax.data import corpora, palette, prepared, source_target, tokenizers
from damcha_jax.data.text_pairs import Example
from damcha_jax.errors import DataError, WorkdirError
from tests.resume import faults

TEXT = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes()
EXAMPLES = [Example(f"source {n}", (f"target {n} of it",)) for n in range(40)]
IMAGES = np.random.default_rng(1).integers(0, 256, (8, 8, 8, 3), np.uint8)
PALETTE = palette.fit(IMAGES)
NUM_ATTEMPTS = 4


ORIGIN = {"attention": "mha", "seed": 0, "step": 3, "validation": 5.0, "rule": {}}


def _read_samples(folder):
  read = image_samples.read_samples(folder, ORIGIN)
  if read is None:  # then they are drawn again
    image_samples._write(folder / image_samples.FILE, ORIGIN, {  # pylint: disable=protected-access
        "step": 3, "images": IMAGES, "log_likelihoods": np.arange(8.0), "begin": np.zeros(8, int),
        "completed": IMAGES[:2], "completed_log_likelihoods": np.arange(2.0), "num_given_rows": 4})
    read = image_samples.read_samples(folder, ORIGIN)
  return [np.asarray(entry).tolist() for entry in read]


def _read_outputs(folder):
  record = {"source": "a", "references": ["b"], "output": "c", "log_likelihood": -1.0,
            "num_tokens": 2, "nll": 3.0, "nll_tokens": 2, "step": 4}
  if not (folder / text_samples.FILE).exists():
    text_samples.write_outputs(folder, ORIGIN, [{"index": n, **record} for n in range(5)])
  return text_samples.read_outputs(folder, ORIGIN)


def _read_tokenizer(folder):
  return tokenizers.load_tokenizer("bpe", [one.source for one in EXAMPLES], "hash", 300,
                                   folder).fingerprint


def _read_encoded(folder):
  encoded = source_target.cached(folder / "train", lambda: source_target.encode(
      EXAMPLES, tokenizers.ByteTokenizer()))
  return [array.tolist() for array in encoded]


def _read_palette(folder):
  return palette.cached_palette(str(folder), "tiny", IMAGES).tolist()


def _read_corpus(folder):
  if not (folder / "bytes").exists():
    prepared.write_prepared("enwik8", folder, TEXT)
  prepared.verify_prepared("enwik8", folder)
  return [array.tolist() for array in prepared.load_prepared("enwik8", folder).values()]


READERS = {"samples.npz": _read_samples, "outputs.jsonl": _read_outputs,
           "tokenizer": _read_tokenizer, "palette": _read_palette, "encoded texts": _read_encoded,
           "prepared corpus": _read_corpus}


@pytest.fixture(autouse=True)
def _tiny_enwik8(monkeypatch):
  monkeypatch.setitem(corpora.CORPORA, "enwik8", corpora.ByteCorpus(
      **{**vars(corpora.CORPORA["enwik8"]), "num_bytes": len(TEXT),
         "md5": hashlib.md5(TEXT).hexdigest()}))
  monkeypatch.setattr(palette, "fit", lambda images: PALETTE)


def _attempts(reader, folder, how):
  """What is read of each file that is kept, damaged, in turn; the right contents first."""
  folder.mkdir()
  expected = reader(folder)
  files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
  rng = np.random.default_rng(0)
  for path, content in files.items():
    for _ in range(NUM_ATTEMPTS):
      faults.damage(path, how, rng)
      try:
        found = reader(folder)
      except (DataError, WorkdirError) as error:
        faults.one_line(error)
        found = None
      yield expected, found
      path.write_bytes(content)


def _outcome(found):
  return "refused in one line" if found is None else "read or made as it was"


@pytest.mark.parametrize("how", faults.DAMAGES)
@pytest.mark.parametrize("what", READERS)
def test_damaged_files_are_refused_or_made_again(fault, tmp_path, what, how):
  for expected, found in _attempts(READERS[what], tmp_path / "kept", how):
    assert found in (expected, None)
    fault(f"{what} {how}", _outcome(found))
