"""Scores configurations by looking costs up: the network runs once per program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from tpugraphs_jax import console, parallel
from tpugraphs_jax.data import plan
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.rankers.scorer import Budgets
from tpugraphs_jax.rankers.tables.batching import PreparedTables


# Configurations whose residual is computed at a time.
_CHUNK = 256


class Tables(NamedTuple):
  """The costs of one program, see `rankers.tables.network`."""

  unary: np.ndarray  # [B, R] float32 cost of each choice of each group
  pair: np.ndarray  # [Q, R, R] float32 cost of the choices of a pair of groups, or empty


class TableScorer:
  """Scores programs of any size with any number of configurations.

  The tables of a program are computed on one device; sums over them run on the host, some
  configurations at a time. So does the residual of models that have one, on the device.

  Args:
    model: with a method `tables(batch) -> costs [B, R, heads], [Q, R, R, heads] or None`,
      and `residuals(batch) -> [G, C]` if it `sees` one.
    assemble: `(slates, budget, graphs=, configs=) -> TableBatch`.
  """

  def __init__(self, model: Any, assemble: Callable[..., Any]):
    self._assemble, self._budgets = assemble, Budgets()
    self._tables = jax.jit(
        lambda params, batch: model.apply({"params": params}, batch, method="tables"))
    self._residuals = jax.jit(
        lambda params, batch: model.apply({"params": params}, batch, method="residuals"))
    self._has_residual = model.sees.residual

  def scores(
      self, params: Any, graphs: Sequence[PreparedTables], *,
      config_ids: Sequence[np.ndarray] | None = None, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of every program, `[its configurations]` float32; see `scorer.Scorer.scores`."""
    chosen = config_ids or [np.arange(len(graph.configs)) for graph in graphs]
    budgets = self._budgets.for_sizes([graph.sizes for graph in graphs]) if graphs else []
    mine = range(parallel.process_index(), len(graphs), parallel.process_count())
    bar = tqdm.tqdm(mine, unit="program", disable=console.bar(progress and parallel.is_primary()))
    local = [(number, self._score(params, graphs[number], chosen[number], budgets))
             for number in bar]
    found = dict(sum(parallel.gather_objects(local), []))
    return [found[number] for number in range(len(graphs))]

  def _score(self, params, graph: PreparedTables, ids: np.ndarray, budgets) -> np.ndarray:
    tables = self.tables(params, graph, budgets)
    rows = graph.configs.group_row[ids]
    total = graph.terms.total(rows, tables.unary, tables.pair)
    if self._has_residual:
      total = total + self.residuals(params, graph, ids, budgets)
    return total.astype(np.float32)

  def residuals(
      self, params: Any, graph: PreparedTables, ids: np.ndarray, budgets: Sequence[Any] = ()
  ) -> np.ndarray:
    """What the scores of configurations `ids [n]` are beyond sums of tables, `[n]` float32."""
    known = budgets or self._budgets.for_sizes([graph.sizes])
    budget, found = known[plan.smallest_fit([graph.sizes], known)], []
    for start in range(0, len(ids), _CHUNK):
      part = ids[start : start + _CHUNK]
      slate = Slate(graph, part, np.zeros(len(part), np.float32))
      batch = self._assemble([slate], budget, graphs=1, configs=_CHUNK)
      found.append(np.asarray(self._residuals(params, batch))[0, : len(part)])
    return np.concatenate([np.zeros(0, np.float32), *found])

  def tables(self, params: Any, graph: PreparedTables, budgets: Sequence[Any] = ()) -> Tables:
    """The costs of one program, without padding."""
    known = budgets or self._budgets.for_sizes([graph.sizes])
    budget = known[plan.smallest_fit([graph.sizes], known)]
    # No configuration is needed for costs; a batch has one all the same.
    slate = Slate(graph, np.arange(min(1, len(graph.configs))), np.zeros(1, np.float32))
    unary, pair = self._tables(params, self._assemble([slate], budget, graphs=1, configs=1))
    choices, columns = graph.terms.choices, len(graph.terms.columns)
    cut = np.asarray(unary).sum(axis=-1)[: len(graph.terms.row_start) - 1, :choices]
    if pair is None:
      return Tables(cut, np.zeros((0, choices, choices), np.float32))
    return Tables(cut, np.asarray(pair).sum(axis=-1)[:columns, :choices, :choices])
