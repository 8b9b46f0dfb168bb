"""The synthetic collections: format, statistics, and that the graph decides the answer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tpugraphs_jax import collections, columns, graph
from tpugraphs_jax.columns import NODE, opcode_ids
from tpugraphs_jax.data import npz, synthetic
from tpugraphs_jax.data.synthetic import generate, read_ceiling

LAYOUTS = collections.RELEASED[1:]
@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
  return generate(tmp_path_factory.mktemp("tiny"), scale="tiny", seed=3, progress=False)


def read(data_root: Path, collection: str, split: str) -> list[graph.OpGraph]:
  reader = npz.read_tile if collection == "tile:xla" else npz.read_layout
  return [reader(path) for path in npz.split_files(data_root, collection, split)]


def every_graph(data_root: Path) -> list[graph.OpGraph]:
  pairs = itertools.product(collections.RELEASED, graph.SPLITS)
  return [g for collection, split in pairs for g in read(data_root, collection, split)]


def digests(data_root: Path) -> dict[str, str]:
  out = data_root.parent
  return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
          for path in out.rglob("*.npz")}


def test_tiny_has_the_released_folders_and_is_small(tiny):
  for collection in collections.RELEASED:
    counts = tuple(len(npz.split_files(tiny, collection, s)) for s in graph.SPLITS)
    assert counts == ((12, 4, 4) if collection == "tile:xla" else (4, 2, 2))
  assert sum(path.stat().st_size for path in tiny.parent.rglob("*.npz")) < 2e6


def test_edges_point_to_earlier_nodes_and_are_sorted(tiny):
  for g in every_graph(tiny):
    consumer, producer = g.edge_index.T
    assert (consumer > producer).all()
    order = np.lexsort((producer, consumer))
    np.testing.assert_array_equal(order, np.arange(g.num_edges))


def test_graphs_are_forests_of_computations_with_bodies_first(tiny):
  bodies = 0
  for g in every_graph(tiny):
    roots = np.flatnonzero(g.node_feat[:, 0])
    reductions = np.count_nonzero(g.node_opcode == opcode_ids()["reduce"])
    np.testing.assert_array_equal(roots[:reductions], 3 * np.arange(reductions) + 2)
    assert len(roots) > reductions
    assert roots[-1] == g.num_nodes - 1
    parameters = g.node_opcode[:3 * reductions].reshape(-1, 3)[:, :2]
    assert (parameters == opcode_ids()["parameter"]).all()
    bodies += reductions
  assert bodies > 0


def test_isolated_nodes_are_parameters(tiny):
  isolated = 0
  for g in every_graph(tiny):
    linked = np.isin(np.arange(g.num_nodes), g.edge_index)
    assert (g.node_opcode[~linked] == opcode_ids()["parameter"]).all()
    isolated += np.count_nonzero(~linked)
  assert isolated > 0


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


def test_tile_features_follow_the_output_and_empty_blocks_are_zero(tiny):
  for split in graph.SPLITS:
    for g in read(tiny, "tile:xla", split):
      blocks = g.configs.config_feat.reshape(-1, 3, 8)
      extents, total, product = blocks[..., :6], blocks[..., 6], blocks[..., 7]
      np.testing.assert_array_equal(total, extents.sum(-1))
      expected = np.where(extents > 0, extents, 1).prod(-1) * (extents > 0).any(-1)
      np.testing.assert_array_equal(product, expected)
      assert not blocks[:, 2].any()
      dims = g.node_feat[-1, columns.sizes(NODE["shape"])]
      assert (extents[:, 1] <= np.maximum(dims, 1)).all()


def test_nodes_of_a_group_always_choose_alike_and_options_are_few(tiny):
  for collection in LAYOUTS:
    for g in read(tiny, collection, "train"):
      choices = g.configs.decode(np.arange(len(g.configs)))
      opcodes = g.node_opcode[g.config_node]
      assert set(opcodes) <= {opcode_ids()[o] for o in ("convolution", "dot", "reshape")}
      for k in range(len(g.config_node)):
        most = 2 if opcodes[k] == opcode_ids()["reshape"] else 9
        assert len(np.unique(choices[:, k], axis=0)) <= most
      first = [np.flatnonzero(g.configs.node_group == v)[0] for v in g.configs.node_group]
      np.testing.assert_array_equal(choices, choices[:, first])


def test_test_splits_are_unlabelled_and_named_by_digits(tiny):
  for collection in collections.RELEASED:
    for g in read(tiny, collection, "test"):
      assert not g.configs.is_labelled
      assert len(g.name) == 32 and int(g.name, 16) > 0
      if collection == "tile:xla":
        assert (g.configs.normalizer_ns == 1).all()
      assert read_ceiling(tiny, collection, "test", g.name).measured_ns.min() > 0


def test_labels_are_the_noise_free_runtimes_with_small_noise(tiny):
  spreads = []
  for collection, split in itertools.product(collections.RELEASED, ("train", "valid")):
    for g in read(tiny, collection, split):
      ceiling = read_ceiling(tiny, collection, split, g.name)
      np.testing.assert_array_equal(ceiling.measured_ns, g.configs.runtime_ns)
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
  assert max(g.configs.runtime_ns.max() for g in graphs) > 2**32
  tests = [len(g.configs) for g in read(tiny, "layout:xla:random", "test")]
  assert sorted(tests) == [32, 33]


def test_files_do_not_depend_on_workers_or_on_each_other(tiny, tmp_path):
  kwargs = dict(scale="tiny", seed=3, progress=False)
  everything = digests(tiny)
  parallel = digests(generate(tmp_path / "a", workers=2, **kwargs))
  assert parallel == everything
  alone = digests(generate(tmp_path / "b", collections=["layout:nlp:default"], limit=1, **kwargs))
  assert len(alone) == 6 and alone.items() <= everything.items()
  other = digests(generate(tmp_path / "c", scale="tiny", seed=4, progress=False))
  assert not set(other.values()) & set(everything.values())


def test_an_interrupted_run_goes_on_and_other_data_is_refused(tiny, tmp_path):
  kwargs = dict(scale="tiny", seed=3, collections=["tile:xla"], progress=False)
  root = generate(tmp_path, **kwargs)
  before = digests(root)
  path = npz.split_files(root, "tile:xla", "valid")[1]
  path.unlink()
  generate(tmp_path, **kwargs)
  assert digests(root) == before
  with pytest.raises(ValueError, match="choose another folder"):
    generate(tmp_path, **(kwargs | {"seed": 5}))
  with pytest.raises(ValueError, match="scale"):
    generate(tmp_path / "new", **(kwargs | {"scale": "huge"}))
  with pytest.raises(ValueError, match="collection"):
    generate(tmp_path / "new", **(kwargs | {"collections": ["tile"]}))


def make_layouts(search: str, source: str, graphs: int, **changes) -> list:
  specs = synthetic.file_specs("medium", 0, f"layout:{source}:{search}", limit=graphs)
  return [synthetic.make_file(dataclasses.replace(spec, **changes))
          for spec in specs if spec.split == "train"]


@pytest.fixture(scope="module")
def layouts() -> dict[tuple[str, str], list]:
  return {(source, search): make_layouts(search, source, 4)
          for source in ("xla", "nlp") for search in ("random", "default")}


def oracle_tau(ceiling) -> float:
  return stats.kendalltau(ceiling.runtime_ns, ceiling.measured_ns)[0]


def test_the_noise_free_ranking_is_near_perfect_on_random_and_less_so_on_default(layouts):
  taus = {key: np.mean([oracle_tau(c) for _, c in made]) for key, made in layouts.items()}
  for source in ("xla", "nlp"):
    assert taus[source, "random"] > 0.95
    assert 0.7 < taus[source, "default"] < taus[source, "random"]


def test_both_searches_share_graphs_and_reach_nearly_the_same_minimum(layouts):
  for source in ("xla", "nlp"):
    for (g, c), (h, d) in zip(layouts[source, "random"], layouts[source, "default"]):
      np.testing.assert_array_equal(g.node_feat, h.node_feat)
      np.testing.assert_array_equal(g.edge_index, h.edge_index)
      assert abs(c.runtime_ns.min() / d.runtime_ns.min() - 1) < 0.03
      assert c.runtime_ns.max() / c.runtime_ns.min() > 1.02


def test_random_search_repeats_only_the_default(layouts):
  for g, _ in layouts["nlp", "random"]:
    _, counts = np.unique(g.configs.group_row, axis=0, return_counts=True)
    assert sorted(counts)[-2:] == [1, 40]


def test_default_search_keeps_most_output_orders_and_few_operand_orders(layouts):
  flips, operands, copies = [], [], []
  for g, _ in [*layouts["xla", "default"], *layouts["nlp", "default"]]:
    rows = g.configs.rows[g.configs.group_row]
    kernels = rows[:, :, 12].max(0) >= 0
    first = rows[:, :, 0] == rows[:1, :, 0]
    flips.append(1 - np.maximum(first.mean(0), 1 - first.mean(0)).mean())
    closed = rows[:, kernels, 6] >= 0
    swapped = rows[:, kernels, 6] < rows[:, kernels, 7]
    operands.append((swapped & closed).sum() / closed.sum())
    copies.append(1 - len(np.unique(g.configs.group_row, axis=0)) / len(g.configs))
  assert 0.02 < np.mean(flips) < 0.14
  assert 0.4 < np.mean(operands) < 0.5
  assert 0.05 < np.mean(copies) < 0.25
