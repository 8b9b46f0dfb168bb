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

from tpugraphs_jax.hlo import jaxprs, proto
from tpugraphs_jax.hlo.calls import Call

_KERNEL, _CUSTOM_CALL = "pallas_call", "tpu_custom_call"
_LOOPS = ("scan", "while", "cond")
_OF_TPUS = {_KERNEL, "core_map", "run_state", "mpmd_map"}  # primitives that no CPU runs
_MOST_WORDS = 1 << 16  # of an operand that a kernel reads as scalars

# Shapes of the operands of a kernel, then of its results.
Signature = tuple[tuple[int, ...], ...]


def scalar_operands(
  call: Call, known: Mapping[int, Any], module: proto.HloModuleProto
) -> dict[str, dict[int, np.ndarray]]:
  """Values of integer operands of Pallas kernels, by instruction and number of the operand.

  A kernel is found by the shapes of what it reads and writes. Of kernels with the same shapes only
  the integers are known that all of them read.

  Args:
    call: of the program, which is traced if it has a kernel.
    known: integers among the arrays of the call, by number.
    module: the compiled program.
  """
  kernels = _kernels(module)
  if not kernels:
    return {}
  program = call.trace.program
  signatures: list[Signature] = []

  def run(known: Mapping[int, Any]) -> list[dict[int, Any]]:
    inputs = [known.get(number) for number in range(len(program.jaxpr.invars))]
    reads: list[tuple[Signature, dict[int, Any]]] = []
    _visit(program, inputs, reads)
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
  closed: core.ClosedJaxpr, inputs: Sequence[Any], kernels: list[tuple[Signature, dict[int, Any]]]
) -> list[Any]:
  """The outputs of a program, None where they are not known; adds its kernels to `kernels`."""
  jaxpr = closed.jaxpr
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values.get(atom)
  for equation in jaxpr.eqns:
    operands = list(map(read, equation.invars))
    outputs: Sequence[Any] = [None] * len(equation.outvars)
    inner = list(_inner(equation, operands))
    if equation.primitive.name in jaxprs.CONSTRAINTS:
      outputs = operands
    elif equation.primitive.name == _KERNEL:
      avals = [atom.aval for atom in (*equation.invars, *equation.outvars)]
      kernels.append((tuple(tuple(aval.shape) for aval in avals), _integers(operands)))
    elif len(inner) == 1 and equation.primitive.name not in _LOOPS:
      outputs = _visit(*inner[0], kernels)
    else:
      for program, known in inner:
        _visit(program, known, kernels)
      if all(operand is not None for operand in operands) and _runs_on_cpus(equation):
        outputs = jaxprs.bind_primitive(equation, equation.params, operands)
    values.update(zip(equation.outvars, outputs, strict=True))
  return list(map(read, jaxpr.outvars))


def _runs_on_cpus(equation: core.JaxprEqn) -> bool:
  inside = map(jaxprs.primitives, jaxprs.programs_of(equation))
  names = {equation.primitive.name, *itertools.chain.from_iterable(inside)}
  return not equation.effects and names.isdisjoint(_OF_TPUS)


def _inner(
  equation: core.JaxprEqn, operands: list[Any]
) -> Iterator[tuple[core.ClosedJaxpr, list[Any]]]:
  """The programs that an equation calls, with their inputs; None for those that a loop changes."""
  name, params = equation.primitive.name, equation.params
  if name == "scan":
    constant = operands[: params["num_consts"]]
    yield params["jaxpr"], constant + [None] * (len(operands) - len(constant))
  elif name == "while":
    start, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    yield params["body_jaxpr"], operands[start:stop] + [None] * len(operands[stop:])
  elif name == "cond":
    yield from ((branch, operands[1:]) for branch in params["branches"])
  elif name in jaxprs.CALLS:
    for param in params.values():
      inner = core.ClosedJaxpr(param, ()) if isinstance(param, core.Jaxpr) else param
      if isinstance(inner, core.ClosedJaxpr) and len(inner.jaxpr.invars) == len(operands):
        yield inner, operands


def _integers(operands: Sequence[Any]) -> dict[int, Any]:
  """The known operands that a kernel can read as scalars, by number."""
  return {
    number: operand
    for number, operand in enumerate(operands)
    if operand is not None
    and np.size(operand) <= _MOST_WORDS
    and jax.dtypes.issubdtype(jax.typeof(operand).dtype, np.integer)
  }


def _kernels(module: proto.HloModuleProto) -> dict[str, Signature]:
  """The Pallas kernels of a compiled program, by instruction."""
  nodes = {node.id: node for node in proto.instructions(module)}
  arrays = lambda node: [tuple(shape.dimensions) for shape in proto.arrays(node.shape)]
  return {
    node.name: (
      *(shape for operand in node.operand_ids for shape in arrays(nodes[operand])),
      *arrays(node),
    )
    for node in nodes.values()
    if node.custom_call_target == _CUSTOM_CALL
  }
