"""Where a config ranks worse: Kendall tau by size, configurations and opcodes of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from pathlib import Path

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.columns import opcode_names
from tpugraphs_jax.data import npz
from tpugraphs_jax.report.runs import RunGroup, RunRecord, ValidationGraph

_PARTS = 3  # of the graphs, by size and by number of configurations
_FEWEST = 3  # graphs with an opcode, and without it
_OPCODES = 5  # with the lowest Kendall tau
_MOST_FILES = 1000  # training files whose opcodes are read


def rows(group: RunGroup) -> list[tuple[str, int, float, float]]:
  """What some graphs have in common, their number, and the means of Kendall tau and slowdown1.

  Graphs without an order are left out. Empty with fewer than `2 * _PARTS` graphs.
  """
  graphs = [graph for graph in group.graphs if graph.name in group.taus]
  if len(graphs) < 2 * _PARTS:
    return []
  slowdowns = group.by_graph(lambda graph: graph.slowdowns[1])
  parts = _parts(graphs, "nodes", lambda graph: graph.nodes)
  parts |= _parts(graphs, "configurations", lambda graph: len(graph.scores))
  parts |= _by_opcode(group, [graph.name for graph in graphs])
  mean = lambda values, names: metrics.mean(values[name] for name in names)
  return [
    (title, len(names), mean(group.taus, names), mean(slowdowns, names))
    for title, names in parts.items()
  ]


def _parts(
  graphs: Sequence[ValidationGraph], unit: str, size: Callable[[ValidationGraph], int]
) -> dict[str, list[str]]:
  """Names of the graphs in parts of about equal numbers, by size; equal sizes stay together."""
  sizes = np.array([size(graph) for graph in graphs])
  bounds = np.quantile(sizes, np.arange(1, _PARTS) / _PARTS, method="lower")
  which = np.searchsorted(np.unique(bounds), sizes)
  result = {}
  for part in np.unique(which):
    least, most = sizes[which == part].min(), sizes[which == part].max()
    title = f"{least:,} {unit}" if least == most else f"{least:,} to {most:,} {unit}"
    result[title] = [graph.name for graph in itertools.compress(graphs, which == part)]
  return result


def _by_opcode(group: RunGroup, names: Sequence[str]) -> dict[str, list[str]]:
  """Names of the graphs with an opcode: those with the lowest tau, and those not in training."""
  run = group.runs[0]
  try:
    opcodes = {name: _opcodes(run.file_of(name)) for name in names}
  except (OSError, ValueError):  # the data are gone, in a bucket, or damaged
    return {}
  told = {}
  for code in sorted(set().union(*opcodes.values())):
    having = [name for name in names if code in opcodes[name]]
    if _FEWEST <= len(having) <= len(names) - _FEWEST:
      told[code] = having
  lowest = sorted(told, key=lambda code: metrics.mean(group.taus[name] for name in told[code]))
  result = {f"with {_name(code)}": told[code] for code in lowest[:_OPCODES]}
  # Every test fold has other training graphs.
  if not run.division and (known := _known_opcodes(run)):
    new = [name for name in names if opcodes[name] - known]
    result |= {"with an opcode that no training graph has": new} if new else {}
  return result


def _known_opcodes(run: RunRecord) -> set[int]:
  """Opcodes of the training graphs; empty where the files are gone, or too many to read."""
  try:
    paths = npz.split_files(run.data_root, run.collection, "train")
    return set().union(*map(_opcodes, paths)) if len(paths) <= _MOST_FILES else set()
  except (OSError, ValueError):
    return set()


def _opcodes(path: Path) -> set[int]:
  with npz.NpzArchive(path) as archive:
    return set(archive.read("node_opcode").tolist())


def _name(opcode: int) -> str:
  return opcode_names().get(opcode, str(opcode))
