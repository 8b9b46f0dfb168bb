"""Batches of tile kernels."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from tpugraphs_jax.data import batching, reduction, tiling
from tpugraphs_jax.data.batch import TileBatch
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.data.plan import Draw, draw_slates
from tpugraphs_jax.data.sampling import ConfigSampler
from tpugraphs_jax.graph import OpGraph


@dataclasses.dataclass(frozen=True)
class TileBatcher:
  """Batches of kernels, a slate of each.

  Attributes:
    transform: of configurations `[n, 24 or more]`.
    neighbour_slots: width of the neighbour tables, see `data.batching`.
    reduction: options of `reduction.reduce_graph`; a kernel has virtual nodes at most.
    config_features: blocks of `data.tiling` that a configuration has.
    distinct: see `base.Sees`.
  """

  transform: Transform
  neighbour_slots: int
  reduction: reduction.Options = reduction.Options()
  config_features: tuple[str, ...] = ("released",)
  distinct: int = 0

  def prepare(self, graph: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A kernel with its neighbour tables; arguments as `LayoutBatcher.prepare`."""
    small = reduction.reduce_graph(graph, self.reduction, raw)
    configs = tiling.extended(raw or graph, self.config_features).configs
    small = dataclasses.replace(small, configs=configs)
    return batching.prepare(
        small, small.node_feat, slots=self.neighbour_slots, distinct=self.distinct)

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
