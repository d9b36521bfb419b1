"""The sampling command: the right model, checkpoint and text, and one line for a mistake."""

import dataclasses
import json
import shutil

from flax import linen as nn
import jax
import numpy as np
import pytest

from damcha_jax.config import ConfigError
from damcha_jax.errors import CheckpointError, WorkdirError
from damcha_jax.interop.parameters import read_params
from damcha_jax.interop.tensor_files import read_safetensors_metadata
from damcha_jax.models.decoder import make_decoder
from damcha_jax.models.stack import unstack_layers
from damcha_jax.sampling import Sampler, row_keys
from damcha_jax.training import loop, restore
from damcha_jax.training.language_model import language_model_task
from experiments import command_line, common, export, sample
from tests import lm_run
from tiny_task import assert_trees_equal


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
  """A workdir with a scanned DAMCHA run of 6 updates, of which the third is called the best."""
  root = tmp_path_factory.mktemp("sample")
  corpus = lm_run.write_corpus(root / "corpus.txt", 4000)
  config = lm_run.tiny_language_model(corpus, scan_layers=True)
  config = dataclasses.replace(
      config, num_steps=6,
      evaluation=dataclasses.replace(config.evaluation, every_steps=3),
      checkpoint=dataclasses.replace(config.checkpoint, every_steps=3))
  workdir = root / "run"
  run = common.run_dir(workdir, "damcha", 0)
  loop.train(language_model_task(config, "damcha", seed=0), config, run, seed=0)
  shutil.copy(run / "config.json", workdir)
  records = [{"step": step, "split": "validation", "nats_per_token": step} for step in (3, 6)]
  lines = [json.dumps(record) for record in records] + ['{"torn']
  (run / "metrics.jsonl").write_text("\n".join(lines))
  (run / "result.json").unlink()  # whose best would be another
  return workdir, run, config


def _command(capsys, *arguments):
  """Exit status, stdout and stderr of the command, run in this process."""
  status = 0
  try:
    with command_line.user_errors():
      sample.main(["sample", *map(str, arguments)])
  except SystemExit as error:
    status = error.code
  return status, *capsys.readouterr()


def _params(run, config, which, note=pytest.fail):
  """Step and parameters in the scanned form in which they were trained."""
  init = language_model_task(config, "damcha", seed=0).init_params
  shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0)))
  return restore.restore_params(run, shapes, which, "nats_per_token", note)


@pytest.mark.families
def test_streams_what_the_scanned_model_writes(trained, capsys):
  workdir, run, config = trained
  status, out, err = _command(capsys, f"--workdir={workdir}", "--prompt=7 times ä", "--seed=3",
                              "--num_tokens=12", "--temperature=0.9", "--top_k=40")
  header, *text, footer = out.rstrip("\n").split("\n")
  assert (status, err) == (0, "")
  assert "damcha, seed 0, best checkpoint, step 3:" in header and "top_k 40" in header
  assert footer.startswith("--- 12 bytes, ") and footer.endswith(" bytes/s")

  step, params = _params(run, config, "best")
  assert step == 3
  model = make_decoder(config, "damcha", evaluation=True, decode=True)
  sampler = Sampler(model, 0.9, top_k=40, top_p=config.sampling.top_p)
  samples = sampler.sample(params, ["7 times ä".encode()], 12, row_keys(3, [0]))
  written = b"".join(bytes([token]) for token in samples.tokens_BN[0])
  shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd"
                  for c in written.decode(errors="replace"))
  assert "\n".join(text) == "7 times ä" + shown


def test_writes_several_samples_of_the_last_checkpoint(trained, capsys):
  workdir, *_ = trained
  status, out, _ = _command(capsys, f"--workdir={workdir}", "--num_tokens=4", "--num_samples=3",
                            "--checkpoint=last", "--attention=damcha", "--run_seed=0")
  assert status == 0 and "last checkpoint, step 6, 3 samples" in out
  assert all(f"[{row}] The " in out for row in range(3))


def test_characters_arrive_whole_and_none_steers_the_terminal():
  tokens = "aé\n\x1b[2J".encode() + b"\xff" + "\u00e9".encode()[:1]
  assert list(sample._decoded(iter(tokens))) == [
      "a", "", "é", "\n", "\ufffd", "[", "2", "J", "\ufffd", "", "\ufffd"]


