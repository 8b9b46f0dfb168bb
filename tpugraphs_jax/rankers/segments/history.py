"""The history table: the last readout of every (graph, configuration, segment).

A training step reads the entries of segments without gradients, then writes the entries of
segments with gradients. A small table has a copy on each device; a large table is a memory-mapped
file on the host. Both record which entries are written, and are saved with checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import shutil
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.infra import console, files, parallel, trust
from tpugraphs_jax.rankers.segments.batches import SegmentBatch, SegmentedGraph, Stale

DTYPES = ("float32", "bfloat16")
# A table may take this share of the free memory of a device, or of all memory on a CPU. The share
# of the free disk leaves space for two saved copies.
_DEVICE_SHARE = 0.25
_HOST_SHARE = 1 / 3
_MOST_DEVICE_ENTRIES = 2**31 - 2  # indices are int32 on devices
_CARD = "identity.json"  # of a saved table
_CARD_SCHEMA = trust.Record(identity=str, sha256={...: str})


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
  """Numbers of the entries of a table, ordered by graph, configuration and segment."""

  base: np.ndarray  # [graphs] int64 first entry of each graph
  segments: np.ndarray  # [graphs] int64 segments J of each graph
  entries: int
  identity: str  # SHA-256 of names, runtimes, and the edges and opcodes of segments

  @classmethod
  def of(cls, graphs: Sequence[SegmentedGraph]) -> Keys:
    """The keys of training graphs."""
    segments = np.array([len(graph.segments) for graph in graphs], np.int64)
    ends = np.cumsum(segments * [len(graph.configs) for graph in graphs])
    digest = hashlib.sha256()
    for graph in graphs:
      sizes = [len(piece.opcode) for piece in graph.segments]
      digest.update(f"{graph.name} {len(graph.configs)} {sizes}".encode())
      digest.update(np.ascontiguousarray(graph.configs.labels).tobytes())
      for piece in graph.segments:
        digest.update(np.ascontiguousarray(piece.edge_index).tobytes())
        digest.update(piece.opcode.tobytes())
    return cls(np.concatenate([[0], ends[:-1]]), segments, int(ends[-1]), digest.hexdigest())

  def rows(self, batch: SegmentBatch) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the entries that a batch reads and writes, with a leading device axis.

    Returns:
      `[devices, G, C, J]` int64 of the segments without gradients, J the largest number of segments
      of a graph, and `[devices, G, S, C]` int64 of the fresh segments. `entries` means that there
      is no entry.
    """
    number = np.arange(self.segments.max())
    count, first = self.segments[batch.graph_id][..., None], self.base[batch.graph_id][..., None]
    start = first + batch.config_id * count  # [devices, G, C]
    fresh = start[..., None, :] + batch.fresh_id[..., None]
    is_other = (number < count) & (number != batch.fresh_id[..., None]).all(axis=-2)
    others = start[..., None] + number
    mask = batch.config_mask
    others = np.where(mask[..., None] & is_other[..., None, :], others, self.entries)
    return others, np.where(mask[..., None, :], fresh, self.entries)


def _read(value, is_written, rows):
  value = value.at[rows].get(mode="fill", fill_value=0)
  return Stale(value, is_written.at[rows].get(mode="fill", fill_value=False))


def _write(value, is_written, rows, new):
  # Every device has the whole table, and writes the entries of all devices. An entry that occurs
  # twice in a step has equal values, up to rounding.
  rows, new = jax.lax.all_gather((rows, new), parallel.DEVICES)
  value = value.at[rows].set(new.astype(value.dtype), mode="drop")
  return value, is_written.at[rows].set(True, mode="drop")


