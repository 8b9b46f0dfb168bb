"""The released files: read, checked, written, and their configurations factored."""

from __future__ import annotations

import errno
import zipfile

import numpy as np
import pytest

from tests.support import comparing, random_graphs, recorded
from tpugraphs_jax.data import npz

_REAL = sorted(recorded.NPZ.rglob("*.npz"))


def _graph_arrays(rng, nodes):
  return {
    "node_feat": rng.normal(size=(nodes, 140)).astype(np.float32),
    "node_opcode": rng.integers(0, 121, nodes).astype(np.uint8),
    "edge_index": rng.integers(0, nodes, (2 * nodes, 2)),
  }


def _tile_arrays(*, nodes=7, configs=5, seed=0):
  rng = np.random.default_rng(seed)
  return _graph_arrays(rng, nodes) | {
    "config_feat": rng.normal(size=(configs, 24)).astype(np.float32),
    "config_runtime": rng.integers(1, 2**40, configs),
    "config_runtime_normalizers": rng.integers(1, 2**40, configs),
  }


def _layout_arrays(*, nodes=9, configs=6, config_nodes=4, seed=0):
  rng = np.random.default_rng(seed)
  shape = (configs, config_nodes, 18)
  return _graph_arrays(rng, nodes) | {
    "node_config_feat": rng.integers(-1, 6, shape).astype(np.float32),
    "node_config_ids": rng.choice(nodes, config_nodes, replace=False),
    "node_splits": np.array([[0, nodes // 2, nodes]]),
    "config_runtime": rng.integers(1, 2**40, configs),
  }


_every_array = pytest.mark.parametrize(
  "kind, name", [(kind, name) for kind, names in recorded.MEMBERS.items() for name in names]
)
_both_kinds = pytest.mark.parametrize("kind", ["tile", "layout"])
_MAKERS = {"tile": _tile_arrays, "layout": _layout_arrays}
_READERS = {"tile": npz.read_tile, "layout": npz.read_layout}


def _save(path, arrays):
  np.savez_compressed(path, **arrays)
  return path


def _expect_error(kind, path, *words):
  with pytest.raises(npz.NpzError) as caught:
    _READERS[kind](path)
  message = str(caught.value)
  assert "\n" not in message
  for word in (str(path), *words):
    assert word in message


def _expect_change_refused(tmp_path, kind, name, value, *words):
  path = _save(tmp_path / "g.npz", _MAKERS[kind]() | {name: value})
  _expect_error(kind, path, name, *words)


# Valid files


def _assert_survives(path, kind, again):
  """The file is read and written without a change of any array."""
  {"tile": npz.write_tile, "layout": npz.write_layout}[kind](again, _READERS[kind](path))
  with np.load(path) as before, np.load(again) as after:
    assert after.files == recorded.MEMBERS[kind] and set(before.files) == set(after.files)
    comparing.assert_same_trees(dict(after), dict(before))


@recorded.needs_npz
@pytest.mark.parametrize("path", _REAL, ids=lambda path: "-".join(path.parts[-5:]))
def test_released_files_survive_reading_and_writing_bit_for_bit(path, tmp_path):
  _assert_survives(path, "tile" if "tile" in path.parts else "layout", tmp_path / path.name)


@_both_kinds
def test_every_array_is_read_into_its_field(tmp_path, kind):
  arrays, path = _MAKERS[kind](), tmp_path / "bert_1.npz"
  _save(path, arrays)
  _assert_survives(path, kind, tmp_path / "again.npz")
  op_graph = _READERS[kind](path)
  assert op_graph.name == "bert_1" and op_graph.configs.is_labelled
  np.testing.assert_array_equal(
    random_graphs.config_runtime(op_graph.configs), arrays["config_runtime"]
  )
  np.testing.assert_array_equal(op_graph.config_node, arrays.get("node_config_ids", []))
  np.testing.assert_array_equal(op_graph.node_splits, [0, 7] if kind == "tile" else [0, 4, 9])


def _narrow(arrays):
  is_wide = lambda name: name != "config_runtime_normalizers" and arrays[name].dtype.kind in "iu"
  return arrays | {name: arrays[name].astype(np.int32) for name in filter(is_wide, arrays)}


_FORMS = {
  "narrow": (np.savez_compressed, _narrow),
  "wide": (
    np.savez_compressed,
    lambda arrays: arrays | {"node_opcode": arrays["node_opcode"].astype(np.int64)},
  ),
  "fortran": (
    np.savez_compressed,
    lambda arrays: {k: np.asfortranarray(v) for k, v in arrays.items()},
  ),
  "stored in reverse": (np.savez, lambda arrays: dict(reversed(arrays.items()))),
}


@pytest.mark.parametrize("form", _FORMS)
@_both_kinds
def test_every_form_of_a_file_gives_the_same_graph(tmp_path, kind, form):
  arrays = _MAKERS[kind]()
  arrays["config_runtime"] %= 2**31 - 1
  save, change = _FORMS[form]
  save(tmp_path / "other.npz", **change(arrays))
  comparing.assert_same_graph(
    _READERS[kind](tmp_path / "other.npz"), _READERS[kind](_save(tmp_path / "g.npz", arrays))
  )


@_both_kinds
@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_later_formats_of_npy_give_the_same_graph(tmp_path, kind, version):
  path, arrays = _save(tmp_path / "x.npz", _MAKERS[kind]()), _MAKERS[kind]()
  (later := tmp_path / "later").mkdir()
  with zipfile.ZipFile(later / "x.npz", "w") as archive:
    for name, array in arrays.items():
      with archive.open(f"{name}.npy", "w") as stream:
        np.lib.format.write_array(stream, array, version)
  comparing.assert_same_graph(_READERS[kind](later / "x.npz"), _READERS[kind](path))


def test_a_header_of_gigabytes_is_refused_before_memory_is_taken(tmp_path):
  with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
    archive.writestr("node_feat.npy", np.lib.format.magic(2, 0) + b"\xff" * 64)
  with npz.NpzArchive(tmp_path / "x.npz") as archive:
    with pytest.raises(npz.NpzError, match="header of 4294967295 bytes"):
      archive.member("node_feat")


def test_hidden_files_are_no_graphs(tmp_path):
  folder = tmp_path / "tile" / "xla" / "valid"
  folder.mkdir(parents=True)
  whole = _save(folder / "k.npz", _tile_arrays())
  for name in ("._k.npz", ".k.npz"):
    (folder / name).write_bytes(b"\0\5\x16\7")
  assert npz.split_files(tmp_path, "tile:xla", "valid") == [whole]
  whole.unlink()
  with pytest.raises(FileNotFoundError, match="none anywhere"):
    npz.split_files(tmp_path, "tile:xla", "valid")


def test_splits_with_one_axis_or_without_the_end_mean_the_same(tmp_path):
  for splits in ([0, 4, 9], [0, 4], [[0, 4, 9]], [[0, 4]]):
    arrays = _layout_arrays() | {"node_splits": np.array(splits)}
    op_graph = npz.read_layout(_save(tmp_path / "g.npz", arrays))
    np.testing.assert_array_equal(op_graph.node_splits, [0, 4, 9])


@_both_kinds
def test_zero_runtimes_throughout_mean_unlabelled(tmp_path, kind):
  arrays = _MAKERS[kind]()
  arrays["config_runtime"][:] = 0
  op_graph = _READERS[kind](_save(tmp_path / "g.npz", arrays))
  assert not op_graph.configs.is_labelled
  assert len(op_graph.configs) == len(arrays["config_runtime"])


@_both_kinds
def test_smallest_graph_is_read_and_written(tmp_path, kind):
  arrays = _MAKERS[kind](nodes=1, configs=1, **({"config_nodes": 1} if kind == "layout" else {}))
  arrays["edge_index"] = np.zeros((0, 2), np.int64)
  if kind == "layout":
    arrays["node_splits"] = np.array([[0, 1]])
  path = _save(tmp_path / "g.npz", arrays)
  op_graph = _READERS[kind](path)
  assert (op_graph.num_nodes, op_graph.num_edges, len(op_graph.configs)) == (1, 0, 1)
  _assert_survives(path, kind, tmp_path / "again.npz")


def test_range_ends_are_accepted(tmp_path):
  arrays = _layout_arrays()
  arrays["node_opcode"][:2] = 0, 120
  arrays["edge_index"][0] = 0, 8
  arrays["node_config_ids"][:2] = 0, 8
  arrays["node_config_ids"][2:] = 3, 4
  arrays["config_runtime"][:2] = 1, 2**62
  arrays["node_config_feat"][:, 0] = -1
  arrays["node_config_feat"][:, 1] = 5
  op_graph = npz.read_layout(_save(tmp_path / "g.npz", arrays))
  assert op_graph.configs.labels[1] == 2**62
  np.testing.assert_array_equal(op_graph.configs.decode(np.arange(6)), arrays["node_config_feat"])


# Malformed files


@_both_kinds
def test_truncated_file_is_refused_wherever_it_was_cut(tmp_path, kind):
  whole = _save(tmp_path / "whole.npz", _MAKERS[kind]()).read_bytes()
  path = tmp_path / "cut.npz"
  for length in [0, 1, 4, 30, *range(64, len(whole), 97), len(whole) - 1]:
    path.write_bytes(whole[:length])
    _expect_error(kind, path)


@_both_kinds
def test_flipped_bytes_never_give_another_graph_or_another_error(tmp_path, kind):
  arrays = _MAKERS[kind]()
  whole = _save(tmp_path / "whole.npz", arrays).read_bytes()
  expected = _READERS[kind](tmp_path / "whole.npz")
  path = tmp_path / "g.npz"
  rng = np.random.default_rng(0)
  refused = 0
  for position in rng.integers(0, len(whole), 300):
    data = bytearray(whole)
    data[position] ^= rng.integers(1, 256)
    path.write_bytes(data)
    try:
      comparing.assert_same_graph(_READERS[kind](path), expected)  # a byte without meaning
    except npz.NpzError as error:
      refused += 1
      assert "\n" not in str(error)
  assert refused > 200


@_every_array
def test_each_missing_array_is_named(tmp_path, kind, name):
  arrays = _MAKERS[kind]()
  del arrays[name]
  _expect_error(kind, _save(tmp_path / "g.npz", arrays), name, "is missing")


@_both_kinds
def test_extra_array_is_named(tmp_path, kind):
  _expect_change_refused(tmp_path, kind, "notes", np.zeros(3), "is not expected")


@_every_array
def test_each_wrong_dtype_is_named(tmp_path, kind, name):
  array = _MAKERS[kind]()[name]
  for wrong in (np.float64, np.complex64, object, "S3", array.dtype.newbyteorder(">")):
    changed = array.astype(wrong)
    if changed.dtype == array.dtype:
      continue  # one byte has no byte order
    _expect_change_refused(tmp_path, kind, name, changed)


@_every_array
def test_each_wrong_shape_is_refused(tmp_path, kind, name):
  arrays = _MAKERS[kind]()
  array = arrays[name]
  changes = [array[..., None], array.ravel()[0], np.stack([array, array])]
  if name != "edge_index":  # a graph may have no edges
    changes += [array[:0], array[:-1]]
  for changed in changes:
    path = _save(tmp_path / "g.npz", arrays | {name: changed})
    _expect_error(kind, path, "shape")


def _changed(array, value):
  array = array.copy()
  array.flat[-1] = value
  return array


@pytest.mark.parametrize(
  "kind, name, value, word",
  [
    ("tile", "node_feat", np.nan, "nan for node 6, column 139"),
    ("tile", "node_feat", np.inf, "inf"),
    ("tile", "node_opcode", 121, "0..120"),
    ("tile", "edge_index", 7, "0..6"),
    ("tile", "edge_index", -1, "0..6"),
    ("tile", "edge_index", 2**32, "0..6"),
    ("tile", "config_feat", np.nan, "finite"),
    ("tile", "config_runtime", -1, "nanoseconds"),
    ("tile", "config_runtime", 0, "1 zeros among 5"),
    ("tile", "config_runtime_normalizers", 0, "positive"),
    ("tile", "config_runtime_normalizers", -5, "positive"),
    ("layout", "node_feat", -np.inf, "-inf"),
    ("layout", "node_opcode", 255, "0..120"),
    ("layout", "edge_index", 9, "0..8"),
    ("layout", "node_config_ids", 9, "0..8"),
    ("layout", "node_config_ids", -1, "0..8"),
    ("layout", "node_splits", 10, "0, 4, 10"),
    ("layout", "config_runtime", -7, "-7"),
    ("layout", "node_config_feat", 6, "-1..5"),
    ("layout", "node_config_feat", -2, "-1..5"),
    ("layout", "node_config_feat", 0.5, "0.5"),
    ("layout", "node_config_feat", np.nan, "nan"),
    ("layout", "node_config_feat", np.inf, "inf"),
  ],
)
def test_each_value_out_of_range_is_named(tmp_path, kind, name, value, word):
  array = _changed(_MAKERS[kind]()[name], value)
  _expect_change_refused(tmp_path, kind, name, array, word)


def _with_kernels(**changes):
  """The arrays of a layout file whose three kernels have two nodes, one, and none."""
  rng = np.random.default_rng(1)
  return _layout_arrays() | {
    "kernel_runtime": rng.integers(0, 2**40, (6, 3)),
    "kernel_node": np.array([[0, 2], [0, 8], [1, 2]]),
    **changes,
  }


def test_kernels_of_a_layout_file_are_read_written_and_cut_with_its_configurations(tmp_path):
  arrays = _with_kernels()
  graph = npz.read_layout(_save(tmp_path / "g.npz", arrays))
  kernels = graph.configs.kernels
  np.testing.assert_array_equal(kernels.runtime, arrays["kernel_runtime"])
  np.testing.assert_array_equal(kernels.node, arrays["kernel_node"])
  assert (kernels.runtime.dtype, kernels.node.dtype) == (np.int64, np.int32)
  part = graph.configs.subset(np.array([4, 1])).kernels
  np.testing.assert_array_equal(part.runtime, arrays["kernel_runtime"][[4, 1]])
  npz.write_layout(tmp_path / "again.npz", graph)
  again = npz.read_layout(tmp_path / "again.npz")
  np.testing.assert_array_equal(again.configs.kernels.runtime, kernels.runtime)
  np.testing.assert_array_equal(again.configs.kernels.node, kernels.node)
  plain = npz.read_layout(_save(tmp_path / "plain.npz", _layout_arrays()))
  assert plain.configs.kernels is None
  assert plain.configs.subset(np.array([0])).kernels is None
  with pytest.raises(npz.NpzError, match="other kind"):
    npz.read_tile(tmp_path / "again.npz")


@pytest.mark.parametrize(
  "name, value, word",
  [
    ("kernel_runtime", None, "kernel_runtime is missing"),
    ("kernel_node", None, "kernel_node is missing"),
    ("kernel_runtime", np.ones((5, 3), int), "expected 6 in place of 5"),
    ("kernel_runtime", -np.ones((6, 3), int), "the value -1"),
    ("kernel_node", np.array([[3, 1]]), "column of kernels, has the value 3"),
    ("kernel_node", np.array([[1, 9]]), "column of nodes, has the value 9"),
    ("kernel_node", np.array([[1, -1]]), "column of nodes, has the value -1"),
    ("kernel_node", np.array([[1, 1], [1, 1]]), "do not ascend"),
    ("kernel_node", np.array([[1, 1], [0, 2]]), "do not ascend"),
  ],
)
def test_kernels_that_do_not_fit_their_graph_are_refused(tmp_path, name, value, word):
  arrays = _with_kernels(**{name: value})
  arrays = {key: array for key, array in arrays.items() if array is not None}
  _expect_error("layout", _save(tmp_path / "g.npz", arrays), word)


def test_repeated_configurable_node_is_named(tmp_path):
  _expect_change_refused(
    tmp_path, "layout", "node_config_ids", np.array([3, 5, 3, 1]), "node 3 2 times"
  )


@pytest.mark.parametrize("splits", [[[1, 9]], [[0, 5, 4, 9]], [[-1, 9]]])
def test_splits_that_do_not_rise_from_zero_are_refused(tmp_path, splits):
  _expect_change_refused(tmp_path, "layout", "node_splits", np.array(splits), "never fall")


def test_header_larger_than_the_data_is_refused_before_memory_is_taken(tmp_path):
  path = tmp_path / "g.npz"
  arrays = _tile_arrays()
  with zipfile.ZipFile(path, "w") as archive:
    for name, array in arrays.items():
      shape = (10**9, 140) if name == "node_feat" else array.shape
      with archive.open(f"{name}.npy", "w") as stream:
        np.lib.format.write_array_header_1_0(
          stream, {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
        )
        stream.write(array.tobytes())
  _expect_error("tile", path, "node_feat", "needs 560000000000 bytes")


# Finding files


def test_missing_data_is_explained(tmp_path):
  with pytest.raises(FileNotFoundError, match="data_root"):
    npz.split_files(tmp_path / "nowhere", "tile:xla", "train")
  (tmp_path / "tile" / "xla" / "train").mkdir(parents=True)
  with pytest.raises(FileNotFoundError):
    npz.split_files(tmp_path, "tile:xla", "train")
  _save(tmp_path / "tile" / "xla" / "train" / "a.npz", _tile_arrays())
  with pytest.raises(FileNotFoundError, match="tile/xla/train"):
    npz.split_files(tmp_path, "tile:xla", "valid")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_failure_of_the_system_is_no_damage_of_the_file(tmp_path, monkeypatch, number):
  path = tmp_path / "a.npz"
  np.savez(path, x=np.zeros(3))

  def fail(*args):
    raise OSError(number, "failed")

  with npz.NpzArchive(path) as archive:
    monkeypatch.setattr(npz.zipfile.ZipFile, "open", fail)
    with pytest.raises(OSError, match="failed"):
      archive.read("x")
  monkeypatch.setattr(npz.zipfile, "ZipFile", fail)
  with pytest.raises(OSError, match="failed") as error:
    npz.NpzArchive(path)
  assert error.value.filename == str(path)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reading_an_array_takes_four_times_its_bytes_at_most(tmp_path, save, order):
  array = np.asarray(np.arange(1 << 20).reshape(1 << 10, 1 << 10), order=order)
  save(tmp_path / "x.npz", node_feat=array)
  with npz.NpzArchive(tmp_path / "x.npz") as archive:
    comparing.assert_reading_takes(4, array.nbytes, lambda: archive.read("node_feat"))
    found = archive.read("node_feat")
  np.testing.assert_array_equal(found, array)
  assert found.flags.c_contiguous and not found.flags.writeable


def test_an_array_that_does_not_fit_beside_its_copy_is_refused(tmp_path, monkeypatch):
  array = np.asarray(np.ones((300, 200)), order="F")
  np.savez(tmp_path / "x.npz", x=array)
  with npz.NpzArchive(tmp_path / "x.npz") as archive:
    for available in (array.nbytes - 1, 2 * array.nbytes - 1):
      monkeypatch.setattr(npz.machine, "available", lambda available=available: available)
      with pytest.raises(npz.NpzError, match="available"):
        archive.read("x")
