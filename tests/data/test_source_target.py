"""Rows of source and target: what is predicted, packing, order, limits; and the tokenizers."""

import numpy as np
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.data import source_target, tokenizers
from damcha_jax.data.source_target import EvalRows, Limits, TrainRows
from damcha_jax.data.text_pairs import Example
from damcha_jax.data.tokenizers import BOS, EOS, SEP, ByteTokenizer
from damcha_jax.errors import DataError

TEXTS = ["", "a", "Straße  <eos>\n\tz ", " <bos> lead", "日本 \U0001F600", "e\u0301\ufffd\x00"]
LIMITS = Limits(source=8, target=6, overlong="truncate")
T = 20


def _examples(count=50):
  rng = np.random.default_rng(0)
  text = lambda longest: "".join(chr(97 + n) for n in rng.integers(0, 26, rng.integers(1, longest)))
  return [Example(text(9), (text(7),)) for _ in range(count)]


def _encoded(examples):
  return source_target.encode(examples, ByteTokenizer())


def _ids(text):
  return [byte + tokenizers.NUM_SPECIAL for byte in text.encode()]


# Tokenizers ---------------------------------------------------------------------------------------


@pytest.fixture(name="bpe", scope="module")
def _bpe():
  return tokenizers.BpeTokenizer(
      tokenizers.train_bpe(["the cat sat on the mat", "das ist der Text"] * 20, 290))


def test_texts_survive_the_tokenizers(bpe):
  for tokenizer in (bpe, ByteTokenizer()):
    ids = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(one) for one in ids] == TEXTS
    tokens = [token for one in ids for token in one]
    assert tokenizers.NUM_SPECIAL <= min(tokens) and max(tokens) < tokenizer.num_tokens


def test_bpe_joins_what_is_frequent(bpe):
  text = "the cat sat"
  (ids,) = bpe.encode([text])
  assert len(ids) < len(text) / 2 and bpe.num_tokens <= 290


def test_ids_that_are_no_text_are_passed_over(bpe):
  for tokenizer in (bpe, ByteTokenizer()):
    (ids,) = tokenizer.encode(["ab"])
    assert tokenizer.decode([BOS, *ids, SEP, EOS, 10_000]) == "ab"


def test_a_tokenizer_is_trained_once_for_equal_texts(tmp_path):
  texts = ["some text to train on"] * 5
  first = tokenizers.load_tokenizer("bpe", texts, "hash", 270, tmp_path)
  again = tokenizers.load_tokenizer("bpe", ["other texts"], "hash", 270, tmp_path)
  assert first.fingerprint == again.fingerprint
  assert tokenizers.load_tokenizer("bpe", texts, "hash", 270, None).fingerprint == first.fingerprint
  other = tokenizers.load_tokenizer("bpe", ["other texts"], "other hash", 270, tmp_path)
  assert other.fingerprint != first.fingerprint
  (path,) = tmp_path.glob("bpe-hash-270.json")
  path.write_text(path.read_text().split("\n")[0])  # as an earlier version wrote it
  assert tokenizers.load_tokenizer("bpe", [], "hash", 270, tmp_path).fingerprint == first.fingerprint
  path.write_text("{")
  with pytest.raises(DataError, match="bpe-hash-270.json cannot be read .* delete the file"):
    tokenizers.load_tokenizer("bpe", texts, "hash", 270, tmp_path)


# Rows ---------------------------------------------------------------------------------------------


def test_a_row_by_hand():
  batch = EvalRows(_encoded([Example("ab", ("xyz", "not scored"))]), LIMITS, T).batch(0, 2)
  tokens = [BOS, *_ids("ab"), SEP, *_ids("xyz"), EOS]
  np.testing.assert_array_equal(batch["inputs"][0], np.pad(tokens[:-1], (0, T - 7)))
  np.testing.assert_array_equal(batch["targets"][0], np.pad(tokens[1:], (0, T - 7)))
  np.testing.assert_array_equal(batch["weights"][0], np.pad([0, 0, 0, 1, 1, 1, 1], (0, T - 7)))
  np.testing.assert_array_equal(batch["padding_mask"][0], np.arange(T) < 7)
  assert batch["weights"][1].sum() == 0 and batch["padding_mask"][1].sum() == 1


