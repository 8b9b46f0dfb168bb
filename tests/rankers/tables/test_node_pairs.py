import itertools

import numpy as np
import pytest

from tests.support import random_graphs, table_cases
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.rankers.tables import node_pairs


def slow_ways(graph, start, hops):
  """`{node: (hops, operand, bytes)}` by a search from one configurable node, in plain Python."""
  operands = {}
  for consumer, producer in graph.edge_index.tolist():
    operands.setdefault(consumer, []).append(producer)
  nbytes = node_pairs.tensor_bytes(graph.node_feat)
  ways, level, least = {}, [start], {start: nbytes[start]}
  for hop in range(1, hops + 1):
    found = []
    for node in sorted(level):
      for user in sorted(operands):
        if node in operands[user] and user not in ways and user != start:
          ways[user] = (hop, operands[user].index(node), least[node])
          least[user] = min(least[node], nbytes[user])
          found.append(user)
    level = [node for node in found if node not in graph.config_node]
  return ways


def slow_pairs(graph, hops):
  """All pairs as tuples of the fields of `NodePairs`, sorted."""
  nodes = graph.config_node.tolist()
  ways = [slow_ways(graph, node, hops) for node in nodes]
  count = np.bincount(graph.edge_index[:, 0], minlength=graph.num_nodes)
  pairs = []
  for i, way in enumerate(ways):
    for node, (hop, operand, nbytes) in way.items():
      if node in nodes:
        pairs.append((i, nodes.index(node), node, hop, 0, operand, 255, nbytes, 0.0))
  for i, j in itertools.permutations(range(len(nodes)), 2):
    for node in ways[i].keys() & ways[j].keys() - set(nodes):
      (hop, operand, nbytes), (hop2, operand2, nbytes2) = ways[i][node], ways[j][node]
      if operand < operand2 and hop + hop2 <= hops and count[node] <= 4:
        pairs.append((i, j, node, hop, hop2, operand, operand2, nbytes, nbytes2))
  return sorted(pairs)


def as_tuples(pairs):
  columns = [pairs.ends, pairs.via[:, None], pairs.hops, pairs.operand, pairs.nbytes]
  return sorted(tuple(row) for row in np.concatenate(columns, axis=1).tolist())


@pytest.mark.parametrize("hops", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_pairs_are_those_of_a_search_from_every_node(seed, hops):
  graph = table_cases.program(seed, nodes=40, edges=(30, 60, 90)[seed % 3])
  pairs = node_pairs.find_pairs(graph, hops=hops)
  assert pairs.hop_limit == hops
  np.testing.assert_allclose(
    np.reshape(as_tuples(pairs), (-1, 9)), np.reshape(slow_pairs(graph, hops), (-1, 9)), rtol=1e-6
  )


def chain(nodes, config_nodes, extra=()):
  feat = np.zeros((nodes, NODE_FEATURES), np.float32)
  feat[:, 2 + 11] = 1
  feat[:, 28] = np.arange(nodes, 0, -1)
  edges = np.array(sorted([*((n + 1, n) for n in range(nodes - 1)), *extra]), np.int32)
  opcode, config_node = np.ones(nodes, np.uint8), np.array(config_nodes, np.int32)
  return random_graphs.of_arrays("chain", feat, opcode, edges.reshape(-1, 2), config_node, None)


@pytest.mark.parametrize("config_nodes", [[], [2]])
def test_without_two_configurable_nodes_there_are_no_pairs(config_nodes):
  pairs = node_pairs.find_pairs(chain(5, config_nodes))
  assert len(pairs) == 0 and pairs.ends.shape == (0, 2) and pairs.hop_limit == node_pairs.HOPS


def test_too_many_pairs_fall_back_to_fewer_hops_and_say_so(caplog):
  graph = chain(40, list(range(0, 40, 2)), extra=[(39, n) for n in range(0, 36, 3)])
  every = node_pairs.find_pairs(graph, hops=6)
  few = node_pairs.find_pairs(graph, hops=6, max_pairs=len(every) - 1)
  assert few.hop_limit < 6
  assert "chain has more than" in caplog.text and f"within {few.hop_limit}" in caplog.text
  exact = node_pairs.find_pairs(graph, hops=few.hop_limit)
  assert as_tuples(few) == as_tuples(exact)


def test_tensor_bytes_are_elements_times_the_size_of_their_type():
  feat = np.zeros((4, NODE_FEATURES), np.float32)
  feat[:, 28] = [6, -6, 6, 1]
  feat[[0, 1, 2, 3], [2 + 11, 2 + 13, 2 + 1, 2 + 16]] = 1  # f32, bf16, pred, tuple
  np.testing.assert_array_equal(node_pairs.tensor_bytes(feat), [24, 12, 6, 0])
