"""Makes the sample of English-German sentence pairs, from the help texts of LibreOffice.

Pages and paragraphs have the same names in both languages; a paragraph is cut into sentences where
both have as many. All sentences of a page are in one split, and no sentence, English or German,
is in two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import hashlib
import html
from pathlib import Path
import re
import tempfile

from damcha_jax.data import text_pairs
from damcha_jax.data.debian import only, report, unpack, write
from damcha_jax.data.text_pairs import Example

PACKAGES = {"en-US": "libreoffice-help-en-us", "de": "libreoffice-help-de"}
LICENSE = "LICENSE.libreoffice_help"
LICENSE_PACKAGE = "base-files"  # has the text of the licence that the packages name
DICTIONARY_PACKAGE = "trans-de-en"
HELD_OUT = 0.05  # of the pages, in validation and in test each
LONGEST = 400  # characters

_BLOCK = re.compile(r'<(p|h[1-6])\b[^>]*\bid="((?:par|hd|bm)_id[^"]*)"[^>]*>(.*?)</\1>', re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-ZÄÖÜ])")
_DICTIONARY_REMARK = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|<[^>]*>")


def make_pairs(out: Path, debs: Path | None) -> None:
  """Writes the shipped sample and its licence."""
  with tempfile.TemporaryDirectory() as root:
    splits = _help_splits(Path(root), debs)
    unpack(LICENSE_PACKAGE, Path(root), debs)
    license_text = b"\n".join(only(Path(root).glob(pattern)).read_bytes() for pattern in (
        f"usr/share/doc/{PACKAGES['de']}/copyright", "usr/share/common-licenses/MPL-2.0"))
  _write(out / text_pairs.SAMPLES["sample_pairs"].name, splits)
  write(out / LICENSE, license_text)


def make_more_pairs(out: Path, debs: Path | None) -> None:
  """Writes the sample with the example sentences of a dictionary (GPL) as further training data."""
  with tempfile.TemporaryDirectory() as root:
    splits = _help_splits(Path(root), debs)
    unpack(DICTIONARY_PACKAGE, Path(root), debs)
    lines = only(Path(root).glob("usr/share/trans/de-en")).read_text(encoding="utf-8").splitlines()
  known = {text for examples in splits.values() for text in _texts(examples)}
  splits["train"] += [one for one in dictionary_pairs(lines) if known.isdisjoint(_texts([one]))]
  _write(out, splits)


def _help_splits(root: Path, debs: Path | None) -> dict[str, list[Example]]:
  for package in PACKAGES.values():
    unpack(package, root, debs)
  english, german = (root / "usr/share/libreoffice/help" / language for language in PACKAGES)
  pages = {}
  for path in sorted(english.rglob("*.html")):
    name = path.relative_to(english).as_posix()
    if (german / name).is_file():
      pages[name] = list(page_pairs(path.read_text(encoding="utf-8"),
                                    (german / name).read_text(encoding="utf-8")))
  return split_pages(pages)


def _write(folder: Path, splits: dict[str, list[Example]]) -> None:
  for split, examples in splits.items():
    data = text_pairs.encode(examples)
    packed = text_pairs.compress(data)
    write(folder / f"{split}.tsv.xz", packed)
    report(folder / f"{split}.tsv.xz", data, packed_size=len(packed))


def page_pairs(english: str, german: str) -> Iterator[Example]:
  """The sentences of a page and their translations, in its order."""
  translations = dict(_blocks(german))
  for name, text in _blocks(english):
    pairs = [_SENTENCE_END.split(one) for one in (text, translations.get(name, ""))]
    if len(pairs[0]) != len(pairs[1]):
      pairs = [[text], [translations.get(name, "")]]
    for source, target in zip(*pairs):
      if (len(source.split()) >= 4 and len(target.split()) >= 3 and source != target
          and max(len(source), len(target)) <= LONGEST):
        yield Example(source, (target,))


def _blocks(page: str) -> Iterator[tuple[str, str]]:
  for match in _BLOCK.finditer(page):
    yield match[2], " ".join(html.unescape(_TAG.sub("", match[3])).split())


def dictionary_pairs(lines: Iterable[str]) -> Iterator[Example]:
  """English-German sentences of a dictionary with lines `Deutsch | .. :: English | ..`."""
  found = {}
  for line in lines:
    german, separator, english = line.partition("::")
    if line.startswith("#") or not separator:
      continue
    sides = [[" ".join(_DICTIONARY_REMARK.sub(" ", entry).split()) for entry in side.split("|")]
             for side in (english, german)]
    for source, target in zip(*sides) if len(sides[0]) == len(sides[1]) else ():
      if all(re.search(r"[.!?]$", text) and ";" not in text and len(text.split()) >= 3
             for text in (source, target)):
        found.setdefault(source, Example(source, (target,)))
  yield from found.values()


def split_pages(pages: dict[str, list[Example]]) -> dict[str, list[Example]]:
  """Splits of which none shares a sentence with another: pages in the order of their hashes.

  The first pages make the test part, the next the validation part; a sentence that occurs again
  later is left out there.
  """
  names = sorted(pages, key=lambda name: hashlib.md5(name.encode()).digest())
  count = int(HELD_OUT * len(names))
  parts = {"test": names[:count], "validation": names[count:2 * count], "train": names[2 * count:]}
  earlier: set[str] = set()
  splits = {}
  for split, members in parts.items():
    pairs = dict.fromkeys(one for name in sorted(members) for one in pages[name])
    splits[split] = [one for one in pairs if earlier.isdisjoint(_texts([one]))]
    earlier |= _texts(splits[split])
  return {split: splits[split] for split in ("train", "validation", "test")}


def _texts(examples: Iterable[Example]) -> set[str]:
  return {text for one in examples for text in (one.source, *one.references)}
