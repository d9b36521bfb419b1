"""The text-generation experiment as a user runs it: whole, again, killed, misused."""

import json
import lzma
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from random_weights import random_tensors

from damcha_jax import text_samples
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import freeze, TextGenerationConfig
from damcha_jax.data.text_pairs import Example, encode
from damcha_jax.errors import UserError, WorkdirError
from damcha_jax.interop import tensor_files
from damcha_jax.origins import origin_of
from damcha_jax.training.restore import describe_run
from damcha_jax.training.result import read_result
from damcha_jax.training.workdir import Workdir
from experiments import command_line
from experiments import common
from experiments import evaluate
from experiments import text_generation

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "experiments.text_generation")
SMOKE = "--config=configs/commongen.py:smoke"
# What stands in Table 1, and what is beside it.
TABLE1_ROWS = {"nll_mean", "nll_q25", "nll_q75", "bartscore_mean", "bartscore_q25", "bartscore_q75",
               "bartscore_top50", "nll_summed_mean", "nll_summed_q25", "nll_summed_q75",
               "nats_per_token", "perplexity", "bleu", "chrf", "distinct_outputs"}


@pytest.fixture(name="data_dir", scope="session")
def _data_dir(tmp_path_factory):
  """Where one tokenizer is kept for all of these tests."""
  return f"--config.data.data_dir={tmp_path_factory.mktemp('data')}"


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
  """A small set of one's own, whose tokenizer is trained in no time."""
  folder = tmp_path_factory.mktemp("texts")
  for first, split in enumerate(("train", "validation", "test")):
    examples = [Example(f"{n} {n % 7}", (f"{n} and {n % 7} are {n + n % 7}",))
                for n in range(first, 3 * (300 if split == "train" else 70), 3)]
    (folder / f"{split}.tsv.xz").write_bytes(lzma.compress(encode(examples)))
  return folder


def _write_bart(folder):
  """A tiny model whose scores mean nothing."""
  fixtures = ROOT / "tests/evaluation/fixtures"
  shapes = json.loads((fixtures / "bart.json").read_text(encoding="utf-8"))["shapes"]
  shutil.copytree(fixtures / "bart", folder)
  tensor_files.write_safetensors(folder / "model.safetensors", random_tensors(
      {name: tuple(shape) for name, shape in shapes.items()}, 1.0))


def _run(capsys, *arguments):
  """Runs the command in this process: exit status, stdout, stderr."""
  status = 0
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["text_generation", *map(str, arguments)])
    patch.chdir(ROOT)
    try:
      command_line.launch(text_generation.train_and_evaluate, "text_generation")
    except SystemExit as error:
      status = error.code
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _rows(workdir):
  rows = json.loads((workdir / "summary.json").read_text())["rows"]
  by_key = {(row["attention"], row["split"], row["metric"]): row for row in rows}
  assert len(by_key) == len(rows)
  return by_key


def _origin(run):
  """Of what a run made."""
  description, result = describe_run(run), read_result(Workdir(run))
  config = freeze({**description.config, "attentions": description.name,
                   "seeds": (description.seed,)}, TextGenerationConfig)
  return origin_of(description.name, description.seed, result, config.sampling)


def _outputs(run):
  return text_samples.read_outputs(run, _origin(run))


def _check_summary(workdir, attentions):
  rows = _rows(workdir)
  for attention in attentions:
    found = {metric: row for (name, split, metric), row in rows.items()
             if (name, split) == (attention, "test")}
    assert TABLE1_ROWS <= set(found) and not any(row["comparable"] for row in found.values())
    for metric, row in found.items():
      if metric.startswith("bartscore"):
        assert row["value"] is None and "BART" in row["note"]
      else:
        assert np.isfinite(row["value"])
    # A guess among the 1,024 symbols costs 6.93.
    assert 4 < found["nats_per_token"]["value"] < 6.8
    run = workdir / attention / "seed0"
    records = _outputs(run)
    left_out = re.search(r"(\d+) of 64 examples left out", found["bartscore_mean"]["note"])
    indices = [record["index"] for record in records]
    assert indices == sorted(set(indices)) and set(indices) <= set(range(64))
    assert len(indices) == 64 - (int(left_out[1]) if left_out else 0)
    nll, tokens = (np.array([record[key] for record in records]) for key in ("nll", "nll_tokens"))
    # Scoring one by one is what evaluation during training added up.
    assert nll.sum() / tokens.sum() == pytest.approx(found["nats_per_token"]["value"], rel=1e-5)
    assert found["nll_mean"]["value"] == pytest.approx((nll / tokens).mean())
    assert found["nll_summed_mean"]["value"] == pytest.approx(nll.mean())
    with np.load(run / "scores.npz") as scores:
      assert scores["nll"].tolist() == pytest.approx((nll / tokens).tolist())
    assert not (run / text_samples.PARTIAL).exists()
    svg = (workdir / "figures" / "distribution-nll.svg").read_text()
    assert f"<!-- {attention} -->" in svg and "<!-- NLL of the references [nats per token] -->" in svg
  return rows