class DeviceHistory:
  """A table with a copy on each device, updated in place. Rows and values have a device axis.

  Args:
    entries: number of entries.
    width: width P of an entry.
    dtype: of the values, one of `DTYPES`.
  """

  def __init__(self, entries: int, width: int, dtype: str):
    self._read = parallel.pmap(_read)
    self._write = parallel.pmap(_write, donate_argnums=(0, 1))
    # Created on the devices: a large table need not pass through the host.
    zeros = parallel.pmap(lambda _: (jnp.zeros((entries, width), dtype), jnp.zeros(entries, bool)))
    self._value, self._is_written = zeros(np.zeros(parallel.local_device_count()))

  def read(self, rows: np.ndarray) -> Stale:
    """Values of entries `rows [devices, ...]`; 0, and False in the mask, where not written."""
    return self._read(self._value, self._is_written, rows.astype(np.int32))

  def write(self, rows: np.ndarray, values: jax.Array) -> None:
    """Writes `values [devices, ..., P]`; numbers without an entry are ignored."""
    rows = rows.astype(np.int32)
    self._value, self._is_written = self._write(self._value, self._is_written, rows, values)

  def save(self, folder: Path) -> None:
    """Writes the table into an existing folder."""
    for name, array in (("value", self._value), ("is_written", self._is_written)):
      parallel.unreplicate(array).tofile(folder / name)

  def restore(self, folder: Path) -> None:
    """Reads the files of `save`."""

    def load(name, array):
      value = np.empty(array.shape[1:], array.dtype)
      read = lambda: np.memmap(folder / name, array.dtype, "r", 0, array.shape[1:])
      parallel.copy_from_primary(read, value)
      return parallel.replicate(value)

    self._value = load("value", self._value)
    self._is_written = load("is_written", self._is_written)


class HostHistory:
  """A table in sparse memory-mapped files, which grow as entries are written.

  Args:
    entries: number of entries.
    width: width P of an entry.
    dtype: of the values, one of `DTYPES`.
    folder: for the files, which are created anew.
  """

  def __init__(self, entries: int, width: int, dtype: str, folder: Path):
    files.make_folder(folder)
    self._entries, self._folder = entries, folder
    self._value = np.memmap(folder / "value", jnp.dtype(dtype), "w+", 0, (entries, width))
    self._is_written = np.memmap(folder / "is_written", np.bool_, "w+", 0, (entries,))

  def read(self, rows: np.ndarray) -> Stale:
    """Values of entries `rows [devices, ...]`; 0, and False in the mask, where not written."""
    is_entry = rows < self._entries
    mask = is_entry & self._is_written[np.where(is_entry, rows, 0)]
    value = np.zeros((*rows.shape, self._value.shape[1]), self._value.dtype)
    value[mask] = self._value[rows[mask]]
    return Stale(value, mask)

  def write(self, rows: np.ndarray, values: jax.Array) -> None:
    """Writes `values [devices, ..., P]` of all processes; numbers without an entry are ignored."""
    local = (rows.reshape(-1), np.asarray(values).reshape(rows.size, -1))
    for entry, new in parallel.gather_objects(local):
      is_entry = entry < self._entries
      self._value[entry[is_entry]] = new[is_entry].astype(self._value.dtype)
      self._is_written[entry[is_entry]] = True

  def save(self, folder: Path) -> None:
    """Writes the table into an existing folder."""
    for name, array in (("value", self._value), ("is_written", self._is_written)):
      array.flush()
      shutil.copyfile(self._folder / name, folder / name)

  def restore(self, folder: Path) -> None:
    """Reads the files of `save`."""
    for name, array in (("value", self._value), ("is_written", self._is_written)):
      read = lambda: np.memmap(folder / name, array.dtype, "r", 0, array.shape)
      parallel.copy_from_primary(read, array)


History = DeviceHistory | HostHistory


def create(keys: Keys, *, width: int, dtype: str, folder: Path) -> History:
  """Creates a table on the devices if it fits, else on the host, and logs its size.

  Args:
    keys: of the table.
    width: width P of an entry.
    dtype: one of `DTYPES`.
    folder: for the files of a host table.

  Raises:
    ValueError: the table fits neither on the devices nor on the host.
  """
  size = keys.entries * (width * jnp.dtype(dtype).itemsize + 1)
  can_number = keys.entries <= _MOST_DEVICE_ENTRIES
  limits = {"device": _device_limit() if can_number else 0, "host": _host_limit(folder)}
  # Process 0 decides for all processes.
  fits = parallel.from_primary([place for place, limit in limits.items() if size <= limit])
  text = (
    f"history table of {keys.entries:,} entries (graph, configuration, segment) with "
    f"{width} {dtype}: {console.size(size)}"
  )
  if not fits:
    room = " and ".join(f"{console.size(limit)} on the {place}" for place, limit in limits.items())
    raise ValueError(
      f"{text}; it may take {room}. Reduce it by segments.readout=scalar, "
      "segments.history_dtype=bfloat16, fewer configurations (data.max_configs) or larger "
      "segments (segments.max_nodes), or train without a table (variants gst and one)"
    )
  logging.info(f"{text}, on the {fits[0]}")
  if fits[0] == "device":
    return DeviceHistory(keys.entries, width, dtype)
  return HostHistory(keys.entries, width, dtype, folder / f"host_{parallel.process_index()}")


