"""A function's layouts as configurations of its graph, to be ranked by models and labelled.

A choice gives every group of equations an option, and every compiler option a value. The graph
shows the layouts alone.

The compiler keeps the name of an equation's group in the instructions that it makes of
the equation. A node takes the option of its group, written for the node's own dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import types
from typing import Any, NamedTuple

import numpy as np

from tpugraphs_jax import graph, hlo
from tpugraphs_jax.columns import layout_row, MAX_RANK
from tpugraphs_jax.data.factoring import factor_layout_configs
from tpugraphs_jax.hlo import calls, jaxprs, proto, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.layout_options import Dims
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import choosing, costs, draw, labels
from tpugraphs_jax.tuning.choosing import Group, Orders
from tpugraphs_jax.tuning.draw import OptionIndices

# Opcodes of the instructions that the compiler makes of a primitive with the same tensors.
_OPCODES = {
  "conv_general_dilated": ("convolution", "dot"),
  "dot_general": ("dot", "convolution"),
  "reshape": ("reshape",),
}


class Problem:
  """The choices of a function, of layouts and compiler options, its graph, and its labels.

  Args:
    call: the function with its example arguments.
    label: how choices are labelled; the graph is one for its target.
    name: of the graph and in messages; the function's own unless given.
    seed: of candidates.
    operands: whether the orders of operands are chosen too.
    compiler_options: values to choose from by name; the compiler's own default is always one.

  Attributes:
    choices: the groups of equations and their options.
    call, label, compiler_options: the arguments.
    default: the option numbers of the compiler's own choice, all 0.
    graph: of the function with the compiler's own choice; it has no configurations.
    options: per group, the options that the graph can tell apart (`visible_options`). Then per
      compiler option 0 for the default, and the numbers of its values from 1.

  Raises:
    ValueError: nothing can be chosen, or as `choosing.choices`.
  """

  def __init__(
    self,
    call: Call,
    label: labels.Labeller,
    *,
    name: str = "",
    seed: int = 0,
    operands: bool = False,
    compiler_options: Mapping[str, Sequence[Any]] = types.MappingProxyType({}),
  ):
    self.call, self.label, self.seed = call, label, seed
    self.name = name or call.__name__
    with console.working(f"tracing {self.name}"):
      self.choices = choosing.choices(call, *call.arrays, operands=operands)
    self.compiler_options = compiler_options
    self.default: OptionIndices = (0,) * (len(self.choices.groups) + len(compiler_options))
    if self._own:
      own = hlo.featurize(self._own.before_layouts)
      own = dataclasses.replace(own, stage=f"{graph.BEFORE_LAYOUTS} for {label.target}")
    else:
      own = hlo.featurize(self.apply(self.default), *call.arrays)
    self.graph = dataclasses.replace(own, name=self.name)
    self._nodes = node_options(self.graph, self.choices)
    self.options = visible_options(self._nodes, len(self.choices.groups))
    self.options += [np.arange(1 + len(values)) for values in compiler_options.values()]
    if max(map(len, self.options), default=1) < 2:
      raise ValueError(
        f"{self.name}: no layout of its {len(self.options)} groups of equations "
        f"can be chosen{self._why()}; expected a convolution, dot or reshape"
      )

  def _why(self) -> str:
    """Why groups have no options, in words."""
    ranks = [max(map(len, group.shapes)) for group in self.choices.groups]
    if high := [rank for rank in ranks if rank > MAX_RANK]:
      return (
        f": {len(high)} have an array of rank {max(high)}, and layouts are chosen up to rank "
        f"{MAX_RANK}"
      )
    if max(self.choices.options, default=1) > 1:
      return ": the compiler simplifies them away"
    return self.left_out

  @property
  def left_out(self) -> str:
    """The operations that are left to the compiler, in words; empty where there are none."""
    names = ", ".join(self.choices.left_out)
    count = sum(self.choices.left_out.values())
    return f"; {count} operations inside {names} are left to the compiler" if count else ""

  def layouts_of(self, numbers: OptionIndices) -> OptionIndices:
    """The options of the groups of equations in a choice."""
    return numbers[: len(self.choices.groups)]

  def compiler_options_of(self, numbers: OptionIndices) -> dict[str, Any]:
    """The values of compiler options in a choice, without those that stay at their default."""
    chosen = zip(self.compiler_options.items(), numbers[len(self.choices.groups) :])
    return {name: values[number - 1] for (name, values), number in chosen if number}

  def describe(self, numbers: OptionIndices) -> str:
    """The numbers of changed groups and the values of compiler options in a choice, in words."""
    groups = [str(group) for group, number in enumerate(self.layouts_of(numbers)) if number]
    values = [f"{name}={value}" for name, value in self.compiler_options_of(numbers).items()]
    return ", ".join(groups + values) or "none, the compiler's own"

  def apply(self, numbers: OptionIndices) -> Callable[..., Any]:
    """The function of the arrays, with the layouts of a choice, jitted where the function is."""
    program, structure, jit = self.call.trace
    choice = self.choices.choice(self.layouts_of(numbers))

    def chosen(*arrays: Any) -> tuple[tuple, calls.OutputStructure]:
      return tuple(choosing.evaluate(program, arrays, choice)), structure

    return jit.apply(chosen, {}) if jit else chosen

  def rewrite(self, numbers: OptionIndices) -> Callable[..., Any]:
    """The function with the layouts and compiler options of a choice, jitted where it is.

    The function itself where the choice changes nothing of it.
    """
    chosen, trace = self.layouts_of(numbers), self.call.trace
    has_options = any(numbers) and trace.jit is not None
    if not (any(chosen) or has_options or trace.outputs.changed):
      return self.call.function
    evaluate = functools.partial(choosing.evaluate, choice=self.choices.choice(chosen))
    return calls.RewrittenFunction(self.call.function, evaluate, self.compiler_options_of(numbers))

  def candidates(self) -> Iterator[OptionIndices]:
    """Distinct choices, first the compiler's own; see `draw.candidates`."""
    return draw.candidates(self.options, seed=self.seed, name=self.name)

  def with_configs(
    self,
    candidates: Sequence[OptionIndices],
    values: Sequence[int] | None = None,
    kernels: graph.KernelTimes | None = None,
  ) -> hlo.HloGraph:
    """The graph with the layouts of choices as its configurations, and labels `[C]` where given."""
    # A node of no group takes the option 0 of the last column.
    numbers = np.column_stack([np.array(candidates, np.int64), np.zeros(len(candidates), int)])
    feat = np.stack([node.rows[numbers[:, node.group]] for node in self._nodes], axis=1)
    label = np.array([0] * len(candidates) if values is None else values, np.int64)
    configs = dataclasses.replace(factor_layout_configs(feat, label), kernels=kernels)
    return dataclasses.replace(self.graph, configs=configs)

  def numbers_of(self, proposed: graph.OpGraph[graph.LayoutConfigs]) -> list[OptionIndices]:
    """The choices that are the configurations of a graph; other configurations are left out.

    Compiler options stay at their defaults.
    """
    numbers = []
    for config in proposed.configs.decode(np.arange(len(proposed.configs))):  # [K, 18]
      fits = [np.ones(len(group.options), bool) for group in self.choices.groups]
      for node, row in zip(self._nodes, config):
        if node.group >= 0:
          fits[node.group] &= (node.rows == row).all(axis=1)
      if all(fit.any() for fit in fits):
        chosen = tuple(int(np.argmax(fit)) for fit in fits)
        numbers.append(chosen + self.default[len(chosen) :])
    return numbers

  def fingerprint(self) -> str:
    """SHA-256 of the function's operations and constants, its groups and all their options.

    For a TPU also of the integers among its arguments.
    """
    program, _, jit = self.call.trace
    groups = [(str(group), group.detail, group.options) for group in self.choices.groups]
    lines = [*jaxprs.operations(program, with_details=True), str(groups)]
    lines += [str(jit)] if jit and str(jit) else []
    lines += map(str, self.compiler_options.items())
    if self.label.target:  # its time depends on them, such as the number of steps of a loop
      values = costs.known_integers(self.call.arrays)
      lines += [f"argument {number}: {array.tolist()}" for number, array in values.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

  @functools.cached_property
  def _own(self) -> tpu.TpuProgram | None:
    """The compiler's own choice as the TPU compiler makes it; None without a target."""
    if self.label.target is None:
      return None
    function, target = self.apply(self.default), self.label.target
    with console.working(f"compiling {self.name}"):
      return tpu.compile_function(function, self.call.arrays, target, keep_stages=True)

  def own_orders(self) -> list[Dims | None]:
    """The order of each group's output that the compiler chooses by itself, minor to major.

    None where equations of the group get different orders, or where no instruction of the
    optimised program has the group's output.
    """
    if self._own:
      module = proto.parse_module(self._own.module, where=self.name)
    else:  # this machine's compiler
      function = self.apply(self.default)
      module = hlo.featurize(function, *self.call.arrays, optimized=True).module
    seen: list[set[Dims]] = [set() for _ in self.choices.groups]
    for node in proto.instructions(module):
      number = _group_number(node, self.choices)
      if number < 0:
        continue
      axes = _axes(self.choices.groups[number].shapes[0], tuple(node.shape.dimensions))
      if axes is not None:
        seen[number].add(tuple(axes.index(dim) for dim in node.shape.layout.minor_to_major))
    return [orders.pop() if len(orders) == 1 else None for orders in seen]

  def lines(self, group: int) -> list[str]:
    """Where a group's equations stand in the user's files: `model.py:12`."""
    nodes = self.nodes_of_groups().get(group, [])
    return sorted({self.graph.origins[node].where for node in nodes} - {""})

  def nodes_of_groups(self) -> dict[int, list[int]]:
    """The configurable nodes of each group that has any."""
    result: dict[int, list[int]] = {}
    for index, node in zip(self.graph.config_node.tolist(), self._nodes):
      if node.group >= 0:
        result.setdefault(node.group, []).append(index)
    return result

  def label_records(
    self,
    candidates: Sequence[OptionIndices],
    begin: Callable[[OptionIndices], object] = lambda numbers: None,
  ) -> Iterator[tuple[OptionIndices, labels.LabelRecord | Exception]]:
    """The records of choices, found together, or the errors with which they failed.

    `begin` is called with each choice before it is compiled.
    """

    def functions() -> Iterator[tuple[int, Callable[..., Any], dict[str, Any]]]:
      for place, numbers in enumerate(candidates):
        begin(numbers)
        yield place, self.apply(numbers), self.compiler_options_of(numbers)

    for place, outcome in self.label.records(functions(), self.call.arrays, self._nodes_of_all):
      yield candidates[place], outcome

  def _nodes_of_all(self, operations: Sequence[costs.Operation]) -> list[int]:
    """The nodes that operations of the optimised program come from, in order."""
    return sorted({node for operation in operations for node in self._nodes_of(operation)})

  def _nodes_of(self, operation: costs.Operation) -> list[int]:
    """The nodes that an operation of the optimised program comes from.

    Nodes of one name, line and shape are one operation. An operation whose shape no node has comes
    from all nodes of its name and line, and one of another name, such as the copy of a layout that
    was chosen, from the nodes of its group.
    """
    for key in (operation, operation[:2]):
      if key in self._by_operation:
        return self._by_operation[key]
    group = choosing.number_in(operation.name)
    return [] if group is None else self.nodes_of_groups().get(group, [])

  @functools.cached_property
  def _by_operation(self) -> dict[tuple, list[int]]:
    """The nodes of each operation, and of each pair of name and line."""
    nodes: dict[tuple, list[int]] = {}
    for number, node in enumerate(proto.instructions(self.graph.module)):
      operation = costs.operation(node, self.graph.module)
      if operation.name:
        nodes.setdefault(operation, []).append(number)
        nodes.setdefault(operation[:2], []).append(number)
    return nodes


def kernel_times(raw: Sequence[labels.LabelRecord]) -> graph.KernelTimes | None:
  """The times of the kernels of choices, by their nodes; None without any that has nodes.

  Args:
    raw: of `label_records`, for each choice.
  """
  kernels = [labels.kernels(of_choice) for of_choice in raw]
  number: dict[tuple[int, ...], int] = {}
  for kernel in itertools.chain(*kernels):
    number.setdefault(tuple(kernel["nodes"]), len(number))
  runtime = np.zeros((len(raw), len(number)), np.int64)
  for config, of_choice in enumerate(kernels):
    for kernel in of_choice:
      runtime[config, number[tuple(kernel["nodes"])]] += kernel["picoseconds"]
  pairs = [(place, node) for nodes, place in number.items() for node in nodes]
  return graph.KernelTimes(runtime, np.array(pairs, np.int32)) if pairs else None


class NodeOptions(NamedTuple):
  """The options of a configurable node."""

  group: int  # number of the group that decides; -1 for none
  # [options, 18] int8 of the group, minor to major: output, first and second operand. -1 where an
  # option leaves a tensor to the compiler, or where the compiler has changed its shape.
  rows: np.ndarray


def node_options(op_graph: hlo.HloGraph, choices: choosing.Choices) -> list[NodeOptions]:
  """The options of every configurable node; a node of no group has one row of -1.

  Args:
    op_graph: the graph of `apply(function, choices.default)`.
    choices: of the same function.
  """
  nodes = proto.instructions(op_graph.module)
  position = proto.positions(op_graph.module)
  options = []
  for index in op_graph.config_node:
    node = nodes[index]
    number = _group_number(node, choices)
    tensors = [node, *(nodes[position[operand]] for operand in node.operand_ids)]
    shapes = [tuple(tensor.shape.dimensions) for tensor in tensors]
    orders = _node_orders(choices.groups[number], shapes) if number >= 0 else [((),) * 2]
    options.append(
      NodeOptions(number, np.array([layout_row(of_tensors) for of_tensors in orders], np.int8))
    )
  return options


def visible_options(nodes: Sequence[NodeOptions], groups: int) -> list[np.ndarray]:
  """Per group, the options that the graph can tell apart, ascending, 0 first.

  A group whose equations the compiler has simplified away has no node in the graph and
  only option 0, because no model could tell its other options apart.
  """
  result = []
  for group in range(groups):
    seen = [node.rows for node in nodes if node.group == group] or [np.zeros((1, 1))]
    _, first = np.unique(np.concatenate(seen, axis=1), axis=0, return_index=True)
    result.append(np.sort(first))
  return result


def _group_number(node: proto.HloInstructionProto, choices: choosing.Choices) -> int:
  """The group that an instruction was made of; -1 where it was made of none."""
  number = choosing.number_in(node.metadata.op_name)
  if number is None or number >= len(choices.groups):
    return -1
  return number if node.opcode in _OPCODES[choices.groups[number].primitive] else -1


def _node_orders(group: Group, node_shapes: Sequence[Dims]) -> list[Orders]:
  """The group's options, written for the dimensions of a node.

  The compiler may have swapped the operands.
  """
  turned_shapes = (node_shapes[0], *reversed(node_shapes[1:]))
  straight = [_axes(*pair) for pair in zip(group.shapes, node_shapes)]
  swapped = [_axes(*pair) for pair in zip(group.shapes, turned_shapes)]
  is_swapped = sum(axes is None for axes in swapped) < sum(axes is None for axes in straight)
  axes = swapped if is_swapped else straight
  result = []
  for option in group.options:
    output, *operands = (
      tuple(dims[dim] for dim in order) if dims is not None else ()
      for order, dims in zip(option, axes)
    )
    result.append((output, *(reversed(operands) if is_swapped else operands)))
  return result


def _axes(shape: Dims, node_shape: Dims) -> Dims | None:
  """The node's dimension for each dimension of an equation's tensor; None for other sizes.

  The compiler may have transposed the tensor; dimensions of equal size are taken in order.
  """
  if sorted(shape) != sorted(node_shape):
    return None
  axes = np.empty(len(shape), int)
  axes[np.argsort(shape, kind="stable")] = np.argsort(node_shape, kind="stable")
  return tuple(axes.tolist())
