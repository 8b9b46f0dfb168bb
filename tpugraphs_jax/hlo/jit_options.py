"""What `jax.jit` was told about a function, to jit another function alike.

jax has no interface for it. Shardings, donation and compiler options are parameters of the equation
that a jitted function makes in a jaxpr, and static arguments show when the function is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
import weakref

import jax
from jax.experimental import layout
from jax.extend import core
import numpy as np

from tpugraphs_jax.hlo import state

SCALARS = (bool, int, float, complex)  # arrays under `jax.jit`, unless it was told otherwise
JITTED = type(jax.jit(lambda: None))


class JitOptions(NamedTuple):
  """What `jax.jit` was told about a function of arrays.

  Attributes:
    name: of the function.
    donated: numbers of the arrays whose memory the outputs may take.
    in_shardings: of each array a sharding, a format (a sharding with a layout), or None.
    out_shardings: of each output, as `in_shardings`.
    keep_unused: whether arrays that the function does not use stay arguments.
    compiler_options: by name.
  """

  name: str
  donated: tuple[int, ...]
  in_shardings: tuple[Any, ...]
  out_shardings: tuple[Any, ...]
  keep_unused: bool
  compiler_options: Mapping[str, Any]

  def apply(self, function: Callable[..., Any], compiler_options: Mapping[str, Any]) -> Any:
    """Jits a function of the arrays in the same way, with more compiler options.

    The function returns the outputs as a tuple, and a value without arrays.
    """
    function.__name__ = self.name
    shardings: dict[str, Any] = {}
    if any(self.in_shardings):
      shardings["in_shardings"] = self.in_shardings
    if any(self.out_shardings):
      shardings["out_shardings"] = self.out_shardings, None
    return jax.jit(
      function,
      donate_argnums=self.donated,
      keep_unused=self.keep_unused,
      compiler_options={**self.compiler_options, **compiler_options} or None,
      **shardings,
    )

  def for_one_device(self) -> JitOptions:
    """The same without shardings."""
    return self._replace(in_shardings=(), out_shardings=())

  def __str__(self) -> str:
    """What changes the compiled program; empty where nothing does."""
    told = {"donated": self.donated, "in": self.in_shardings, "out": self.out_shardings}
    told["options"] = tuple(sorted(self.compiler_options.items()))
    return ", ".join(f"{name} {value}" for name, value in told.items() if any(value))


def is_jitted(function: Any) -> bool:
  """Whether `jax.jit` returned a function, or a wrapper that can be lowered too."""
  return isinstance(function, JITTED) or callable(getattr(function, "lower", None))


def read_jaxpr(jaxpr: core.Jaxpr) -> JitOptions | None:
  """The options of the one jitted function that a program consists of; None of other programs."""
  if [equation.primitive.name for equation in jaxpr.eqns] not in (["jit"], ["pjit"]):
    return None
  (equation,) = jaxpr.eqns
  inputs = {id(variable): place for place, variable in enumerate(equation.invars)}
  outputs = {id(variable): place for place, variable in enumerate(equation.outvars)}
  return read_params(
    equation.params,
    [inputs.get(id(variable)) for variable in jaxpr.invars],
    [outputs.get(id(variable)) for variable in jaxpr.outvars],
  )


def read_params(
  params: Mapping[str, Any], inputs: Sequence[int | None], outputs: Sequence[int | None]
) -> JitOptions:
  """The options by the parameters of an equation.

  Args:
    params: of an equation `jit`.
    inputs: the place of each array among the inputs of the equation; None where it is none.
    outputs: the place of each output.
  """

  def shardings(kind: str, places: Sequence[int | None]) -> tuple[Any, ...]:
    return tuple(
      None
      if place is None
      else _sharding(params[f"{kind}_shardings"][place], params[f"{kind}_layouts"][place])
      for place in places
    )

  donated = params["donated_invars"]
  return JitOptions(
    params["name"],
    tuple(n for n, place in enumerate(inputs) if place is not None and donated[place]),
    shardings("in", inputs),
    shardings("out", outputs),
    params["keep_unused"],
    dict(params["compiler_options_kvs"]),
  )


def _sharding(sharding: Any, of_layout: Any) -> Any:
  """A sharding or format as `jax.jit` takes it; None where it is left to the compiler."""
  sharding = sharding if isinstance(sharding, jax.sharding.Sharding) else None
  return sharding if of_layout is None else layout.Format(of_layout, sharding)


def scalar_arguments(
  function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bool, list[int]]:
  """Which Python scalars are arrays for a function.

  Returns:
    Whether they are arrays, and the places of the leaves that are static anyway.
  """
  if not isinstance(function, JITTED) and not state.is_jitted_by_nnx(function):
    return not is_jitted(function), []
  static: list[int] = []
  first = 0
  for key in [*range(len(args)), *sorted(kwargs)]:
    leaves = jax.tree.leaves(
      (kwargs if isinstance(key, str) else args)[key], is_leaf=state.is_object
    )
    may_be = any(isinstance(leaf, (*SCALARS, np.generic)) for leaf in leaves)
    if may_be and _is_static(function, args, kwargs, key):
      static += range(first, first + len(leaves))
    first += len(leaves)
  return True, static


class _Unhashable:
  """Neither a static value nor an array."""

  __hash__ = None  # type: ignore[assignment]


_STATIC: weakref.WeakKeyDictionary[Any, dict[int | str, bool]] = weakref.WeakKeyDictionary()


def _is_static(
  function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: int | str
) -> bool:
  """Whether jax was told that an argument of a jitted function is static.

  No attribute tells. jax refuses a static value that cannot be hashed with ValueError and an
  argument that is no array with TypeError, both before it traces the function.
  """
  known = _STATIC.setdefault(function, {})
  if key not in known:
    other_args, other_kwargs = dict(enumerate(args)), dict(kwargs)
    (other_kwargs if isinstance(key, str) else other_args)[key] = _Unhashable()  # type: ignore
    try:
      function.trace(*other_args.values(), **other_kwargs)
      known[key] = False
    except (ValueError, TypeError) as error:
      known[key] = isinstance(error, ValueError)
  return known[key]
