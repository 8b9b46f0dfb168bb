"""Reads the variables of a Keras model that TensorFlow saved, without TensorFlow.

A SavedModel has them in its folder `variables`, as a tensor bundle of two files:

    variables.index                  a table: name of a tensor -> dtype, shape, offset, size, CRC
    variables.data-00000-of-00001    the bytes of all tensors, little-endian

The table has LevelDB's format: blocks of sorted keys, an index block with the places of these
blocks, and a footer with the place of the index block. Keys of a block share prefixes. A CRC-32C
follows every block. Its values are messages `BundleHeaderProto` (of the empty key) and
`BundleEntryProto`. Keras names the variables of a model `variables/0`, `variables/1` and so on, in
the order of its weights; other names have the state of optimizer and metrics.

Sources: TensorFlow's `core/protobuf/tensor_bundle.proto`, `core/util/tensor_bundle` and
`core/lib/io/table_format.txt`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import math
from pathlib import Path
import re
import struct
from typing import Any, BinaryIO, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
import numpy as np
from tensorboardX.record_writer import masked_crc32c

from tpugraphs_jax.infra import files, trust

INDEX, DATA = "variables.index", "variables.data-00000-of-00001"
MOST_BYTES = 2**30  # of the data: 89 million parameters with both moments of Adam
_MOST_INDEX_BYTES = 2**24
_MOST_KEY_BYTES = 2**12
_MOST_VARINT_BYTES = 9  # beside the last: 64 bits
_MOST_DIMS = 8
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER = 40 + len(_MAGIC)
_TRAILER = struct.Struct("<BI")  # of a block: compression, CRC
_FLOAT = 1  # DataType
# Fields of BundleHeaderProto, BundleEntryProto, TensorShapeProto and its Dim.
_SHARDS, _ENDIANNESS = 1, 2
_DTYPE, _SHAPE, _SHARD, _OFFSET, _SIZE, _CRC, _SLICES = range(1, 8)
_DIM, _DIM_SIZE = 2, 1
_VARIABLE = re.compile(rb"variables/(\d{1,6})/\.ATTRIBUTES/VARIABLE_VALUE")


def read(folder: Path) -> list[np.ndarray]:
  """The variables `[...]` float32 of a saved model, in the order of Keras' weights.

  Args:
    folder: a SavedModel, with a folder `variables`.

  Raises:
    FileNotFoundError: it has no such files.
    ValueError: a file is damaged, too large, or holds something else.
  """
  index, data = (folder / "variables" / name for name in (INDEX, DATA))
  for path, most in ((index, _MOST_INDEX_BYTES), (data, MOST_BYTES)):
    files.check_file(path, "the variables of a SavedModel of TensorFlow 2")
    if (size := path.stat().st_size) > most:
      raise ValueError(f"{path} has {size:,} bytes, expected at most {most:,}")
  advice = "copy it again, or save the model again"
  with trust.reading(index, advice):
    entries = _variables(dict(_table(index.read_bytes())), data.stat().st_size)
  with trust.reading(data, advice), open(data, "rb") as file:
    return [_tensor(file, name, entry) for name, entry in entries]


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
  """Keys and values of a table, in order."""
  if len(data) < _FOOTER or not data.endswith(_MAGIC):
    raise ValueError("its end is not the end of a table")
  blocks, last = data[:-_FOOTER], None
  (_, _, *index), _ = _varints(data[-_FOOTER:], 0, 4)
  for _, handle in _block(blocks, *index):
    for key, value in _block(blocks, *_varints(handle, 0, 2)[0]):
      if last is not None and key <= last:
        raise ValueError("its keys are not sorted")
      yield key, value
      last = key


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
  """Keys and values of a block."""
  end = offset + size
  if end + _TRAILER.size > len(data):
    raise ValueError("a block ends beyond the table")
  compression, crc = _TRAILER.unpack_from(data, end)
  if crc != masked_crc32c(data[offset : end + 1]):
    raise ValueError("the CRC of a block does not fit")
  if compression:
    raise ValueError(f"a block is compressed (kind {compression}), expected none")
  block, key, at = data[offset:end], b"", 0
  (restarts,) = struct.unpack("<I", block[-4:])
  entries = len(block) - 4 * (restarts + 1)
  if entries <= 0:
    raise ValueError("a block has no entries")
  while at < entries:
    (shared, rest, length), at = _varints(block, at, 3)
    value_at = at + rest
    if shared > len(key) or shared + rest > _MOST_KEY_BYTES or value_at + length > entries:
      raise ValueError("an entry of a block does not fit into it")
    key = key[:shared] + block[at:value_at]
    at = value_at + length
    yield key, block[value_at:at]


def _varints(data: bytes, at: int, count: int) -> tuple[list[int], int]:
  """`count` numbers of seven bits a byte from `at`, and where they end."""
  numbers = []
  for _ in range(count):
    number, start = 0, at
    while data[at] & 0x80:
      number |= (data[at] & 0x7F) << 7 * (at - start)
      at += 1
      if at - start > _MOST_VARINT_BYTES:
        raise ValueError("a number has too many bytes")
    numbers.append(number | data[at] << 7 * (at - start))
    at += 1
  return numbers, at


def _fields(message: bytes) -> dict[int, list[Any]]:
  """Numbers, messages and strings of a serialized message, by the number of their field."""
  fields = collections.defaultdict(list)
  for field in UnknownFieldSet(Empty.FromString(message)):
    fields[field.field_number].append(field.data)
  return fields


def _number(fields: dict[int, list[Any]], field: int) -> int:
  """The last value of a field, 0 where it is absent."""
  value = fields[field][-1] if fields[field] else 0
  if not isinstance(value, int):
    raise ValueError(f"field {field} is no number")
  return value


class _Entry(NamedTuple):
  """Where a tensor is in the data; fields as in `BundleEntryProto`."""

  shape: tuple[int, ...]
  offset: int
  size: int
  crc: int


def _entry(message: bytes, data_bytes: int) -> _Entry:
  """The entry of a `BundleEntryProto`, checked to be a float32 array in data of `data_bytes`."""
  fields = _fields(message)
  dims = [_fields(dim) for shape in fields[_SHAPE] for dim in _fields(shape)[_DIM]]
  if len(dims) > _MOST_DIMS:
    raise ValueError(f"it has {len(dims)} dimensions, expected at most {_MOST_DIMS}")
  shape = tuple(_number(dim, _DIM_SIZE) for dim in dims)
  entry = _Entry(shape, *(_number(fields, field) for field in (_OFFSET, _SIZE, _CRC)))
  if (dtype := _number(fields, _DTYPE)) != _FLOAT or fields[_SLICES]:
    raise ValueError(f"it is of data type {dtype}, expected {_FLOAT}: a whole float32 array")
  if _number(fields, _SHARD) or entry.offset + entry.size > data_bytes:
    raise ValueError(f"it ends beyond {DATA}")
  if entry.size != 4 * math.prod(shape):
    raise ValueError(f"it has {entry.size} bytes, expected those of float32 {list(shape)}")
  return entry


def _variables(table: dict[bytes, bytes], data_bytes: int) -> list[tuple[str, _Entry]]:
  """Name and entry of the variables of a model, in their order."""
  header = _fields(table.get(b"", b""))
  if header[_SHARDS] != [1] or any(header[_ENDIANNESS]):
    raise ValueError("it is not the index of one little-endian file")
  values = {int(match[1]): table[key] for key in table if (match := _VARIABLE.fullmatch(key))}
  if not values or max(values) != len(values) - 1:
    raise ValueError(f"it has {len(values)} variables, expected variables/0, variables/1, ...")
  entries = []
  for number in range(len(values)):
    name = f"variables/{number}"
    try:
      entries.append((name, _entry(values[number], data_bytes)))
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from None
  if sum(entry.size for _, entry in entries) > data_bytes:
    raise ValueError(f"its variables have more bytes than {DATA}")
  return entries


def _tensor(file: BinaryIO, name: str, entry: _Entry) -> np.ndarray:
  """The values of an entry, `entry.shape` float32."""
  file.seek(entry.offset)
  data = file.read(entry.size)
  if len(data) != entry.size or masked_crc32c(data) != entry.crc:
    raise ValueError(f"the CRC of {name} does not fit")
  array = np.frombuffer(data, "<f4").reshape(entry.shape)
  if not np.isfinite(array).all():
    raise ValueError(f"{name} has values that are not finite")
  return array
