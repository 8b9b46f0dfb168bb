"""Validation of files that other people have made.

Such a file cannot make this package run code, open other files or fill the memory:

* No module is imported because a file names it, see `check_imported`.
* Compiled programs are kept in the cache of this user, not in a working folder.
* Paths in a file are neither read nor written: `config` clears them, and `inside` refuses
  names that leave their folder.
* An array that is larger than the available memory is not read, see `data.npz`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path, PurePosixPath
import sys
from typing import Any

from tpugraphs_jax.infra import console

# Fields of a config that hold paths, by section. The user of a model sets these paths.
_PLACES = {"data": ("store_dir",), "eval": ("indices_dir",)}
_REMOTE = "://"
_SEPARATORS = ',:"/\\'  # of CSV files, of IDs of graphs and of folders
_FORMULA = "=+-@"  # begin a formula in a cell of a spreadsheet

_LONG_TEXT = 1 << 24  # bytes
_COST = 4  # bytes of memory that a byte of a long text may take
# Bytes of Python's values: an empty list or object with its place in another one, a text, a number
# with its place in a list, the place of a field in an object.
_CONTAINER, _STRING, _ITEM, _FIELD = 72, 60, 32, 100

NUMBER = (int, float)
COUNT = range(1 << 62)
SCALAR = (str, bool, int, float, type(None))


class Record(dict):
  """A schema of objects that have every name; see `check`."""


# What every config has.
_CONFIG = Record(task=str, extensions=[str], data={}, model={"name": str})


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], advice: str) -> Iterator[None]:
  """Turns any error of a block that reads a file into one line that names the file.

  Args:
    path: the file.
    advice: the end of the line, for the user.

  Raises:
    FileNotFoundError: the block raised it.
    ValueError: the block raised any other error.
  """
  try:
    yield
  except FileNotFoundError:
    raise
  except MemoryError as error:
    raise ValueError(f"{path}: {console.one_line(error)}") from None
  except Exception as error:  # wrong values cause many types
    reason = console.one_line(error)
    if isinstance(error, KeyError):
      reason = f"it has no {reason}"
    if reason.startswith(str(path)):
      raise ValueError(reason) from None
    raise ValueError(f"{path} is damaged ({reason}): {advice}") from None


@contextlib.contextmanager
def json_of(path: Path, schema: Any, advice: str) -> Iterator[Any]:
  """Opens a JSON file for a block: its value, which has a schema.

  Args:
    path: the file.
    schema: of the value, as of `check`.
    advice: the end of the line for any error of the block, as of `reading`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no JSON of the schema, or the block raised an error.
  """
  with reading(path, advice):
    value = parse(path.read_bytes())
    check(value, schema, "it")
    yield value


def parse(text: str | bytes) -> Any:
  """The JSON value of a text.

  A value takes up to 25 times the memory of its text. Therefore a long text is refused if its
  parts are shorter than those of any file of this package.

  Raises:
    ValueError: it is no JSON, nested more deeply or with shorter parts than any file of this
      package.
  """
  if len(text) > _LONG_TEXT and _memory_of(text) > _COST * len(text):
    raise ValueError(f"it has {len(text):,} characters of parts that are shorter than in any file")
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def _memory_of(text: str | bytes) -> int:
  """An upper bound of the memory in bytes of a JSON text and its value."""
  signs = '[{":,' if isinstance(text, str) else (b"[", b"{", b'"', b":", b",")
  lists, objects, quotes, fields, items = map(text.count, signs)  # type: ignore[arg-type]
  per_text = len(text) + _CONTAINER * (lists + objects) + _STRING * (quotes // 2)
  return per_text + _ITEM * items + _FIELD * fields


def fields_in(path: Path) -> dict[str, Any]:
  """The JSON object in a file; empty where the file is missing or damaged."""
  try:
    fields = parse(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}
  return fields if isinstance(fields, dict) else {}


def check(value: Any, schema: Any, name: str) -> None:
  """Refuses (ValueError) a JSON value that is not of a schema.

  Args:
    value: from `parse`.
    schema: one of
      a type, or a tuple of types;
      a `range`: the integers in it;
      `[schema]`: lists of values of that schema;
      `{name: schema}`: objects. A name may be missing. Other names are allowed; their values have
        the schema of the key `...` where there is one;
      a `Record`: such objects that have every name.
    name: of the value, for the message.
  """
  if isinstance(schema, dict):
    _expect(isinstance(value, Mapping), value, "an object", name)
    if isinstance(schema, Record) and (missing := schema.keys() - value.keys() - {...}):
      raise ValueError(f"{name} has no {min(missing)}")
    for key, part in value.items():
      if key in schema or ... in schema:
        check(part, schema.get(key, schema.get(...)), f"{name}.{key}")
  elif isinstance(schema, list):
    _expect(isinstance(value, (list, tuple)), value, "a list", name)
    for part in value:
      check(part, schema[0], name)
  elif isinstance(schema, range):
    is_inside = isinstance(value, int) and not isinstance(value, bool) and value in schema
    _expect(is_inside, value, f"an integer of {schema[0]}..{schema[-1]}", name)
  else:
    types = schema if isinstance(schema, tuple) else (schema,)
    is_one = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    _expect(is_one, value, " or ".join(kind.__name__ for kind in types), name)


def _expect(is_right: bool, value: object, expected: str, name: str) -> None:
  if not is_right:
    raise ValueError(f"{name} is {str(value)[:40]!r}, expected {expected}")


def config(values: Any) -> dict[str, Any]:
  """The config in a file: its fields with tuples for lists, without places.

  `config_fields.Options` checks the values of its fields.

  Raises:
    ValueError: it is no config of this package.
  """
  check(values, _CONFIG, "config")
  fields = _plain(values, "config")
  for section, names in _PLACES.items():
    if section in fields:
      fields[section] |= {name: "" for name in names if name in fields[section]}
  if _REMOTE in str(fields.get("data_root", "")):
    del fields["data_root"]
  return fields


def _plain(value: Any, name: str) -> Any:
  """A value of nested objects, lists and scalars with tuples for lists, as models expect."""
  if isinstance(value, Mapping):
    return {key: _plain(part, f"{name}.{key}") for key, part in value.items()}
  if isinstance(value, (list, tuple)):
    return tuple(_plain(part, name) for part in value)
  check(value, SCALAR, name)
  return value


def not_imported(extensions: Sequence[str]) -> list[str]:
  """The modules, named by a file, that the caller has not imported."""
  return [name for name in extensions if name not in sys.modules]


def check_imported(extensions: Sequence[str]) -> None:
  """Refuses (ValueError) a config whose modules the caller has not imported.

  Args:
    extensions: names of modules, from a file.
  """
  if missing := not_imported(extensions):
    raise ValueError(
      f"the model needs the module {missing[0]!r}, which registers its parts, and no file may "
      f"have code run: if you trust that module, import it, or pass extensions={missing!r} to "
      f'load; a command takes them by its flag config.extensions="{tuple(missing)}"'
    )


def name(text: str) -> str:
  """A name from a file, such as the name of a graph, for tables, pages and IDs.

  Raises:
    ValueError: it has a character that a terminal, a CSV file or an ID would take for a command.
  """
  bad = next((c for c in text if not c.isprintable() or c in _SEPARATORS), "")
  if not text or bad or text[0] in _FORMULA:
    raise ValueError(
      f"the name {text[:80]!r} {f'has {bad!r}' if bad else f'begins with {text[:1]!r}'}, "
      f"expected printable characters without {' '.join(_SEPARATORS)}, the first none of "
      f"{' '.join(_FORMULA)}: rename the file"
    )
  return text


def inside(folder: Path, name: str) -> Path:
  """The path of a file in a folder, for a relative name (`a/b`) from another person.

  Raises:
    ValueError: the name leads out of the folder.
  """
  parts = PurePosixPath(name).parts
  if not parts or ".." in parts or name.startswith(("/", "~")) or "\\" in name or "\0" in name:
    raise ValueError(f"the file name {name!r} leads outside its folder: nothing was written there")
  return folder.joinpath(*parts)
