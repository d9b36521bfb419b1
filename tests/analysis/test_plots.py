"""Figures hold what they are given, and draw it whatever its shape."""

import numpy as np
import pytest

from damcha_jax.analysis import plots
from damcha_jax.analysis.plots import HeatMap, Lines


def test_heads_lie_side_by_side_from_the_top_left():
  m = np.arange(3 * 2 * 2, dtype=float).reshape(3, 2, 2)
  nan = np.nan
  np.testing.assert_array_equal(plots.tiles(m), [
      [0, 1, nan, 4, 5], [2, 3, nan, 6, 7], [nan] * 5, [8, 9, nan, nan, nan],
      [10, 11, nan, nan, nan]])
  np.testing.assert_array_equal(plots.tiles(m[:1]), m[0])


def test_both_formats_say_what_is_drawn(tmp_path):
  lines = Lines("Left", "step [updates]", "size [1]", {"a": [(0, 1.0), (1, 2.0)], "b": [(0, 3.0)]},
                ("b",), "log")
  heat = HeatMap("Right", "head", "layer", np.array([[0.0, -2.0], [1.0, np.nan]]), unit="cosine",
                 x_names=["0", "1"])
  weights = HeatMap("Below", "key", "query", np.tri(7) / 7, "weight", limit=1.0)
  plots.draw(tmp_path / "sub" / "figure", "A title", "One sentence.",
             [[lines, heat], [weights, weights]])
  text = (tmp_path / "sub" / "figure.svg").read_text(encoding="utf-8")
  for part in ("A title", "One sentence.", "Left", "Right", "step [updates]", "cosine", "-2"):
    assert f"<!-- {part} -->" in text
  assert (tmp_path / "sub" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_gaps_have_no_colour_of_a_value_and_a_curve_shows_below_another(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                      lambda figure, *unused, **more: drawn.append(figure))
  page = HeatMap("", "", "", plots.tiles(np.zeros((2, 3, 3))), plain=True)
  lines = Lines("", "", "", {"a": [(0, 1.0), (1, 2.0)], "b": [(0, 1.0), (1, 2.0)]})
  plots.draw(tmp_path / "figure", "t", "c", [[lines, page]])
  curves, tiles = drawn[0].axes[:2]
  assert tiles.get_facecolor()[:3] == (0.6, 0.6, 0.6)
  below, above = curves.lines
  assert below.get_linewidth() > 1.5 * above.get_linewidth()


@pytest.mark.parametrize("values", [np.zeros((2, 2)), np.full((40, 2), 1e-9)])
def test_values_that_are_all_alike_are_drawn(tmp_path, values):
  plots.draw(tmp_path / "figure", "t", "c", [[HeatMap("", "", "", values, "amount")]], "all")
  assert (tmp_path / "figure.png").stat().st_size > 0
