"""Batches of whole programs with layout configurations."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from tpugraphs_jax.data import batching, reduction, sampling
from tpugraphs_jax.data.batch import LayoutBatch
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.data.plan import Draw, Drawn
from tpugraphs_jax.data.sampling import ConfigSampler
from tpugraphs_jax.graph import OpGraph


@dataclasses.dataclass(frozen=True)
class LayoutBatcher:
  """Batches of programs, a slate of each.

  Attributes:
    transform: of configuration rows `[n, 18]`.
    neighbour_slots: width of the neighbour tables, see `data.batching`.
    hops: how far the model keeps nodes apart that no configuration has reached.
    reduction: options of `reduction.reduce_graph`.
    block_nodes: most nodes in a sampled block; 0 = the model looks at no blocks.
  """

  transform: Transform
  neighbour_slots: int
  hops: int
  reduction: reduction.Options = reduction.Options()
  block_nodes: int = 0

  def reduce(self, graph: OpGraph, raw: OpGraph | None = None) -> OpGraph:
    """The part of a graph that the model sees; see `reduction.reduce_graph`."""
    return reduction.reduce_graph(graph, self.reduction, raw)

  def prepare(self, graph: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A program, reduced, with its neighbour tables.

    Args:
      graph: its `node_feat` are model inputs.
      raw: the same program with the released features; `graph` itself unless given.
    """
    return self.prepare_part(self.reduce(graph, raw))

  def prepare_part(self, graph: OpGraph) -> PreparedGraph:
    """As `prepare`, of a graph that is reduced already, or a piece of one."""
    return batching.prepare(
        graph, graph.node_feat, hops=self.hops, slots=self.neighbour_slots)

  def draw(
      self, graphs: Sequence[PreparedGraph], sampler: ConfigSampler
  ) -> Draw:
    """Draws slates of these programs, and a block of nodes where the model looks at one."""
    def draw(number: int, rng: np.random.Generator) -> Drawn:
      graph = graphs[number]

      def finish() -> Slate:
        ids, target = sampler(number, rng)
        return Slate(graph, ids, target, number, self.draw_block(graph, rng))

      return Drawn(graph.sizes, finish)

    return draw

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int] | None:
    """One of the contiguous blocks of a program, `(first node, last node + 1)` (official)."""
    if not self.block_nodes:
      return None
    return sampling.sample_block(len(graph.opcode), self.block_nodes, rng)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> LayoutBatch:
    """A padded batch; see `batching.assemble_layout`."""
    return batching.assemble_layout(
        slates, budget, graphs=graphs, configs=configs, transform=self.transform)

  def align(self, batches: Sequence[LayoutBatch]) -> Sequence[LayoutBatch]:
    """The batches themselves: one budget gives them one structure."""
    return batches
