"""Jaxprs: their programs and equations, and evaluation equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import itertools
import re
from typing import Any

from absl import logging
import jax
from jax.extend import core, source_info_util
import numpy as np

from tpugraphs_jax.hlo.calls import Call

# Primitives that call programs, which are evaluated equation by equation as well.
CALLS = (
  "jit pjit closed_call core_call scan while cond checkpoint remat remat2 custom_jvp_call "
  "custom_vjp_call custom_vjp_call_jaxpr"
).split()
MAPS = ("shard_map", "xla_pmap")  # primitives that run their programs on many devices
_OF_MESHES = ("reshard", "mesh_cast")  # jax adds them for arrays of a mesh
CONSTRAINTS = ("sharding_constraint", *_OF_MESHES)

# The outputs of an equation for inputs.
Bind = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]


def for_one_device(call: Call) -> Call:
  """A call without its mesh and sharding constraints.

  A warning says that they are left out, once for each name of a function.

  Raises:
    ValueError: it maps over devices.
  """
  program, structure, jit = call.trace
  jaxpr = program.jaxpr
  if mapped := set(primitives(jaxpr)).intersection(MAPS):
    raise ValueError(
      f"{call.__name__} has {min(mapped)}, and a target is one device: pass the function that it "
      "maps, with the shapes of one device; where it has collectives such as pmean over an axis, "
      "pass jax.vmap(function, axis_name=...) with a leading dimension of 1"
    )
  is_constrained = _has_shardings(jaxpr)
  if is_constrained or not jax.sharding.get_abstract_mesh().empty:
    _say_unsharded(call.__name__)
  if not is_constrained:
    return call

  def single(*arrays: Any) -> Any:
    return structure.arrays_of(evaluate(program, arrays, _bind_unsharded))

  single.__name__ = call.__name__
  return Call(jit.for_one_device().apply(single, {}) if jit else single, call.arrays, {})


@functools.cache  # once for all labels of a search
def _say_unsharded(name: str) -> None:
  logging.warning(
    "the mesh and the constraints on shardings of %s are left out: a target is one device", name
  )


def _has_shardings(jaxpr: core.Jaxpr) -> bool:
  return any(
    equation.primitive.name in CONSTRAINTS
    or any(map(_is_constraint, jax.tree.leaves(equation.params)))
    or any(map(_has_shardings, programs_of(equation)))
    for equation in jaxpr.eqns
  )


def _is_constraint(param: Any) -> bool:
  """Whether a parameter is a sharding; jax gives some equations one of a mesh without devices."""
  is_empty = isinstance(param, jax.sharding.NamedSharding) and param.mesh.empty
  return isinstance(param, jax.sharding.Sharding) and not is_empty


def _bind_unsharded(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
  name, params = equation.primitive.name, equation.params
  if name in CONSTRAINTS:
    return inputs
  # Without the mesh of `_written_at`, in which the equation was traced. A trace refuses
  # `jax.set_mesh`, and so `parallel.no_mesh`.
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    if name in ("jit", "pjit"):
      inner = params["jaxpr"]
      called = lambda *args: evaluate(inner, args, _bind_unsharded)
      called.__name__ = params["name"]
      return jax.jit(called)(*inputs)
    params = {
      key: None if isinstance(value, jax.sharding.Sharding) else value
      for key, value in params.items()
    }
    if name in CALLS:
      params = {key: rewrite(value, _bind_unsharded) for key, value in params.items()}
    return bind_primitive(equation, params, inputs)


def evaluate(closed: core.ClosedJaxpr, args: Sequence[Any], bind: Bind) -> list[Any]:
  """The outputs of a program, of which each equation is evaluated by `bind`."""
  jaxpr = closed.jaxpr
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for equation in jaxpr.eqns:
    with _written_at(equation):
      outputs = bind(equation, [read(atom) for atom in equation.invars])
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


@contextlib.contextmanager
def _written_at(equation: core.JaxprEqn):
  """Inside, new equations get the source line, names and settings of `equation`."""
  source = equation.source_info
  names = source_info_util.current_name_stack() + source.name_stack
  with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
    yield


def bind_primitive(equation: core.JaxprEqn, params: dict, inputs: list[Any]) -> Sequence[Any]:
  """The outputs of an equation with other parameters and inputs."""
  bound = equation.primitive.get_bind_params(params)
  # Before jax 0.10 functions among the parameters came apart from the other parameters.
  functions, params = bound if isinstance(bound, tuple) else ((), bound)
  outputs = equation.primitive.bind(*functions, *inputs, **params)
  return outputs if equation.primitive.multiple_results else [outputs]


def rewrite(value: Any, bind: Bind) -> Any:
  """A parameter of a call, whose programs are traced again with `bind`."""
  if not _programs_in(value):
    return value
  if isinstance(value, (tuple, list)):
    return type(value)(rewrite(item, bind) for item in value)
  if isinstance(value, core.Jaxpr):
    return _traced(core.ClosedJaxpr(value, ()), bind).jaxpr
  return _traced(value, bind)


def _traced(closed: core.ClosedJaxpr, bind: Bind) -> core.ClosedJaxpr:
  is_on_mesh = not jax.sharding.get_abstract_mesh().empty  # its types have shardings
  shapes = [
    jax.ShapeDtypeStruct(
      aval.shape,
      aval.dtype,
      weak_type=aval.weak_type,
      sharding=aval.sharding if is_on_mesh else None,
    )
    for aval in (variable.aval for variable in closed.jaxpr.invars)
  ]
  return jax.make_jaxpr(lambda *args: evaluate(closed, args, bind))(*shapes)


def primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
  """The names of the primitives of a program and of all programs within."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    yield from itertools.chain.from_iterable(map(primitives, programs_of(equation)))


