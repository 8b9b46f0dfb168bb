"""Programs and chosen configurations to padded `TableBatch`es of few fixed shapes.

As `data.batching`, for rankers that look costs up: a program is prepared once with the
terms of all its configurations, a slate adds the numbers of its configurations' terms.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from tpugraphs_jax.batch import ABSENT
from tpugraphs_jax.data import adjacency as adjacency_lib
from tpugraphs_jax.data import batching
from tpugraphs_jax.data import layout_waste
from tpugraphs_jax.data import node_pairs
from tpugraphs_jax.data import terms as terms_lib
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.table_batch import PairTerms, TableBatch, UnaryTerms

_HOP_SCALE = 10.0  # hops of most pairs are below
_OPERANDS = 3  # first, second, any other


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedTables:
  """One program with everything that does not depend on its slate or batch."""

  graph: batching.PreparedGraph
  terms: terms_lib.Terms
  unary: UnaryTerms  # of this graph alone: node and term numbers begin at 0
  pairs: PairTerms
  sizes: dict[str, int]  # what the program takes of each entry of a budget

  @property
  def name(self) -> str:
    return self.graph.name

  @property
  def configs(self) -> LayoutConfigs:
    return self.graph.configs


def prepare(
    graph: OpGraph, feat: np.ndarray, terms: terms_lib.Terms, *,
    slots: int = adjacency_lib.SLOTS, tiling: bool = True,
) -> PreparedTables:
  """Arrays of a program for batches.

  Args:
    graph: host graph with configurations.
    feat: `[N, F]` float32 transformed node features.
    terms: of the configurations that slates are drawn from (`terms.terms_of`).
    slots: width of the neighbour tables (`data.adjacency.SLOTS`).
    tiling: whether the padding of dimensions to tiles is appended to the node
      features and given with every choice; otherwise the latter are zeros.
  """
  if tiling:
    feat = np.concatenate([feat, layout_waste.node_padding(graph.node_feat)], axis=1)
  prepared = batching.prepare(graph, feat, slots=slots)
  nbytes = node_pairs.tensor_bytes(graph.node_feat).astype(np.float64)
  own = nbytes[graph.config_node]
  group_bytes = np.bincount(graph.configs.node_group, own)
  # Of the order of the spread of a sum in which every group counts with its bytes.
  unit = max(float(np.sqrt(np.square(group_bytes).sum())), 1.0)
  unary = _unary_terms(graph, terms, own / unit, tiling)
  pairs = _pair_terms(graph, terms, nbytes, unit)
  sizes = prepared.sizes | {
      "rows": len(graph.configs.rows), "choices": len(unary.choice_node), "pairs": len(pairs.ends),
      "groups": len(terms.row_start) - 1, "columns": len(terms.columns),
      "unary_terms": len(terms.row), "pair_terms": len(terms.choices)}
  return PreparedTables(prepared, terms, unary, pairs, sizes)


def _unary_terms(graph: OpGraph, terms, weight: np.ndarray, tiling: bool) -> UnaryTerms:
  group_of_term = np.repeat(np.arange(len(terms.row_start) - 1), np.diff(terms.row_start))
  by_group = np.argsort(graph.configs.node_group, kind="stable")
  start = np.searchsorted(graph.configs.node_group[by_group], np.arange(len(terms.row_start)))
  # For every term the nodes of its group.
  count = np.diff(start)[group_of_term]
  term = np.repeat(np.arange(len(count)), count)
  within = np.arange(len(term)) - np.repeat(np.cumsum(count) - count, count)
  node = by_group[start[group_of_term[term]] + within]
  feat = np.zeros((len(node), layout_waste.FEATURES), np.float32)
  if tiling:
    feat = layout_waste.choice_features(graph, node, terms.row[term])
  return UnaryTerms(
      terms.row, graph.config_node[node].astype(np.int32), term.astype(np.int32), feat,
      weight[node].astype(np.float32))


def _pair_terms(graph: OpGraph, terms, nbytes: np.ndarray, unit: float) -> PairTerms:
  pairs, order = terms.pairs, np.argsort(terms.pair_column, kind="stable")
  least = np.where(pairs.is_direct, pairs.nbytes[:, 0], pairs.nbytes.min(axis=1))
  column = np.repeat(np.arange(len(terms.columns)), np.diff(terms.pair_start))
  ends = np.concatenate([graph.config_node[pairs.ends], pairs.via[:, None]], axis=1)
  return PairTerms(
      column.astype(np.int32), terms.choices, ends[order].astype(np.int32),
      pair_features(pairs, unit)[order], (least / unit).astype(np.float32)[order],
      terms.pair_column[order], terms.is_turned[order])


def pair_features(pairs: node_pairs.NodePairs, unit: float) -> np.ndarray:
  """What a network is told about pairs of nodes, besides its own states of the nodes.

  Args:
    pairs: of one program.
    unit: bytes that count as 1.

  Returns:
    `[P, 11]` float32: whether the pair is direct; hops of both ways / 10; logarithm of
    1 + bytes of the smallest tensors of both / unit; by which operand (first, second,
    later one) both arrive.
  """
  operand = np.minimum(pairs.operand, _OPERANDS - 1)[..., None] == np.arange(_OPERANDS)
  operand &= (pairs.operand != node_pairs.NO_OPERAND)[..., None]
  return np.concatenate([
      pairs.is_direct[:, None], pairs.hops / _HOP_SCALE, np.log1p(pairs.nbytes / unit),
      operand.reshape(-1, 2 * _OPERANDS)], axis=1).astype(np.float32)


PAIR_FEATURES = 5 + 2 * _OPERANDS


def total_sizes(programs: Sequence[PreparedTables]) -> dict[str, int]:
  """What the programs take together."""
  return {key: sum(program.sizes[key] for program in programs) for key in programs[0].sizes}


def code_dtype(programs: Sequence[PreparedTables]) -> np.dtype:
  """The smallest type that holds the codes of all programs."""
  return np.result_type(np.uint8, *(program.terms.code_dtype for program in programs))


def assemble_tables(
    slates: Sequence[batching.Slate], budget: batching.Budget, *, graphs: int, configs: int,
    dtype: np.dtype | None = None,
) -> TableBatch:
  """A padded batch of slates of `PreparedTables`.

  Args:
    slates: at most `graphs` of them, each of at most `configs` configurations.
    budget: room for each entry of `PreparedTables.sizes`.
    graphs: number of slots G of the batch.
    configs: configurations C per slot.
    dtype: of codes; `code_dtype` of these programs unless given. Batches of one run
      want the same.

  Raises:
    ValueError: the slates exceed the budget.
  """
  programs = [slate.graph for slate in slates]
  over = {k: v for k, v in total_sizes(programs).items() if v > budget[k]}
  if over:
    raise ValueError(f"programs {[p.name for p in programs]} take {over}, the budget has "
                     f"{ {k: budget[k] for k in over} }")
  graph, tables, nodes = batching._assemble_graphs([p.graph for p in programs], budget, graphs)
  place = {key: np.cumsum([0] + [p.sizes[key] for p in programs])
           for key in ("rows", "unary_terms", "pair_terms", "columns")}
  target, mask = batching.targets(slates, graphs, configs)
  codes = [slate.graph.terms.encode(slate.graph.configs.group_row[slate.config_ids])
           for slate in slates]
  groups = [p.sizes["groups"] for p in programs]
  dtype = code_dtype(programs) if dtype is None else dtype
  starts = lambda key, name, size: batching._shifted(
      [getattr(p.terms, name)[:-1].astype(np.int32) for p in programs], place[key], budget[size])
  owner = lambda size: batching._padded(
      [np.full(p.sizes[size], i, np.int32) for i, p in enumerate(programs)], budget[size], ABSENT)
  return TableBatch(
      graph, tables, batching._padded([p.configs.rows.astype(np.float32) for p in programs],
                                      budget["rows"], 0),
      _assemble_unary([p.unary for p in programs], nodes, place, budget),
      _assemble_pairs([p.pairs for p in programs], nodes, place, budget),
      starts("unary_terms", "row_start", "groups"), owner("groups"),
      _codes([c[:n] for c, n in zip(codes, groups)], budget["groups"], configs, dtype),
      starts("pair_terms", "pair_start", "columns"), owner("columns"),
      _codes([c[n:] for c, n in zip(codes, groups)], budget["columns"], configs, dtype),
      target, mask)


def _assemble_unary(parts: Sequence[UnaryTerms], nodes, place, budget) -> UnaryTerms:
  field = lambda name: [getattr(part, name) for part in parts]
  terms, choices = budget["unary_terms"], budget["choices"]
  return UnaryTerms(
      batching._shifted(field("row"), place["rows"], terms),
      batching._shifted(field("choice_node"), nodes, choices),
      batching._shifted(field("choice_term"), place["unary_terms"], choices),
      batching._padded(field("choice_feat"), choices, 0),
      batching._padded(field("choice_weight"), choices, 0))


def _assemble_pairs(parts: Sequence[PairTerms], nodes, place, budget) -> PairTerms:
  field = lambda name: [getattr(part, name) for part in parts]
  terms, pairs = budget["pair_terms"], budget["pairs"]
  return PairTerms(
      batching._shifted(field("column"), place["columns"], terms),
      batching._shifted(field("choices"), place["unary_terms"], terms),
      batching._shifted(field("ends"), nodes, pairs),
      batching._padded(field("feat"), pairs, 0), batching._padded(field("weight"), pairs, 0),
      batching._shifted(field("pair_column"), place["columns"], pairs),
      batching._padded(field("is_turned"), pairs, 0))


def _codes(parts: Sequence[np.ndarray], rows: int, configs: int, dtype) -> np.ndarray:
  """The parts `[b, <= configs]` below each other, padded by zeros to `[rows, configs]`."""
  joined, row = np.zeros((rows, configs), dtype), 0
  for part in parts:
    joined[row : row + len(part), : part.shape[1]] = part
    row += len(part)
  return joined
