"""Reads and writes released `.npz` files; each holds one graph with its configurations.

A tile file has a fused kernel, a layout file a whole program. Both are read into an `OpGraph`, and
every array is checked. Written files have the members, order, dtypes and compression of released
files. Deflated members cannot be memory-mapped; large members are read in blocks.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import io
import math
import os
from pathlib import Path
from typing import IO, Literal, NoReturn
import zipfile

import numpy as np

from tpugraphs_jax import columns, datasets, graph
from tpugraphs_jax.data import factoring
from tpugraphs_jax.infra import console, files, machine, trust

_SUFFIX = ".npy"
# Other methods can expand a kilobyte to a gigabyte.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class NpzError(ValueError):
  """A defect of an input file, in one line with the file and the array.

  Args:
    message: the defect; it may contain names from the file with any characters.
  """

  def __init__(self, message: str):
    super().__init__(console.one_line(message))


@dataclasses.dataclass(frozen=True)
class Member:
  """The header of one array."""

  shape: tuple[int, ...]
  dtype: np.dtype
  fortran_order: bool

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


# Failures of the system. (zipfile also raises OSError on bad bytes of a file.)
_OF_SYSTEM = (errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE)


def _raise_of_system(error: Exception, path: Path) -> None:
  """Raises OSError if the system failed and not the file."""
  if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
    raise OSError(error.errno, error.strerror, str(path)) from error


class NpzArchive(contextlib.AbstractContextManager):
  """The arrays of one `.npz` file, read whole or in blocks.

  Every defect of the file raises `NpzError`, a missing file raises `FileNotFoundError`, and a
  failure of the system, such as a missing permission, raises `OSError`.

  Args:
    path: the file.
    most_bytes: limit of all arrays together; None = each array must fit into memory.
  """

  def __init__(self, path: str | os.PathLike[str], *, most_bytes: int | None = None):
    self.path = Path(path)
    files.check_file(self.path, "an .npz file of a graph")
    try:
      self._zip = zipfile.ZipFile(self.path)
    except Exception as error:  # zipfile raises half a dozen types on bad bytes
      _raise_of_system(error, self.path)
      raise NpzError(
        f"{self.path}: not a complete .npz archive ({type(error).__name__}: {error}); {_REMEDY}"
      ) from error
    try:
      self._check_archive(most_bytes)
    except NpzError:
      self._zip.close()
      raise

  def _check_archive(self, most_bytes: int | None) -> None:
    """Refuses archives of another form than NumPy's, before any member is read."""
    members = self._zip.infolist()
    for name, count in collections.Counter(self.names).items():
      if count > 1:
        self.fail(f"{name} occurs twice; {_REMEDY}")
    for member in members:
      if member.compress_type not in _METHODS:
        self.fail(
          f"{member.filename} is compressed by method {member.compress_type}, expected none or "
          "deflate, as np.savez_compressed writes"
        )
    if most_bytes is not None and (total := sum(m.file_size for m in members)) > most_bytes:
      self.fail(
        f"its arrays take {console.size(total)}, more than the {console.size(most_bytes)} that "
        "such a file may have"
      )

  def __exit__(self, *exc_info) -> None:
    self._zip.close()

  @property
  def names(self) -> list[str]:
    """Names of the arrays, in file order."""
    return [name.removesuffix(_SUFFIX) for name in self._zip.namelist()]

  def fail(self, message: str) -> NoReturn:
    """Raises an error of the file."""
    raise NpzError(f"{self.path}: {message}")

  def member(self, name: str) -> Member:
    """Shape and dtype of an array, without reading it."""
    with self._open(name) as (_, member):
      return member

  def check(self) -> None:
    """Compares every array with its checksum."""
    for name in self.names:
      with self._open(name) as (stream, _):
        while stream.read(factoring.BLOCK_BYTES):
          pass

  def read(self, name: str) -> np.ndarray:
    """One array, C-contiguous and read-only."""
    with self._open(name) as (stream, member):
      self._check_memory(name, member, (1 + member.fortran_order) * member.nbytes)
      data = np.empty(member.nbytes, np.uint8)
      at = 0
      while block := stream.read(factoring.BLOCK_BYTES):  # at the end compares the checksum
        data[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)
      data.flags.writeable = False
      order: Literal["F", "C"] = "F" if member.fortran_order else "C"
      array = np.asarray(data.view(member.dtype).reshape(member.shape, order=order), order="C")
      array.flags.writeable = False
      return array

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """Consecutive slices along the first axis, of about `factoring.BLOCK_BYTES` each.

    An array in Fortran order is read whole.
    """
    member = self.member(name)
    rows = member.shape[0]
    step = _rows_per_block(member.shape, member.dtype)
    if member.fortran_order:
      array = self.read(name)
      yield from (array[start : start + step] for start in range(0, rows, step))
      return
    with self._open(name) as (stream, _):
      self._check_memory(name, member, step * member.nbytes // max(1, rows))
      for start in range(0, rows, step):
        shape = (min(step, rows - start), *member.shape[1:])
        data = stream.read(math.prod(shape) * member.dtype.itemsize)
        yield np.frombuffer(data, member.dtype).reshape(shape)
      stream.read()  # compares the checksum at the end

  @contextlib.contextmanager
  def _open(self, name: str) -> Iterator[tuple[IO[bytes], Member]]:
    try:
      info = self._zip.getinfo(name + _SUFFIX)
      with self._zip.open(info) as stream:
        member = _read_header(stream)
        self._check_size(name, member, info.file_size - stream.tell())
        yield stream, member
    except NpzError:
      raise
    except MemoryError as error:
      raise NpzError(f"{self.path}: {name}: {console.one_line(error)}") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen types
      _raise_of_system(error, self.path)
      raise NpzError(
        f"{self.path}: {name} is damaged ({type(error).__name__}: {error}); {_REMEDY}"
      ) from error

  def _check_memory(self, name: str, member: Member, needed: int) -> None:
    if needed > (available := machine.available()):
      self.fail(
        f"{name} of shape {member.shape} takes {console.size(needed)}, more than the "
        f"{console.size(available)} of memory that are available"
      )

  def _check_size(self, name: str, member: Member, stored: int) -> None:
    if member.dtype.hasobject:
      self.fail(f"{name} holds Python objects, expected plain numbers")
    if member.nbytes != stored:
      self.fail(
        f"{name} of shape {member.shape} and dtype {member.dtype} needs {member.nbytes} bytes, "
        f"the file holds {stored}; {_REMEDY}"
      )


def _rows_per_block(shape: tuple[int, ...], dtype: np.dtype) -> int:
  """Number of first-axis rows that fill a block, at least one."""
  row_bytes = math.prod(shape[1:]) * dtype.itemsize
  return max(1, factoring.BLOCK_BYTES // max(1, row_bytes))


_REMEDY = "fetch or generate the file again"


def _read_header(stream: IO[bytes]) -> Member:
  version, _ = np.lib.format.read_magic(stream)
  if version in (2, 3):  # as version 1, but with four bytes of length: NumPy would read 4 GiB
    length = int.from_bytes(stream.read(4), "little")
    if length >= 1 << 16:
      raise ValueError(f"a header of {length} bytes")
    stream = io.BytesIO(length.to_bytes(2, "little") + stream.read(length))
  elif version != 1:
    raise ValueError(f"npy format {version} is not supported")
  shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
  return Member(shape, dtype, fortran_order and len(shape) > 1)


_INTEGERS = ("int32", "int64")
# Accepted dtypes and shape of each array; a letter has one size throughout a file. Released files
# differ from the published description in several dtypes; both are accepted.
_GRAPH_ARRAYS = {
  "node_feat": (("float32",), ("N", columns.NODE_FEATURES)),
  "node_opcode": (("uint8", *_INTEGERS), ("N",)),
  "edge_index": (_INTEGERS, ("E", 2)),
}
_TILE_ARRAYS = _GRAPH_ARRAYS | {
  "config_feat": (("float32",), ("C", columns.TILE_CONFIG_FEATURES)),
  "config_runtime": (_INTEGERS, ("C",)),
  "config_runtime_normalizers": (_INTEGERS, ("C",)),
}
_WRITTEN = {
  "node_feat": np.float32,
  "node_opcode": np.uint8,
  "config_feat": np.float32,
  "node_config_feat": np.float32,
}  # all others are int64
_LAYOUT_ARRAYS = _GRAPH_ARRAYS | {
  "node_config_feat": (("float32",), ("C", "K", columns.LAYOUT_CONFIG_FEATURES)),
  "node_config_ids": (_INTEGERS, ("K",)),
  "node_splits": (_INTEGERS, ("S",)),
  "config_runtime": (_INTEGERS, ("C",)),
}
# A layout file has both of these arrays of `graph.KernelTimes`, or none. Released files have none.
_KERNEL_ARRAYS = {"kernel_runtime": (_INTEGERS, ("C", "D")), "kernel_node": (_INTEGERS, ("M", 2))}


def read_tile(path: str | os.PathLike[str]) -> graph.OpGraph[graph.TileConfigs]:
  """Reads one tile file, named after its stem.

  Raises:
    FileNotFoundError: there is no such file.
    NpzError: the file is damaged or malformed.
  """
  with NpzArchive(path) as archive:
    _check_members(archive, _TILE_ARRAYS)
    config_feat = archive.read("config_feat")
    if not np.isfinite(config_feat).all():
      archive.fail("config_feat has values that are not finite")
    name = "config_runtime_normalizers"
    normalizer_ns = archive.read(name)
    if (least := normalizer_ns.min()) <= 0:
      archive.fail(f"{name} has the value {least}, expected positive nanoseconds")
    configs = graph.TileConfigs(config_feat, _read_runtime(archive), normalizer_ns.astype(np.int64))
    nodes = archive.member("node_opcode").shape[0]
    return _read_graph(archive, np.array([0, nodes], np.int64), np.zeros(0, np.int32), configs)


def read_layout(path: str | os.PathLike[str]) -> graph.OpGraph[graph.LayoutConfigs]:
  """Reads one layout file, named after its stem, and factors its configurations.

  Configurations are read in blocks: memory stays far below the size of `node_config_feat`, unless
  that array is in Fortran order.

  Raises:
    FileNotFoundError: there is no such file.
    NpzError: the file is damaged or malformed.

  Examples:
    >>> graph = read_layout("data/own/npz/layout/own/programs_cpu/test/experts_layer.npz")
    >>> graph.node_feat.shape == (graph.num_nodes, 140), graph.configs.is_labelled
    (True, True)
  """
  with NpzArchive(path) as archive:
    _check_members(archive, _layout_arrays(archive))
    node_splits, config_node = _read_splits(archive), _read_config_node(archive)
    configs = dataclasses.replace(_read_layout_configs(archive), kernels=_read_kernels(archive))
    return _read_graph(archive, node_splits, config_node, configs)


def read_structure(
  path: str | os.PathLike[str], kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Edges `[E, 2]`, opcodes `[N]` and runtimes `[C]` of a file of a kind, `tile` or `layout`.

  Raises:
    FileNotFoundError: there is no such file.
    NpzError: the file is damaged or malformed.
  """
  with NpzArchive(path) as archive:
    _check_members(archive, _TILE_ARRAYS if kind == "tile" else _layout_arrays(archive))
    return archive.read("edge_index"), archive.read("node_opcode"), _read_runtime(archive)


def write_tile(path: str | os.PathLike[str], op_graph: graph.OpGraph[graph.TileConfigs]) -> None:
  """Writes a tile graph in the released form; an existing file is replaced atomically."""
  configs = op_graph.configs
  arrays = {
    "node_feat": op_graph.node_feat,
    "node_opcode": op_graph.node_opcode,
    "edge_index": op_graph.edge_index,
    "config_feat": configs.config_feat,
    "config_runtime": configs.runtime_ns,
    "config_runtime_normalizers": configs.normalizer_ns,
  }
  _write(path, arrays)


def write_layout(
  path: str | os.PathLike[str], op_graph: graph.OpGraph[graph.LayoutConfigs]
) -> None:
  """Writes a layout graph in the released form; an existing file is replaced atomically.

  Configurations are decoded block by block. Times of kernels, where the graph has them, are two
  more arrays.
  """
  arrays = {
    "edge_index": op_graph.edge_index,
    "node_feat": op_graph.node_feat,
    "node_opcode": op_graph.node_opcode,
    "node_config_feat": op_graph.configs,
    "node_config_ids": op_graph.config_node,
    "node_splits": op_graph.node_splits[None],
    "config_runtime": op_graph.configs.labels,
  }
  if kernels := op_graph.configs.kernels:
    arrays |= {"kernel_runtime": kernels.runtime, "kernel_node": kernels.node}
  _write(path, arrays)


def _write(path: str | os.PathLike[str], arrays: dict) -> None:
  """Writes arrays by name in their released dtypes; `LayoutConfigs` are decoded in blocks."""
  with (
    files.replacing(path, "wb") as file,
    zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
  ):
    for name, array in arrays.items():
      shape, blocks = getattr(array, "shape", None), [array]
      if isinstance(array, graph.LayoutConfigs):
        shape = (len(array), len(array.node_group), columns.LAYOUT_CONFIG_FEATURES)
        blocks = _decoded_blocks(array, shape)
      dtype = np.dtype(_WRITTEN.get(name, np.int64))
      with archive.open(name + _SUFFIX, "w", force_zip64=True) as stream:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
          # A view of bytes, because an empty array with two axes has no buffer.
          stream.write(np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data)


def split_files(data_root: str | os.PathLike[str], collection: str, split: str) -> list[Path]:
  """The files of one split of a collection, sorted by name.

  `layout:xla:random` is in the folder `<data_root>/layout/xla/random/<split>`. Files of a bucket
  are copied to this machine first.

  Raises:
    ValueError: no such collection or split exists.
    FileNotFoundError: the folder is missing or holds no `.npz`.
  """
  parsed = datasets.Collection(collection)
  if split not in graph.SPLITS:
    raise ValueError(f"unknown split {split!r}, expected one of {', '.join(graph.SPLITS)}")
  root = files.local_of(data_root)
  if files.is_remote(data_root):
    _fetch(data_root, parsed, split)
  if not root.is_dir():
    raise FileNotFoundError(
      f"data_root {root} is not a folder; set it to the folder that "
      "holds the released tile/ and layout/ folders"
    )
  folder = parsed.folder(root, split)
  paths = files.visible(folder, "*.npz")
  if not paths:
    others = files.visible(root, "**/*.npz")
    folders = sorted({str(path.parent.relative_to(root)) for path in others})
    where = f"some in {', '.join(folders)}" if folders else "none anywhere"
    raise FileNotFoundError(
      f"no .npz file in {folder}; data_root {root} has {where}; download or generate {collection} "
      "first, or name the folder that holds tile/ and layout/"
    )
  return paths


def files_there(data_root: str | os.PathLike[str], collection: str, split: str) -> list[Path]:
  """Like `split_files`, but empty without files."""
  with contextlib.suppress(FileNotFoundError):
    return split_files(data_root, collection, split)
  return []


def _fetch(data_root: str | os.PathLike[str], parsed: datasets.Collection, split: str) -> None:
  """Copies the split of a collection from a bucket."""
  place = files.join(data_root, *parsed.name.split(":"), split)
  try:
    files.fetch(place, parsed.folder(files.local_of(data_root), split))
  except FileNotFoundError:
    raise FileNotFoundError(
      f"no .npz file in {place}; --data_root must name a place with tile/ "
      f"and layout/: copy {parsed.name} there first"
    ) from None


def _layout_arrays(archive: NpzArchive) -> dict:
  """The arrays that a layout file is expected to have: with kernels where it has any of theirs."""
  has_kernels = any(name in _KERNEL_ARRAYS for name in archive.names)
  return _LAYOUT_ARRAYS | (_KERNEL_ARRAYS if has_kernels else {})


def _check_members(archive: NpzArchive, arrays: dict) -> None:
  """Checks names, dtypes and shapes, before any array is read."""
  try:
    trust.name(archive.path.stem)
  except ValueError as error:
    raise NpzError(f"{archive.path}: {error}") from None
  names = archive.names
  is_tile = arrays is _TILE_ARRAYS
  wrong, read = (_LAYOUT_ARRAYS, "read_layout") if is_tile else (_TILE_ARRAYS, "read_tile")
  if set(names) - set(_KERNEL_ARRAYS) == set(wrong):
    raise NpzError(f"{archive.path} is a file of the other kind: read it with {read}")
  if missing := [name for name in arrays if name not in names]:
    archive.fail(f"{missing[0]} is missing; the file has {', '.join(names) or 'no array'}")
  if extra := [name for name in names if name not in arrays]:
    archive.fail(f"{extra[0]} is not expected; expected are {', '.join(arrays)}")
  sizes: dict[str, int] = {}
  for name, (dtypes, axes) in arrays.items():
    member = archive.member(name)
    if member.dtype not in [np.dtype(dtype) for dtype in dtypes]:
      archive.fail(f"{name} has dtype {member.dtype}, expected {' or '.join(dtypes)}")
    _check_shape(archive, name, member.shape, axes, sizes)


def _check_shape(
  archive: NpzArchive, name: str, shape: tuple[int, ...], axes: tuple, sizes: dict
) -> None:
  """Checks a shape; `sizes` collects the size of each letter."""
  if name == "node_splits" and shape[:1] == (1,) and len(shape) == 2:
    shape = shape[1:]  # a row in released files
  if len(shape) != len(axes):
    archive.fail(f"{name} has shape {shape}, expected [{', '.join(map(str, axes))}]")
  if 0 in shape and axes[0] != "E":  # a graph may have no edges
    archive.fail(f"{name} is empty (shape {shape})")
  for axis, size in zip(axes, shape):
    expected = sizes.setdefault(axis, size) if isinstance(axis, str) else axis
    if size != expected:
      others = f" as other arrays have (axis {axis})" if axis != expected else ""
      archive.fail(f"{name} has shape {shape}, expected {expected} in place of {size}{others}")


def _read_graph(
  archive: NpzArchive, node_splits: np.ndarray, config_node: np.ndarray, configs: graph.Configs
) -> graph.OpGraph[graph.Configs]:
  """The graph of a file of either kind; the other arguments differ between kinds."""
  node_feat = archive.read("node_feat")
  if not np.isfinite(node_feat).all():
    node, column = np.argwhere(~np.isfinite(node_feat))[0]
    place = f"node {node}, column {column}"
    archive.fail(f"node_feat is {node_feat[node, column]} for {place}, expected finite features")
  opcode = archive.read("node_opcode")
  _check_range(archive, "node_opcode", opcode, columns.OPCODES)
  edge_index = archive.read("edge_index")
  _check_range(archive, "edge_index", edge_index, len(opcode))
  return graph.OpGraph(
    name=archive.path.stem,
    node_feat=node_feat,
    node_opcode=opcode.astype(np.uint8),
    edge_index=edge_index.astype(np.int32),
    node_splits=node_splits,
    config_node=config_node,
    configs=configs,
  )


def _read_layout_configs(archive: NpzArchive) -> graph.LayoutConfigs:
  labels = _read_runtime(archive)
  factorer = factoring.LayoutFactorer(archive.member("node_config_ids").shape[0])
  for block in archive.blocks("node_config_feat"):
    try:
      factorer.add(block)
    except ValueError as error:
      archive.fail(f"node_config_feat {error}")
  return factorer.finish(labels)


def _read_kernels(archive: NpzArchive) -> graph.KernelTimes | None:
  """The times of kernels; None of a file without them."""
  if "kernel_node" not in archive.names:
    return None
  runtime, node = archive.read("kernel_runtime"), archive.read("kernel_node")
  if (least := runtime.min()) < 0:
    archive.fail(f"kernel_runtime has the value {least}, expected times, or 0 without the kernel")
  for column, (what, end) in enumerate(
    (("kernels", runtime.shape[1]), ("nodes", archive.member("node_opcode").shape[0]))
  ):
    _check_range(archive, f"kernel_node, in its column of {what},", node[:, column], end)
  steps = np.diff(node, axis=0)
  if not ((steps[:, 0] > 0) | (steps[:, 0] == 0) & (steps[:, 1] > 0)).all():
    archive.fail("kernel_node has rows that do not ascend, expected distinct pairs in order")
  return graph.KernelTimes(runtime.astype(np.int64), node.astype(np.int32))


def _read_runtime(archive: NpzArchive) -> np.ndarray:
  """Runtimes or estimates `[C]` int64: all positive, or all zero (not labelled)."""
  runtime = archive.read("config_runtime").astype(np.int64)
  unmeasured = "or zeros throughout where nothing was measured"
  if (least := runtime.min()) < 0:
    archive.fail(f"config_runtime has the value {least}, expected nanoseconds, {unmeasured}")
  zeros = np.count_nonzero(runtime == 0)
  if zeros not in (0, len(runtime)):
    values = f"{zeros} zeros among {len(runtime)} values"
    archive.fail(f"config_runtime has {values}, expected none, {unmeasured}")
  return runtime


def _read_config_node(archive: NpzArchive) -> np.ndarray:
  """Configurable nodes `[K]` int32, in file order."""
  config_node = archive.read("node_config_ids")
  _check_range(archive, "node_config_ids", config_node, archive.member("node_opcode").shape[0])
  values, counts = np.unique(config_node, return_counts=True)
  node, times = values[counts.argmax()], counts.max()
  if times > 1:
    archive.fail(f"node_config_ids names node {node} {times} times, expected each node once")
  return config_node.astype(np.int32)


def _read_splits(archive: NpzArchive) -> np.ndarray:
  """First nodes of computations, and the number of nodes at the end, `[S]` int64.

  The published description leaves out the number of nodes, released files have it; both are
  accepted.
  """
  splits = archive.read("node_splits").ravel().astype(np.int64)
  nodes = archive.member("node_opcode").shape[0]
  if splits[0] != 0 or splits[-1] > nodes or (np.diff(splits) < 0).any():
    expected = f"numbers that never fall, from 0 to at most {nodes} (the nodes)"
    archive.fail(f"node_splits is {_brief(splits)}, expected {expected}")
  return splits if splits[-1] == nodes else np.append(splits, nodes)


def _check_range(archive: NpzArchive, name: str, array: np.ndarray, end: int) -> None:
  if array.size and (array.min() < 0 or array.max() >= end):
    wrong = array.min() if array.min() < 0 else array.max()
    archive.fail(f"{name} has the value {wrong}, expected 0..{end - 1}")


def _brief(array: np.ndarray) -> str:
  numbers = [str(number) for number in array]
  return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-4:]])


def _decoded_blocks(configs: graph.LayoutConfigs, shape: tuple[int, ...]):
  step = _rows_per_block(shape, np.dtype(np.float32))
  for start in range(0, shape[0], step):
    yield configs.decode(np.arange(start, min(start + step, shape[0])))
