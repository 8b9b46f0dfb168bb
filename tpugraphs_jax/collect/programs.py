"""Programs to collect: Python functions with the shapes of their arguments, found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import importlib.util
from pathlib import Path
import re
import sys
from typing import Any

from tpugraphs_jax import graph

_EXPECTED = ("expected a pair (function, tuple of example arguments), a dictionary of such "
             "pairs, or a function under @collect.example(...)")


@dataclasses.dataclass(frozen=True)
class Program:
  """A function and the arguments that give it shapes."""

  source: str  # as `load` takes it: FILE.py:KEY, module:name or module:name:KEY
  name: str  # of its files
  split: str
  function: Callable[..., Any]
  args: tuple  # arrays or jax.ShapeDtypeStruct, in any nesting


def example(*args: Any) -> Callable[[Callable], Callable]:
  """Marks a function as a program: `example(x, y)` gives it example arguments."""
  def mark(function: Callable) -> Callable:
    function.example_args = args
    return function
  return mark


def load(source: str, *, split: str | None = None) -> list[Program]:
  """The programs of a source.

  Args:
    source: one of
      `FILE.py`, all programs of its dictionary `PROGRAMS`, or `FILE.py:KEY`, one of them;
      a folder, the programs of all its files but those whose names begin with `_`;
      an import path `module:name` of a dictionary, a pair or a function under `example`, or
      `module:name:KEY`, one of a dictionary.
      A program of a dictionary is named after the file (or `name`) and its key.
    split: `train`, `valid` or `test`; unless given the `SPLIT` of the file or module, or
      `train` where it has none.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is nothing of that name, or it is not a program.
  """
  if Path(source).is_dir():
    return [program for path in sorted(Path(source).glob("[!_]*.py"))
            for program in load(str(path), split=split)]
  place, *names = source.split(":")
  if place.endswith(".py"):
    module, names = _file_module(Path(place)), ["PROGRAMS", *names]
    prefix, shown = Path(place).stem, place
  elif names:
    module, prefix, shown = _import(place, source), names[0], f"{place}:{names[0]}"
  else:
    raise ValueError(f"program {source!r}, expected a folder, FILE.py or an import path "
                     "module:name")
  if not hasattr(module, names[0]):
    raise ValueError(f"{place} has no {names[0]}, {_EXPECTED}")
  split = split or getattr(module, "SPLIT", graph.SPLITS[0])
  if split not in graph.SPLITS:
    raise ValueError(f"{place}: split {split!r}, expected one of {', '.join(graph.SPLITS)}")
  found = getattr(module, names[0])
  if not isinstance(found, Mapping):
    return [Program(shown, _file_name(prefix), split, *_pair(found, source))]
  if len(names) > 1 and names[1] not in found:
    raise ValueError(f"{shown} has no program {names[1]!r}, it has {', '.join(found)}")
  return [Program(f"{shown}:{key}", _file_name(f"{prefix}_{key}"), split,
                  *_pair(found[key], f"{shown}:{key}"))
          for key in (names[1:2] or found)]


def _pair(found: Any, where: str) -> tuple[Callable[..., Any], tuple]:
  if callable(found) and hasattr(found, "example_args"):
    return found, found.example_args
  if isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and (
      isinstance(found[1], tuple)):
    return found
  raise ValueError(f"{where} is a {type(found).__name__}, {_EXPECTED}")


def _import(name: str, source: str) -> Any:
  if str(Path.cwd()) not in sys.path:  # as `python -m` does
    sys.path.insert(0, str(Path.cwd()))
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f"program {source!r}: cannot import {name} ({error})") from error


def _file_module(path: Path) -> Any:
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file, expected a Python file with a dictionary "
                            "PROGRAMS")
  folder = str(path.parent.resolve())
  if folder not in sys.path:  # as for a script, so that it finds its neighbours
    sys.path.insert(0, folder)
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _file_name(name: str) -> str:
  return re.sub(r"[^A-Za-z0-9.-]+", "_", name)
