"""The batch of programs whose configurations are scored by looked-up costs.

As in `batch`, an index that is too large for the array it points into means "absent".
Letters besides those of `graph`: U choices of configurable nodes, P pairs of nodes,
B groups, Q pairs of groups, T terms of groups, V terms of pairs of groups
(`data.terms`).
"""

from __future__ import annotations

from typing import NamedTuple

import jraph
import numpy as np

from tpugraphs_jax.batch import Adjacency


class UnaryTerms(NamedTuple):
  """What a choice of a group of nodes is, and which nodes it sets."""

  row: np.ndarray  # [T] int32 dictionary row, or ABSENT
  choice_node: np.ndarray  # [U] int32 node of the graph, or ABSENT
  choice_term: np.ndarray  # [U] int32 ascending, its group's term, or ABSENT
  choice_feat: np.ndarray  # [U, F] float32 `data.layout_waste`
  choice_weight: np.ndarray  # [U] float32 share of the node in the bytes of its program, 0 = absent


class PairTerms(NamedTuple):
  """Which two choices a pair term is, and the pairs of nodes that it concerns."""

  column: np.ndarray  # [V] int32 ascending, pair of groups, or ABSENT
  choices: np.ndarray  # [V, 2] int32 unary terms, or ABSENT
  ends: np.ndarray  # [P, 3] int32 nodes: first end, second end, where they meet; or ABSENT
  feat: np.ndarray  # [P, F] float32 `data.table_batching.pair_features`
  weight: np.ndarray  # [P] float32 as `choice_weight`, of the smallest tensor between
  pair_column: np.ndarray  # [P] int32 ascending, pair of groups, or ABSENT
  is_turned: np.ndarray  # [P] bool: the first end has the second choice of the term


class TableBatch(NamedTuple):
  """G slots, each with one program and C of its configurations as numbers of terms.

  The cost of configuration c in column b is that of term `start[b] + code[b, c]`.
  """

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  rows: np.ndarray  # [R, 18] float32 dictionary of configuration rows of all slots
  unary: UnaryTerms
  pairs: PairTerms
  group_start: np.ndarray  # [B] int32 first unary term of each group, or ABSENT
  group_graph: np.ndarray  # [B] int32 slot of each group, or ABSENT
  group_code: np.ndarray  # [B, C] uint8 or larger
  column_start: np.ndarray  # [Q] int32 first pair term of each pair of groups, or ABSENT
  column_graph: np.ndarray  # [Q] int32 slot, or ABSENT
  column_code: np.ndarray  # [Q, C] uint8 or larger
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool
