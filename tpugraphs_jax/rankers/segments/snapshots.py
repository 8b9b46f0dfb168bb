"""Saved history tables: each belongs to a checkpoint, whose saved position names it."""

from __future__ import annotations

from collections.abc import Mapping
import json
import os
from pathlib import Path
import shutil
from typing import Any

from tpugraphs_jax import files, parallel
from tpugraphs_jax.rankers.segments.history import History, Keys

_CARD = "identity.json"  # of a saved table


class Snapshots:
  """Saved tables: the two newest, so that one always belongs to the newest checkpoint.

  Args:
    folder: where they are; made when needed.
    keys: of the table.
    history: what is saved and restored.
  """

  def __init__(self, folder: Path, keys: Keys, history: History):
    self._folder, self._identity, self._history = folder, keys.identity, history
    self._kept: str | None = None  # of the newest checkpoint, as far as is known

  def check(self) -> None:
    """Refuses (ValueError) a folder with tables of other graphs or another partition."""
    for path in self._folder.glob(f"table_*/{_CARD}"):
      found = _card(path.parent)["identity"]
      if found != self._identity:
        raise ValueError(
            f"{path} is the history table of other training data or another partition "
            f"({found[:12]} there, {self._identity[:12]} here): give the same --data_root and "
            "fields of `segments`, or another --workdir")

  def save(self) -> dict[str, str]:
    """Saves the table; returns what to restore it by, its name and (in process 0) its SHA-256.

    Keeps the table before it, which the newest checkpoint needs until that of this
    table is written, and removes all others first: the disk holds two at the most.
    """
    numbers = sorted(self._numbers())
    name = f"table_{numbers[-1] + 1 if numbers else 0}"
    partial = self._folder / f".{name}.partial"
    if parallel.is_primary():
      for number in numbers:
        if f"table_{number}" != self._kept:
          shutil.rmtree(self._folder / f"table_{number}")
      for leftover in self._folder.glob(".table_*.partial"):
        shutil.rmtree(leftover)
      partial.mkdir(parents=True)
    self._history.save(partial)
    if parallel.is_primary():
      digests = {path.name: files.digest_of(path) for path in sorted(partial.iterdir())}
      card = files.sealed({"identity": self._identity, "sha256": digests})
      (partial / _CARD).write_text(json.dumps(card) + "\n")
      os.replace(partial, self._folder / name)
    self._kept = name
    return {"table": name} | self._digest(name)

  def _digest(self, name: str) -> dict[str, str]:
    """The SHA-256 of a table's card, which has those of its files."""
    if not parallel.is_primary():
      return {}
    return {"sha256": files.digest_of(self._folder / name / _CARD)}

  def _numbers(self) -> list[int]:
    return [int(path.name.removeprefix("table_")) for path in self._folder.glob("table_*")]

  def restore(self, saved: Mapping[str, str]) -> None:
    """Reads a saved table.

    Args:
      saved: what `save` returned; older checkpoints have no SHA-256.

    Raises:
      FileNotFoundError: it is gone.
      ValueError: it is damaged, or of another run.
    """
    name = saved["table"]
    folder = self._folder / name
    if parallel.is_primary():
      if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing, the history table of the newest checkpoint: "
                                "train again in another --workdir")
      _check_files(folder)
      if saved.get("sha256", expected := self._digest(name)["sha256"]) != expected:
        raise ValueError(f"{folder} is of another run: it is not the history table of the newest "
                         "checkpoint. Put that table back, or train again in another --workdir")
    self._history.restore(folder)
    self._kept = name


def _card(folder: Path) -> dict[str, Any]:
  """What a saved table says of itself."""
  path = folder / _CARD
  try:
    card = files.unsealed(json.loads(path.read_text()))
    return {"identity": card["identity"], "sha256": dict(card.get("sha256", {}))}
  except (ValueError, KeyError, TypeError, OSError) as error:
    raise ValueError(f"{path} is damaged ({error}): train again in another --workdir") from None


def _check_files(folder: Path) -> None:
  """Refuses (ValueError) a saved table whose files are not as they were written."""
  for name, digest in _card(folder)["sha256"].items():
    path = folder / name
    if not path.is_file() or files.digest_of(path) != digest:
      raise ValueError(f"{path} is damaged: its checksum does not fit; train again in another "
                       "--workdir")


class BatchesWithHistory:
  """Training batches whose saved position includes the history table.

  Args:
    batches: grain iterator.
    snapshots: of the table that the training step reads and writes.
  """

  def __init__(self, batches: Any, snapshots: Snapshots):
    self._batches, self._snapshots = batches, snapshots

  def __next__(self) -> Any:
    return next(self._batches)

  def get_state(self) -> dict[str, Any]:
    return {"batches": self._batches.get_state(), **self._snapshots.save()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._batches.set_state(state["batches"])
    self._snapshots.restore(state)
