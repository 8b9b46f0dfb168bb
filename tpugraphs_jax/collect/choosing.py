"""Choices of layouts for a function, and the function with a choice applied.

  found = collect.choices(step, *arguments)
  faster = jax.jit(collect.apply(step, found.choice(numbers)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import layout as jax_layout
from jax.extend import core
from jax.extend import source_info_util
import numpy as np

from tpugraphs_jax.collect import equations
from tpugraphs_jax.collect.equations import Dims, Group, Orders

# Names the group of an equation in the instructions that the compiler makes of it.
SCOPE = "layout_group_"


@dataclasses.dataclass(frozen=True)
class Choice:
  """One option for each group of a program."""

  orders: Mapping[Group, Orders]
  number: Mapping[Group, int]  # of the group


@dataclasses.dataclass(frozen=True)
class Choices:
  """What a program's layouts can be chosen from."""

  groups: tuple[Group, ...]

  @property
  def options(self) -> np.ndarray:
    """How many options each group has, `[groups]` int64; option 0 is the compiler's own."""
    return np.array([len(group.options) for group in self.groups], np.int64)

  def choice(self, numbers: Sequence[int]) -> Choice:
    """The choice that takes option `numbers[g]` for group g.

    Raises:
      ValueError: there is not one number per group, or no such option.
    """
    numbers = [int(number) for number in numbers]
    if len(numbers) != len(self.groups):
      raise ValueError(f"{len(numbers)} option numbers, expected one for each of the program's "
                       f"{len(self.groups)} groups")
    for group, number in zip(self.groups, numbers):
      if not 0 <= number < len(group.options):
        raise ValueError(f"option {number} of {group}, expected 0..{len(group.options) - 1}")
    return Choice(
        {group: group.options[number] for group, number in zip(self.groups, numbers)},
        {group: place for place, group in enumerate(self.groups)})

  @property
  def default(self) -> Choice:
    """The choice that leaves everything to the compiler."""
    return self.choice([0] * len(self.groups))


def choices(
    function: Callable[..., Any], *args: Any, operands: bool = False, **kwargs: Any
) -> Choices:
  """The groups of equations of a function that get layouts.

  On measured TPU v3 times the orders of outputs explain nearly all of the variance of
  a program's run time, and the orders of operands nothing: operands are left to the
  compiler.

  Args:
    function: a function that jax can trace; one that `jax.jit`, `jax.grad` or
      `jax.vmap` returned as well.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`; as `**kwargs`.
    operands: whether the orders of operands are chosen too.

  Raises:
    ValueError: a convolution, dot or reshape is where its layouts cannot be chosen.
  """
  jaxpr = jax.make_jaxpr(function)(*args, **kwargs).jaxpr
  groups = dict.fromkeys(equations.groups(jaxpr))
  return Choices(tuple(group if operands else group.of_outputs() for group in groups))


def apply(function: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
  """The same function with layouts chosen.

  To be called under `jax.jit`, with arguments of the shapes that the choice was
  made for: an equation that the choice does not know is left to the compiler, and
  so is the derivative of the result (apply a choice to the gradient instead).
  The outputs are the same numbers. Inside scans, loops, branches, nested jits
  and checkpoints layouts are chosen as well; a custom derivative keeps its rule,
  in which the compiler chooses. Donate arguments in the outer `jax.jit`.
  """
  def chosen(*args: Any, **kwargs: Any) -> Any:
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
    outputs = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves((args, kwargs)), choice)
    return jax.tree.unflatten(
        jax.tree.structure(shapes), _behind_barriers(jaxpr.jaxpr, outputs, choice))
  chosen.__name__ = getattr(function, "__name__", "chosen")
  return chosen