def test_packed_rows_are_the_separate_rows():
  """Every example of an epoch is in a packed row once, as it would be alone, in a segment."""
  encoded = _encoded(_examples())
  alone = EvalRows(encoded, LIMITS, T).batch(0, len(encoded))
  expected = sorted(tuple(alone[name][row, alone["padding_mask"][row]].tolist()
                          for name in ("inputs", "targets", "weights")) for row in range(50))
  rows = TrainRows(encoded, LIMITS, 1, T, seed=3)
  assert 14 < rows.rows_per_epoch < 40
  found = []
  for step in range(rows.rows_per_epoch):
    batch = {name: array[0] for name, array in rows.batch_at(step).items()}
    segments = batch["segment_ids"]
    assert (np.diff(segments[batch["padding_mask"]]) >= 0).all()
    assert not segments[~batch["padding_mask"]].any()
    found += [tuple(batch[name][segments == segment].tolist()
                    for name in ("inputs", "targets", "weights"))
              for segment in range(1, segments.max() + 1)]
  assert sorted(found) == expected


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_has_every_row_once_in_an_order_of_its_own(packing):
  rows = TrainRows(_encoded(_examples()), LIMITS, 4, T, seed=0, packing=packing)
  stream = np.concatenate([rows.batch_at(step)["inputs"]
                           for step in range(-(-2 * rows.rows_per_epoch // 4))])
  epochs = stream[:rows.rows_per_epoch], stream[rows.rows_per_epoch:2 * rows.rows_per_epoch]
  assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
  assert (epochs[0] != epochs[1]).any()
  other = TrainRows(_encoded(_examples()), LIMITS, 4, T, seed=1, packing=packing)
  assert (other.batch_at(0)["inputs"] != rows.batch_at(0)["inputs"]).any()


def test_processes_share_a_batch():
  encoded = _encoded(_examples())
  whole = TrainRows(encoded, LIMITS, 6, T, seed=5)
  parts = [TrainRows(encoded, LIMITS, 6, T, 5, index, 3) for index in range(3)]
  for step in (7, 0):
    for name, array in whole.batch_at(step).items():
      np.testing.assert_array_equal(
          array, np.concatenate([part.batch_at(step)[name] for part in parts]))
  with pytest.raises(ConfigError, match="batch_size 6 is not divisible by the 4 processes"):
    TrainRows(encoded, LIMITS, 6, T, 0, 0, 4)


@pytest.mark.parametrize("overlong, kept, note", [
    ("truncate", [0, 1], "1 of 3 sources cut to 8 tokens; 1 of 3 examples left out as too long"),
    ("skip", [0], "2 of 3 examples left out as too long")])
def test_what_is_too_long_is_cut_or_left_out_and_counted(overlong, kept, note):
  encoded = _encoded([Example("a", ("b",)), Example("c" * 9, ("d",)), Example("e", ("f" * 7,))])
  rows = EvalRows(encoded, LIMITS._replace(overlong=overlong), T)
  assert rows.kept.tolist() == kept and rows.note == note
  if overlong == "truncate":
    assert rows.prompt(1) == [BOS, *_ids("c" * 8), SEP]
  assert EvalRows(_encoded([Example("a", ("b",))]), LIMITS, T).note is None


def test_limits_that_cannot_hold_are_named():
  with pytest.raises(ConfigError, match="max_source_tokens 8, data.max_target_tokens 6 .* 15"):
    EvalRows(_encoded(_examples()), LIMITS, 15)
  with pytest.raises(DataError, match="none of 1 examples fits"):
    EvalRows(_encoded([Example("a", ("f" * 7,))]), LIMITS, T)
  EvalRows(_encoded([Example("s" * 8, ("t" * 6,))]), LIMITS, 16).batch(0, 1)  # just fits


def test_each_reference_is_a_training_example():
  examples = source_target.each_reference([Example("a", ("b", "c")), Example("d", ("e",))])
  assert list(examples) == [Example("a", ("b",)), Example("a", ("c",)), Example("d", ("e",))]


def test_encoded_texts_are_kept(tmp_path):
  examples = _examples(5)
  first = source_target.cached(tmp_path / "new" / "train", lambda: _encoded(examples))
  again = source_target.cached(tmp_path / "new" / "train", lambda: pytest.fail("encoded again"))
  for encoded in (first, again):
    for index, (source, (target,)) in enumerate(examples):
      assert encoded.source(index).tolist() == _ids(source)
      assert encoded.target(index).tolist() == _ids(target)
  (tmp_path / "new" / "train-ids.npy").write_bytes(b"broken")
  with pytest.raises(DataError, match="delete them"):
    source_target.cached(tmp_path / "new" / "train", lambda: _encoded(examples))
