"""Padded batches of programs and choices, for score tables.

A program is prepared once with the choices of its groups. A slate adds the choices of its
configurations. As in `data.batching`, padding has an index beyond the end of its array. Letters in
addition to the letters of `graph`: B groups of configurable nodes, R largest number of choices of a
group, P pairs of nodes, Q pairs of groups (`terms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import jraph
import numpy as np

from tpugraphs_jax.data import batching, features
from tpugraphs_jax.data.batching import ABSENT, Adjacency, Array
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.rankers.tables import node_pairs
from tpugraphs_jax.rankers.tables.terms import Terms

_HOP_SCALE = 10.0  # most pairs have fewer hops
_OPERANDS = 3  # classes of operands: first, second, later


class GroupChoices(NamedTuple):
  """The choices of groups, and the configurable nodes of each group."""

  row: Array  # [B, R] int32 dictionary row of each choice, or ABSENT
  node: Array  # [K] int32 node of the graph, or ABSENT
  group: Array  # [K] int32 its group, or ABSENT
  feat: Array  # [K, R, F] float32 features of each choice
  weight: Array  # [K] float32 bytes of the output, in the unit of the program


class GroupPairs(NamedTuple):
  """Pairs of groups, and the pairs of nodes between them."""

  groups: Array  # [Q, 2] int32, or ABSENT
  ends: Array  # [P, 3] int32 nodes: first end, second end, meeting node; or ABSENT
  feat: Array  # [P, F] float32 `pair_features`
  weight: Array  # [P] float32 bytes of the smallest tensor between, in the unit of the program
  column: Array  # [P] int32 pair of groups, ascending, or ABSENT
  is_turned: Array  # [P] bool: the first end is in the second group


class TableBatch(NamedTuple):
  """G slates, each with one program and C of its configurations as choices of groups."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  rows: Array  # [R', 18] float32 dictionary of configuration rows of all slates
  choices: GroupChoices
  pairs: GroupPairs
  group_graph: Array  # [B] int32 slate of each group, or ABSENT
  code: Array  # [B, C] choice of each group, uint8 or a larger type
  target: Array  # [G, C] float32, larger = slower
  config_mask: Array  # [G, C] bool
  kernels: batching.KernelBatch | None = None  # for networks that predict the times of kernels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedTables(batching.PreparedGraph[LayoutConfigs]):
  """A program with all arrays that do not depend on its slate or batch."""

  terms: Terms
  choices: GroupChoices  # nodes and groups are numbered from 0 in each graph
  pairs: GroupPairs


def prepare(
  graph: OpGraph[LayoutConfigs],
  feat: np.ndarray,
  terms: Terms,
  *,
  slots: int = batching.SLOTS,
  tiling: bool = True,
  describe: Callable[..., np.ndarray] = features.choice_features,
  has_kernels: bool = False,
) -> PreparedTables:
  """Arrays of a program for batches.

  Args:
    graph: host graph.
    feat: `[N, F]` float32 transformed node features.
    terms: terms of all configurations that slates are drawn from (`terms.terms_of`).
    slots: width of the neighbour tables (`data.batching.SLOTS`).
    tiling: node features get `features.node_padding`, and choices the features of `describe`.
      Without it the features of choices are 0.
    describe: `(graph, node [U], row [U]) -> [U, F]`, features of choices.
    has_kernels: batches have the times of kernels.
  """
  if tiling:
    feat = np.concatenate([feat, features.node_padding(graph.node_feat)], axis=1)
  prepared = batching.prepare(graph, feat, slots=slots)
  nbytes = node_pairs.tensor_bytes(graph.node_feat).astype(np.float64)
  config_bytes = nbytes[graph.config_node]
  # The norm of the bytes of groups: the scale of sums of costs that are proportional to bytes.
  unit = max(float(np.linalg.norm(np.bincount(graph.configs.node_group, config_bytes))), 1.0)
  choices = _choices(graph, terms, config_bytes / unit, describe, tiling)
  pairs = _group_pairs(graph, terms, unit)
  sizes = prepared.sizes | {
    "rows": len(graph.configs.rows),
    "config_nodes": len(choices.node),
    "groups": len(choices.row),
    "columns": len(pairs.groups),
    "pairs": len(pairs.ends),
    "choices": terms.choices,
  }
  if has_kernels:
    sizes |= batching.kernel_sizes(graph.configs)
  parts = {"terms": terms, "choices": choices, "pairs": pairs, "sizes": sizes}
  return PreparedTables(**vars(prepared) | parts)


def _choices(
  graph: OpGraph[LayoutConfigs], terms, weight: np.ndarray, describe: Callable, tiling: bool
) -> GroupChoices:
  row = terms.row_table
  node, choice = np.nonzero(row[graph.configs.node_group] >= 0)
  values = describe(graph, node, row[graph.configs.node_group[node], choice])
  feat = np.zeros((len(graph.config_node), terms.choices, values.shape[1]), np.float32)
  if tiling:
    feat[node, choice] = values
  return GroupChoices(
    np.where(row < 0, ABSENT, row).astype(np.int32),
    graph.config_node.astype(np.int32),
    graph.configs.node_group.astype(np.int32),
    feat,
    weight.astype(np.float32),
  )


