"""Each configuration gets its own score, however graphs are packed and spread over devices."""

import collections
import concurrent.futures
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from tests.support import families, parts, random_graphs
from tests.support.random_graphs import assemble
from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout.res_model import ResModel
from tpugraphs_jax.rankers.scorer import chunks, Encoder, network_step


def tile_graphs(sizes):
  """Kernels with (nodes, edges, configs); each configuration carries its own number."""
  rng, graphs, number = np.random.default_rng(0), [], 0
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


def scores_of(encoder, params, graphs, chosen=None, **options):
  chosen = chosen or [np.arange(len(graph.configs)) for graph in graphs]
  return encoder(params, graphs, chosen, **options)


def numbers_of(graphs):
  return [graph.configs.config_feat[:, 0] for graph in graphs]


def assert_equal_lists(found, expected):
  assert len(found) == len(expected)
  for a, b in zip(found, expected):
    np.testing.assert_array_equal(a, b)


# Nodes, edges and configurations, in no order of size; one graph has a single configuration.
SIZES = [(9, 20, 7), (3, 0, 1), (40, 60, 23), (5, 9, 12), (17, 17, 8), (6, 0, 5)]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("graphs_per_batch, configs_per_batch", [(1, 2), (2, 5), (4, 8), (9, 64)])
def test_every_configuration_gets_its_own_score_in_order(
  monkeypatch, devices, graphs_per_batch, configs_per_batch
):
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  graphs = tile_graphs(SIZES)
  encoder = Encoder(read_number, assemble, graphs=graphs_per_batch, configs=configs_per_batch)
  assert_equal_lists(scores_of(encoder, {}, graphs), numbers_of(graphs))


def test_subsets_are_scored_in_the_order_asked_for():
  graphs, rng = tile_graphs(SIZES), np.random.default_rng(1)
  chosen = [rng.integers(0, n, k) for (_, _, n), k in zip(SIZES, (3, 1, 40, 0, 12, 2))]
  encoder = Encoder(read_number, assemble, graphs=2, configs=4)
  found = scores_of(encoder, {}, graphs, chosen)
  assert_equal_lists(found, [n[ids] for n, ids in zip(numbers_of(graphs), chosen)])


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_share_a_shape_though_one_graph_has_more_edges_and_one_more_nodes(
  monkeypatch, devices
):
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  sizes = [(10, 600, 4)] * 3 + [(200, 16, 4)] * 2
  graphs = tile_graphs(sizes)
  encoder = Encoder(read_number, assemble, graphs=1, configs=4)
  assert_equal_lists(scores_of(encoder, {}, graphs), numbers_of(graphs))


def test_later_calls_use_the_shapes_of_earlier_ones():
  shapes = []

  def recorded_number(params, batch):
    shapes.append(batch.config_feat.shape + batch.graph.nodes["feat"].shape)
    return read_number(params, batch)

  encoder = Encoder(recorded_number, assemble, graphs=1, configs=8)
  # The same again, one almost as large, one that is much smaller, one that is larger.
  for nodes, compiled in ((400, 1), (400, 1), (390, 1), (40, 2), (39, 2), (900, 3), (400, 3)):
    graphs = tile_graphs([(nodes, nodes, 3)])
    assert_equal_lists(scores_of(encoder, {}, graphs), numbers_of(graphs))
    assert len(set(shapes)) == compiled
  # Far from its budget, but seen before: it must not get another budget each time.
  mixed = tile_graphs([(100, 100, 3), (2000, 2000, 3)])
  scores_of(encoder, {}, mixed)
  compiled = len(set(shapes))
  scores_of(encoder, {}, mixed)
  assert len(set(shapes)) == compiled


def test_tasks_score_their_share_and_all_get_everything(monkeypatch):
  graphs, processes = tile_graphs(SIZES), 3
  here, barrier, shared = threading.local(), threading.Barrier(processes), {}
  monkeypatch.setattr(parallel, "local_device_count", lambda: 2)
  monkeypatch.setattr(parallel, "process_count", lambda: processes)
  monkeypatch.setattr(parallel, "process_index", lambda: here.index)

  def gather(local):
    barrier.wait()
    shared[here.index] = local
    barrier.wait()
    return [shared[index] for index in range(processes)]

  monkeypatch.setattr(parallel, "gather_objects", gather)
  steps = collections.Counter()

  def process(index):
    here.index = index

    def counted(params, batch):
      steps[index] += 1
      return read_number(params, batch)

    return scores_of(Encoder(counted, assemble, graphs=1, configs=4), {}, graphs)

  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    for found in pool.map(process, range(processes)):
      assert_equal_lists(found, numbers_of(graphs))
  assert set(steps) == {0, 1, 2} and max(steps.values()) - min(steps.values()) <= 1


