import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from tpugraphs_jax.data.batching import ABSENT, Adjacency, Neighbours, NodesByHop
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.split_nodes import SplitNodes
from tpugraphs_jax.rankers import base

# Three slots of 3, 0 and 2 nodes and one padding node.
GRAPH = jraph.GraphsTuple(
    nodes={"opcode": np.zeros(6, np.int32)}, edges=None, globals=None,
    senders=np.zeros(0, np.int32), receivers=np.zeros(0, np.int32),
    n_node=np.array([3, 0, 2, 1], np.int32), n_edge=np.zeros(4, np.int32))
GRAPH_OF = [0, 0, 0, 2, 2, 3]
SLOTS = 3
NO_EDGES = Neighbours(*(np.zeros((0, 0), np.int32),) * 3)
# Hop 0: nodes 4 and 1; hop 1: node 3.
REACH = NodesByHop(
    nodes=(np.array([4, 1, ABSENT], np.int32), np.array([3, ABSENT], np.int32)),
    hop=np.array([ABSENT, 0, ABSENT, 1, 0, ABSENT], np.int32),
    adjacency=Adjacency(NO_EDGES, NO_EDGES))


def split_values(hop):
  """Random split features and the full `[6, 2, 3]` tensor they stand for."""
  rng = np.random.default_rng(hop)
  shared = rng.normal(size=(6, 1, 3)).astype(np.float32)
  node = np.concatenate(REACH.nodes[: hop + 1])
  varying = rng.normal(size=(len(node), 2, 3)).astype(np.float32)
  full = np.repeat(shared, 2, axis=1)
  full[node[node < 6]] = varying[node < 6]
  return SplitNodes(jnp.asarray(shared), jnp.asarray(varying), hop), full


def slow_sum(full):
  total = np.zeros((SLOTS, 2, 3), np.float32)
  for node, slot in enumerate(GRAPH_OF):
    if slot < SLOTS:
      total[slot] += full[node]
  return total


@pytest.mark.parametrize("hop", [0, 1])
def test_split_sum_counts_every_real_node_once(hop):
  split, full = split_values(hop)
  chosen = pooling.split_selection(GRAPH, REACH, hop)
  np.testing.assert_allclose(
      pooling.split_pool_sum(split, chosen), slow_sum(full), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hop", [0, 1])
def test_split_max_is_the_maximum_of_real_nodes_and_zero_without_any(hop):
  split, full = split_values(hop)
  # A graph whose values are all negative shows that empty rows do not count as 0.
  split, full = jax.tree.map(lambda v: v - 10, split), full - 10
  largest = pooling.split_pool_max(split, pooling.split_selection(GRAPH, REACH, hop))
  expected = np.stack([full[:3].max(axis=0), np.zeros((2, 3)), full[3:5].max(axis=0)])
  np.testing.assert_allclose(largest, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_graph_sum_and_per_node_are_each_others_derivative(dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(6, 2, 3)), dtype)
  value = jnp.asarray(rng.normal(size=(SLOTS, 2, 3)), dtype)
  graph_of = jnp.array(GRAPH_OF)
  total, sum_vjp = jax.vjp(lambda x: pooling.graph_sum(x, graph_of, SLOTS), x)
  spread, spread_vjp = jax.vjp(lambda v: pooling.per_node(v, graph_of), value)
  full = np.asarray(x, np.float32)
  np.testing.assert_allclose(total, slow_sum(full), rtol=1e-5, atol=1e-6)
  padded = np.concatenate([np.asarray(value, np.float32), np.zeros((1, 2, 3))])
  np.testing.assert_array_equal(np.asarray(spread, np.float32), padded[GRAPH_OF])
  (from_sum,), (from_spread,) = sum_vjp(value.astype(jnp.float32)), spread_vjp(x)
  np.testing.assert_array_equal(np.asarray(from_sum, np.float32), padded[GRAPH_OF])
  np.testing.assert_allclose(
      np.asarray(from_spread, np.float32), slow_sum(full),
      rtol=1e-5 if dtype == jnp.float32 else 1e-2, atol=1e-6)
  assert total.dtype == jnp.float32 and spread.dtype == from_sum.dtype == from_spread.dtype == dtype


def test_sums_are_float32_for_half_precision_nodes():
  x = jnp.full((300, 1), 1, jnp.bfloat16)  # bfloat16 sums of ones stop at 256.
  total = pooling.pool_sum(x, jnp.ones((1, 300)))
  assert total.dtype == jnp.float32
  assert float(total[0, 0]) == 300


def test_gradient_of_the_maximum_reaches_the_largest_node_only():
  split, full = split_values(1)
  chosen = pooling.split_selection(GRAPH, REACH, 1)
  grad = jax.grad(lambda s: jnp.sum(pooling.split_pool_max(s, chosen)))(split)
  # Only nodes 0 and 2 use their shared part; its gradient is summed over configurations.
  wins = full[[0, 2]] == full[:3].max(axis=0, keepdims=True)
  np.testing.assert_allclose(grad.shared[jnp.array([0, 2]), 0], wins.sum(axis=1))
  assert not np.asarray(grad.shared)[[1, 3, 4, 5]].any()


@pytest.mark.parametrize("name", ["nope", "config_nope", "config_config_mean", ""])
def test_an_unknown_pooling_is_refused_with_all_names(name):
  with pytest.raises(ValueError, match="mean, sum, max"):
    pooling.by_name(name)
  with pytest.raises(ValueError, match="config_mean"):
    base.create_network("layout", "SAGE", pooling=(name,))
