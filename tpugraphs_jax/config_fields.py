"""Declares the fields of a config, and refuses values of a wrong type or out of range.

One line of code declares the default, limits and help of a field.

A section of a config is a frozen dataclass derived from `Options`, next to the code that reads it:

    @dataclasses.dataclass(frozen=True)
    class BatchOptions(Options):
      \"\"\"Slates of a training step.\"\"\"
      section = "batch"
      graphs: int = option(8, "graphs per step, over all devices", least=1)
      sampling: str = option("uniform", "how configurations are drawn", one_of=SAMPLINGS)

Networks declare their options in the same way. Defaults, refusals of values and of unknown fields,
`--print_config` and "did you mean" use these declarations. A section refuses a bad value when it is
created (`check_value`), and `Options.check` refuses contradicting values.

A `Registry` has models, poolings, losses or feature blocks by the names that a config gives. The
project registers entries where it defines them. A user's module adds entries in the same way, and a
config names the module in `extensions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import difflib
import importlib
import math
import os
import sys
from typing import Any, ClassVar, Self, TypeVar

_LIMITS = "limits"  # key of the metadata of a field
# Largest values. A file's config is checked by them before anything is built from it.
MOST = 2**20  # of an integer option without a declared bound
MOST_LAYERS = 256  # of an option that counts layers, rounds or heads, which are built one by one


@dataclasses.dataclass(frozen=True)
class Limits:
  """The allowed values of a field, and its help.

  Attributes:
    help: one line.
    least, most: smallest and largest value of a number.
    above, below: exclusive bounds of a number.
    one_of: the allowed values, or a function that returns them.
    some_of: the allowed entries of a tuple, or a function that returns them.
  """

  help: str
  least: float = -math.inf
  most: float = math.inf
  above: float = -math.inf
  below: float = math.inf
  one_of: Sequence[Any] | Callable[[], Iterable[Any]] = ()
  some_of: Sequence[Any] | Callable[[], Iterable[Any]] = ()

  @property
  def choices(self) -> tuple[Any, ...]:
    """The values of `one_of`; empty = any value."""
    return tuple(self.one_of() if callable(self.one_of) else self.one_of)

  @property
  def entries(self) -> tuple[Any, ...]:
    """The values of `some_of`; empty = any entry."""
    return tuple(self.some_of() if callable(self.some_of) else self.some_of)

  @property
  def text(self) -> str:
    """The help, and the allowed values if it does not name them."""
    words = self.help.replace(",", " ").replace(";", " ").replace(":", " ").split()
    parts = [self.help]
    if not all(str(value) in words for value in self.choices):
      parts.append(f"one of {', '.join(map(str, self.choices))}")
    if self.entries:
      parts.append(f"made of {', '.join(map(str, self.entries))}")
    return "; ".join(parts)

  @property
  def expected(self) -> str:
    """The bounds of a number in words; empty if it has none."""
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    bounds = [(text, getattr(self, name)) for name, text in words.items()]
    return " and ".join(f"{text} {bound}" for text, bound in bounds if math.isfinite(bound))

  def holds(self, value: float) -> bool:
    """Whether a number is finite and within the bounds."""
    is_finite = abs(value) <= sys.float_info.max
    return is_finite and self.least <= value <= self.most and self.above < value < self.below


def option(default: Any, help: str, *, kw_only: bool = False, **limits: Any) -> Any:
  """A field of a dataclass or flax module, with help and limits.

  Args:
    default: value unless a config sets the field; its type is the type of the field.
    help: one line.
    kw_only: the field is no positional argument, so that subclasses may have fields without a
      default.
    **limits: fields of `Limits`; an integer is at most `MOST` unless they bound it.
  """
  if type(default) is int:
    limits = {"most": MOST} | limits
  metadata = {_LIMITS: Limits(help, **limits)}
  return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def limits_of(cls: type) -> dict[str, tuple[Any, Limits]]:
  """Default and limits of the options of a dataclass, by name."""
  fields = [field for field in dataclasses.fields(cls) if _LIMITS in field.metadata]
  return {field.name: (field.default, field.metadata[_LIMITS]) for field in fields}


def check_value(name: str, value: Any, default: Any, limits: Limits) -> None:
  """Refuses (ValueError) a value of another type than the default, or beyond the limits.

  Args:
    name: name of the field, such as `batch.graphs`.
    value: value to check.
    default: default value; None allows any type.
    limits: allowed values.
  """
  if not _is_like(value, default):
    raise ValueError(f"{name} is {value!r}, expected {_KINDS[type(default)]}")
  value = tuple(value) if isinstance(value, list) else value
  if limits.choices and value not in limits.choices:
    raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(str, limits.choices))}")
  if isinstance(value, (int, float)) and not limits.holds(value):
    raise ValueError(f"{name} is {value}, expected {limits.expected or 'a finite number'}")
  if isinstance(value, tuple):
    _check_entries(name, value)
  if limits.entries and (unknown := [entry for entry in value if entry not in limits.entries]):
    raise ValueError(
      f"{name} has {unknown[0]!r}, expected some of {', '.join(map(str, limits.entries))}"
    )


def _check_entries(name: str, value: tuple[Any, ...]) -> None:
  if len(value) > MOST_LAYERS:
    raise ValueError(f"{name} has {len(value)} entries, expected at most {MOST_LAYERS}")
  for entry in value:
    if isinstance(entry, (int, float)) and not abs(entry) <= MOST:
      raise ValueError(f"{name} has {entry}, expected numbers of at most {MOST}")


_KINDS = {
  bool: "True or False",
  int: "a whole number",
  float: "a number",
  str: "a text",
  tuple: "a tuple",
}


def _is_like(value: object, default: object) -> bool:
  """Whether a value has the type of a default; an int may be a float, a list a tuple."""
  kind = type(default)
  if kind not in _KINDS:
    return True
  if kind is float:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
  if kind is tuple:
    return isinstance(value, (list, tuple))
  return type(value) is kind


def nearest(name: str, names: Iterable[str]) -> str:
  """Returns `did you mean NAME? ` with the nearest of `names`; empty if none is near."""
  names = list(names)
  last = name.rpartition(".")[2]
  same = [known for known in names if known.rpartition(".")[2] == last]  # in another section
  near = same or difflib.get_close_matches(name, names, n=1)
  return f"did you mean {near[0]}? " if near else ""


@dataclasses.dataclass(frozen=True)
class Options:
  """Base of a section of a config; all fields of a subclass are made by `option`.

  Raises:
    ValueError: a value of another type or beyond its limits; the message names the field.
  """

  section: ClassVar[str] = ""

  def __post_init__(self):
    for name, (default, limits) in limits_of(type(self)).items():
      value = getattr(self, name)
      check_value(f"{self.section}.{name}".lstrip("."), value, default, limits)
      if isinstance(value, list):
        object.__setattr__(self, name, tuple(value))
    self.check()

  def check(self) -> None:
    """Refuses (ValueError) combinations of values."""

  @classmethod
  def subsections(cls) -> dict[str, type[Options]]:
    """The classes of the sections in this section, by name."""
    inner = {field.name: type(field.default) for field in dataclasses.fields(cls)}
    return {name: kind for name, kind in inner.items() if issubclass(kind, Options)}

  @classmethod
  def limits_by_name(cls, section: str) -> dict[str, tuple[Any, Limits]]:
    """Default and limits of the fields of a section and its subsections, by its dotted name."""
    fields = {f"{section}.{name}": field for name, field in limits_of(cls).items()}
    for name, kind in cls.subsections().items():
      fields |= kind.limits_by_name(f"{section}.{name}")
    return fields

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> Self:
    """The inverse of `dataclasses.asdict`; leaves out fields that the section does not have."""
    values = {name: fields[name] for name in limits_of(cls) if name in fields}
    inner = {name: kind.from_dict(fields.get(name, {})) for name, kind in cls.subsections().items()}
    return cls(**values, **inner)


# Registered names.

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
        raise ValueError(
          f"{self._field} {name!r} is registered already, by {_origin(known)}: "
          "register yours under another name"
        )
      self[name] = entry
      return entry

    return add

  def __missing__(self, name: str) -> Any:
    """Refuses (ValueError) a name that no entry has; the message lists all names."""
    raise ValueError(
      f"{self._field} is {name!r}, expected one of {', '.join(self)}, or a name that "
      "a module in `extensions` registers"
    )


def _origin(entry: object) -> tuple[str, str]:
  """Module and qualified name of an entry, which stay the same when its module is reloaded."""
  return getattr(entry, "__module__", ""), getattr(entry, "__qualname__", repr(entry))


def import_extensions(extensions: Sequence[str]) -> None:
  """Imports modules that the user names, which register their entries.

  Args:
    extensions: names, found as Python finds modules or in the current folder. What a file names
      is not imported, see `trust.check_imported`.

  Raises:
    ValueError: a module cannot be imported, with the reason, or `extensions` is no tuple.
  """
  check_value("extensions", extensions, (), Limits(""))
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
  except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
    reason = f"{type(error).__name__}: {error}"
    raise ValueError(
      f"extensions names the module {name!r}, which cannot be imported ({reason}): name it as "
      "`import` does, and start in its folder, or add the folder to PYTHONPATH"
    ) from None
