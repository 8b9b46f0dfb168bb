"""The batch of programs whose configurations are scored by looked-up costs.

As in `batch`, an index that is too large for the array it points into means "absent".
Letters besides those of `graph`: B groups of configurable nodes, R choices of the group
with most, P pairs of nodes, Q pairs of groups (`rankers.tables.terms`).
"""

from __future__ import annotations

from typing import NamedTuple

import jraph
import numpy as np

from tpugraphs_jax.data.batch import Adjacency


class Choices(NamedTuple):
  """What groups may choose, and the nodes that choose so."""

  row: np.ndarray  # [B, R] int32 dictionary row of each choice, or ABSENT
  node: np.ndarray  # [K] int32 node of the graph, or ABSENT
  group: np.ndarray  # [K] int32 its group, or ABSENT
  feat: np.ndarray  # [K, R, F] float32 `data.tiling.choice_features`
  weight: np.ndarray  # [K] float32 its bytes relative to those of its program


class GroupPairs(NamedTuple):
  """Pairs of groups, and the pairs of nodes between them."""

  groups: np.ndarray  # [Q, 2] int32, or ABSENT
  ends: np.ndarray  # [P, 3] int32 nodes: first end, second end, where they meet; or ABSENT
  feat: np.ndarray  # [P, F] float32 `rankers.tables.batching.pair_features`
  weight: np.ndarray  # [P] float32 as `Choices.weight`, of the smallest tensor between
  column: np.ndarray  # [P] int32 ascending, pair of groups, or ABSENT
  is_turned: np.ndarray  # [P] bool: the first end is in the second group


class TableBatch(NamedTuple):
  """G slots, each with one program and C of its configurations as choices of groups."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  rows: np.ndarray  # [R', 18] float32 dictionary of configuration rows of all slots
  choices: Choices
  pairs: GroupPairs
  group_graph: np.ndarray  # [B] int32 slot of each group, or ABSENT
  code: np.ndarray  # [B, C] uint8 or larger, choice of each group
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool
