"""Variables of a SavedModel are read as TensorFlow reads them, and nothing else is."""

import os
from pathlib import Path
import shutil
import struct

import numpy as np
import pytest

from tests.support import saved_models
from tests.support.saved_models import entry, header, key, table
from tpugraphs_jax.rankers import tensor_bundle

RECORDED = Path(__file__).parents[1] / "data" / "saved_model"
SHAPES = [(3, 2), (2,), (), (0, 4), *[(1, 1)] * 9]


def arrays():
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def assert_equal(found, expected):
  for array, value in zip(found, expected, strict=True):
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, value)


def test_a_file_of_tensorflow_is_read_as_tensorflow_reads_it():
  with np.load(RECORDED / "weights.npz") as file:
    expected = [file[f"arr_{number}"] for number in range(len(file.files))]
  assert len(expected) == 21
  assert_equal(tensor_bundle.read(RECORDED), expected)


@pytest.mark.parametrize("options", [{}, {"entries": 1}, {"entries": 100, "interval": 16}])
def test_the_order_is_that_of_the_numbers_for_any_blocks(options, tmp_path):
  assert_equal(
    tensor_bundle.read(saved_models.write(tmp_path, arrays(), **options)), arrays()
  )  # variables/10 comes before variables/2 in the file


def test_files_may_be_links_as_in_a_cache_of_downloads(tmp_path):
  saved_models.write(tmp_path / "blobs", arrays())
  (tmp_path / "model/variables").mkdir(parents=True)
  for path in (tmp_path / "blobs/variables").iterdir():
    (tmp_path / "model/variables" / path.name).symlink_to(path)
  assert_equal(tensor_bundle.read(tmp_path / "model"), arrays())


ONE = np.ones((2, 3), np.float32)
FIRST = {b"": header()}
TWO_SHARDS, BIG_ENDIAN = header(shards=2), header(endianness=1)
HUGE = 2**62


@pytest.mark.parametrize(
  "pairs, complaint",
  [
    ({}, "a block has no entries"),
    ({key(0): entry(ONE, 0)}, "not the index of one little-endian file"),
    ({b"": TWO_SHARDS, key(0): entry(ONE, 0)}, "not the index of one little-endian file"),
    ({b"": BIG_ENDIAN, key(0): entry(ONE, 0)}, "not the index of one little-endian file"),
    ({b"": b"\xff\xff", key(0): entry(ONE, 0)}, "damaged"),
    (FIRST | {b"model/layer/kernel": entry(ONE, 0)}, "it has 0 variables"),
    (FIRST | {key(0): entry(ONE, 0), key(2): entry(ONE, 0)}, "it has 2 variables, expected"),
    (FIRST | {key(0): entry(ONE, 0, dtype=saved_models.DOUBLE)}, "variables/0: it is of data type"),
    (FIRST | {key(0): entry(ONE, 0, extra=saved_models.message((7, b"")))}, "whole float32"),
    (FIRST | {key(0): entry(ONE, 0, extra=saved_models.message((3, 1)))}, "ends beyond variables."),
    (FIRST | {key(0): entry(ONE, 1)}, "ends beyond variables.data"),
    (FIRST | {key(0): entry(ONE, HUGE)}, "ends beyond variables.data"),
    (FIRST | {key(0): entry(ONE, 0, size=20)}, "has 20 bytes, expected those of float32"),
    (FIRST | {key(0): entry(ONE, 0, extra=saved_models.message((5, b"")))}, "is no number"),
    (FIRST | {key(0): entry(np.ones([1] * 9, np.float32), 0)}, "9 dimensions"),
    (FIRST | {key(0): b"\x08"}, "damaged"),
    (FIRST | {key(0): entry(ONE, 0), key(1): entry(ONE, 0)}, "have more bytes than"),
    (FIRST | {key(0): entry(ONE, 0), b"x" * 5000: b""}, "does not fit into it"),
    (FIRST | {key(0): entry(ONE, 0, crc=1)}, "the CRC of variables/0 does not fit"),
    (FIRST | {key(0): entry(ONE * np.nan, 0)}, "the CRC of variables/0 does not fit"),
  ],
)
def test_an_index_with_anything_else_is_refused(pairs, complaint, tmp_path):
  saved_models.write_files(tmp_path, table(pairs), ONE.tobytes())
  refuse(tmp_path, complaint)


def refuse(folder, complaint, kind=ValueError):
  with pytest.raises(kind) as found:
    tensor_bundle.read(folder)
  message = str(found.value)
  assert complaint in message and "\n" not in message
  assert message.startswith(str(folder / "variables"))


