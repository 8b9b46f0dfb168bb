"""Evaluation on segments: all of them fresh, eta = 1, in chunks of bounded size."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from tpugraphs_jax import console, parallel
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Budget, PreparedGraph
from tpugraphs_jax.rankers import scorer
from tpugraphs_jax.rankers.segments.batches import SegmentedGraph
from tpugraphs_jax.rankers.segments.model import SegmentModel


class SegmentScorer(scorer.Scorer):
  """Scores graphs of any size with any number of configurations in bounded memory.

  A call of the model sees a few segments with one chunk of the configurations;
  readouts are added up over a graph's segments on the host.

  Args:
    model: the wrapped model.
    assemble_layout: `(slates, budget, graphs=, configs=) -> LayoutBatch`.
    segments_per_batch: segments in a call.
    configs_per_batch: configurations in a call.
    whole_slates: as in `scorer.Scorer`.
  """

  def __init__(
      self, model: SegmentModel, assemble_layout: Callable[..., Any], *,
      segments_per_batch: int, configs_per_batch: int, whole_slates: bool = False,
  ):
    readout = parallel.pmap(
        lambda params, batch: model.apply({"params": params}, batch, method="segment_readout"),
        local=True)
    super().__init__(
        readout, assemble_layout, graphs_per_batch=segments_per_batch,
        configs_per_batch=configs_per_batch, whole_slates=whole_slates)
    self._head = jax.jit(
        lambda params, *args: model.apply({"params": params}, *args, method="head"))

  def scores(
      self, params: Any, graphs: Sequence[SegmentedGraph], *,
      config_ids: Sequence[np.ndarray] | None = None, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of every graph, `[its configurations]` float32; see `scorer.Scorer.scores`."""
    chosen = config_ids or [np.arange(len(graph.configs)) for graph in graphs]
    results = [np.zeros(len(ids), np.float32) for ids in chosen]
    for number, start, total in self.totals(params, graphs, chosen, progress=progress):
      results[number][start : start + len(total)] = self.head(params, graphs[number], total)
    return results

  def head(self, params: Any, graph: SegmentedGraph, total: np.ndarray) -> np.ndarray:
    """Scores `[n]` of totals `[n, P]` of one graph's configurations."""
    step, scores = self._configs, []
    for start in range(0, len(total), step):
      part = total[start : start + step]
      padded = np.pad(part, ((0, step - len(part)), (0, 0)))
      segments = np.array([len(graph.segments)], np.int32)
      scores.append(np.asarray(self._head(params, padded[None], segments))[0, : len(part)])
    return np.concatenate(scores)

  def totals(
      self, params: Any, graphs: Sequence[SegmentedGraph], config_ids: Sequence[np.ndarray],
      *, progress: bool = False,
  ) -> Iterator[tuple[int, int, np.ndarray]]:
    """Sums of readouts over all segments of a graph, a few configurations at a time.

    Yields:
      Number of the graph, position of the first configuration in its
      `config_ids`, and totals `[n, P]` float32.
    """
    pieces = [piece for graph in graphs for piece in graph.segments]
    first = np.cumsum([0] + [len(graph.segments) for graph in graphs])
    plan = []
    # So many configurations at once that every device has work to do.
    portion = self._configs * parallel.device_count()
    for number, ids in enumerate(config_ids):
      mine = range(first[number], first[number + 1])
      for start in range(0, len(ids), portion):
        plan.append((number, start, self._groups(mine, ids, start, start + portion)))
    budgets = self._budgets_of(pieces, [group for _, _, groups in plan for group in groups])
    for number, start, groups in tqdm.tqdm(
        plan, unit="part", disable=console.bar(progress and parallel.is_primary())):
      yield number, start, self._total(params, pieces, groups, budgets)

  def _groups(
      self, pieces: Sequence[int], ids: np.ndarray, start: int, stop: int
  ) -> list[list[list[scorer.Unit]]]:
    """Calls of all devices for `ids[start:stop]`, each of units on every device."""
    parts = scorer.chunks(ids, self._configs, whole=self._whole)
    parts = parts[start // self._configs : -(-stop // self._configs)]
    units = [scorer.Unit(piece, *part) for piece in pieces for part in parts]
    calls = _runs_of(units, self._graphs)
    return _runs_of(calls, parallel.local_device_count())

  def _budgets_of(self, pieces: Sequence[PreparedGraph], groups) -> list[Budget]:
    taken = {
        tuple(sorted(unit.graph for unit in units)) for group in groups for units in group
    }
    sizes = [batching.total_sizes([pieces[number] for number in numbers]) for numbers in taken]
    return self._budgets.for_sizes(sizes, max_budgets=1)

  def _total(self, params, pieces, groups, budgets) -> np.ndarray:
    """Sum over segments, of the configurations of all units."""
    parts = collections.defaultdict(list)
    for unit, readout in self._run(params, pieces, groups, budgets, False):
      parts[unit.graph].append(readout)
    return np.sum([np.concatenate(part) for part in parts.values()], axis=0, dtype=np.float32)


def _runs_of(items: list, count: int) -> list[list]:
  return [items[i : i + count] for i in range(0, len(items), count)]
