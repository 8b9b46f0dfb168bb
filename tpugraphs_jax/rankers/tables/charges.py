"""Charges: the costs of nodes and pairs of nodes that add up to the score of a configuration.

The sum is exact. The cost of a group is split over its nodes, and the cost of a pair of groups over
the pairs of nodes between the two (`ScoreTables.node_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.columns import row_text
from tpugraphs_jax.rankers.tables.batches import PreparedTables
from tpugraphs_jax.rankers.tables.terms import Costs

_RED, _BLUE, _GREY = "#c0392b", "#2e6da4", "#9a9a9a"


class Charge(NamedTuple):
  """One cost of a configuration."""

  cost: float  # a part of the score; larger = slower
  nodes: tuple[int, ...]  # one configurable node; or two, and the node where they meet
  rows: tuple[tuple[int, ...], ...]  # layout row [18] of each configurable node
  before: float = 0.0  # the same cost of the other configuration in a comparison

  @property
  def is_pair(self) -> bool:
    return len(self.nodes) > 1

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
    if not self.is_pair:
      return f"{name(self.nodes[0])}: {row_text(self.rows[0])}"
    first, second, via = self.nodes
    texts = [row_text(row) for row in self.rows]
    at = "" if via == second else f" at {name(via)}"
    return f"{name(first)}: {texts[0]} -> {name(second)}: {texts[1]}{at}"


def charges(
  program: PreparedTables, costs: Costs, group_row: np.ndarray, other: np.ndarray | None = None
) -> list[Charge]:
  """The charges of a configuration; with `other` only charges that differ.

  Args:
    program: program prepared for the model.
    costs: costs of nodes `[K, R]`, and of pairs of nodes `[P, R, R]` with choices of the first and
      the second end. Sums over nodes are the costs of groups.
    group_row: `[B]` rows of the configuration.
    other: `[B]` rows of a configuration to compare with.

  Returns:
    Charges whose `cost - before` add up to the score, or to the difference of the two scores.

  Raises:
    ValueError: as in `terms.Terms.encode`.
  """
  rows = _charges(program, costs, group_row)
  if other is not None:
    both = zip(rows, _charges(program, costs, other))
    rows = [one._replace(before=two.cost) for one, two in both if one.rows != two.rows]
  return rows


def _charges(program: PreparedTables, costs: Costs, group_row: np.ndarray) -> list[Charge]:
  """All charges: nodes in the order of the file, then pairs."""
  group, nodes = program.choices.group, program.choices.node.tolist()
  choice = program.terms.encode(np.asarray(group_row)[None])[group, 0].astype(int)
  rows = list(map(tuple, program.configs.rows[np.asarray(group_row)[group]].tolist()))
  unary = np.asarray(costs.unary, np.float64)[np.arange(len(choice)), choice]
  result = [Charge(cost, (node,), (row,)) for cost, node, row in zip(unary.tolist(), nodes, rows)]
  if not len(costs.pair):
    return result
  index = dict(zip(nodes, range(len(nodes))))
  for i, (first, second, via) in enumerate(program.pairs.ends.tolist()):
    a, b = index[first], index[second]
    result.append(
      Charge(float(costs.pair[i, choice[a], choice[b]]), (first, second, via), (rows[a], rows[b]))
    )
  return result


def dot(rows: Sequence[Charge], *, names: Mapping[int, str] | None = None, top: int = 60) -> str:
  """The `top` charges with the largest absolute `change`, as a graph in Graphviz's language.

  Nodes are configurable nodes. Edges are pairs, from producer to consumer, or without an arrow
  where the two meet at a third node. The colour shows `change`: red above 0, blue below 0, stronger
  for larger values.

  Args:
    rows: charges from `charges`, or from `explain` of a ranker of this family.
    names: names of instructions by node, where known.
    top: number of charges.
  """
  name = lambda node: (names or {}).get(node, f"node {node}")
  rows = sorted(rows, key=lambda c: -abs(c.change))[:top]
  largest = max((abs(c.change) for c in rows), default=0.0) or 1.0
  lines = ["digraph charges {", "  rankdir=TB; node [shape=box, style=filled, fontsize=10];"]
  nodes = {node for charge in rows for node in charge.nodes[:2]}
  single = {charge.nodes[0]: charge for charge in rows if not charge.is_pair}
  for node in sorted(nodes):
    label, color = name(node), _GREY
    if node in single:
      charge = single[node]
      label += f"\\n{row_text(charge.rows[0])}\\n{charge.change:+.3f}"
      color = _color(charge, largest)
    lines.append(f"  n{node} [label={_quoted(label)}, fillcolor={_quoted(color)}];")
  for charge in rows:
    if charge.is_pair:
      first, second, via = charge.nodes
      arrow = "" if via == second else ", dir=none, style=dashed"
      lines.append(
        f"  n{first} -> n{second} [color={_quoted(_color(charge, largest))}, "
        f"label={_quoted(f'{charge.change:+.3f}')}{arrow}];"
      )
  return "\n".join([*lines, "}"]) + "\n"


def _color(charge: Charge, largest: float) -> str:
  change = charge.change
  strength = int(48 + 207 * abs(change) / largest)
  return f"{_RED if change > 0 else _BLUE}{strength:02x}"


def _quoted(text: str) -> str:
  return '"' + text.replace('"', "'") + '"'
