"""The configurations with the lowest sum of costs, over all choices of every group.

    cost(x) = sum over g of unary[g][x_g] + sum over (g, h) of pairs[g, h][x_g, x_h]

Groups are eliminated one after the other. A table over the neighbours of a group replaces
the group: it holds the lowest cost that the group can have for every choice of the neighbours.
For groups with one or two neighbours, solvers of partitioned boolean quadratic problems call
this a reduction of degree 1 or 2 (Scholz and Eckstein, LCTES 2002). It is exact for any number
of neighbours whose table fits. A table that does not fit is cut into smaller ones, which
give a lower bound of the cost (mini-buckets: Dechter and Rish, JACM 2003).

Then the groups get their choices in the opposite order, and the best partial choices are
kept after each group. The tables bound the cost of the groups without a choice from below.
Where no table was cut the bound is the cost itself, and the n choices kept are the n best of
all.
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
_FIRST_CHARGE = 0.9  # of the largest gain: the group that gains most still changes
_KICKED = 0.1  # share of the groups whose choice is drawn anew at a restart

Pairs = Mapping[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Proposals:
  """Distinct choices of all groups, cheapest first (of `propose_near`, nearest first)."""

  choice: np.ndarray  # [n, groups] int64
  cost: np.ndarray  # [n] float64
  bound: float  # no choice costs less
  is_exact: bool  # these are the n cheapest of all, ties aside

  @property
  def gap(self) -> float:
    """How much cheaper than the cheapest here another choice could be, at most."""
    return max(float(self.cost.min()) - self.bound, 0.0)


class _Table(NamedTuple):
  """Costs over some groups: one axis for each, in this order."""

  groups: tuple[int, ...]
  cost: np.ndarray

  def at(self, choice: np.ndarray) -> np.ndarray:
    """Costs `[n]` of choices `[n, groups]` of all groups."""
    return self.cost[tuple(choice[:, g] for g in self.groups)]


class _Bucket(NamedTuple):
  """One eliminated group."""

  group: int
  tables: list[_Table]  # all that concern it and groups eliminated later
  messages: list[_Table]  # the least cost of parts of them over its choices


def propose(
    unary: Sequence[np.ndarray], pairs: Pairs, n: int, *, table_limit: int = TABLE_LIMIT,
    beam: int = BEAM, restarts: int = RESTARTS, seed: int = 0,
) -> Proposals:
  """The n cheapest choices, or as many as there are.

  Args:
    unary: per group the costs of its choices, `[choices]`.
    pairs: for (g, h) costs `[choices of g, choices of h]`; a group with itself counts
      where both agree.
    n: how many.
    table_limit: entries of the largest table. Where more are needed the result is not
      exact, and a lower bound is given with it.
    beam: partial choices kept where the result is not exact, at least n.
    restarts: how often the best found are then changed at random and improved again.
    seed: of these changes.

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
  return Proposals(choice[first], cost[first], bound, is_exact)


def propose_near(
    unary: Sequence[np.ndarray], pairs: Pairs, start: np.ndarray, n: int, **options: Any
) -> Proposals:
  """Up to n choices on the way from a trusted one to the cheapest of all.

  Predicted costs are wrong, and the cheapest of very many choices is often one whose cost
  is predicted too low. So every group pays a charge if its choice is not the trusted one,
  and the cheapest choice is searched under charges that are halved each time. Under the
  first charge the group changes whose change is predicted to save most; under the last,
  zero, the cheapest of all is found. The next best of all make up the number.

  Args:
    unary: as in `propose`.
    pairs: as in `propose`.
    start: `[groups]` int, the trusted choice, for instance the compiler's own.
    n: how many, with distinct choices.
    **options: of `propose`.

  Returns:
    As `propose`, but in the order of falling charges, so from few changes to many, then the
    next best. The trusted choice itself is left out, unless there is no other. `bound` and
    `is_exact` are of the cheapest of all.

  Raises:
    ValueError: as `propose`.
  """
  cheapest = propose(unary, pairs, n, **options)
  gain = _largest_gain(unary, pairs, start)
  found: list[np.ndarray] = []
  for charge in gain * _FIRST_CHARGE * 2.0 ** -np.arange(n - 1) if gain > 0 else ():
    charged = [costs + charge * (np.arange(len(costs)) != choice)
               for costs, choice in zip(unary, start)]
    found += list(propose(charged, pairs, 1, **options).choice)
  ways = np.stack([*found, *cheapest.choice])
  _, first = np.unique(ways, axis=0, return_index=True)
  kept = ways[np.sort(first)]
  kept = kept[(kept != start).any(axis=1)] if len(kept) > 1 else kept
  return Proposals(kept[:n], total(unary, pairs, kept[:n]), cheapest.bound, cheapest.is_exact)


def _largest_gain(unary, pairs, start: np.ndarray) -> float:
  """How much the cheapest change of one group saves; 0 if none saves anything."""
  around = [np.array(costs, np.float64) for costs in unary]
  for (g, h), costs in pairs.items():
    if g == h:
      around[g] += np.diagonal(costs)
      continue
    around[g] += costs[:, start[h]]
    around[h] += costs[start[g]]
  return max([0.0, *(costs[choice] - costs.min() for costs, choice in zip(around, start))])