@pytest.mark.parametrize("arguments, status, message", [
    ((), 2, "--workdir is missing"),
    (("--workdir={root}/none",), 1, "holds no run"),
    (("--workdir={workdir}", "--attention=mha"), 2, "it has damcha seed 0"),
    (("--workdir={workdir}", "--run_seed=7"), 2, "it has damcha seed 0"),
    (("--workdir={workdir}", "--top_p=2"), 2, "top_p=2.0"),
    (("--workdir={workdir}", "--num_tokens=0"), 2, "num_tokens"),
    (("--workdir={workdir}", "--checkpoint=first"), 2, "best|last"),
    (("--workdir={workdir}", "--tempreature=1"), 2, "tempreature"),
    (("--workdir={workdir}", "word"), 2, "unexpected argument 'word'"),
])
def test_a_mistake_is_one_line(trained, capsys, arguments, status, message):
  workdir, *_ = trained
  arguments = [one.format(workdir=workdir, root=workdir.parent) for one in arguments]
  actual, out, err = _command(capsys, *arguments)
  assert actual == status and out == ""
  assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_damaged_checkpoints_are_named_and_passed_over(trained, tmp_path):
  _, run, config = trained
  copy = tmp_path / "run"
  shutil.copytree(run, copy)
  notes = []
  # Other numbers under the checksums of step 6: read, compared and refused.
  shutil.rmtree(copy / "checkpoints" / "6" / "state")
  shutil.copytree(copy / "checkpoints" / "3" / "state", copy / "checkpoints" / "6" / "state")
  step, params = _params(copy, config, "last", notes.append)
  assert step == 3 and len(notes) == 1 and "6 is corrupt (the checksum of 'params/" in notes[0]
  expected = _params(run, config, "best")[1]
  jax.tree.map(np.testing.assert_array_equal, params, expected)

  shutil.rmtree(copy / "checkpoints" / "3" / "state")
  with pytest.raises(CheckpointError, match="no readable checkpoint"):
    _params(copy, config, "best", notes.append)
  assert len(notes) == 3 and "3 is unreadable" in notes[1]

  shutil.rmtree(copy / "checkpoints")
  with pytest.raises(CheckpointError, match="no checkpoint in .*; train first"):
    _params(copy, config, "best")


@pytest.mark.parametrize("records", [
    '{"step": 6, "split": "validation", "nats_per_token": null}\n', None])
def test_the_best_of_unknown_scores_is_the_last_and_says_so(trained, tmp_path, records):
  _, run, config = trained
  copy = tmp_path / "run"
  shutil.copytree(run, copy)
  (copy / "metrics.jsonl").unlink()
  if records is not None:
    (copy / "metrics.jsonl").write_text(records)
  notes = []
  step, _ = _params(copy, config, "best", notes.append)
  assert step == 6 and len(notes) == 1
  assert "no checkpoint has a nats_per_token in" in notes[0] and "taking the last" in notes[0]


@pytest.mark.parametrize("entry", [3, {"name": ["damcha"], "seed": 0}, {"name": "mha", "seed": "x"}])
def test_a_run_that_is_not_described_is_named(tmp_path, entry):
  (tmp_path / "config.json").write_text(json.dumps({"run": entry}))
  with pytest.raises(WorkdirError, match="is not the directory of a run"):
    restore.describe_run(tmp_path)


@pytest.mark.parametrize("entry", [{}, {"experiment": ["a"]}, {"experiment": "vit_imagenet"}])
def test_a_run_of_no_decoder_is_not_exported(tmp_path, entry):
  (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "mha", "seed": 0}, **entry}))
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(ConfigError, match=f"{tmp_path} is no run of a decoder"):
    export.main(["export", f"--workdir={tmp_path}", f"--output={tmp_path}/a.safetensors"])


def test_parameters_are_exported_as_safetensors(trained, tmp_path, capsys):
  workdir, run, config = trained
  path = tmp_path / "damcha.safetensors"
  export.main(["export", f"--workdir={workdir}", f"--output={path}", "--checkpoint=last"])
  assert "damcha, step 6, " in capsys.readouterr().out
  params = unstack_layers(_params(run, config, "last")[1])
  assert "stack/layer_0/attention/value/kernel" in path.read_bytes().decode("latin1")
  assert_trees_equal(read_params(path, like=params), params)
  metadata = read_safetensors_metadata(path)
  assert metadata["attention"] == "damcha" and metadata["step"] == "6"
  assert json.loads(metadata["config"])["model"]["features"] == config.model.features


def test_a_run_of_another_kind_of_device_is_restored(trained):
  _, run, config = trained
  elsewhere = dataclasses.replace(config, model=dataclasses.replace(
      config.model, attention_implementation="cudnn", dtype="bfloat16"))
  # A model of kernels that this device lacks cannot even be made.
  (_, *expected), (_, *restored) = (
      restore.restore_decoder(run, one, "damcha", "last", pytest.fail)
      for one in (config, elsewhere))
  assert_trees_equal(restored, expected)
