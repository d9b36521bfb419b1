"""Parity with the numbers of the original implementations.

    pytest tests/golden --golden_dir=DIR

checks every .npz file in DIR by its keys and `meta`: forward within 2e-5 + 1e-5 |x|, gradients
within 1e-4 + 1e-4 |x|. A file of an unknown kind fails, and so does one with an output or gradient
that no check compared.
"""

from __future__ import annotations

import json
import pathlib

import checkers
import checkers_authors  # pylint: disable=unused-import
import checkers_comparators
from golden_file import GoldenFile
import numpy as np
import pytest

from damcha_jax.interop.names import CheckpointNameError

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def check(path: pathlib.Path) -> None:
  golden = GoldenFile(path)
  kind = golden.meta.get("module") or checkers_comparators.kind_of(golden)
  if kind not in checkers.CHECKERS:
    pytest.fail(
        f"{path} is of an unrecognised kind: meta['module'] is {kind!r}, known are"
        f" {sorted(checkers.CHECKERS)}"
    )
  checkers.CHECKERS[kind](golden)
  golden.check_complete()


def test_matches_original(golden_path: pathlib.Path) -> None:
  check(golden_path)


def _tampered(tmp_path: pathlib.Path, **changes: np.ndarray | None) -> pathlib.Path:
  """A copy of a good file with keys changed, added, or (None) removed."""
  return _changed(tmp_path, "attention_mha_causal.npz", **changes)


def _changed(tmp_path: pathlib.Path, name: str, **changes: np.ndarray | None) -> pathlib.Path:
  with np.load(FIXTURES / name) as archive:
    arrays = {name: archive[name] for name in archive.files}
  arrays = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
  np.savez(tmp_path / "tampered.npz", **arrays)
  return tmp_path / "tampered.npz"


def _good(name: str) -> np.ndarray:
  with np.load(FIXTURES / "attention_mha_causal.npz") as archive:
    return archive[name]


@pytest.mark.parametrize(
    "name, shift, message",
    [
        ("out/y", 1e-3, "out/y"),
        ("out/weights", 1e-3, "out/weights"),
        ("out/loss", 1.0, "out/loss"),
        ("grad/W_q.weight", 1e-2, "grad/W_q.weight"),
        ("grad/W_k.bias", 1e-2, "grad/W_k.bias"),
        ("grad/in/x", 1e-2, "grad/in/x"),
    ],
)
def test_a_wrong_number_fails(
    tmp_path: pathlib.Path, name: str, shift: float, message: str
) -> None:
  wrong = _good(name).copy()
  wrong.flat[0] += shift
  with pytest.raises(AssertionError, match=message):
    check(_tampered(tmp_path, **{name: wrong}))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("out/entropy", np.zeros(2), "out/entropy"),
        ("in/memory", np.zeros(2), "in/memory"),
        ("grad/W_r.weight", np.zeros(2), "grad/W_r.weight"),
        ("grad/W_q.weight", None, "grad/W_q.weight"),
    ],
)
def test_a_key_that_nothing_compares_fails(
    tmp_path: pathlib.Path, name: str, value: np.ndarray | None, message: str
) -> None:
  with pytest.raises(AssertionError, match=message):
    check(_tampered(tmp_path, **{name: value}))


@pytest.mark.parametrize("change, message", [
    ({"y_causal": 1e-8}, "y_causal"),
    ({"scale": 1e-8}, "scale"),
    ({"entropy": None}, "entropy"),
])
def test_files_without_meta_are_compared_as_strictly(
    tmp_path: pathlib.Path, change: dict[str, float | None], message: str
) -> None:
  name = "colmha/fairseq_kdim32.npz"
  with np.load(FIXTURES / name) as archive:  # None: a key that nothing can make
    changes = {key: np.zeros(2) if shift is None else archive[key] + shift
               for key, shift in change.items()}
  with pytest.raises(AssertionError, match=message):
    check(_changed(tmp_path, name, **changes))


@pytest.mark.parametrize("meta", [None, np.array(json.dumps({"module": "Perceiver"}))])
def test_an_unrecognised_file_fails(tmp_path: pathlib.Path, meta: np.ndarray | None) -> None:
  with pytest.raises(pytest.fail.Exception, match="unrecognised kind"):
    check(_tampered(tmp_path, meta=meta))


def test_parameters_that_do_not_fit_are_listed(tmp_path: pathlib.Path) -> None:
  changes = {"param/W_q.bias": None, "param/W_z.bias": np.zeros(32, np.float32)}
  with pytest.raises(CheckpointNameError, match=r"missing \['W_q.bias'\], unknown \['W_z.bias'\]"):
    check(_tampered(tmp_path, **changes))


def test_an_unknown_option_is_named(tmp_path: pathlib.Path) -> None:
  meta = json.loads(str(_good("meta")))
  meta["options"]["off_diag_rank"] = 2
  with pytest.raises(ValueError, match="off_diag_rank"):
    check(_tampered(tmp_path, meta=np.array(json.dumps(meta))))
