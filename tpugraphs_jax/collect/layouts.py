"""Layouts of a function in a file, and the function with the layouts of a file.

  tuned.save("layouts.json")
  fast = jax.jit(tpugraphs_jax.apply(step, "layouts.json"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from tpugraphs_jax.collect import choosing
from tpugraphs_jax.collect.choosing import Choice, Group
from tpugraphs_jax.infra import files, trust


def save(
    path: Path, function: Callable[..., Any], args: tuple, choice: Choice, about: Mapping[str, Any]
) -> None:
  """Writes a choice of layouts for a function of these example arguments.

  Args:
    path: of the file, a JSON object.
    function: that the choice was made for.
    args: its example arguments.
    choice: an option for each of its groups.
    about: what else is known of the choice: `name` of the function, label, versions.
  """
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  record = {**about, "operations": _hash(jaxpr), "groups": [
      {"operation": str(group), "detail": group.detail, "orders": orders}
      for group, orders in choice.items()]}
  with files.replacing(path) as file:
    file.write(json.dumps(record, indent=1) + "\n")


def apply(function: Callable[..., Any], path: str | os.PathLike[str]) -> Callable[..., Any]:
  """The function with the layouts that `Tuned.save` wrote; its outputs are the same numbers.

  Call the result under `jax.jit`, with arguments of the shapes that it was tuned for.

  Args:
    function: that was tuned.
    path: of the file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no layouts; and, from the function that is returned, the program is
      not the one that was tuned.
  """
  path = Path(path)
  if not path.exists():
    raise FileNotFoundError(f"there is no {path}, expected a file that Tuned.save wrote")
  try:
    record = trust.parse(path.read_text())
    saved = {(each["operation"], each["detail"]): tuple(map(tuple, each["orders"]))
             for each in record["groups"]}
    name, operations = record["name"], record["operations"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} holds no layouts ({error!r}), expected a file that Tuned.save "
                     "wrote") from None

  @functools.wraps(function)
  def chosen(*args: Any, **kwargs: Any) -> Any:
    jaxpr = jax.make_jaxpr(function)(*args, **kwargs).jaxpr
    groups = dict.fromkeys(choosing.groups_of(jaxpr))
    _check(path, name, saved, groups)
    if _hash(jaxpr) != operations:
      raise ValueError(f"{path} was made for {name!r}, whose other operations have changed: tune "
                       "it again")
    choice = {group: saved[str(group), group.detail] for group in groups}
    return choosing.apply(function, choice)(*args, **kwargs)
  return chosen


def _check(path: Path, name: str, saved: Mapping[tuple[str, str], Any],
           groups: Mapping[Group, Any]) -> None:
  """Raises ValueError where a program has other convolutions, dots or reshapes than a file."""
  found = {(str(group), group.detail) for group in groups}
  for is_new, differing in ((True, found - set(saved)), (False, set(saved) - found)):
    if differing:
      operation, _ = min(differing)
      raise ValueError(f"{path} was made for {name!r} {'without' if is_new else 'with'} "
                       f"{operation}: the program has changed, tune it again")


def _hash(jaxpr: core.Jaxpr) -> str:
  """SHA-256 of the primitives of a program and of the shapes and types that they get and give."""
  text = "\n".join(_operations(jaxpr))
  return hashlib.sha256(text.encode()).hexdigest()


def _operations(jaxpr: core.Jaxpr) -> Iterator[str]:
  for equation in jaxpr.eqns:
    arrays = [str(getattr(atom, "aval", atom)) for atom in (*equation.invars, *equation.outvars)]
    yield f"{equation.primitive.name} {' '.join(arrays)}"
    for value in equation.params.values():
      for item in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(item, "jaxpr", item)
        if isinstance(inner, core.Jaxpr):
          yield from _operations(inner)
