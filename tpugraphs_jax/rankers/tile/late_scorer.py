"""Scores tile configurations of rankers with late join: the network runs once per kernel.

    kernels ──► network ──► pooled [kernels, F] ─┐
                                                 ├─► join ──► head ──► scores
    all configurations of all kernels, in a row ─┘

No kernel is computed again for another chunk of its configurations, and no chunk is
padded but the last: chunks do not end where a kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from tpugraphs_jax import console, parallel
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import PreparedGraph, Slate
from tpugraphs_jax.rankers.scorer import Budgets
from tpugraphs_jax.rankers.tile.batcher import TileBatcher

# Configurations that pass through the head at a time.
_CHUNK = 8192


class LateScorer:
  """Scores kernels with a ranker that `sees` configurations after the readout.

  Every process computes all scores: the head on 24 numbers is cheaper than an exchange.

  Args:
    model: with methods `pooled`, `join` and `score`.
    batcher: of kernels; its transform is that of configurations.
    graphs_per_batch: kernels G in a batch.
  """

  def __init__(self, model: Any, batcher: TileBatcher, *, graphs_per_batch: int):
    self._batcher, self._graphs, self._budgets = batcher, graphs_per_batch, Budgets()
    self._pooled = jax.jit(
        lambda params, batch: model.apply({"params": params}, batch, method="pooled"))
    head = lambda model, pooled, configs: model.score(model.join(pooled, configs))
    self._head = jax.jit(
        lambda params, *inputs: model.apply({"params": params}, *inputs, method=head))

  def scores(
      self, params: Any, graphs: Sequence[PreparedGraph], *,
      config_ids: Sequence[np.ndarray] | None = None, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of every kernel, `[its configurations]` float32; see `scorer.Scorer.scores`."""
    if not graphs:
      return []
    chosen = config_ids or [np.arange(len(graph.configs)) for graph in graphs]
    pooled = self._kernels(params, graphs, progress)
    feat = np.concatenate([self._batcher.transform(graph.configs.config_feat[ids])
                           for graph, ids in zip(graphs, chosen)])
    owner = np.repeat(np.arange(len(graphs)), [len(ids) for ids in chosen])
    found = np.zeros(len(owner), np.float32)
    for start in range(0, len(owner), _CHUNK):
      part = slice(start, start + _CHUNK)
      inputs = [_filled(pooled[owner[part]]), _filled(feat[part])]
      found[part] = np.asarray(self._head(params, *inputs))[: len(found[part])]
    return np.split(found, np.cumsum([len(ids) for ids in chosen])[:-1])

  def _kernels(self, params, graphs, progress: bool) -> np.ndarray:
    """The readout of every kernel, `[kernels, F]` float32."""
    order = sorted(range(len(graphs)), key=lambda i: len(graphs[i].opcode))
    batches = [order[i : i + self._graphs] for i in range(0, len(order), self._graphs)]
    sizes = [batching.total_sizes([graphs[i] for i in numbers]) for numbers in batches]
    budgets = self._budgets.for_sizes(sizes)
    hidden = console.bar(progress and parallel.is_primary())
    pooled = []
    for numbers, size in zip(tqdm.tqdm(batches, unit="batch", disable=hidden), sizes):
      slates = [Slate(graphs[i], np.zeros(0, np.int64), np.zeros(0, np.float32)) for i in numbers]
      batch = self._batcher.assemble(
          slates, budgets[plan.smallest_fit([size], budgets)], graphs=self._graphs, configs=1)
      pooled.append(np.asarray(self._pooled(params, batch))[: len(numbers)])
    return np.concatenate(pooled)[np.argsort(order)]


def _filled(x: np.ndarray) -> np.ndarray:
  """`x [n, F]` with zeros up to a whole chunk; short ones up to a power of two."""
  size = min(_CHUNK, 1 << max(len(x) - 1, 0).bit_length())
  return np.pad(x, [(0, size - len(x)), (0, 0)])
