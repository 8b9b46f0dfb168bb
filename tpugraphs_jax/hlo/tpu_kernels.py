"""The kernels that the TPU compiler makes of a function, as tile graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import numpy as np

from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.hlo import estimates, module_graph, origins, proto, tpu
from tpugraphs_jax.hlo.ragged import Ragged


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
  """A fused kernel, or a single instruction that the compiler cuts into tiles."""

  graph: module_graph.HloGraph  # its one configuration is the compiler's own, not labelled
  window: estimates.Window
  origin: origins.Origin  # of the instruction that calls the kernel

  @property
  def estimated_cycles(self) -> int | None:
    """The compiler's estimate of one call, None where it has none; no measurement."""
    return self.window.estimated_cycles


def kernels(function: Callable[..., Any], *args: Any, target: str) -> list[Kernel]:
  """The kernels of a function, in the order of the optimised module.

  Args:
    function: a function that jax can trace.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    target: as of `featurize`.

  Returns:
    One kernel per instruction that has a window. Its graph has `config_feat`
    [1, 24]: the window's kernel, output and input bounds.

  Raises:
    ValueError: the target is unknown, or libtpu is missing.
  """
  program = tpu.compile_function(function, args, target)
  return module_kernels(proto.parse_module(program.module, where=f"program for {target}"))


def module_kernels(module: proto.HloModuleProto) -> list[Kernel]:
  """As `kernels`, of a module after all optimisations."""
  fused = {callee for computation in module.computations
           for instruction in computation.instructions if instruction.opcode == "fusion"
           for callee in instruction.called_computation_ids}
  places = iter(origins.origins(module))
  found = []
  for computation in module.computations:
    for instruction in computation.instructions:
      origin = next(places)
      window = estimates.window(instruction)
      # What is inside a fusion belongs to the fusion's kernel.
      if window is not None and computation.id not in fused:
        found.append(Kernel(_graph(instruction, computation, module, window), window, origin))
  return found


def _graph(
    instruction: proto.HloInstructionProto, computation: proto.HloComputationProto,
    module: proto.HloModuleProto, window: estimates.Window,
) -> module_graph.HloGraph:
  kernel = proto.HloModuleProto(
      name=instruction.name, stack_frame_index=module.stack_frame_index)
  by_id = {each.id: each for each in module.computations}
  callees = [by_id[callee] for callee in instruction.called_computation_ids]
  if instruction.opcode == "fusion":
    body = callees[0]
    callees = [by_id[callee] for node in body.instructions
               for callee in node.called_computation_ids]
  else:
    body = _alone(instruction, computation)
  kernel.computations.extend([*_with_callees(callees, by_id), body])
  kernel.entry_computation_id = body.id
  op_graph = module_graph.featurize_module(
      kernel, where=f"kernel {instruction.name}", name=instruction.name)
  bounds = (window.kernel_bounds, window.output_bounds, window.input_bounds)
  feat = [Ragged([each]).aggregate(6, empty_product=0) for each in bounds]
  return dataclasses.replace(
      op_graph, node_splits=np.array([0, op_graph.num_nodes], np.int64),
      config_node=np.zeros(0, np.int32),
      configs=TileConfigs(np.concatenate(feat, axis=1).astype(np.float32),
                          np.zeros(1, np.int64), np.ones(1, np.int64)))


def _with_callees(
    computations: list[proto.HloComputationProto], by_id: dict,
) -> Iterator[proto.HloComputationProto]:
  """Computations after the ones that they call, each once."""
  order: dict[int, proto.HloComputationProto] = {}

  def visit(computation: proto.HloComputationProto) -> None:
    for node in computation.instructions:
      for callee in node.called_computation_ids:
        visit(by_id[callee])
    order.setdefault(computation.id, computation)

  for computation in computations:
    visit(computation)
  return iter(order.values())


def _alone(
    instruction: proto.HloInstructionProto, computation: proto.HloComputationProto
) -> proto.HloComputationProto:
  """A computation of one instruction, its operands as parameters."""
  nodes = {node.id: node for node in computation.instructions}
  body = proto.HloComputationProto(
      name=instruction.name, id=computation.id, root_id=instruction.id)
  for number, operand in enumerate(dict.fromkeys(instruction.operand_ids)):
    body.instructions.add(
        name=nodes[operand].name, opcode="parameter", id=operand, parameter_number=number,
        shape=nodes[operand].shape)
  body.instructions.append(instruction)
  return body
