"""Features of the 2015 TensorFlow Inception network, which FID and KID are defined by.

The network differs from the Inception v3 of later libraries: batch normalization has an epsilon of
1e-3, average pools leave the padding out of the mean, and the last block pools by maxima.

Axes: N images, B batch, H height, W width, C channels, F = 2048 features.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from pathlib import Path
from typing import Any, NamedTuple

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from damcha_jax.evaluation import published
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.published import WeightsError
from damcha_jax.files import expanded
from damcha_jax.interop import tensor_files

Array = jax.Array

NUM_FEATURES = 2048
MODES = ("pytorch-fid", "tf")

_SIZE = 299  # height and width of what the network sees
_BATCH_NORM_EPSILON = 1e-3
# Of the classifier and of training, which features do not need.
_UNUSED = ("fc.", "AuxLogits.")


class _Conv(NamedTuple):
  """A convolution with a folded batch normalization and a ReLU.

  A stride of 1 keeps the size, one of 2 takes only windows without padding.
  """

  name: str
  features: int
  size: tuple[int, int] = (1, 1)
  stride: int = 1
  padding: str = ""

  def __call__(self, x_BHWC: Array) -> Array:
    y_BHWC = nn.Conv(
        self.features, self.size, self.stride, precision=lax.Precision.HIGHEST, name=self.name,
        padding=self.padding or ("SAME" if self.stride == 1 else "VALID"),
        kernel_init=nn.initializers.zeros,  # always loaded, and quick to trace
    )(x_BHWC)
    return nn.relu(y_BHWC)


def _average_pool(x_BHWC: Array) -> Array:
  return nn.avg_pool(x_BHWC, (3, 3), (1, 1), "SAME", count_include_pad=False)


def _max_pool(x_BHWC: Array) -> Array:
  return nn.max_pool(x_BHWC, (3, 3), (1, 1), "SAME")


def _reduce_pool(x_BHWC: Array) -> Array:
  return nn.max_pool(x_BHWC, (3, 3), (2, 2), "VALID")


# A block is the concatenation of its branches; a branch is a chain of steps, and a tuple among the
# steps forks into convolutions whose outputs are concatenated.
def _block_a(pool_features: int):
  return (
      [_Conv("branch1x1", 64)],
      [_Conv("branch5x5_1", 48), _Conv("branch5x5_2", 64, (5, 5))],
      [_Conv("branch3x3dbl_1", 64), _Conv("branch3x3dbl_2", 96, (3, 3)),
       _Conv("branch3x3dbl_3", 96, (3, 3))],
      [_average_pool, _Conv("branch_pool", pool_features)],
  )


def _block_b():
  return (
      [_Conv("branch3x3", 384, (3, 3), 2)],
      [_Conv("branch3x3dbl_1", 64), _Conv("branch3x3dbl_2", 96, (3, 3)),
       _Conv("branch3x3dbl_3", 96, (3, 3), 2)],
      [_reduce_pool],
  )


def _block_c(features: int):
  return (
      [_Conv("branch1x1", 192)],
      [_Conv("branch7x7_1", features), _Conv("branch7x7_2", features, (1, 7)),
       _Conv("branch7x7_3", 192, (7, 1))],
      [_Conv("branch7x7dbl_1", features), _Conv("branch7x7dbl_2", features, (7, 1)),
       _Conv("branch7x7dbl_3", features, (1, 7)), _Conv("branch7x7dbl_4", features, (7, 1)),
       _Conv("branch7x7dbl_5", 192, (1, 7))],
      [_average_pool, _Conv("branch_pool", 192)],
  )


def _block_d():
  return (
      [_Conv("branch3x3_1", 192), _Conv("branch3x3_2", 320, (3, 3), 2)],
      [_Conv("branch7x7x3_1", 192), _Conv("branch7x7x3_2", 192, (1, 7)),
       _Conv("branch7x7x3_3", 192, (7, 1)), _Conv("branch7x7x3_4", 192, (3, 3), 2)],
      [_reduce_pool],
  )


def _block_e(pool: Any):
  return (
      [_Conv("branch1x1", 320)],
      [_Conv("branch3x3_1", 384),
       (_Conv("branch3x3_2a", 384, (1, 3)), _Conv("branch3x3_2b", 384, (3, 1)))],
      [_Conv("branch3x3dbl_1", 448), _Conv("branch3x3dbl_2", 384, (3, 3)),
       (_Conv("branch3x3dbl_3a", 384, (1, 3)), _Conv("branch3x3dbl_3b", 384, (3, 1)))],
      [pool, _Conv("branch_pool", 192)],
  )


_STEM = (
    _Conv("Conv2d_1a_3x3", 32, (3, 3), 2),
    _Conv("Conv2d_2a_3x3", 32, (3, 3), padding="VALID"),
    _Conv("Conv2d_2b_3x3", 64, (3, 3)),
    _reduce_pool,
    _Conv("Conv2d_3b_1x1", 80),
    _Conv("Conv2d_4a_3x3", 192, (3, 3), padding="VALID"),
    _reduce_pool,
)
_BLOCKS = {
    "Mixed_5b": _block_a(32),
    "Mixed_5c": _block_a(64),
    "Mixed_5d": _block_a(64),
    "Mixed_6a": _block_b(),
    "Mixed_6b": _block_c(128),
    "Mixed_6c": _block_c(160),
    "Mixed_6d": _block_c(160),
    "Mixed_6e": _block_c(192),
    "Mixed_7a": _block_d(),
    "Mixed_7b": _block_e(_average_pool),
    "Mixed_7c": _block_e(_max_pool),
}


def _run(step: Any, x_BHWC: Array) -> Array:
  if type(step) is tuple:
    return jnp.concatenate([branch(x_BHWC) for branch in step], -1)
  return step(x_BHWC)


class _Block(nn.Module):
  branches: Any

  @nn.compact
  def __call__(self, x_BHWC: Array) -> Array:
    outputs = [functools.reduce(lambda y, step: _run(step, y), branch, x_BHWC)
               for branch in self.branches]
    return jnp.concatenate(outputs, -1)


class Inception(nn.Module):
  """Images scaled to about -1 .. 1, [B, 299, 299, 3] -> [B, F], the mean over the last 8 x 8."""

  @nn.compact
  def __call__(self, x_BHWC: Array) -> Array:
    for step in _STEM:
      x_BHWC = step(x_BHWC)
    for name, branches in _BLOCKS.items():
      x_BHWC = _Block(branches, name=name)(x_BHWC)
    return x_BHWC.mean((1, 2))


def preprocess(images_BHWC: Array, mode: str) -> Array:
  """0 .. 255, [B, H, W, 3] -> what the network sees, [B, 299, 299, 3].

  The two ways give different features, hence different distances:

    pytorch-fid  pixels are areas when resized, then x / 127.5 - 1
    tf           pixels are points, as in TensorFlow 1 and torch-fidelity, then (x - 128) / 128

  Raises:
    ValueError: another mode.
  """
  x_BHWC = images_BHWC.astype(jnp.float32)
  if mode == "pytorch-fid":
    shape = (x_BHWC.shape[0], _SIZE, _SIZE, 3)
    return 2 * jax.image.resize(x_BHWC / 255, shape, "bilinear", antialias=False) - 1
  if mode == "tf":
    return (_resize_points(_resize_points(x_BHWC, 1), 2) - 128) / 128
  raise ValueError(f"mode '{mode}' is none of {', '.join(MODES)}")


def _resize_points(x_BHWC: Array, axis: int) -> Array:
  """Linear interpolation at i * n / 299, the last pixel repeated."""
  size = x_BHWC.shape[axis]
  position_P = np.arange(_SIZE, dtype=np.float32) * np.float32(size / _SIZE)
  low_P = position_P.astype(int)
  shape = [1] * 4
  shape[axis] = _SIZE
  fraction = (position_P - low_P).reshape(shape)
  low = jnp.take(x_BHWC, low_P, axis)
  return low + (jnp.take(x_BHWC, np.minimum(low_P + 1, size - 1), axis) - low) * fraction


# One program per batch size, whatever the size of the images and the mode.
_network_fn = jax.jit(lambda params, x_BHWC: Inception().apply({"params": params}, x_BHWC))


class InceptionWeights(NamedTuple):
  """Parameters of `Inception`, and the hash of the published or own file they came from."""

  params: dict[str, Any]
  sha256: str


def load_inception(path: str | Path, *, allow_other_weights: bool = False) -> InceptionWeights:
  """The network's parameters, each batch normalization folded into its convolution.

  Args:
    path: the published .pth, what `convert` made of it, or a file of the same tensors.
    allow_other_weights: also take a file that is not the published one.

  Raises:
    UserError: the file is missing, damaged, or not the published one.
  """
  path = expanded(path)
  published.require_file(path, published.INCEPTION)
  sha256, arrays = published.file_sha256(path), None
  metadata = {}
  if path.suffix == ".safetensors":
    metadata = tensor_files.read_safetensors_metadata(path)
  if "source_sha256" in metadata:
    sha256, arrays = metadata["source_sha256"], tensor_files.read_tensors(path)
    if published.tensors_sha256(arrays) != metadata.get("tensors_sha256"):
      raise WeightsError(f"{path} is damaged; convert it again")
  published.require_published(path, sha256, published.INCEPTION, allow_other_weights)
  arrays = tensor_files.read_tensors(path) if arrays is None else arrays
  return InceptionWeights(published.fill(path, _fold(path, arrays), abstract_params()), sha256)


def convert(path: str | Path, output: str | Path, *, allow_other_weights: bool = False) -> None:
  """Writes the tensors that features need as .safetensors, with the hash of their source.

  Raises:
    UserError: as `load_inception`, or the output cannot be written.
  """
  sha256 = load_inception(path, allow_other_weights=allow_other_weights).sha256
  arrays = {name: np.asarray(array, np.float32)
            for name, array in tensor_files.read_tensors(path).items() if _is_used(name)}
  metadata = {"source_sha256": sha256, "tensors_sha256": published.tensors_sha256(arrays)}
  tensor_files.write_safetensors(output, arrays, metadata)


def abstract_params() -> dict[str, Any]:
  """Shapes of the network's parameters."""
  images = jnp.zeros((1, _SIZE, _SIZE, 3))
  return jax.eval_shape(Inception().init, jax.random.key(0), images)["params"]


