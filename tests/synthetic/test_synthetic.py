"""The synthetic collections: format, statistics, determinism and labels."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax import columns, datasets, graph, synthetic
from tpugraphs_jax.columns import NODE
from tpugraphs_jax.data import npz
from tpugraphs_jax.synthetic import generate, read_ceiling
from tpugraphs_jax.synthetic.__main__ import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
  return generate(tmp_path_factory.mktemp("tiny"), scale="tiny", seed=3, progress=False)


@functools.cache
def read(data_root: Path, collection: str, split: str) -> list[graph.OpGraph]:
  reader = npz.read_tile if collection == "tile:xla" else npz.read_layout
  return [reader(path) for path in npz.split_files(data_root, collection, split)]


def every_graph(data_root: Path) -> list[graph.OpGraph]:
  pairs = itertools.product(datasets.RELEASED, graph.SPLITS)
  return [g for collection, split in pairs for g in read(data_root, collection, split)]


def digests(data_root: Path) -> dict[str, str]:
  out = data_root.parent
  return {
    str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in out.rglob("*.npz")
  }


def test_tiny_has_the_released_folders_and_is_small(tiny):
  for collection in datasets.RELEASED:
    counts = tuple(len(npz.split_files(tiny, collection, s)) for s in graph.SPLITS)
    assert counts == ((12, 4, 4) if collection == "tile:xla" else (4, 2, 2))
  assert sum(path.stat().st_size for path in tiny.parent.rglob("*.npz")) < 2e6


def test_edges_point_to_earlier_nodes_and_are_sorted(tiny):
  for g in every_graph(tiny):
    consumer, producer = g.edge_index.T
    assert (consumer > producer).all()
    order = np.lexsort((producer, consumer))
    np.testing.assert_array_equal(order, np.arange(g.num_edges))


def test_node_feature_sums_and_products_agree_with_dimensions(tiny):
  for g in every_graph(tiny):
    feat = g.node_feat.astype(np.int64)
    rank = np.count_nonzero(feat[:, columns.sizes(NODE["shape"])], axis=1)
    window = np.count_nonzero(feat[:, columns.sizes(NODE["window_size"])], axis=1)
    for name in columns.AGGREGATED:
      values = feat[:, NODE[name]]
      values, total, product = values[:, :-2], values[:, -2], values[:, -1]
      length = rank if name == "shape" else window if "window" in name or "base" in name else 0
      listed = np.arange(values.shape[1]) < np.broadcast_to(length, len(feat))[:, None]
      assert not values[~listed].any()
      np.testing.assert_array_equal(total, values.sum(1))
      np.testing.assert_array_equal(product, np.where(listed, values, 1).prod(1))
    assert (feat[:, NODE["element_type"]].sum(1) == 1).all()


def test_test_splits_are_unlabelled_and_named_by_digits(tiny):
  for collection in datasets.RELEASED:
    for g in read(tiny, collection, "test"):
      assert not g.configs.is_labelled
      assert len(g.name) == 32 and int(g.name, 16) > 0
      if collection == "tile:xla":
        assert (g.configs.normalizer_ns == 1).all()
      assert read_ceiling(tiny, collection, "test", g.name).measured_ns.min() > 0


def test_labels_are_the_noise_free_runtimes_with_small_noise(tiny):
  spreads = []
  for collection, split in itertools.product(datasets.RELEASED, ("train", "valid")):
    for g in read(tiny, collection, split):
      ceiling = read_ceiling(tiny, collection, split, g.name)
      np.testing.assert_array_equal(ceiling.measured_ns, random_graphs.config_runtime(g.configs))
      noise = np.log(ceiling.measured_ns / ceiling.runtime_ns)
      if ceiling.runtime_ns.min() > 1e6 and len(noise) > 30:  # rounding does not matter
        spreads.append(noise.std())
  assert len(spreads) > 10
  assert 1e-4 < min(spreads) and max(spreads) < 3e-3
  assert 2.5e-4 < np.median(spreads) < 6e-4


def test_edge_cases_are_there(tiny):
  tiles = read(tiny, "tile:xla", "train")
  assert any(len(g.configs) == 2 and g.edge_index.shape == (1, 2) for g in tiles)
  assert any(len(g.configs) > 1 and not g.configs.config_feat.any() for g in tiles)
  assert any(len(g.configs) % 2 for g in tiles)
  graphs = every_graph(tiny)
  assert max(g.node_feat[:, 28].max() for g in graphs) > 2**31
  assert max(random_graphs.config_runtime(g.configs).max() for g in graphs) > 2**32
  tests = [len(g.configs) for g in read(tiny, "layout:xla:random", "test")]
  assert sorted(tests) == [32, 33]


def test_files_do_not_depend_on_workers_or_on_each_other(tiny, tmp_path):
  kwargs = dict(scale="tiny", seed=3, progress=False)
  everything = digests(tiny)
  parallel = digests(generate(tmp_path / "a", workers=2, **kwargs))
  assert parallel == everything
  alone = digests(generate(tmp_path / "b", collections=["layout:nlp:default"], limit=1, **kwargs))
  assert len(alone) == 6 and alone.items() <= everything.items()
  other = digests(generate(tmp_path / "c", scale="tiny", seed=4, limit=1, progress=False))
  assert not set(other.values()) & set(everything.values())


def test_an_interrupted_run_goes_on_and_other_data_is_refused(tmp_path):
  kwargs = dict(scale="tiny", seed=3, collections=["tile:xla"], progress=False)
  root = generate(tmp_path, **kwargs)
  before = digests(root)
  path = npz.split_files(root, "tile:xla", "valid")[1]
  path.unlink()
  generate(tmp_path, **kwargs)
  assert digests(root) == before
  with pytest.raises(ValueError, match="folder"):
    generate(tmp_path, **(kwargs | {"seed": 5}))
  for damaged in ("", "[]"):
    (tmp_path / "synthetic.json").write_text(damaged)
    with pytest.raises(ValueError, match="synthetic.json"):
      generate(tmp_path, **kwargs)


def test_a_full_disk_ends_the_command_in_one_line_with_status_2(tmp_path, monkeypatch, capsys):
  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

  monkeypatch.setattr(synthetic.files, "replacing", full)
  arguments = ["--out", str(tmp_path / "out"), "--collections", "tile:xla", "--workers", "1"]
  assert main(arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()  # with the place of `full`, as of a user's code
  assert line.startswith("error: ") and line.endswith(f"{tmp_path}: No space left on device")
