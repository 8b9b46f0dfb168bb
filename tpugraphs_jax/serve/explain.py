"""Explanations of scores, and proposals of configurations that were never measured."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING

import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs

if TYPE_CHECKING:
  from tpugraphs_jax.serve.ranker import Ranker


def explain(
    ranker: Ranker, graph: OpGraph, config: int, *, against: int | None = None
) -> list[Any]:
  """How much each choice of a configuration adds to its score, largest first.

  Score tables give the charges that add up to the score. For any other ranker the choices are
  exchanged one by one (`exchanges`).

  Args:
    ranker: trained.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of a configuration to compare it with: then only choices in which the two
      differ. Exchanges are with the best-ranked one unless given.

  Raises:
    ValueError: a number that the graph does not have.
  """
  check_numbers(graph, config, against)
  if ranker.family.can_propose:
    return ranker.family.charges(ranker.params, ranker.prepare(graph), config, against=against)
  return exchanges(lambda one: ranker.scores([one])[0], graph, config, against=against)


@dataclasses.dataclass(frozen=True, eq=False)
class Proposed:
  """Configurations that a score table finds cheapest among all choices of all groups.

  Attributes:
    graph: its configurations are the proposals, cheapest first (or nearest, see `propose`),
      without runtimes.
    scores: `[n]` float64, as the ranker's.
    gap: no choice at all scores lower than the cheapest of these by more; nan = unknown.
    is_exact: these are the n cheapest of all, ties aside.
  """

  graph: OpGraph
  scores: np.ndarray
  gap: float
  is_exact: bool


def propose(
    ranker: Ranker, graph: OpGraph, n: int = 10, *, near: int | None = None, **options: Any
) -> Proposed:
  """The n configurations with the lowest predicted cost, measured before or not.

  Every group may choose among the rows that the graph's configurations give it.

  Args:
    ranker: trained, with score tables.
    graph: with configurations.
    n: how many proposals; fewer where there are not so many choices.
    near: number of a configuration to trust, for instance the compiler's own. The proposals then
      lead from it to the cheapest of all, in more and more changes; see
      `rankers.tables.search.propose_near`.
    **options: of `rankers.tables.search.propose`.

  Raises:
    ValueError: the ranker has no table of costs, n is below 1, or the graph has no such number.
  """
  if not ranker.family.can_propose:
    raise ValueError(f"model {ranker.settings.model} has no table of costs: train one with "
                     "score tables (variant tables of configs/layout.py)")
  ranker.check(graph)
  check_numbers(graph, near)
  score = lambda rows: ranker.scores([_with_rows(graph, rows)])[0]
  rows, cost, gap, is_exact = ranker.family.cheapest(
      ranker.params, ranker.prepare(graph), n, near=near, score=score, **options)
  return Proposed(_with_rows(graph, rows), cost, gap, is_exact)


def _with_rows(graph: OpGraph, rows: np.ndarray) -> OpGraph:
  """The graph with unlabelled configurations that choose the rows `[n, groups]`."""
  configs = dataclasses.replace(
      graph.configs, group_row=rows.astype(graph.configs.group_row.dtype),
      runtime_ns=np.zeros(len(rows), np.int64))
  return dataclasses.replace(graph, configs=configs)


class Exchange(NamedTuple):
  """One choice of a configuration that differs from the one it is compared with."""

  nodes: tuple[int, ...]  # numbers of the configurable nodes that share the choice; empty for tiles
  choice: tuple[int, ...]  # layout row [18] of these nodes, or (column, value) of a tile
  instead: tuple[int, ...]  # the other configuration's row, or (column, value)
  score: float  # score with the choice minus score without it: above 0 = it costs time


def exchanges(
    scores: Callable[[OpGraph], np.ndarray], graph: OpGraph, config: int, *,
    against: int | None = None,
) -> list[Exchange]:
  """How much every choice of `config` adds to its score, largest first.

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
  check_numbers(graph, config, against)
  if against is None:
    against = int(np.argsort(scores(graph), kind="stable")[0])
  exchange = _exchange_rows if isinstance(graph.configs, LayoutConfigs) else _exchange_columns
  changed, parts = exchange(graph, config, against)
  if not parts:
    return []
  scored = scores(dataclasses.replace(graph, configs=changed)).astype(np.float64)
  rows = [Exchange(*part, float(scored[0] - one)) for part, one in zip(parts, scored[1:])]
  return sorted(rows, key=lambda row: -row.score)


def check_numbers(graph: OpGraph, *numbers: int | None) -> None:
  """Refuses (ValueError) numbers of configurations that a graph does not have; None passes."""
  for number in numbers:
    if number is not None and not 0 <= number < len(graph.configs):
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to "
                       f"{len(graph.configs) - 1}")


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
