"""Figures of runs, as matplotlib figures; `svg` makes one a part of a page."""

from __future__ import annotations

from collections.abc import Sequence
import io
import logging

import numpy as np

try:
  from matplotlib import figure, rc_context
except ImportError as error:
  raise ImportError(
      "matplotlib is missing: pip install 'tpugraphs-jax[plots]' (or pip install matplotlib)"
  ) from error

from tpugraphs_jax import metrics
from tpugraphs_jax.report import calibration
from tpugraphs_jax.report.runs import Judged, Run
from tpugraphs_jax.serve import judge
from tpugraphs_jax.train import loop

# It tells of its font cache, once on each machine.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
# Okabe and Ito: told apart with any colour vision, and in grey by their lightness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Where a legend hides nothing; matplotlib's search for such a place can take seconds.
_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
_NAMED = 24  # graphs whose names fit on an axis
_STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e4e4e4", "axes.axisbelow": True, "svg.fonttype": "none",
    "legend.frameon": False, "font.family": "sans-serif",
}


def svg(drawn: figure.Figure) -> str:
  """The figure as an `<svg>` element."""
  with rc_context(_STYLE | {"svg.hashsalt": "report"}):
    text = io.StringIO()
    drawn.savefig(text, format="svg", metadata={"Date": None})
  return text.getvalue()[text.getvalue().index("<svg"):]


def all_of(runs: Sequence[Run], graph: Judged | None) -> dict[str, figure.Figure]:
  """Every figure that there are data for, by title.

  Args:
    runs: one or several.
    graph: of the first run, whose ranks are shown.
  """
  with rc_context(_STYLE):
    found = {"Training and validation": _curves(runs)}
    judged = [run for run in runs if run.judged]
    if judged:
      found["Kendall tau and slowdown of each validation graph"] = _by_graph(judged)
      found["Slowdown of the best of the first k"] = _slowdowns(judged)
      found["Pairs in the right order"] = _calibration(judged)
    if graph is not None:
      found[f"Predicted rank and rank by label: {graph.name}"] = _ranks(graph)
    kinds = "; ".join(dict.fromkeys(run.labels for run in runs))
    for drawn in found.values():
      drawn.suptitle(f"labels: {kinds}", fontsize=8, color="#666666")
  return found


def _axes(columns: int = 1, height: float = 3.2):
  drawn = figure.Figure(figsize=(9, height), layout="constrained")
  return drawn, drawn.subplots(1, columns, squeeze=False)[0]


def _legend(axes, runs: Sequence[Run]) -> None:
  if len(runs) > 1:
    axes.legend(**_BESIDE)


def _curves(runs: Sequence[Run]) -> figure.Figure:
  drawn, (left, right) = _axes(2)
  for run, colour in zip(runs, _cycle()):
    metric = f"{loop.SAMPLE}/{judge.mean_name(run.config.get('train.best_metric', 'kendaltau'))}"
    for axes, name in ((left, "train/loss"), (right, metric)):
      points = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
      if points:
        axes.plot(*zip(*points), marker=".", color=colour, label=run.name)
    right.set_ylabel(metric)
    best = run.summary.get("training", {}).get("best", {})
    if best.get("value") is not None:
      right.plot(best["step"], best["value"], "o", ms=9, mfc="none", color=colour)
  left.set(xlabel="step", ylabel="training loss")
  right.set_xlabel("step (circle: best)")
  _legend(right, runs)
  return drawn


def _by_graph(runs: Sequence[Run]) -> figure.Figure:
  order = [graph.name for graph in sorted(
      runs[0].judged, key=lambda graph: np.nan_to_num(graph.kendall_tau, nan=-2))]
  sizes = {graph.name: graph.nodes for graph in runs[0].judged}
  is_named = len(order) <= _NAMED
  drawn, (left, right) = _axes(2, height=max(2.5, 0.24 * len(order) + 1) if is_named else 4)
  for run, colour in zip(runs, _cycle()):
    by_name = {graph.name: graph for graph in run.judged}
    for axes, value in ((left, lambda g: g.kendall_tau), (right, lambda g: 100 * g.slowdowns[1])):
      values = [value(by_name[name]) if name in by_name else np.nan for name in order]
      axes.plot(values, range(len(order)), "o", ms=5, color=colour, label=run.name)
  left.axvline(0, color="#888888", lw=1)
  left.set(xlabel="Kendall tau (random: 0)", xlim=(min(-0.1, left.get_xlim()[0]), 1.02))
  right.set(xlabel="slowdown of the first, %", yticks=[])
  right.set_xlim(left=min(0, -0.02 * right.get_xlim()[1]))
  for axes in (left, right):
    axes.set_ylim(-0.6, len(order) - 0.4)
  left.set_yticks(range(len(order)) if is_named else [],
                  [f"{name[:40]} ({sizes[name]:,} nodes)" for name in order] if is_named else [])
  if not is_named:
    left.set_ylabel(f"{len(order)} graphs, sorted")
  _legend(right, runs)
  return drawn


