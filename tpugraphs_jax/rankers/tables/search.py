"""The configurations with the lowest sum of costs, over all choices of every group.

    cost(x) = sum over g of unary[g][x_g] + sum over (g, h) of pairs[g, h][x_g, x_h]

Groups are eliminated one after the other. A group is replaced by a table over its neighbours, with
the lowest cost of the group for every choice of the neighbours. For groups with one or two
neighbours, solvers of partitioned boolean quadratic problems call this a reduction of degree 1 or 2
(Scholz and Eckstein, LCTES 2002). It is exact while tables fit. A table that does not fit is split
into smaller tables, which give a lower bound of the cost (mini-buckets: Dechter and Rish, JACM
2003).

Then groups are assigned in reverse order, with a beam of the best partial choices. The tables bound
the cost of the remaining groups from below. Without split tables the bound is exact, and the n best
partial choices lead to the n best choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

TABLE_LIMIT = 1 << 18
BEAM = 128
RESTARTS = 8
_FIRST_PENALTY = 0.9  # share of the largest gain, so that the group with this gain changes
_RESTART_SHARE = 0.1  # share of groups with a random choice at a restart

Pairs = Mapping[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Assignments:
  """Distinct choices of all groups, cheapest first (from `propose_near`, nearest first)."""

  choice: np.ndarray  # [n, groups] int64
  cost: np.ndarray  # [n] float64
  bound: float  # lower bound of the cost of any choice
  is_exact: bool  # the proposals are the n cheapest choices, up to ties

  @property
  def gap(self) -> float:
    """Upper bound of the cheapest proposal's cost minus the optimum."""
    return max(float(self.cost.min()) - self.bound, 0.0)


class _Table(NamedTuple):
  """Costs with an axis per group of `groups`, in this order."""

  groups: tuple[int, ...]
  cost: np.ndarray

  def at(self, choice: np.ndarray) -> np.ndarray:
    """Costs `[n]` of choices `[n, groups]` of all groups."""
    return self.cost[tuple(choice[:, g] for g in self.groups)]


class _Bucket(NamedTuple):
  """One eliminated group."""

  group: int
  tables: list[_Table]  # tables over the group and groups eliminated later
  messages: list[_Table]  # sums of tables, minimised over the choices of the group


def propose(
  unary: Sequence[np.ndarray],
  pairs: Pairs,
  n: int,
  *,
  table_limit: int = TABLE_LIMIT,
  beam: int = BEAM,
  restarts: int = RESTARTS,
  seed: int = 0,
) -> Assignments:
  """The n cheapest assignments of a choice to every group; fewer if there are fewer.

  Args:
    unary: costs `[choices]` of each group.
    pairs: costs `[choices of g, choices of h]` by (g, h); for (g, g) the diagonal is used.
    n: number of assignments.
    table_limit: largest number of entries of a table. Larger tables are split, and the result is
      not exact.
    beam: number of partial choices, at least n, if the result is not exact.
    restarts: number of descents from randomly changed choices, if the result is not exact.
    seed: seed of random changes.

  Raises:
    ValueError: n is below 1, or costs are not finite.
  """
  if n < 1:
    raise ValueError(f"n is {n}, expected at least 1")
  unary, pairs = _checked(unary, pairs)
  buckets, bound = _eliminate(unary, pairs, table_limit)
  is_exact = all(len(bucket.messages) <= 1 for bucket in buckets)
  choice = _assign(buckets, bound, len(unary), n if is_exact else max(n, beam))
  if not is_exact:
    choice = _improved(unary, pairs, choice, restarts, np.random.default_rng(seed))
  cost = total(unary, pairs, choice)
  first = np.argsort(cost, kind="stable")[:n]
  return Assignments(choice[first], cost[first], bound, is_exact)


