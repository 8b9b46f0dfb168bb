"""One graph of the store: a folder of `.npy` files and a `meta.json`.

    meta.json       format version, sizes, the source's size, time and hash
    group_row.npy   [C, groups] uint8 or uint16, memory-mapped when opened
    rows.npy  node_group.npy  runtime_ns.npy                   its configurations
    node_feat.npy  node_opcode.npy  edge_index.npy  node_splits.npy  config_node.npy

A folder is written beside its place and renamed when complete, so that what has
the right name is whole. Opening one never reads the source file, but notices
when it has changed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from pathlib import Path
import shutil

import numpy as np

from tpugraphs_jax import atomic
from tpugraphs_jax import graph

_VERSION = 1
_META = "meta.json"
_REBUILD = "build the store again (python -m tpugraphs_jax.data.store build)"
GRAPH_ARRAYS = ("node_feat", "node_opcode", "edge_index", "node_splits", "config_node")
# Only `group_row` is mapped: a map holds a file descriptor, and the common limit
# of 1,024 is less than three maps per graph of the full layout collections.
_CONFIG_ARRAYS = ("rows", "node_group", "runtime_ns")
_MAPPED = "group_row"


def open_graph(folder: str | os.PathLike[str]) -> graph.OpGraph:
  """Opens one graph of the store; its `configs.group_row` is a memory map.

  Raises:
    FileNotFoundError: the folder is not a graph of a store.
    ValueError: it was cut short, written in another format, or built from a
      source that has changed since. A source that is gone is no error.
  """
  folder = Path(folder)
  meta = read_meta(folder)
  source = folder.resolve() / meta["source"]["path"]
  if source.is_file() and not matches_source(meta, source):
    raise ValueError(
        f"{folder}: its source {source} has changed since; {_REBUILD}")
  arrays = {name: np.load(_file(folder, name)) for name in GRAPH_ARRAYS}
  configs = graph.LayoutConfigs(
      group_row=np.load(_file(folder, _MAPPED), mmap_mode="r"),
      **{name: np.load(_file(folder, name)) for name in _CONFIG_ARRAYS})
  return graph.OpGraph(name=meta["name"], configs=configs, store=folder, **arrays)


def write_graph(
    folder: Path, op_graph: graph.OpGraph, *, source: Path, source_state: dict
) -> None:
  """Writes one graph, replacing what is there only when the new copy is complete.

  Args:
    folder: the graph's place in the store.
    op_graph: a graph with `LayoutConfigs`.
    source: the file that it was read from.
    source_state: `fingerprint(source)`, taken before the file was read.

  Raises:
    OSError: it cannot be written; what was there before is untouched.
  """
  partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
  _discard_partial(folder)
  partial.mkdir()
  try:
    for name in GRAPH_ARRAYS:
      np.save(_file(partial, name), getattr(op_graph, name))
    for name in (*_CONFIG_ARRAYS, _MAPPED):
      np.save(_file(partial, name), getattr(op_graph.configs, name))
    _write_meta(partial, {
        "version": _VERSION,
        "name": op_graph.name,
        "nodes": op_graph.num_nodes,
        "config_nodes": len(op_graph.config_node),
        "configs": len(op_graph.configs),
        "groups": op_graph.configs.group_row.shape[1],
        "rows": len(op_graph.configs.rows),
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        "source": {"path": _relative(source, folder), **source_state},
    })
    _replace_folder(partial, folder)
  except OSError as error:
    raise OSError(f"cannot write {folder}: {error}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def read_meta(folder: Path) -> dict:
  """The contents of `meta.json`, after every file's size has been compared.

  Raises:
    FileNotFoundError: there is no `meta.json`.
    ValueError: it is damaged or of another version, or a file was cut short.
  """
  path = folder / _META
  if not path.is_file():
    raise FileNotFoundError(f"{folder} is not a graph of a store: it has no {_META}")
  try:
    meta = json.loads(path.read_text())
    version, sizes = meta["version"], meta["files"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged; {_REBUILD}") from error
  if version != _VERSION:
    raise ValueError(f"{folder} has format {version}, expected {_VERSION}; {_REBUILD}")
  for name, size in sizes.items():
    file = folder / name
    found = file.stat().st_size if file.is_file() else "none"
    if found != size:
      raise ValueError(f"{file} was cut short: {found} of {size} bytes; {_REBUILD}")
  return meta


def fingerprint(source: Path) -> dict:
  """Size in bytes, modification time and SHA-256 of a file."""
  stat = source.stat()
  with open(source, "rb") as stream:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
  return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}


def looks_current(folder: Path, source: Path) -> bool:
  """Whether the folder is whole and its source has the size and time of the build."""
  try:
    known = read_meta(folder)["source"]
  except (FileNotFoundError, ValueError):
    return False
  stat = source.stat()
  return (stat.st_size, stat.st_mtime_ns) == (known["bytes"], known["mtime_ns"])


def matches_source(meta: dict, source: Path) -> bool:
  """Whether a store was built from `source` as it is now.

  The contents are hashed only where the size agrees and the time does not.
  """
  known, stat = meta["source"], source.stat()
  if stat.st_size != known["bytes"]:
    return False
  return (stat.st_mtime_ns == known["mtime_ns"]
          or fingerprint(source)["sha256"] == known["sha256"])


def renew_source(folder: Path, source: Path) -> bool:
  """Notes the source's new time if only that has changed; whether it did so."""
  try:
    meta = read_meta(folder)
  except (FileNotFoundError, ValueError):
    return False
  if not matches_source(meta, source):
    return False
  meta["source"]["mtime_ns"] = source.stat().st_mtime_ns
  _write_meta(folder, meta)
  return True


def _discard_partial(folder: Path) -> None:
  """Removes what an interrupted build of this graph left behind."""
  for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
    shutil.rmtree(leftover, ignore_errors=True)


def _replace_folder(new: Path, folder: Path) -> None:
  if folder.exists():
    # A folder cannot be renamed over another one that has files in it.
    old = new.with_name(f".{folder.name}.{os.getpid()}.old.partial")
    os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
  else:
    os.replace(new, folder)


def _relative(source: Path, folder: Path) -> str:
  # Through links to folders, but not through one to the file: what replaces the
  # link is the new source.
  source = source.parent.resolve() / source.name
  return os.path.relpath(source, folder.parent.resolve() / folder.name)


def _write_meta(folder: Path, meta: dict) -> None:
  with atomic.replacing(folder / _META) as file:
    file.write(json.dumps(meta, indent=1) + "\n")


def _file(folder: Path, name: str) -> Path:
  return folder / f"{name}.npy"
