"""Reduces graphs to the neighbourhood of configurable nodes, and adds virtual nodes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from tpugraphs_jax.columns import NODE
from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.data import batching
from tpugraphs_jax.graph import AnyConfigs, LayoutConfigs, OpGraph

REDUCTIONS = ("none", "config_neighborhood")
DIRECTIONS = ("operands", "users", "both")
INDUCED = ("edge", "node")
VIRTUAL_NODES = ("none", "output", "cluster")


@dataclasses.dataclass(frozen=True)
class VirtualNodes(Options):
  """Virtual nodes."""

  section = "data"
  virtual_node: str = option(
    "none",
    "virtual nodes: output (consumes roots), or cluster (each consumes a range of nodes)",
    one_of=VIRTUAL_NODES,
  )
  cluster_nodes: int = option(1000, "nodes per virtual node of cluster", least=1)


@dataclasses.dataclass(frozen=True)
class Reduction(VirtualNodes):
  """The part of a program that a network sees, and virtual nodes.

  The 1st place keeps 1 hop in both directions, induced by edges; the 6th place 5 hops along
  users, induced by nodes.
  """

  graph_reduction: str = option(
    "none", "none, or config_neighborhood: the nodes near a configurable node", one_of=REDUCTIONS
  )
  reduction_hops: int = option(5, "largest distance from a configurable node", least=1, most=256)
  reduction_direction: str = option("both", "direction of the distance", one_of=DIRECTIONS)
  reduction_induced: str = option(
    "node", "edges between remaining nodes: all (node), or of the search (edge)", one_of=INDUCED
  )


def with_output(graph: OpGraph) -> OpGraph:
  """Appends an output node to the graph (3rd place).

  It consumes the roots of all computations; without roots, all nodes without users. Its opcode and
  released features are 0.

  Args:
    graph: before features are computed: blocks of features include the output node.
  """
  nodes = graph.num_nodes
  roots = graph.node_feat[:, NODE["is_root"].start] > 0
  if not roots.any():
    roots = np.ones(nodes, bool)
    roots[graph.edge_index[:, 1]] = False
  member = np.flatnonzero(roots)
  return _with_virtual_nodes(graph, np.full(len(member), nodes), member)


class Subgraph(NamedTuple):
  """A part of a graph, with virtual nodes at the end."""

  graph: OpGraph
  nodes: np.ndarray  # [n] int64 numbers of its nodes in the whole graph, without virtual nodes

  def rows(self, values: np.ndarray) -> np.ndarray:
    """Rows of `values [N, F]` of the whole graph for these nodes; 0 for virtual nodes."""
    virtual = self.graph.num_nodes - len(self.nodes)
    return np.pad(values[self.nodes], ((0, virtual), (0, 0)))


def reduce_graph(graph: OpGraph, options: VirtualNodes) -> Subgraph:
  """The graph that a network sees.

  Args:
    graph: a program; or a kernel, which is not reduced.
    options: of the reduction. `with_output` adds a node `output` earlier.

  Returns:
    The graph with renumbered nodes in their order, then virtual nodes, whose features and opcodes
    are 0; configurations are shared. `node_splits` of a reduced graph is `[0, N]`.
  """
  nodes = np.arange(graph.num_nodes)
  if isinstance(options, Reduction) and options.graph_reduction != "none":
    graph, nodes = _neighborhood(graph, options)
  if options.virtual_node == "cluster":
    member = np.arange(len(nodes))
    owner = len(nodes) + member // options.cluster_nodes
    graph = _with_virtual_nodes(graph, owner, member)
  return Subgraph(graph, nodes)


def _with_virtual_nodes(graph: OpGraph, owner: np.ndarray, member: np.ndarray) -> OpGraph:
  """Appends virtual nodes to the graph; each of `owner [n]` consumes `member [n]`."""
  nodes = graph.num_nodes
  count = int(owner.max(initial=nodes)) + 1 - nodes
  edges = np.stack([owner, member], axis=1).astype(np.int32)
  splits = np.append(graph.node_splits[:-1], nodes + count)
  return dataclasses.replace(
    graph,
    node_feat=np.pad(graph.node_feat, ((0, count), (0, 0))),
    node_opcode=np.pad(graph.node_opcode, (0, count)),
    edge_index=np.concatenate([graph.edge_index, edges]),
    node_splits=splits,
  )


def _neighborhood(graph: OpGraph, options: Reduction) -> tuple[OpGraph, np.ndarray]:
  """The nodes near a configurable node, renumbered in order, and their numbers in `graph`."""
  near, edges = _near(graph, options)
  nodes = np.flatnonzero(near)
  return part_of(graph, nodes, graph.edge_index[edges], graph.config_node), nodes


def part_of(
  graph: OpGraph[AnyConfigs], nodes: np.ndarray, edges: np.ndarray, config_node: np.ndarray
) -> OpGraph[AnyConfigs]:
  """The graph of some nodes, renumbered in their order; all arguments are numbers in `graph`.

  It has no times of kernels, which can have nodes outside of the part.

  Args:
    graph: the whole graph.
    nodes: `[n]` nodes of the part.
    edges: `[e, 2]` edges among them.
    config_node: `[k]` configurable nodes among them.
  """
  number = np.zeros(graph.num_nodes, np.int32)
  number[nodes] = np.arange(len(nodes))
  configs: Any = graph.configs
  if isinstance(configs, LayoutConfigs) and configs.kernels:
    configs = dataclasses.replace(configs, kernels=None)
  return dataclasses.replace(
    graph,
    configs=configs,
    node_feat=graph.node_feat[nodes],
    node_opcode=graph.node_opcode[nodes],
    edge_index=number[edges],
    node_splits=np.array([0, len(nodes)]),
    config_node=number[config_node],
  )


def _near(graph: OpGraph, options: Reduction) -> tuple[np.ndarray, np.ndarray]:
  """The nodes and the edges that remain, as masks `[N]` and `[E]` bool.

  A node remains if it is at most `reduction_hops` edges from a configurable node. All edges between
  remaining nodes remain, or only edges of the search.
  """
  hops, is_directed = options.reduction_hops, options.reduction_direction != "both"
  edges = graph.edge_index  # from a consumer to its operand
  if options.reduction_direction == "users":
    edges = edges[:, ::-1]
  distance = batching.hops_from(
    graph.config_node, edges, graph.num_nodes, hops=hops, directed=is_directed
  )
  near = distance <= hops
  if options.reduction_induced == "node":
    return near, near[edges].all(axis=1)
  first, second = (distance < hops)[edges].T
  return near, first if is_directed else first | second


def edge_matrix(edges: np.ndarray, nodes: int) -> scipy.sparse.csr_array:
  """The adjacency matrix of `edges [E, 2]`, `[nodes, nodes]` float32; repeated edges add up."""
  weights = np.ones(len(edges), np.float32)
  return scipy.sparse.csr_array((weights, (edges[:, 0], edges[:, 1])), shape=(nodes, nodes))
