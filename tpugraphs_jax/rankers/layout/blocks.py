"""The family of networks that look at a sampled block of consecutive nodes (official).

Source: published baseline of TpuGraphs (arXiv 2308.13490), flags `keep_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpugraphs_jax.data.batching import PreparedGraph, Slate
from tpugraphs_jax.data.plan import Draw, Drawn
from tpugraphs_jax.data.plan import ConfigSampler, sample_block
from tpugraphs_jax.rankers.whole import Programs

# A network that always looks at blocks is judged on the mean of three (official).
_BLOCKS_IN_EVALUATION = 3


class BlockPrograms(Programs):
  """Whole programs, each slate with a block of at most `batch.keep_nodes` nodes."""

  def check(self) -> None:
    super().check()
    if self.config["task"] == "segments":
      raise ValueError(
          "this model looks at sampled blocks of nodes, and segments take the place of blocks: set "
          "model.dropout to fullgraph, or train on whole graphs (variant full)")

  def draw(self, graphs: Sequence[PreparedGraph], sampler: ConfigSampler) -> Draw:
    """Draws slates and a block of each; see `Family.draw`."""
    def draw(number: int, rng: np.random.Generator) -> Drawn:
      graph = graphs[number]

      def finish() -> Slate:
        ids, target = sampler(number, rng)
        return Slate(graph, ids, target, number, self.draw_block(graph, rng))

      return Drawn(graph.sizes, finish)

    return draw

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int]:
    """One of the contiguous blocks of a program, `(first node, last node + 1)` (official)."""
    return sample_block(len(graph.opcode), self.config["batch"]["keep_nodes"], rng)

  def scores(
      self, params: Any, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray], *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores `[n]` float32; the mean over sampled blocks where the network always needs one."""
    if self.network.dropout != "dropout":
      return super().scores(params, graphs, config_ids, progress=progress)
    rng = np.random.default_rng(self.config["seed"])
    runs = []
    for _ in range(_BLOCKS_IN_EVALUATION):
      blocks = [self.draw_block(graph, rng) for graph in graphs]
      found = self.encoder.run(params, graphs, config_ids, blocks=blocks, progress=progress)
      runs.append([scores for _, scores in found])
    return [np.mean(scores, axis=0) for scores in zip(*runs)]