def minor_to_major(order: Dims, rank: int) -> Dims:
  """A complete order from its minor end; the other dimensions are row-major."""
  return (*order, *(dim for dim in reversed(range(rank)) if dim not in order))


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], choice: Choice
) -> list[Any]:
  """The outputs of a program, its equations bound again one by one."""
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for equation in jaxpr.eqns:
    with _written_at(equation):
      outputs = _bind(equation, [read(atom) for atom in equation.invars], choice)
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _behind_barriers(
    jaxpr: core.Jaxpr, outputs: Sequence[Any], choice: Choice
) -> list[Any]:
  """Keeps chosen layouts away from the outputs of the program.

  An output with a layout of its own is read wrongly by the next jitted function
  (jax 0.10.2), and a program must not pass its work on to its caller.
  """
  maker = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
  chosen = [not isinstance(atom, core.Literal) and atom in maker
            and _chooses(maker[atom], choice) for atom in jaxpr.outvars]
  return [jax.lax.optimization_barrier(value) if is_chosen else value
          for value, is_chosen in zip(outputs, chosen)]


def _chooses(equation: Any, choice: Choice) -> bool:
  """Whether a layout is chosen for an equation or for one in the programs it calls."""
  found = [equations.group_of(equation)]
  for inner in equations.inner_jaxprs(equation):
    found += equations.groups(inner)
  return any(any(choice.orders.get(group, ())) for group in found)


@contextlib.contextmanager
def _written_at(equation: Any):
  """Keeps the user's source line, names and settings of an equation."""
  source = equation.source_info
  names = source_info_util.current_name_stack() + source.name_stack
  with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
    yield


def _bind(equation: Any, inputs: list[Any], choice: Choice) -> Sequence[Any]:
  group = equations.group_of(equation)
  if group in choice.orders:
    with jax.named_scope(f"{SCOPE}{choice.number[group]}"):
      output, *operands = choice.orders[group]
      inputs = [_constrained(value, order) for value, order in zip(inputs, operands)]
      return [_constrained(_bind_primitive(equation, equation.params, inputs)[0], output)]
  params = equation.params
  if equation.primitive.name in equations.CALLS:
    params = {key: _rewritten(value, choice) for key, value in params.items()}
  return _bind_primitive(equation, params, inputs)


def _bind_primitive(equation: Any, params: dict, inputs: list[Any]) -> Sequence[Any]:
  bound = equation.primitive.get_bind_params(params)
  # Before jax 0.10 the functions among the parameters came apart from the others.
  functions, params = bound if isinstance(bound, tuple) else ((), bound)
  outputs = equation.primitive.bind(*functions, *inputs, **params)
  return outputs if equation.primitive.multiple_results else [outputs]


def _rewritten(value: Any, choice: Choice) -> Any:
  """A parameter of a call: programs in it get their layouts, anything else stays."""
  if isinstance(value, (tuple, list)):
    return type(value)(_rewritten(item, choice) for item in value) if any(
        isinstance(item, (core.Jaxpr, core.ClosedJaxpr)) for item in value) else value
  if isinstance(value, core.Jaxpr):
    return _traced(core.ClosedJaxpr(value, ()), choice).jaxpr
  return _traced(value, choice) if isinstance(value, core.ClosedJaxpr) else value


def _traced(closed: core.ClosedJaxpr, choice: Choice) -> core.ClosedJaxpr:
  if not any(group in choice.orders for group in equations.groups(closed.jaxpr)):
    return closed
  shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in (variable.aval for variable in closed.jaxpr.invars)]
  return jax.make_jaxpr(
      lambda *args: _evaluate(closed.jaxpr, closed.consts, args, choice))(*shapes)


def _constrained(value: Any, order: Dims) -> Any:
  if not order:
    return value
  return _with_layout(value, minor_to_major(order, np.ndim(value))[::-1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _with_layout(value: Any, major_to_minor: Dims) -> Any:
  return jax_layout.with_layout_constraint(value, jax_layout.Layout(major_to_minor))


@_with_layout.defjvp
def _with_layout_jvp(major_to_minor: Dims, primals: tuple, tangents: tuple) -> tuple:
  """Leaves the derivative to the compiler: its layouts are chosen in its own program."""
  return _with_layout(*primals, major_to_minor), tangents[0]
