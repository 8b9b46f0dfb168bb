"""Compares scores with labels: metrics per graph, their means, and a summary as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.infra import files, trust

SCORES_FILE = "{}_scores.npz"  # of `validation` or `test`
# Arrays of SCORES_FILE with the kinds of their dtypes: of graphs, and of all their configurations.
_OF_GRAPHS = {"graphs": "U", "nodes": "iu", "has_order": "b", "sizes": "iu"}
_OF_CONFIGS = {"config_ids": "iu", "scores": "f", "labels": "iuf"}
# Smallest values of arrays.
_LEAST = {"sizes": 1, "scores": -np.inf}  # 0 of the others
_MOST_LINES = 30  # of programs in a summary


@dataclasses.dataclass(frozen=True, eq=False)
class GraphScores:
  """Scores and labels of a graph.

  Attributes:
    name: of the graph.
    nodes: number of nodes, after reduction.
    config_ids: `[n]` int64 numbers of the scored configurations.
    scores: `[n]` float32, larger = slower.
    labels: `[n]` labels that define the true order: runtime over normalizer float64 for kernels,
      run times or estimates int64 for programs (`TileConfigs.labels`, `LayoutConfigs.labels`).
    has_order: as `TileConfigs.has_order`, of these configurations.
  """

  name: str
  nodes: int
  config_ids: np.ndarray
  scores: np.ndarray
  labels: np.ndarray
  has_order: bool = True

  @functools.cached_property
  def kendall_tau(self) -> float:
    """`metrics.kendall_tau`, or NaN for a graph without an order."""
    return metrics.kendall_tau(self.scores, self.labels) if self.has_order else math.nan


def final_split(summary: Mapping[str, Any]) -> str:
  """The section of a summary, and the first word of files, with the figures of a run.

  The figures judge the test fold, or the test split where it alone was evaluated (`--split=test`).
  Otherwise they judge the validation split, which chose the checkpoint.
  """
  is_alone = "test" in summary and "validation" not in summary
  return "test" if summary.get("folds") or is_alone else "validation"


def with_labels(
  graphs: Sequence[Any], config_ids: Sequence[np.ndarray], scores: Sequence[np.ndarray]
) -> list[GraphScores]:
  """Scores `[n]` float32 of configurations `[n]` int64 of each graph, with its labels."""
  parts = (graph.configs.subset(ids) for graph, ids in zip(graphs, config_ids))
  return [
    GraphScores(g.name, len(g.opcode), ids, s, part.labels, part.has_order)
    for g, ids, s, part in zip(graphs, config_ids, scores, parts)
  ]


def evaluate(
  judged: Sequence[GraphScores], ks: Sequence[int]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
  """One row of metrics per graph, and their means with OPA pooled over all pairs.

  For a graph without an order (`GraphScores.has_order`), Kendall's tau and OPA are NaN in its row,
  and the means leave them out. Pooled OPA follows the published definition: pairs of configurations
  with equal features count as wrong.

  Args:
    judged: scores and labels of graphs.
    ks: the k of top-k slowdown (`Collection.slowdown_ks`).
  """
  rows = []
  for graph in judged:
    order = graph.scores, graph.labels
    row = {"graph": graph.name, "nodes": graph.nodes, "configs": len(graph.scores)}
    row["opa"] = metrics.opa(*order) if graph.has_order else math.nan
    row["kendaltau"] = graph.kendall_tau
    slowdown = metrics.top_k_slowdown(*order, ks)
    rows.append(row | {f"slowdown{k}": value for k, value in slowdown.items()})
  pairs = [metrics.ordered_pairs(graph.scores, graph.labels) for graph in judged]
  return rows, mean_row(rows) | {"opa": metrics.pooled_opa(pairs)}


def program_rows(
  judged: Sequence[GraphScores],
  runtime_ns: Sequence[np.ndarray],
  predicted_ns: Sequence[np.ndarray] | None = None,
) -> list[dict[str, Any]]:
  """One row per program of tile kernels, as in the tables of the MLSys 2021 paper.

  Kendall's tau is the mean over kernels with an order, Tile-Size APE is computed over all kernels,
  and MAPE over all their configurations, where runtimes are predicted. Tile-Size APE and MAPE use
  nanoseconds, as in the paper, instead of labels.

  Args:
    judged: scores and labels of kernels.
    runtime_ns: `[n]` int64 runtimes of each kernel.
    predicted_ns: `[n]` predicted runtimes of each kernel; None if scores give only the order.
  """
  programs: dict[str, list[int]] = {}
  for number, graph in enumerate(judged):
    programs.setdefault(metrics.program_of(graph.name), []).append(number)
  rows = []
  for program, numbers in sorted(programs.items()):
    members = [judged[number] for number in numbers]
    times = [runtime_ns[number] for number in numbers]
    first = [metrics.best_of_top_k(k.scores, time, 1) for k, time in zip(members, times)]
    best = [time.min() for time in times]
    row = {
      "program": program,
      "kernels": len(members),
      "kendaltau": metrics.mean(kernel.kendall_tau for kernel in members),
      "tile_size_ape": metrics.tile_size_ape(np.array(first), np.array(best)),
    }
    if predicted_ns is not None:
      predicted = np.concatenate([predicted_ns[number] for number in numbers])
      row["mape"] = metrics.mape(predicted, np.concatenate(times))
    rows.append(row)
  return rows


def mean_name(metric: str) -> str:
  """The name of a metric over many graphs: `opa_pooled` (over all pairs), `kendaltau_mean`."""
  return f"{metric}_pooled" if metric == "opa" else f"{metric}_mean"


def without_order(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Names of the graphs without an order, from their rows."""
  return [row["graph"] for row in rows if math.isnan(row.get("kendaltau", 0.0))]


