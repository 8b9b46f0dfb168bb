"""Integers that Pallas kernels read before they run, where the arguments of a call tell them.

A kernel of ragged groups reads how many blocks there are, and which rows belong to which group. The
program computes both from the sizes of the groups. Where the sizes are arguments with values, the
integers of the kernel are known, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import itertools
from typing import Any

import jax
from jax.extend import core
import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import jaxprs, proto
from tpugraphs_jax.hlo.calls import Call

_KERNEL, _CUSTOM_CALL = "pallas_call", "tpu_custom_call"
# Primitives that become kernels whose shapes no equation has.
_OTHER_KERNELS = {"core_map", "mpmd_map"}
_LOOPS = ("scan", "while", "cond")
_MOST_WORDS = 1 << 16  # of an operand that a kernel reads as scalars
_WORDS = {kind.number for kind in columns.ELEMENT_TYPES if kind.name in ("s32", "u32")}

# Shapes of the operands of a kernel, then of its results.
Signature = tuple[tuple[int, ...], ...]


def scalar_operands(
  call: Call, known: Mapping[int, Any], module: proto.HloModuleProto
) -> dict[str, dict[int, np.ndarray]]:
  """Values of integer operands of Pallas kernels.

  A kernel is found by the shapes of what it reads and writes. Of kernels with the same shapes only
  the integers are known that all of them read.

  Args:
    call: of the program. It is traced only if a kernel reads 32-bit integers.
    known: integers among the arrays of the call, by number.
    module: the compiled program.

  Returns:
    By the name of the kernel's instruction and the number of the operand, arrays of 32-bit integers
    with the shape of the operand.
  """
  kernels = _kernels(module)
  if not kernels:
    return {}
  program = call.trace.program
  if _OTHER_KERNELS.intersection(jaxprs.primitives(program.jaxpr)):
    return {}
  signatures: list[Signature] = []

  def run(known: Mapping[int, Any]) -> list[dict[int, Any]]:
    inputs = [known.get(number) for number in range(len(program.jaxpr.invars))]
    reads: list[tuple[Signature, dict[int, Any]]] = []
    _visit(program.jaxpr, [*program.consts, *inputs], reads)
    signatures[:] = [signature for signature, _ in reads]
    return [operands for _, operands in reads]

  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    values = jax.device_get(jax.jit(run)(dict(known)))
  found: dict[Signature, dict[int, np.ndarray]] = {}
  for signature, operands in zip(signatures, values, strict=True):
    others = found.setdefault(signature, operands)
    same = [n for n in others if n in operands and np.array_equal(others[n], operands[n])]
    found[signature] = {number: others[number] for number in same}
  return {name: found[kernel] for name, kernel in kernels.items() if found.get(kernel)}


def _visit(
  jaxpr: core.Jaxpr, inputs: Sequence[Any], reads: list[tuple[Signature, dict[int, Any]]]
) -> list[Any]:
  """The outputs of a program, None where they are not known.

  Args:
    jaxpr: the program.
    inputs: its constants and arguments, None where they are not known.
    reads: gets the signature of every kernel, and the integers that it reads.
  """
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values.get(atom)
  for equation in jaxpr.eqns:
    operands, name = list(map(read, equation.invars)), equation.primitive.name
    outputs: Sequence[Any] = [None] * len(equation.outvars)
    if name == _KERNEL:
      avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
      reads.append((tuple(tuple(aval.shape) for aval in avals), _integers(operands)))
    elif name in jaxprs.CONSTRAINTS:
      outputs = operands
    else:
      visited = [_visit(*inner, reads) for inner in _inner(equation, operands)]
      if name in jaxprs.CALLS and name not in _LOOPS:
        outputs = visited[0]
      elif all(operand is not None for operand in operands) and _runs_on_cpus(equation):
        outputs = jaxprs.bind_primitive(equation, equation.params, operands)
    values.update(zip(equation.outvars, outputs, strict=True))
  return list(map(read, jaxpr.outvars))


def _inner(equation: core.JaxprEqn, operands: list[Any]) -> Iterator[tuple[core.Jaxpr, list[Any]]]:
  """The programs inside of an equation, with their constants and arguments.

  An argument is None where an iteration changes it, or where `CALLS` does not have the primitive.
  """
  for key, program in jaxprs.named_programs_of(equation):
    if isinstance(program, core.ClosedJaxpr):
      jaxpr, consts = program.jaxpr, program.consts
    else:
      jaxpr, consts = program, [None] * len(program.constvars)
    given = _arguments(equation, key, operands)
    yield jaxpr, [*consts, *given, *[None] * (len(jaxpr.invars) - len(given))]


def _arguments(equation: core.JaxprEqn, key: str, operands: list[Any]) -> list[Any]:
  """The first arguments of a program, the parameter `key` of an equation; the others change."""
  name, params = equation.primitive.name, equation.params
  if name == "scan":
    return operands[: params["num_consts"]]
  if name == "while":
    middle = params["cond_nconsts"]
    is_body = key == "body_jaxpr"
    return operands[middle : middle + params["body_nconsts"]] if is_body else operands[:middle]
  if name == "cond":
    return operands[1:]
  return operands if name in jaxprs.CALLS else []


def _runs_on_cpus(equation: core.JaxprEqn) -> bool:
  inside = map(jaxprs.primitives, jaxprs.programs_of(equation))
  return not equation.effects and _KERNEL not in itertools.chain.from_iterable(inside)


def _integers(operands: Sequence[Any]) -> dict[int, Any]:
  """The known operands that a kernel can read as scalars, by number."""
  words = (np.dtype(np.int32), np.dtype(np.uint32))
  return {
    number: operand
    for number, operand in enumerate(operands)
    if operand is not None
    and np.size(operand) <= _MOST_WORDS
    and jax.typeof(operand).dtype in words
  }


def _kernels(module: proto.HloModuleProto) -> dict[str, Signature]:
  """The Pallas kernels of a compiled program that read 32-bit integers, by instruction."""
  nodes = {node.id: node for node in proto.instructions(module)}
  kernels = {}
  for node in nodes.values():
    if node.custom_call_target == _CUSTOM_CALL:
      inputs = [array for id in node.operand_ids for array in proto.arrays(nodes[id].shape)]
      if any(array.element_type in _WORDS for array in inputs):
        arrays = (*inputs, *proto.arrays(node.shape))
        kernels[node.name] = tuple(tuple(array.dimensions) for array in arrays)
  return kernels
