"""What a file may say that somebody else has sent: the one place where it is believed.

A file holds values of the schema, arrays and names. It holds no code, no place and no size:

* No module is imported because a file names it, see `check_imported`.
* No place that a file names is read or written: `config` clears them, and `inside` refuses
  names that leave their folder.
* No array is read that is larger than the memory that is left, see `data.npz`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path, PurePosixPath
import sys
from typing import Any

# Fields of a config that name places, by section. Whoever uses a model names their own.
_PLACES = {"data": ("store_dir", "extra_dir"), "eval": ("indices_dir",)}
_REMOTE = "://"
_SEPARATORS = ',:"'  # of CSV files and of IDs of graphs
_FORMULA = "=+-@"  # begin a formula in a cell of a spreadsheet


def parsed(text: str | bytes) -> Any:
  """The JSON value of a text.

  Raises:
    ValueError: it is no JSON, or nested more deeply than any file of this package.
  """
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def config(values: Any) -> dict[str, Any]:
  """The config in a file: its fields with tuples for lists, without places.

  Raises:
    ValueError: it is no config.
  """
  fields = _checked(values, "config")
  missing = [name for name in ("task", "data", "model", "extensions") if name not in fields]
  if missing:
    raise ValueError(f"its config has no field {missing[0]}")
  for section, names in _PLACES.items():
    if isinstance(fields.get(section), dict):
      fields[section] |= {name: "" for name in names if name in fields[section]}
      fields[section].pop("extra_dir", None)  # which models had before places were cleared
  if _REMOTE in str(fields.get("data_root", "")):
    del fields["data_root"]
  # Models once recorded the folder of a module behind an @.
  fields["extensions"] = tuple(str(name).partition("@")[0] for name in fields["extensions"])
  return fields


def _checked(value: Any, name: str) -> Any:
  """A JSON value with tuples for lists, as models and overrides expect."""
  if isinstance(value, Mapping):
    return {key: _checked(part, f"{name}.{key}") for key, part in value.items()}
  if isinstance(value, (list, tuple)):
    return tuple(_checked(part, name) for part in value)
  return value


def check_imported(extensions: Sequence[str]) -> None:
  """Refuses (ValueError) a config whose modules the caller has not imported.

  Args:
    extensions: names of modules, out of a file.
  """
  if missing := [name for name in extensions if name not in sys.modules]:
    raise ValueError(
        f"the model needs the module {missing[0]!r}, which registers its parts, and no file may "
        f"have code run: if you trust that module, import it, or pass extensions={missing!r} to "
        f"load, or --config.extensions=\"{tuple(missing)}\" to a command")


def name(text: str) -> str:
  """A name out of a file, such as a graph's, which goes into tables, pages and IDs.

  Raises:
    ValueError: it has a character that a terminal, a CSV file or an ID would take for a command.
  """
  bad = next((c for c in text if not c.isprintable() or c in _SEPARATORS), "")
  if not text or bad or text[0] in _FORMULA:
    raise ValueError(
        f"the name {text[:80]!r} {f'has {bad!r}' if bad else 'begins with such a character'}, "
        f"expected printable characters without {' '.join(_SEPARATORS)}, the first none of "
        f"{' '.join(_FORMULA)}: rename the file")
  return text


def inside(folder: Path, name: str) -> Path:
  """The path of a file in a folder whose name comes from elsewhere, with `/` between its parts.

  Raises:
    ValueError: the name leads out of the folder.
  """
  parts = PurePosixPath(name).parts
  if not parts or ".." in parts or name.startswith(("/", "~")) or "\\" in name or "\0" in name:
    raise ValueError(f"the file name {name!r} leads outside its folder: nothing was written there")
  return folder.joinpath(*parts)
