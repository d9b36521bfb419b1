"""Inception features against torch-fidelity and pytorch-fid, and the files that are refused."""

from __future__ import annotations

import json
import pathlib

from flax import traverse_util
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_images
from random_weights import random_tensors

from damcha_jax.errors import UserError
from damcha_jax.evaluation import inception
from damcha_jax.evaluation import published
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.published import WeightsError
from damcha_jax.interop import tensor_files

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def _tensors() -> dict[str, np.ndarray]:
  """Every tensor of the network under torch's name."""
  shapes = {"fc.weight": (4, 2048), "fc.bias": (4,)}  # unused
  for leaf, kernel in traverse_util.flatten_dict(inception.abstract_params(), sep=".").items():
    if leaf.endswith(".kernel"):
      height, width, inputs, outputs = kernel.shape
      stem = leaf.removesuffix(".kernel")
      shapes[f"{stem}.conv.weight"] = (outputs, inputs, height, width)
      parts = ("weight", "bias", "running_mean", "running_var")
      shapes.update({f"{stem}.bn.{part}": (outputs,) for part in parts})
  return random_tensors(shapes)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> inception.InceptionWeights:
  path = tmp_path_factory.mktemp("inception") / "inception.safetensors"
  tensor_files.write_safetensors(path, _tensors())
  return inception.load_inception(path, allow_other_weights=True)


@pytest.fixture
def small_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """Weights of a network that ends after its first convolutions, which loads in no time."""
  monkeypatch.setattr(inception, "_BLOCKS", {})
  path = tmp_path / "inception.safetensors"
  tensor_files.write_safetensors(path, _tensors())
  return path


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
  return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.families
def test_features_are_those_of_the_originals(weights: inception.InceptionWeights) -> None:
  images_NHWC = random_images(2, 32)
  with np.load(FIXTURES / "inception.npz") as archive:
    expected = {mode: archive[mode] for mode in inception.MODES}
  # The two modes must differ by far more than the tolerance for the comparison to tell them apart.
  assert _error(expected["tf"], expected["pytorch-fid"]) > 1e-3
  for index, mode in enumerate(inception.MODES):
    features_fn = inception.InceptionFeatures(weights, mode, batch_size=1)
    image_1HWC = images_NHWC[index : index + 1]
    assert _error(features_fn(image_1HWC), expected[mode][index : index + 1]) < 1e-5


def test_batches_are_completed_by_zeros_that_give_no_features(monkeypatch) -> None:
  shapes = []

  def mean_colour(params: float, x_BHWC: jnp.ndarray) -> jnp.ndarray:
    shapes.append(x_BHWC.shape)
    return params * x_BHWC.mean((1, 2))

  monkeypatch.setattr(inception, "_network_fn", mean_colour)
  weights, images_NHWC = inception.InceptionWeights(2.0, "hash"), random_images(7, 299)
  expected_NC = 2 * (images_NHWC / 127.5 - 1).mean((1, 2))
  for batch_size in (3, 7, 8):
    features_fn = inception.InceptionFeatures(weights, batch_size=batch_size)
    np.testing.assert_allclose(features_fn(images_NHWC), expected_NC, atol=1e-5)
    assert set(shapes) == {(batch_size, 299, 299, 3)}
    shapes.clear()
  grey_NHW = images_NHWC[..., 0]
  np.testing.assert_allclose(features_fn(grey_NHW), expected_NC[:, :1].repeat(3, 1), atol=1e-5)


@pytest.mark.slow
def test_features_do_not_depend_on_the_batch_size(weights: inception.InceptionWeights) -> None:
  images_NHW = random_images(5, 16, 1)[..., 0]
  all_at_once = inception.InceptionFeatures(weights, batch_size=5)(images_NHW)
  for batch_size in (1, 3):
    features_fn = inception.InceptionFeatures(weights, batch_size=batch_size)
    assert _error(features_fn(images_NHW), all_at_once) < 1e-6


@pytest.mark.parametrize("size", [8, 400])
def test_resizing_by_its_definition(size: int) -> None:
  row_W = random_images(1, size)[0, 0, :, 0].astype(np.float64)
  image_1HWC = jnp.broadcast_to(row_W[:, None].astype(np.float32), (1, size, size, 3))
  position_P = np.arange(299) * size / 299
  tf_P = (np.interp(position_P, np.arange(size), row_W) - 128) / 128
  areas_P = np.interp((np.arange(299) + 0.5) * size / 299 - 0.5, np.arange(size), row_W) / 127.5 - 1
  for mode, expected_P in {"tf": tf_P, "pytorch-fid": areas_P}.items():
    along_width_P = inception.preprocess(image_1HWC, mode)[0, 7, :, 1]
    along_height_P = inception.preprocess(image_1HWC.transpose(0, 2, 1, 3), mode)[0, :, 7, 1]
    np.testing.assert_allclose(along_width_P, expected_P, atol=1e-4)
    np.testing.assert_allclose(along_height_P, expected_P, atol=1e-4)


