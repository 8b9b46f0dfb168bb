"""Batches of tile kernels."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses


from tpugraphs_jax.batch import TileBatch
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.data.pipeline import Draw, draw_slates
from tpugraphs_jax.data.sampling import ConfigSampler
from tpugraphs_jax.graph import OpGraph


@dataclasses.dataclass(frozen=True)
class TileBatcher:
  """Batches of kernels, a slate of each.

  Attributes:
    transform: of configurations `[n, 24]`.
    neighbour_slots: width of the neighbour tables, see `data.adjacency`.
  """

  transform: Transform
  neighbour_slots: int

  def prepare(self, graph: OpGraph) -> PreparedGraph:
    """A kernel whose `node_feat` are model inputs, with its neighbour tables."""
    return batching.prepare(graph, graph.node_feat, slots=self.neighbour_slots)

  def draw(
      self, graphs: Sequence[PreparedGraph], sampler: ConfigSampler
  ) -> Draw:
    """Draws slates of these kernels."""
    return draw_slates(graphs, sampler)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> TileBatch:
    """A padded batch; see `batching.assemble_tile`."""
    return batching.assemble_tile(
        slates, budget, graphs=graphs, configs=configs, transform=self.transform)

  def align(self, batches: Sequence[TileBatch]) -> Sequence[TileBatch]:
    """The batches themselves: one budget gives them one structure."""
    return batches
