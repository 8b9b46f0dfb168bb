"""Batches of programs for rankers that look costs up."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from tpugraphs_jax.data import reduction
from tpugraphs_jax.data.batching import Budget, Slate
from tpugraphs_jax.data.plan import Draw, draw_slates
from tpugraphs_jax.data.sampling import ConfigSampler
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.tables import batching as table_batching, terms
from tpugraphs_jax.rankers.tables.batch import TableBatch
from tpugraphs_jax.rankers.tables.batching import PreparedTables


@dataclasses.dataclass(frozen=True)
class TableBatcher:
  """Batches of programs, a slate of each, its configurations as choices of groups.

  Attributes:
    neighbour_slots: width of the neighbour tables, see `data.batching`.
    reduction: options of `reduction.reduce_graph`.
    pair_hops: how many edges may be between two nodes whose layouts have a cost together.
    tile_padding: whether the model is told how layouts fill tiles of 8 x 128 numbers,
      the registers of a TPU.
  """

  neighbour_slots: int
  reduction: reduction.Options = reduction.Options()
  pair_hops: int = 6
  tile_padding: bool = True

  def prepare(self, inputs: OpGraph, raw: OpGraph) -> PreparedTables:
    """A program with the terms of its configurations, which are kept with the store.

    Args:
      inputs: its `node_feat` are model inputs.
      raw: the same program with the released features, which tell sizes of tensors.
    """
    small = reduction.reduce_graph(raw, self.reduction)
    feat = reduction.reduce_graph(inputs, self.reduction, raw).node_feat
    # Nodes do not meet in virtual ones, which come after all others.
    real = reduction.reduce_graph(raw, dataclasses.replace(self.reduction, virtual_node="none"))
    found = terms.terms_of(real, folder=real.store, hops=self.pair_hops)
    return table_batching.prepare(
        small, feat, found, slots=self.neighbour_slots, tiling=self.tile_padding)

  def draw(self, graphs: Sequence[PreparedTables], sampler: ConfigSampler) -> Draw:
    """Draws slates of these programs."""
    return draw_slates(graphs, sampler)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> TableBatch:
    """A padded batch; see `table_batching.assemble_tables`."""
    return table_batching.assemble_tables(slates, budget, graphs=graphs, configs=configs)

  def align(self, batches: Sequence[TableBatch]) -> Sequence[TableBatch]:
    """The batches themselves: one budget gives them one structure."""
    return batches
