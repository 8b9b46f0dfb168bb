"""Nodes that no program has, which gather what many nodes know."""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.graph import OpGraph

VIRTUAL_NODES = ("none", "output", "cluster")


def add(
    graph: OpGraph, kind: str, *, roots: np.ndarray, cluster_nodes: int
) -> OpGraph:
  """The graph with virtual nodes after its own: features 0, opcode 0 (unknown).

  Args:
    graph: at least one node.
    kind: `none`; `output`: one node that consumes the roots, or all nodes without users
      where there is no root (3rd place of the competition); `cluster`: one node for every
      `cluster_nodes` nodes next to each other, which consumes them (5th place).
    roots: `[N]` bool, the results of computations.
    cluster_nodes: nodes of a cluster; the last one may be smaller.
  """
  if kind == "none":
    return graph
  nodes = graph.num_nodes
  if kind == "output":
    if not roots.any():
      roots = np.ones(nodes, bool)
      roots[graph.edge_index[:, 1]] = False
    owner, member = np.zeros(roots.sum(), int), np.flatnonzero(roots)
  else:
    owner, member = np.arange(nodes) // cluster_nodes, np.arange(nodes)
  count = int(owner.max(initial=0)) + 1
  edges = np.stack([nodes + owner, member], axis=1).astype(np.int32)
  splits = np.append(graph.node_splits[:-1], nodes + count)
  feat, opcode = graph.node_feat, graph.node_opcode
  return dataclasses.replace(
      graph, node_feat=np.concatenate([feat, np.zeros((count, feat.shape[1]), feat.dtype)]),
      node_opcode=np.concatenate([opcode, np.zeros(count, opcode.dtype)]),
      edge_index=np.concatenate([graph.edge_index, edges]), node_splits=splits)