def by_graph(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Arrays `{metric}_by_graph`, `[graphs]` float64, of every metric."""
  return {f"{name}_by_graph": values for name, values in _columns(rows).items()}


def random_order(labels: Sequence[np.ndarray], ks: Sequence[int]) -> dict[str, float]:
  """Expected means, as from `evaluate`, of random orders of labels `[n]` of each graph."""
  slowdowns = [metrics.random_slowdown(label, ks) for label in labels]
  rows = [{f"slowdown{k}": value for k, value in by_k.items()} for by_k in slowdowns]
  return {"opa": 0.5, "kendaltau": 0.0, **mean_row(rows)}


def summary(
  collection: Collection,
  rows: Sequence[Mapping[str, Any]],
  means: Mapping[str, float],
  *,
  random: Mapping[str, float],
  split: str = "valid",
  configurations: str = "all",
) -> str:
  """A line of means, a line of means of random orders, and a line for each program.

  Top-k slowdown is omitted where no graph has more than k configurations: it is 0.

  Args:
    collection: of the graphs. Kernels of one program (names up to the last `_`) share a line.
    rows: of the graphs.
    means: from `evaluate`.
    random: from `random_order`.
    split: of the graphs.
    configurations: the judged configurations of each graph, in words.
  """
  most = max((row["configs"] for row in rows), default=0)
  zeros = {f"slowdown{k}" for k in collection.slowdown_ks if 1 < k >= most}
  names = [name for name in means if name not in zeros]
  title, lines = f"{collection.name}: {len(rows)} graphs", []
  for start, values in ((title, means), ("  a random order:", random)):
    figures = [f"{mean_name(name)} {values[name]:.4f}" for name in names]
    lines.append("  ".join([f"{start:<{len(title)}}", *figures]))
  lines.append(
    f"  ({split} split, configurations: {configurations}; _pooled: over the pairs of "
    "all graphs, _mean: over graphs)"
  )
  if unordered := without_order(rows):
    lines.append(f"  (kendaltau_mean: {metrics.mean_of(len(rows), unordered)})")
  if collection.kind == "layout":
    columns = [name for name in names if name == "kendaltau" or name.startswith("slowdown")]
  else:
    columns = [name for name in ("slowdown1", "slowdown5") if name in names]
  by_name = {name: {row["graph"]: row[name] for row in rows} for name in columns}
  if collection.kind == "tile":
    by_name = {name: metrics.mean_by_program(values) for name, values in by_name.items()}
  programs = list(next(iter(by_name.values())))
  for program in programs[:_MOST_LINES]:
    figures = [f"{name} {values[program]:.4f}" for name, values in by_name.items()]
    lines.append(f"  {program}: {'  '.join(figures)}")
  if len(programs) > _MOST_LINES:
    lines.append(f"  ... and {len(programs) - _MOST_LINES} more, in the CSV file")
  return "\n".join(lines)


def write_scores(path: Path, judged: Sequence[GraphScores]) -> None:
  """Writes scores and labels, for `read_scores` or NumPy.

  The `.npz` has `graphs` `[G]` names, `nodes` and `has_order` `[G]`, `sizes` `[G]` numbers of
  configurations, and `config_ids` int64, `labels` (see `GraphScores`) and `scores` float32, each
  `[sum(sizes)]`, graph after graph.
  """
  of_graphs = [(graph.name, graph.nodes, graph.has_order, len(graph.scores)) for graph in judged]
  arrays: dict[str, Any] = dict(zip(_OF_GRAPHS, map(np.array, zip(*of_graphs))))
  for name in _OF_CONFIGS:
    arrays[name] = np.concatenate([getattr(graph, name) for graph in judged])
  with files.replacing(path, "wb") as file:
    np.savez_compressed(file, **arrays)


def read_scores(path: Path) -> list[GraphScores]:
  """Reads a file of `write_scores`.

  Raises:
    ValueError: it is damaged.
  """
  with trust.reading(path, "evaluate again"), npz.NpzArchive(path) as archive:
    kinds = _OF_GRAPHS | _OF_CONFIGS
    arrays = {name: archive.read(name) for name in kinds}
    sizes = arrays["sizes"]
    for name, array in arrays.items():
      length = sizes.size if name in _OF_GRAPHS else sizes.sum()
      if array.shape != (length,) or array.dtype.kind not in kinds[name]:
        archive.fail(f"{name} is {array.dtype} {list(array.shape)}")
      least = _LEAST.get(name, 0)
      if array.dtype.kind != "U" and not (np.isfinite(array) & (array >= least)).all():
        archive.fail(f"{name} has a number that is not finite, or below {least}")
    columns = [np.split(arrays[name], np.cumsum(sizes)[:-1]) for name in _OF_CONFIGS]
    rows = zip(arrays["graphs"], arrays["nodes"], arrays["has_order"], *columns)
    return [
      GraphScores(trust.name(str(name)), int(nodes), ids, scores, labels, bool(has_order))
      for name, nodes, has_order, ids, scores, labels in rows
    ]


def write_csv(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes rows with equal keys as CSV, numbers to 6 digits."""
  rows = list(rows)
  text = lambda value: f"{value:.6g}" if isinstance(value, float) else value
  with files.replacing(path, newline="") as file:
    if rows:
      writer = csv.DictWriter(file, fieldnames=list(rows[0]))
      writer.writeheader()
      writer.writerows({name: text(value) for name, value in row.items()} for row in rows)


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Mean of every float column over the rows where it is not NaN."""
  return {name: metrics.mean(values) for name, values in _columns(rows).items()}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """The float columns of rows with equal keys, `[rows]` float64 each."""
  names = [name for name, value in rows[0].items() if isinstance(value, float)] if rows else []
  return {name: np.array([row[name] for row in rows]) for name in names}
