"""Kernels with tiles as a tile collection: graphs, features, files and resumed runs."""

import contextlib
import errno
import json
import os
import types

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import collect, datasets, graph
from tpugraphs_jax.columns import opcode_names
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import labels, tile_collection
from tpugraphs_jax.tuning.tiles import Tiles, TileTime

_SOURCE = """
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp


def doubled(tile):
  rows, columns = tile["rows"], tile["columns"]
  assert rows != 24, "24 does not divide 64"
  spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * FACTOR

  return lambda x: pl.pallas_call(
    kernel,
    grid=(x.shape[0] // rows, x.shape[1] // columns),
    in_specs=[spec],
    out_specs=spec,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
  )(x)


_TILES = [{"rows": rows, "columns": columns} for rows in (8, 16, 32) for columns in (128, 256)]
_X = jax.ShapeDtypeStruct((64, 512), jnp.float32)
_REFUSED = {"rows": 24, "columns": 128}
TILES = {"doubled": (doubled, (_X,), _TILES), "other": (doubled, (_X,), [_REFUSED, *_TILES[:2]])}
SPLIT = {"other": "test"}
"""


def product(tile):
  m, n, k = tile["m"], tile["n"], tile["k"]

  def kernel(x_ref, y_ref, out_ref):
    out_ref[...] += jnp.dot(x_ref[...], y_ref[...])

  def multiply(x, y):
    out = pl.pallas_call(
      kernel,
      grid=(x.shape[0] // m, y.shape[1] // n, x.shape[1] // k),
      in_specs=[
        pl.BlockSpec((m, k), lambda i, j, step: (i, step)),
        pl.BlockSpec((k, n), lambda i, j, step: (step, j)),
      ],
      out_specs=pl.BlockSpec((m, n), lambda i, j, step: (i, j)),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32),
    )(x, y)
    return jnp.sin(out)

  return jax.jit(multiply)


def _product_calls(*chosen):
  shapes = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 32), "float32")
  return [Call(product(tile), shapes) for tile in chosen]


_PRODUCT_TILES = {"m": 16, "n": 32, "k": 64}, {"m": 32, "n": 8, "k": 128}


def test_a_tile_has_its_grid_its_block_and_its_values():
  found = tile_collection.features(_product_calls(*_PRODUCT_TILES), _PRODUCT_TILES)
  padded = lambda *sizes: [*sizes, *[0] * (6 - len(sizes)), sum(sizes), np.prod(sizes)]
  np.testing.assert_array_equal(
    found,
    [
      padded(4, 1, 2) + padded(16, 32) + padded(16, 32, 64),
      padded(2, 4, 1) + padded(32, 8) + padded(32, 8, 128),
    ],
  )


def test_the_graph_has_the_operations_of_a_block_and_times_over_those_of_the_first_tile():
  times = [TileTime(tile, ms) for tile, ms in zip(_PRODUCT_TILES, (2e-3, 1.5e-3))]
  found = tile_collection.op_graph("product", _product_calls(*_PRODUCT_TILES), times)
  opcodes = [opcode_names()[number] for number in found.node_opcode.tolist()]
  assert opcodes.count("dot") == 1 and "while" in opcodes and "sine" in opcodes
  dot = found.node_feat[opcodes.index("dot")].tolist()
  assert {16.0, 32.0} <= set(dot) and 64.0 not in dot  # the block of the first tile
  assert found.configs.runtime_ns.tolist() == [2000, 1500]
  assert found.configs.labels.tolist() == [1.0, 0.75]


@pytest.mark.parametrize(
  "function, tile, said",
  [
    (product, {"m": 16, "n": 32, "k": 64, "how": "fast"}, "how.*expected up to 6 integers"),
    (lambda tile: lambda x, y: x @ y, {"m": 16}, "has no pallas_call, expected a Pallas kernel"),
  ],
)
def test_what_has_no_features_is_refused(function, tile, said):
  shapes = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128, 32), "float32")
  with pytest.raises(ValueError, match=said):
    tile_collection.features([Call(function(tile), shapes)], [tile])


