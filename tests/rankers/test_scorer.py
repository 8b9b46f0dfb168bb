"""However graphs are packed and spread, each configuration gets its own score."""

import csv
import math

import jax
import numpy as np
import pytest
import random_graphs

from tpugraphs_jax import parallel
from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers import base, scorer as scorer_lib
from tpugraphs_jax.serve import judge
from tpugraphs_jax.train import step as step_lib

IDENTITY = lambda x: x


def assemble_tile(slots, budget, *, graphs, configs):
  return batching.assemble_tile(slots, budget, graphs=graphs, configs=configs, transform=IDENTITY)


def assemble_layout(slots, budget, *, graphs, configs):
  return batching.assemble_layout(
      slots, budget, graphs=graphs, configs=configs,
      transform=lambda rows: rows.astype(np.float32))


def tile_graphs(sizes, seed=0):
  """Kernels with (nodes, edges, configs); each configuration carries its own number."""
  rng, graphs, number = np.random.default_rng(seed), [], 0
  for nodes, edges, configs in sizes:
    graph = random_graphs.tile_graph(rng, nodes=nodes, edges=edges, configs=configs)
    graph.configs.config_feat[:, 0] = np.arange(number, number + configs)
    number += configs
    graphs.append(batching.prepare(graph, graph.node_feat))
  return graphs


def read_number(params, batch):
  """A score step whose score is the configuration's own number."""
  del params
  return np.where(batch.config_mask, batch.config_feat[..., 0], np.nan)


def numbers_of(graphs):
  return [graph.configs.config_feat[:, 0] for graph in graphs]


def assert_equal_lists(found, expected):
  assert len(found) == len(expected)
  for a, b in zip(found, expected):
    np.testing.assert_array_equal(a, b)


# Many configurations and few, one, and sizes in no order.
SIZES = [(9, 20, 7), (3, 0, 1), (40, 60, 23), (5, 9, 12), (17, 17, 8), (6, 0, 5)]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("graphs_per_batch, configs_per_batch", [(1, 2), (2, 5), (4, 8), (9, 64)])
def test_every_configuration_gets_its_own_score_in_order(
    monkeypatch, devices, graphs_per_batch, configs_per_batch):
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  graphs = tile_graphs(SIZES)
  scorer = scorer_lib.Scorer(read_number, assemble_tile, graphs_per_batch=graphs_per_batch,
                           configs_per_batch=configs_per_batch)
  assert_equal_lists(scorer.scores({}, graphs), numbers_of(graphs))


def test_subsets_are_scored_in_the_order_asked_for():
  graphs, rng = tile_graphs(SIZES), np.random.default_rng(1)
  chosen = [rng.integers(0, n, k) for (_, _, n), k in zip(SIZES, (3, 1, 40, 0, 12, 2))]
  scorer = scorer_lib.Scorer(read_number, assemble_tile, graphs_per_batch=2, configs_per_batch=4)
  found = scorer.scores({}, graphs, config_ids=chosen)
  assert_equal_lists(found, [n[ids] for n, ids in zip(numbers_of(graphs), chosen)])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_share_a_shape_though_one_graph_has_more_edges_and_one_more_nodes(
    monkeypatch, devices):
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  sizes = [(10, 600, 4)] * 3 + [(200, 16, 4)] * 2
  graphs = tile_graphs(sizes)
  scorer = scorer_lib.Scorer(read_number, assemble_tile, graphs_per_batch=1, configs_per_batch=4)
  assert_equal_lists(scorer.scores({}, graphs), numbers_of(graphs))


def test_no_graphs_give_no_scores():
  scorer = scorer_lib.Scorer(read_number, assemble_tile, graphs_per_batch=1, configs_per_batch=1)
  assert scorer.scores({}, []) == []


def test_later_calls_use_the_shapes_of_earlier_ones():
  shapes = []

  def recorded_number(params, batch):
    shapes.append(batch.config_feat.shape + batch.graph.nodes["feat"].shape)
    return read_number(params, batch)

  scorer = scorer_lib.Scorer(
      recorded_number, assemble_tile, graphs_per_batch=1, configs_per_batch=8)
  # The same again, one almost as large, one that is much smaller, one that is larger.
  for nodes, compiled in ((400, 1), (400, 1), (390, 1), (40, 2), (39, 2), (900, 3), (400, 3)):
    graphs = tile_graphs([(nodes, nodes, 3)])
    assert_equal_lists(scorer.scores({}, graphs), numbers_of(graphs))
    assert len(set(shapes)) == compiled
  # Far from its budget, but seen before: it must not get another one each time.
  mixed = tile_graphs([(100, 100, 3), (2000, 2000, 3)])
  scorer.scores({}, mixed)
  compiled = len(set(shapes))
  scorer.scores({}, mixed)
  assert len(set(shapes)) == compiled


class Recorded(Exception):
  """Ends a process at the point where it would wait for the others."""


