"""Draws the figures of README.md and docs/ from recorded numbers, for light and dark pages.

    python -m tools.figures

Writes docs/figures/NAME_light.svg and docs/figures/NAME_dark.svg. Equal records make equal files:
continuous integration runs this command and fails if a file changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
import html
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import best_of_k

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
FIGURES = ROOT / "docs" / "figures"

# Colours that people with colour blindness can tell apart (Okabe and Ito, 2008).
THEMES = {
  "light": {
    "ink": "#1f2328",
    "pale": "#59636e",
    "grid": "#d1d9e0",
    "series": ("#0072b2", "#d55e00", "#009e73", "#6e7781"),
  },
  "dark": {
    "ink": "#f0f6fc",
    "pale": "#9198a1",
    "grid": "#3d444d",
    "series": ("#56b4e9", "#f0883e", "#3fb992", "#9198a1"),
  },
}
_WAYS = {
  "model": "a model that never saw AlexNet",
  "estimate": "the compiler's estimate",
  "changed": "fewest changed layouts",
  "random": "random order",
}
_METHODS = {"simulated": "estimate, without a TPU", "roofline": "the roofline"}
_STYLE = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:14px"


class Axes(NamedTuple):
  """A rectangle of a picture with two logarithmic axes."""

  left: float
  top: float
  width: float
  height: float
  x_range: tuple[float, float]
  y_range: tuple[float, float]

  def x(self, value: float) -> float:
    return self.left + self.width * _share(value, self.x_range)

  def y(self, value: float) -> float:
    return self.top + self.height * (1 - _share(value, self.y_range))

  def frame(
    self,
    theme: dict,
    x_ticks: Iterable[float],
    y_ticks: Iterable[float],
    y_name: str,
    x_unit: float = 1,
  ) -> Iterator[str]:
    """Grid lines with the values of the ticks; without `y_name` the values of y are left out."""
    right, bottom = self.left + self.width, self.top + self.height
    for tick in x_ticks:
      x = self.x(tick)
      yield line([(x, self.top), (x, bottom)], theme["grid"], 1)
      yield text(x, bottom + 20, f"{tick / x_unit:g}", theme["pale"], anchor="middle")
    for tick in y_ticks:
      y = self.y(tick)
      yield line([(self.left, y), (right, y)], theme["grid"], 1)
      if y_name:
        yield text(self.left - 8, y + 5, f"{tick:g} {y_name}", theme["pale"], anchor="end")


def _share(value: float, ends: tuple[float, float]) -> float:
  return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def line(points: Sequence[tuple[float, float]], color: str, width: float, dash: str = "") -> str:
  """A line through points; `dash` has the lengths of dashes and gaps."""
  places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
  dashes = f' stroke-dasharray="{dash}"' if dash else ""
  return (
    f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>'
  )


def text(x: float, y: float, words: str, color: str, *, anchor: str = "start", bold: bool = False):
  weight = ' font-weight="600"' if bold else ""
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"{weight}>'
    f"{html.escape(words)}</text>"
  )


def dot(x: float, y: float, color: str) -> str:
  return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.75"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
  """An SVG file; the title is what a screen reader says."""
  inside = "\n".join(parts)
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    f'style="{_STYLE}">\n<title>{html.escape(title)}</title>\n{inside}\n</svg>\n'
  )


def curve(theme: dict) -> str:
  """The slowdown of the best of the first k layouts of AlexNet."""
  record = recorded("best_of_k")
  axes = Axes(76, 66, 660, 290, (1, best_of_k.KS[-1]), (0.01, 100))
  heading = f"AlexNet: {record['configs']:,} layouts, measured on a TPU v3"
  middle, right = axes.left + axes.width / 2, axes.left + axes.width
  parts = [
    text(axes.left, 24, heading, theme["ink"], bold=True),
    text(axes.left, 46, "how much slower the best layout tried is than the fastest", theme["pale"]),
    *axes.frame(theme, (1, 2, 3, 5, 10, 20), (0.01, 0.1, 1, 10, 100), "%"),
    text(middle, 402, "layouts tried, each way in its own order", theme["pale"], anchor="middle"),
    text(right - 8, 88, "after one", theme["pale"], anchor="end"),
  ]
  ways = sorted(_WAYS, key=lambda way: -record[way]["slowdown"][0])
  for place, way in enumerate(ways):
    color, y = theme["series"][list(_WAYS).index(way)], 110 + 22 * place
    percent = [100 * value for value in record[way]["slowdown"]]
    points = [(axes.x(k), axes.y(value)) for k, value in zip(best_of_k.KS, percent)]
    parts += [
      line(points, color, 2.5),
      *(dot(*point, color) for point in points),
      dot(400, y - 5, color),
      text(414, y, _WAYS[way], theme["ink"]),
      text(right - 8, y, f"{percent[0]:.2g} %", theme["ink"], anchor="end"),
    ]
  return picture(760, 414, heading, parts)


def programs(theme: dict) -> str:
  """Times of `estimate` and of a roofline beside measured times, program by program."""
  record = recorded("measured_programs")
  rows = list(record["jaxbench"].values())
  ends = _decades(np.array([row[of] for row in rows for of in ("measured", *_METHODS) if row[of]]))
  title = "Programs of JAXBench, measured on a TPU v6e"
  parts = [text(76, 24, title, theme["ink"], bold=True)]
  for place, (method, name) in enumerate(_METHODS.items()):
    axes, summary = Axes(76 + 352 * place, 48, 308, 308, ends, ends), record["jaxbench_summary"]
    factor, mean = summary[method]["factor"], 100 * summary[method]["mean"]
    line_ends = (max(ends[0], ends[0] / factor), min(ends[1], ends[1] / factor))
    parts += [
      text(axes.left + 154, 412, f"ms by {name}", theme["pale"], anchor="middle"),
      *axes.frame(theme, _ticks(ends), _ticks(ends), "" if place else "ms"),
      line([(axes.x(x), axes.y(factor * x)) for x in line_ends], theme["pale"], 1.5, "5 4"),
      *(
        dot(
          axes.x(row[method]), axes.y(row["measured"]), theme["series"][3 * row["other_compiler"]]
        )
        for row in rows
        if row[method]
      ),
      text(axes.left + 12, 70, f"mean error {mean:.0f} %", theme["ink"]),
      text(axes.left + 12, 92, f"of {summary[method]['programs']} programs", theme["ink"]),
    ]
    if factor != 1:
      parts.append(text(axes.left + 12, 114, f"after a factor of {factor:.2f}", theme["ink"]))
  return picture(760, 424, title, parts)


def _decades(values: np.ndarray) -> tuple[float, float]:
  """The powers of ten around all values."""
  return 10.0 ** math.floor(math.log10(values.min())), 10.0 ** math.ceil(math.log10(values.max()))


def _ticks(ends: tuple[float, float]) -> list[float]:
  first, last = (round(math.log10(end)) for end in ends)
  return [10.0**power for power in range(first, last + 1)]


def recorded(name: str) -> dict:
  return json.loads((BENCHMARKS / f"{name}.json").read_text())


DRAWINGS = {"best_of_k": curve, "programs": programs}


def main() -> None:
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  FIGURES.mkdir(exist_ok=True)
  for name, draw in DRAWINGS.items():
    for theme, colors in THEMES.items():
      path, drawn = FIGURES / f"{name}_{theme}.svg", draw(colors)
      if not path.exists() or path.read_text() != drawn:
        path.write_text(drawn)
        print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
  main()
