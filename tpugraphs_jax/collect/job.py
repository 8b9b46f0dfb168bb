"""One program to collect, and where its files are."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Job:
  """One program to collect; what JSON can hold, since a worker gets it so."""

  source: str  # of `programs.load`
  name: str  # of its files
  split: str
  collection: str  # layout:own:NAME
  out: str  # folder of the data
  label: str  # and its target, of `labels.create`
  target: str | None
  configs: int
  seed: int
  operands: bool = False  # whether the orders of operands are chosen too
  parent: int = 0  # process that waits for the results

  @property
  def npz(self) -> Path:
    return self._path("npz", ".npz")

  @property
  def sidecar(self) -> Path:
    return self._path("npz", ".json")

  @property
  def journal(self) -> Path:
    return self._path("journal", ".jsonl")

  @property
  def module(self) -> Path:
    """What the graph is made of, as the compiler wrote it."""
    return self._path("journal", ".hlo.pb")

  @property
  def log(self) -> Path:
    return self._path("journal", ".log")

  @property
  def outcome(self) -> Path:
    """What a machine of a cluster says at the end: lines about what failed, as JSON."""
    return self._path("journal", ".outcome.json")

  def _path(self, kind: str, suffix: str) -> Path:
    return Path(self.out).joinpath(
        kind, *self.collection.split(":"), self.split, self.name + suffix)