def propose_near(
  unary: Sequence[np.ndarray], pairs: Pairs, start: np.ndarray, n: int
) -> Assignments:
  """Up to n choices between a trusted choice and the cheapest.

  Predicted costs have errors, and the cheapest of many choices is often one whose cost is predicted
  too low. Therefore a penalty is added for every group that differs from the trusted choice, and it
  is halved for each proposal. With the first penalty only the largest saving is worth a change. The
  last penalty, 0, gives the cheapest choice. The next cheapest choices fill up the number.

  Args:
    unary: as in `propose`.
    pairs: as in `propose`.
    start: `[groups]` int, the trusted choice, for instance the default of the compiler.
    n: number of distinct choices.

  Returns:
    Choices by decreasing penalty, from few changes to many, then the next cheapest. The trusted
    choice is left out unless it is the only one. `bound` and `is_exact` are from `propose`.

  Raises:
    ValueError: as in `propose`.
  """
  cheapest = propose(unary, pairs, n)
  gain = _largest_gain(unary, pairs, start)
  is_change = [np.arange(len(costs)) != choice for costs, choice in zip(unary, start)]
  choices: list[np.ndarray] = []
  for penalty in gain * _FIRST_PENALTY * 2.0 ** -np.arange(n - 1) if gain > 0 else ():
    with_penalty = [costs + penalty * change for costs, change in zip(unary, is_change)]
    choices += list(propose(with_penalty, pairs, 1).choice)
  choice = np.stack([*choices, *cheapest.choice])
  _, first = np.unique(choice, axis=0, return_index=True)
  choice = choice[np.sort(first)]
  choice = choice[(choice != start).any(axis=1)] if len(choice) > 1 else choice
  return Assignments(choice[:n], total(unary, pairs, choice[:n]), cheapest.bound, cheapest.is_exact)


def _largest_gain(unary, pairs, start: np.ndarray) -> float:
  """The largest saving by a change of one group; 0 if no change saves anything."""
  sums = [np.array(costs, np.float64) for costs in unary]
  for (g, h), costs in pairs.items():
    if g == h:
      sums[g] += np.diagonal(costs)
      continue
    sums[g] += costs[:, start[h]]
    sums[h] += costs[start[g]]
  return max([0.0, *(costs[choice] - costs.min() for costs, choice in zip(sums, start))])


def unpad_tables(
  counts: np.ndarray, columns: np.ndarray, unary_cost: np.ndarray, pair_cost: np.ndarray
) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
  """Arguments of `propose` from padded tables.

  Args:
    counts: `[B]` numbers of choices.
    columns: `[Q, 2]` pairs of groups.
    unary_cost: `[B, R]` costs, with padding after the first `counts` entries of a row.
    pair_cost: `[Q, R, R]` costs with the same padding; empty without pairs.
  """
  unary = [costs[:count] for costs, count in zip(unary_cost, counts)]
  columns = columns.tolist() if len(pair_cost) else []
  pairs = {(g, h): costs[: counts[g], : counts[h]] for (g, h), costs in zip(columns, pair_cost)}
  return unary, pairs


def total(unary: Sequence[np.ndarray], pairs: Pairs, choice: np.ndarray) -> np.ndarray:
  """Costs `[n]` float64 of choices `[n, groups]`."""
  cost = np.zeros(len(choice))
  for g, costs in enumerate(unary):
    cost += np.asarray(costs, np.float64)[choice[:, g]]
  for (g, h), costs in pairs.items():
    cost += np.asarray(costs, np.float64)[choice[:, g], choice[:, h]]
  return cost


def _checked(unary, pairs) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
  """Costs in float64, with pairs g < h; costs of pairs (g, g) are added to `unary`."""
  unary = [np.array(costs, np.float64) for costs in unary]
  ascending: dict[tuple[int, int], np.ndarray] = {}
  for (g, h), costs in pairs.items():
    costs = np.asarray(costs, np.float64)
    if g == h:
      unary[g] += np.diagonal(costs)
      continue
    key, costs = ((g, h), costs) if g < h else ((h, g), costs.T)
    ascending[key] = ascending.get(key, 0) + costs
  if not all(np.isfinite(costs).all() for costs in (*unary, *ascending.values())):
    raise ValueError("costs are not finite: give a choice that is not allowed a large cost")
  return unary, ascending


def _eliminate(unary, pairs, limit: int) -> tuple[list[_Bucket], float]:
  """Eliminates groups by size of their new table, smallest first; returns buckets and bound."""
  sizes = np.array([len(costs) for costs in unary])
  neighbours: list[set[int]] = [set() for _ in unary]
  tables: list[list[_Table]] = [[_Table((g,), costs)] for g, costs in enumerate(unary)]
  for (g, h), costs in pairs.items():
    neighbours[g].add(h)
    neighbours[h].add(g)
    table = _Table((g, h), costs)
    tables[g].append(table)
    tables[h].append(table)
  log_size = lambda g: np.log(sizes[list(neighbours[g])]).sum()
  weight = {g: log_size(g) for g in range(len(unary))}
  buckets, bound = [], 0.0
  while weight:
    group = min(weight, key=weight.__getitem__)
    del weight[group]
    bucket = _bucket(group, tables[group], limit)
    buckets.append(bucket)
    for table in tables[group]:
      for neighbour in set(table.groups) - {group}:
        tables[neighbour] = [t for t in tables[neighbour] if t is not table]
    for message in bucket.messages:
      bound += float(message.cost) if not message.groups else 0.0
      for neighbour in message.groups:
        tables[neighbour].append(message)
    for neighbour in neighbours[group]:
      neighbours[neighbour] = {g for table in tables[neighbour] for g in table.groups} - {neighbour}
      weight[neighbour] = log_size(neighbour)
  return buckets, bound


