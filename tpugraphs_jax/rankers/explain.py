"""Explanations of scores, and proposals of configurations that were never measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import operator
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.infra.console import Table

if TYPE_CHECKING:
  from tpugraphs_jax.rankers.tables.charges import Charge


class Explanation(list):
  """Choices of a configuration by how much each changes its score, the largest change first.

  The items are `rankers.tables.charges.Charge` of a score table, `Exchange` of any other ranker.
  Each has `change`, in units of the score, and `places`, the nodes to which the change belongs.

  Attributes:
    graph: with the configuration.
    config: its number.
    against: number of the configuration to compare with; None if none was given.
    times: of a model that predicts times, the time of the configuration and its error.
  """

  def __init__(
    self,
    rows: Iterable[Charge | Exchange],
    graph: OpGraph,
    config: int,
    against: int | None,
    times: str = "",
  ):
    super().__init__(sorted(rows, key=lambda row: -abs(row.change)))
    self.graph, self.config, self.against, self.times = graph, config, against, times

  def by_node(self) -> dict[int, float]:
    """The change of the score at each node; nodes that share a choice share its change."""
    result: dict[int, float] = {}
    for row in self:
      for node in row.places:
        result[node] = result.get(node, 0.0) + row.change / len(row.places)
    return result

  def table(self, *, names: Mapping[int, str] | None = None, top: int = 20) -> Table:
    """The first `top` choices, and the sum of all others.

    Args:
      names: names of nodes; the other nodes have the names of `OpGraph.node_name`.
      top: how many.
    """
    name = lambda node: (names or {}).get(node) or self.graph.node_name(node)
    place = lambda row: self.graph.node_place(row.places[0]) if row.places else ("", "", "")
    rows = [[f"{row.change:+.4f}", row.text(name), *place(row)] for row in self[:top]]
    if len(self) > top:
      rest = self[top:]
      rows.append([f"{sum(row.change for row in rest):+.4f}", f"{len(rest)} more", "", "", ""])
    return Table(["change", "choice", "shape", "scope", "line"], rows, self._title())

  def _title(self) -> str:
    comparison = "" if self.against is None else f" against configuration {self.against}"
    name = f"configuration {self.config} of {self.graph.name}{comparison}"
    if self.times:
      return f"predicted time of {name}: {self.times}; microseconds of {len(self)} operations"
    return f"score of {name}: {len(self)} choices, larger = slower"

  def __repr__(self) -> str:
    return f"<Explanation: {self._title()}>"

  def __str__(self) -> str:
    return str(self.table())

  def _repr_html_(self) -> str:
    return self.table()._repr_html_()


@dataclasses.dataclass(frozen=True, eq=False)
class Proposals:
  """Configurations with the lowest cost in a score table, over all choices of all groups.

  Attributes:
    graph: its configurations are the proposals, cheapest first (or nearest, see `propose`),
      without runtimes.
    scores: `[n]` float64, as from the ranker.
    gap: upper bound of the cheapest proposal's cost minus the optimum; nan = unknown.
    is_exact: the proposals are the n cheapest configurations, except for ties.
  """

  graph: OpGraph[LayoutConfigs]
  scores: np.ndarray
  gap: float
  is_exact: bool


def with_rows(graph: OpGraph[LayoutConfigs], rows: np.ndarray) -> OpGraph[LayoutConfigs]:
  """The graph with unlabelled configurations of the rows `[n, groups]`."""
  configs = dataclasses.replace(
    graph.configs,
    group_row=rows.astype(graph.configs.group_row.dtype),
    labels=np.zeros(len(rows), np.int64),
    kernels=None,
  )
  return dataclasses.replace(graph, configs=configs)


# Fields `places`, `choice` and `instead` of an `Exchange`.
_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Exchange(NamedTuple):
  """A choice in which two configurations differ."""

  places: tuple[int, ...]  # configurable nodes that share the choice; empty for tiles
  choice: tuple[int, ...]  # layout row [18] of these nodes, or (column, value) of a tile
  instead: tuple[int, ...]  # row, or (column, value), of the other configuration
  change: float  # score with the choice minus score with `instead`: above 0 = it costs time

  def text(self, name: Callable[[int], str]) -> str:
    """The choice and the other configuration's, with names of nodes."""
    if not self.places:
      (column, value), (_, replaced) = self.choice, self.instead
      return f"{columns.tile_name(column)}: {value} instead of {replaced}"
    texts = [columns.row_text(row) for row in (self.choice, self.instead)]
    more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
    return f"{name(self.places[0])}{more}: {' instead of '.join(texts)}"


def exchanges(
  scores: Callable[[OpGraph], np.ndarray],
  graph: OpGraph,
  config: int,
  *,
  against: int | None = None,
) -> list[Exchange]:
  """How much every choice of `config` changes its score.

  Each choice in which `config` differs from `against` is replaced alone, and the graph is scored
  again. Choices interact: the results need not add up to the difference of the two scores.

  Args:
    scores: function that returns the scores `[C]` float32 of a graph.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of a configuration to compare with; the best-ranked one unless given.
  """
  if against is None:
    against = int(np.argsort(scores(graph), kind="stable")[0])
  exchange = _exchange_rows if isinstance(graph.configs, LayoutConfigs) else _exchange_columns
  configs, parts = exchange(graph, config, against)
  if not parts:
    return []
  first, *exchanged = scores(dataclasses.replace(graph, configs=configs)).astype(np.float64)
  return [Exchange(*part, float(first - score)) for part, score in zip(parts, exchanged)]


def check_numbers(graph: OpGraph[TileConfigs | LayoutConfigs], *numbers: int | None) -> None:
  """Refuses (ValueError) numbers of configurations that a graph does not have; None passes."""
  last = len(graph.configs) - 1
  for number in numbers:
    if number is None:
      continue
    if not 0 <= operator.index(number) <= last:
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to {last}")


def _exchanged(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Where two rows `[n]` differ, and `first` before a copy of it for each of these places.

  A copy has the value of `second` at its place: `[places]` and `[1 + places, n]`.
  """
  differing = np.flatnonzero(first != second)
  rows = np.repeat(first[None], len(differing) + 1, axis=0)
  rows[np.arange(1, len(rows)), differing] = second[differing]
  return differing, rows


def _exchange_rows(
  graph: OpGraph[LayoutConfigs], config: int, against: int
) -> tuple[LayoutConfigs, list[_Part]]:
  """The configuration, then for each group that differs a copy with the row of `against`."""
  configs = graph.configs
  first, second = (np.asarray(configs.group_row[number]) for number in (config, against))
  groups, group_row = _exchanged(first, second)
  parts: list[_Part] = []
  for group in groups:
    places = graph.config_node[configs.node_group == group].tolist()
    choice, instead = configs.rows[[first[group], second[group]]].tolist()
    parts.append((tuple(places), tuple(choice), tuple(instead)))
  return with_rows(graph, group_row).configs, parts


def _exchange_columns(
  graph: OpGraph[TileConfigs], config: int, against: int
) -> tuple[TileConfigs, list[_Part]]:
  """The configuration, then for each column that differs a copy with the value of `against`."""
  first, second = graph.configs.config_feat[[config, against]]
  differing, feat = _exchanged(first, second)
  parts: list[_Part] = [((), (int(c), int(first[c])), (int(c), int(second[c]))) for c in differing]
  no_times = np.zeros(len(feat), np.int64)
  return TileConfigs(feat, no_times, no_times + 1), parts
