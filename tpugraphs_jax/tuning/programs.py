"""Programs to collect: Python functions with the shapes of their arguments, found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import importlib.util
import math
import os
from pathlib import Path
import re
import sys
import types
from typing import Any

from absl import flags

from tpugraphs_jax import graph
from tpugraphs_jax.infra import files

_SHOWN = 8  # names in a message


@dataclasses.dataclass(frozen=True)
class Program:
  """A function and the arguments that give it shapes."""

  source: str  # as `load` takes it: FILE.py:KEY
  name: str  # of its files
  split: str
  function: Callable[..., Any]
  args: tuple  # arrays or jax.ShapeDtypeStruct, in any nesting
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  count: float | None = None  # of examples or tokens of a step, where the file says how many
  unit: str = ""  # `example` or `token`


@dataclasses.dataclass(frozen=True)
class KernelWithTiles:
  """A kernel whose tiles are compared."""

  source: str  # FILE.py:KEY
  name: str
  split: str
  function: Callable[[Mapping[str, Any]], Callable[..., Any]]  # from a tile
  args: tuple  # arrays or jax.ShapeDtypeStruct, in any nesting
  tiles: Sequence[Any]  # dictionaries of block sizes


def load(source: str, *, split: str | None = None) -> list[Program]:
  """The programs of a source.

  Args:
    source: `FILE.py`, all programs of its dictionary `PROGRAMS`, or of a function of this name that
      yields their names and them; `FILE.py:KEY`, one of them; or
      a folder, the programs of all its files but those whose names begin with `_`. A program is
      named after its file and its key. `EXAMPLES` or `TOKENS` of the file says how many a step has:
      a number, or a dictionary from keys to numbers.
    split: `train`, `valid` or `test`; unless given the `SPLIT` of the file, which is one of them or
      a dictionary from keys to them, or `train` where it has none.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is nothing of that name, or it is not a program.
  """
  if Path(source).is_dir():
    paths = sorted(Path(source).glob("[!_.]*.py"))
    return [program for path in paths for program in load(str(path), split=split)]
  place, _, key = source.partition(":")
  if not place.endswith(".py"):
    raise ValueError(f"program {source!r}, expected a folder, FILE.py or FILE.py:KEY")
  module = _file_module(Path(place))
  programs = _dictionary(module, place, "PROGRAMS", "programs")
  if key and key not in programs:
    raise ValueError(f"{place} has no program {key!r}, it has {_listing(programs)}")
  counts = {name: _count(module, place, name) for name in ([key] if key else programs)}
  return [
    dataclasses.replace(
      Program(
        f"{place}:{name}",
        file_name(f"{Path(place).stem}_{name}"),
        _split(module, place, name, split),
        *_parts(programs[name], f"{place}:{name}"),
      ),
      count=count,
      unit=unit,
    )
    for name, (count, unit) in counts.items()
  ]


def _count(module: types.ModuleType, place: str, key: str) -> tuple[float | None, str]:
  """How many examples or tokens a step of a program has, and which of them."""
  for attribute, unit in (("TOKENS", "token"), ("EXAMPLES", "example")):
    value = getattr(module, attribute, None)
    count = value.get(key) if isinstance(value, Mapping) else value
    if count is None:
      continue
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 < count < math.inf:
      raise ValueError(f"{place}: {attribute} of {key!r} is {count!r}, expected a positive number")
    return float(count), unit
  return None, ""


def load_tiles(source: str, *, split: str | None = None) -> list[KernelWithTiles]:
  """The kernels of a source.

  Args:
    source: `FILE.py`, all of its dictionary `TILES`; or `FILE.py:KEY`, one of them.
    split: as of `load`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is nothing of that name, or it is not a kernel with arguments and tiles.
  """
  place, _, key = source.partition(":")
  if not place.endswith(".py"):
    raise ValueError(f"kernel {source!r}, expected FILE.py or FILE.py:KEY")
  module = _file_module(Path(place))
  kernels = _dictionary(module, place, "TILES", "kernels with tiles")
  if key and key not in kernels:
    raise ValueError(f"{place} has no kernel {key!r}, it has {_listing(kernels)}")
  found = []
  for name in [key] if key else kernels:
    value = kernels[name]
    is_triple = isinstance(value, tuple) and len(value) == 3
    if not is_triple or not callable(value[0]) or not isinstance(value[1], tuple):
      raise ValueError(
        f"{place}:{name} is a {type(value).__name__}, expected (function from a tile to the "
        "function with that tile, tuple of example arguments, list of tiles)"
      )
    found.append(
      KernelWithTiles(f"{place}:{name}", name, _split(module, place, name, split), *value)
    )
  return found


def _split(module: types.ModuleType, place: str, key: str, given: str | None) -> str:
  """The given split, or that which a file says for one of its keys, or train."""
  said = given or getattr(module, "SPLIT", graph.SPLITS[0])
  split = said.get(key, graph.SPLITS[0]) if isinstance(said, Mapping) else said
  if split not in graph.SPLITS:
    raise ValueError(f"{place}: split {split!r}, expected one of {', '.join(graph.SPLITS)}")
  return split


def _listing(names: Iterable[str]) -> str:
  """Some of the names, and how many others there are."""
  first, others = (names := list(names))[:_SHOWN], len(names) - _SHOWN
  return ", ".join(first) + (f" and {others} more" if others > 0 else "")


def file_name(name: str) -> str:
  """A name as that of a file."""
  return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def portable(source: str) -> str:
  """`FILE.py:KEY` as the files of data name it: without the folders of this machine."""
  place, _, key = source.partition(":")
  return f"{Path(place).name if Path(place).is_absolute() else place}:{key}"


def _dictionary(
  module: types.ModuleType, place: str, name: str, contents: str
) -> Mapping[str, Any]:
  """A dictionary of a Python file."""
  values = getattr(module, name, None)
  if callable(values):
    values = _listed(values, f"{place}: {name}")
  if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
    raise ValueError(f"{place} has no dictionary {name} from names to {contents}")
  return values


def _listed(function: Callable[[], Any], where: str) -> dict[str, Any]:
  """What a function yields, pairs of a name and a program, as a dictionary."""
  try:
    pairs = list(function())
    found = dict(pairs)
  except Exception as error:  # a function of the user may raise anything
    raise ValueError(f"{where}() fails: {type(error).__name__}: {error}") from error
  if len(found) < len(pairs):
    raise ValueError(f"{where}() yields a name twice")
  return found


def _parts(value: Any, where: str) -> tuple[Any, ...]:
  """Function, arguments and, where there are some, keyword arguments."""
  kinds: tuple[Any, ...] = (Callable, tuple, Mapping)
  if isinstance(value, tuple) and len(value) in (2, 3):
    if all(isinstance(part, kind) for part, kind in zip(value, kinds)):
      return value
  raise ValueError(
    f"{where} is a {type(value).__name__}, expected a pair (function, tuple of example arguments), "
    "or with a dictionary of keyword arguments as the third"
  )


def _file_module(path: Path) -> types.ModuleType:
  files.check_file(path, "a Python file")
  folder = str(path.parent.resolve())
  if folder not in sys.path:  # as for a script, so that it finds its neighbours
    sys.path.insert(0, folder)
  if os.getcwd() not in sys.path:  # last: it replaces no module of Python or of a package
    sys.path.append(os.getcwd())
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec is not None and spec.loader is not None  # of a file .py
  module = importlib.util.module_from_spec(spec)
  sys.modules.setdefault(path.stem, module)  # dataclasses and Flax modules look their module up
  if not flags.FLAGS.is_parsed():  # libraries such as tokamax would read this process' command line
    flags.FLAGS.mark_as_parsed()
  try:
    files.run_python(path, module)
  except (Exception, SystemExit) as error:  # a file of the user may raise anything
    if sys.modules.get(path.stem) is module:
      del sys.modules[path.stem]
    raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
  return module
