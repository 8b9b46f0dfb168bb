"""Judges scores: one row of metrics per graph, their means, and what is printed of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import csv
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax import files, metrics
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data.batching import PreparedGraph

SCORES_FILE = "validation_scores.npz"
PROGRAMS_FILE = "validation_programs.csv"  # of kernels
_SHOWN = 30  # programs with a line of their own
_POOLED = ("opa",)  # metrics over the pairs of all graphs; the others are means over graphs


def graph_row(
    graph: PreparedGraph, config_ids: np.ndarray, scores: np.ndarray, *, ks: Sequence[int]
) -> dict[str, Any]:
  """Metrics of one labelled graph.

  Args:
    graph: with measured configurations.
    config_ids: `[n]` int64, the configurations that are judged.
    scores: `[n]` float32 of these, larger = slower.
    ks: of the top-k slowdowns.
  """
  runtime = graph.configs.runtime_ns[config_ids]
  slowdown = metrics.top_k_slowdown(scores, runtime, ks)
  return {
      "graph": graph.name,
      "nodes": len(graph.opcode),
      "configs": len(config_ids),
      "opa": metrics.opa(scores, runtime),
      "kendaltau": metrics.kendall_tau(scores, runtime),
      **{f"slowdown{k}": value for k, value in slowdown.items()},
  }


def judge(
    collection: Collection, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray],
    scores: Sequence[np.ndarray],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
  """One row per graph, and their means with OPA pooled over all pairs (official).

  Args:
    collection: of the graphs.
    graphs: labelled ones.
    config_ids: `[n]` int64 for each graph.
    scores: `[n]` float32 for each graph.
  """
  triples = list(zip(graphs, config_ids, scores))
  rows = [graph_row(*triple, ks=collection.slowdown_ks) for triple in triples]
  pairs = [metrics.ordered_pairs(s, g.configs.runtime_ns[ids]) for g, ids, s in triples]
  return rows, mean_row(rows) | {"opa": metrics.pooled_opa(pairs)}


def program_rows(
    graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray],
    scores: Sequence[np.ndarray], *, predicts: str = "order", target: str = "official",
) -> list[dict[str, Any]]:
  """One row per program of tile kernels, as in the tables of the MLSys 2021 paper.

  Kendall's tau is the mean over the program's kernels and Tile-Size APE is over all of
  them. MAPE, of every configuration of every kernel, is there if scores predict runtimes
  or their logarithms.

  Args:
    graphs: labelled kernels.
    config_ids: `[n]` int64 for each kernel.
    scores: `[n]` float32 for each kernel.
    predicts: `runtime`, `log` or `order`, see `losses.predicts`.
    target: what scores were trained on, `official` or `absolute`.
  """
  programs: dict[str, list[int]] = {}
  for number, graph in enumerate(graphs):
    programs.setdefault(metrics.program_of(graph.name), []).append(number)
  rows = []
  for program in sorted(programs):
    members = [(graphs[i].configs, config_ids[i], scores[i]) for i in programs[program]]
    runtimes = [configs.runtime_ns[ids] for configs, ids, _ in members]
    chosen = [metrics.best_of_top_k(s, runtime, 1) for (_, _, s), runtime in zip(members, runtimes)]
    taus = [metrics.kendall_tau(s, runtime) for (_, _, s), runtime in zip(members, runtimes)]
    row = {"program": program, "kernels": len(members), **mean_row([{"kendaltau": t} for t in taus]),
           "tile_size_ape": metrics.tile_size_ape(
               np.array(chosen), np.array([runtime.min() for runtime in runtimes]))}
    if predicts != "order":
      of_unit = [np.exp(s.astype(float)) if predicts == "log" else s for _, _, s in members]
      predicted = [p * configs.unit_ns(target)[ids]
                   for p, (configs, ids, _) in zip(of_unit, members)]
      row["mape"] = metrics.mape(np.concatenate(predicted), np.concatenate(runtimes))
    rows.append(row)
  return rows


def mean_name(metric: str) -> str:
  """The name of a metric over many graphs, which says how they were put together.

  A graph has an `opa`; a split has an `opa_pooled`, over the pairs of all its graphs, and a
  `kendaltau_mean`.
  """
  return f"{metric}_pooled" if metric in _POOLED else f"{metric}_mean"


def by_graph(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Every metric of the graphs as `{metric}_by_graph`, `[graphs]` float64."""
  names = [name for name, value in rows[0].items() if isinstance(value, float)] if rows else []
  return {f"{name}_by_graph": np.array([row[name] for row in rows]) for name in names}


