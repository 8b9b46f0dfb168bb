"""The family of tile networks with late join: the network runs once per kernel.

    kernels ──► network ──► pooled [kernels, F] ─┐
                                                 ├─► join ──► head ──► scores
    all configurations of all kernels, in a row ─┘

No kernel is computed again for another chunk of its configurations, and no chunk is
padded but the last: chunks do not end where a kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import numpy as np

from tpugraphs_jax.data.batching import PreparedGraph
from tpugraphs_jax.rankers.scorer import Encoder, network_step
from tpugraphs_jax.rankers.whole import Kernels

# Configurations that pass through the head at a time.
_CHUNK = 8192


class LateJoin(Kernels):
  """Kernels, for networks with the methods `pooled(batch) -> [G, F]` and `join(pooled, configs)`.

  Every process computes all scores: the head on 24 numbers is cheaper than an exchange.
  """

  encodes = "pooled"

  @functools.cached_property
  def encoder(self) -> Encoder:
    """The readout `[F]` of every kernel."""
    return Encoder(network_step(self.network, method=self.encodes), self.assemble,
                   graphs=self.config["eval"]["graphs"], configs=0)

  @functools.cached_property
  def _head(self) -> Any:
    def head(network, pooled, configs):
      return network.score(network.join(pooled, configs))

    return jax.jit(
        lambda params, *inputs: self.network.apply({"params": params}, *inputs, method=head))

  def scores(
      self, params: Any, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray], *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores `[n]` float32 of each kernel; see `Family.scores`."""
    pooled = np.stack([
        one for _, one in self.encoder.run(params, graphs, config_ids, progress=progress)])
    feat = np.concatenate([self.config_transform(graph.configs.config_feat[ids])
                           for graph, ids in zip(graphs, config_ids)])
    owner = np.repeat(np.arange(len(graphs)), [len(ids) for ids in config_ids])
    found = np.zeros(len(owner), np.float32)
    for start in range(0, len(owner), _CHUNK):
      part = slice(start, start + _CHUNK)
      inputs = [_filled(pooled[owner[part]]), _filled(feat[part])]
      found[part] = np.asarray(self._head(params, *inputs))[: len(found[part])]
    return np.split(found, np.cumsum([len(ids) for ids in config_ids])[:-1])


def _filled(x: np.ndarray) -> np.ndarray:
  """`x [n, F]` with zeros up to a whole chunk; short ones up to a power of two."""
  size = min(_CHUNK, 1 << max(len(x) - 1, 0).bit_length())
  return np.pad(x, [(0, size - len(x)), (0, 0)])
