"""Families whose batches hold whole kernels or whole programs, and a network that scores them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

from tpugraphs_jax.data import batching, feature_blocks, reduction
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.base import Family


class Kernels(Family):
  """Fused kernels with tile configurations.

  Attributes:
    distinct: how many of the last columns of node features decide a part of the network
      that tiles do not enter: nodes of a kernel that are equal there share the part.
  """

  distinct = 0

  def prepare(self, inputs: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A kernel with its neighbour tables; a kernel is never reduced, but gets virtual nodes."""
    small = reduction.reduce_graph(inputs, self.reduction, raw)
    blocks = tuple(self.config["data"]["config_features"])
    small = dataclasses.replace(
        small, configs=feature_blocks.extended(raw or inputs, blocks).configs)
    return batching.prepare(small, small.node_feat, slots=self.slots, distinct=self.distinct)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> TileBatch:
    """A padded batch; see `batching.assemble_tile`."""
    return batching.assemble_tile(
        slates, budget, graphs=graphs, configs=configs, transform=self.config_transform)


class Programs(Family):
  """Whole programs with layout configurations."""

  @functools.cached_property
  def reduction(self) -> reduction.Options:
    """The part of a program that the network gets, see `reduction.reduce_graph`."""
    data = self.config["data"]
    return dataclasses.replace(
        super().reduction, reduction=data["graph_reduction"], hops=data["reduction_hops"],
        direction=data["reduction_direction"], induced=data["reduction_induced"])

  def reduce(self, inputs: OpGraph, raw: OpGraph | None = None) -> OpGraph:
    """The part of a program that the network gets; arguments as `prepare`."""
    if self.reduction.reduction == self.reduction.virtual_node == "none":
      return inputs
    return reduction.reduce_graph(inputs, self.reduction, raw)

  def prepare(self, inputs: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A program, reduced, with its neighbour tables; see `Family.prepare`."""
    return self.prepare_part(self.reduce(inputs, raw))

  def prepare_part(self, graph: OpGraph) -> PreparedGraph:
    """As `prepare`, of a graph that is reduced already, or a piece of one."""
    return batching.prepare(graph, graph.node_feat, hops=self.network.hops, slots=self.slots)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> LayoutBatch:
    """A padded batch; see `batching.assemble_layout`."""
    return batching.assemble_layout(
        slates, budget, graphs=graphs, configs=configs, transform=self.config_transform)