def _bucket(group: int, tables: list[_Table], limit: int) -> _Bucket:
  """Adds tables, largest first, into sums within the limit, and minimises over the group."""
  sizes = {g: n for table in tables for g, n in zip(table.groups, table.cost.shape)}
  parts: list[tuple[set[int], list[_Table]]] = []
  for table in sorted(tables, key=lambda t: -t.cost.size):
    for groups, members in parts:
      if np.prod([float(sizes[g]) for g in groups | set(table.groups)]) <= limit:
        groups |= set(table.groups)
        members.append(table)
        break
    else:
      parts.append((set(table.groups), [table]))
  messages = []
  for groups, members in parts:
    order = (group, *sorted(groups - {group}))
    costs = functools.reduce(np.add, [_with_axes(table, order) for table in members])
    messages.append(_Table(order[1:], np.asarray(costs.min(axis=0))))
  return _Bucket(group, tables, messages)


def _with_axes(table: _Table, order: tuple[int, ...]) -> np.ndarray:
  """Costs with an axis per group of `order`, of size 1 for groups that the table lacks."""
  axes = sorted(range(len(table.groups)), key=lambda i: order.index(table.groups[i]))
  shape = [table.cost.shape[table.groups.index(g)] if g in table.groups else 1 for g in order]
  return table.cost.transpose(axes).reshape(shape)


def _assign(buckets: Sequence[_Bucket], bound: float, groups: int, beam: int) -> np.ndarray:
  """Assigns groups in reverse order of elimination, with a beam: `[<= beam, groups]`."""
  choice, estimate = np.zeros((1, groups), np.int64), np.array([bound])
  for bucket in reversed(buckets):
    # The cost of each choice of the group replaces the minimum over its choices.
    size = next(table for table in bucket.tables if table.groups == (bucket.group,)).cost.size
    choice = np.repeat(choice, size, axis=0)
    choice[:, bucket.group] = np.tile(np.arange(size), len(estimate))
    value = np.repeat(estimate, size)
    value += sum(table.at(choice) for table in bucket.tables)
    value -= sum(np.broadcast_to(message.at(choice), value.shape) for message in bucket.messages)
    best = np.argsort(value, kind="stable")[:beam]
    choice, estimate = choice[best], value[best]
  return choice


def _improved(unary, pairs, choice: np.ndarray, restarts: int, rng) -> np.ndarray:
  """Improves choices by descents, also from random changes: distinct choices `[n, groups]`."""
  neighbours: list[list[Any]] = [[] for _ in unary]
  for (g, h), costs in pairs.items():
    neighbours[g].append((h, costs.T))
    neighbours[h].append((g, costs))
  pool = np.unique(np.concatenate([choice, _descend(unary, neighbours, choice)]), axis=0)
  for _ in range(restarts):
    best = pool[np.argsort(total(unary, pairs, pool), kind="stable")[: len(choice)]]
    random = np.stack([rng.integers(0, len(costs), len(best)) for costs in unary], axis=1)
    start = np.where(rng.random(best.shape) < _RESTART_SHARE, random, best)
    pool = np.unique(np.concatenate([best, _descend(unary, neighbours, start)]), axis=0)
  return pool


def _descend(unary, neighbours, choice: np.ndarray) -> np.ndarray:
  """Coordinate descent: sets each group to its cheapest choice, until no group changes."""
  choice, changed = choice.copy(), True
  while changed:
    changed = False
    for g, costs in enumerate(unary):
      of_pairs = (table[choice[:, h]] for h, table in neighbours[g])
      value = costs[None] + sum(of_pairs, np.zeros((len(choice), len(costs))))
      best = value.argmin(axis=1)
      # A change must save something: equal costs would alternate forever.
      old, new = np.take_along_axis(value, np.stack([choice[:, g], best], axis=1), axis=1).T
      better = new < old - 1e-12 * np.abs(old)
      changed |= bool(better.any())
      choice[better, g] = best[better]
  return choice
