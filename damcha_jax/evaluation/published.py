"""Published weights that metrics compute with: where they are, and whether a file is one of them.

Nothing is downloaded. `python -m damcha_jax.evaluation.weights` says what to fetch, and checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import numpy as np

from damcha_jax.errors import UserError


class WeightsError(UserError):
  """Weights are missing, damaged, or others than the published ones."""


class Published(NamedTuple):
  """A published file.

  Attributes:
    title: what it holds.
    url: where it is.
    file_name: its name there.
    num_bytes: its size.
    sha256: its hash.
    companions: files of the same folder that are needed too.
  """

  title: str
  url: str
  file_name: str
  num_bytes: int
  sha256: str
  companions: tuple[str, ...] = ()


# The 2015 TensorFlow graph of FID as PyTorch tensors; pytorch-fid and torch-fidelity publish the
# same bytes under two names.
INCEPTION = Published(
    title="Inception (2015, FID)",
    url="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
    "pt_inception-2015-12-05-6726825d.pth",
    file_name="pt_inception-2015-12-05-6726825d.pth",
    num_bytes=95_628_359,
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
)
# What BARTScore was published with.
BART = Published(
    title="BART (facebook/bart-large-cnn)",
    url="https://huggingface.co/facebook/bart-large-cnn/resolve/main/model.safetensors",
    file_name="model.safetensors",
    num_bytes=1_625_222_120,
    sha256="40041830399afb5348525ef8354b007ecec4286fdf3524f7e6b54377e17096cb",
    companions=("config.json", "tokenizer.json"),
)


def how_to_get(published: Published) -> str:
  """What to fetch and how to check it, in one line."""
  also = f", with {' and '.join(published.companions)} beside it," if published.companions else ""
  return (
      f"fetch {published.url} ({published.num_bytes:,} bytes){also} and check it with"
      " python -m damcha_jax.evaluation.weights"
  )


def require_file(path: Path, published: Published) -> None:
  """Raises WeightsError, with where to get it, unless the file is there."""
  try:
    path.stat()
  except OSError as error:
    absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
    raise WeightsError(f"{path} {'is missing' if absent else f'cannot be read: {error.strerror}'}; "
                       + how_to_get(published)) from error


def file_sha256(path: str | Path) -> str:
  """The hash of a file's bytes.

  Raises:
    WeightsError: it cannot be read.
  """
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error


def require_published(
    path: str | Path, sha256: str, published: Published, allow_other_weights: bool
) -> None:
  """Checks a hash against the published one.

  Raises:
    WeightsError: they differ, and other weights are not allowed.
  """
  if sha256 != published.sha256 and not allow_other_weights:
    raise WeightsError(
        f"{path} is not the published {published.title}: its sha256 is {sha256[:16]}.., not"
        f" {published.sha256[:16]}..; {how_to_get(published)}, or set allow_other_weights for"
        " weights of your own"
    )


def tensors_sha256(arrays: Mapping[str, np.ndarray]) -> str:
  """A hash of names, dtypes, shapes and values, whatever file they are in."""
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    digest.update(f"{name} {array.dtype.name} {array.shape} ".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def fill(
    path: str | Path,
    arrays: Mapping[str, np.ndarray],
    template: Any,
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, Any]:
  """Tensors under torch's names as a parameter tree.

  A leaf `a/b/kernel` is filled by `a.b.weight`, whose output axis comes first in torch and last
  here; `scale` and `embedding` are `weight` too. Kernels may be stacks of matrices.

  Args:
    path: the file, for messages.
    arrays: by torch name, exactly those that the tree has.
    template: the tree of shapes.
    rename: our dotted name -> torch's.

  Raises:
    WeightsError: a tensor is missing, unknown, of another shape, or not finite.
  """
  leaves = traverse_util.flatten_dict(template, sep=".")
  names = {leaf: rename(_torch_name(leaf)) for leaf in leaves}
  missing, unknown = set(names.values()) - set(arrays), set(arrays) - set(names.values())
  for kind, others in (("lacks", missing), ("has the unknown", unknown)):
    if others:
      raise WeightsError(
          f"{path} holds another model: it {kind} {min(others)}"
          + (f" and {len(others) - 1} more tensors" if len(others) > 1 else "")
      )
  params = {}
  for leaf, name in names.items():
    array = np.asarray(arrays[name], np.float32)
    if leaf.endswith("kernel"):
      array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.swapaxes(-2, -1)
    if array.shape != leaves[leaf].shape:
      raise WeightsError(
          f"{path} holds another model: {name} has shape {arrays[name].shape}, and"
          f" {leaves[leaf].shape} is needed here"
      )
    if not np.isfinite(array).all():
      raise WeightsError(f"{path}: {name} holds NaN or infinite numbers")
    params[leaf] = array
  return jax.device_put(traverse_util.unflatten_dict(params, sep="."))


def _torch_name(leaf: str) -> str:
  name, _, kind = leaf.rpartition(".")
  return f"{name}.{'bias' if kind == 'bias' else 'weight'}" if name else leaf
