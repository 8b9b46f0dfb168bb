"""Options of layouts for the nodes of a program, in the forms of the data set.

A configurable node chooses, for each of its tensors, an order of dimensions from minor to
major. The orders follow the released graphs: convolution and dot order two dimensions of
output, input and kernel each, and reshape orders all dimensions such that no element moves in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import itertools
import math

import numpy as np

from tpugraphs_jax.columns import LAYOUT_CONFIG_FEATURES, layout_row, MAX_RANK
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.hlo import proto

Dims = tuple[int, ...]
Row = tuple[int, ...]  # 18 integers
# Opcode, shapes of output and operands, and the rows to choose from, the default first.
Decision = tuple[str, tuple[Dims, ...], tuple[Row, ...]]
_DEFAULT = (-1,) * LAYOUT_CONFIG_FEATURES
_OPERANDS = {"convolution": 2, "dot": 2, "reshape": 1}

_LISTED = 1 << 17  # up to this many combinations all are listed, of more some are drawn


def layout_configs(
  module: proto.HloModuleProto, config_node: np.ndarray, n: int, *, seed: int, where: str
) -> LayoutConfigs:
  """Up to `n` distinct layout configurations of a module, as `HloGraph.with_layouts` says.

  Args:
    module: of the program.
    config_node: `[K]` int nodes that choose.
    n: how many configurations.
    seed: of the sample, where there are more than `n`.
    where: begins error messages.
  """
  if not len(config_node):
    raise ValueError(f"{where}: no configurable node, expected a convolution, dot or reshape")
  decisions = _decisions(module, config_node, where)
  groups = {decision: column for column, decision in enumerate(dict.fromkeys(decisions))}
  options = [rows for _, _, rows in groups]
  distinct = dict.fromkeys(itertools.chain.from_iterable(options))
  row_id = {row: number for number, row in enumerate(distinct)}
  choice = distinct_choices(list(map(len, options)), n, seed=seed)
  group_row = np.empty(choice.shape, np.min_scalar_type(len(row_id) - 1))
  for column, rows_of_group in enumerate(options):
    group_row[:, column] = np.array([row_id[row] for row in rows_of_group])[choice[:, column]]
  node_group = np.array([groups[decision] for decision in decisions], np.int32)
  rows, labels = np.array(list(row_id), np.int8), np.zeros(len(choice), np.int64)
  return LayoutConfigs(rows, node_group, group_row, labels)


def _decisions(module: proto.HloModuleProto, config_node: np.ndarray, where: str) -> list[Decision]:
  """The decision of each configurable node; nodes with equal decisions decide together."""
  nodes, position = proto.instructions(module), proto.positions(module)
  decisions = []
  for index in config_node:
    node = nodes[index]
    operands = [nodes[position[operand]] for operand in node.operand_ids]
    if len(operands) != _OPERANDS.get(node.opcode, -1):
      raise ValueError(
        f"{where}: configurable node {node.name!r} is {node.opcode!r} "
        f"with {len(operands)} operands, expected a convolution or dot "
        "with 2 or a reshape with 1"
      )
    shapes = tuple(tuple(tensor.shape.dimensions) for tensor in (node, *operands))
    fits = max(map(len, shapes)) <= MAX_RANK
    rows = [layout_row(orders) for orders in _orders(node, shapes)] if fits else []
    decisions.append((node.opcode, shapes, tuple(dict.fromkeys([_DEFAULT, *rows]))))
  return decisions


def _orders(node: proto.HloInstructionProto, shapes: Sequence[Dims]) -> Iterator[tuple[Dims, ...]]:
  """All combinations of orders of a node's tensors."""
  if node.opcode == "reshape":
    return reshape_orders(*shapes)
  if node.opcode == "dot":
    return pair_orders(last_two(shape) for shape in shapes)
  numbers = node.convolution_dimension_numbers
  pairs = (
    (numbers.output_batch_dimension, numbers.output_feature_dimension),
    (numbers.input_batch_dimension, numbers.input_feature_dimension),
    (numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension),
  )
  for pair, shape in zip(pairs, shapes):
    if len({*pair}) != 2 or not {*pair} <= {*range(len(shape))}:
      raise ValueError(
        f"convolution {node.name!r} has dimension numbers {pair} for a tensor "
        f"of {len(shape)} dimensions"
      )
  return pair_orders(pairs)


def last_two(shape: Sequence[int]) -> Dims:
  """The dimensions of a dot's tensor that are ordered: the last two, or all if there are fewer."""
  return tuple(range(len(shape)))[-2:]


def pair_orders(pairs: Iterable[Dims]) -> Iterator[tuple[Dims, ...]]:
  """Every combination of both orders of each pair; a single dimension has one order."""
  return itertools.product(*(dict.fromkeys([pair, pair[::-1]]) for pair in pairs))


def reshape_orders(output: Dims, operand: Dims) -> Iterator[tuple[Dims, Dims]]:
  """Orders of output and input between which no element moves.

  The dimensions fall into parts of equal size on both sides. A part keeps its
  order inside; the parts are permuted alike on both sides, and dimensions of
  size 1, which do not matter, are the most major.
  """
  parts = _equal_parts(output, operand)
  for permuted in itertools.permutations(parts):
    of_output, of_operand = (
      tuple(itertools.chain.from_iterable(reversed(part[side]) for part in permuted))
      + tuple(dim for dim in reversed(range(len(shape))) if shape[dim] == 1)
      for side, shape in enumerate((output, operand))
    )
    yield of_output, of_operand


def _equal_parts(first: Dims, second: Dims) -> list[tuple[Dims, Dims]]:
  """The smallest runs of dimensions of two shapes with equally many elements.

  Dimensions of size 1 are in no part. Shapes without elements, or with different
  numbers of them, are one part.
  """
  shapes = first, second
  dims = [[dim for dim, size in enumerate(shape) if size != 1] for shape in shapes]
  if math.prod(first) != math.prod(second) or min((*first, *second), default=1) < 1:
    return [(tuple(dims[0]), tuple(dims[1]))]
  # Number of elements up to each dimension; where both shapes have the same number, a part ends.
  ends = [[math.prod(shape[: dim + 1]) for dim in ends_of] for shape, ends_of in zip(shapes, dims)]
  bounds = [1, *sorted(set(ends[0]) & set(ends[1]))]
  part = lambda side, low, high: tuple(
    dim for dim, end in zip(dims[side], ends[side]) if low < end <= high
  )
  return [(part(0, low, high), part(1, low, high)) for low, high in itertools.pairwise(bounds)]


def distinct_choices(options: Sequence[int], n: int, *, seed: int) -> np.ndarray:
  """At most `n` distinct combinations of independent choices, `[C, len(options)]` int64.

  Args:
    options: the number of options of each choice: at least one choice, all positive.
    n: how many combinations; all of them where there are fewer.
    seed: of the draw.

  Returns:
    Option numbers in ascending order of combinations, first the combination of all first options.
  """
  if n < 1:
    raise ValueError(f"n is {n}, expected at least one configuration")
  rng = np.random.default_rng(seed)
  total = math.prod(options)
  if total <= max(n, _LISTED):
    choices = np.stack(np.unravel_index(np.arange(total), tuple(options)), axis=1)
  else:
    choices = np.zeros((1, len(options)), np.int64)
    while len(choices) < n:
      drawn = rng.integers(0, options, (n, len(options)))
      choices = np.unique(np.concatenate([choices, drawn]), axis=0)
  if len(choices) <= n:
    return choices
  return choices[np.append(0, 1 + np.sort(rng.choice(len(choices) - 1, n - 1, replace=False)))]
