"""What is published of a workdir: no checkpoints, thinned curves, small figures."""

import json

import made_up_results
import pytest

from damcha_jax.config import ConfigError
from experiments import publish
from experiments.results import ResultsError, read_results


def _curve(num_steps):
  return "".join(json.dumps({"step": step, "split": split}) + "\n"
                 for step in range(1, num_steps + 1)
                 for split in (("train", "validation") if step % 10 == 0 else ("train",)))


@pytest.fixture
def workdir(tmp_path):
  folder = made_up_results.write(tmp_path, "gpt2_enwik8", "mix:cpu",
                                 [made_up_results.row("mha", "loss", 1.0)])
  run = folder / "mha" / "seed0"
  for path, text in {
      "versions.json": "{}", "figures/a.svg": "small", "figures/a.png": "small",
      "figures/b.svg": "x" * 200_001, "figures/b.png": "small", "figures/c.svg": "x" * 200_001,
      "analysis/summary.json": json.dumps(
          {"experiment": "analysis", "config": "mix:cpu", "rows": []}),
      "analysis/mha.npz": "large", "analysis/figures/d.svg": "small"}.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
  for path, text in {"config.json": "{}", "result.json": "{}", "metrics.jsonl": _curve(100),
                     "samples.npz": "large", "checkpoints/100/state": "large",
                     "checkpoints/100/config.json": "{}", "tensorboard/events": "large"}.items():
    (run / path).parent.mkdir(parents=True, exist_ok=True)
    (run / path).write_text(text)
  return folder


def _files(folder):
  return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_and_samples_stay(workdir, tmp_path, capsys):
  publish.main(["publish", f"--workdir={workdir}", f"--out={tmp_path / 'out'}"])
  assert _files(tmp_path / "out") == {
      "summary.json", "config.json", "versions.json", "figures/a.svg", "figures/b.png",
      "mha/seed0/config.json", "mha/seed0/result.json", "mha/seed0/metrics.jsonl",
      "analysis/summary.json", "analysis/figures/d.svg"}
  assert "c.svg" in capsys.readouterr().err
  assert [one.rows for one in read_results(tmp_path / "out")] == [
      one.rows for one in read_results(workdir)]


def test_curves_keep_every_evaluation_and_both_ends(workdir, tmp_path):
  publish.main(["publish", f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--max_records=5"])
  lines = (tmp_path / "out" / "mha" / "seed0" / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  steps = {split: [one["step"] for one in records if one["split"] == split]
           for split in ("train", "validation")}
  assert steps == {"train": [1, 26, 51, 75, 100], "validation": list(range(10, 101, 10))}
  assert [one["step"] for one in records] == sorted(one["step"] for one in records)


def test_a_short_curve_is_whole():
  assert publish.thinned(_curve(20), 200) == _curve(20)


def test_nothing_is_overwritten(workdir, tmp_path):
  with pytest.raises(ConfigError, match="is there already"):
    publish.publish(workdir, tmp_path, 9)
  with pytest.raises(ConfigError, match="lies in the workdir"):
    publish.publish(workdir, workdir / "out", 9)
  with pytest.raises(ConfigError, match="lies in the workdir"):
    publish.publish(workdir, tmp_path / ".." / tmp_path.name / workdir.name / "out", 9)


def test_links_between_folders_are_not_followed(workdir, tmp_path):
  (workdir / "mha" / "again").symlink_to(workdir)
  publish.publish(workdir, tmp_path / "out", 9)
  assert not [name for name in _files(tmp_path / "out") if "again" in name]


def test_a_run_that_is_not_done_is_refused(workdir, tmp_path):
  (workdir / "summary.json").unlink()
  with pytest.raises(ResultsError, match="has no summary.json"):
    publish.publish(workdir, tmp_path / "out", 9)


def test_what_was_only_evaluated_is_kept(workdir, tmp_path):
  """Without its result, a copy would need the checkpoints that it does not have."""
  evaluated = workdir / "shift" / "mha" / "seed0"
  evaluated.mkdir(parents=True)
  for name in ("config.json", "result.json"):
    (evaluated / name).write_text("{}")
  publish.publish(workdir, tmp_path / "out", 9)
  assert {"shift/mha/seed0/config.json", "shift/mha/seed0/result.json"} <= _files(tmp_path / "out")


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "config.json"])
def test_a_damaged_file_is_named_and_nothing_is_left(workdir, tmp_path, name):
  """What a failure leaves would be in the way of the same command."""
  (workdir / "mha" / "seed0" / name).write_text('{"step": 1')
  with pytest.raises(ResultsError, match=f"{name} is damaged"):
    publish.publish(workdir, tmp_path / "out", 9)
  assert not (tmp_path / "out").exists()