def _group_pairs(graph: OpGraph, terms, unit: float) -> GroupPairs:
  pairs, order = terms.pairs, np.argsort(terms.pair_column, kind="stable")
  order = order[terms.pair_column[order] >= 0]
  least = np.where(pairs.is_direct, pairs.nbytes[:, 0], pairs.nbytes.min(axis=1))
  ends = np.concatenate([graph.config_node[pairs.ends], pairs.via[:, None]], axis=1)
  return GroupPairs(
    terms.columns,
    ends[order].astype(np.int32),
    pair_features(pairs, unit)[order],
    (least / unit).astype(np.float32)[order],
    terms.pair_column[order],
    terms.is_turned[order],
  )


def pair_features(pairs: node_pairs.NodePairs, unit: float) -> np.ndarray:
  """Features of pairs of nodes, `[P, 11]` float32.

  Columns: whether the pair is direct; then for both paths hops / 10, log(1 + bytes of the smallest
  tensor / unit), and the operand at the end (one-hot: first, second, later).

  Args:
    pairs: pairs of one program.
    unit: unit of bytes.
  """
  operand = np.minimum(pairs.operand, _OPERANDS - 1)[..., None] == np.arange(_OPERANDS)
  operand &= (pairs.operand != node_pairs.NO_OPERAND)[..., None]
  columns = [pairs.is_direct[:, None], pairs.hops / _HOP_SCALE, np.log1p(pairs.nbytes / unit)]
  columns.append(operand.reshape(-1, 2 * _OPERANDS))
  return np.concatenate(columns, axis=1).astype(np.float32)


def assemble(
  slates: Sequence[batching.Slate], budget: batching.Budget, *, graphs: int, configs: int
) -> TableBatch:
  """A padded batch of slates of `PreparedTables`.

  Args:
    slates: at most `graphs` slates, each of at most `configs` configurations.
    budget: room for each entry of `PreparedTables.sizes`; its "choices" is R of the batch.
    graphs: slates G of the batch.
    configs: configurations C per slate.

  Raises:
    ValueError: the slates exceed the budget.
  """
  programs, choices = [slate.graph for slate in slates], budget["choices"]
  graph, tables, nodes = batching.assemble_graphs(programs, budget, graphs)
  starts = lambda key: np.cumsum([0] + [program.sizes[key] for program in programs])
  first = {key: starts(key) for key in ("rows", "groups", "columns")}
  target, mask = batching.targets(slates, graphs, configs)
  code = np.zeros((budget["groups"], configs), np.min_scalar_type(choices - 1))
  for slate, group in zip(slates, first["groups"]):
    part = slate.graph.terms.encode(slate.graph.configs.group_row[slate.config_ids])
    code[group : group + len(part), : part.shape[1]] = part
  slate_of = [np.full(p.sizes["groups"], i, np.int32) for i, p in enumerate(programs)]
  return TableBatch(
    graph,
    tables,
    batching.padded([p.configs.rows.astype(np.float32) for p in programs], budget["rows"], 0),
    _assemble_choices([p.choices for p in programs], nodes, first, budget, choices),
    _assemble_pairs([p.pairs for p in programs], nodes, first, budget),
    batching.padded(slate_of, budget["groups"], ABSENT),
    code,
    target,
    mask,
    batching.assemble_kernels(slates, nodes, budget, configs) if "kernels" in budget else None,
  )


def _assemble_choices(
  parts: Sequence[GroupChoices], nodes, first, budget, choices: int
) -> GroupChoices:
  field = lambda name: [getattr(part, name) for part in parts]
  groups, config_nodes = budget["groups"], budget["config_nodes"]
  wide = lambda part, fill: np.pad(
    part, [(0, 0), (0, choices - part.shape[1])] + [(0, 0)] * (part.ndim - 2), constant_values=fill
  )
  return GroupChoices(
    batching.shifted([wide(row, ABSENT) for row in field("row")], first["rows"], groups),
    batching.shifted(field("node"), nodes, config_nodes),
    batching.shifted(field("group"), first["groups"], config_nodes),
    batching.padded([wide(feat, 0) for feat in field("feat")], config_nodes, 0),
    batching.padded(field("weight"), config_nodes, 0),
  )


def _assemble_pairs(parts: Sequence[GroupPairs], nodes, first, budget) -> GroupPairs:
  field = lambda name: [getattr(part, name) for part in parts]
  pairs = budget["pairs"]
  return GroupPairs(
    batching.shifted(field("groups"), first["groups"], budget["columns"]),
    batching.shifted(field("ends"), nodes, pairs),
    batching.padded(field("feat"), pairs, 0),
    batching.padded(field("weight"), pairs, 0),
    batching.shifted(field("column"), first["columns"], pairs),
    batching.padded(field("is_turned"), pairs, 0),
  )