@pytest.mark.families
def test_a_run_is_evaluated_and_again_from_what_it_kept(capsys, tmp_path, data_dir, folder):
  arguments = (SMOKE, f"--workdir={tmp_path}", data_dir, "--config.attentions=mha",
               "--config.num_steps=12", f"--config.dataset={folder}", "--config.context_length=48",
               "--config.data.max_source_tokens=16", "--config.data.max_target_tokens=28")
  status, output, errors = _run(capsys, *arguments)
  assert status == 0 and "64 of 64 texts made" in errors and "BART's weights are not" in errors
  assert errors.index("compiling the sampler") < errors.index("64 of 64 texts made")
  rows = _check_summary(tmp_path, ["mha"])
  assert rows["mha", "test", "nll_mean"]["paper"] == 5.756
  assert rows["mha", "test", "bartscore_top50"]["paper"] == -4.252
  assert f"{rows['mha', 'test', 'nll_mean']['value']:.4g}" in output
  assert (tmp_path / "figures" / "validation.png").read_bytes().startswith(b"\x89PNG")

  # Metrics come from what was kept: other outputs give other values, without the model.
  path = tmp_path / "mha" / "seed0" / text_samples.FILE
  records = [{**record, "output": record["references"][0]} for record in _outputs(path.parent)]
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  status, _, errors = _run(capsys, *arguments)
  assert status == 1 and "line 1 is of another run, step or rule, or was changed" in errors
  text_samples.write_outputs(path.parent, _origin(path.parent), records)
  status, _, errors = _run(capsys, *arguments)
  assert status == 0 and "texts made" not in errors and "compiling the sampler" not in errors
  again = _rows(tmp_path)
  assert again["mha", "test", "bleu"]["value"] == pytest.approx(100)
  assert again["mha", "test", "nll_mean"] == rows["mha", "test", "nll_mean"]

  # Another process that works on the same directory is refused, and so are other texts.
  with Workdir(tmp_path).locked(), pytest.raises(WorkdirError, match="in use by another process"):
    evaluate.main(["evaluate", f"--workdir={tmp_path}"])
  test = folder / "test.tsv.xz"
  true_texts = test.read_bytes()
  test.write_bytes(lzma.compress(b"hello\tworld\n"))
  for _ in range(2):
    status, _, errors = _run(capsys, *arguments)
    assert status == 1 and "holds a run on another test.tsv.xz" in errors
  with pytest.raises(WorkdirError, match="holds a run on another test.tsv.xz"):
    evaluate.main(["evaluate", f"--workdir={tmp_path}"])
  test.write_bytes(true_texts)

  path.write_text("{")
  with pytest.raises(WorkdirError, match="outputs.jsonl cannot be read"):
    _outputs(path.parent)


def test_originals_are_not_comparable_where_the_paper_measured_what_the_authors_made_of_them():
  rows = [dict(attention=name, paper=paper, comparable=True, note="n") for name, paper in
          (("tha", 1.0), ("authors_tha", 1.0), ("damcha", 1.0), ("mha", 1.0), ("tha", None))]
  found = common.beside_table1(rows)
  assert [row["comparable"] for row in found] == [False, True, True, True, True]
  assert found[0]["note"] == "n; the paper measured authors_tha"


@pytest.mark.parametrize("arguments, status, message", [
    ((SMOKE, "--config.data.max_source_tokens=50"), 2, "need context_length=90, not 64"),
    ((SMOKE, "--config.dataset=wmt15"), 2, "unknown dataset 'wmt15'"),
    ((SMOKE, "--config.sampling.num_beams=2000"), 2, "sampling.num_beams=2000"),
    ((SMOKE, "--config.attentions=mah"), 2, "unknown attention 'mah'"),
    (("--config=configs/wmt14.py", "--config.data.data_dir=nowhere"), 1,
     "damcha_jax.data.prepare wmt14"),
])
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, data_dir, arguments, status,
                                                  message):
  workdir = tmp_path / "run"
  config, *overrides = arguments
  found, output, errors = _run(capsys, config, f"--workdir={workdir}", data_dir, *overrides)
  (line,) = [line for line in errors.splitlines() if not line.startswith("note: ")]
  assert (found, output) == (status, "") and line.startswith("error: ") and message in line
  assert not workdir.exists()


