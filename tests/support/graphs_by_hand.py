"""Graphs from lists of instructions, and with whole numbers as features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tests.support import random_graphs
from tpugraphs_jax import columns
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.graph import OpGraph

# Columns that describe a convolution with a window of 3 x 3 and 8 features from 4: kernels are
# (H, W, in, out), other arrays (N, H, W, C).
NUMBERS = {44: 9, 93: 0, 94: 3, 99: 2, 100: 3, 105: 0, 106: 3, 107: 1}
Instruction = tuple[str, str, Sequence[int], Mapping[int, Any]]


def made_of(nodes: Sequence[Instruction], edges: Sequence[Sequence[int]]) -> OpGraph:
  """A graph of (opcode, type, shape, columns) for every node and edges (consumer, producer)."""
  ids, feat = columns.opcode_ids(), np.zeros((len(nodes), NODE_FEATURES), np.float32)
  types = [kind.name for kind in columns.ELEMENT_TYPES]
  for node, (_, kind, shape, values) in enumerate(nodes):
    feat[node, 2 + types.index(kind)] = 1
    feat[node, 21 : 21 + len(shape)] = shape
    feat[node, 27:29] = sum(shape), math.prod(shape)
    for column, value in values.items():
      feat[node, column] = value
  graph = random_graphs.layout_graph(
    np.random.default_rng(0), nodes=len(nodes), edges=0, config_nodes=[0], configs=2
  )
  return dataclasses.replace(
    graph,
    node_feat=feat,
    node_opcode=np.array([ids[name] for name, *_ in nodes], np.uint8),
    edge_index=np.array(edges, np.int32),
  )


def whole_numbers(seed: int, nodes: int = 20, edges: int = 30) -> OpGraph:
  """A random program with whole numbers as features, and some convolutions and products."""
  rng = np.random.default_rng(seed)
  graph = random_graphs.layout_graph(rng, nodes=nodes, edges=edges, config_nodes=[0], configs=2)
  feat = rng.integers(-3, 400, (nodes, NODE_FEATURES)).astype(np.float32)
  opcode = rng.choice([26, 34, 7, 1], nodes).astype(np.uint8)
  return dataclasses.replace(graph, node_feat=feat, node_opcode=opcode)
