"""Choices of a program's equations as layout configurations of its graph's nodes.

The compiler keeps the name of an equation's group in the instructions that it
makes of the equation. A node takes the choice of its group, written for the
node's own dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import re

import numpy as np

from tpugraphs_jax import graph
from tpugraphs_jax.collect import choosing
from tpugraphs_jax.collect.equations import Dims, Group, Orders
from tpugraphs_jax.graph import factor_layout_configs
from tpugraphs_jax.hlo import estimates, layout_search, module_graph, node_features, proto

_TAG = re.compile(rf"{choosing.SCOPE}(\d+)")
# What the compiler may make of an equation that still has its tensors.
_OPCODES = {
    "conv_general_dilated": ("convolution", "dot"),
    "dot_general": ("dot", "convolution"),
    "reshape": ("reshape",),
}


def option_rows(op_graph: module_graph.HloGraph, choices: choosing.Choices) -> list[np.ndarray]:
  """For every configurable node, the row of each option of its group.

  Args:
    op_graph: the graph of `apply(function, choices.default)`.
    choices: of the same function.

  Returns:
    Per node `[options, 18]` int8, minor to major: output, first and second
    operand. -1 where an option leaves a tensor to the compiler, or where the
    compiler has changed its shape. A node of no group has one row of -1.
  """
  nodes = node_features.instructions(op_graph.module)
  position = module_graph.node_positions(op_graph.module)
  rows = []
  for index in op_graph.config_node:
    node = nodes[index]
    group = _group(node, choices)
    shapes = [tuple(node.shape.dimensions)] + [
        tuple(nodes[position[operand]].shape.dimensions) for operand in node.operand_ids]
    options = _node_orders(group, shapes) if group else [((),) * 2]
    rows.append(np.array([layout_search.row(orders) for orders in options], np.int8))
  return rows


def node_groups(op_graph: module_graph.HloGraph, choices: choosing.Choices) -> np.ndarray:
  """The group of every configurable node, `[K]` int64; -1 for none."""
  nodes = node_features.instructions(op_graph.module)
  groups = [_group(nodes[index], choices) for index in op_graph.config_node]
  return np.array([choices.groups.index(group) if group else -1 for group in groups], np.int64)


def visible_options(
    op_graph: module_graph.HloGraph, choices: choosing.Choices
) -> list[np.ndarray]:
  """Per group, the options that the graph can tell apart, ascending, 0 first.

  A group without a node in the graph, because the compiler has simplified its
  equations away, has only option 0: nothing that a model sees would tell of it.
  """
  rows = option_rows(op_graph, choices)
  groups = node_groups(op_graph, choices)
  result = []
  for place, group in enumerate(choices.groups):
    nodes = np.flatnonzero(groups == place)
    if not nodes.size:
      result.append(np.zeros(1, np.int64))
      continue
    seen = np.concatenate([rows[node] for node in nodes], axis=1)
    assert len(seen) == len(group.options)
    _, first = np.unique(seen, axis=0, return_index=True)
    result.append(np.sort(first))
  return result


def cycles_by_group(kernels: Iterable[estimates.KernelCycles]) -> dict[str, list[int]]:
  """The cycles of every kernel, by the group that it comes from.

  A kernel is of the group that its first name with a group tells: its own name, then
  the names of fused convolutions and dots, then of other fused instructions.

  Args:
    kernels: of a function that `apply` returned.

  Returns:
    Cycles by number of the group; at `rest` of the kernels that come from no group.
  """
  found: dict[str, list[int]] = {}
  for kernel in kernels:
    tags = [tag[-1] for tag in map(_TAG.findall, kernel.names) if tag]
    found.setdefault(tags[0] if tags else "rest", []).append(kernel.cycles)
  return found


def layout_configs(
    op_graph: module_graph.HloGraph, choices: choosing.Choices, numbers: np.ndarray,
    label: np.ndarray,
) -> graph.LayoutConfigs:
  """The configurations of option numbers `[C, groups]` with labels `[C]` int64."""
  rows = option_rows(op_graph, choices)
  groups = node_groups(op_graph, choices)
  feat = np.stack(
      [each[numbers[:, group] if group >= 0 else np.zeros(len(numbers), np.int64)]
       for each, group in zip(rows, groups)], axis=1)
  return factor_layout_configs(feat, label)


def _group(node: proto.HloInstructionProto, choices: choosing.Choices) -> Group | None:
  found = _TAG.findall(node.metadata.op_name)
  if not found or int(found[-1]) >= len(choices.groups):
    return None
  group = choices.groups[int(found[-1])]
  return group if node.opcode in _OPCODES[group.primitive] else None


def _node_orders(group: Group, node_shapes: Sequence[Dims]) -> list[Orders]:
  """The group's options in the dimensions of a node, whose operands may be swapped."""
  straight = [_axes(*pair) for pair in zip(group.shapes, node_shapes)]
  swapped = [_axes(*pair) for pair in zip(
      group.shapes, (node_shapes[0], *reversed(node_shapes[1:])))]
  is_swapped = sum(axes is None for axes in swapped) < sum(axes is None for axes in straight)
  axes = swapped if is_swapped else straight
  result = []
  for option in group.options:
    output, *operands = (
        tuple(each[dim] for dim in order) if each is not None else ()
        for order, each in zip(option, axes))
    result.append((output, *(reversed(operands) if is_swapped else operands)))
  return result


def _axes(shape: Dims, node_shape: Dims) -> Dims | None:
  """For each dimension of an equation's tensor the node's, None where they differ.

  The compiler may transpose a tensor; dimensions of one size keep their order.
  """
  if sorted(shape) != sorted(node_shape):
    return None
  if shape == node_shape:
    return tuple(range(len(shape)))
  left = list(range(len(node_shape)))
  axes = []
  for size in shape:
    axes.append(next(dim for dim in left if node_shape[dim] == size))
    left.remove(axes[-1])
  return tuple(axes)
