"""Summary rows: means and spread over seeds, unique keys, the paper's figure, tables."""

import json

from matplotlib import image
from matplotlib.colors import to_hex
import numpy as np
import pytest
from scipy import stats

from damcha_jax import reporting
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import freeze
from damcha_jax.data.sources import Corpus
from damcha_jax.errors import WorkdirError
from damcha_jax.reporting import Measurement
from configs import mix
from experiments import common
from experiments import gpt2_enwik8

TABLE5 = json.loads(common.PAPER.read_text(encoding="utf-8"))["table5"]


def _one(value, seed, metric="nats_per_token", attention="mha", split="validation", **more):
  return Measurement(attention, "sample_mix", split, metric, value, "nats/token", seed, **more)


def _rows(*measurements):
  return reporting.summary_rows(measurements, False,
                                lambda one: gpt2_enwik8._figure(TABLE5, one))


def test_a_row_is_the_mean_over_seeds_with_their_sample_deviation():
  (row,) = _rows(_one(1.0, 0), _one(2.0, 1), _one(4.5, 2))
  assert row == {"name": "mha/validation", "metric": "nats_per_token", "value": 2.5,
                 "unit": "nats/token", "seeds": [0, 1, 2], "paper": 1.09, "attention": "mha",
                 "dataset": "sample_mix", "split": "validation", "variant": None,
                 "spread": pytest.approx(np.std([1.0, 2.0, 4.5], ddof=1)), "comparable": False}


def test_one_seed_has_no_spread_and_an_unavailable_value_keeps_its_note():
  single, unavailable = _rows(_one(1.0, 3), _one(None, 3, metric="x", note="needs a checkpoint"))
  assert single["spread"] is None and "note" not in single
  assert unavailable["value"] is None and unavailable["note"] == "needs a checkpoint"


def test_two_values_for_one_row_and_seed_are_refused():
  with pytest.raises(ValueError, match="with seed 0"):
    _rows(_one(1.0, 0), _one(2.0, 0))


@pytest.mark.parametrize("attention, dataset, metric, figure", [
    ("mha", "enwik8", "nats_per_token", 1.07), ("damcha", "enwik8", "nats_per_token", 1.03),
    ("damcha", "sample_text8", "perplexity", 2.81), ("dcmha", "mix", "nats_per_token", 1.08),
    ("damcha", "mix", "bits_per_byte", None), ("gzip9", "mix", "nats_per_token", None),
    ("tha", "mix", "nats_per_token", None), ("mha", "own.txt", "nats_per_token", None),
])
def test_figures_are_table_5s(attention, dataset, metric, figure):
  one = Measurement(attention, dataset, "validation", metric, 1.0, "", 0)
  assert gpt2_enwik8._figure(TABLE5, one) == figure


def test_only_held_out_validation_of_the_whole_stands_beside_table_5():
  assert gpt2_enwik8._figure(TABLE5, _one(1.0, 0, split="test")) is None
  assert gpt2_enwik8._figure(TABLE5, _one(1.0, 0, variant="enwik8")) is None


def test_comparable_means_the_papers_data_and_size():
  assert gpt2_enwik8._comparable(freeze(mix.get_config("paper")))
  assert not gpt2_enwik8._comparable(freeze(mix.get_config("cpu")))
  for key, value in {"num_steps": 50_000, "dataset": "sample_mix"}.items():
    changed = mix.get_config("paper")
    changed[key] = value
    assert not gpt2_enwik8._comparable(freeze(changed))


def test_gzip_rows_weigh_each_source_by_its_bytes():
  zeros, noise = np.zeros(3000, np.uint8), np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
  split = {"a": zeros, "b": noise}
  found = {(one.split, one.variant): one.value
           for one in gpt2_enwik8._gzip(Corpus("mix", split, split, {"a": noise}))}
  assert set(found) == {("validation", None), ("validation", "a"), ("validation", "b"),
                        ("test", None)}
  assert found["validation", "a"] < 0.2 and found["validation", "b"] > 8.0
  assert found["validation", None] == pytest.approx(
      0.75 * found["validation", "a"] + 0.25 * found["validation", "b"])


