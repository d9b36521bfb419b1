"""Parameters go to .safetensors files and come back as they were."""

import numpy as np
import pytest

from damcha_jax.interop.parameters import read_params, write_params
from damcha_jax.interop.tensor_files import TensorFileError
from tiny_task import assert_trees_equal

PARAMS = {"stack": {"layer_0": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}},
          "scale": np.float16([0.5])}


@pytest.fixture(name="path")
def _path(tmp_path):
  write_params(tmp_path / "a.safetensors", PARAMS, {"source": "here"})
  return tmp_path / "a.safetensors"


def test_written_parameters_are_read(path):
  assert_trees_equal(read_params(path), PARAMS)
  assert read_params(path, like=PARAMS)["scale"].dtype == np.float16


@pytest.mark.parametrize("like, message", [
    ({"stack": PARAMS["stack"]}, "parameter 'scale' is not the model's"),
    ({**PARAMS, "bias": np.zeros(1)}, "parameter 'bias' is missing"),
    ({**PARAMS, "scale": np.float16([1, 2])}, r"'scale' is float16\[1\], not float16\[2\]"),
    ({**PARAMS, "scale": np.float32([1])}, r"'scale' is float16\[1\], not float32\[1\]"),
])
def test_other_parameters_are_refused(path, like, message):
  with pytest.raises(TensorFileError, match=message):
    read_params(path, like=like)


def test_a_name_that_would_not_be_read_is_refused(tmp_path):
  with pytest.raises(TensorFileError, match="ends in .safetensors"):
    write_params(tmp_path / "a.bin", PARAMS)
