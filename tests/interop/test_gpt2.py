"""GPT-2 weights give the logits of GPT-2's definition, and as a DAMCHA the same ones."""

from __future__ import annotations

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.interop import convert
from damcha_jax.interop import gpt2
from damcha_jax.interop.names import CheckpointNameError
from damcha_jax.interop.options import OptionError
from damcha_jax.interop.torch_checkpoints import import_checkpoint

V, T, D, H, N = 11, 7, 8, 2, 2
TOKENS = np.random.default_rng(1).integers(0, V, (2, T))


def _weights() -> dict[str, np.ndarray]:
  """Random weights under Hugging Face's names; the gains of LayerNorms around 1."""
  shapes = {"wte.weight": (V, D), "wpe.weight": (T, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
  for index in range(N):
    shapes.update({f"h.{index}.{name}": shape for name, shape in {
        "ln_1.weight": (D,), "ln_1.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,),
        "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
        "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
        "mlp.c_fc.weight": (D, 4 * D), "mlp.c_fc.bias": (4 * D,),
        "mlp.c_proj.weight": (4 * D, D), "mlp.c_proj.bias": (D,),
    }.items()})
  rng = np.random.default_rng(0)
  return {
      name: (rng.normal(size=shape) * 0.5 + ("ln" in name and "weight" in name)).astype(np.float32)
      for name, shape in shapes.items()
  }


def _reference(weights: dict[str, np.ndarray], gelu: str) -> np.ndarray:
  """GPT-2 (Radford et al. 2019) in float64."""
  w = {name: array.astype(np.float64) for name, array in weights.items()}
  erf = np.vectorize(math.erf)

  def activation(x):
    if gelu == "exact":
      return x * (1 + erf(x / np.sqrt(2))) / 2
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

  def norm(x, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

  linear = lambda x, name: x @ w[f"{name}.weight"] + w[f"{name}.bias"]
  x = w["wte.weight"][TOKENS] + w["wpe.weight"]
  for index in range(N):
    layer = f"h.{index}."
    query, key, value = (
        part.reshape(2, T, H, D // H).transpose(0, 2, 1, 3)
        for part in np.split(linear(norm(x, f"{layer}ln_1"), f"{layer}attn.c_attn"), 3, -1)
    )
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(D // H)
    scores = np.where(np.tril(np.ones((T, T))), scores, -np.inf)
    weights_ = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights_ / weights_.sum(-1, keepdims=True) @ value
    x = x + linear(output.transpose(0, 2, 1, 3).reshape(2, T, D), f"{layer}attn.c_proj")
    hidden = activation(linear(norm(x, f"{layer}ln_2"), f"{layer}mlp.c_fc"))
    x = x + linear(hidden, f"{layer}mlp.c_proj")
  return norm(x, "ln_f") @ w["wte.weight"].T


def _write(folder: pathlib.Path, weights: dict[str, np.ndarray], **config: object) -> pathlib.Path:
  header, data = {}, b""
  for name, array in weights.items():
    header[name] = {"dtype": "F32", "shape": array.shape,
                    "data_offsets": [len(data), len(data) + array.nbytes]}
    data += array.tobytes()
  text = json.dumps(header).encode()
  folder.mkdir(exist_ok=True)
  path = folder / "model.safetensors"
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)
  if config:
    (folder / "config.json").write_text(json.dumps(config))
  return path


def _as_saved(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """With what files of GPT2LMHeadModel hold besides: a prefix, masks, the tied head."""
  saved = {f"transformer.{name}": array for name, array in weights.items()}
  saved["lm_head.weight"] = weights["wte.weight"]
  saved["transformer.h.0.attn.bias"] = np.ones((1, 1, T, T), np.float32)
  saved["transformer.h.0.attn.masked_bias"] = np.float32(-1e4)
  return saved


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_logits_are_those_of_the_definition(gelu: str) -> None:
  weights = _weights()
  imported = import_checkpoint("gpt2", _as_saved(weights), {"gelu": gelu}, num_heads=H)
  logits = jax.jit(imported.module.apply)({"params": imported.params}, TOKENS)
  np.testing.assert_allclose(logits, _reference(weights, gelu), atol=2e-5, rtol=1e-5)
  other = _reference(weights, "exact" if gelu == "tanh" else "tanh")
  assert np.abs(logits - other).max() > 1e-4  # the two can be told apart


@pytest.mark.families
def test_the_command_makes_a_damcha_of_the_same_function(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
  weights = _weights()
  path = _write(tmp_path / "gpt2", weights, n_head=H, activation_function="gelu_new",
                resid_pdrop=0.2)
  output = tmp_path / "damcha"
  status = convert.main([str(path), "update_rank=3", "stride=2", "widths=5,6", "--kind=gpt2",
                         "--to_damcha", f"--output={output}"])
  assert status == 0, capsys.readouterr().err
  loaded = convert.load_converted(output)
  assert loaded.description["model"]["dropout_rate"] == 0.2
  damcha = loaded.description["damcha"]
  assert (damcha["update_rank"], damcha["stride"], damcha["widths"]) == (3, 2, [5, 6])
  assert loaded.params["stack"]["generator"]["hidden_1"]["kernel"].shape == (5, 6)
  logits = jax.jit(loaded.module.apply)({"params": loaded.params}, TOKENS)
  np.testing.assert_allclose(logits, _reference(weights, "tanh"), atol=2e-5, rtol=1e-5)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded.params))
  # As a version wrote it whose attention had fewer options.
  description = json.loads((output / "model.json").read_text())
  del description["damcha"]["mix_slices"], description["damcha"]["half_life"]
  (output / "model.json").write_text(json.dumps(description))
  again = convert.load_converted(output)
  np.testing.assert_array_equal(again.module.apply({"params": again.params}, TOKENS),
                                loaded.module.apply({"params": loaded.params}, TOKENS))


def test_other_models_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
  weights = _as_saved(_weights())
  with pytest.raises(OptionError, match="give num_heads"):
    import_checkpoint("gpt2", weights)
  with pytest.raises(OptionError, match="num_heads 3 does not divide"):
    import_checkpoint("gpt2", weights, num_heads=3)
  with pytest.raises(CheckpointNameError, match="differs from wte.weight"):
    import_checkpoint("gpt2", {**weights, "lm_head.weight": np.zeros((V, D), np.float32)},
                      num_heads=H)
  with pytest.raises(CheckpointNameError, match=r"unknown \['h.0.crossattention.bias'\]"):
    import_checkpoint("gpt2", {**weights, "h.0.crossattention.bias": np.zeros(3)}, num_heads=H)
  for config, message in (
      (dict(n_head=H, activation_function="relu"), "activation_function='relu'"),
      (dict(n_head=H, activation_function=["gelu"]), "activation_function=['gelu']"),
      (dict(n_head=H, layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"),
      (dict(n_head=H, resid_pdrop=2), "resid_pdrop=2, not at least 0 and below 1"),
      (dict(n_head=H, resid_pdrop=float("nan")), "resid_pdrop=nan"),
      (dict(n_head=H, resid_pdrop="0.1"), "resid_pdrop='0.1'"),
      (dict(n_layer=1), "not the config.json of a GPT-2"),
      (dict(n_head=2.7), "n_head=2.7, not an integer from 1"),
      (dict(n_head=float("inf")), "n_head=inf"),
      (dict(n_head=-2), "n_head=-2"),
      (dict(n_head=True), "n_head=True"),
      (dict(n_head=H, n_layer=N + 1), "n_layer=3, but the tensors have 2"),
      (dict(n_head=H, n_inner=D), "n_inner=8, but the tensors have 32"),
      (dict(n_head=H, n_positions=1024), "n_positions=1024, but the tensors have 7"),
      (dict(n_head=H, vocab_size=[V]), "vocab_size=[11], not an integer"),
  ):
    path = _write(tmp_path / "gpt2", _weights(), **config)
    _is_refused(capsys, 1, message, path, f"--output={tmp_path / 'out'}")
  for text in ("[]", "null", "7", "{", "[" * 100_000, '{"n_head": ' + "9" * 5000 + "}"):
    path.with_name("config.json").write_text(text)
    _is_refused(capsys, 1, "not the config.json of a GPT-2", path, f"--output={tmp_path / 'out'}")
  path = _write(tmp_path / "gpt2", _weights(), n_head=H)
  _is_refused(capsys, 2, "n_head=2; leave the option out", path, "--num_heads=4",
              f"--output={tmp_path / 'out'}")
  assert gpt2.read_config(tmp_path / "model.safetensors") == gpt2.Told()


def _is_refused(capsys: pytest.CaptureFixture, status: int, message: str, *argv: object) -> None:
  """By one line that holds `message`."""
  assert convert.main(["--kind=gpt2", *map(str, argv)]) == status
  error = capsys.readouterr().err
  assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


@pytest.mark.parametrize("arguments, message", [
    (["update_rank=-1"], "update_rank=-1 must be an integer from 0"),
    (["update_rank=9"], "update_rank=9 exceeds the width 8"),
    (["update_rank=1e3"], "update_rank=1e3 must be like 16"),
    (["widths=0"], "widths=(0,) must be positive"),
    (["widths=4,-2"], "widths=(4, -2) must be positive"),
    (["stride=0"], "stride=0 must be an integer from 1"),
    (["stride=1", "stride=2"], "stride is given twice"),
    (["preset=bold"], "preset='bold' must be one of paper, robust"),
    (["sharing=all"], "sharing='all' must be one of generator"),
    (["gelu=relu"], "gelu='relu' must be one of tanh"),
    (["dropout_rate=2"], "dropout_rate=2.0 must be at least 0 and below 1"),
    (["dropout_rate=nan"], "dropout_rate=nan must be"),
    (["dropout_rate=-0.1"], "dropout_rate=-0.1 must be"),
    (["--seed=9223372036854775808"], "--seed=9223372036854775808 must be from 0"),
    (["--seed=-1"], "--seed=-1 must be from 0"),
    (["--num_heads=0"], "num_heads 0 does not divide"),
    (["--num_heads=-2"], "num_heads -2 does not divide"),
])
def test_values_that_make_no_sense(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
  path = _write(tmp_path / "gpt2", _weights())
  heads = [] if "--num_heads" in arguments[0] else [f"--num_heads={H}"]
  _is_refused(capsys, 2, message, path, "--to_damcha", f"--output={tmp_path / 'out'}", *heads,
              *arguments)


@pytest.mark.parametrize("name, tensor, message", [
    ("wte.weight", np.zeros((0, D)), "wte.weight has shape (0, 8) and holds no numbers"),
    ("wte.weight", np.float32(1), "wte.weight has shape (), not 2 axes"),
    ("wpe.weight", np.zeros(T), "wpe.weight has shape (7,), not 2 axes"),
    ("h.0.mlp.c_fc.weight", np.zeros((D, 0)), "holds no numbers"),
    ("h.0.mlp.c_fc.bias", np.zeros(()), "c_fc.bias has shape (), but the module needs (32,)"),
    ("ln_f.bias", np.zeros((D, 1)), "ln_f.bias has shape (8, 1)"),
    ("ln_f.bias", np.full(D, np.nan), "ln_f.bias holds nan, and 7 more"),
    ("ln_f.bias", np.array([*[0] * (D - 1), -np.inf]), "ln_f.bias holds -inf"),
    ("ln_f.bias", np.full(D, 1e300), "holds 1e+300, and 7 more numbers that are not finite"),
    ("ln_f.bias", np.zeros(D, complex), "holds complex128"),
    ("ln_f.bias", np.array(["a"] * D), "holds <U1"),
    ("h.\u00b2.ln_1.bias", np.zeros(D), "unknown ['h.\u00b2.ln_1.bias']"),
    (f"h.{'1' * 5000}.ln_1.bias", np.zeros(D), "unknown ['h.111"),
])
def test_tensors_that_no_model_can_have(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, name: str, tensor: np.ndarray,
    message: str,
) -> None:
  arrays = {**_weights(), name: tensor}
  with pytest.raises(CheckpointNameError, match=re.escape(message)) as caught:
    import_checkpoint("gpt2", arrays, num_heads=H)
  assert caught.value.exit_status == 1 and "\n" not in str(caught.value)


def test_an_embedding_tied_to_a_head_of_nan_is_said_to_hold_nan() -> None:
  weights = _weights()
  weights["wte.weight"][0, 0] = np.nan
  with pytest.raises(CheckpointNameError, match="wte.weight holds nan, and 0 more"):
    import_checkpoint("gpt2", _as_saved(weights), num_heads=H)