@functools.cache
def applied(model):
  return jax.jit(lambda params, batch: model.apply({"params": params}, batch))


def one_by_one(model, params, graphs, assemble=assemble, blocks=None):
  """Scores of each graph alone, one configuration at a time, in one common shape."""
  budget = random_graphs.common_budget([graph.sizes for graph in graphs])
  scores = []
  for i, graph in enumerate(graphs):
    block = blocks[i] if blocks else None
    slots = [
      batching.Slate(graph, np.array([c]), np.zeros(1, np.float32), block=block)
      for c in range(len(graph.configs))
    ]
    batches = [assemble([slot], budget, graphs=1, configs=1) for slot in slots]
    scores.append(np.array([applied(model)(params, batch)[0, 0] for batch in batches]))
  return scores


def params_of(model, graphs, assemble=assemble):
  budget = random_graphs.common_budget([graph.sizes for graph in graphs])
  slot = batching.Slate(graphs[0], np.arange(1), np.zeros(1, np.float32))
  batch = assemble([slot], budget, graphs=1, configs=1)
  return parts.params_of(model, batch)


def assert_close_lists(found, expected):
  assert len(found) == len(expected)
  for a, b in zip(found, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_tile_scores_equal_one_graph_and_one_configuration_at_a_time():
  graphs = tile_graphs([(9, 20, 7), (3, 0, 1), (20, 30, 9)])
  model = base.create_network("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=1)
  params = params_of(model, graphs)
  expected = one_by_one(model, params, graphs)
  assert np.ptp(expected[0]) > 0
  encoder = Encoder(network_step(model), assemble, graphs=2, configs=4)
  assert_close_lists(scores_of(encoder, params, graphs), expected)


def test_layout_scores_equal_one_graph_and_one_configuration_at_a_time():
  rng = np.random.default_rng(2)
  graphs = [
    random_graphs.layout_graph(
      rng, nodes=nodes, edges=2 * nodes, config_nodes=config_nodes, configs=configs
    )
    for nodes, config_nodes, configs in ((12, [3, 1], 5), (30, [29, 0, 7], 11), (8, [2], 2))
  ]
  prepared = [batching.prepare_program(graph, graph.node_feat, hops=1) for graph in graphs]
  model = base.create_network(
    "layout", "ResModel", op_embed_dim=4, hidden_dim=8, num_gnns=1, dropout="dropout"
  )
  params = params_of(model, prepared)
  encoder = Encoder(network_step(model), assemble, graphs=2, configs=4)
  whole = one_by_one(model, params, prepared)
  assert_close_lists(scores_of(encoder, params, prepared), whole)
  blocks = [(0, 6), (10, 30), (4, 8)]
  of_blocks = one_by_one(model, params, prepared, blocks=blocks)
  assert_close_lists(scores_of(encoder, params, prepared, blocks=blocks), of_blocks)
  assert all((a != b).any() for a, b in zip(whole, of_blocks))


@pytest.mark.parametrize("free, largest", [(1 << 40, 4), (1, 1), (None, 2)])
def test_a_call_takes_as_many_configurations_as_the_free_memory_holds(monkeypatch, free, largest):
  graphs = tile_graphs([(9, 20, 7), (3, 0, 1)])
  taken = []

  def recording(slots, budget, *, graphs, configs):
    taken.append(configs)
    return assemble(slots, budget, graphs=graphs, configs=configs)

  model = base.create_network("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=1)
  params, step = params_of(model, graphs), network_step(model)
  if free is None:  # the program of four configurations takes 1.5 times as much
    monkeypatch.setattr(parallel, "memory_of", lambda *args: 1500)
    free = 1000
  monkeypatch.setattr(parallel, "free_memory", lambda: free)
  encoder = Encoder(step, recording, graphs=2, configs=4)
  found = scores_of(encoder, params, graphs)
  assert taken[-1] == largest
  assert_close_lists(found, one_by_one(model, params, graphs))


class SlateMean(base.Network):
  compares_configs = True


@pytest.mark.parametrize("orders", [1, 4])
def test_scores_of_a_network_that_compares_configurations_are_means_over_orders(orders):
  """The score here is the mean of the numbers in a slate of three up to and with its own."""
  sizes, calls = [(3, 2, 8), (3, 2, 2)], []
  graphs, made = tile_graphs(sizes), [np.arange(8) ** 2, np.array([5, 1])]
  family = families.make(
    "tile", SlateMean(), **{"batch.configs": 3, "eval.configs": 3, "eval.permutations": orders}
  )

  def run(params, graphs, config_ids):
    calls.append([ids.tolist() for ids in config_ids])
    values = [numbers[ids] for numbers, ids in zip(made, config_ids)]
    return [np.array([np.mean(v[i - i % 3 : i + 1]) for i in range(len(v))]) for v in values]

  scorer, ids = families.scorer_of(family, run), [np.array([4, 0, 0, 7, 2, 3]), np.array([0, 1])]
  found = scorer(None, graphs, ids)
  assert len(calls) == orders and calls[0] == [chosen.tolist() for chosen in ids]
  for number, chosen in enumerate(ids):
    seen = collections.defaultdict(list)
    for call in calls:
      values = made[number][call[number]]
      for place, config in enumerate(call[number]):
        seen[config].append(np.mean(values[place - place % 3 : place + 1]))
    assert all(sorted(call[number]) == sorted(chosen.tolist()) for call in calls)
    for config, mean in zip(chosen.tolist(), found[number]):
      if list(chosen).count(config) == 1:
        np.testing.assert_allclose(mean, np.mean(seen[config]), rtol=1e-6)
  np.testing.assert_array_equal(scorer(None, graphs, ids)[0], found[0])
  calls.clear()
  once = scorer(None, graphs, ids, permutations=1)
  assert len(calls) == 1 and (orders == 1) == (once[0] == found[0]).all()


def test_scores_of_a_graph_do_not_depend_on_the_other_graphs_of_the_call():
  family = families.make(
    "tile", SlateMean(), **{"batch.configs": 3, "eval.configs": 3, "eval.permutations": 4}
  )
  graphs = [
    dataclasses.replace(graph, name=name)
    for name, graph in zip("abc", tile_graphs([(3, 2, 9)] * 3))
  ]

  def run(params, graphs, config_ids):
    return [
      np.array([np.mean(ids[i - i % 3 : i + 1]) for i in range(len(ids))]) for ids in config_ids
    ]

  scorer = families.scorer_of(family, run)
  together = dict(zip("abc", scorer(None, graphs)))
  for chosen in (graphs[1:], graphs[::-1], graphs[2:]):
    for graph, found in zip(chosen, scorer(None, chosen)):
      np.testing.assert_array_equal(found, together[graph.name])
  assert (together["a"] != together["b"]).any()


@pytest.fixture(name="blocks", scope="module")
def _blocks():
  """A family that judges on blocks, two programs and parameters."""
  network = ResModel(op_embed_dim=2, hidden_dim=4, num_gnns=1, dropout="dropout")
  changes = {"batch.keep_nodes": 2, "eval.configs": 8}
  family = families.make("layout", network, "official,ci", **changes)
  rng = np.random.default_rng(2)
  raw = [
    random_graphs.layout_graph(rng, nodes=20, edges=9, config_nodes=[5, 1], configs=5, name=name)
    for name in "ab"
  ]
  graphs = [family.prepare(graph, graph.node_feat) for graph in raw]
  return family, graphs, params_of(family.network, graphs, family.assemble)


def test_blocks_of_a_graph_do_not_depend_on_the_other_graphs_of_the_call(blocks):
  family, graphs, params = blocks
  _, together = family.scores(params, graphs)
  (alone,) = family.scores(params, graphs[1:])
  np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)


def test_networks_of_blocks_are_judged_on_the_mean_of_three_seeded_blocks(blocks, monkeypatch):
  family, (_, graph), params = blocks
  drawn, draw_block = [], family.draw_block
  monkeypatch.setattr(
    family, "draw_block", lambda *args: drawn.append(draw_block(*args)) or drawn[-1]
  )
  (found,), (again,) = (family.scores(params, [graph]) for _ in range(2))
  np.testing.assert_array_equal(found, again)
  assert len(drawn) == 6 and drawn[:3] == drawn[3:]
  of_blocks = one_by_one(family.network, params, [graph] * 3, family.assemble, drawn[:3])
  np.testing.assert_allclose(found, np.mean(of_blocks, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 12, 17])
@pytest.mark.parametrize("even", [False, True])
def test_chunks_hold_every_configuration_once(count, even):
  """As few as possible; even ones differ by one in length."""
  ids = np.arange(100, 100 + count)
  parts_of = chunks(ids, 6, even=even)
  sizes = [len(part) for part in parts_of]
  assert len(sizes) == -(-count // 6) and all(0 < size <= 6 for size in sizes)
  assert not even or max(sizes, default=0) - min(sizes, default=0) <= 1
  assert even or all(size == 6 for size in sizes[:-1])
  np.testing.assert_array_equal(np.concatenate([ids[:0], *parts_of]), ids)
