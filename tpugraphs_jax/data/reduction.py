"""Other graphs of the same program: smaller ones, and ones with virtual nodes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import scipy.sparse

from tpugraphs_jax.columns import NODE
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.options import option, Options

REDUCTIONS = ("none", "config_neighborhood")
DIRECTIONS = ("operands", "users", "both")
INDUCED = ("edge", "node")
VIRTUAL_NODES = ("none", "output", "cluster")


@dataclasses.dataclass(frozen=True)
class VirtualNodes(Options):
  """The nodes that are added to a graph."""

  section = "data"
  virtual_node: str = option(
      "none", "nodes that are added: output (fed by roots), or cluster (of nodes next to each "
      "other, which consumes them)", one_of=VIRTUAL_NODES)
  cluster_nodes: int = option(1000, "nodes that share a virtual node of a cluster", least=1)

  @property
  def keeps_all(self) -> bool:
    """Whether no node is left out."""
    return True


@dataclasses.dataclass(frozen=True)
class Reduction(VirtualNodes):
  """The part of a program that is kept, and the nodes that are added.

  The 1st place keeps 1 hop in both directions, induced by edges; the 6th place 5 hops along
  users, induced by nodes.
  """

  graph_reduction: str = option(
      "none", "part of the graph: none = all, or config_neighborhood, the nodes near a "
      "configurable node", one_of=REDUCTIONS)
  reduction_hops: int = option(5, "largest distance from a configurable node", least=1)
  reduction_direction: str = option("both", "edges that lead to near nodes", one_of=DIRECTIONS)
  reduction_induced: str = option(
      "node", "edges between kept nodes: all of them (node), or those of a walk (edge)",
      one_of=INDUCED)

  @property
  def keeps_all(self) -> bool:
    """Whether no node is left out."""
    return self.graph_reduction == "none"


def with_output(graph: OpGraph) -> OpGraph:
  """The graph with one node more, the output, behind the others (3rd place).

  It consumes the roots of all computations, or all nodes without users where there is no root.
  Its opcode and its released features are 0.

  Args:
    graph: with the released features. Blocks of features see the output as a node.
  """
  nodes = graph.num_nodes
  roots = graph.node_feat[:, NODE["is_root"].start] > 0
  if not roots.any():
    roots = np.ones(nodes, bool)
    roots[graph.edge_index[:, 1]] = False
  member = np.flatnonzero(roots)
  return _with_virtual_nodes(graph, np.full(len(member), nodes), member)


class Reduced(NamedTuple):
  """A part of a graph, with virtual nodes."""

  graph: OpGraph
  nodes: np.ndarray  # [n] int64 numbers that the nodes before the virtual ones had

  def rows(self, values: np.ndarray) -> np.ndarray:
    """Values `[N, F]` of the nodes of the whole graph, for the nodes here; 0 of virtual ones."""
    virtual = self.graph.num_nodes - len(self.nodes)
    return np.pad(values[self.nodes], ((0, virtual), (0, 0)))


def reduce_graph(graph: OpGraph, options: VirtualNodes) -> Reduced:
  """The graph that a model sees.

  Args:
    graph: layout graph, or a kernel where nothing is left out.
    options: which nodes and edges; a node `output` is there before, see `with_output`.

  Returns:
    The graph with nodes renumbered in their order, then virtual nodes, whose features and
    opcodes are 0; configurations are shared. A reduced graph does not mark HLO computations:
    its `node_splits` is `[0, N]`.
  """
  nodes = np.arange(graph.num_nodes)
  if not options.keeps_all:
    graph, nodes = _neighborhood(graph, options)
  if options.virtual_node == "cluster":
    graph = _with_virtual_nodes(graph, len(nodes) + np.arange(len(nodes)) // options.cluster_nodes,
                                np.arange(len(nodes)))
  return Reduced(graph, nodes)


def _with_virtual_nodes(graph: OpGraph, owner: np.ndarray, member: np.ndarray) -> OpGraph:
  """The graph with virtual nodes after its own; each of `owner [n]` consumes `member [n]`."""
  nodes = graph.num_nodes
  count = int(owner.max(initial=nodes)) + 1 - nodes
  edges = np.stack([owner, member], axis=1).astype(np.int32)
  splits = np.append(graph.node_splits[:-1], nodes + count)
  feat, opcode = graph.node_feat, graph.node_opcode
  return dataclasses.replace(
      graph, node_feat=np.concatenate([feat, np.zeros((count, feat.shape[1]), feat.dtype)]),
      node_opcode=np.concatenate([opcode, np.zeros(count, opcode.dtype)]),
      edge_index=np.concatenate([graph.edge_index, edges]), node_splits=splits)


def _neighborhood(graph: OpGraph, options: Reduction) -> tuple[OpGraph, np.ndarray]:
  """The nodes near a configurable node, renumbered in their order, and their numbers before."""
  near, edges = _near(graph, options)
  number = np.cumsum(near) - 1
  part = dataclasses.replace(
      graph, node_feat=graph.node_feat[near], node_opcode=graph.node_opcode[near],
      edge_index=number[graph.edge_index[edges]].astype(np.int32),
      node_splits=np.array([0, near.sum()]),
      config_node=number[graph.config_node].astype(np.int32))
  return part, np.flatnonzero(near)


def _near(graph: OpGraph, options: Reduction) -> tuple[np.ndarray, np.ndarray]:
  """Nodes `[N]` bool within some edges of a configurable node, and edges `[E]` bool."""
  consumer, producer = graph.edge_index.T
  near = np.zeros(graph.num_nodes, bool)
  near[graph.config_node] = True
  edge_used = np.zeros(graph.num_edges, bool)
  for _ in range(options.reduction_hops):
    step = np.zeros(graph.num_edges, bool)
    if options.reduction_direction in ("operands", "both"):
      step |= near[consumer]
    if options.reduction_direction in ("users", "both"):
      step |= near[producer]
    edge_used |= step
    near[graph.edge_index[step]] = True
  between = near[graph.edge_index].all(axis=1)
  return near, edge_used if options.reduction_induced == "edge" else between


def edge_matrix(edges: np.ndarray, nodes: int) -> scipy.sparse.csr_array:
  """The adjacency matrix of `edges [E, 2]`, `[nodes, nodes]` float32; repeated edges add up."""
  return scipy.sparse.csr_array(
      (np.ones(len(edges), np.float32), (edges[:, 0], edges[:, 1])), shape=(nodes, nodes))