def random_order(
    collection: Collection, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray]
) -> dict[str, float]:
  """Means as `judge` gives them, of random orders on average.

  Args:
    collection: of the graphs.
    graphs: labelled ones.
    config_ids: `[n]` int64 for each graph.
  """
  found = [metrics.random_slowdown(graph.configs.runtime_ns[ids], collection.slowdown_ks)
           for graph, ids in zip(graphs, config_ids)]
  rows = [{f"slowdown{k}": value for k, value in one.items()} for one in found]
  return {"opa": 0.5, "kendaltau": 0.0, **mean_row(rows)}


def summary(
    collection: Collection, rows: Sequence[Mapping[str, Any]], means: Mapping[str, float], *,
    random: Mapping[str, float], split: str = "valid", configurations: str = "all",
) -> str:
  """The means on a line, those of random orders below, and a line for each program.

  The slowdown of the first k is left out where no graph has more than k configurations: it is 0.

  Args:
    collection: of the graphs. Kernels of one program (names up to the last `_`) share a line.
    rows: of the graphs.
    means: as `judge` gives them.
    random: the same of random orders.
    split: of the graphs.
    configurations: which of each graph were judged, in words.
  """
  most = max((row["configs"] for row in rows), default=0)
  known = {f"slowdown{k}" for k in collection.slowdown_ks if 1 < k >= most}
  names = [name for name in means if name not in known]
  start, other = f"{collection.name}: {len(rows)} graphs", "  a random order:"
  shown = [f"{{:<{len(start)}}}  " + "  ".join(
      f"{mean_name(name)} {values[name]:.4f}" for name in names) for values in (means, random)]
  lines = [shown[0].format(start), shown[1].format(other),
           f"  ({split} split, configurations: {configurations}; _pooled: over the pairs of all "
           "graphs, _mean: over graphs)"]
  if collection.kind == "layout":
    columns = [name for name in names if name == "kendaltau" or name.startswith("slowdown")]
    by_name = {name: {row["graph"]: row[name] for row in rows} for name in columns}
  else:
    by_name = {f"slowdown{k}": metrics.mean_by_program(
        {row["graph"]: row[f"slowdown{k}"] for row in rows}) for k in (1, 5)
               if f"slowdown{k}" in names}
  programs = list(next(iter(by_name.values())))
  lines += [f"  {program}: " + "  ".join(
      f"{name} {values[program]:.4f}" for name, values in by_name.items())
            for program in programs[:_SHOWN]]
  if len(programs) > _SHOWN:
    lines.append(f"  ... and {len(programs) - _SHOWN} more, in the CSV file")
  return "\n".join(lines)


def write_scores(
    path: Path, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray],
    scores: Sequence[np.ndarray],
) -> None:
  """Writes what was judged: scores beside measured runtimes.

  Args:
    path: an `.npz` with `graphs` `[G]` names, `nodes` `[G]`, `sizes` `[G]` configurations
      of each, and one after the other `config_ids`, `runtime_ns` int64 and `scores` float32,
      `[sum(sizes)]`.
    graphs: labelled ones.
    config_ids: `[n]` int64 for each graph.
    scores: `[n]` float32 for each graph.
  """
  runtimes = [graph.configs.runtime_ns[ids] for graph, ids in zip(graphs, config_ids)]
  with files.replacing(path, "wb") as file:
    np.savez_compressed(
        file, graphs=np.array([graph.name for graph in graphs]),
        nodes=np.array([len(graph.opcode) for graph in graphs]),
        sizes=np.array([len(ids) for ids in config_ids]), config_ids=np.concatenate(config_ids),
        runtime_ns=np.concatenate(runtimes), scores=np.concatenate(scores))


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes rows with equal keys as CSV, numbers to 6 digits."""
  rows = list(rows)
  with files.replacing(path, newline="") as file:
    if rows:
      writer = csv.DictWriter(file, fieldnames=list(rows[0]))
      writer.writeheader()
      writer.writerows({k: _plain(v) for k, v in row.items()} for row in rows)


def _plain(value: Any) -> Any:
  return f"{value:.6g}" if isinstance(value, float) else value


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Mean of every float column over the rows where it is a number."""
  numeric = [key for key, value in rows[0].items() if isinstance(value, float)] if rows else []
  columns = {key: np.array([row[key] for row in rows]) for key in numeric}
  return {
      key: float(column[~np.isnan(column)].mean()) if (~np.isnan(column)).any() else float("nan")
      for key, column in columns.items()
  }


def is_tied(scores: np.ndarray, *, first: int = 5) -> bool:
  """Whether the best `first` of scores `[C]` are equal, of more than `first`."""
  return len(scores) > first and np.ptp(np.partition(scores, first - 1)[:first]) == 0
