"""Makes the sample images: the colour emoji of a font, 32x32 pixels on white, labelled by Unicode.

`images` [N, 32, 32, 3], `group` and `subgroup` [N] (Unicode's two levels of classes), `split` [N]
(0 training, 1 validation, 2 test) and their names go into one archive. Emoji that differ only in
skin tone or gender, and equal images under different names, are in one split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import io
import lzma
from pathlib import Path
import tempfile
from typing import Any, NamedTuple

import numpy as np

from damcha_jax.data.debian import only, report, unpack, write
from damcha_jax.errors import DataError

IMAGES_FILE = "noto_emoji.npz.xz"
IMAGES_LICENSES = {"fonts-noto-color-emoji": "LICENSE.noto_emoji",
                   "unicode-data": "LICENSE.unicode_data"}
IMAGE_SIZE = 32
HELD_OUT = 0.1  # of the images, in validation and in test each

_GLYPH_SIZE = 4 * IMAGE_SIZE  # of the font's bitmaps, which are wider by an empty margin
# What a subject's variants differ in: presentation, joiners, gender signs and skin tones.
_VARIATION = frozenset([0xFE0F, 0x200D, 0x2640, 0x2642, *range(0x1F3FB, 0x1F400)])
_PERSON = {0x1F468: 0x1F9D1, 0x1F469: 0x1F9D1}  # man, woman -> person
_LZMA = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0},)


class Emoji(NamedTuple):
  """A line of Unicode's list: the characters that make the picture, and its two classes."""

  characters: tuple[int, ...]
  group: str
  subgroup: str

  @property
  def subject(self) -> tuple[int, ...]:
    """The characters without those that only vary skin tone or gender."""
    return tuple(_PERSON.get(character, character) for character in self.characters
                 if character not in _VARIATION)


def make_images(out: Path, debs: Path | None) -> None:
  """Writes the archive and the licences of the two packages it is made from."""
  with tempfile.TemporaryDirectory() as root:
    for package in IMAGES_LICENSES:
      unpack(package, Path(root), debs)
    listing = only(Path(root).rglob("emoji-test.txt")).read_text(encoding="utf-8")
    data = archive(*zip(*draw(only(Path(root).rglob("NotoColorEmoji.ttf")), parse(listing))))
    licenses = {name: only(Path(root).glob(f"usr/share/doc/{package}/copyright")).read_bytes()
                for package, name in IMAGES_LICENSES.items()}
  packed = lzma.compress(data, check=lzma.CHECK_CRC32, filters=_LZMA)
  write(out / IMAGES_FILE, packed)
  for name, text in licenses.items():
    write(out / name, text)
  report(out / IMAGES_FILE, data, packed_size=len(packed))


def parse(listing: str) -> Iterator[Emoji]:
  """The fully qualified emoji of Unicode's emoji-test.txt, in its order."""
  group = subgroup = ""
  for line in listing.splitlines():
    if line.startswith("# group:"):
      group = line.partition(":")[2].strip()
    elif line.startswith("# subgroup:"):
      subgroup = line.partition(":")[2].strip()
    elif "; fully-qualified" in line:
      characters = line.partition(";")[0].split()
      yield Emoji(tuple(int(character, 16) for character in characters), group, subgroup)


def draw(font: Path, emoji: Iterable[Emoji]) -> Iterator[tuple[Emoji, np.ndarray]]:
  """Those emoji that the font draws as bitmaps, with their pictures, uint8 [32, 32, 3].

  Raises:
    DataError: fonttools or Pillow is not installed.
  """
  try:
    from fontTools.ttLib import TTFont
    from PIL import Image
  except ImportError as error:
    raise DataError(f"drawing the sample images needs a package that is not installed ({error}); "
                    "run pip install fonttools Pillow") from error
  with TTFont(font, lazy=True) as tables:
    bitmaps = tables["CBDT"].strikeData[0]
    characters, ligatures = tables.getBestCmap(), _ligatures(tables)
    for one in emoji:
      glyph = _glyph(one.characters, characters, ligatures)
      if glyph in bitmaps:
        picture = Image.open(io.BytesIO(bitmaps[glyph].imageData)).convert("RGBA")
        margin = (picture.width - _GLYPH_SIZE) // 2
        picture = picture.crop((margin, 0, margin + _GLYPH_SIZE, _GLYPH_SIZE))
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture)
        # The mean of 4 x 4 pixels: exact, so that every version of Pillow gives the same.
        yield one, np.asarray(white.convert("RGB").reduce(_GLYPH_SIZE // IMAGE_SIZE))


def _ligatures(tables: Any) -> dict[tuple[str, ...], str]:
  """The glyph that stands for each sequence of glyphs."""
  found = {}
  for lookup in tables["GSUB"].table.LookupList.Lookup:
    for table in lookup.SubTable:
      table = getattr(table, "ExtSubTable", table)
      for first, ligatures in getattr(table, "ligatures", {}).items():
        for ligature in ligatures:
          found[first, *ligature.Component] = ligature.LigGlyph
  return found


def _glyph(emoji: tuple[int, ...], characters: dict[int, str],
           ligatures: dict[tuple[str, ...], str]) -> str | None:
  """The glyph of an emoji; the font leaves out the presentation selector here and there."""
  for sequence in (emoji, tuple(one for one in emoji if one != 0xFE0F)):
    glyphs = tuple(map(characters.get, sequence))
    glyph = glyphs[0] if len(glyphs) == 1 else ligatures.get(glyphs)
    if glyph is not None:
      return glyph
  return None


def archive(emoji: Sequence[Emoji], images: Sequence[np.ndarray]) -> bytes:
  """The .npz file, whose bytes depend on the contents alone."""
  groups = list(dict.fromkeys(one.group for one in emoji))
  subgroups = list(dict.fromkeys(one.subgroup for one in emoji))
  buffer = io.BytesIO()
  np.savez(buffer, images=np.stack(images),
           group=np.array([groups.index(one.group) for one in emoji], np.uint8),
           subgroup=np.array([subgroups.index(one.subgroup) for one in emoji], np.uint8),
           split=split([one.subject for one in emoji], images),
           group_names=np.array(groups), subgroup_names=np.array(subgroups))
  return buffer.getvalue()


def split(subjects: Sequence[tuple[int, ...]], images: Sequence[np.ndarray]) -> np.ndarray:
  """0, 1 or 2 for training, validation and test: uint8 [N].

  Subjects are taken in the order of their hashes: the first fill the test part, the next the
  validation part. Subjects that share an image go together.
  """
  parent = {subject: subject for subject in subjects}

  def root(subject):
    while parent[subject] != subject:
      subject = parent[subject]
    return subject

  owner: dict[bytes, tuple[int, ...]] = {}
  for subject, image in zip(subjects, images):
    parent[root(subject)] = root(owner.setdefault(image.tobytes(), subject))
  members: dict[tuple[int, ...], list[int]] = {}
  for index, subject in enumerate(subjects):
    members.setdefault(root(subject), []).append(index)
  parts, done = np.zeros(len(subjects), np.uint8), 0
  for subject in sorted(members, key=_hash):
    parts[members[subject]] = 2 if done < HELD_OUT * len(subjects) else (
        1 if done < 2 * HELD_OUT * len(subjects) else 0)
    done += len(members[subject])
  return parts


def _hash(subject: tuple[int, ...]) -> bytes:
  return hashlib.md5(repr(subject).encode()).digest()
