"""enwik8 as a TFDS dataset: `tfds.load('enwik8')` once this module is imported."""

from __future__ import annotations

from damcha_jax.data.builders.byte_corpus import ByteCorpusBuilder


class Enwik8(ByteCorpusBuilder):
  """The first 10^8 bytes of an English Wikipedia dump, as XML."""
