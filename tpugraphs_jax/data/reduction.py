"""Smaller graphs: the neighbourhood of the configurable nodes."""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.graph import OpGraph

REDUCTIONS = ("none", "config_neighborhood")
DIRECTIONS = ("operands", "users", "both")
INDUCED = ("edge", "node")


@dataclasses.dataclass(frozen=True)
class Options:
  """Which part of a graph is kept.

  Attributes:
    reduction: `none`, or `config_neighborhood`.
    hops: how far from a configurable node a node may be.
    direction: follow edges to `operands`, to `users` or to `both`. 1st place: 1
      hop, both, edge-induced; 6th place: 5 hops, users, node-induced.
    induced: `edge` keeps the edges that a walk of `hops` edges uses, so that two
      kept nodes at the rim lose the edge between them; `node` keeps every edge
      between kept nodes.
  """

  reduction: str = "none"
  hops: int = 1
  direction: str = "both"
  induced: str = "node"


def reduce_graph(graph: OpGraph, options: Options) -> OpGraph:
  """Keeps the nodes within some edges of a configurable node.

  Args:
    graph: layout graph.
    options: which nodes and edges.

  Returns:
    The graph with nodes renumbered in their order; configurations are shared.
    HLO computations are no longer marked: `node_splits` is `[0, N]`.
  """
  if options.reduction == "none":
    return graph
  consumer, producer = graph.edge_index.T
  near = np.zeros(graph.num_nodes, bool)
  near[graph.config_node] = True
  edge_used = np.zeros(graph.num_edges, bool)
  for _ in range(options.hops):
    step = np.zeros(graph.num_edges, bool)
    if options.direction in ("operands", "both"):
      step |= near[consumer]
    if options.direction in ("users", "both"):
      step |= near[producer]
    edge_used |= step
    near[graph.edge_index[step]] = True
  kept_edges = edge_used if options.induced == "edge" else near[graph.edge_index].all(axis=1)
  number = np.cumsum(near) - 1
  return dataclasses.replace(
      graph, node_feat=graph.node_feat[near], node_opcode=graph.node_opcode[near],
      edge_index=number[graph.edge_index[kept_edges]].astype(np.int32).reshape(-1, 2),
      node_splits=np.array([0, near.sum()]),
      config_node=number[graph.config_node].astype(np.int32))
