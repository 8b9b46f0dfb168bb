"""Collections by name: the five released collections, and collections of users.

A collection is a set of graphs of one kind with configurations. Its name is also its folder:
`layout:xla:random` is in `<data_root>/layout/xla/random/`. Its labels are measured or synthetic run
times, or the estimate of a compiler.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import re
from typing import Any, Self

from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.infra import files, trust

RELEASED = (
  "tile:xla",
  "layout:xla:random",
  "layout:xla:default",
  "layout:nlp:random",
  "layout:nlp:default",
)
KINDS = ("tile", "layout")
OWN = "own"  # the source of collections that users make
_OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# k of the top-k slowdowns of a report, by kind of collection.
_SLOWDOWN_KS = {"tile": (1, 5, 10), "layout": (1, 10, 100)}
_OWN_SLOWDOWN_KS = (1, 5, 10)  # programs of users have few configurations
STAMP = "synthetic.json"  # beside the data that `tpugraphs_jax.synthetic` writes
SYNTHETIC = "SYNTHETIC: run times of a machine model, no measurement of real programs"
MEASURED = "measured run times of the released data set"
UNKNOWN = "of unknown kind: no .jsonl of `tpugraphs_jax.collect` lies beside the files"


@dataclasses.dataclass(frozen=True)
class CollectionOptions(Options):
  """The collection that a config names."""

  section = "data"
  source: str = option("xla", "programs: xla, nlp, or own ones", one_of=("xla", "nlp", OWN))
  search: str = option(
    "", "how layouts were drawn: random or default; for own programs the collection's name"
  )

  @classmethod
  def of(cls, collection: str, **fields: Any) -> Self:
    """The section for a collection such as `xla` (kernels), `nlp-default` or `own-NAME`.

    Args:
      collection: the fields `source` and `search`, with a hyphen between them.
      **fields: other fields of the section.
    """
    source, _, search = collection.partition("-")
    return cls(source=source, search=search, **fields)


@dataclasses.dataclass(frozen=True)
class Collection:
  """One collection.

  Attributes:
    name: such as `tile:xla`, `layout:nlp:default` or `layout:own:my_programs`.

  Raises:
    ValueError: the name is none of `RELEASED` and not of the form `KIND:own:NAME`.
  """

  name: str

  def __post_init__(self):
    parts = self.name.split(":")
    is_own = (
      len(parts) == 3 and parts[0] in KINDS and parts[1] == OWN and _OWN_NAME.fullmatch(parts[2])
    )
    if self.name not in RELEASED and not is_own:
      raise ValueError(
        f"unknown collection {self.name!r}, expected one of {', '.join(RELEASED)}, or "
        f"{KINDS[0]}:{OWN}:NAME or {KINDS[1]}:{OWN}:NAME for a collection of yours; NAME has "
        "letters, digits, '.', '_' and '-'"
      )

  @property
  def kind(self) -> str:
    """`tile` or `layout`."""
    return self.name.split(":")[0]

  @property
  def is_released(self) -> bool:
    return self.name in RELEASED

  @property
  def slowdown_ks(self) -> tuple[int, ...]:
    """The k of the top-k slowdowns that a report has."""
    return _OWN_SLOWDOWN_KS if self.name.split(":")[1] == OWN else _SLOWDOWN_KS[self.kind]

  @property
  def path(self) -> str:
    """Its folder under a data root, such as `layout/xla/random`."""
    return self.name.replace(":", "/")

  def folder(self, root: Path, split: str) -> Path:
    """The folder of a split under a data root or a store."""
    return root / self.path / split


def find(kind: str, source: str, search: str = "") -> Collection:
  """The collection with these parts of a name; a released tile collection has no search.

  Raises:
    ValueError: there is no such collection.
  """
  return Collection(":".join(part for part in (kind, source, search) if part))


def check_released(name: str) -> None:
  """Raises ValueError for a name that is not in `RELEASED`."""
  if name not in RELEASED:
    raise ValueError(f"unknown collection {name!r}, expected one of {', '.join(RELEASED)}")


def is_synthetic(data_root: str, collection: Collection) -> bool:
  """Whether a collection comes from this project's generator.

  The generator leaves a stamp beside `data_root` and, so that a copy keeps it, in the collection.
  """
  folders = os.path.dirname(data_root.rstrip("/")), os.path.join(data_root, collection.path)
  return any(files.exists(os.path.join(folder, STAMP)) for folder in folders)


def label_kind(data_root: str, collection: Collection) -> str:
  """The kind of the labels of a collection, in words for banners, pages and axes.

  Args:
    data_root: folder or bucket with `tile/` and `layout/`.
    collection: a released collection, or a user's collection with the files that
      `tpugraphs_jax.collect` writes beside each graph.
  """
  if is_synthetic(data_root, collection):
    return SYNTHETIC
  if collection.name in RELEASED:
    return MEASURED
  folder = files.local_of(data_root) / collection.path  # the copies of the files of a bucket
  notes = files.visible(folder, "*/*.jsonl")
  try:
    # The last line has what is known of a program.
    return _of_note(trust.parse(notes[0].read_text(encoding="utf-8").splitlines()[-1]))
  except (IndexError, KeyError, TypeError, ValueError, OSError):  # none, or not of `collect`
    return UNKNOWN


def _of_note(note: dict[str, Any]) -> str:
  """The kind of label that `tpugraphs_jax.collect` noted beside a graph of a user's collection."""
  if note["label"] == "measured":
    machine = note.get("about", note).get("machine", "this machine")
    return f"measured run times on {note.get('target') or machine}"
  version = f", libtpu {note['libtpu']}" if "libtpu" in note else ""
  return f"ESTIMATE of a compiler ({note['label']}, {note['target']}{version}), no measurement"
