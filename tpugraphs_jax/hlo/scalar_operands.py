"""Integers that Pallas kernels read before they run.

A kernel of ragged groups reads how many blocks there are, and which rows belong to which group. The
program computes both from the sizes of the groups. Where the sizes are arguments with values, the
integers of the kernel are known, too. Where they are not, they are assumed: by the name of the
argument of a function that the program calls, such as `group_sizes`, and where the kernel selects
blocks by them, by the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import re
from typing import Any

import jax
from jax.extend import core
import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import integers, jaxprs, proto
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.integers import Meaning

_KERNEL, _CUSTOM_CALL = "pallas_call", "tpu_custom_call"
# Primitives that become kernels whose shapes no equation has.
_OTHER_KERNELS = {"core_map", "mpmd_map"}
_LOOPS = ("scan", "while", "cond")
_VARYING = ("pvary", "pcast")  # primitives that only mark on which axes of a mesh values differ
_MOST_WORDS = 1 << 16  # of an operand that a kernel reads as scalars
_WORDS = {kind.number for kind in columns.ELEMENT_TYPES if kind.name in ("s32", "u32")}

_INTEGERS = (np.dtype(np.int32), np.dtype(np.uint32))
_TABLES = ("page_indices", "block_tables", "page_table")  # the pages of each sequence
_LAST_NAME = re.compile(r".*[.\['](?=\w)|['\]]+$")  # `sizes` of `batch['sizes']`

# Shapes of the operands of a kernel, then of its results.
Signature = tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class ScalarOperands:
  """Integer operands of Pallas kernels.

  Attributes:
    values: by the name of the kernel's instruction and the number of the operand, arrays of 32-bit
      integers with the shape of the operand.
    assumed: what assumed ones mean, by the name of the argument.
  """

  values: dict[str, dict[int, np.ndarray]] = dataclasses.field(default_factory=dict)
  assumed: dict[str, Meaning] = dataclasses.field(default_factory=dict)


def scalar_operands(
  call: Call, known: Mapping[int, Any], module: proto.HloModuleProto, how: str = integers.ASSUMED
) -> ScalarOperands:
  """Values of integer operands of Pallas kernels.

  A kernel is found by the shapes of what it reads and writes. Of kernels with the same shapes only
  the integers are known that all of them read.

  Args:
    call: of the program. It is traced only if a kernel reads 32-bit integers.
    known: integers among the arrays of the call, by number.
    module: the compiled program.
    how: values of integers that nothing tells, as of `integers.Meaning.draw`.
  """
  kernels = _kernels(module)
  if not kernels:
    return ScalarOperands()
  program = call.trace.program
  if _OTHER_KERNELS.intersection(jaxprs.primitives(program.jaxpr)):
    return ScalarOperands()
  signatures: list[Signature] = []
  assumed = _Assumed(how)

  def run(known: Mapping[int, Any]) -> list[dict[int, Any]]:
    given = [known.get(number) for number in range(len(program.jaxpr.invars))]
    inputs = assumed.arguments(call.names, program.jaxpr, given)
    reads: list[tuple[Signature, dict[int, Any]]] = []
    _visit(program.jaxpr, [*program.consts, *inputs], reads, assumed)
    signatures[:] = [signature for signature, _ in reads]
    return [operands for _, operands in reads]

  with contextlib.ExitStack() as stack:
    if not jax.sharding.get_abstract_mesh().empty:  # of devices that may not be here
      stack.enter_context(jax.set_mesh(None))
    stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
    values = jax.device_get(jax.jit(run)(dict(known)))
  found: dict[Signature, dict[int, np.ndarray]] = {}
  for signature, operands in zip(signatures, values, strict=True):
    others = found.setdefault(signature, operands)
    same = [n for n in others if n in operands and np.array_equal(others[n], operands[n])]
    found[signature] = {number: others[number] for number in same}
  found_by_name = {name: found[kernel] for name, kernel in kernels.items() if found.get(kernel)}
  return ScalarOperands(found_by_name, assumed.meanings)


class _Assumed:
  """Assumed integers of arguments and of kernels.

  Attributes:
    meanings: by the name of the argument.
  """

  def __init__(self, how: str):
    self._how = how
    self.meanings: dict[str, Meaning] = {}

  def arguments(self, names: Sequence[str], jaxpr: core.Jaxpr, values: list[Any]) -> list[Any]:
    """Values of the arguments of a function; those without a value get one by their names."""
    avals = [variable.aval for variable in jaxpr.invars]
    shapes = {name: aval.shape for name, aval in zip(names, avals) if hasattr(aval, "shape")}
    return [
      self._drawn(_named(name, shapes), name, aval) if value is None else value
      for name, aval, value in zip(names, avals, values, strict=True)
    ]

  def blocks(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Values of the operands of a kernel, where they have none and select blocks."""
    sizes = _selected_blocks(equation)
    name = str(equation.params.get("name") or _KERNEL)
    return [
      self._drawn(Meaning(integers.INDEX, (sizes[number],), name), name, variable.aval)
      if value is None and number in sizes
      else value
      for number, (variable, value) in enumerate(zip(equation.invars, values, strict=True))
    ]

  def _drawn(self, meaning: Meaning | None, name: str, aval: Any) -> Any:
    if meaning is None or aval.dtype not in _INTEGERS or np.prod(aval.shape) > integers.MOST:
      return None
    self.meanings[name] = meaning
    return np.asarray(meaning.draw(aval.shape, name, self._how), aval.dtype)