def test_processes_score_their_share_and_all_get_everything(monkeypatch):
  graphs, shares = tile_graphs(SIZES), []
  scorer = scorer_lib.Scorer(read_number, assemble_tile, graphs_per_batch=1, configs_per_batch=4)
  monkeypatch.setattr(parallel, "local_device_count", lambda: 2)
  monkeypatch.setattr(parallel, "process_count", lambda: 3)

  def record(local):
    shares.append(local)
    raise Recorded

  monkeypatch.setattr(parallel, "gather_objects", record)
  for index in range(3):
    monkeypatch.setattr(parallel, "process_index", lambda: index)
    with pytest.raises(Recorded):
      scorer.scores({}, graphs)
  numbers = [number for share in shares for number, _ in share]
  assert len(numbers) == len(set(numbers)) and min(map(len, shares)) >= 2
  monkeypatch.setattr(parallel, "gather_objects", lambda local: shares)
  assert_equal_lists(scorer.scores({}, graphs), numbers_of(graphs))


def one_by_one(model, params, graphs, assemble, blocks=None):
  """Scores of each graph alone, one configuration at a time, in one common shape."""
  budget = random_graphs.common_budget([graph.sizes for graph in graphs])
  apply = jax.jit(lambda batch: model.apply({"params": params}, batch))
  scores = []
  for i, graph in enumerate(graphs):
    block = blocks[i] if blocks else None
    slots = [batching.Slate(graph, np.array([c]), np.zeros(1, np.float32), block=block)
             for c in range(len(graph.configs))]
    batches = [assemble([slot], budget, graphs=1, configs=1) for slot in slots]
    scores.append(np.array([apply(batch)[0, 0] for batch in batches]))
  return scores


def params_of(model, graphs, assemble):
  budget = random_graphs.common_budget([graph.sizes for graph in graphs])
  slot = batching.Slate(graphs[0], np.arange(1), np.zeros(1, np.float32))
  batch = assemble([slot], budget, graphs=1, configs=1)
  return jax.jit(model.init)(jax.random.key(0), batch)["params"]


def assert_close_lists(found, expected):
  assert len(found) == len(expected)
  for a, b in zip(found, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_tile_scores_equal_one_graph_and_one_configuration_at_a_time():
  graphs = tile_graphs([(9, 20, 7), (3, 0, 1), (20, 30, 9)])
  model = base.create("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=1)
  params = params_of(model, graphs, assemble_tile)
  expected = one_by_one(model, params, graphs, assemble_tile)
  assert np.ptp(expected[0]) > 0
  scorer = scorer_lib.Scorer(step_lib.make_score_step(model), assemble_tile, graphs_per_batch=2,
                           configs_per_batch=4)
  assert_close_lists(scorer.scores(params, graphs), expected)


def test_layout_scores_equal_one_graph_and_one_configuration_at_a_time():
  rng = np.random.default_rng(2)
  graphs = [
      random_graphs.layout_graph(rng, nodes=nodes, edges=2 * nodes, config_nodes=config_nodes,
                                 configs=configs)
      for nodes, config_nodes, configs in ((12, [3, 1], 5), (30, [29, 0, 7], 11), (8, [2], 2))
  ]
  prepared = [batching.prepare(graph, graph.node_feat, hops=2) for graph in graphs]
  model = base.create(
      "layout", "ResModel", op_embed_dim=4, hidden_dim=8, num_gnns=2, dropout="dropout")
  params = params_of(model, prepared, assemble_layout)
  scorer = scorer_lib.Scorer(step_lib.make_score_step(model), assemble_layout, graphs_per_batch=2,
                           configs_per_batch=4)
  whole = one_by_one(model, params, prepared, assemble_layout)
  assert_close_lists(scorer.scores(params, prepared), whole)
  blocks = [(0, 6), (10, 30), (4, 8)]
  of_blocks = one_by_one(model, params, prepared, assemble_layout, blocks)
  assert_close_lists(scorer.scores(params, prepared, blocks=blocks), of_blocks)
  assert all((a != b).any() for a, b in zip(whole, of_blocks))


def test_csv_files_hold_six_digits_and_are_replaced_whole(tmp_path):
  path = tmp_path / "validation.csv"
  path.write_text("old")
  rows = [{"graph": "a,b", "nodes": 1234567, "opa": 2 / 3, "tau": math.nan},
          {"graph": "c", "nodes": 0, "opa": 1e-9, "tau": -1.0}]
  judge.write_csv(path, rows)
  with path.open(newline="") as file:
    found = list(csv.reader(file))
  assert found == [["graph", "nodes", "opa", "tau"], ["a,b", "1234567", "0.666667", "nan"],
                   ["c", "0", "1e-09", "-1"]]

  def failing():
    yield rows[0]
    raise OSError("disk full")

  before = path.read_bytes()
  with pytest.raises(OSError, match="disk full"):
    judge.write_csv(path, failing())
  with pytest.raises(ValueError, match="extra"):
    judge.write_csv(path, [rows[0], rows[1] | {"extra": 1}])
  assert path.read_bytes() == before


def test_means_leave_out_what_is_no_number():
  rows = [{"graph": "a", "nodes": 2, "opa": 0.5, "tau": math.nan},
          {"graph": "b", "nodes": 4, "opa": 1.0, "tau": math.nan}]
  means = judge.mean_row(rows)
  assert means.keys() == {"opa", "tau"} and means["opa"] == 0.75 and math.isnan(means["tau"])
  rows[0]["tau"] = -0.25
  assert judge.mean_row(rows)["tau"] == -0.25
  assert judge.mean_row([]) == {}
