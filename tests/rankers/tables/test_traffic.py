"""Costs of choices from padded bytes: by formula, and 0 for the compiler's own choice."""

import dataclasses
import functools
import math

import jax
import numpy as np

from tests.support import parts, random_graphs, table_cases
from tpugraphs_jax.columns import NODE, opcode_ids
from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers.tables import batches, terms, traffic
from tpugraphs_jax.rankers.tables.network import table_sums

_CONTRACTIONS = [opcode_ids()[name] for name in ("convolution", "dot")]


def program():
  """A program with contractions, whose row 0 leaves everything to the compiler."""
  graph = table_cases.program(0)
  opcode = graph.node_opcode.copy()
  opcode[graph.config_node] = np.resize(_CONTRACTIONS, len(graph.config_node))
  rows = graph.configs.rows.copy()
  rows[:, :6] = -1
  rows[1:, :2] = [(0, 1), (1, 0), (2, 0), (2, 1), (0, 2)]
  group_row = graph.configs.group_row.copy()
  group_row[0] = 0
  graph = dataclasses.replace(graph, node_opcode=opcode)
  return random_graphs.with_configs(graph, rows=rows, group_row=group_row)


def padded_bytes(dims, minor, second):
  """Of float32: the minor dimension in multiples of 128, the next one in multiples of 8."""
  rest = [size for place, size in enumerate(dims) if place not in (minor, second)]
  return 4 * math.ceil(dims[minor] / 128) * 128 * math.ceil(dims[second] / 8) * 8 * math.prod(rest)


def test_traffic_is_padded_bytes_over_what_convolutions_and_dots_read_and_write():
  graph = program()
  dims = graph.node_feat[:, NODE["shape"]][:, :3].astype(int).tolist()
  orders = [(a, b) for a in range(3) for b in range(3) if a != b]
  least = [min(padded_bytes(row, *order) for order in orders) for row in dims]
  total = sum(
    least[node] + sum(least[v] for u, v in graph.edge_index if u == node)
    for node in graph.config_node
  )
  node, row = map(np.ravel, np.indices((len(graph.config_node), len(graph.configs.rows))))
  found = traffic.choice_features(graph, node, row)
  for each, number, feature in zip(node, row, found):
    minor, second = graph.configs.rows[number, :2]
    expected = 0 if minor < 0 else padded_bytes(dims[graph.config_node[each]], minor, second)
    np.testing.assert_allclose(feature[0], expected / total, rtol=1e-5)
    if minor < 0:
      assert not feature.any()


def test_the_compilers_own_order_costs_nothing_unless_a_user_has_another_one():
  graph = program()
  feat, number = graph.node_feat.copy(), graph.config_node[1]
  feat[:, NODE["minor_to_major"]] = [0, 1, 2, 0, 0, 0]
  feat[number, NODE["minor_to_major"]] = [2, 0, 1, 0, 0, 0]
  graph = dataclasses.replace(graph, node_feat=feat, edge_index=np.zeros((0, 2), np.int32))
  rows = graph.configs.rows[:, :2].tolist()
  full = [(*row, *(dim for dim in (2, 1, 0) if dim not in row)) for row in rows]
  node, row = map(np.ravel, np.indices((2, len(rows))))
  expected = [rows[r][0] >= 0 and full[r] == ((0, 1, 2), (2, 0, 1))[k] for k, r in zip(node, row)]
  assert sum(expected) == 1 + ((2, 0, 1) in full)
  found = traffic.changes_nothing(graph, node, row)
  assert found[[rows[r][0] >= 0 for r in row]].tolist() == [
    factor for factor, r in zip(expected, row) if rows[r][0] >= 0
  ]
  cost = traffic.choice_features(graph, node, row)[:, 0]
  assert ((cost == 0) == [factor or rows[r][0] < 0 for factor, r in zip(expected, row)]).all()
  other = next(node for node in range(graph.num_nodes) if node not in graph.config_node)
  feat[other] = feat[number]
  feat[other, NODE["minor_to_major"]] = [0, 1, 2, 0, 0, 0]
  turned = dataclasses.replace(
    graph, node_feat=feat, edge_index=np.array([[other, number]], np.int32)
  )
  assert not traffic.changes_nothing(turned, node, row)[node == 1].any()


def test_users_are_seen_beyond_nodes_of_the_same_shape():
  graph = table_cases.program(0, nodes=4, config_nodes=[0])
  feat = graph.node_feat.copy()
  feat[:3, 21:24] = 8
  opcode = np.full(4, opcode_ids()["tanh"], np.uint8)
  opcode[3] = opcode_ids()["reduce"]
  edges = np.array([[1, 0], [2, 1], [3, 2]], np.int32)
  chain = dataclasses.replace(graph, node_feat=feat, node_opcode=opcode, edge_index=edges)
  users = traffic.user_columns(chain)
  assert users["user is reduce"].tolist() == [False, False, True, False]
  assert users["indirect user is reduce"].tolist() == [True, True, True, False]
  feat[1, 21] = 9  # another shape ends the way
  users = traffic.user_columns(dataclasses.replace(chain, node_feat=feat))
  assert users["indirect user is reduce"].tolist() == [False, False, True, False]


def test_a_score_is_the_sum_of_costs_and_0_for_what_is_left_to_the_compiler():
  graph = program()
  made = batches.prepare(
    graph, graph.node_feat, terms.terms_of(graph), describe=traffic.choice_features
  )
  slate = table_cases.slates([made], len(graph.configs))[0]
  budget = random_graphs.common_budget([batching.total_sizes([made])])
  batch = batches.assemble([slate], budget, graphs=1, configs=len(graph.configs))
  network = traffic.TrafficTables()
  params = {"params": parts.params_of(network, batch)}
  applied = lambda method: jax.jit(functools.partial(network.apply, method=method))(params, batch)
  scores = np.asarray(applied("__call__"))[0]
  assert scores[slate.config_ids == 0] == 0 and (scores >= 0).all() and len(set(scores)) > 5
  costs, none, rest = applied("node_tables")
  code = batch.code[batch.choices.group]
  np.testing.assert_allclose(
    scores, np.take_along_axis(np.asarray(costs), code.astype(int), axis=1).sum(axis=0), rtol=1e-5
  )
  assert none is None and not np.any(rest)
  unary, pair, _ = applied("tables")
  looked_up = jax.jit(table_sums)(unary, pair, batch)
  np.testing.assert_array_equal(scores, looked_up[0])