def test_table_has_a_block_per_split_with_the_paper_beside():
  table = reporting.format_table(_rows(
      _one(1.5, 0), _one(1.7, 1), _one(1.25, 0, attention="damcha"), _one(2.0, 0, split="test"),
      *(_one(12345678.0, seed, split="train", metric="num_params") for seed in (0, 1))))
  *blocks, legend = table.split("\n\n")
  assert len(blocks) == 3 and "± is the standard deviation over seeds" in legend
  assert "±" not in reporting.format_table(_rows(_one(1.5, 0)))
  assert blocks[0].splitlines()[0].split("  ")[0] == "sample_mix · validation"
  assert "1.6 ± 0.14" in blocks[0] and "1.09" in blocks[0] and "1.04" in blocks[0]
  assert "paper" not in blocks[1] and blocks[2].endswith("1.235e+07")


def test_summary_is_replaced_whole(tmp_path):
  path = tmp_path / "summary.json"
  reporting.write_summary(path, "gpt2_enwik8", "mix:cpu", _rows(_one(1.0, 0)))
  assert json.loads(path.read_text())["rows"][0]["value"] == 1.0
  with pytest.raises(ValueError):  # JSON has no NaN
    reporting.write_summary(path, "gpt2_enwik8", "mix:cpu", _rows(_one(float("nan"), 0)))
  assert json.loads(path.read_text())["rows"][0]["value"] == 1.0
  with pytest.raises(WorkdirError, match="cannot write"):
    reporting.write_summary(tmp_path / "missing" / "summary.json", "x", "y", [])


def test_learning_curves_are_a_png(tmp_path):
  path = tmp_path / "figures" / "curves.png"
  reporting.plot_learning_curves(path, {"mha": [(1, 5.0), (2, 4.0)], "damcha": []}, "nats")
  assert path.read_bytes().startswith(b"\x89PNG")


def test_a_title_is_no_formula(tmp_path):
  curves = {"mha": [(1, 5.0), (2, 4.0)]}
  reporting.plot_learning_curves(tmp_path / "curves.png", curves, "nats", r"price$_$.txt $\foo$")
  reporting.plot_differences(tmp_path / "differences", {"mha": (0.1, 0.2)}, "a$^$b", "nats")
  reporting.plot_distributions(tmp_path / "densities", {"mha": np.arange(9.0)}, "a$^$b", "x", "1")


