"""Stretches of measurements in which runtimes keep changing; others teach little.

Source: entropy filter of the 2nd place of the "Fast or Slow?" competition, which was off
in its results.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import stats

from tpugraphs_jax.graph import OpGraph

_BLOCK = 100  # configurations of a stretch
_SMOOTHED = 5  # stretches of the moving average
_LEAST = 1e-3  # added to runtimes between 0 and 1, so that none counts nothing
_FEWEST = 0.1  # share of the configurations that must be left


def divergences(runtime_ns: np.ndarray) -> np.ndarray:
  """How much each block of 100 runtimes differs from the one before, `[blocks - 1]`.

  Runtimes `[C]` are brought to [0, 1]. KL(block || the one before) takes the two as
  distributions over their 100 places; the mean is over up to two neighbours on each
  side. Configurations after the last whole block do not count.
  """
  runtime = runtime_ns - runtime_ns.min()
  share = runtime / max(int(runtime.max()), 1) + _LEAST
  blocks = share[: len(share) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
  found = stats.entropy(blocks[1:], blocks[:-1], axis=1)
  ones = np.ones(_SMOOTHED)
  smooth = lambda values: np.convolve(values, ones)[_SMOOTHED // 2 :][: len(values)]
  return smooth(found) / smooth(np.ones(len(found)))


def drop_flat(graph: OpGraph, threshold: float) -> OpGraph:
  """The graph with the blocks of configurations that differ enough from those beside.

  A block stays if its divergences from both neighbours, or its only one, are at least
  the threshold; configurations after the last whole block share its fate. A graph of
  which less than a tenth would stay has no configurations left. Fewer than two whole
  blocks, and runtimes that are unknown, stay as they are.

  Args:
    graph: with measured configurations in file order.
    threshold: 0 = no filter; 0.3 for `random` and 3 for `default` collections (2nd
      place).
  """
  configs = graph.configs
  if not threshold or len(configs) < 2 * _BLOCK or not configs.is_labelled:
    return graph
  differs = divergences(configs.runtime_ns) >= threshold
  stays = np.append(differs, True) & np.append(True, differs)
  block = np.minimum(np.arange(len(configs)) // _BLOCK, len(stays) - 1)
  kept = np.flatnonzero(stays[block])
  if len(kept) < _FEWEST * len(configs):
    kept = kept[:0]
  return dataclasses.replace(graph, configs=configs.subset(kept))