def _device_limit() -> float:
  """Largest size of a table on each device in bytes; CPU devices share the memory."""
  memory = jax.local_devices()[0].memory_stats() or {}
  if "bytes_limit" in memory:
    return _DEVICE_SHARE * (memory["bytes_limit"] - memory.get("bytes_in_use", 0))
  total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return _DEVICE_SHARE * total / parallel.local_device_count()


def _host_limit(folder: Path) -> float:
  disk = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
  return _HOST_SHARE * shutil.disk_usage(disk).free


class Snapshots:
  """Saves a table for checkpoints, and keeps the two newest.

  Args:
    folder: of the saved tables; created when needed.
    keys: of the table.
    history: the table.
  """

  def __init__(self, folder: Path, keys: Keys, history: History):
    self._folder, self._identity, self._history = folder, keys.identity, history
    self._newest: str | None = None  # name of the table of the newest checkpoint, if known

  @parallel.primary_only
  def save(self) -> dict[str, str]:
    """Saves the table; returns its name and its SHA-256, for `restore`.

    The table of the newest checkpoint stays until the checkpoint of the new table is written.
    `save` first removes all other tables, so that the disk has at most two.
    """
    numbers = [int(path.name.removeprefix("table_")) for path in self._folder.glob("table_*")]
    name = f"table_{max(numbers, default=-1) + 1}"
    partial = self._folder / f".{name}.partial"
    for number in numbers:
      if f"table_{number}" != self._newest:
        shutil.rmtree(self._folder / f"table_{number}")
    for leftover in self._folder.glob(".table_*.partial"):
      shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    self._history.save(partial)
    digests = {path.name: files.digest_of(path) for path in sorted(partial.iterdir())}
    card = files.seal({"identity": self._identity, "sha256": digests})
    (partial / _CARD).write_text(json.dumps(card) + "\n")
    os.replace(partial, self._folder / name)
    self._newest = name
    # The card has the SHA-256 of the other files.
    return {"table": name, "sha256": files.digest_of(self._folder / name / _CARD)}

  def restore(self, saved: Mapping[str, str]) -> None:
    """Reads a saved table.

    Args:
      saved: the result of `save` in process 0.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is damaged, or of another run, other graphs or another partition.
    """
    folder = self._folder / saved["table"]
    self._check(folder, saved["sha256"])
    self._history.restore(folder)
    self._newest = folder.name

  @parallel.primary_only
  def _check(self, folder: Path, digest: str) -> None:
    """Refuses a table that is damaged, or whose card has another SHA-256."""
    path, again = folder / _CARD, "train again in another --workdir"
    if not folder.is_dir():
      raise FileNotFoundError(
        f"{folder} is missing, the history table of the newest checkpoint: {again}"
      )
    with trust.json_of(path, _CARD_SCHEMA, again) as sealed:
      card = files.unseal(sealed)
      identity, digests = card["identity"], card["sha256"]
    for name, expected in digests.items():
      if not (folder / name).is_file() or files.digest_of(folder / name) != expected:
        raise ValueError(f"{folder / name} is damaged: its checksum does not fit; {again}")
    if identity != self._identity:
      raise ValueError(
        f"{path} is the history table of other training data or another partition "
        f"({identity[:12]} there, {self._identity[:12]} here): give the same --data_root and "
        "fields of `segments`, or another --workdir"
      )
    if files.digest_of(path) != digest:
      raise ValueError(
        f"{folder} is of another run: it is not the history table of the newest "
        f"checkpoint. Put that table back, or {again}"
      )


class BatchesWithHistory:
  """Training batches whose saved position includes the history table.

  Args:
    batches: grain iterator.
    snapshots: of the table of the training step.
  """

  def __init__(self, batches: Any, snapshots: Snapshots):
    self._batches, self._snapshots = batches, snapshots

  def __next__(self) -> Any:
    return next(self._batches)

  def get_state(self) -> dict[str, Any]:
    return {"batches": self._batches.get_state(), **(self._snapshots.save() or {})}

  def set_state(self, state: dict[str, Any]) -> None:
    self._batches.set_state(state["batches"])
    self._snapshots.restore(state)
