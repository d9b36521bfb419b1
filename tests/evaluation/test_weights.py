"""The command that lists and checks weights."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from random_weights import random_tensors

from damcha_jax.evaluation import inception
from damcha_jax.evaluation import published
from damcha_jax.evaluation import weights
from damcha_jax.interop import tensor_files

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def test_the_listing_says_what_to_fetch_and_how_to_check_it(capsys) -> None:
  assert weights.main([]) == 0
  text = capsys.readouterr().out
  for one in (published.INCEPTION, published.BART):
    assert one.url in text and one.sha256 in text and f"{one.num_bytes:,}" in text
  for name in ("config.json", "tokenizer.json"):
    assert f"bart-large-cnn/resolve/main/{name}\n" in text


def test_inception_is_checked_and_converted(tmp_path, monkeypatch, capsys) -> None:
  # The network's first convolution alone, which loads in no time.
  monkeypatch.setattr(inception, "_STEM", inception._STEM[:1])  # pylint: disable=protected-access
  monkeypatch.setattr(inception, "_BLOCKS", {})
  parts = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
  shapes = {f"Conv2d_1a_3x3.{part}": (32,) for part in parts}
  shapes["Conv2d_1a_3x3.conv.weight"] = (32, 3, 3, 3)
  source, output = tmp_path / "own.npz", tmp_path / "own.safetensors"
  np.savez(source, **random_tensors(shapes))
  assert weights.main(["inception", str(source)]) == 1
  error = capsys.readouterr().err
  assert error.startswith("error: ") and error.count("\n") == 1 and "allow_other_weights" in error
  arguments = ["inception", str(source), "--allow_other_weights", f"--output={output}"]
  assert weights.main(arguments) == 0
  text, sha256 = capsys.readouterr().out, published.file_sha256(source)
  assert "other weights for Inception" in text and sha256 in text and "896 parameters" in text
  monkeypatch.setattr(published, "INCEPTION", published.INCEPTION._replace(sha256=sha256))
  assert weights.main(["inception", str(output)]) == 0
  assert "the published Inception" in capsys.readouterr().out


def test_bart_is_checked_with_its_tokenizer(tmp_path, capsys) -> None:
  folder = tmp_path / "bart"
  shutil.copytree(FIXTURES / "bart", folder)
  assert weights.main(["bart", str(folder), "--allow_other_weights"]) == 1
  assert "model.safetensors is missing; fetch" in capsys.readouterr().err
  shapes = json.loads((FIXTURES / "bart.json").read_text(encoding="utf-8"))["shapes"]
  tensors = random_tensors({name: tuple(shape) for name, shape in shapes.items()})
  tensor_files.write_safetensors(folder / "model.safetensors", tensors)
  assert weights.main(["bart", str(folder), "--allow_other_weights"]) == 0
  assert "other weights for BART (facebook/bart-large-cnn), texts of 48" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [
    ["bart"],
    ["gpt2", "x"],
    ["bart", "x", "--output=y.safetensors"],
    ["inception", "x", "--output=y.npz"],
    ["inception", "~no-such-user/x"],
    ["inception", "x", "--output=~no-such-user/y.safetensors"],
])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
  with pytest.raises(SystemExit) as caught:
    weights.main(arguments)
  assert caught.value.code == 2
