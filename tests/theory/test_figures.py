"""Figures of theorems: legible at the width of a page."""

from PIL import Image

from damcha_jax.theory import figures
from damcha_jax.theory.figures import Curve, Panel, Point


def test_more_than_two_panels_are_drawn_below_each_other(tmp_path):
  panel = Panel("K=1", "rank [1]", "risk [1]", {"bound": Curve([Point(1, 2.0), Point(2, 1.0)])})
  sizes = []
  for count in (2, 3, 4):
    figures.draw(tmp_path / "figure", "title", "A caption.", [panel] * count)
    with Image.open(tmp_path / "figure.png") as image:
      sizes.append(image.size)
  (width, height), *more = sizes
  assert [size[0] for size in more] == [width] * 2
  assert more[0] == more[1] and more[0][1] > 1.5 * height
