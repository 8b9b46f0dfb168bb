"""Named blocks of node features: computed once, each with a transform of its own."""

import dataclasses

import numpy as np
import parts
import pytest
import random_graphs

from tpugraphs_jax.data import feature_blocks, features, random_walk
from tpugraphs_jax.data.feature_blocks import BLOCKS, NodeFeatures
from tpugraphs_jax.graph import NODE_FEATURES


def graph_of(seed=0, nodes=12, edges=20, config_nodes=(3, 7)):
  rng = np.random.default_rng(seed)
  graph = random_graphs.layout_graph(
      rng, nodes=nodes, edges=edges, config_nodes=list(config_nodes), configs=4)
  feat = rng.integers(0, 9, (nodes, NODE_FEATURES)).astype(np.float32)
  return dataclasses.replace(graph, node_feat=feat)


@pytest.fixture
def own_block(monkeypatch):
  """Registers blocks for one test."""
  monkeypatch.setattr(BLOCKS, "_entries", dict(BLOCKS._entries))
  return lambda name: BLOCKS.register(name)


def test_the_released_block_alone_is_what_models_always_saw():
  graphs = [graph_of(seed) for seed in range(3)]
  made = NodeFeatures(["released"], kinds="signed_log1p",
                      options=feature_blocks.Options(pad_value=-1))
  made.fit(graphs)
  raw = [features.node_features(graph, pad_value=-1) for graph in graphs]
  kinds = features.parse_kinds("signed_log1p", features.NODE_GROUPS)
  expected = features.fit(raw, kinds)(raw[1])
  np.testing.assert_array_equal(made(graphs[1]).node_feat, expected)


def test_blocks_stand_side_by_side_each_scaled_in_its_own_way(own_block):
  own_block("twice")(lambda graph: 2 * graph.node_opcode[:, None])
  own_block("rows")(lambda graph: np.arange(graph.num_nodes)[:, None] + [[0.0, 5.0]])
  graph = graph_of()
  made = NodeFeatures(["twice", "released", "rows"], kinds="twice=none,rows=minmax,*=standardize")
  made.fit([graph])
  found = made(graph).node_feat
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found[:, 0], 2.0 * graph.node_opcode)
  np.testing.assert_allclose(found[:, -2], np.arange(12) / 11, rtol=1e-6)
  np.testing.assert_allclose(found[:, -2], found[:, -1], rtol=1e-6)
  np.testing.assert_allclose(found[:, 1:-2].mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize("give, complaint", [
    (lambda graph: np.zeros(graph.num_nodes), r"float64 \[12\] for .*, expected numbers \[12, F\]"),
    (lambda graph: np.zeros((3, 2)), r"float64 \[3, 2\]"),
    (lambda graph: np.full((graph.num_nodes, 1), "a"), "expected numbers"),
    (lambda graph: np.full((graph.num_nodes, 1), np.nan), "not finite"),
])
def test_a_block_of_the_wrong_shape_is_refused(give, complaint, own_block):
  own_block("mine")(give)
  with pytest.raises(ValueError, match=f"feature block 'mine' gave .*{complaint}"):
    NodeFeatures(["mine"], kinds="none").fit([graph_of()])


def test_a_block_must_always_give_as_many_columns(own_block):
  own_block("growing")(lambda graph: np.ones((graph.num_nodes, graph.num_nodes)))
  made = NodeFeatures(["growing"], kinds="none")
  with pytest.raises(ValueError, match="gave 9 columns for .* and 12 for another"):
    made.fit([graph_of(), graph_of(1, nodes=9, edges=5)])
  made.fit([graph_of()])
  with pytest.raises(ValueError, match="has 9 columns, the model was trained on 12"):
    made(graph_of(1, nodes=9, edges=5))


@pytest.mark.parametrize("names, kinds, complaint", [
    ([], "none", "data.features is .*expected one or more different blocks"),
    (["released", "released"], "none", "different blocks"),
    (["nope"], "none", "data.features is 'nope', expected one of released, extra, random_walk"),
    (["released"], "random_walk=none,*=none", "names group 'random_walk'"),
    (["released", "random_walk"], "random_walk=none", "leaves out type"),
])
def test_impossible_blocks_are_refused(names, kinds, complaint):
  with pytest.raises(ValueError, match=complaint):
    NodeFeatures(names, kinds=kinds)


def test_saved_transforms_of_an_older_version_are_those_of_the_blocks():
  rng = np.random.default_rng(0)
  joined = rng.normal(size=(30, NODE_FEATURES + 5))
  old = features.fit([joined], np.full(NODE_FEATURES + 5, "standardize", object))
  nodes, config = feature_blocks.from_saved({"node": old, "config": old}, "here")
  assert set(nodes) == {"released", "extra"} and config is old
  released, extra = np.split(joined, [NODE_FEATURES], axis=1)
  found = np.concatenate([nodes["released"](released), nodes["extra"](extra)], axis=1)
  np.testing.assert_array_equal(found, old(joined))
  again = feature_blocks.from_saved(feature_blocks.to_saved(nodes, config), "here")
  assert again[0] == nodes and again[1] is config
  for damaged in ({"node": old}, {"config": old}):
    with pytest.raises(ValueError, match="here is damaged"):
      feature_blocks.from_saved(damaged, "here")


def slow_walks(graph):
  """The definition, with dense matrix powers in float64."""
  nodes = graph.num_nodes
  directed = np.eye(nodes)
  directed[graph.edge_index[:, 0], graph.edge_index[:, 1]] = 1
  undirected = np.minimum(directed + directed.T, 1)
  columns = []
  walk = undirected / undirected.sum(axis=1, keepdims=True)
  power = walk
  for _ in range(112):
    power = power @ walk
    columns.append(np.diag(power))
  walk = directed / directed.sum(axis=1, keepdims=True)
  power = walk
  columns.append(np.diag(walk))
  for _ in range(15):
    power = power @ walk
    columns.append(power.sum(axis=0) - np.diag(power))
  return np.stack(columns, axis=1)


@pytest.mark.parametrize("nodes, edges", [(1, 0), (5, 0), (12, 20), (40, 300), (300, 500)])
def test_random_walks_are_those_of_the_definition(nodes, edges):
  graph = graph_of(nodes, nodes=nodes, edges=edges, config_nodes=[0])
  found = random_walk.return_probabilities(graph)
  assert found.shape == (nodes, 128) and found.dtype == np.float32
  np.testing.assert_allclose(found, slow_walks(graph), rtol=2e-4, atol=2e-6)


def test_edges_that_occur_twice_count_once_in_walks():
  graph = graph_of()
  twice = dataclasses.replace(graph, edge_index=np.concatenate([graph.edge_index] * 2))
  np.testing.assert_array_equal(
      random_walk.return_probabilities(twice), random_walk.return_probabilities(graph))


def test_blocks_look_at_the_whole_graph_before_it_is_reduced(own_block):
  own_block("size")(lambda graph: np.full((graph.num_nodes, 1), graph.num_nodes))
  graph = graph_of(nodes=30, edges=30)
  job = parts.make("layout", **{
      "data.features": ("size",), "data.feature_transform": "none",
      "data.graph_reduction": "config_neighborhood", "data.reduction_hops": 1})
  job.fit([graph])
  prepared = job.ranker.prepare(graph)
  assert len(prepared.opcode) < 30
  np.testing.assert_array_equal(prepared.feat, np.full((len(prepared.opcode), 1), 30))