def named_programs_of(
  equation: core.JaxprEqn,
) -> Iterator[tuple[str, core.Jaxpr | core.ClosedJaxpr]]:
  """The programs among the parameters of an equation, with the name of the parameter."""
  for name, param in equation.params.items():
    for item in _programs_in(param):
      yield name, item


def programs_of(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
  """The programs among the parameters of an equation."""
  for _, item in named_programs_of(equation):
    yield item.jaxpr if isinstance(item, core.ClosedJaxpr) else item


def _programs_in(param: Any) -> list[core.Jaxpr | core.ClosedJaxpr]:
  """The programs in a parameter of an equation: itself, or items of a list."""
  items = param if isinstance(param, (tuple, list)) else [param]
  return [item for item in items if isinstance(item, (core.Jaxpr, core.ClosedJaxpr))]


def operations(closed: core.ClosedJaxpr, *, with_details: bool) -> Iterator[str]:
  """A line for each equation of a program, the same for equal programs.

  Lines have no weak types and nested jits, because these do not change results. Without details
  they have no shardings either: jax adds some for arrays of a mesh.

  Args:
    closed: the program.
    with_details: whether lines have parameters, constants, and from which equations the operands
      come; without them lines are the same in every version of jax.
  """
  numbers = map(str, itertools.count())

  def lines(program: Any, inputs: Iterable[str]) -> Generator[str, None, list[str]]:
    is_closed = isinstance(program, core.ClosedJaxpr)
    jaxpr = program.jaxpr if is_closed else program
    places = dict(zip(jaxpr.invars, inputs))
    if with_details and is_closed:
      places |= zip(jaxpr.constvars, map(_digest, program.consts))
    place = lambda atom: str(atom) if isinstance(atom, core.Literal) else places.get(atom, "")
    for equation in jaxpr.eqns:
      name, params = equation.primitive.name, equation.params
      operands = list(map(place, equation.invars))
      if name in ("jit", "pjit"):
        places |= zip(equation.outvars, (yield from lines(params["jaxpr"], operands)))
        continue
      is_same = name == "convert_element_type" and (
        params["new_dtype"] == equation.invars[0].aval.dtype
      )
      if is_same or name in _OF_MESHES and not with_details:
        places |= zip(equation.outvars, operands)
        continue
      places |= zip(equation.outvars, numbers)
      atoms = (*equation.invars, *equation.outvars)
      shapes = [_shape(atom.aval, with_details) for atom in atoms]
      details = [operands, _details(params)] if with_details else []
      yield " ".join(map(str, [name, *shapes, *details]))
      for param in params.values():
        for inner in _programs_in(param):
          yield from lines(inner, numbers)
    return list(map(place, jaxpr.outvars))

  outputs = yield from lines(closed, numbers)
  if with_details:
    yield str(outputs)


def _shape(aval: Any, with_sharding: bool) -> str:
  if with_sharding or not hasattr(aval, "dtype"):
    return getattr(aval, "str_short", str)()
  return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _details(params: Mapping[str, Any]) -> str:
  """The parameters of an equation but its programs, without addresses of functions."""
  kept = {key: value for key, value in params.items() if not _programs_in(value)}
  return re.sub(r"0x[0-9a-f]+", "", str(sorted(kept.items(), key=lambda item: item[0])))


def _digest(const: Any) -> str:
  if jax.dtypes.issubdtype(const.dtype, jax.dtypes.prng_key):
    const = jax.random.key_data(const)
  return hashlib.sha256(np.asarray(const).tobytes()).hexdigest()
