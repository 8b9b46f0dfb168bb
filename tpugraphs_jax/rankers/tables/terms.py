"""Terms of score tables: the choices of groups, and the pairs of groups with a cost.

A score table has a cost for every choice of a group of nodes (a unary term), and for every pair of
choices of two groups whose layouts meet (a pair term):

    choice of a group     0, 1, ... numbers the rows that the group has in any configuration
    configuration         a choice for every group
    column                a pair of groups, with a cost for every pair of choices

The score of a configuration is the sum of its costs. Nodes of a group have the same choice, and
their costs are added.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

from absl import logging
import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.rankers.tables import node_pairs

# Real groups have at most nine rows. Pair terms grow with the square of the number of choices.
MAX_CHOICES = 64
_BLOCK_CONFIGS = 4096  # configurations at a time
_BLOCK_CELLS = 1 << 18  # costs at a time; they fit into the cache of a core


class Costs(NamedTuple):
  """Costs without padding: of groups and columns, or of nodes and pairs of nodes."""

  unary: np.ndarray  # [n, R] float32 costs of choices
  pair: np.ndarray  # [m, R, R] float32 costs of pairs of choices; m = 0 without such costs
  rest: np.ndarray = np.zeros(())  # [] or [N] float32 costs of all that has no choice


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
  """The choices of one graph; B groups, P pairs of nodes, Q pairs of groups (columns).

  A group whose nodes meet each other has a column with itself, where both choices are equal.
  """

  pairs: node_pairs.NodePairs
  pair_column: np.ndarray  # [P] int32 column of each pair of nodes, -1 without a column
  is_turned: np.ndarray  # [P] bool: the first end is in the second group of its column
  columns: np.ndarray  # [Q, 2] int32 groups, first <= second, ascending
  row: np.ndarray  # [terms] int32 dictionary rows by group, ascending in each group
  row_start: np.ndarray  # [B + 1] int64 first term of each group

  @property
  def counts(self) -> np.ndarray:
    """Number of choices of each group, `[B]` int64."""
    return np.diff(self.row_start)

  @property
  def choices(self) -> int:
    """Largest number of choices of a group, R."""
    return int(self.counts.max(initial=1))

  @property
  def row_table(self) -> np.ndarray:
    """Dictionary row of each choice, `[B, R]` int32; -1 is padding."""
    table = np.full((len(self.row_start) - 1, self.choices), -1, np.int32)
    table[np.arange(self.choices) < self.counts[:, None]] = self.row
    return table

  def encode(self, group_row: np.ndarray) -> np.ndarray:
    """Maps rows `[C, B]` of configurations to choices `[B, C]` of the smallest dtype.

    Raises:
      ValueError: a row is not among the choices of its group.
    """
    codes = np.empty(group_row.shape[::-1], np.min_scalar_type(self.choices - 1))
    for block, code in self._blocks(group_row):
      codes[:, block] = code
    return codes

  def decode(self, code: np.ndarray) -> np.ndarray:
    """Maps choices `[B, C]` to rows `[C, B]` int32."""
    return np.take_along_axis(self.row_table, code.astype(np.intp), axis=1).T

  def total(self, group_row: np.ndarray, costs: Costs) -> np.ndarray:
    """The sum of the costs of each configuration, `[C]` float64, computed in blocks.

    Args:
      group_row: `[C, B]` rows.
      costs: costs of groups and columns.

    Raises:
      ValueError: as in `encode`.
    """
    total, width = np.full(len(group_row), costs.rest.sum(dtype=np.float64)), self.choices
    unary, pair, _ = map(np.ravel, costs)
    step = max(1, _BLOCK_CELLS // _BLOCK_CONFIGS)
    for block, code in self._blocks(group_row):
      start = width * np.arange(len(code), dtype=np.int32)[:, None]
      total[block] += unary[code + start].sum(axis=0, dtype=np.float64)
      for begin in range(0, len(self.columns) if len(pair) else 0, step):
        first, second = self.columns[begin : begin + step].T
        key = code[first] * np.int32(width)
        key += code[second]
        key += np.int32(width**2) * np.arange(len(first), dtype=np.int32)[:, None]
        cost = pair[begin * width**2 : (begin + step) * width**2]
        total[block] += cost[key].sum(axis=0, dtype=np.float64)
    return total

  def _blocks(self, group_row: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of configurations, each with its choices `[B, c]` int32."""
    groups = len(self.row_start) - 1
    choice_of = np.full((groups, int(self.row.max(initial=-1)) + 2), -1, np.int32)
    choice = np.arange(len(self.row)) - np.repeat(self.row_start[:-1], self.counts)
    choice_of[np.repeat(np.arange(groups), self.counts), self.row] = choice
    for start in range(0, len(group_row), _BLOCK_CONFIGS):
      block = slice(start, start + _BLOCK_CONFIGS)
      row = np.ascontiguousarray(group_row[block].T).astype(np.intp)
      code = choice_of[np.arange(groups)[:, None], np.minimum(row, choice_of.shape[1] - 1)]
      if (code < 0).any():
        group, config = np.argwhere(code < 0)[0]
        raise ValueError(
          f"configuration {start + config} gives group {group} the row {row[group, config]}, "
          "but the group has no such choice; compute the terms from all configurations to score"
        )
      yield block, code


def terms_of(
  graph: OpGraph[LayoutConfigs], *, hops: int = node_pairs.HOPS, max_choices: int = MAX_CHOICES
) -> Terms:
  """The choices that occur in the configurations of a graph, and their pairs.

  Groups with more than `max_choices` choices have no columns; a warning names the graph. The terms
  of 100,000 configurations of 500 groups take half a second.

  Args:
    graph: graph with the released node features and `LayoutConfigs`.
    hops: most edges between the two nodes of a pair.
    max_choices: most choices of a group in a column.
  """
  configs = graph.configs
  pairs = node_pairs.find_pairs(graph, hops=hops)
  group_row, groups = configs.group_row, configs.group_row.shape[1]
  occurs = np.zeros((groups, len(configs.rows)), bool)
  for start in range(0, len(group_row), _BLOCK_CONFIGS):
    occurs[np.arange(groups), group_row[start : start + _BLOCK_CONFIGS]] = True
  counts = occurs.sum(axis=1)
  ends = configs.node_group[pairs.ends].reshape(-1, 2)
  few = (counts[ends] <= max_choices).all(axis=1)
  if not few.all():
    logging.warning(
      f"{graph.name} has groups with up to {counts.max()} choices: {(~few).sum()} of {len(few)} "
      f"pairs of nodes are left out, because a group has more than {max_choices} choices"
    )
  columns, column = np.unique(np.sort(ends[few], axis=1), axis=0, return_inverse=True)
  pair_column = np.full(len(ends), -1, np.int32)
  pair_column[few] = column.ravel()
  return Terms(
    pairs,
    pair_column,
    ends[:, 0] > ends[:, 1],
    columns.astype(np.int32),
    np.nonzero(occurs)[1].astype(np.int32),
    np.concatenate([[0], np.cumsum(counts)]),
  )
