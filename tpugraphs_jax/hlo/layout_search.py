"""Layout configurations for a program of one's own, in the forms of the data set.

A configurable node chooses, for each of its tensors, an order of dimensions
from minor to major. What the choices are follows the released graphs:
convolution and dot order two dimensions of output, input and kernel each, and
reshape orders all dimensions such that no element moves in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math

import numpy as np

from tpugraphs_jax.columns import LAYOUT_CONFIG_FEATURES, MAX_RANK
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.hlo import module_graph, node_features, proto
from tpugraphs_jax.hlo.choices import distinct_choices

_DEFAULT = (-1,) * LAYOUT_CONFIG_FEATURES

Dims = tuple[int, ...]
Row = tuple[int, ...]  # 18 integers


def layout_configs(graph: module_graph.HloGraph, n: int, seed: int = 0) -> LayoutConfigs:
  """Up to `n` distinct layout configurations of a graph, not labelled.

  The first one leaves every node to the compiler. Nodes with the same opcode,
  shapes and dimension numbers decide together, as equivalent nodes do in the
  data set; a graph with few choices has fewer than `n` configurations.

  Args:
    graph: a graph from `featurize`; its `config_node` are the nodes that choose.
    n: how many configurations.
    seed: of the sample, where not all configurations are listed.

  Raises:
    ValueError: no node is configurable, or one of them is inconsistent.
  """
  if not len(graph.config_node):
    raise ValueError(f"{graph.name}: no configurable node, expected a convolution, dot or "
                     "reshape")
  decisions = _decisions(graph)
  groups = {decision: column for column, decision in enumerate(dict.fromkeys(decisions))}
  row_id: dict[Row, int] = {}
  for group in groups:
    for row in group.rows:
      row_id.setdefault(row, len(row_id))
  choice = distinct_choices([len(group.rows) for group in groups], n, seed=seed)
  group_row = np.empty(choice.shape, np.min_scalar_type(len(row_id) - 1))
  for group, column in groups.items():
    ids = np.array([row_id[row] for row in group.rows])
    group_row[:, column] = ids[choice[:, column]]
  return LayoutConfigs(
      rows=np.array(list(row_id), np.int8),
      node_group=np.array([groups[decision] for decision in decisions], np.int32),
      group_row=group_row,
      runtime_ns=np.zeros(len(choice), np.int64))


@dataclasses.dataclass(frozen=True)
class _Decision:
  """What a node chooses from; nodes whose decisions are equal decide together."""

  opcode: str
  shapes: tuple[Dims, ...]  # of the output, then of the operands
  rows: tuple[Row, ...]  # the default first


def _decisions(graph: module_graph.HloGraph) -> list[_Decision]:
  """One decision per configurable node."""
  nodes = node_features.instructions(graph.module)
  position = module_graph.node_positions(graph.module)
  decisions = []
  for index in graph.config_node:
    node = nodes[index]
    operands = [nodes[position[operand]] for operand in node.operand_ids]
    shapes = tuple(tuple(each.shape.dimensions) for each in (node, *operands))
    orders_of, operand_count = _ORDERS.get(node.opcode, (None, 0))
    if orders_of is None or len(operands) != operand_count:
      raise ValueError(f"{graph.name}: configurable node {node.name!r} is {node.opcode!r} "
                       f"with {len(operands)} operands, expected a convolution or dot "
                       "with 2 or a reshape with 1")
    fits = max(map(len, shapes)) <= MAX_RANK
    rows = [row(orders) for orders in orders_of(node, shapes)] if fits else []
    decisions.append(
        _Decision(node.opcode, shapes, tuple(dict.fromkeys([_DEFAULT, *rows]))))
  return decisions


def _convolution_orders(
    node: proto.HloInstructionProto, shapes: Sequence[Dims]
) -> Iterator[tuple[Dims, ...]]:
  """Batch and feature of output and input, both features of the kernel."""
  numbers = node.convolution_dimension_numbers
  pairs = (
      (numbers.output_batch_dimension, numbers.output_feature_dimension),
      (numbers.input_batch_dimension, numbers.input_feature_dimension),
      (numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension))
  for pair, shape in zip(pairs, shapes):
    if len({*pair}) != 2 or not {*pair} <= {*range(len(shape))}:
      raise ValueError(f"convolution {node.name!r} has dimension numbers {pair} for a tensor "
                       f"of {len(shape)} dimensions")
  return itertools.product(*map(both_orders, pairs))


def _dot_orders(
    node: proto.HloInstructionProto, shapes: Sequence[Dims]
) -> Iterator[tuple[Dims, ...]]:
  """The last two dimensions of output and both operands."""
  del node
  return itertools.product(
      *(both_orders(tuple(range(len(shape)))[-2:]) for shape in shapes))


def _reshape_orders(
    node: proto.HloInstructionProto, shapes: Sequence[Dims]
) -> Iterator[tuple[Dims, ...]]:
  del node
  return reshape_orders(*shapes)


def reshape_orders(output: Dims, operand: Dims) -> Iterator[tuple[Dims, Dims]]:
  """Orders of output and input between which no element moves.

  The dimensions fall into parts of equal size on both sides. A part keeps its
  order inside; the parts are permuted alike on both sides, and dimensions of
  size 1, which do not matter, are the most major.
  """
  parts = _equal_parts(output, operand)
  for permuted in itertools.permutations(parts):
    yield tuple(
        tuple(itertools.chain.from_iterable(reversed(part[side]) for part in permuted))
        + tuple(dim for dim in reversed(range(len(shape))) if shape[dim] == 1)
        for side, shape in enumerate((output, operand)))


# Opcode: the orders of its tensors, and how many operands it has.
_ORDERS = {
    "convolution": (_convolution_orders, 2),
    "dot": (_dot_orders, 2),
    "reshape": (_reshape_orders, 1),
}


def both_orders(dims: Dims) -> list[Dims]:
  """A pair of dimensions in both orders; anything shorter as it is."""
  return list(dict.fromkeys([dims, dims[::-1]]))


def _equal_parts(first: Dims, second: Dims) -> list[tuple[Dims, Dims]]:
  """The smallest runs of dimensions of two shapes with equally many elements.

  Dimensions of size 1 are in no part. Shapes without elements, or with different
  numbers of them, are one part.
  """
  dims = [[dim for dim, size in enumerate(shape) if size != 1] for shape in (first, second)]
  if math.prod(first) != math.prod(second) or min((*first, *second), default=1) < 1:
    return [(tuple(dims[0]), tuple(dims[1]))]
  parts = []
  while dims[0]:
    part = ([dims[0].pop(0)], [dims[1].pop(0)])
    sizes = [first[part[0][0]], second[part[1][0]]]
    while sizes[0] != sizes[1]:
      smaller = int(sizes[1] < sizes[0])
      part[smaller].append(dims[smaller].pop(0))
      sizes[smaller] *= (first, second)[smaller][part[smaller][-1]]
    parts.append((tuple(part[0]), tuple(part[1])))
  return parts


def row(orders: Sequence[Dims]) -> Row:
  """The 18 integers of a node: six per tensor, minor to major, then -1."""
  return tuple(itertools.chain.from_iterable(
      (*order, *(-1,) * (MAX_RANK - len(order))) for order in
      (*orders, *((),) * (LAYOUT_CONFIG_FEATURES // MAX_RANK - len(orders)))))
