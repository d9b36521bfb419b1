"""Checkpoints of every kind become models of this suite, by the library and the command line."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from damcha_jax.errors import CheckpointError
from damcha_jax.interop import authors_shapes
from damcha_jax.interop import convert
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.names import from_arrays
from damcha_jax.interop.names import to_arrays
from damcha_jax.interop.options import OptionError
from damcha_jax.interop.tensor_files import read_tensors
from damcha_jax.interop.torch_checkpoints import abstract_params
from damcha_jax.interop.torch_checkpoints import import_checkpoint
from damcha_jax.interop.torch_checkpoints import KINDS

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VIT = FIXTURES / "vit.pt"
GENERATED = dict(use_M=True, use_mlp=True)
SIZES = dict(features=12, num_heads=3, mlp_features=10, num_layers=2)


def _transformer(**options: Any) -> dict[str, Any]:
  widths = [5, 6] if options.get("use_mlp") else []
  options = {**authors_shapes.TRANSFORMER_OPTIONS, "n_layers": 2, **options}
  return dict(kind="transformer", **SIZES, widths=widths, options=options)


def _vit(**options: Any) -> dict[str, Any]:
  widths = [5] if options.get("use_mlp") else []
  options = {**KINDS["vit"].defaults, **options}
  sizes = dict(image_size=6, patch_size=2, num_channels=3, num_classes=4)
  return dict(kind="vit", **SIZES, widths=widths, options=options, **sizes)


def _baseline(name: str, **options: Any) -> dict[str, Any]:
  options = {**KINDS["baseline"].defaults, **options}
  return dict(kind="baseline", baseline=name, **SIZES, options=options)


# A model, and what its shapes do not tell.
MODELS = {
    "transformer_mha": (_transformer(), ("num_heads",)),
    "transformer_static": (_transformer(use_M=True), ("num_heads",)),
    "transformer_own": (_transformer(**GENERATED, diag_scale=0.5), ("num_heads", "diag_scale")),
    "transformer_shared": (_transformer(**GENERATED, share_mlp=True, off_diag_mode="bayesian"), ()),
    "transformer_bias": (
        _transformer(**GENERATED, share_mlp=True, use_layer_bias=True, layer_bias_rank=3,
                     compact_rank=2),
        ("num_heads",),
    ),
    "transformer_half_rank": (
        _transformer(**GENERATED, compact_rank=6), ("num_heads", "compact_rank")
    ),
    "vit_mha": (_vit(), ("num_heads",)),
    "vit_static": (_vit(use_M=True), ("num_heads",)),
    "vit_own": (_vit(**GENERATED), ("num_heads",)),
    "vit_shared": (_vit(**GENERATED, share_mlp=True, off_diag_mode="separate_B"), ()),
    "tha": (_baseline("tha"), ()),
    "dcmha": (_baseline("dcmha", router_rank=5), ()),
    "colmha": (_baseline("colmha"), ()),
    "moa": (_baseline("moa", expert_factor=3), ()),
    "mma": (_baseline("mma", local_window=2), ("num_heads", "local_window")),
}


def _arrays(description: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract_params(description)
  )
  return params, to_arrays(params, KINDS[description["kind"]].names(description))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_told_from_its_tensors(name: str) -> None:
  description, untold = MODELS[name]
  params, arrays = _arrays(description)
  given = {option: description["options"][option] for option in untold if option != "num_heads"}
  num_heads = 3 if "num_heads" in untold else None
  imported = import_checkpoint(description["kind"], arrays, given, num_heads=num_heads)
  assert imported.description == description
  jax.tree.map(np.testing.assert_array_equal, imported.params, params)
  assert sum(array.size for array in arrays.values()) == sum(
      leaf.size for leaf in jax.tree.leaves(params)
  )
  assert json.loads(json.dumps(description)) == description
  if "num_heads" in untold:
    with pytest.raises(OptionError, match="give num_heads"):
      import_checkpoint(description["kind"], arrays, given)


def test_a_file_of_torch_computes_what_torch_did() -> None:
  imported = import_checkpoint("vit", read_tensors(VIT))
  assert imported.description["options"]["off_diag_mode"] == "linear_comb"
  with np.load(FIXTURES / "vit_io.npz") as archive:
    images, expected = np.moveaxis(archive["images"], 1, -1), archive["logits"]
  actual = jax.jit(imported.module.apply)({"params": imported.params}, images)
  np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=1e-5)


def test_copies_of_a_shared_generator_must_agree() -> None:
  arrays = read_tensors(VIT)
  name = "blocks.1.attn._shared_mlp.mlp.0.bias"
  arrays[name] = arrays[name] + 1
  with pytest.raises(CheckpointNameError, match=f"{name} differs from blocks.0"):
    import_checkpoint("vit", arrays)


def test_what_torch_repeats_or_derives_is_left_out() -> None:
  description, _ = MODELS["transformer_shared"]
  params, arrays = _arrays(description)
  shared = "decoder.shared_mlp_module."
  saved = dict(arrays)
  for name, array in arrays.items():
    if name.startswith(shared):
      for layer in range(2):
        saved[f"decoder.layers.{layer}.self_attn._shared_mlp.{name.removeprefix(shared)}"] = array
  saved["decoder.pe.pe"] = np.zeros((4096, 12), np.float32)
  saved[f"{shared}diag_mask"] = saved[f"{shared}off_diag_mask"] = np.zeros((12, 12), np.float32)
  imported = import_checkpoint("transformer", saved)
  assert imported.description == description
  jax.tree.map(np.testing.assert_array_equal, imported.params, params)


@pytest.mark.parametrize("options, num_heads, message", [
    ({"off_diag_mode": "mlp"}, None, "off_diag_mode='mlp', but the checkpoint has"),
    ({"use_M": False}, None, "use_M=False, but"),
    ({"rank": 2}, None, "unknown options"),
    ({}, 4, "num_heads 4, but the checkpoint has 2 heads"),
])
def test_options_that_the_tensors_contradict(
    options: dict[str, Any], num_heads: int | None, message: str
) -> None:
  with pytest.raises(OptionError, match=message):
    import_checkpoint("vit", read_tensors(VIT), options, num_heads=num_heads)


def test_packed_tensors_there_and_back() -> None:
  description, _ = MODELS["vit_mha"]
  params, arrays = _arrays(description)
  weight = arrays["blocks.1.attn.in_proj_weight"]
  kernel = params["stack"]["layer_1"]["attention"]["key"]["kernel"]
  np.testing.assert_array_equal(weight[12:24], kernel.reshape(12, 12).T)
  names = KINDS["vit"].names(description)
  back = from_arrays(arrays, names, abstract_params(description))
  jax.tree.map(np.testing.assert_array_equal, back, params)
  arrays["blocks.1.attn.in_proj_weight"] = weight[:24]
  with pytest.raises(CheckpointNameError, match=r"in_proj_weight has shape \(24, 12\).*\(36, 12\)"):
    from_arrays(arrays, names, abstract_params(description))


@pytest.mark.parametrize("name, tensor", [
    ("transformer_bias", "decoder.layers.0.ff.net.0.weight"),
    ("transformer_bias", "decoder.shared_mlp_module.mlp.0.weight"),
    ("transformer_bias", "decoder.shared_mlp_module.mlp.6.weight"),
    ("transformer_bias", "decoder.shared_mlp_module.layer_bias_U"),
    ("transformer_bias", "decoder.shared_mlp_module.layer_scales"),
    ("transformer_shared", "decoder.shared_mlp_module.off_diag_alpha"),
    ("vit_shared", "blocks.0.attn._shared_mlp.B"),
    ("vit_shared", "patch_embed.proj.weight"),
    ("vit_shared", "pos_embed"),
    ("vit_shared", "head.weight"),
    ("moa", "decoder.layers.0.self_attn.W_q"),
    ("dcmha", "decoder.layers.0.self_attn.router.0.weight"),
    ("tha", "decoder.layers.0.self_attn.pre_proj.weight"),
])
def test_tensors_of_no_size_or_rank_are_named(name: str, tensor: str) -> None:
  description, untold = MODELS[name]
  num_heads = 3 if "num_heads" in untold else None
  _, arrays = _arrays(description)
  for shape in ((), (0,), arrays[tensor].shape[:-1] + (0,)):
    arrays[tensor] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointNameError, match=f"{tensor} has shape"):
      import_checkpoint(description["kind"], arrays, num_heads=num_heads)


def test_experts_must_make_up_heads() -> None:
  description, _ = MODELS["moa"]
  _, arrays = _arrays(description)
  for shape in ((2, 12, 4), (9, 12, 13)):
    arrays["decoder.layers.0.self_attn.W_q"] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointNameError, match="which are no heads of a model of width 12"):
      import_checkpoint("baseline", arrays)


def _run(capsys: pytest.CaptureFixture, *argv: object) -> tuple[int, str]:
  try:
    status = convert.main([str(word) for word in argv])
  except SystemExit as error:  # argparse
    status = error.code
  captured = capsys.readouterr()
  return status, captured.out + captured.err


def test_the_command_writes_what_can_be_loaded(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
  output = tmp_path / "new" / "vit"
  status, text = _run(capsys, VIT, "--kind=vit", f"--output={output}")
  assert (status, text.count("\n")) == (0, 1)
  assert json.loads((output / "model.json").read_text())["patch_size"] == 4
  loaded, imported = convert.load_converted(output), import_checkpoint("vit", read_tensors(VIT))
  assert loaded.description == imported.description
  jax.tree.map(np.testing.assert_array_equal, loaded.params, imported.params)
  assert [path.name for path in output.parent.iterdir()] == ["vit"]
  status, text = _run(capsys, VIT, "--kind=vit", f"--output={output}")
  assert status == 1 and "exists" in text
  (output / "model.json").write_text("{}")
  with pytest.raises(CheckpointError, match="damaged"):
    convert.load_converted(output)


def test_options_on_the_command_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
  description, _ = MODELS["transformer_own"]
  np.savez(tmp_path / "decoder.npz", **_arrays(description)[1])
  output = tmp_path / "decoder"
  status, text = _run(capsys, tmp_path / "decoder.npz", "diag_scale=0.5", "--kind=transformer",
                      "--num_heads=3", "--output", output)
  assert status == 0, text
  assert convert.load_converted(output).description == description


@pytest.mark.parametrize("argv, status, message", [
    ((VIT, "--kind=vit", "--output=out", "foo=1"), 2, "unknown option 'foo=1'"),
    ((VIT, "--kind=vit", "--output=out", "use_M"), 2, "unknown option 'use_M'"),
    ((VIT, "--kind=vit", "--output=out", "use_M=2"), 2, "must be like False"),
    ((VIT, "--kind=vit", "--output=out", "--num_heads=3"), 2, "num_heads 3"),
    ((VIT, "--kind=vit", "--output=out", "--to_damcha"), 2, "--kind=gpt2"),
    ((VIT, "--kind=transformer", "--output=out"), 1, "decoder.layers.0.ff.net.0.weight"),
    ((VIT, "--kind=bert", "--output=out"), 2, "invalid choice"),
    ((VIT, "--kind=vit"), 2, "--output"),
    ((FIXTURES / "tensors.pt", "--kind=baseline", "--output=out"), 1, "decoder.layers.0"),
    (("none.pt", "--kind=vit", "--output=out"), 1, "none.pt"),
    ((VIT, "--kind=vit", f"--output={VIT}/out"), 1, "cannot write"),
    ((VIT, "--kind=vit", f"--output={'x' * 300}"), 1, "cannot be a directory"),
    ((VIT, "--kind=vit", "--output=~no-such-user/out"), 1, "cannot be a directory"),
    (("~no-such-user/x.pt", "--kind=vit", "--output=out"), 1, "cannot be read"),
    ((VIT, "--kind=vit", "--output=out", "off_diag_mode=foo"), 2, "'foo' must be one of mlp"),
    ((VIT, "--kind=baseline", "--output=out", "local_window=0"), 2, "must be an integer from 1"),
    ((VIT, "--kind=baseline", "--output=out", "router_rank=-3"), 2, "must be an integer from 1"),
    ((VIT, "--kind=baseline", "--output=out", "expert_factor=9999999999"), 2, "to 2147483647"),
    ((VIT, "--kind=transformer", "--output=out", "diag_scale=inf"), 2, "diag_scale=inf must be a"),
    ((VIT, "--kind=transformer", "--output=out", "off_diag_scale=1e300"), 2, "a finite number"),
    ((VIT, "--kind=transformer", "--output=out", "off_diag_alpha_init=-1"), 2, "at least 0"),
    ((VIT, "--kind=transformer", "--output=out", "compact_rank=-1"), 2, "an integer from 0"),
])
def test_wrong_use_ends_in_one_line(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[object, ...],
    status: int,
    message: str,
) -> None:
  monkeypatch.chdir(tmp_path)
  actual, text = _run(capsys, *argv)
  assert actual == status and message in text
  assert text.count("error:") == 1 and text.endswith("\n") and "Traceback" not in text
  assert not list(tmp_path.iterdir())