def test_learning_curves_have_a_title_and_whole_steps(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(reporting, "_save", lambda figure, path: figures.append(figure))
  curves = {"mha": [(10, 2.0), (12, 1.0)]}
  reporting.plot_learning_curves(tmp_path / "x.png", curves, "nats", "On x")
  (axes,) = figures[0].axes
  assert axes.get_title() == "On x" and all(tick == round(tick) for tick in axes.get_xticks())


def test_every_attention_has_a_line_of_its_own(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(reporting, "_save", lambda figure, path: figures.append(figure))
  num_lines = 12  # as many as have a colour of their own
  names = tuple(ATTENTIONS)[:num_lines]
  curves = {name: [(1, index), (2, index + 1)] for index, name in enumerate(names, 1)}
  again = {f"{name} again": points for name, points in curves.items()}
  reporting.plot_log_log(tmp_path / "x.png", {**curves, **again}, "T", "latency")
  (axes,) = figures[0].axes
  lines = [(to_hex(line.get_color()), line.get_marker(), line.get_linestyle())
           for line in axes.lines]
  assert len(set(lines)) == 2 * num_lines
  for colours_markers in (lines[:num_lines], lines[num_lines:]):
    colours, markers, _ = map(set, zip(*colours_markers))
    assert len(colours) == len(markers) == num_lines
  assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [*curves, *again]


def test_intervals_have_one_style_for_a_name_in_every_figure(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(reporting, "_save", lambda figure, path: figures.append(figure))
  names = tuple(ATTENTIONS)[:12]
  curves = {name: [(1, 0.5, 0.1), (2, 0.6, 0.1)] for name in names}
  styles = []
  for shown in (names, names[1:]):
    reporting.plot_intervals(tmp_path / "x", {name: curves[name] for name in shown}, "t", "D [1]",
                             "accuracy [1]", names=names)
    lines = [bars.lines[0] for bars in figures[-1].axes[0].containers]
    styles.append([(to_hex(line.get_color()), line.get_marker()) for line in lines])
  assert styles[0][1:] == styles[1] and len(set(styles[0])) == len(names)


def test_a_density_is_scipys_and_its_width_silvermans():
  values_N = np.random.default_rng(0).gamma(2.0, size=3_000)
  width, grid_G = reporting.bandwidth(values_N), np.linspace(-5, 30, 500)
  assert width == pytest.approx(0.9 * (stats.iqr(values_N) / 1.34) * 3_000**-0.2)
  density_G = reporting.gaussian_density(values_N, grid_G, width)
  expected = stats.gaussian_kde(values_N, bw_method=width / values_N.std(ddof=1))
  np.testing.assert_allclose(density_G, expected(grid_G), rtol=1e-6, atol=1e-12)
  assert np.trapezoid(density_G, grid_G) == pytest.approx(1.0, abs=1e-4)


def test_half_of_the_values_being_equal_still_gives_a_width():
  assert reporting.bandwidth(np.array([0.0, 1.0, 1.0, 1.0, 1.0, 2.0])) > 0
  assert reporting.bandwidth(np.ones(5)) == reporting.bandwidth(np.ones(1)) == 0


def test_distributions_are_drawn_with_their_quartiles(tmp_path):
  values = {"mha": np.arange(9.0), "equal": np.full(4, 3.0), "one": np.array([7.0])}
  path = tmp_path / "figures" / "distribution"
  reporting.plot_distributions(path, values, "A title", "error", "nats")
  pixels = image.imread(path.with_suffix(".png"))
  assert pixels.shape[1] == 1_200
  svg = path.with_suffix(".svg").read_text()
  # Only what has a density is in the legend; all have quartiles.
  assert [svg.count(f"<!-- {text} -->") for text in (
      "A title", "error [nats]", "density [1 / (nats)]", "mha", "equal", "one")] == [
          1, 1, 1, 2, 1, 1]
  many = {f"n{index}": np.arange(3.0) for index in range(11)}
  reporting.plot_distributions(path, many, "", "", "")
  assert path.with_suffix(".svg").read_text().count("<!-- n1 -->") == 1


def test_an_image_grid_shows_every_image_in_its_place(tmp_path):
  images = np.arange(7, dtype=np.uint8)[:, None, None] * np.full((1, 3, 3), 30, np.uint8)
  reporting.write_image_grid(tmp_path / "figures" / "grid.png", images, num_columns=4)
  pixels = (image.imread(tmp_path / "figures" / "grid.png") * 255).round()
  height, width, _ = pixels.shape
  assert width > 700 and abs(2 * width - 4 * height) < 8
  centers = pixels[height // 4 :: height // 2, width // 8 :: width // 4, 0]
  assert centers.tolist() == [[0, 30, 60, 90], [120, 150, 180, 255]]
  assert pixels[0, 0].tolist()[:3] == [128, 128, 128]  # a line that white images are told apart by


def test_steps_are_marked_at_round_numbers(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(reporting, "_save", lambda figure, path: drawn.append(figure))
  reporting.plot_learning_curves(tmp_path / "a.png", {"mha": [(300, 3.0), (900, 2.0)]}, "loss")
  assert {tick % 100 for tick in drawn[0].axes[0].get_xticks()} == {0}


def test_what_is_being_worked_out_is_named_with_its_part(tmp_path, capsys):
  found = (Measurement("mha", "d", "test", "m", 1.0, "1", 0), None)
  for _ in range(2):
    assert common.kept(tmp_path / "growth" / "seed0", lambda: [found]) == [found]
  assert capsys.readouterr().err == "note: working out growth/seed0\n"
