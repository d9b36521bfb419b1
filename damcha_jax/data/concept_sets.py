"""Makes the sample of concept sets and sentences, from the example sentences of WordNet.

As in CommonGen, a source is a set of three to five nouns and verbs in their base forms, and the
target a sentence with all of them. A concept set, with all its sentences, is in one split.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
import hashlib
from pathlib import Path
import re
import tempfile

from damcha_jax.data import text_pairs
from damcha_jax.data.debian import only, report, unpack, write
from damcha_jax.data.text_pairs import Example

PACKAGE = "wordnet-base"
LICENSE = "LICENSE.wordnet"
HELD_OUT = 0.05  # of the concept sets, in validation and in test each

_KINDS = {"noun": "1", "verb": "2"}  # with their numbers in WordNet's frequency list
_EXAMPLE = re.compile(r'"([^"]{10,200})"')
_WORD = re.compile(r"[a-z]+")
_ENDINGS = {
    "noun": (("ies", "y"), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"),
             ("shes", "sh"), ("men", "man"), ("s", "")),
    "verb": (("ies", "y"), ("ied", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""),
             ("ing", "e"), ("ing", ""), ("s", "")),
}
# Words that carry structure rather than a concept.
_FUNCTION_WORDS = frozenset("""
    about after all and any are been before being but can could did does done down for from had has
    have having her here him his into its may might more most must not off one ones our out over own
    shall she should some such than that the their them then there these they this those too two
    under upon very was were what when where which while who whom whose why will with would you
    your""".split())


def make_concepts(out: Path, debs: Path | None) -> None:
  """Writes the sample and its licence."""
  with tempfile.TemporaryDirectory() as root:
    unpack(PACKAGE, Path(root), debs)
    folder = only(Path(root).glob("usr/share/wordnet"))
    files = {path.name: path.read_text(encoding="latin-1").splitlines()
             for path in folder.iterdir() if path.is_file()}
    license_text = only(Path(root).glob(f"usr/share/doc/{PACKAGE}/copyright")).read_bytes()
  words = Vocabulary(files)
  sentences = [sentence for kind in ("noun", "verb", "adj", "adv")
               for sentence in example_sentences(files[f"data.{kind}"])]
  for split, examples in split_sets(concept_sets(sentences, words)).items():
    data = text_pairs.encode(examples)
    packed = text_pairs.compress(data)
    path = out / text_pairs.SAMPLES["sample_concepts"].name / f"{split}.tsv.xz"
    write(path, packed)
    report(path, data, packed_size=len(packed))
  write(out / LICENSE, license_text)


def example_sentences(lines: Iterable[str]) -> Iterator[str]:
  """The quoted examples in the entries of a WordNet data file."""
  for line in lines:
    if not line.startswith("  "):  # the licence
      yield from (" ".join(text.split()) for text in _EXAMPLE.findall(line.partition("|")[2]))


class Vocabulary:
  """WordNet's nouns and verbs, and how their forms are made."""

  def __init__(self, files: dict[str, list[str]]):
    self._words = {kind: {line.split(" ", 1)[0] for line in files[f"index.{kind}"]
                          if not line.startswith("  ")} for kind in _KINDS}
    self._irregular = {kind: dict(line.split()[:2] for line in files[f"{kind}.exc"])
                       for kind in _KINDS}
    self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in files["cntlist.rev"]:
      sense, _, count = line.split()[:3]
      word, _, rest = sense.partition("%")
      self._counts[word, rest[:1]] += int(count)

  def lemma(self, word: str) -> str | None:
    """The base form of a noun or verb, the most frequent where there are several; or None."""
    candidates = []
    for kind, number in _KINDS.items():
      forms = [word, self._irregular[kind].get(word, "")]
      forms += [word[:-len(ending)] + base for ending, base in _ENDINGS[kind]
                if word.endswith(ending) and len(word) > len(ending) + 1]
      candidates += [(self._counts[form, number], form) for form in forms
                     if form in self._words[kind]]
    # The first of equals, so the word as it stands before a form it might come from.
    return max(candidates, key=lambda one: one[0])[1] if candidates else None


def concept_sets(sentences: Iterable[str], words: Vocabulary) -> dict[str, list[str]]:
  """Sentences of 5 to 25 words by their concept set, of 3 to 5 concepts in alphabetical order."""
  found: dict[str, list[str]] = {}
  for sentence in dict.fromkeys(sentences):
    if not 5 <= len(sentence.split()) <= 25:
      continue
    concepts = {words.lemma(word) for word in _WORD.findall(sentence.lower())
                if len(word) > 2 and word not in _FUNCTION_WORDS} - {None}
    if 3 <= len(concepts) <= 5:
      found.setdefault(" ".join(sorted(concepts)), []).append(sentence)
  return found


def split_sets(sets: dict[str, list[str]]) -> dict[str, list[Example]]:
  """Concept sets in the order of their hashes: test, validation, training.

  Training has one example per sentence; the others one per concept set, with all its sentences.
  """
  names = sorted(sets, key=lambda name: hashlib.md5(name.encode()).digest())
  count = int(HELD_OUT * len(names))
  held_out = [Example(name, tuple(sets[name])) for name in names[:2 * count]]
  train = [Example(name, (sentence,)) for name in sorted(names[2 * count:])
           for sentence in sets[name]]
  return {"train": train, "validation": sorted(held_out[count:]), "test": sorted(held_out[:count])}
