"""Results as they are read from their folders: what belongs to what, and what is refused."""

import json

import made_up_results
import pytest

from experiments import command_line
from experiments import report
from experiments.results import ResultsError, read_results


def test_parts_of_a_result_are_not_read_twice_but_its_analysis_is(tmp_path):
  folder = made_up_results.write(tmp_path, "theory", "theory:smoke", [])
  made_up_results.write(folder, "efficiency", "costs:smoke", [])
  inner = made_up_results.write(folder, "analysis", "theory:smoke", [])
  (inner / "config.json").unlink()
  inner.rename(folder / "analysis")
  theory, analysis = read_results(tmp_path)
  assert theory.experiment == "theory"
  assert analysis.command == (f"{theory.command} && python -m experiments.analysis "
                              "--workdir=runs/theory/theory-smoke")


def test_a_workdir_that_is_not_finished_is_named(tmp_path, capsys):
  done, begun = (made_up_results.write(tmp_path / "results", "gpt2_enwik8", f"{name}:cpu", [])
                 for name in ("mix", "text8"))
  (begun / "summary.json").unlink()
  for folder in (done, begun):
    (folder / "mha" / "seed0").mkdir(parents=True)
    (folder / "mha" / "seed0" / "config.json").write_text("{}")
  report.main(["report", f"--results={tmp_path / 'results'}", f"--out={tmp_path / 'out'}"])
  notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
  assert len(notes) == 1 and notes[0].startswith(f"note: {begun} has no summary.json")


def _analysis(folder, config):
  inner = folder / "analysis"
  inner.mkdir()
  (inner / "summary.json").write_text(json.dumps(
      {"experiment": "analysis", "config": config, "rows": [
          made_up_results.row("damcha", "adaptivity", 0.5, variant="step 3")]}))


def test_an_analysis_of_a_run_that_was_interrupted_is_read(tmp_path):
  folder = made_up_results.write(tmp_path, "gpt2_enwik8", "mix:cpu", [], experiment="gpt2_enwik8",
                                 name="mix", size="cpu", num_steps=7)
  (folder / "summary.json").unlink()
  _analysis(folder, "mix:cpu")
  (one,) = read_results(tmp_path)
  assert (one.experiment, one.config, one.name) == ("analysis", "mix:cpu", "mix-cpu/analysis")
  assert one.command == ("python -m experiments.gpt2_enwik8 --config=configs/mix.py:cpu "
                         "--config.num_steps=7 && python -m experiments.analysis "
                         "--workdir=runs/gpt2_enwik8/mix-cpu")
  report.main(["report", f"--results={tmp_path}", f"--out={tmp_path / 'out'}"])
  assert one.command in (tmp_path / "out" / "report.md").read_text()


def test_an_analysis_has_the_size_of_what_is_around_it(tmp_path):
  folder = made_up_results.write(tmp_path, "study", "study_cpu:paper", [])
  (folder / "mix" / "damcha").mkdir(parents=True)
  _analysis(folder / "mix" / "damcha", "mix:paper")
  _, one = read_results(tmp_path)
  assert one.config == "study_cpu:paper"
  assert one.command.endswith("--workdir=runs/study/study_cpu-paper/mix/damcha")


def test_an_analysis_within_a_study_without_summary_is_read(tmp_path):
  folder = made_up_results.write(tmp_path, "study", "study_cpu:paper", [], experiment="study",
                                 name="study_cpu", size="paper")
  (folder / "summary.json").unlink()
  (folder / "mix" / "damcha").mkdir(parents=True)
  _analysis(folder / "mix" / "damcha", "mix:paper")
  (one,) = read_results(tmp_path)
  assert one.config == "study_cpu:paper"
  assert one.command.endswith("--workdir=runs/study/study_cpu-paper/mix/damcha")


def test_an_empty_figure_is_named(tmp_path):
  folder = made_up_results.write(tmp_path, "theory", "theory:smoke", [])
  (folder / "figures").mkdir(exist_ok=True)
  (folder / "figures" / "lost.png").touch()
  with pytest.raises(ResultsError, match="lost.png is empty; remove it"):
    read_results(tmp_path)


def test_an_analysis_beside_nothing_is_one_line(tmp_path):
  _analysis(tmp_path, "mix:cpu")
  with pytest.raises(ResultsError, match="config.json is missing"):
    read_results(tmp_path)
  (tmp_path / "config.json").write_text('{"run": 3}')
  with pytest.raises(ResultsError, match="no config of this suite"):
    read_results(tmp_path)


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / "summary.json").write_text("{"), "is not valid JSON"),
    (lambda folder: (folder / "summary.json").write_text("[]"), "is not a JSON object"),
    (lambda folder: (folder / "summary.json").write_text('{"rows": []}'), "is no summary of this"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: _edit(folder, experiment="another"), "is no summary of this"),
    (lambda folder: _edit(folder, config="another:cpu"), "config file"),
    (lambda folder: _edit(folder, rows=[3]), "row 0 is no JSON object"),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", "loss", "low")]),
     "row 0 has value='low'"),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", "loss", 1.0, section=3)]),
     "row 0 has section=3"),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", "loss", 1.0, variant=3)]),
     "row 0 has variant=3"),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", "loss", 1.0, note=3)]),
     "row 0 has note=3"),
    *((lambda folder, key=key: _edit(folder, rows=[_without(key)]), f"row 0 has no {key}")
      for key in ("value", "spread", "paper", "variant")),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", "loss", 1.0, note="\ud800")]),
     "is not valid JSON"),
    (lambda folder: _edit(folder, rows=[made_up_results.row("mha", 3, 1.0)]), "row 0 has metric=3"),
])
def test_a_broken_or_foreign_summary_is_one_line_that_names_it(tmp_path, capsys, change, message):
  folder = made_up_results.write(tmp_path / "results", "gpt2_enwik8", "mix:cpu", [])
  change(folder)
  with pytest.raises(SystemExit) as stopped, command_line.user_errors():
    report.main(["report", f"--results={tmp_path / 'results'}", f"--out={tmp_path / 'out'}"])
  assert stopped.value.code == 1 and not (tmp_path / "out").exists()
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and message in error and str(folder) in error


def _without(key):
  row = made_up_results.row("mha", "loss", 1.0)
  del row[key]
  return row


def _edit(folder, **changes):
  path = folder / "summary.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_value_that_no_option_can_tell_is_named(tmp_path):
  made_up_results.write(tmp_path, "efficiency", "table2:paper", [], shapes=[{"features": 3}])
  with pytest.raises(ResultsError, match="another 'shapes'"):
    read_results(tmp_path)


@pytest.mark.parametrize("experiment", ["../configs/mix", "no_such", "", None])
def test_a_summary_of_no_experiment_of_ours_is_refused(tmp_path, experiment):
  made_up_results.write(tmp_path, "study", "study_cpu:paper", [])
  (path,) = tmp_path.rglob("summary.json")
  path.write_text(json.dumps({**json.loads(path.read_text()), "experiment": experiment}))
  with pytest.raises(ResultsError, match="no summary of this suite's experiments"):
    read_results(tmp_path)
