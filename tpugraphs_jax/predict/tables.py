"""What a trained score table is good for besides ranking: proposals, and exact charges."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from tpugraphs_jax.data import batching, buckets
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.data.table_batching import PreparedTables
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.predict import search, table_charges
from tpugraphs_jax.predict.table_charges import Charge, NodeCosts


@dataclasses.dataclass(frozen=True, eq=False)
class Proposed:
  """Configurations that a score table finds cheapest among all choices of all groups."""

  graph: OpGraph  # its configurations are the proposals, cheapest first, without runtimes
  scores: np.ndarray  # [n] float64, as the ranker's
  gap: float  # no choice at all scores lower than the first by more than this
  is_exact: bool  # these are the n cheapest of all, ties aside


def propose(ranker: Any, graph: OpGraph, n: int = 10, **options: Any) -> Proposed:
  """The n configurations with the lowest predicted cost, measured before or not.

  Every group may choose among the rows that the graph's configurations give it.

  Args:
    ranker: a `Ranker` whose model computes tables.
    graph: with configurations.
    n: how many proposals; fewer where there are not so many choices.
    **options: of `search.propose`.

  Raises:
    ValueError: the ranker's model has no tables, or n is below 1.
  """
  _check(ranker)
  ranker.check(graph)
  program = ranker.prepare(graph)
  tables = ranker.scorer().tables(ranker.params, program)
  found = search.propose(
      *search.of_tables(program.terms.counts, program.terms.columns, tables.unary, tables.pair),
      n, **options)
  rows = program.terms.decode(found.choice.T)
  configs = dataclasses.replace(
      graph.configs, group_row=rows.astype(graph.configs.group_row.dtype),
      runtime_ns=np.zeros(len(rows), np.int64))
  return Proposed(dataclasses.replace(graph, configs=configs, store=None), found.cost, found.gap,
                  found.is_exact)


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
  for number in (config, against):
    if number is not None and not 0 <= number < len(graph.configs):
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to "
                       f"{len(graph.configs) - 1}")
  program = ranker.prepare(graph)
  costs, rows = _node_costs(ranker, program), program.configs.group_row
  if against is None:
    return table_charges.charges(program, costs, rows[config])
  return table_charges.difference(program, costs, rows[config], rows[against])


def _check(ranker: Any) -> None:
  if not ranker.sees.tables:
    raise ValueError(f"model {ranker.config['model']['name']} has no table of costs: train one with "
                     "score tables (variant tables of configs/layout.py)")


def _node_costs(ranker: Any, program: PreparedTables) -> NodeCosts:
  """Costs of every node and pair of nodes, without padding."""
  (budget,) = buckets.choose_budgets([batching.total_sizes([program])])
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
