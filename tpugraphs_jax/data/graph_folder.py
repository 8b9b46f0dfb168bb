"""A graph of the store: a folder of arrays, with checksums and a reference to its source file.

    meta.json       format version, name, checksums, and size and checksum of the source
    group_row.npy   [C, groups] uint8 or uint16, memory-mapped when opened
    rows.npy  node_group.npy  labels.npy                       its configurations
    node_feat.npy  node_opcode.npy  edge_index.npy  node_splits.npy  config_node.npy
    kernel_runtime.npy  kernel_node.npy                        where the file has times of kernels

The folder is written under another name and renamed when complete. Reading a graph detects damage
and a source file that has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from pathlib import Path
import shutil

import numpy as np

from tpugraphs_jax import graph
from tpugraphs_jax.infra import files, trust

_VERSION = 3  # of the format; graphs of other versions are built again
_META, _DIGESTS = "meta.json", "sha256"
_REBUILD = "build the store again (python -m tpugraphs_jax.data.store build)"
_GRAPH_ARRAYS = ("node_feat", "node_opcode", "edge_index", "node_splits", "config_node")
# Only a large `group_row` is mapped: every map takes a file descriptor. A process commonly has at
# most 1,024, fewer than three for each graph of the layout collections.
_CONFIG_ARRAYS = ("rows", "node_group", "labels")
_MAPPED = "group_row"
_KERNELS = {"runtime": "kernel_runtime", "node": "kernel_node"}  # fields of `graph.KernelTimes`
_LEAST_MAPPED_BYTES = 1 << 16
_SOURCE = trust.Record(path=str, bytes=int, sha256=str)


def read(folder: str | os.PathLike[str]) -> graph.OpGraph[graph.LayoutConfigs]:
  """Opens a graph of the store; `configs.group_row` is a memory map, unless it is small.

  Raises:
    FileNotFoundError: the folder is not a graph of a store.
    OSError: no more files can be opened.
    ValueError: the folder is damaged or has another format, or its source file has changed. A
      missing source file is no error.
  """
  folder = Path(folder)
  try:
    meta = _read_meta(folder)
    source = folder.resolve() / meta["source"]["path"]
    if source.is_file() and not _is_built_from(meta, source):
      raise ValueError(f"{folder}: its source {source} has changed since")
  except ValueError as error:
    raise ValueError(f"{error}; {_REBUILD}") from None
  is_mapped = _file(folder, _MAPPED).stat().st_size >= _LEAST_MAPPED_BYTES
  try:
    arrays = {name: np.load(_file(folder, name)) for name in (*_GRAPH_ARRAYS, *_CONFIG_ARRAYS)}
    arrays[_MAPPED] = np.load(_file(folder, _MAPPED), mmap_mode="r" if is_mapped else None)
  except OSError as error:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
      raise
    raise OSError(
      f"{folder}: no more files can be opened, and every large graph of a store "
      "takes one: raise the limit (ulimit -n)"
    ) from None
  configs = graph.LayoutConfigs(**{name: arrays.pop(name) for name in (*_CONFIG_ARRAYS, _MAPPED)})
  if _file(folder, _KERNELS["node"]).exists():
    kernels = {name: np.load(_file(folder, file)) for name, file in _KERNELS.items()}
    configs = dataclasses.replace(configs, kernels=graph.KernelTimes(**kernels))
  return graph.OpGraph(name=meta["name"], configs=configs, **arrays)


def write(
  folder: Path, op_graph: graph.OpGraph[graph.LayoutConfigs], *, source: Path, source_state: dict
) -> None:
  """Writes one graph; an earlier copy is replaced only when the new one is complete.

  Args:
    folder: the graph's place in the store.
    op_graph: a graph with `LayoutConfigs`.
    source: the file that it was read from.
    source_state: `fingerprint(source)`, from before the file was read.

  Raises:
    OSError: the folder cannot be written; the earlier copy stays.
  """
  partial = files.partial_path(folder)
  partial.mkdir()
  try:
    with files.lock(partial):
      _write_arrays(partial, op_graph, source={"path": _relative(source, folder), **source_state})
    _replace_folder(partial, folder)
  except OSError as error:
    raise OSError(f"cannot write {folder}: {error}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _write_arrays(
  folder: Path, op_graph: graph.OpGraph[graph.LayoutConfigs], *, source: dict
) -> None:
  for name in _GRAPH_ARRAYS:
    np.save(_file(folder, name), getattr(op_graph, name))
  for name in (*_CONFIG_ARRAYS, _MAPPED):
    np.save(_file(folder, name), getattr(op_graph.configs, name))
  if op_graph.configs.kernels:
    for name, file in _KERNELS.items():
      np.save(_file(folder, file), getattr(op_graph.configs.kernels, name))
  digests = {path.name: files.digest_of(path) for path in files.visible(folder, "*")}
  meta = {"version": _VERSION, "name": op_graph.name, _DIGESTS: digests, "source": source}
  (folder / _META).write_text(json.dumps(files.seal(meta), indent=1) + "\n")


def _read_meta(folder: Path) -> dict:
  """The contents of `meta.json`; compares all files with their checksums.

  A file is compared once per host, and again when it changes.

  Raises:
    FileNotFoundError: there is no `meta.json`.
    ValueError: it is damaged or of another version, or a file has another checksum.
  """
  path = folder / _META
  if not path.is_file():
    raise FileNotFoundError(f"{folder} is not a graph of a store: it has no {_META}")
  try:
    meta = trust.parse(path.read_text())
    if (version := meta["version"]) == _VERSION:
      meta = files.unseal(meta)
      names = *_GRAPH_ARRAYS, *_CONFIG_ARRAYS, _MAPPED
      arrays = trust.Record({f"{name}.npy": str for name in names})
      trust.check(meta, trust.Record({"name": str, _DIGESTS: arrays, "source": _SOURCE}), "it")
      name, digests = trust.name(meta["name"]), meta[_DIGESTS]
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(f"{path} is damaged") from None
  if version != _VERSION:
    raise ValueError(f"{folder} is of format {version!r:.20}, expected {_VERSION}")
  if name != folder.name:
    raise ValueError(f"{folder} holds another graph, {name}")
  damaged = files.first_damaged({folder / file: digest for file, digest in digests.items()})
  if damaged is not None:
    raise ValueError(f"{damaged} is missing or damaged: its checksum does not fit")
  return meta


def fingerprint(source: Path) -> dict:
  """Size in bytes and SHA-256 of a file."""
  return {"bytes": source.stat().st_size, "sha256": files.digest_of(source)}


def why_outdated(folder: Path, source: Path) -> str:
  """The reason to build a graph; empty if the graph is complete and its source unchanged."""
  try:
    meta = _read_meta(folder)
  except (FileNotFoundError, ValueError) as error:
    return str(error)
  return "" if _is_built_from(meta, source) else f"{folder}: its source {source} has changed since"


def _is_built_from(meta: dict, source: Path) -> bool:
  """Whether a graph was built from this version of `source`.

  A copy may have another time, and another version the same time.
  """
  known = meta["source"]
  is_same_size = source.stat().st_size == known["bytes"]
  return is_same_size and files.first_damaged({source: known["sha256"]}) is None


def _replace_folder(new: Path, folder: Path) -> None:
  # A folder cannot be renamed to the name of a folder with files.
  old = files.partial_path(folder)
  with contextlib.suppress(FileNotFoundError):
    os.replace(folder, old)
  os.replace(new, folder)
  shutil.rmtree(old, ignore_errors=True)


def _relative(source: Path, folder: Path) -> str:
  # Follows links to folders, but not a link to the file: another target of it is a new source.
  source = source.parent.resolve() / source.name
  return os.path.relpath(source, folder.parent.resolve() / folder.name)


def _file(folder: Path, name: str) -> Path:
  return folder / f"{name}.npy"
