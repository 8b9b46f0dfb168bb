"""What a score owes to each choice: exchange one choice at a time and score again.

Works for every ranker, because it needs scores alone.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs


class Charge(NamedTuple):
  """One choice of a configuration that differs from the one it is compared with."""

  nodes: tuple[int, ...]  # numbers of the configurable nodes that share the choice; empty for tiles
  choice: tuple[int, ...]  # layout row [18] of these nodes, or (column, value) of a tile
  instead: tuple[int, ...]  # what the other configuration has there
  score: float  # score with the choice minus score without it: above 0 = it costs time


def charges(
    scores: Callable[[OpGraph], np.ndarray], graph: OpGraph, config: int, *,
    against: int | None = None,
) -> list[Charge]:
  """What every choice of `config` adds to its score, largest first.

  Each choice in which `config` differs from `against` is exchanged for the other's,
  alone, and the graph is scored again. Charges need not add up to the difference of
  the two scores: choices act on each other.

  Args:
    scores: `[C]` float32 of all configurations of a graph.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of the configuration it is compared with; the best-ranked one
      unless given.

  Raises:
    ValueError: a number that the graph does not have.
  """
  count = len(graph.configs)
  for number in (config, against):
    if number is not None and not 0 <= number < count:
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to {count - 1}")
  if against is None:
    against = int(np.argsort(scores(graph), kind="stable")[0])
  exchange = _exchange_rows if isinstance(graph.configs, LayoutConfigs) else _exchange_columns
  changed, parts = exchange(graph, config, against)
  if not parts:
    return []
  found = scores(dataclasses.replace(graph, configs=changed)).astype(np.float64)
  rows = [Charge(*part, float(found[0] - one)) for part, one in zip(parts, found[1:])]
  return sorted(rows, key=lambda row: -row.score)


def _exchange_rows(graph: OpGraph, config: int, against: int):
  """The configuration itself, then one per group that differs, with the other's row there."""
  configs = graph.configs
  own, other = (np.asarray(configs.group_row[number]) for number in (config, against))
  groups = np.flatnonzero(own != other)
  group_row = np.repeat(own[None], len(groups) + 1, axis=0)
  group_row[np.arange(1, len(groups) + 1), groups] = other[groups]
  parts = [
      (tuple(graph.config_node[configs.node_group == group].tolist()),
       tuple(configs.rows[own[group]].tolist()), tuple(configs.rows[other[group]].tolist()))
      for group in groups]
  changed = dataclasses.replace(
      configs, group_row=group_row, runtime_ns=np.zeros(len(group_row), np.int64))
  return changed, parts


def _exchange_columns(graph: OpGraph, config: int, against: int):
  """The configuration itself, then one per column that differs, with the other's value."""
  configs = graph.configs
  own, other = configs.config_feat[config], configs.config_feat[against]
  columns = np.flatnonzero(own != other)
  feat = np.repeat(own[None], len(columns) + 1, axis=0)
  feat[np.arange(1, len(columns) + 1), columns] = other[columns]
  parts = [((), (int(c), int(own[c])), (int(c), int(other[c]))) for c in columns]
  some = np.zeros(len(feat), np.int64)
  return TileConfigs(feat, some, some + 1), parts
