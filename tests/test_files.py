"""Paths of users, and files that several processes write."""

import pytest

from damcha_jax.errors import UserError
from damcha_jax.files import expanded, replacing


def test_a_user_who_does_not_exist_is_named():
  with pytest.raises(UserError, match="^~no-such-user/x cannot be read or written"):
    expanded("~no-such-user/x")


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path):
  path = tmp_path / "a.npy"
  path.write_text("old")
  with replacing(path) as first, replacing(path) as second:
    first.write_text("1")
    second.write_text("2")
    assert first != second and path.read_text() == "old"
  assert path.read_text() == "1" and list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_alone(tmp_path):
  path = tmp_path / "a.npy"
  path.write_text("old")
  with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
    partial.write_text("ne")
    raise KeyboardInterrupt
  assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
