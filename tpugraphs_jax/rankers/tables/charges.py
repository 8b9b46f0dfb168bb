"""Charges: the costs of nodes and pairs of nodes that add up to the score of a configuration.

The sum is exact. The cost of a group is split over its nodes, and the cost of a pair of groups over
the pairs of nodes between the two (`ScoreTables.node_tables`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.columns import row_text
from tpugraphs_jax.rankers.tables.batches import PreparedTables
from tpugraphs_jax.rankers.tables.terms import Costs


class Charge(NamedTuple):
  """One cost of a configuration."""

  cost: float  # a part of the score; larger = slower
  nodes: tuple[int, ...]  # one node; or two configurable ones, and the node where they meet
  rows: tuple[tuple[int, ...], ...]  # layout row [18] of each configurable node
  before: float = 0.0  # the same cost of the other configuration in a comparison

  @property
  def change(self) -> float:
    """The summand of the score, or of the difference of two scores."""
    return self.cost - self.before

  @property
  def places(self) -> tuple[int, ...]:
    """The node of the charge; for a pair the node where the two meet."""
    return self.nodes[-1:]

  def text(self, name: Callable[[int], str]) -> str:
    """A description of the choices, with names of nodes."""
    if len(self.nodes) == 1:
      return ": ".join([name(self.nodes[0]), *map(row_text, self.rows)])
    first, second, via = self.nodes
    texts = [row_text(row) for row in self.rows]
    at = "" if via == second else f" at {name(via)}"
    return f"{name(first)}: {texts[0]} -> {name(second)}: {texts[1]}{at}"


def charges(
  program: PreparedTables, costs: Costs, group_row: np.ndarray, against: np.ndarray | None = None
) -> list[Charge]:
  """The charges of a configuration; with `against` only charges that differ.

  Args:
    program: program prepared for the model.
    costs: costs of nodes `[K, R]`, and of pairs of nodes `[P, R, R]` with choices of the first and
      the second end. Sums over nodes are the costs of groups. And costs of nodes without choices.
    group_row: `[B]` rows of the configuration.
    against: `[B]` rows of a configuration to compare with.

  Returns:
    Charges whose `cost - before` add up to the score, or to the difference of the two scores.

  Raises:
    ValueError: as in `terms.Terms.encode`.
  """
  rows = _charges(program, costs, group_row)
  if against is not None:
    both = zip(rows, _charges(program, costs, against))
    rows = [new._replace(before=old.cost) for new, old in both if new.rows != old.rows]
  return rows


def _charges(program: PreparedTables, costs: Costs, group_row: np.ndarray) -> list[Charge]:
  """All charges: nodes with choices, nodes without choices that cost something, and pairs."""
  group, nodes = program.choices.group, program.choices.node.tolist()
  choice = program.terms.encode(np.asarray(group_row)[None])[group, 0].astype(int)
  rows = list(map(tuple, program.configs.rows[np.asarray(group_row)[group]].tolist()))
  unary = np.asarray(costs.unary, np.float64)[np.arange(len(choice)), choice]
  result = [Charge(cost, (node,), (row,)) for cost, node, row in zip(unary.tolist(), nodes, rows)]
  rest = np.atleast_1d(costs.rest)
  result += [Charge(float(rest[node]), (int(node),), ()) for node in np.flatnonzero(rest)]
  if not len(costs.pair):
    return result
  index = dict(zip(nodes, range(len(nodes))))
  for i, (first, second, via) in enumerate(program.pairs.ends.tolist()):
    a, b = index[first], index[second]
    cost = float(costs.pair[i, choice[a], choice[b]])
    result.append(Charge(cost, (first, second, via), (rows[a], rows[b])))
  return result
