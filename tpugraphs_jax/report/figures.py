"""Figures of runs, as matplotlib figures; `svg` makes one a part of a page.

A figure shows runs that compare, and is as wide as a page of 700 pixels. Runs of one config have
one colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
import logging
from typing import Any

from matplotlib import figure, rc_context
import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.report import templates
from tpugraphs_jax.report.runs import (
  BY_GRAPH,
  DEFAULT,
  KS,
  RANDOM,
  RunComparison,
  RunGroup,
  ValidationGraph,
)
from tpugraphs_jax.train import evaluation

# matplotlib logs the making of its font cache, once on each machine.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
# Okabe and Ito: distinct with any colour vision, and in grey by their lightness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B")
MOST = len(_COLOURS)  # configs in a figure, the best ones
_GREY, _LINE = "#888888", {"color": "#888888", "lw": 1}
_INK, _GRID = "#222222", "#e4e4e4"  # the page replaces these colours
_NAMED = 24  # graphs whose names fit on an axis
_STYLE: dict[Any, Any] = {
  "font.size": 9,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.color": _GRID,
  "axes.axisbelow": True,
  "svg.fonttype": "none",
  "legend.frameon": False,
  "font.family": "sans-serif",
  "text.parse_math": False,
  **dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
  ),
}
_WIDTH = 6.8  # inches, 653 pixels of a page
_BAND = (10, 90)  # percentiles over graphs


def svg(drawn: figure.Figure) -> str:
  """The figure as an `<svg>` element whose text and grid have the colours of the page."""
  with rc_context(_STYLE | {"svg.hashsalt": "report"}):
    text = io.StringIO()
    drawn.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
  drawing = templates.without_controls(text.getvalue())
  element = drawing[drawing.index("<svg") :]  # without the head of an XML file
  return element.replace(_INK, "currentColor").replace(_GRID, "var(--line)")


def all_of(comparison: RunComparison) -> dict[str, figure.Figure]:
  """Every figure that there are data for, by title; of many configs the best `MOST`.

  The ranks are those of the graph in the middle by Kendall tau of the first config.
  """
  groups, by_title = comparison.groups[:MOST], {}
  first = groups[0]
  with rc_context(_STYLE):
    if first.judged:
      by_title["Slowdown of the best of the first k"] = _slowdowns(comparison)
      by_title["Kendall tau and slowdown1 of each graph"] = _by_graph(groups)
      graph = first.by_tau[len(first.taus) // 2]
      of = f" ({first.name})" * (len(groups) > 1)
      by_title[f"Predicted rank and rank by label: {graph.name}{of}"] = _ranks(graph)
    by_title["Training and validation"] = _curves(groups)
    for drawn in by_title.values():
      _legend(drawn)
  return by_title


def _axes(columns: int = 1, height: float = 3.3):
  drawn = figure.Figure(figsize=(_WIDTH, height), layout="constrained")
  return drawn, drawn.subplots(1, columns, squeeze=False)[0]


def _legend(drawn: figure.Figure) -> None:
  """Names the lines of the last panel below all panels; none for a single line."""
  handles, names = drawn.axes[-1].get_legend_handles_labels()
  if len(names) > 1:
    columns = 2 if max(map(len, names)) > 20 else 4
    drawn.legend(handles, list(map(_short, names)), loc="outside lower center", ncols=columns)


def _short(name: str, most: int = 48) -> str:
  return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def _slowdown_scale(axis) -> None:
  """Logarithmic but for the neighbourhood of 0, which is a perfect slowdown."""
  set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
  set_scale("symlog", linthresh=0.001)
  ticks = [0, 0.001, 0.01, 0.1, 1, 10, 100]
  axis.set_ticks(ticks, list(map(str, ticks)))
  axis.set_ticks([], minor=True)


def _slowdowns(comparison: RunComparison) -> figure.Figure:
  """Means over all graphs; of a single config also a band of the graphs.

  As in `slowdown10_mean`, a graph with fewer than k configurations has slowdown 0: all of its
  configurations are tried. k is cut at the median number of configurations per graph.
  """
  drawn, (axes,) = _axes()
  groups, graphs = comparison.groups[:MOST], comparison.groups[0].graphs
  half = np.median([len(graph.scores) for graph in graphs])
  ks = [k for k in KS if k == 1 or k <= half]

  def plot(slowdowns: Sequence[Mapping[int, float]], style: str, *, label: str, **kwargs) -> None:
    means = [np.mean([by_k.get(k, 0.0) for by_k in slowdowns]) for k in ks]
    axes.plot(ks, means, style, label=label, **kwargs)

  if len(groups) == 1:
    values = np.array([[graph.slowdowns.get(k, 0.0) for k in ks] for graph in groups[0].judged])
    low, high = np.percentile(values, _BAND, axis=0)
    name = "{} to {} % of the graphs".format(*_BAND)
    axes.fill_between(ks, low, high, color=_COLOURS[0], alpha=0.15, lw=0, label=name)
  for group, colour in zip(groups, _COLOURS):
    plot([graph.slowdowns for graph in group.judged], "o-", color=colour, label=group.name)
  at_random = [metrics.random_slowdown(graph.labels, ks) for graph in graphs]
  plot(at_random, "x--", color=_GREY, label=RANDOM)
  tried = "k configurations tried, in the order of the model"
  axes.set(xscale="log", xlabel=tried, ylabel="slowdown")
  axes.set_xticks(ks, list(map(str, ks)))
  axes.minorticks_off()
  _slowdown_scale(axes.yaxis)
  axes.set_ylim(-0.0003, 1.5 * max(0.001, axes.dataLim.ymax))
  return drawn


def _by_graph(groups: Sequence[RunGroup]) -> figure.Figure:
  """Kendall tau and slowdown of every graph, means over seeds."""
  order = groups[0].by_tau
  is_named, places = len(order) <= _NAMED, range(len(order))
  drawn, (left, right) = _axes(2, height=max(2.8, 0.22 * len(order) + 1.4) if is_named else 4)
  for group, colour in zip(groups, _COLOURS):
    for axes, value in zip((left, right), BY_GRAPH.values()):
      values = group.by_graph(value)
      numbers = [values.get(graph.name, np.nan) for graph in order]
      axes.plot(numbers, places, "o", ms=5, color=colour, label=group.name)
  if all(graph.default is not None for graph in order):
    slowdowns = [graph.default_slowdown for graph in order]
    right.plot(slowdowns, places, "|", ms=10, mew=2, color=_INK, label=DEFAULT)
  left.axvline(0, **_LINE)
  left.set(xlabel="Kendall tau (random: 0)", xlim=(min(-0.1, left.get_xlim()[0]), 1.02))
  _slowdown_scale(right.xaxis)
  right.set(xlabel="slowdown1", yticks=[])
  right.set_xlim(-0.0003, 1.5 * max(0.001, right.dataLim.xmax))
  for axes in (left, right):
    axes.set_ylim(-0.6, len(order) - 0.4)
  names = [_short(graph.name, 26) for graph in order]
  left.set_yticks(places if is_named else [], names if is_named else [])
  if not is_named:
    left.set_ylabel(f"{len(order)} graphs, sorted")
  return drawn


def _curves(groups: Sequence[RunGroup]) -> figure.Figure:
  """Loss and validation metric by step, a line for each run."""
  drawn, (left, right) = _axes(2)
  shown: dict[str, None] = {}
  for group, colour in zip(groups, _COLOURS):
    for number, run in enumerate(group.runs):
      best_metric = run.config.get("train.best_metric", "kendaltau")
      metric = f"{metrics.SAMPLE}/{evaluation.mean_name(best_metric)}"
      shown[metric] = None
      for axes, name in ((left, "train/loss"), (right, metric)):
        points = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
        steps, values = np.array(points).reshape(-1, 2).T
        label = "" if number else group.name
        axes.plot(steps, values, marker=".", color=colour, label=label)
      best = run.summary.get("training", {}).get("best", {})
      if best.get("value") is not None:
        right.plot(best["step"], best["value"], "o", ms=9, mfc="none", color=colour)
  right.set_ylabel(", ".join(shown))
  left.set(xlabel="step", ylabel="training loss")
  lowest, highest = left.dataLim.intervaly
  if 0 < 30 * lowest < highest < np.inf:  # losses of different kinds, or a steep start
    left.set_yscale("log")
  right.set_xlabel("step (circle: best)")
  return drawn


def _ranks(graph: ValidationGraph) -> figure.Figure:
  """Every configuration of a graph, by its predicted rank and its rank by label."""
  drawn, (axes,) = _axes(height=4)
  predicted, by_label = graph.ranks
  style = {"ms": 6 if len(predicted) < 200 else 2, "color": _COLOURS[0]}
  axes.plot(predicted, by_label, ".", label="a configuration", **style)
  axes.axline((0, 0), slope=1, **_LINE)
  if graph.default is not None:
    at = predicted[graph.default], by_label[graph.default]
    axes.plot(*at, "D", ms=7, color=_COLOURS[1], label=DEFAULT)
  axes.set(xlabel="predicted rank (0: fastest)", ylabel="rank by label", aspect="equal")
  axes.locator_params(integer=True)
  return drawn