def test_values_that_are_not_finite_are_refused(tmp_path):
  saved_models.write(tmp_path, [ONE, np.array([1, np.inf], np.float32)])
  refuse(tmp_path, "variables/1 has values that are not finite")


def test_compressed_blocks_are_refused(tmp_path):
  saved_models.write(tmp_path, arrays(), kind=1)
  refuse(tmp_path, "a block is compressed (kind 1)")


def test_files_that_are_cut_short_are_refused(tmp_path):
  saved_models.write(tmp_path, [ONE, ONE[0]], entries=2)
  for name in (tensor_bundle.INDEX, tensor_bundle.DATA):
    path = tmp_path / "variables" / name
    content = path.read_bytes()
    for size in range(0, len(content) - len(saved_models.GRAPH_VALUE), 3):
      path.write_bytes(content[:size])
      refuse(tmp_path, "variables")
    path.write_bytes(content)


def test_any_other_byte_is_refused(tmp_path):
  saved_models.write(tmp_path, [ONE, ONE[0]], entries=2)
  index, data = (
    tmp_path / "variables" / name for name in (tensor_bundle.INDEX, tensor_bundle.DATA)
  )
  meta = saved_models.block([], 3)  # empty, and not read
  at = index.read_bytes().index(meta)
  read = [*range(at), *range(at + len(meta), index.stat().st_size - 48)]
  moments = ONE.nbytes + ONE[0].nbytes  # of Adam: not read
  for path, places in ((index, read), (data, range(moments, 2 * moments))):
    content = path.read_bytes()
    for place in places:
      path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
      refuse(tmp_path, "CRC")
    path.write_bytes(content)
  assert_equal(tensor_bundle.read(tmp_path), [ONE, ONE[0]])


@pytest.mark.parametrize("place", range(48))
def test_a_footer_with_other_places_is_refused(place, tmp_path):
  """Or reads the same: padding, and the place of the meta data."""
  saved_models.write(tmp_path, [ONE])
  path = tmp_path / "variables" / tensor_bundle.INDEX
  content = bytearray(path.read_bytes())
  content[place - 48] ^= 0x81
  path.write_bytes(content)
  try:
    found = tensor_bundle.read(tmp_path)
  except ValueError as error:
    assert "\n" not in str(error)
  else:
    assert_equal(found, [ONE])


def test_blocks_without_end_or_entries_are_refused(tmp_path):
  magic = struct.pack("<Q", saved_models.MAGIC)
  saved_models.write_files(tmp_path, b"\xff" * 39 + b"\0" + magic, b"")
  refuse(tmp_path, "a number has too many bytes")
  empty = saved_models.block([], 1)
  places = b"\0\0\0" + saved_models.varint(len(empty) - 5)
  saved_models.write_files(tmp_path, empty + places.ljust(40, b"\0") + magic, b"")
  refuse(tmp_path, "a block has no entries")


def test_a_block_that_comes_twice_is_refused(tmp_path):
  block = saved_models.block([(b"", header()), (key(0), entry(ONE, 0))], 1)
  handle = b"\0" + saved_models.varint(len(block) - 5)
  index = saved_models.block([(b"w", handle), (b"x", handle)], 1)
  places = b"\0\0" + saved_models.varint(len(block)) + saved_models.varint(len(index) - 5)
  magic = struct.pack("<Q", saved_models.MAGIC)
  saved_models.write_files(tmp_path, block + index + places.ljust(40, b"\0") + magic, ONE.tobytes())
  refuse(tmp_path, "its keys are not sorted")


def test_files_that_are_missing_too_large_or_no_files_are_refused(tmp_path):
  refuse(tmp_path, "no such file", FileNotFoundError)
  saved_models.write(tmp_path, [ONE])
  index, data = (
    tmp_path / "variables" / name for name in (tensor_bundle.INDEX, tensor_bundle.DATA)
  )
  os.truncate(data, tensor_bundle.MOST_BYTES + 1)  # has no blocks on the disk
  refuse(tmp_path, "expected at most 1,073,741,824")
  os.truncate(data, ONE.nbytes)
  os.truncate(index, 2**24 + 1)
  refuse(tmp_path, "expected at most 16,777,216")
  index.unlink()
  index.symlink_to("/dev/zero")
  refuse(tmp_path, "expected the variables of a SavedModel", FileNotFoundError)
  index.unlink()
  os.mkfifo(index)
  refuse(tmp_path, "expected the variables of a SavedModel", FileNotFoundError)
  index.unlink()
  shutil.copytree(RECORDED / "variables", index)
  refuse(tmp_path, "a folder", FileNotFoundError)
