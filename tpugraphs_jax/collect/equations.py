"""The equations of a program that get layouts, and what they choose from.

As in the data set these are convolutions, dots and reshapes, and their choices
have its forms: the two minor dimensions of output and, where asked for, of both
operands, or for a reshape all orders between which no element moves. Equal equations decide
together and form a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any

from jax.extend import core
import numpy as np

from tpugraphs_jax.hlo import layout_search

Dims = tuple[int, ...]
# The orders of output and operands, minor to major; an empty one is left to the compiler.
Orders = tuple[Dims, ...]

# Parameters that make two equations of one primitive and equal shapes different.
_DETAILS = {
    "conv_general_dilated": (
        "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
        "feature_group_count", "batch_group_count"),
    "dot_general": ("dimension_numbers",),
    "reshape": ("dimensions",),
}
# Primitives whose inner programs are looked into.
CALLS = (
    "jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "checkpoint",
    "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
# Kernels of the user's own, of which XLA sees nothing.
_SEALED = ("pallas_call", "tpu_custom_call")


@dataclasses.dataclass(frozen=True)
class Group:
  """Equal equations, which decide together."""

  primitive: str
  shapes: tuple[Dims, ...]  # of the output, then of the operands
  dtypes: tuple[str, ...]  # as shapes
  detail: str  # dimension numbers, strides and the like
  options: tuple[Orders, ...] = dataclasses.field(compare=False)  # first the compiler's own

  def of_outputs(self) -> Group:
    """The same equations, which choose the order of their output alone."""
    options = ((output, *((),) * len(operands)) for output, *operands in self.options)
    return dataclasses.replace(self, options=tuple(dict.fromkeys(options)))

  def __str__(self) -> str:
    arrays = [f"{dtype}[{','.join(map(str, shape))}]"
              for dtype, shape in zip(self.dtypes, self.shapes)]
    return f"{self.primitive} {arrays[0]} <- {', '.join(arrays[1:])}"


def group_of(equation: Any) -> Group | None:
  """The group of a jaxpr's equation, None where it gets no layouts."""
  name = equation.primitive.name
  if name not in _DETAILS:
    return None
  avals = [variable.aval for variable in (*equation.outvars, *equation.invars)]
  shapes = tuple(tuple(aval.shape) for aval in avals)
  detail = repr([equation.params[key] for key in _DETAILS[name] if key in equation.params])
  return Group(
      name, shapes, tuple(str(aval.dtype) for aval in avals), detail,
      options=_options(name, shapes, equation.params))


def groups(jaxpr: core.Jaxpr) -> Iterator[Group]:
  """The group of every equation in a program and in the programs it calls.

  Raises:
    ValueError: an equation that gets layouts is inside a primitive that cannot
      be looked into, such as `shard_map`.
  """
  for equation in jaxpr.eqns:
    group = group_of(equation)
    if group is not None:
      yield group
    for inner in inner_jaxprs(equation):
      yield from groups(inner)


def inner_jaxprs(equation: Any) -> list[core.Jaxpr]:
  """The programs that an equation calls and that may hold decisions.

  Raises:
    ValueError: as `groups`.
  """
  found = [getattr(item, "jaxpr", item) for value in equation.params.values()
           for item in (value if isinstance(value, (tuple, list)) else [value])
           if isinstance(item, (core.Jaxpr, core.ClosedJaxpr))]
  name = equation.primitive.name
  if name in CALLS or not found or name in _SEALED:
    return found if name in CALLS else []
  inside = next(itertools.chain.from_iterable(map(groups, found)), None)
  if inside is not None:
    raise ValueError(f"{name} holds {inside}, whose layouts cannot be chosen there; expected "
                     f"them inside {', '.join(CALLS)} or at the top: call the function that "
                     f"{name} maps instead")
  return []


def _options(name: str, shapes: Sequence[Dims], params: dict) -> tuple[Orders, ...]:
  default = ((),) * len(shapes)
  if max(map(len, shapes)) > layout_search.MAX_RANK or not all(
      isinstance(size, (int, np.integer)) for shape in shapes for size in shape):
    return (default,)
  return tuple(dict.fromkeys([default, *_ORDERS[name](shapes, params)]))


def _convolution_orders(shapes: Sequence[Dims], params: dict) -> Iterator[Orders]:
  """Batch and feature of output and input, both features of the kernel."""
  del shapes
  numbers = params["dimension_numbers"]
  pairs = (numbers.out_spec[:2], numbers.lhs_spec[:2], numbers.rhs_spec[1::-1])
  return itertools.product(
      *(layout_search.both_orders(tuple(int(dim) for dim in pair)) for pair in pairs))


def _dot_orders(shapes: Sequence[Dims], params: dict) -> Iterator[Orders]:
  """The last two dimensions of output and both operands."""
  del params
  return itertools.product(
      *(layout_search.both_orders(tuple(range(len(shape)))[-2:]) for shape in shapes))


def _reshape_orders(shapes: Sequence[Dims], params: dict) -> Iterator[Orders]:
  return layout_search.reshape_orders(*shapes[:2]) if params["dimensions"] is None else iter(())


_ORDERS: dict[str, Callable[[Sequence[Dims], dict], Iterator[Orders]]] = {
    "conv_general_dilated": _convolution_orders,
    "dot_general": _dot_orders,
    "reshape": _reshape_orders,
}