def test_average_pools_leave_the_padding_out() -> None:
  ones = jnp.ones((1, 4, 4, 2))
  pooled = inception._average_pool(ones)  # pylint: disable=protected-access
  np.testing.assert_allclose(pooled, ones)


def test_only_the_published_file_is_taken_unless_told(
    small_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  with pytest.raises(WeightsError, match="not the published Inception .* fetch https.* or set"
                     " allow_other_weights") as caught:
    inception.load_inception(small_file)
  assert "\n" not in str(caught.value)
  with pytest.raises(WeightsError, match="is missing; fetch https"):
    inception.load_inception(tmp_path / "none.pth")
  damaged = tmp_path / "damaged.safetensors"
  damaged.write_bytes(small_file.read_bytes()[:-7])
  with pytest.raises(tensor_files.TensorFileError, match="damaged"):
    inception.load_inception(damaged, allow_other_weights=True)


@pytest.mark.parametrize("metadata", [3, [1], {"source_sha256": 3}])
def test_metadata_of_another_kind_are_refused(tmp_path: pathlib.Path, metadata) -> None:
  path = tmp_path / "x.safetensors"
  header = json.dumps({"__metadata__": metadata}).encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header)
  with pytest.raises(tensor_files.TensorFileError, match="damaged: its metadata are no texts"):
    inception.load_inception(path, allow_other_weights=True)


@pytest.mark.parametrize("path", ["~no-such-user/x.pth", "x" * 5000])
def test_a_path_that_cannot_be_is_named(path: str) -> None:
  with pytest.raises(UserError, match="cannot be read"):
    inception.load_inception(path)


def test_a_converted_file_is_known_by_its_source(
    small_file: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(published, "INCEPTION", published.INCEPTION._replace(
      sha256=published.file_sha256(small_file)))
  converted = tmp_path / "converted.safetensors"
  inception.convert(small_file, converted)
  assert not any(name.startswith("fc.") for name in tensor_files.read_tensors(converted))
  assert inception.load_inception(converted).sha256 == published.INCEPTION.sha256
  data = bytearray(converted.read_bytes())
  data[-1] ^= 1
  converted.write_bytes(data)
  with pytest.raises(WeightsError, match="damaged; convert it again"):
    inception.load_inception(converted)


@pytest.mark.parametrize("change, message", [
    ({"Conv2d_4a_3x3.conv.weight": None}, "lacks Conv2d_4a_3x3.conv.weight"),
    ({"Conv2d_3b_1x1.bn.running_var": None}, "lacks Conv2d_3b_1x1.bn.running_var"),
    ({"extra": np.zeros(1)}, "has the unknown extra"),
    ({"Conv2d_1a_3x3.conv.weight": np.zeros((32, 3, 5, 5))}, "has shape"),
    ({"Conv2d_1a_3x3.bn.bias": np.full(32, np.nan)}, "NaN"),
    ({"Conv2d_1a_3x3.bn.running_var": -np.ones(32)}, "negative"),
])
def test_other_models_are_refused(small_file: pathlib.Path, change, message: str) -> None:
  tensors = {**_tensors(), **change}
  tensor_files.write_safetensors(
      small_file, {name: array for name, array in tensors.items() if array is not None})
  with pytest.raises(WeightsError, match=message) as caught:
    inception.load_inception(small_file, allow_other_weights=True)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("images, message", [
    (np.zeros((2, 4, 4), np.float32), "must be uint8"),
    (np.zeros((2, 4), np.uint8), r"must be \[N, H, W\]"),
    (np.zeros((2, 4, 4, 4), np.uint8), r"must be \[N, H, W\]"),
    (np.zeros((0, 4, 4), np.uint8), "there are no images"),
])
def test_images_of_another_kind_are_refused(images: np.ndarray, message: str) -> None:
  weights = inception.InceptionWeights({}, "hash")
  with pytest.raises(MetricError, match=message):
    inception.InceptionFeatures(weights)(images)
  with pytest.raises(ValueError, match="mode 'clean' is none of"):
    inception.InceptionFeatures(weights, "clean")
