"""A function's layouts as configurations of its graph, for models to rank and for labels.

The compiler keeps the name of an equation's group in the instructions that it makes of
the equation. A node takes the option of its group, written for the node's own dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax import files, graph, hlo
from tpugraphs_jax.collect import choosing, draw, labels
from tpugraphs_jax.collect.choosing import Group, Orders
from tpugraphs_jax.graph import factor_layout_configs
from tpugraphs_jax.hlo import proto, search
from tpugraphs_jax.hlo.search import Dims

Numbers = tuple[int, ...]  # the option of every group; all 0 for the compiler's own choice

# Opcodes of the instructions that the compiler makes of a primitive with the same tensors.
_OPCODES = {
    "conv_general_dilated": ("convolution", "dot"),
    "dot_general": ("dot", "convolution"),
    "reshape": ("reshape",),
}


class Problem:
  """A function's layouts: what there is to choose, the graph, and labels for choices.

  Args:
    function: that jax can trace.
    args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    label: how choices are labelled; its compiler makes the graph.
    name: of the graph and in messages; the function's own unless given.
    seed: of candidates.
    operands: whether the orders of operands are chosen too.
    module: file that keeps the compiler's module; read where it is there.

  Attributes:
    choices: the groups of equations and their options.
    graph: of the function with the compiler's own choice; it has no configurations.
    options: per group, the options that the graph can tell apart (`visible_options`).

  Raises:
    ValueError: nothing can be chosen, or as `choosing.choices`.
  """

  def __init__(
      self, function: Callable[..., Any], args: tuple, label: labels.Label, *, name: str = "",
      seed: int = 0, operands: bool = False, module: Path | None = None,
  ):
    self.function, self.args, self.label, self.seed = function, args, label, seed
    self.name = name or getattr(function, "__name__", "function")
    self.choices = choosing.choices(function, *args, operands=operands)
    self.graph = dataclasses.replace(
        hlo.featurize(self._module(module)), name=self.name, stage=label.stage)
    self.options = visible_options(self.graph, self.choices)
    if max(map(len, self.options), default=1) < 2:
      raise ValueError(f"{self.name}: no layout of its {len(self.options)} groups of equations "
                       "can be chosen; expected a convolution, dot or reshape")

  def _module(self, path: Path | None) -> bytes | Path:
    if path and path.exists():
      return path
    module = self.label.graph(self.apply((0,) * len(self.choices.groups)), self.args)
    if path:
      with files.replacing(path, "wb") as file:
        file.write(module)
    return module

  def apply(self, numbers: Sequence[int]) -> Callable[..., Any]:
    """The function with the layouts of option numbers `[groups]`."""
    return choosing.apply(self.function, self.choices.choice(numbers))

  def candidates(self) -> Iterator[Numbers]:
    """Distinct choices, first the compiler's own; see `draw.candidates`."""
    return draw.candidates(self.options, seed=self.seed, name=self.name)

  def with_configs(
      self, candidates: Sequence[Numbers], values: Sequence[int] | None = None
  ) -> hlo.HloGraph:
    """The graph with these choices as its configurations, and labels `[C]` where given."""
    label = np.array([0] * len(candidates) if values is None else values, np.int64)
    configs = layout_configs(self.graph, self.choices, np.array(candidates, np.int64), label)
    return dataclasses.replace(self.graph, configs=configs)

  def numbers_of(self, proposed: graph.OpGraph) -> list[Numbers]:
    """The choices that are the configurations of a graph; other configurations are left out."""
    rows, groups = option_rows(self.graph, self.choices), node_groups(self.graph, self.choices)
    found = []
    for config in proposed.configs.decode(np.arange(len(proposed.configs))):  # [K, 18]
      fits = [np.ones(len(group.options), bool) for group in self.choices.groups]
      for node, group in enumerate(groups):
        if group >= 0:
          fits[group] &= (rows[node] == config[node]).all(axis=1)
      if all(fit.any() for fit in fits):
        found.append(tuple(int(np.argmax(fit)) for fit in fits))
    return found

  def own_orders(self) -> list[Dims | None]:
    """The order of each group's output that the compiler chooses by itself, minor to major.

    Compiles the function once. None where equations of the group get different orders, or
    where no instruction of the optimised program has the group's output.
    """
    program = hlo.featurize(self.apply((0,) * len(self.options)), *self.args, optimized=True,
                            target=self.label.target)
    found: list[set[Dims]] = [set() for _ in self.options]
    for node in proto.instructions(program.module):
      number = choosing.number_in(node.metadata.op_name)
      group = _group(node, self.choices)
      axes = _axes(group.shapes[0], tuple(node.shape.dimensions)) if group else None
      if axes is not None:
        found[number].add(tuple(axes.index(dim) for dim in node.shape.layout.minor_to_major))
    return [orders.pop() if len(orders) == 1 else None for orders in found]

  def lines(self, group: int) -> list[str]:
    """Where a group's equations stand in the user's files: `model.py:12`."""
    nodes = self.graph.config_node[node_groups(self.graph, self.choices) == group]
    return sorted({self.graph.origins[node].where for node in nodes} - {""})

  def raw_labels(self, candidates: Sequence[Numbers]) -> dict[Numbers, labels.Raw]:
    """What the label found of choices, compared with each other; failed ones are left out."""
    found = dict(self.label.run(enumerate(map(self.apply, candidates)), self.args))
    return {candidates[place]: raw for place, raw in sorted(found.items())
            if not isinstance(raw, Exception)}


