"""Arguments of functions: keywords of `tune`, `estimate` and others, and whole numbers."""

from __future__ import annotations

from collections.abc import Callable
import difflib
import functools
import inspect
import operator
from typing import Any, TypeVar

import numpy as np

_Verb = TypeVar("_Verb", bound=Callable[..., Any])
# One TPU or several: each word is taken for the other.
_TARGETS = {"target": "targets", "targets": "target"}
_NEAR = 0.8  # `difflib` ratio from which a name may be a misspelt option


def check_whole(least: int | None = None, /, **numbers: Any) -> None:
  """Refuses (ValueError) arguments that are no whole numbers, or smaller than the least."""
  for name, number in numbers.items():
    try:
      is_whole = operator.index(number) is not None and not isinstance(number, (bool, np.bool_))
    except TypeError:
      is_whole = False
    if not is_whole or (least is not None and number < least):
      bound = "" if least is None else f" from {least} on"
      raise ValueError(f"{name} is {number!r}, expected a whole number{bound}")


def checked(verb: _Verb) -> _Verb:
  """A function that takes a function, its arguments and options, and checks its keyword arguments.

  `target=` and `targets=` are both taken. ValueError where a keyword argument is an option and a
  parameter of the function, or is neither and nearly has the name of an option.
  """
  parameters = inspect.signature(verb).parameters.values()
  options = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

  @functools.wraps(verb)
  def check(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    names = _parameters(function, len(args))
    for name, option in _TARGETS.items():
      if name in kwargs and name not in (*options, *names) and option in options:
        kwargs[option] = _target(kwargs, name, option)
    for name in kwargs:
      _check(name, names, options, function, verb)
    return verb(function, *args, **kwargs)

  return check  # type: ignore[return-value]


def _parameters(function: Any, count: int) -> list[str]:
  """The parameters that a function has by name, without those of `count` positional arguments."""
  if not callable(function):
    return []
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except (TypeError, ValueError):
    return []
  by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  given = [parameter.name for parameter in parameters if parameter.kind in by_place][:count]
  given += getattr(function, "keywords", {})  # of functools.partial
  stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return [part.name for part in parameters if part.name not in given and part.kind not in stars]


def _target(kwargs: dict[str, Any], name: str, option: str) -> Any:
  """The value of one word for the other."""
  if option in kwargs:
    raise ValueError(f"{name}= and {option}= are both given, expected one of them")
  value = kwargs.pop(name)
  if option == "targets" or value is None or isinstance(value, str):
    return value
  if len(value) != 1:
    raise ValueError(f"{name} is {list(value)!r}, expected one target")
  return value[0]


def _check(name: str, names: list[str], options: list[str], function: Any, verb: Any) -> None:
  called = getattr(function, "__name__", type(function).__name__)
  if name in options and name in names:
    raise ValueError(
      f"{name}= is an option of {verb.__name__} and a parameter of {called}: pass the parameter by "
      f"position, or fix it with functools.partial"
    )
  near = difflib.get_close_matches(name, options, 1, _NEAR)
  if near and name not in (*options, *names):
    raise ValueError(
      f"{verb.__name__} has no option {name!r}, and {called} no parameter of this name: "
      f"did you mean {near[0]}=? Pass other keyword arguments of {called} with functools.partial"
    )
