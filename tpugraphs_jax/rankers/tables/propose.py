"""What a trained score table is good for besides ranking: proposals, and exact charges."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.tables import charges as table_charges, search
from tpugraphs_jax.rankers.tables.batching import PreparedTables
from tpugraphs_jax.rankers.tables.charges import Charge, NodeCosts

# Searched for each proposal of a model whose scores are more than sums of tables.
_CANDIDATES = 50


@dataclasses.dataclass(frozen=True, eq=False)
class Proposed:
  """Configurations that a score table finds cheapest among all choices of all groups."""

  # Its configurations are the proposals, cheapest first (or nearest, see `propose`),
  # without runtimes.
  graph: OpGraph
  scores: np.ndarray  # [n] float64, as the ranker's
  # No choice at all scores lower than the cheapest of these by more; nan = unknown.
  gap: float
  is_exact: bool  # these are the n cheapest of all, ties aside


def propose(
    ranker: Any, graph: OpGraph, n: int = 10, *, near: int | None = None, **options: Any
) -> Proposed:
  """The n configurations with the lowest predicted cost, measured before or not.

  Every group may choose among the rows that the graph's configurations give it. Of a
  model with a residual, many more are searched by the sums of its tables; the n with the
  lowest scores are kept, cheapest first.

  Args:
    ranker: a `Ranker` whose model computes tables.
    graph: with configurations.
    n: how many proposals; fewer where there are not so many choices.
    near: number of a configuration to trust, for instance the compiler's own. The
      proposals then lead from it to the cheapest of all, in more and more changes; see
      `search.propose_near`.
    **options: of `search.propose`.

  Raises:
    ValueError: the ranker's model has no tables, n is below 1, or a number that the graph
      does not have.
  """
  _check(ranker)
  ranker.check(graph)
  _check_numbers(graph, near)
  program, residual = ranker.prepare(graph), ranker.sees.residual
  tables = ranker.scorer().tables(ranker.params, program)
  costs = search.of_tables(
      program.terms.counts, program.terms.columns, tables.unary, tables.pair)
  searched = n * _CANDIDATES if residual else n
  if near is None:
    found = search.propose(*costs, searched, **options)
  else:
    start = program.terms.encode(graph.configs.group_row[[near]])[:, 0].astype(int)
    found = search.propose_near(*costs, start, n, **options)
  rows = program.terms.decode(found.choice.T)
  if not residual:
    return Proposed(_with_rows(graph, rows), found.cost, found.gap, found.is_exact)
  (scores,) = ranker.scores([_with_rows(graph, rows)])
  first = np.argsort(scores, kind="stable")[:n]
  return Proposed(_with_rows(graph, rows[first]), scores[first].astype(float), np.nan, False)


def _with_rows(graph: OpGraph, rows: np.ndarray) -> OpGraph:
  """The graph with the configurations `[n, groups]`, none of them measured."""
  configs = dataclasses.replace(
      graph.configs, group_row=rows.astype(graph.configs.group_row.dtype),
      runtime_ns=np.zeros(len(rows), np.int64))
  return dataclasses.replace(graph, configs=configs, store=None)


def explain(
    ranker: Any, graph: OpGraph, config: int, *, against: int | None = None
) -> list[Charge]:
  """What the table charges a configuration for, largest first; the charges add up.

  Args:
    ranker: a `Ranker` whose model computes tables.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of a configuration to compare it with: then only charges in which
      the two differ.

  Raises:
    ValueError: the ranker's model has no tables, or a number that the graph does not have.
  """
  _check(ranker)
  _check_numbers(graph, config, against)
  program = ranker.prepare(graph)
  costs, rows = _node_costs(ranker, program), program.configs.group_row
  numbers = [config] if against is None else [config, against]
  if against is None:
    found = table_charges.charges(program, costs, rows[config])
  else:
    found = table_charges.difference(program, costs, rows[config], rows[against])
  if ranker.sees.residual:
    rest = ranker.scorer().residuals(ranker.params, program, np.array(numbers))
    found.append(Charge(float(rest[0]), (), (), before=float(rest[1]) if len(rest) > 1 else 0.0))
  return table_charges.sort(found)


def _check_numbers(graph: OpGraph, *numbers: int | None) -> None:
  for number in numbers:
    if number is not None and not 0 <= number < len(graph.configs):
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to "
                       f"{len(graph.configs) - 1}")


def _check(ranker: Any) -> None:
  if not ranker.sees.tables:
    raise ValueError(f"model {ranker.config['model']['name']} has no table of costs: train one with "
                     "score tables (variant tables of configs/layout.py)")


def _node_costs(ranker: Any, program: PreparedTables) -> NodeCosts:
  """Costs of every node and pair of nodes, without padding."""
  (budget,) = plan.choose_budgets([batching.total_sizes([program])])
  slate = Slate(program, np.arange(min(1, len(program.configs))), np.zeros(1, np.float32))
  batch = ranker.batcher.assemble([slate], budget, graphs=1, configs=1)
  apply = jax.jit(lambda params, batch: ranker.model.apply(
      {"params": params}, batch, method="node_tables"))
  unary, pair = apply(ranker.params, batch)
  choices = program.terms.choices
  nodes, pairs = len(program.choices.node), len(program.pairs.ends)
  return NodeCosts(
      np.asarray(unary)[:nodes, :choices],
      np.zeros((0, choices, choices)) if pair is None else
      np.asarray(pair)[:pairs, :choices, :choices])
