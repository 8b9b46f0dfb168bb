"""Scores of kernels with late join, where the tile comes behind the network.

    kernels --> network --> pooled [kernels, R] --+
                                                  +--> join --> head --> scores
    all configurations of all kernels, in a row --+

Chunks of configurations may span kernels: every kernel is computed once, and only the last chunk
is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

import jax
import numpy as np
import optax

from tpugraphs_jax.data.batching import PreparedGraph
from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.rankers.family import TileFamily
from tpugraphs_jax.rankers.scorer import Encoder, network_step


class LateJoin(TileFamily):
  """Scores kernels with late join: the network once a kernel, then the head on configurations.

  The network has the methods `kernel_features(batch) -> [G, R]`, `join(kernels, tiles) -> [..., P]`
  and `score(readout)`. Every process computes all scores: the head costs less than an exchange.

  Attributes:
    chunk: configurations that pass through the head at a time.
  """

  chunk = 8192

  @functools.cached_property
  def encoder(self) -> Encoder:
    """The pooled features `[R]` of every kernel."""
    step = network_step(self.network, method="kernel_features")
    return Encoder(step, self.assemble, graphs=self.config.eval.graphs, configs=0)

  @functools.cached_property
  def _head(self) -> Callable:
    def head(network, pooled, configs):
      return network.score(network.join(pooled, configs))

    def score(params, pooled, configs):
      return self.network.apply({"params": params}, pooled, configs, method=head)

    return jax.jit(score)

  def run_network(
    self,
    params: optax.Params,
    graphs: Sequence[PreparedGraph[TileConfigs]],
    config_ids: Sequence[np.ndarray],
  ) -> list[np.ndarray]:
    """Scores `[n]` float32 of each kernel; see `Family.run_network`."""
    pooled = np.stack(self.encoder(params, graphs, config_ids))
    parts = [graph.configs.config_feat[ids] for graph, ids in zip(graphs, config_ids)]
    feat = np.concatenate([self.transform(part) for part in parts])
    graph_of_config = np.repeat(np.arange(len(graphs)), [len(ids) for ids in config_ids])
    scores = np.zeros(len(feat), np.float32)
    for start in range(0, len(feat), self.chunk):
      part = slice(start, start + self.chunk)
      inputs = [self._pad(pooled[graph_of_config[part]]), self._pad(feat[part])]
      scores[part] = np.asarray(self._head(params, *inputs))[: len(scores[part])]
    return np.split(scores, np.cumsum([len(ids) for ids in config_ids])[:-1])

  def _pad(self, x: np.ndarray) -> np.ndarray:
    """Pads `x [n, F]` with zeros, to a power of two rows or a whole chunk: few shapes compile."""
    size = min(self.chunk, 1 << max(len(x) - 1, 0).bit_length())
    return np.pad(x, [(0, size - len(x)), (0, 0)])