@pytest.mark.families
@pytest.mark.parametrize("name", ["wmt14", "commongen"])
def test_paper_size_is_planned_over_8_devices_without_allocation(name):
  done = subprocess.run(
      [sys.executable, "-m", "experiments.plan", f"--config=configs/{name}.py", "--num_devices=8",
       "--config.mesh.data=4", "--config.mesh.fsdp=2"],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  _, table = done.stdout.split("\nattention ")
  num_params = {line.split()[0]: int(line.split()[1].replace(",", ""))
                for line in table.splitlines()[1:]}
  assert set(num_params) == {"mha", "tha", "dcmha", "colmha", "mma", "moa", "damcha"}
  # W was chosen for it; blocks of the generator replace the projections.
  assert num_params["damcha"] == pytest.approx(num_params["mha"], rel=0.02)
  assert num_params["mha"] > 31e6


def test_one_labelled_example_is_shown_of_each_attention(capsys):
  record = lambda output: {"source": "in", "references": ["true", "too"], "output": output}
  text_generation._show({("mha", 0): [record("one"), record("other")], ("mha", 1): [record("two")],
                         ("tha", 0): [record("")]})
  assert capsys.readouterr().out.splitlines() == [
      "source: in", "reference: true", "output of mha: one", "output of tha: (nothing)", ""]


@pytest.mark.families
def test_a_killed_run_resumes_training_and_decoding(tmp_path, data_dir):
  command = [*COMMAND, SMOKE, f"--workdir={tmp_path}", data_dir, "--config.attentions=damcha",
             "--config.sampling.batch_size=8"]
  for until in ("step 22/30", "16 of 64 texts made"):
    killed = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in killed.stderr:
      if until in line:
        killed.send_signal(signal.SIGKILL)
        break
    killed.stderr.close()
    assert killed.wait() == -signal.SIGKILL
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  # Those of the first batch were there already.
  assert not re.search(r"\b8 of 64 texts made", done.stderr)
  assert "64 of 64 texts made" in done.stderr
  _check_summary(tmp_path, ["damcha"])


@pytest.mark.families
@pytest.mark.parametrize("name", ["wmt14", "commongen"])
def test_every_attention_trains_decodes_and_is_evaluated(tmp_path, data_dir, name):
  done = subprocess.run(
      [*COMMAND, f"--config=configs/{name}.py:smoke", f"--workdir={tmp_path}", data_dir,
       f"--config.attentions={','.join(ATTENTIONS)}"],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  rows = _check_summary(tmp_path, ATTENTIONS)
  note = rows["mha", "test", "bartscore_mean"]["note"]
  assert "BART's weights are not given" in note
  assert ("left out as too long" in note) == ("left out as too long" in done.stderr)


@pytest.mark.families
def test_beams_bytes_and_weights_that_came_later(tmp_path, data_dir):
  """The other ways of decoding and of reading text, and BARTScore of the English it makes."""
  command = [*COMMAND, "--config=configs/wmt14.py:smoke", f"--workdir={tmp_path}", data_dir,
             "--config.attentions=damcha", "--config.sampling.num_beams=3",
             "--config.sampling.length_penalty=0.6", "--config.data.tokenizer=bytes",
             "--config.data.direction=de-en", "--config.context_length=160",
             "--config.data.max_source_tokens=60", "--config.data.max_target_tokens=90",
             "--config.data.max_held_out_examples=128", "--config.num_steps=12"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  rows = _rows(tmp_path)
  assert "sources cut to 60 tokens" in rows["damcha", "test", "bleu"]["note"]
  assert np.isfinite(rows["damcha", "test", "chrf"]["value"])

  _write_bart(tmp_path / "bart")
  evaluate.main(["evaluate", f"--workdir={tmp_path}", "--metrics.allow_other_weights=true",
                 f"--metrics.bart_weights={tmp_path / 'bart'}"])
  for metric in ("bartscore_mean", "bartscore_top50"):
    row = _rows(tmp_path)["damcha", "test", metric]
    assert -20 < row["value"] < 0 and "reference_to_hypothesis" in row["note"]
  # What was evaluated stays: through weights that are not there, other metrics and another run.
  scored = _rows(tmp_path)
  with pytest.raises(UserError, match="nowhere"):
    evaluate.main(["evaluate", f"--workdir={tmp_path}", "--metrics.bart_weights=nowhere"])
  assert _rows(tmp_path) == scored
  evaluate.main(["evaluate", f"--workdir={tmp_path}", "--metrics.ranking=summed"])
  again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert again.returncode == 0, again.stderr
  row = _rows(tmp_path)["damcha", "test", "bartscore_mean"]
  assert row["value"] == scored["damcha", "test", "bartscore_mean"]["value"]