def option_rows(op_graph: hlo.HloGraph, choices: choosing.Choices) -> list[np.ndarray]:
  """For every configurable node, the row of each option of its group.

  Args:
    op_graph: the graph of `apply(function, choices.default)`.
    choices: of the same function.

  Returns:
    Per node `[options, 18]` int8, minor to major: output, first and second
    operand. -1 where an option leaves a tensor to the compiler, or where the
    compiler has changed its shape. A node of no group has one row of -1.
  """
  nodes = proto.instructions(op_graph.module)
  position = proto.positions(op_graph.module)
  rows = []
  for index in op_graph.config_node:
    node = nodes[index]
    group = _group(node, choices)
    shapes = [tuple(node.shape.dimensions)] + [
        tuple(nodes[position[operand]].shape.dimensions) for operand in node.operand_ids]
    options = _node_orders(group, shapes) if group else [((),) * 2]
    rows.append(np.array([search.row(orders) for orders in options], np.int8))
  return rows


def node_groups(op_graph: hlo.HloGraph, choices: choosing.Choices) -> np.ndarray:
  """The group of every configurable node, `[K]` int64; -1 for none."""
  nodes = proto.instructions(op_graph.module)
  groups = [_group(nodes[index], choices) for index in op_graph.config_node]
  return np.array([choices.groups.index(group) if group else -1 for group in groups], np.int64)


def visible_options(
    op_graph: hlo.HloGraph, choices: choosing.Choices
) -> list[np.ndarray]:
  """Per group, the options that the graph can tell apart, ascending, 0 first.

  A group whose equations the compiler has simplified away has no node in the graph and
  only option 0, because no model could tell its other options apart.
  """
  rows = option_rows(op_graph, choices)
  groups = node_groups(op_graph, choices)
  result = []
  for place in range(len(choices.groups)):
    seen = [rows[node] for node in np.flatnonzero(groups == place)] or [np.zeros((1, 1))]
    _, first = np.unique(np.concatenate(seen, axis=1), axis=0, return_index=True)
    result.append(np.sort(first))
  return result


def layout_configs(
    op_graph: hlo.HloGraph, choices: choosing.Choices, numbers: np.ndarray,
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
  number = choosing.number_in(node.metadata.op_name)
  if number is None or number >= len(choices.groups):
    return None
  group = choices.groups[number]
  return group if node.opcode in _OPCODES[group.primitive] else None


def _node_orders(group: Group, node_shapes: Sequence[Dims]) -> list[Orders]:
  """The group's options, written for the dimensions of a node.

  The compiler may have swapped the operands.
  """
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
  """The node's dimension for each dimension of an equation's tensor; None for other sizes.

  The compiler may have transposed the tensor; dimensions of equal size are taken in order.
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
