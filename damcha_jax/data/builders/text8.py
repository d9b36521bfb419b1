"""text8 as a TFDS dataset: `tfds.load('text8')` once this module is imported."""

from __future__ import annotations

from damcha_jax.data.builders.byte_corpus import ByteCorpusBuilder


class Text8(ByteCorpusBuilder):
  """10^8 bytes of the same dump, cleaned to a-z and single spaces."""
