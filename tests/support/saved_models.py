"""Writes the variables of a SavedModel in TensorFlow's format, by the format's definition."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

MAGIC = 0xDB4775248B80FB57
FLOAT, DOUBLE, STRING = 1, 2, 7  # DataType
GRAPH, GRAPH_VALUE = b"_CHECKPOINTABLE_OBJECT_GRAPH", b"\x05graph"  # a string with its length


def varint(number: int) -> bytes:
  digits = []
  while number >= 128:
    digits.append(128 + number % 128)
    number //= 128
  return bytes([*digits, number])


def masked_crc(data: bytes) -> int:
  """CRC-32C of the reflected Castagnoli polynomial, bit by bit, rotated and shifted."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc % 2 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def message(*fields: tuple[int, int | bytes]) -> bytes:
  """A protobuf message; bytes are messages or strings."""
  parts = []
  for number, value in fields:
    is_bytes = isinstance(value, bytes)
    parts.append(varint(8 * number + 2 * is_bytes))
    parts.append(varint(len(value)) + value if is_bytes else varint(value))
  return b"".join(parts)


def header(shards: int = 1, endianness: int = 0) -> bytes:
  return message((1, shards), (2, endianness), (3, message((1, 1))))


def entry(
  array: np.ndarray, offset: int, *, dtype: int = FLOAT, extra: bytes = b"", **wrong: int
) -> bytes:
  """A `BundleEntryProto`; `wrong` replaces `size` or `crc`."""
  data = array.tobytes()
  dims = [(2, message((1, size))) for size in array.shape]
  size, crc = wrong.get("size", len(data)), wrong.get("crc", masked_crc(data))
  fixed = varint(8 * 6 + 5) + crc.to_bytes(4, "little")
  return message((1, dtype), (2, message(*dims)), (4, offset), (5, size)) + fixed + extra


def block(pairs: Iterable[tuple[bytes, bytes]], interval: int, kind: int = 0) -> bytes:
  """A block with its trailer; a whole key follows every `interval` entries."""
  content, restarts, last = b"", [], b""
  for number, (key, value) in enumerate(pairs):
    shared = 0
    if number % interval:
      while shared < min(len(key), len(last)) and key[shared] == last[shared]:
        shared += 1
    else:
      restarts.append(len(content))
    sizes = b"".join(map(varint, (shared, len(key) - shared, len(value))))
    content += sizes + key[shared:] + value
    last = key
  restarts = restarts or [0]
  content += b"".join(place.to_bytes(4, "little") for place in (*restarts, len(restarts)))
  content += bytes([kind])
  return content + masked_crc(content).to_bytes(4, "little")


def table(pairs: dict[bytes, bytes], *, entries: int = 4, interval: int = 3, kind: int = 0):
  """A table with blocks of so many entries."""
  pairs, data, handles = sorted(pairs.items()), b"", []
  for start in range(0, len(pairs), entries):
    part = pairs[start : start + entries]
    made = block(part, interval, kind)
    handles.append((part[-1][0] + b"~", varint(len(data)) + varint(len(made) - 5)))
    data += made
  places = b""
  for made in (block([], interval), block(handles, 1)):  # no meta blocks; the index
    places += varint(len(data)) + varint(len(made) - 5)
    data += made
  return data + places.ljust(40, b"\0") + MAGIC.to_bytes(8, "little")


def key(number: int) -> bytes:
  return f"variables/{number}/.ATTRIBUTES/VARIABLE_VALUE".encode()


def write(folder: Path, weights: list[np.ndarray], **options: int) -> Path:
  """Writes a SavedModel's variables, with moments of Adam and the graph of objects beside them."""
  data, pairs = b"", {b"": header()}
  slots = [
    (f"optimizer/_variables/{i}".encode(), np.zeros_like(array)) for i, array in enumerate(weights)
  ]
  graph = np.frombuffer(GRAPH_VALUE, np.uint8)
  for name, array in [*slots, *((key(i), array) for i, array in enumerate(weights))]:
    pairs[name] = entry(array, len(data))
    data += array.tobytes()
  pairs[GRAPH] = entry(graph, len(data), dtype=STRING)
  write_files(folder, table(pairs, **options), data + GRAPH_VALUE)
  return folder


def write_files(folder: Path, index: bytes, data: bytes) -> None:
  home = folder / "variables"
  home.mkdir(parents=True, exist_ok=True)
  (home / "variables.index").write_bytes(index)
  (home / "variables.data-00000-of-00001").write_bytes(data)