@pytest.fixture
def source(tmp_path, monkeypatch):
  """A file of kernels; tiles take microseconds as they have rows; 24 and 32 are refused."""
  path = tmp_path / "kernels.py"
  path.write_text(_SOURCE.replace("FACTOR", "2"))

  def timed(function, *args, tiles: list, target):
    assert target == "tpu:v6e" and args
    times = [TileTime(t, 1e-3 * t["rows"]) for t in tiles if t["rows"] not in (24, 32)]
    refused = [TileTime(t, why="too large") for t in tiles if t["rows"] in (24, 32)]
    calls_of_tiles.append([function, *tiles])
    return Tiles("", target, (*reversed(times), *refused))

  calls_of_tiles = []
  versions = {"target": "tpu:v6e", "libtpu": "1", "jax": "2", "simulator": "3"}
  monkeypatch.setattr(tile_collection, "tune_tiles", timed)
  monkeypatch.setattr(tpu, "as_device", lambda _: contextlib.nullcontext())
  labeller = types.SimpleNamespace(name="tpu_estimate", versions=lambda: versions)
  monkeypatch.setattr(labels, "create", lambda *_, **__: labeller)
  return path, calls_of_tiles


def _arguments(path, out, *more):
  options = "--label tpu_estimate --target v6e --configs 5 --collection tile:own:tried --quiet"
  return ["--tiles", str(path), *options.split(), "--out", str(out), *more]


def test_collect_writes_each_kernel_once(source, tmp_path, capsys):
  (path, asked), out = source, tmp_path / "data"
  assert collect.main(_arguments(path, out)) == 0
  assert "tiles of 2 of 2 kernels are in" in capsys.readouterr().out
  assert [len(each) - 1 for each in asked] == [5, 3]
  folder = datasets.Collection("tile:own:tried").folder(out / "npz", "train")
  stored = npz.read_tile(folder / "doubled.npz")
  drawn = [tile for tile in asked[0][1:] if tile["rows"] < 32]  # in the order of the file
  assert stored.configs.runtime_ns.tolist() == [1000 * tile["rows"] for tile in drawn]
  assert stored.configs.config_feat[:, 16:18].tolist() == [list(tile.values()) for tile in drawn]
  other = npz.read_tile(folder.parent / "test" / "other.npz")
  assert other.configs.config_feat[:, 16].tolist() == [8, 8]  # without the refused tile
  lines = [json.loads(line) for line in (folder / "doubled.jsonl").read_text().splitlines()]
  errors = [line.get("error") for line in lines if "numbers" in line]
  assert len(errors) == 5 and errors.count("too large") == 5 - len(drawn)
  assert lines[-1]["about"]["split"] == "train"
  said = datasets.label_kind(str(out / "npz"), datasets.Collection("tile:own:tried"))
  assert said == "ESTIMATE of a compiler (tpu_estimate, tpu:v6e, libtpu 1), no measurement"

  assert collect.main(_arguments(path, out)) == 0
  assert len(asked) == 2  # nothing again

  (folder / "doubled.npz").unlink()
  assert collect.main(_arguments(path, out)) == 0
  assert len(asked) == 3
  path.write_text(_SOURCE.replace("FACTOR", "3"))  # another program
  assert collect.main(_arguments(path, out)) == 0
  assert len(asked) == 5


def test_a_kernel_that_cannot_be_collected_is_told_and_the_others_are_written(
  source, tmp_path, capsys
):
  path, _ = source
  path.write_text(_SOURCE.replace("FACTOR", "2").replace("_TILES[:2]", "_TILES[4:]"))
  assert collect.main(_arguments(path, tmp_path / "data")) == 1
  assert "failed: other: 0 of 3 tiles have a time: too large" in capsys.readouterr().err
  assert list((tmp_path / "data").rglob("doubled.npz"))


def test_a_full_disk_ends_the_collection(source, tmp_path, capsys, monkeypatch):
  path, asked = source

  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(npz, "write_tile", full)
  assert collect.main(_arguments(path, tmp_path / "data")) == 2
  assert "No space left" in capsys.readouterr().err
  assert len(asked) == 1


@pytest.mark.parametrize(
  "more, said",
  [
    (["--collection", "layout:own:tried"], "expected tile:own:NAME"),
    (["--label", "measured"], "--label=measured, expected tpu_estimate of tiles"),
    (["--operands"], "are for --programs"),
    (["--configs", "1"], "expected at least 2"),
  ],
)
def test_wrong_options_are_one_line(source, tmp_path, capsys, more, said):
  assert collect.main(_arguments(source[0], tmp_path, *more)) == 2
  assert said in capsys.readouterr().err


def test_splits_of_a_file_are_checked(source, tmp_path, capsys):
  path, _ = source
  path.write_text(_SOURCE.replace('"test"', '"best"').replace("FACTOR", "2"))
  assert collect.main(_arguments(path, tmp_path)) == 2
  assert f"'best', expected one of {', '.join(graph.SPLITS)}" in capsys.readouterr().err
