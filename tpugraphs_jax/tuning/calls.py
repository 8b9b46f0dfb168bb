"""A function with example arguments as a function of arrays alone.

Everything else among the arguments and outputs, such as a number of steps or an activation
function, is part of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_SCALARS = (bool, int, float, complex)


class Call:
  """A function of the arrays in the arguments of a call.

  Python scalars count as arrays, as under `jax.jit`. Where the function is jitted already they are
  part of the program, and its wrapper decides.

  Args:
    function: a function that jax can trace; one that `jax.jit` or Equinox returned too.
    args: its example arguments, arrays or `jax.ShapeDtypeStruct`, in any nesting.
    kwargs: its keyword arguments.

  Attributes:
    arrays: the arrays in the arguments, in the order of their leaves.
  """

  def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
    kinds = _ARRAYS if hasattr(function, "lower") else _ARRAYS + _SCALARS
    leaves, self._tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    self._function: Any = function
    self._is_array = [isinstance(leaf, kinds) for leaf in leaves]
    self._others = [None if is_array else leaf for leaf, is_array in zip(leaves, self._is_array)]
    self.arrays = tuple(leaf for leaf, is_array in zip(leaves, self._is_array) if is_array)
    self.__name__ = getattr(function, "__name__", type(function).__name__)

  def __call__(self, *arrays: Any) -> Any:
    """The outputs of the function for other values of the arrays."""
    args, kwargs = self._arguments(arrays)
    return self._function(*args, **kwargs)

  def shapes(self, sharding: jax.sharding.Sharding) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the arrays, on a device."""
    avals = map(jax.typeof, jax.eval_shape(lambda *arrays: arrays, *self.arrays))
    return [
      jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
      for aval in avals
    ]

  def lower(self, arrays: Sequence[Any]) -> jax.stages.Lowered:
    """The function as jax lowers it for these arrays, with the names of its arguments."""
    args, kwargs = self._arguments(arrays)
    if hasattr(self._function, "trace"):  # of `jax.jit`
      return self._function.lower(*args, **kwargs)
    if all(self._is_array) and not hasattr(self._function, "lower"):
      return jax.jit(self._function).lower(*args, **kwargs)

    def arrays_of(*arrays: Any) -> list[Any]:
      return self._array_outputs(arrays)[0]

    arrays_of.__name__ = self.__name__
    return jax.jit(arrays_of).lower(*arrays)

  def trace(self) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
    """The closed jaxpr of the arrays, and a function from its outputs to the function's."""
    kept: list[Any] = []

    def arrays_of(*arrays: Any) -> list[Any]:
      outputs, leaves, tree = self._array_outputs(arrays)
      kept[:] = leaves, tree
      return outputs

    def outputs_of(arrays: Sequence[Any]) -> Any:
      leaves, tree = kept
      each = iter(arrays)
      return jax.tree.unflatten(tree, [next(each) if leaf is None else leaf for leaf in leaves])

    return jax.make_jaxpr(arrays_of)(*self.arrays), outputs_of

  def _array_outputs(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """The arrays among the outputs; all leaves with None for arrays, and their tree."""
    leaves, tree = jax.tree.flatten(self(*arrays))
    is_array = [isinstance(leaf, _ARRAYS + _SCALARS) for leaf in leaves]
    others = [None if is_one else leaf for leaf, is_one in zip(leaves, is_array)]
    return [leaf for leaf, is_one in zip(leaves, is_array) if is_one], others, tree

  def _arguments(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
    each = iter(arrays)
    leaves = [next(each) if leaf is None else leaf for leaf in self._others]
    return jax.tree.unflatten(self._tree, leaves)
