"""Texts as token ids: byte-level BPE, trained on the training split, and bytes.

The first three ids are no text: BOS begins a row, SEP stands between source and target, EOS ends
the target. No text, whatever it says, is encoded as one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import hashlib
from pathlib import Path
from typing import Optional, Protocol
import zlib

from damcha_jax.data.debian import write
from damcha_jax.errors import DataError

BOS, SEP, EOS = range(3)
NUM_SPECIAL = 3
NUM_BYTES = 256


class Tokenizer(Protocol):
  """Both ways between text and ids; unknown and special ids have no text.

  Attributes:
    num_tokens: ids are below this number.
    fingerprint: equal for tokenizers that encode alike.
  """

  num_tokens: int
  fingerprint: str

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    ...

  def decode(self, ids: Sequence[int]) -> str:
    ...


class ByteTokenizer:
  """The bytes of UTF-8."""

  num_tokens = NUM_SPECIAL + NUM_BYTES
  fingerprint = "bytes"

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return [[byte + NUM_SPECIAL for byte in text.encode()] for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """Bytes that are no UTF-8 become U+FFFD."""
    known = bytes(token - NUM_SPECIAL for token in ids if NUM_SPECIAL <= token < self.num_tokens)
    return known.decode("utf-8", errors="replace")


class BpeTokenizer:
  """Byte-level BPE; ids follow those that are no text, so no text can name these."""

  def __init__(self, description: str):
    """Takes the JSON that the `tokenizers` library writes.

    Raises:
      DataError: it is damaged, or the library is missing.
    """
    try:
      self._tokenizer = _library().Tokenizer.from_str(description)
    except Exception as error:  # the library raises nothing more specific
      if isinstance(error, DataError):
        raise
      raise DataError(f"the tokenizer's description is damaged: {error}") from error
    self.num_tokens = NUM_SPECIAL + self._tokenizer.get_vocab_size()
    self.fingerprint = hashlib.sha256(description.encode()).hexdigest()

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return [[token + NUM_SPECIAL for token in encoding.ids]
            for encoding in self._tokenizer.encode_batch_fast(list(texts))]

  def decode(self, ids: Sequence[int]) -> str:
    known = [token - NUM_SPECIAL for token in ids if NUM_SPECIAL <= token < self.num_tokens]
    return self._tokenizer.decode(known)


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
  """The description of a BPE with at most `vocab_size` ids, special ones and all bytes included.

  The same texts give the same description.
  """
  library = _library()
  tokenizer = library.Tokenizer(library.models.BPE())
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
      vocab_size=vocab_size - NUM_SPECIAL, show_progress=False, special_tokens=[],
      initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer.to_str()


def load_tokenizer(kind: str, texts: Iterable[str], content_hash: str, vocab_size: int,
                   cache_dir: Optional[Path]) -> Tokenizer:
  """The tokenizer of a training split; one that was trained before is read from the cache.

  Args:
    kind: 'bpe' or 'bytes'.
    texts: the training split, read only if the tokenizer is not in the cache.
    content_hash: of the training split.
    vocab_size: ids that a model has, special ones included.
    cache_dir: where trained tokenizers are kept; None: nowhere.

  Raises:
    DataError: the library is missing, or what is cached is damaged.
  """
  if kind == "bytes":
    return ByteTokenizer()
  path = cache_dir and cache_dir / f"bpe-{content_hash[:16]}-{vocab_size}.json"
  if path and path.is_file():
    try:
      description, _, checksum = path.read_text(encoding="utf-8").partition("\n")
      # An earlier version wrote none; what was cut short cannot be parsed.
      if checksum and checksum != _checksum(description):
        raise DataError("it was changed after it was written")
      return BpeTokenizer(description)
    except (DataError, OSError, UnicodeDecodeError) as error:
      raise DataError(f"the tokenizer {path} cannot be read ({error}); delete the file, and it is "
                      "trained again") from error
  description = train_bpe(texts, vocab_size)
  if path:
    try:
      write(path, f"{description}\n{_checksum(description)}".encode())
    except OSError as error:
      raise DataError(f"cannot write the tokenizer {path}: {error.strerror}; choose another "
                      "data.data_dir") from error
  return BpeTokenizer(description)


def _checksum(description: str) -> str:
  return f"crc32 {zlib.crc32(description.encode())}"


def _library():
  try:
    import tokenizers
  except ImportError as error:
    raise DataError("tokenizers are trained by the tokenizers package; run pip install "
                    "'damcha-jax[generation]', or set data.tokenizer='bytes'") from error
  return tokenizers
