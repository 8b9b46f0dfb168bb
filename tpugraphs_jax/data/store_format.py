"""One graph of the store: a folder of `.npy` files and a `meta.json`.

    meta.json       format version, sizes, hashes, the source's size, time and hash
    group_row.npy   [C, groups] uint8 or uint16, memory-mapped when opened
    rows.npy  node_group.npy  runtime_ns.npy                   its configurations
    node_feat.npy  node_opcode.npy  edge_index.npy  node_splits.npy  config_node.npy

A folder is written beside its place and renamed when complete, so that a folder with the
right name is whole. Opening one never reads the source file, but notices when it has changed.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
import shutil
import threading

import numpy as np

from tpugraphs_jax import files as files_lib, graph

_VERSION = 1
_META, _DIGESTS = "meta.json", "sha256"
_REBUILD = "build the store again (python -m tpugraphs_jax.data.store build)"
GRAPH_ARRAYS = ("node_feat", "node_opcode", "edge_index", "node_splits", "config_node")
# Only `group_row` is mapped, and where it is small not even that: a map holds a file
# descriptor, of which 1,024 is the common limit, less than three maps per graph of the full
# layout collections.
_CONFIG_ARRAYS = ("rows", "node_group", "runtime_ns")
_MAPPED = "group_row"
_LEAST_MAPPED_BYTES = 1 << 16
# Heads of arrays are Python literals, and before Python 3.11.8 two threads that parse at the
# same time can fail: https://github.com/python/cpython/issues/106905.
_ONE_PARSES = threading.Lock()


def open_graph(folder: str | os.PathLike[str]) -> graph.OpGraph:
  """Opens one graph of the store; its `configs.group_row` is a memory map, unless it is small.

  Raises:
    FileNotFoundError: the folder is not a graph of a store.
    OSError: no more files can be opened.
    ValueError: it is damaged, written in another format, or built from a
      source that has changed since. A source that is gone is no error.
  """
  folder = Path(folder)
  try:
    meta = read_meta(folder)
  except ValueError as error:
    raise ValueError(f"{error}; {_REBUILD}") from None
  source = folder.resolve() / meta["source"]["path"]
  if source.is_file() and not matches_source(meta, source):
    raise ValueError(
        f"{folder}: its source {source} has changed since; {_REBUILD}")
  is_mapped = _file(folder, _MAPPED).stat().st_size >= _LEAST_MAPPED_BYTES
  try:
    with _ONE_PARSES:
      arrays = {name: np.load(_file(folder, name)) for name in (*GRAPH_ARRAYS, *_CONFIG_ARRAYS)}
      arrays[_MAPPED] = np.load(_file(folder, _MAPPED), mmap_mode="r" if is_mapped else None)
  except OSError as error:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
      raise
    raise OSError(f"{folder}: no more files can be opened, and every large graph of a store "
                  "takes one: raise the limit (ulimit -n)") from None
  configs = graph.LayoutConfigs(**{name: arrays.pop(name) for name in (*_CONFIG_ARRAYS, _MAPPED)})
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
  partial = files_lib.partial(folder)
  shutil.rmtree(partial, ignore_errors=True)  # of an earlier process of the same number
  partial.mkdir()
  try:
    with files_lib.being_written(partial):
      _write(partial, op_graph, source={"path": _relative(source, folder), **source_state})
    _replace_folder(partial, folder)
  except OSError as error:
    raise OSError(f"cannot write {folder}: {error}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, op_graph: graph.OpGraph, *, source: dict) -> None:
  for name in GRAPH_ARRAYS:
    np.save(_file(folder, name), getattr(op_graph, name))
  for name in (*_CONFIG_ARRAYS, _MAPPED):
    np.save(_file(folder, name), getattr(op_graph.configs, name))
  files = sorted(folder.iterdir())
  _write_meta(folder, {
      "version": _VERSION,
      "name": op_graph.name,
      "nodes": op_graph.num_nodes,
      "config_nodes": len(op_graph.config_node),
      "configs": len(op_graph.configs),
      "groups": op_graph.configs.group_row.shape[1],
      "rows": len(op_graph.configs.rows),
      "files": {path.name: path.stat().st_size for path in files},
      _DIGESTS: {path.name: files_lib.digest_of(path) for path in files},
      "source": source,
  })


def read_meta(folder: Path) -> dict:
  """The contents of `meta.json`, after all files were compared with their checksums.

  Checksums are compared once per host and file, until a file changes.

  Raises:
    FileNotFoundError: there is no `meta.json`.
    ValueError: it is damaged or of another version, or a file differs from what was written.
  """
  path = folder / _META
  if not path.is_file():
    raise FileNotFoundError(f"{folder} is not a graph of a store: it has no {_META}")
  try:
    meta = json.loads(path.read_text())
    version, sizes, name = meta["version"], meta["files"], meta["name"]
    meta = files_lib.unsealed(meta) if version == _VERSION else meta
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(f"{path} is damaged") from None
  if version != _VERSION:
    raise ValueError(f"{folder} has format {version}, expected {_VERSION}")
  if name != folder.name:
    raise ValueError(f"{folder} holds another graph, {name}")
  for name, size in sizes.items():
    file = folder / name
    found = file.stat().st_size if file.is_file() else "none"
    if found != size:
      raise ValueError(f"{file} was cut short: {found} of {size} bytes")
  damaged = files_lib.first_damaged(
      {folder / name: digest for name, digest in meta[_DIGESTS].items()})
  if damaged is not None:
    raise ValueError(f"{damaged} is damaged: its checksum does not fit")
  return meta


def damage_of(folder: Path) -> str:
  """What is wrong with a graph of the store; empty if it is whole or not there."""
  try:
    if folder.exists():
      read_meta(folder)
  except (FileNotFoundError, ValueError) as error:
    return str(error)
  return ""


def fingerprint(source: Path) -> dict:
  """Size in bytes, modification time and SHA-256 of a file."""
  stat = source.stat()
  return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns,
          "sha256": files_lib.digest_of(source)}


def looks_current(folder: Path, source: Path) -> bool:
  """Whether the folder is whole and its source has the size and time of the build."""
  try:
    known, stat = read_meta(folder)["source"], source.stat()
  except (FileNotFoundError, ValueError):
    return False
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


def has_leftovers(root: Path) -> bool:
  """Whether there is something in the folder of a split that `tidy` may remove."""
  is_there = any(root.glob(".*.partial")) or any(root.glob("*/.*.partial"))
  return is_there and os.access(root, os.W_OK)


def tidy(root: Path) -> None:
  """Removes what interrupted builds left in the folder of a split."""
  for folder in {root, *(path.parent for path in root.glob("*/.*.partial"))}:
    files_lib.tidy(folder)


def _replace_folder(new: Path, folder: Path) -> None:
  if folder.exists():
    # A folder cannot be renamed over another one that has files in it.
    old = files_lib.partial(folder, note=".old")
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
  with files_lib.replacing(folder / _META) as file:
    file.write(json.dumps(files_lib.sealed(meta), indent=1) + "\n")


def _file(folder: Path, name: str) -> Path:
  return folder / f"{name}.npy"
