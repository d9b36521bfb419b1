"""The samples of sentence pairs and concept sets, and sets of one's own."""

import hashlib
import lzma
import re

import pytest

from damcha_jax.config import ConfigError
from damcha_jax.data import concept_sets, sentence_pairs, text_pairs
from damcha_jax.data.text_pairs import Example, PairSet, load_pairs
from damcha_jax.errors import DataError

README = (text_pairs.SAMPLES_DIR / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", text_pairs.SAMPLES)
def test_samples_are_what_their_description_says(name):
  pairs = load_pairs(name, "nowhere")
  assert pairs.splits == ("train", "validation", "test")
  for split in pairs.splits:
    data = lzma.decompress((pairs.folder / f"{split}.tsv.xz").read_bytes())
    row = re.search(rf"`{name}` \| {split} \| ([\d,]+) \| ([\d,]+) \| `(\w+)`", README)
    assert row[3] == hashlib.md5(data).hexdigest()
    assert f"{len(data):,}" == row[2] and f"{len(pairs.examples(split)):,}" == row[1]
    assert text_pairs.encode(pairs.examples(split)) == data


@pytest.mark.parametrize("name", text_pairs.SAMPLES)
def test_no_text_is_in_two_splits_of_a_sample(name):
  pairs = load_pairs(name, "nowhere")
  texts = [{text for one in pairs.examples(split) for text in (one.source, *one.references)}
           for split in pairs.splits]
  assert all(texts) and len(set.union(*texts)) == sum(map(len, texts))


def test_concepts_are_in_their_sentences():
  sizes = set()
  for source, references in load_pairs("sample_concepts", "nowhere").examples("test"):
    concepts = source.split()
    assert sorted(set(concepts)) == concepts
    sizes.add(len(concepts))
    for reference in references:
      assert len(set(re.findall("[a-z]+", reference.lower()))) >= len(concepts)
  assert sizes == {3, 4, 5}


def test_direction_exchanges_source_and_target():
  english, german = (load_pairs("sample_pairs", "nowhere", direction)
                     for direction in ("en-de", "de-en"))
  one, other = english.examples("test")[0], german.examples("test")[0]
  assert (one.source, one.references[0]) == (other.references[0], other.source)
  assert english.file_hash("test") != german.file_hash("test")


def test_pages_are_aligned_by_paragraph_and_sentence():
  english = """<h1 id="hd_id1">Insert a new chart</h1><p id="par_id2" class="x">Choose <b>Insert</b>
      &amp; wait a while. Then select the &lt;chart&gt;.</p>
      <p id="par_id3">Only here, in this text</p>
      <p id="par_id4">Uncut as it is here. Yes it is.</p><p>No name at all, and none</p>"""
  german = """<p id="par_id2">Einfügen &amp; lange abwarten. Dann das &lt;Diagramm&gt; wählen.</p>
      <h1 id="hd_id1">Neues Diagramm einfügen</h1><p id="par_id4">Hier in einem Satz, ja</p>"""
  assert list(sentence_pairs.page_pairs(english, german)) == [
      Example("Insert a new chart", ("Neues Diagramm einfügen",)),
      Example("Choose Insert & wait a while.", ("Einfügen & lange abwarten.",)),
      Example("Then select the <chart>.", ("Dann das <Diagramm> wählen.",)),
      Example("Uncut as it is here. Yes it is.", ("Hier in einem Satz, ja",))]


def test_a_sentence_of_many_pages_stays_in_one_split():
  pages = {f"page{n}": [Example("Common to all of them.", ("Allen gemeinsam.",)),
                        Example(f"Text of page {n}.", (f"Text der Seite {n}.",)),
                        Example(f"Other English {n}.", ("Derselbe deutsche Text.",))]
           for n in range(40)}
  splits = sentence_pairs.split_pages(pages)
  assert {split: len(pairs) for split, pairs in splits.items()} == {
      "train": 36, "validation": 2, "test": 5}  # in test: 1 in common and 2 of either page
  german = [one.references[0] for pairs in splits.values() for one in pairs]
  assert german.count("Allen gemeinsam.") == 1


def test_dictionary_sentences_are_cleaned_and_paired():
  lines = ["# Kommentar :: comment",
           "Hund {m} | Der Hund bellt laut. [ugs.] :: dog | The dog barks.",
           "Eins ist hier. | Zwei ist da. :: Only one is here.",
           "Ja!; Ja, sicher ist das! :: Yes it is!"]
  assert list(sentence_pairs.dictionary_pairs(lines)) == [
      Example("The dog barks.", ("Der Hund bellt laut.",))]


@pytest.fixture(name="words", scope="module")
def _words():
  entry = lambda *words: ["  1 licence", *(f"{word} x 1" for word in words)]
  return concept_sets.Vocabulary({
      "index.noun": entry("dog", "box", "mouse", "man", "leave", "table"),
      "index.verb": entry("carry", "leave", "dog", "stop", "see", "box"),
      "noun.exc": ["mice mouse"], "verb.exc": ["left leave", "saw see"],
      "cntlist.rev": ["dog%1:05:00:: 1 42", "dog%2:38:00:: 1 2", "leave%2:38:01:: 1 9"]})


def test_base_forms(words):
  forms = {"dogs": "dog", "boxes": "box", "mice": "mouse", "carried": "carry", "left": "leave",
           "leaving": "leave", "saw": "see", "quickly": None, "s": None}
  assert {form: words.lemma(form) for form in forms} == forms


def test_concept_sets_gather_their_sentences_in_one_split(words):
  sentences = ["The man saw two mice today", "A man sees the mouse there", "He left the dogs here",
               "mice see men", "the mice left while the dogs carried boxes to a table and man saw"]
  assert concept_sets.concept_sets(sentences, words) == {"man mouse see": sentences[:2]}
  sets = {f"a b{n}": [f"sentence {n}", f"another {n}"] for n in range(40)}
  splits = concept_sets.split_sets(sets)
  assert {split: len(examples) for split, examples in splits.items()} == {
      "train": 72, "validation": 2, "test": 2}
  assert all(one.references == tuple(sets[one.source]) for one in splits["test"])


def test_commongen_holds_out_whole_concept_sets():
  examples = [Example(source, (f"{source} {n}",)) for n in range(3)
              for source in ("a b", "b a", "c d", "e f", "g h")]
  train, held_out = text_pairs.hold_out_concept_sets(examples, count=2)
  assert len(held_out) == 2
  names = lambda members: {" ".join(sorted(one.source.split())) for one in members}
  assert names(train).isdisjoint(names(held_out)) and len(names(train) | names(held_out)) == 4
  assert len(train) + sum(len(one.references) for one in held_out) == len(examples)


def _folder(tmp_path, **lines):
  for split, text in lines.items():
    (tmp_path / f"{split}.tsv.xz").write_bytes(lzma.compress(text.encode()))
  return str(tmp_path)


def test_a_folder_of_ones_own(tmp_path):
  examples = [Example("a\tb", ("c\nd", "e\u2028f"))]
  folder = _folder(tmp_path, train="x\ty\n", validation=text_pairs.encode(examples).decode())
  pairs = load_pairs(folder, "nowhere")
  assert pairs.splits == ("train", "validation")
  assert pairs.examples("validation") == (Example("a b", ("c d", "e\u2028f")),)


def test_files_from_windows_are_read_as_others(tmp_path):
  folder = _folder(tmp_path, train="\ufeffa\tb\tc\r\nd\te\r\n", validation="x\ty\n")
  assert load_pairs(folder, "nowhere").examples("train") == (Example("a", ("b", "c")),
                                                             Example("d", ("e",)))


def test_what_is_missing_or_damaged_is_named(tmp_path):
  with pytest.raises(ConfigError, match="unknown dataset 'wmt15'; use one of wmt14"):
    load_pairs("wmt15", "nowhere")
  with pytest.raises(DataError, match="run 'python -m damcha_jax.data.prepare wmt14"):
    load_pairs("wmt14", str(tmp_path))
  with pytest.raises(DataError, match="has no validation.tsv.xz"):
    load_pairs(_folder(tmp_path, train="a\tb\n"), "nowhere")
  _folder(tmp_path, train="a\tb\nc\n", validation="")
  with pytest.raises(DataError, match="line 2 is not a source"):
    PairSet("mine", tmp_path).examples("train")
  with pytest.raises(DataError, match="holds no example"):
    PairSet("mine", tmp_path).examples("validation")
  (tmp_path / "test.tsv.xz").write_bytes(lzma.compress(b"a\tb\n")[:-10])
  with pytest.raises(DataError, match="test.tsv.xz cannot be read"):
    PairSet("mine", tmp_path).examples("test")
