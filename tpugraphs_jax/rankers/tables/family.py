"""The family of score tables: the network runs once per program, scores are looked up.

Devices compute the tables of a program. The host sums entries of tables and searches for cheap
configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from tpugraphs_jax.data import plan, reduction
from tpugraphs_jax.data.batching import Budget, Slate
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.family import Family
from tpugraphs_jax.rankers.scorer import Encoder
from tpugraphs_jax.rankers.tables import batches, charges, search, terms
from tpugraphs_jax.rankers.tables.batches import PreparedTables, TableBatch
from tpugraphs_jax.rankers.tables.charges import Charge
from tpugraphs_jax.rankers.tables.terms import Costs


class ChoicesFamily(Family):
  """Programs with the choices of their groups, for networks such as `TimeSAGE`.

  Besides `embed` and `score` the network has:
    pair_hops: most edges between two nodes with a pair cost.
    tile_padding: whether nodes and choices have features of the padding to tiles of 8 x 128, a
      TPU's registers.
    choice_features: `(graph, node [U], row [U]) -> [U, F]`.
  """

  def check(self) -> None:
    super().check()
    is_segmented = self.config.segments is not None
    if self.config.batch.config_chunk or is_segmented:
      field = "segments" if is_segmented else "batch.config_chunk"
      raise ValueError(
        f"{field} does not apply to this model, which computes a program once for "
        "all configurations: train on whole graphs with batch.config_chunk=0"
      )
    data: Any = self.config.data
    if self.network.predicts_kernels and (data.graph_reduction, data.virtual_node) != ("none",) * 2:
      raise ValueError(
        "this model predicts times of the kernels of a whole program: set data.graph_reduction and "
        "data.virtual_node to none"
      )

  # Batches.

  def prepare(self, graph: OpGraph[LayoutConfigs], feat: np.ndarray) -> PreparedTables:
    """A program with the terms of its configurations; see `Family.prepare`."""
    reduced, data = self.reduce(graph), self.config.data
    # Layouts do not meet at virtual nodes: pairs are found without them.
    real = reduced
    if data.virtual_node != "none":
      real = reduction.reduce_graph(graph, dataclasses.replace(data, virtual_node="none"))
    return batches.prepare(
      reduced.graph,
      reduced.rows(feat),
      terms.terms_of(real.graph, hops=self.network.pair_hops),
      slots=self.slots,
      tiling=self.network.tile_padding,
      describe=self.network.choice_features,
      has_kernels=self.network.predicts_kernels,
    )

  def assemble(
    self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> TableBatch:
    """A padded batch; see `batches.assemble`."""
    return batches.assemble(slates, budget, graphs=graphs, configs=configs)

  # Times of kernels.

  def kernel_times(
    self, params: optax.Params, programs: Sequence[PreparedTables]
  ) -> list[np.ndarray]:
    """Predicted times `[C, D]` float32 of the kernels of each program in each configuration.

    For a network with `predicts_kernels`, and programs with the times of kernels, which tell the
    kernels of each configuration; 0 without such a kernel. All programs have one shape.
    """
    (budget,) = plan.choose_budgets([program.sizes for program in programs], max_budgets=1)
    configs, times = max(len(program.configs) for program in programs), []
    for program in programs:
      ids = np.arange(len(program.configs))
      slate = Slate(program, ids, np.zeros(len(ids), np.float32))
      batch = self.assemble([slate], budget, graphs=1, configs=configs)
      of_program = np.asarray(self._kernel_times(params, batch))
      times.append(of_program[: program.sizes["kernels"], : len(ids)].T)
    return times

  @functools.cached_property
  def _kernel_times(self) -> Callable[[optax.Params, TableBatch], jax.Array]:
    """The method `kernels` of the network; compiled once for each shape."""
    times = functools.partial(self.network.apply, method="kernels")
    return jax.jit(lambda params, batch: times({"params": params}, batch))


class TablesFamily(ChoicesFamily):
  """Programs, for networks that price choices, such as `ScoreTables`.

  Besides what `ChoicesFamily` asks for, the network has:
    tables(batch): costs `[B, R]` of choices, `[Q, R, R]` of pairs or None, `[G]` of the rest.
    node_tables(batch): the summands of `tables`, `[K, R]` of nodes, `[P, R, R]` of pairs of
      nodes or None, `[N]` of nodes without choices.
  """

  # Scores.

  @functools.cached_property
  def encoder(self) -> Encoder:
    """Computes the padded tables of a program."""

    def tables(params, batch):
      made: Any = self.network.apply({"params": params}, batch, method="tables")
      unary, pair, rest = made
      return jax.tree.map(lambda table: table[None], (unary, pair, rest[0]))  # one program

    return Encoder(parallel.pmap(tables, local=True), self.assemble, graphs=1, configs=0)

  def run_network(
    self, params: optax.Params, graphs: Sequence[PreparedTables], config_ids: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores `[n]` float32 of each program; see `Family.run_network`."""
    tables = self.tables(params, graphs)
    return [
      graph.terms.total(graph.configs.group_row[ids], costs).astype(np.float32)
      for graph, ids, costs in zip(graphs, config_ids, tables)
    ]

  def tables(self, params: optax.Params, graphs: Sequence[PreparedTables]) -> list[Costs]:
    """The costs of groups and columns of each program."""
    nothing = [np.zeros(0, np.int64)] * len(graphs)
    outputs = self.encoder(params, graphs, nothing)
    return [
      _cut(graph.sizes, "groups", "columns", *output) for graph, output in zip(graphs, outputs)
    ]

  # Explanations and proposals.

  def charges(
    self, params: optax.Params, program: PreparedTables, config: int, *, against: int | None = None
  ) -> list[Charge]:
    """The costs that add up to the score of a configuration.

    Args:
      params: parameters of the network.
      program: program with configurations.
      config: number of the configuration to explain.
      against: number of a configuration to compare with; only charges with different choices are
        returned.
    """
    numbers = [config] if against is None else [config, against]
    costs = self._node_costs(params, program)
    return charges.charges(program, costs, *program.configs.group_row[numbers])

  def cheapest(
    self, params: optax.Params, program: PreparedTables, n: int, *, near: int | None = None
  ) -> tuple[np.ndarray, np.ndarray, float, bool]:
    """The configurations with the lowest predicted cost over all choices of all groups.

    Args:
      params: parameters of the network.
      program: program whose configurations define the choices of every group.
      n: number of configurations.
      near: number of the configuration that `search.propose_near` starts from; None calls
        `search.propose`.

    Returns:
      Dictionary rows `[n, groups]`, costs `[n]` float64, and `gap` and `is_exact` as in
      `rankers.explain.Proposals`.

    Raises:
      ValueError: n is below 1.
    """
    (tables,) = self.tables(params, [program])
    costs = search.unpad_tables(
      program.terms.counts, program.terms.columns, tables.unary, tables.pair
    )
    if near is None:
      best = search.propose(*costs, n)
    else:
      start = program.terms.encode(program.configs.group_row[[near]])[:, 0].astype(int)
      best = search.propose_near(*costs, start, n)
    cost = best.cost + tables.rest.sum()
    return program.terms.decode(best.choice.T), cost, best.gap, best.is_exact

  def _node_costs(self, params: optax.Params, program: PreparedTables) -> Costs:
    """Costs of every configurable node and pair of nodes."""
    (budget,) = plan.choose_budgets([program.sizes])
    slate = Slate(program, np.zeros(0, np.int64), np.zeros(0, np.float32))
    batch = self.assemble([slate], budget, graphs=1, configs=1)
    unary, pair, rest = jax.tree.map(np.asarray, self._node_tables(params, batch))
    rest = rest[: program.sizes["nodes"]]
    return _cut(program.sizes, "config_nodes", "pairs", unary, pair, rest)

  @functools.cached_property
  def _node_tables(
    self,
  ) -> Callable[[optax.Params, TableBatch], tuple[jax.Array, jax.Array, jax.Array]]:
    """Costs of nodes and of pairs of nodes of a padded program; compiled once for each shape."""
    tables = functools.partial(self.network.apply, method="node_tables")
    return jax.jit(lambda params, batch: tables({"params": params}, batch))


def _cut(
  sizes: Mapping[str, int],
  rows: str,
  columns: str,
  unary: np.ndarray,
  pair: np.ndarray | None,
  rest: np.ndarray,
) -> Costs:
  """Tables without padding; `rows` and `columns` are entries of a program's sizes."""
  choices = sizes["choices"]
  if pair is None:
    pair = np.zeros((0, choices, choices), np.float32)
  return Costs(unary[: sizes[rows], :choices], pair[: sizes[columns], :choices, :choices], rest)
