"""Outputs that are kept: whose they are, and whether they are what was written."""

import json
import shutil

import pytest

from damcha_jax import text_samples
from damcha_jax.errors import WorkdirError

ORIGIN = {"attention": "mha", "seed": 0, "step": 3, "validation": 5.0, "rule": {"num_beams": 1}}
RECORDS = [{"index": n, "source": "a\u2028", "references": ["b"], "output": "c", "nll": 3.5,
            "log_likelihood": -1.25, "num_tokens": 2, "nll_tokens": 2, "step": 3} for n in range(3)]


@pytest.mark.parametrize("change", [{"attention": "damcha"}, {"seed": 1}, {"step": 4},
                                    {"validation": 5.5}, {"rule": {"num_beams": 2}}])
def test_outputs_of_another_origin_are_refused(tmp_path, change):
  text_samples.write_outputs(tmp_path, ORIGIN, RECORDS)
  assert text_samples.read_outputs(tmp_path, ORIGIN) == RECORDS
  with pytest.raises(WorkdirError, match="line 1 is of another run, step or rule.*; delete it"):
    text_samples.read_outputs(tmp_path, {**ORIGIN, **change})


@pytest.mark.parametrize("change", [{"output": "d"}, {"step": 4}, {"nll": 3.25}, {"seal": 0},
                                    {"references": "b"}, {"nll_tokens": 2.0}, {"extra": 1}])
def test_changed_outputs_are_refused(tmp_path, change):
  text_samples.write_outputs(tmp_path, ORIGIN, RECORDS)
  path = tmp_path / text_samples.FILE
  first, second, third = map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])
  path.write_text("".join(json.dumps(one) + "\n" for one in (first, {**second, **change}, third)))
  with pytest.raises(WorkdirError, match="line 2 is "):
    text_samples.read_outputs(tmp_path, ORIGIN)


def test_unfinished_outputs_are_of_one_origin(tmp_path):
  path = tmp_path / text_samples.PARTIAL
  text_samples._Made(path, ORIGIN).add([4, 2], [{"output": "x"}, {"output": "y"}])
  assert text_samples._Made(path, ORIGIN).has([2, 4])
  assert not text_samples._Made(path, {**ORIGIN, "step": 4}).records
  for damage in (b"garbage\n", b"[1, 2]\n", b'[0, 3, {}]\n', b'["0", 3, {"output": "x"}]\n',
                 bytes(range(128, 256)) + b"\n", b"[[0], 3, {}]\n"):
    path.write_bytes(damage)
    assert not text_samples._Made(path, ORIGIN).records
  path.unlink()
  path.mkdir()
  assert not text_samples._Made(path, ORIGIN).records
  shutil.rmtree(path)