def _named(name: str, shapes: Mapping[str, Sequence[int]]) -> Meaning | None:
  """What an argument means by its name beside arguments of these names and shapes.

  The names are those of jax' own kernels (`paged_attention`, `ragged_paged_attention`, `gmm`),
  which other libraries follow.
  """
  pages, size = _pages(shapes)
  if name in ("group_sizes", "tokens_per_expert"):
    rows = next((shape[0] for shape in shapes.values() if len(shape) >= 2), 0)
    return Meaning(integers.GROUPS, (rows,), name)
  if name in _TABLES and pages:
    return Meaning(integers.INDEX, (pages,), name)
  if name in ("lengths", "kv_lens", "seq_lens", "context_lens") and size:
    tables = (
      shapes[key] for key in ("page_indices", "block_tables", "page_table") if key in shapes
    )
    longest = size * next((shape[-1] for shape in tables if len(shape) > 1), 1)
    return Meaning(integers.LENGTHS, (longest,), name)
  if name in ("cu_q_lens", "cu_seqlens", "query_start_loc"):
    tokens = next((shapes[key][0] for key in ("q", "queries", "query") if key in shapes), 0)
    return Meaning(integers.STARTS, (tokens,), name) if tokens else None
  if name == "num_seqs":
    lengths = next((shapes[key] for key in ("kv_lens", "seq_lens", "lengths") if key in shapes), ())
    return Meaning(integers.COUNT, (lengths[0],), name) if lengths else None
  return None


def _pages(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
  """The number of pages of a cache, and the positions of a page; 0 of what is no such cache."""
  if len(shape := shapes.get("k_pages", ())) == 4:  # heads, pages, positions, size of a head
    return shape[1], shape[2]
  for name in ("kv_pages", "kv_cache", "kv_cache_pages"):
    if len(shape := shapes.get(name, ())) >= 4:  # pages, positions, heads, size of a head
      return shape[0], shape[1]
  return 0, 0


def _selected_blocks(equation: core.JaxprEqn) -> dict[int, int]:
  """How many blocks integer operands of a kernel select from, by the number of the operand."""
  grid = equation.params["grid_mapping"]
  first, sizes = grid.num_dynamic_grid_bounds, dict[int, int]()
  for mapping in grid.block_mappings:
    jaxpr, array = mapping.index_map_jaxpr.jaxpr, getattr(mapping, "array_aval", None)
    array = array if array is not None else mapping.array_shape_dtype
    references = jaxpr.invars[len(jaxpr.invars) - grid.num_index_operands :]
    sources = {reference: number for number, reference in enumerate(references)}
    for inner in jaxpr.eqns:
      read = [sources[v] for v in inner.invars if isinstance(v, core.Var) and v in sources]
      sources |= dict.fromkeys(inner.outvars, read[0]) if read else {}
    for size, block, out in zip(array.shape, mapping.block_shape, jaxpr.outvars):
      if isinstance(out, core.Var) and out in sources:
        length = getattr(block, "block_size", block)
        length = length if isinstance(length, int) else 1
        number = first + sources[out]
        sizes[number] = min(sizes.get(number, size), -(-size // length))
  return sizes


def _visit(
  jaxpr: core.Jaxpr,
  inputs: Sequence[Any],
  reads: list[tuple[Signature, dict[int, Any]]],
  assumed: _Assumed,
) -> list[Any]:
  """The outputs of a program, None where they are not known.

  Args:
    jaxpr: the program.
    inputs: its constants and arguments, None where they are not known.
    reads: gets the signature of every kernel, and the integers that it reads.
    assumed: gives values to what has none.
  """
  count = len(jaxpr.constvars)
  names = [_LAST_NAME.sub("", name) for name in jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))]
  inputs = [*inputs[:count], *assumed.arguments(names, jaxpr, list(inputs[count:]))]
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values.get(atom)
  for equation in jaxpr.eqns:
    operands, name = list(map(read, equation.invars)), equation.primitive.name
    outputs: Sequence[Any] = [None] * len(equation.outvars)
    if name == _KERNEL:
      avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
      operands = assumed.blocks(equation, operands)
      reads.append((tuple(tuple(aval.shape) for aval in avals), _integers(operands)))
    elif name == "axis_index":
      outputs = [np.int32(0)]  # of the first device
    elif name in jaxprs.CONSTRAINTS or name in _VARYING:
      outputs = operands
    else:
      visited = [_visit(*inner, reads, assumed) for inner in _inner(equation, operands)]
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
  if name == "shard_map":
    shapes = [variable.aval.shape for variable in params[key].invars]
    return [_first_part(*pair) for pair in zip(operands, shapes, strict=True)]
  if name == "scan":
    if "num_consts" in params:
      return operands[: params["num_consts"]]
    constants, _, _ = params["ft_in"].unpack()  # of jax 0.12
    return operands[: len(constants)]
  if name == "while":
    middle = params["cond_nconsts"]
    is_body = key == "body_jaxpr"
    return operands[middle : middle + params["body_nconsts"]] if is_body else operands[:middle]
  if name == "cond":
    return operands[1:]
  return operands if name in jaxprs.CALLS else []


def _first_part(value: Any, shape: Sequence[int]) -> Any:
  """What the first device has of an array that is split over a mesh."""
  return None if value is None else value[tuple(slice(0, size) for size in shape)]


def _runs_on_cpus(equation: core.JaxprEqn) -> bool:
  inside = map(jaxprs.primitives, jaxprs.programs_of(equation))
  exchanges = equation.effects or "axis_name" in equation.params
  return not exchanges and _KERNEL not in itertools.chain.from_iterable(inside)


def _integers(operands: Sequence[Any]) -> dict[int, Any]:
  """The known operands that a kernel can read as scalars, by number."""
  return {
    number: operand
    for number, operand in enumerate(operands)
    if operand is not None
    and np.size(operand) <= _MOST_WORDS
    and jax.typeof(operand).dtype in _INTEGERS
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
