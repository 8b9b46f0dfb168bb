"""Calls of functions as functions of arrays alone, and functions that are jitted alike.

    Call(step, args)  ->  trace: a program of arrays   ->  RewrittenFunction: the program with other
                          and what `jax.jit` was told      layouts, jitted as `step` is

Whatever is no array among the arguments and outputs, such as a number of steps or an activation
function, is part of the program. Arrays of `state` among the arguments that a function changes are
further outputs of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import copy
import dataclasses
import difflib
import functools
import inspect
from pathlib import Path
import reprlib
import types
from typing import Any, NamedTuple

from absl import logging
import jax
from jax.extend import core, source_info_util
import numpy as np

from tpugraphs_jax.hlo import jit_options, state
from tpugraphs_jax.hlo.jit_options import JitOptions
from tpugraphs_jax.hlo.state import ObjectStructure

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NO_NUMBERS = "OSUMm"  # kinds of dtypes of NumPy: objects, texts, dates

# The source line of an operation is the caller's, never one between the caller and the function.
for _place in ("tuning", "hlo", "infra", "view", "collect.py", "estimate.py"):
  source_info_util.register_exclusion(str(Path(__file__).parents[1] / _place))


class OutputStructure:
  """What the outputs of a program have beside their arrays.

  Attributes:
    leaves: of the outputs, with None for arrays.
    tree: of the outputs.
    changed: which arrays of the state the function changes; these follow the other outputs.
  """

  def __init__(self, leaves: Sequence[Any], tree: Any, changed: Sequence[int]):
    self.leaves, self.tree, self.changed = leaves, tree, changed

  def outputs_of(self, arrays: Sequence[Any]) -> Any:
    """The outputs of the function, from those of the program."""
    values = iter(arrays)
    leaves = [next(values) if leaf is None else leaf for leaf in self.leaves]
    return jax.tree.unflatten(self.tree, leaves)

  def arrays_of(self, arrays: Sequence[Any]) -> Any:
    """The outputs of the function with None for what is no array; then those of changed state."""
    values = iter(arrays)
    leaves = [next(values) if leaf is None else None for leaf in self.leaves]
    outputs = jax.tree.unflatten(self.tree, leaves)
    return (outputs, *values) if self.changed else outputs


jax.tree_util.register_static(OutputStructure)


class Trace(NamedTuple):
  """A function as a program of arrays.

  Attributes:
    program: from the arrays of a call to those of the outputs, then of the changed state.
    outputs: what the outputs of the function have beside the arrays.
    jit: what jax was told, where all of the program is in one jitted function.
  """

  program: core.ClosedJaxpr
  outputs: OutputStructure
  jit: JitOptions | None


@dataclasses.dataclass(frozen=True)
class ArgumentStructure:
  """The arguments of a call without the values of arrays.

  Attributes:
    tree: of the arguments; objects with state are leaves.
    others: of the leaves, with `_ARRAY` and `_OBJECT` for arrays and objects.
    types: of `others`: the numbers 1, 1.0 and True are equal.
    state: of the objects.
  """

  tree: Any
  others: tuple[Any, ...]
  types: tuple[type, ...]
  state: ObjectStructure | None

  def fill(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any], list[Any]]:
    """Positional and keyword arguments with these arrays, and the new objects among them."""
    values = iter(arrays)
    leaves = [next(values) if leaf is _ARRAY else leaf for leaf in self.others]
    objects = self.state.merge(tuple(values)) if self.state else []
    new = iter(objects)
    leaves = [next(new) if leaf is _OBJECT else leaf for leaf in leaves]
    args, kwargs = jax.tree.unflatten(self.tree, leaves)
    return args, kwargs, objects


_ARRAY, _OBJECT = object(), object()

# The outputs of a program for arrays.
Evaluate = Callable[[core.ClosedJaxpr, Sequence[Any]], Sequence[Any]]


def check_callable(function: Any) -> None:
  """Refuses (ValueError) what is no function."""
  if not callable(function):
    raise ValueError(f"expected a function, found {reprlib.repr(function)}")


class Call:
  """A function of the arrays in the arguments of a call.

  Python scalars count as arrays, as under `jax.jit`, but not those that `jax.jit` was told to be
  static. A wrapper of another library decides by itself: there they are part of the program.

  Args:
    function: a function that jax can trace; one that `jax.jit`, nnx or Equinox returned too.
    args: its example arguments, arrays or `jax.ShapeDtypeStruct`, in any nesting.
    kwargs: its keyword arguments.

  Raises:
    ValueError: the function cannot be called, or an array holds no numbers.

  Attributes:
    function: the argument.
    arrays: the arrays in the arguments, in the order of their leaves, then of their state.
    structure: the arguments without these.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    check_callable(function)
    self.function: Any = function
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=state.is_object)
    self._takes_scalars, static = jit_options.scalar_arguments(_unwrap(function), args, kwargs)
    kinds = _ARRAYS + jit_options.SCALARS if self._takes_scalars else _ARRAYS
    others = [_ARRAY if isinstance(leaf, kinds) else leaf for leaf in leaves]
    for place in static:
      others[place] = leaves[place]
    self._objects = [leaf for leaf in leaves if state.is_object(leaf)]
    others = [_OBJECT if state.is_object(leaf) else leaf for leaf in others]
    of_state, structure = state.split(self._objects)
    self.structure = ArgumentStructure(tree, tuple(others), tuple(map(type, others)), structure)
    arrays = [leaf for leaf, kind in zip(leaves, others) if kind is _ARRAY]
    self.arrays: tuple[Any, ...] = (*arrays, *of_state)
    for array in self.arrays:
      if isinstance(array, (np.ndarray, np.generic)) and array.dtype.kind in _NO_NUMBERS:
        raise ValueError(f"an argument is an array of dtype {array.dtype}, expected numbers")
    self.__name__ = getattr(function, "__name__", type(function).__name__)

  def __call__(self, *arrays: Any) -> Any:
    """The outputs of the function for other values of the arrays."""
    args, kwargs, _ = self.structure.fill(arrays)
    return self.function(*args, **kwargs)

  @functools.cached_property
  def names(self) -> list[str]:
    """The name of each array: its last key in the arguments, empty where the call has none."""
    names = [""] * len(self.arrays)
    if self._objects:
      return names
    markers = [object() for _ in self.arrays]
    args, kwargs, _ = self.structure.fill(markers)
    try:
      arguments = dict(inspect.signature(self.function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a function without a signature
      arguments = kwargs
    numbers = {id(marker): number for number, marker in enumerate(markers)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
      keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
      if id(leaf) in numbers:
        names[numbers[id(leaf)]] = next((key for key in reversed(keys) if isinstance(key, str)), "")
    return names

  def at(self, arrays: Sequence[Any], function: Callable[..., Any] | None = None) -> Call:
    """The call with other values of the arrays, without objects of the caller.

    Args:
      arrays: the values.
      function: is called in place of the call's.
    """
    call = copy.copy(self)
    call.__dict__.pop("trace", None)
    call.arrays, call._objects = tuple(arrays), []
    call.function = function or self.function
    return call

  def shapes(self, sharding: jax.sharding.Sharding | None = None) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the arrays, on a device; warns of those that jax makes narrower."""
    avals = [jax.typeof(x) for x in jax.eval_shape(lambda *arrays: arrays, *self.arrays)]
    for array, aval in zip(self.arrays, avals):
      if getattr(array, "dtype", aval.dtype) != aval.dtype:
        _say_narrowed(self.__name__, str(array.dtype), str(aval.dtype))
    return [
      jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
      for aval in avals
    ]

  @functools.cached_property
  def trace(self) -> Trace:
    """The program of the call.

    Raises:
      ValueError: the function needs the values of Python scalars, or adds to its state.
    """
    if isinstance(self.function, RewrittenFunction):
      return self.function.trace_of(self)
    kept: list[OutputStructure] = []

    def arrays_of(*arrays: Any) -> list[Any]:
      outputs, structure = self._outputs(arrays)
      kept[:] = [structure]
      return outputs

    arrays_of.__name__ = self.__name__
    try:
      program = jax.make_jaxpr(arrays_of)(*self.arrays)
    except ValueError as error:
      if "compiler_options" not in str(error) or not isinstance(self.function, jit_options.JITTED):
        raise
      return self._trace_at_top()  # jax takes them in no nested jit
    except TypeError as error:  # also tracers in place of numbers
      if why := self._why_not_taken():
        raise ValueError(f"{self.__name__} does not take its arguments: {why}") from None
      if not any(isinstance(array, jit_options.SCALARS) for array in self.arrays):
        raise
      raise ValueError(
        f"{self.__name__} fails with Python numbers of its arguments as arrays, as under jax.jit: "
        "give shapes as jax.ShapeDtypeStruct, fix settings with functools.partial, or wrap a "
        "function of modules in eqx.filter_jit "
        f"({type(error).__name__}: {str(error).splitlines()[0]})"
      ) from error
    return Trace(program, kept[0], jit_options.read_jaxpr(program.jaxpr))

  def _why_not_taken(self) -> str:
    """Why the function cannot be called with its arguments; empty where it can."""
    args, kwargs, _ = self.structure.fill(self.arrays)
    try:
      inspect.signature(self.function).bind(*args, **kwargs)
    except TypeError as error:
      return str(error)
    except ValueError:  # it has no signature
      pass
    return ""

  def _trace_at_top(self) -> Trace:
    """The program of a function of `jax.jit`, as jax traces it outside of all others."""
    args, kwargs, objects = self.structure.fill(self.arrays)
    traced = self.function.trace(*args, **kwargs)
    params = getattr(traced, "_params", None)
    if params is None or objects:
      raise ValueError(
        f"{self.__name__} is jitted with compiler options, which this version of jax does not tell "
        "(or with objects of nnx): jit it without them, and pass them as options="
      )
    count = len(traced.jaxpr.out_avals)
    structure = OutputStructure([None] * count, traced.out_tree, ())
    return Trace(
      traced.jaxpr,
      structure,
      jit_options.read_params(params, range(len(self.arrays)), range(count)),
    )

  def compiler_options(self, more: Mapping[str, Any]) -> dict[str, Any]:
    """Those with which the function is jitted, and more of them."""
    jit = self.trace.jit
    return {**(jit.compiler_options if jit else {}), **more}

  def lower(self, arrays: Sequence[Any], *, platform: str | None = None) -> jax.stages.Lowered:
    """The function as jax lowers it for these arrays, with the names of its arguments if it can.

    Args:
      arrays: the arrays, or their shapes.
      platform: such as `tpu`; None: that of the arrays.
    """
    platforms = None if platform is None else (platform,)
    if isinstance(self.function, jit_options.JITTED):
      args, kwargs, _ = self.structure.fill(arrays)
      return self.function.trace(*args, **kwargs).lower(lowering_platforms=platforms)
    jit, structure = self.trace.jit, self.trace.outputs
    is_of_arrays = set(self.structure.others) <= {_ARRAY} and set(structure.leaves) <= {None}
    if jit is None and is_of_arrays:
      args, kwargs, _ = self.structure.fill(arrays)
      traced = jax.jit(self.function).trace(*args, **kwargs)
      return traced.lower(lowering_platforms=platforms)
    function = self.array_function(lambda program, arrays: core.jaxpr_as_fun(program)(*arrays))
    function.__name__ = self.__name__
    jitted = jit.apply(function, {}) if jit else jax.jit(function)
    return jitted.trace(*arrays).lower(lowering_platforms=platforms)

  def array_function(self, evaluate: Evaluate) -> Callable[..., tuple[tuple, OutputStructure]]:
    """The function of arrays that returns the outputs of its program, and their structure."""
    blank = self.at(())

    def function(*arrays: Any) -> tuple[tuple, OutputStructure]:
      trace = blank.at(arrays).trace
      return tuple(evaluate(trace.program, arrays)), trace.outputs

    return function

  def outputs_of(self, outputs: Sequence[Any], structure: OutputStructure) -> Any:
    """The outputs of the function from those of its program; updates the caller's objects."""
    count = len(outputs) - len(structure.changed)
    if self.structure.state and structure.changed:
      after = list(self.arrays[-self.structure.state.size :])
      for place, array in zip(structure.changed, outputs[count:]):
        after[place] = array
      self.structure.state.update(self._objects, after)
    return structure.outputs_of(outputs[:count])

  def _outputs(self, arrays: Sequence[Any]) -> tuple[list[Any], OutputStructure]:
    """The arrays among the outputs and those of changed state; what else the outputs have."""
    args, kwargs, objects = self.structure.fill(arrays)
    outputs = self.function(*args, **kwargs)
    leaves, tree = jax.tree.flatten(outputs)
    kinds = _ARRAYS + jit_options.SCALARS if self._takes_scalars else _ARRAYS
    others = [None if isinstance(leaf, kinds) else leaf for leaf in leaves]
    returned = [leaf for leaf, static in zip(leaves, others) if static is None]
    after, structure = state.split(objects)
    if structure and self.structure.state and structure.tree != self.structure.state.tree:
      raise ValueError(
        f"{self.__name__} adds arrays to the state of its arguments: make them before the call"
      )
    before = arrays[len(arrays) - len(after) :]
    changed = [place for place, pair in enumerate(zip(before, after)) if pair[0] is not pair[1]]
    return [*returned, *(after[place] for place in changed)], OutputStructure(others, tree, changed)


def _unwrap(function: Any) -> Any:
  """The function that a `RewrittenFunction` evaluates in another way; another one as it is."""
  while isinstance(function, RewrittenFunction):
    function = function.function
  return function


class RewrittenFunction:
  """A function whose program is evaluated in another way, jitted as the function is.

  It donates the same arrays, has the same shardings, static arguments and compiler options, updates
  the same state, and can be lowered. Where the function is not jitted, call it under `jax.jit`.

  Args:
    function: a function, or one that `jax.jit`, nnx or Equinox returned.
    evaluate: gives the outputs of its program, which is traced for the arguments of each call.
    compiler_options: more of them, where the function is jitted.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    evaluate: Evaluate,
    compiler_options: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    check_callable(function)
    self.function, self._evaluate = function, evaluate
    self._compiler_options = compiler_options
    self._jits: dict[ArgumentStructure, Any] = {}
    functools.update_wrapper(self, function, updated=())

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """The outputs of the function.

    Raises:
      ValueError: the function changes state, and is not jitted or is called in another function of
        jax.
    """
    call = Call(self.function, args, kwargs)
    is_traced = any(isinstance(array, jax.core.Tracer) for array in call.arrays)
    jitted = None if is_traced else self._jitted(call)
    if jitted is not None:
      outputs, structure = jitted(*call.arrays)
    else:
      check_state(call)
      outputs, structure = self._evaluate(call.trace.program, call.arrays), call.trace.outputs
      if jit := call.trace.jit:
        _check_inside(call, jit)
    return call.outputs_of(outputs, structure)

  def trace_of(self, call: Call) -> Trace:
    """The program of a call of this version."""
    program, structure, jit = call.at(call.arrays, self.function).trace
    changed = jax.make_jaxpr(lambda *arrays: self._evaluate(program, arrays))(*call.arrays)
    if jit:
      options = {**jit.compiler_options, **self._compiler_options}
      jit = jit._replace(compiler_options=options)
    return Trace(changed, structure, jit)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As of `jax.jit`; the lowered function takes and returns arrays alone."""
    return self._stage("lower", args, kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """As `lower`."""
    return self._stage("trace", args, kwargs)

  def _stage(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    call = Call(self.function, args, kwargs)
    jitted = self._jitted(call) or jax.jit(call.array_function(self._evaluate))
    return getattr(jitted, name)(*call.arrays)

  def _jitted(self, call: Call) -> Any:
    """The jitted function of arrays; None where the function is not jitted."""
    if call.structure not in self._jits:
      jit, function = call.trace.jit, call.array_function(self._evaluate)
      self._jits[call.structure] = jit and jit.apply(function, self._compiler_options)
    return self._jits[call.structure]


def check_state(call: Call) -> None:
  """Refuses (ValueError) a function that is not jitted and whose changes of state would be lost."""
  if call.trace.outputs.changed and call.trace.jit is None and not state.is_in_transform():
    raise ValueError(
      f"{call.__name__} changes its arguments in place, which jax.jit does not keep: "
      f"pass nnx.jit({call.__name__})"
    )


def _check_inside(call: Call, jit: JitOptions) -> None:
  """Refuses state that is changed inside another function of jax; warns of lost donation."""
  if call.trace.outputs.changed and not state.is_in_transform():
    raise ValueError(
      f"{call.__name__} changes its arguments in place, which another function of jax does not "
      "keep: call it as it is, it is jitted already"
    )
  if jit.donated:
    logging.warning(
      "%s donates arguments, which jax ignores inside another jitted function: call it as it is, "
      "it is jitted already",
      call.__name__,
    )


@functools.cache  # once for all labels of a search
def _say_narrowed(name: str, given: str, taken: str) -> None:
  logging.warning(
    "arguments of %s are %s and count as %s: jax_enable_x64 is off", name, given, taken
  )


def check_keywords(
  function: Callable[..., Any], keywords: Iterable[str], command: Callable[..., Any]
) -> None:
  """Refuses (TypeError) keywords that a function does not take, as misspelt options of a command.

  Args:
    function: which a command such as `tune` calls with all keywords that are none of its options.
    keywords: these.
    command: has the options.
  """
  try:
    taken = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):  # it has none
    return
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
    return
  parameters = inspect.signature(command).parameters.values()
  options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
  names = {parameter.name for parameter in taken}
  for keyword in (each for each in keywords if each not in names):
    near = difflib.get_close_matches(keyword, options, 1)
    name = getattr(function, "__name__", type(function).__name__)
    raise TypeError(
      f"{keyword} is no argument of {name} and no option of {command.__name__}"
      + (f"; did you mean {near[0]}?" if near else f", which has {', '.join(options)}")
    )