def of_tables(
    counts: np.ndarray, columns: np.ndarray, unary_cost: np.ndarray, pair_cost: np.ndarray
) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
  """Arguments of `propose` from padded tables.

  Args:
    counts: `[B]` choices of each group.
    columns: `[Q, 2]` pairs of groups.
    unary_cost: `[B, R]`; the first `counts` entries of a row belong to choices.
    pair_cost: `[Q, R, R]` likewise; empty for none.
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
  """Float64 costs, pairs in ascending order and none of a group with itself."""
  unary = [np.array(costs, np.float64) for costs in unary]
  joined: dict[tuple[int, int], np.ndarray] = {}
  for (g, h), costs in pairs.items():
    costs = np.asarray(costs, np.float64)
    if g == h:
      unary[g] += np.diagonal(costs)
      continue
    key, costs = ((g, h), costs) if g < h else ((h, g), costs.T)
    joined[key] = joined.get(key, 0) + costs
  if not all(np.isfinite(costs).all() for costs in (*unary, *joined.values())):
    raise ValueError("costs are not finite: give a choice that is not allowed a large cost")
  return unary, joined


def _eliminate(unary, pairs, limit: int) -> tuple[list[_Bucket], float]:
  """Eliminates every group, that with the smallest new table first; the cost that is left."""
  sizes = np.array([len(costs) for costs in unary])
  around = [set() for _ in unary]
  tables: list[list[_Table]] = [[_Table((g,), costs)] for g, costs in enumerate(unary)]
  for (g, h), costs in pairs.items():
    around[g].add(h)
    around[h].add(g)
    table = _Table((g, h), costs)
    tables[g].append(table)
    tables[h].append(table)
  log_size = lambda g: np.log(sizes[list(around[g])]).sum()
  weight = {g: log_size(g) for g in range(len(unary))}
  buckets, bound = [], 0.0
  while weight:
    group = min(weight, key=weight.get)
    del weight[group]
    bucket = _bucket(group, tables[group], limit)
    buckets.append(bucket)
    for table in tables[group]:
      for other in set(table.groups) - {group}:
        tables[other] = [t for t in tables[other] if t is not table]
    for message in bucket.messages:
      bound += float(message.cost) if not message.groups else 0.0
      for other in message.groups:
        tables[other].append(message)
    for other in around[group]:
      around[other] = {g for table in tables[other] for g in table.groups} - {other}
      weight[other] = log_size(other)
  return buckets, bound


def _bucket(group: int, tables: list[_Table], limit: int) -> _Bucket:
  """Puts tables together while the result fits, largest first, and takes the minima."""
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
    joined = functools.reduce(np.add, [_spread(table, order) for table in members])
    messages.append(_Table(order[1:], np.asarray(joined.min(axis=0))))
  return _Bucket(group, tables, messages)


def _spread(table: _Table, order: tuple[int, ...]) -> np.ndarray:
  """The costs with an axis for each group of `order`, of size 1 where it has none."""
  axes = sorted(range(len(table.groups)), key=lambda i: order.index(table.groups[i]))
  shape = [table.cost.shape[table.groups.index(g)] if g in table.groups else 1 for g in order]
  return table.cost.transpose(axes).reshape(shape)


def _assign(buckets: Sequence[_Bucket], bound: float, groups: int, beam: int) -> np.ndarray:
  """Choices of all groups `[n, groups]`, the last eliminated first; at most `beam` are kept."""
  choice, estimate = np.zeros((1, groups), np.int64), np.array([bound])
  for bucket in reversed(buckets):
    # The cost of the group with each choice, in place of its least possible cost.
    size = next(table for table in bucket.tables if table.groups == (bucket.group,)).cost.size
    tried = np.repeat(choice, size, axis=0)
    tried[:, bucket.group] = np.tile(np.arange(size), len(choice))
    value = np.repeat(estimate, size)
    value += sum(table.at(tried) for table in bucket.tables)
    value -= sum(np.broadcast_to(message.at(tried), value.shape) for message in bucket.messages)
    kept = np.argsort(value, kind="stable")[:beam]
    choice, estimate = tried[kept], value[kept]
  return choice


def _improved(unary, pairs, choice: np.ndarray, restarts: int, rng) -> np.ndarray:
  """Distinct choices after descents from the given ones and from changed copies, `[n, groups]`."""
  beside = [[] for _ in unary]
  for (g, h), costs in pairs.items():
    beside[g].append((h, costs.T))
    beside[h].append((g, costs))
  pool = np.unique(np.concatenate([choice, _descend(unary, beside, choice)]), axis=0)
  for _ in range(restarts):
    best = pool[np.argsort(total(unary, pairs, pool), kind="stable")[: len(choice)]]
    drawn = np.stack([rng.integers(0, len(costs), len(best)) for costs in unary], axis=1)
    kicked = np.where(rng.random(best.shape) < _KICKED, drawn, best)
    pool = np.unique(np.concatenate([best, _descend(unary, beside, kicked)]), axis=0)
  return pool


def _descend(unary, beside, choice: np.ndarray) -> np.ndarray:
  """Gives one group after the other its cheapest choice until none changes."""
  choice, changed = choice.copy(), True
  while changed:
    changed = False
    for g, costs in enumerate(unary):
      given = costs[None] + sum(
          (table[choice[:, h]] for h, table in beside[g]), np.zeros((len(choice), len(costs))))
      best = given.argmin(axis=1)
      # A change must gain something, or equal costs would go round for ever.
      gain = np.take_along_axis(given, np.stack([choice[:, g], best], axis=1), axis=1)
      better = gain[:, 1] < gain[:, 0] - 1e-12 * np.abs(gain[:, 0])
      changed |= bool(better.any())
      choice[better, g] = best[better]
  return choice