def _is_used(name: str) -> bool:
  return not name.startswith(_UNUSED) and not name.endswith("num_batches_tracked")


def _fold(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """y = g (w x - m) / sqrt(v + eps) + b, as the weight and bias of the convolution alone."""
  folded = {}
  used = {name for name in arrays if _is_used(name)}
  parts = ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
  for stem in sorted({name.rsplit(".", 2)[0] for name in used if name.endswith(parts)}):
    names = [f"{stem}.{part}" for part in parts]
    if missing := [name for name in names if name not in used]:
      raise WeightsError(f"{path} holds another model: it lacks {missing[0]}")
    used -= set(names)
    kernel, scale, shift, mean, variance = (np.asarray(arrays[name], np.float64) for name in names)
    if kernel.ndim != 4 or not all(
        part.shape == kernel.shape[:1] for part in (scale, shift, mean, variance)):
      raise WeightsError(f"{path} holds another model: {names[0]} has shape {kernel.shape}")
    if not (variance > -_BATCH_NORM_EPSILON).all():
      raise WeightsError(f"{path}: {names[-1]} holds NaN or negative numbers")
    scale = scale / np.sqrt(variance + _BATCH_NORM_EPSILON)
    folded[f"{stem}.weight"] = kernel * scale[:, None, None, None]
    folded[f"{stem}.bias"] = shift - mean * scale
  # What is left over belongs to another model; `fill` names it.
  return {**folded, **{name: arrays[name] for name in used}}


class InceptionFeatures:
  """Images -> features, in batches of one compiled size."""

  def __init__(self, weights: InceptionWeights, mode: str = "pytorch-fid", batch_size: int = 64):
    """Creates the function.

    Args:
      weights: from `load_inception`.
      mode: how images are resized and scaled, see `preprocess`.
      batch_size: images per call.

    Raises:
      ValueError: an unknown mode.
    """
    if mode not in MODES:
      raise ValueError(f"mode '{mode}' is none of {', '.join(MODES)}")
    self.mode = mode
    self.weights_sha256 = weights.sha256
    self._params = weights.params
    self._batch_size = batch_size
    self._preprocess_fn = jax.jit(functools.partial(preprocess, mode=mode))

  def __call__(self, images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W] (grey, repeated to three channels) or [N, H, W, 3] -> float32 [N, F].

    Raises:
      MetricError: no images, or of another dtype or shape.
    """
    images_NHWC = as_colour(images)
    batches = []
    for start in range(0, len(images_NHWC), self._batch_size):
      batch = images_NHWC[start : start + self._batch_size]
      padding = self._batch_size - len(batch)
      padded = np.pad(batch, ((0, padding), (0, 0), (0, 0), (0, 0)))
      features_BF = _network_fn(self._params, self._preprocess_fn(padded))
      batches.append(np.asarray(features_BF)[: len(batch)])
    return np.concatenate(batches)


def as_colour(images: np.ndarray) -> np.ndarray:
  """uint8 [N, H, W] or [N, H, W, 3] -> [N, H, W, 3].

  Raises:
    MetricError: no images, or of another dtype or shape.
  """
  images = np.asarray(images)
  if images.dtype != np.uint8:
    raise MetricError(f"images must be uint8, not {images.dtype}; round them to 0 .. 255 first")
  if images.ndim == 3:
    images = np.repeat(images[..., None], 3, -1)
  if images.ndim != 4 or images.shape[-1] != 3:
    raise MetricError(f"images must be [N, H, W] or [N, H, W, 3], not {list(images.shape)}")
  if not len(images):
    raise MetricError("there are no images")
  return images
