"""Models, poolings, losses and feature blocks by the names that a config gives.

The project's own entries are registered where they are defined. A user's module adds
entries in the same way, and a config names the module in `extensions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import importlib
import os
import sys
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class Registry(dict[str, Any]):
  """Entries of one kind by name.

  Args:
    field: the config field that names an entry, for errors (`model.name`).
  """

  def __init__(self, field: str):
    super().__init__()
    self._field = field

  def register(self, name: str) -> Callable[[Entry], Entry]:
    """A decorator that adds an entry.

    Raises:
      ValueError: the name is taken by something else.
    """
    def add(entry: Entry) -> Entry:
      known = self.get(name)
      if known is not None and _origin(known) != _origin(entry):
        raise ValueError(f"{self._field} {name!r} is registered already, by {_origin(known)}: "
                         "register yours under another name")
      self[name] = entry
      return entry

    return add

  def __missing__(self, name: str) -> Any:
    """Refuses (ValueError) a name that no entry has; the message lists all names."""
    raise ValueError(
        f"{self._field} is {name!r}, expected one of {', '.join(self)}, or a name that "
        "a module in `extensions` registers")


def _origin(entry: Any) -> tuple[str, str]:
  """Where an entry is defined; the same again after its module was loaded anew."""
  return getattr(entry, "__module__", ""), getattr(entry, "__qualname__", repr(entry))


def import_extensions(extensions: Sequence[str]) -> None:
  """Imports modules that the user names, which register their entries.

  Args:
    extensions: names, found as Python finds modules or in the current folder. What a file names
      is not imported, see `trust.check_imported`.

  Raises:
    ValueError: a module cannot be imported, with the reason.
  """
  here = os.getcwd()
  is_added = here not in sys.path
  if is_added:
    sys.path.append(here)
  try:
    for name in extensions:
      _import_extension(name)
  finally:
    if is_added:
      sys.path.remove(here)


def _import_extension(name: str) -> None:
  try:
    importlib.import_module(name)
  except Exception as error:  # Whatever the user's module does when it is imported.
    reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"extensions names the module {name!r}, which cannot be imported ({reason}): start in the "
        "folder that holds it, or add that folder to PYTHONPATH") from None