def _calibration(runs: Sequence[Run]) -> figure.Figure:
  """How often pairs are in the right order, and each graph's tau, beside the ceiling."""
  drawn, (left, right) = _axes(2)
  edges = np.array(calibration.RATIOS[:-1])
  names = [f"{100 * (edge - 1):.3g}" for edge in edges]
  for run, colour in zip(runs, _cycle()):
    left.plot(calibration.accuracy(run.judged), "o-", color=colour, label=run.name)
    known = [graph for graph in run.judged if graph.ceiling_ns is not None]
    right.plot([metrics.kendall_tau(graph.ceiling_ns, graph.runtime_ns) for graph in known],
               [graph.kendall_tau for graph in known], "o", ms=5, color=colour, label=run.name)
  known = [graph for graph in runs[0].judged if graph.ceiling_ns is not None]
  if known:
    left.plot(calibration.accuracy(known, of_ceiling=True), "--", color="#888888",
              label="order without noise")
    right.plot([0, 1], [0, 1], color="#888888", lw=1)
    right.set(xlabel="Kendall tau of the order without noise", ylabel="of the model")
  else:
    right.set_axis_off()
    right.text(0.5, 0.5, "The order without noise is not known:\nthe data are measurements, or "
               "their ceiling is not beside them.", ha="center", transform=right.transAxes)
  left.axhline(0.5, color="#888888", lw=1)
  left.set(xlabel="slower configuration slower by at least, %", ylabel="share in the right order",
           ylim=(-0.02, 1.02))
  left.set_xticks(range(len(names)), names)
  if known or len(runs) > 1:
    right.legend(*left.get_legend_handles_labels(), **_BESIDE)
  return drawn


def _slowdowns(runs: Sequence[Run]) -> figure.Figure:
  """Means over the graphs with at least k configurations, and the single graphs of one run."""
  drawn, (axes,) = _axes()
  for run, colour in zip(runs, _cycle()):
    by_k: dict[int, list[float]] = {}
    for graph in run.judged:
      found = graph.slowdowns
      if len(runs) == 1:
        axes.plot(list(found), 100 * np.array(list(found.values())), color="#cccccc", lw=1)
      for k, value in found.items():
        by_k.setdefault(k, []).append(100 * value)
    axes.plot(list(by_k), [np.mean(values) for values in by_k.values()], "o-", color=colour,
              label=run.name)
  by_k = _random_slowdowns(runs[0].judged)
  axes.plot(list(by_k), list(by_k.values()), "--", color="#888888", label="random order")
  axes.set(xscale="log", xlabel="k configurations tried, in the order of the model",
           ylabel="slower than the best, %")
  axes.set_xticks(sorted(by_k), [str(k) for k in sorted(by_k)])
  axes.minorticks_off()
  axes.legend(**_BESIDE)
  return drawn


def _random_slowdowns(judged: Sequence[Judged]) -> dict[int, float]:
  """The same in percent of random orders on average."""
  by_k: dict[int, list[float]] = {}
  for graph in judged:
    for k, value in metrics.random_slowdown(graph.runtime_ns, list(graph.slowdowns)).items():
      by_k.setdefault(k, []).append(100 * value)
  return {k: float(np.mean(values)) for k, values in by_k.items()}


def _ranks(graph: Judged) -> figure.Figure:
  drawn, (axes,) = _axes(height=4)
  axes.plot(*graph.ranks, ".", ms=4 if len(graph.scores) < 2000 else 1.5, color=_COLOURS[0])
  last = len(graph.scores) - 1
  axes.plot([0, last], [0, last], color="#888888", lw=1)
  axes.set(xlabel="predicted rank (0: fastest)", ylabel="rank by label", aspect="equal")
  return drawn


def _cycle():
  while True:
    yield from _COLOURS
