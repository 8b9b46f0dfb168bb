"""Node features in every form stand for the tensor `[N, C, F]`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parts import everywhere
from tests.support.system_cases import (
  BATCH,
  check,
  CONFIGS,
  DIRECTIONS,
  features,
  FORMS,
  full_of,
  GRAPHS,
  layout_batch,
  neighbours,
  NODES,
  nodes_of,
  OF_GRAPH,
  random,
  slow_configs,
  TILES,
  WIDTH,
)
from tpugraphs_jax.nn import aggregation, nodes, pooling
from tpugraphs_jax.nn.nodes import EVERYWHERE, Nodes, NONE, Slates


def spread(x):
  """`[N, C, F]` of node features in any form."""
  return np.broadcast_to(everywhere(x), (NODES, CONFIGS, x.width))


PAIRS = [(first, second) for first in FORMS for second in FORMS]


@pytest.mark.parametrize("hop_x, hop_y", PAIRS)
def test_operations_of_two_forms_are_those_of_full_tensors(hop_x, hop_y):
  first, second = features(hop_x), features(hop_y, seed=3)
  x, y = nodes_of(first, hop_x), nodes_of(second, hop_y)
  full_x, full_y = full_of(first, hop_x), full_of(second, hop_y)
  for found, expected in (
    (x + y, full_x + full_y),
    (x - y, full_x - full_y),
    (x * y, full_x * full_y),
    (nodes.concat(x, y, x), np.concatenate([full_x, full_y, full_x], axis=-1)),
    (
      nodes.combine(lambda a, b: jnp.sin(a) @ jnp.ones((WIDTH, 2)) + b[..., :1], x, y),
      np.sin(full_x).sum(axis=-1, keepdims=True).repeat(2, axis=-1) + full_y[..., :1],
    ),
  ):
    assert found.hop == max(hop_x, hop_y) and found.width == expected.shape[-1]
    np.testing.assert_allclose(spread(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hop", FORMS)
def test_functions_of_single_nodes_and_divisions_keep_the_form(hop):
  parts, by = features(hop), 1 + np.abs(random(NODES, seed=4))
  x, full = nodes_of(parts, hop), full_of(parts, hop)
  np.testing.assert_allclose(spread(x.map(jnp.tanh)), np.tanh(full), rtol=1e-5, atol=1e-6)
  divided = x.divide(jnp.asarray(by))
  np.testing.assert_allclose(spread(divided), full / by[:, None, None], rtol=1e-5)
  assert x.map(jnp.tanh).hop == divided.hop == hop and divided.dtype == jnp.float32


@pytest.mark.parametrize("hop", FORMS)
@pytest.mark.parametrize("further", FORMS)
def test_a_form_that_reaches_further_holds_the_same_features(hop, further):
  if further < hop:
    return
  parts = features(hop)
  x = nodes_of(parts, hop).within(further)
  assert x.hop == further
  np.testing.assert_array_equal(spread(x), full_of(parts, hop))


def test_features_keep_their_dtype_and_are_a_pytree():
  x = nodes_of(features(0), 0).map(lambda rows: rows.astype(jnp.bfloat16))
  assert x.dtype == x.divide(jnp.ones(NODES)).dtype == jnp.bfloat16
  again = jax.jit(lambda x: x + x)(x)
  assert again.hop == 0 and again.dtype == jnp.bfloat16


# Neighbours.


def reached_nodes(batch):
  """Random features `[N, C, 2]` that differ on the nodes of hop 0."""
  slates = Slates.of(batch)
  varying = random(slates.rows_within(0), CONFIGS, 2, seed=5)
  return Nodes(slates, jnp.asarray(random(NODES, 1, 2)), jnp.asarray(varying), 0)


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("reuse", [True, False])
def test_sums_over_neighbours_equal_full_ones_round_by_round(reuse, self_loops):
  batch = layout_batch(hops=3, reuse=reuse)
  x = reached_nodes(batch)
  for hop, direction in enumerate(DIRECTIONS, start=1):
    before = np.asarray(everywhere(x))
    x = jax.jit(functools.partial(nodes.neighbours, direction=direction, self_loops=self_loops))(x)
    assert x.hop == hop
    expected = [
      before[heard].sum(axis=0) + self_loops * before[node]
      for node, heard in enumerate(neighbours(direction, batch))
    ]
    check(np.asarray(everywhere(x)), np.stack(expected))


@pytest.mark.parametrize("hop", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_means_over_neighbours_equal_loops_in_every_form(hop, direction):
  parts = features(hop)
  found = jax.jit(lambda x: nodes.neighbour_mean(x, direction))(nodes_of(parts, hop))
  assert found.hop == (hop if hop in (NONE, EVERYWHERE) else hop + 1)
  full, heard = full_of(parts, hop), neighbours(direction)
  assert any(not h for h in heard) and any(len(h) > len(set(h)) for h in heard)
  expected = [np.mean([full[u] for u in h], axis=0) if h else 0 * full[0] for h in heard]
  check(np.asarray(spread(found)), np.stack(expected))


def test_more_rounds_than_the_batch_was_built_for_are_refused():
  batch = layout_batch(hops=1)
  heard = lambda x: nodes.neighbours(x, aggregation.USERS)
  jax.eval_shape(lambda: heard(reached_nodes(batch)))
  with pytest.raises(ValueError, match="hops"):
    jax.eval_shape(lambda: heard(heard(reached_nodes(batch))))


# Slates.


@pytest.mark.parametrize("batch", [BATCH, TILES], ids=["layouts", "tiles"])
def test_slates_know_their_nodes_and_configurations(batch):
  slates = Slates.of(batch)
  count = np.asarray(batch.graph.n_node)
  of_graph = np.repeat(np.arange(len(count)), count)
  assert (slates.graphs, slates.configs) == batch.config_mask.shape
  assert slates.num_nodes == len(of_graph) == len(batch.graph.nodes["opcode"])
  np.testing.assert_array_equal(slates.graph_of, of_graph)
  np.testing.assert_array_equal(pooling.real_nodes(batch.graph), count[:-1])
  there = np.concatenate([batch.config_mask, np.zeros_like(batch.config_mask[:1])])
  np.testing.assert_array_equal(slates.node_configs, there[of_graph])
  assert int(slates.edge_mask.sum()) == int(batch.graph.n_edge[:-1].sum())


def test_rows_of_hops_name_their_nodes_and_configurable_ones():
  slates, (_, configured) = Slates.of(BATCH), slow_configs(BATCH)
  rows = np.asarray(slates.nodes_within(1))
  assert len(rows) == slates.rows_within(1) > slates.rows_within(0)
  configurable = rows[: slates.rows_within(0)]
  is_configurable = np.asarray(slates.is_configurable_row())
  np.testing.assert_array_equal(np.sort(configurable[is_configurable]), np.flatnonzero(configured))
  assert not is_configurable.all()  # padding


def test_values_of_slates_become_features():
  slates = Slates.of(BATCH)
  shared, full = random(NODES, WIDTH), random(NODES, CONFIGS, WIDTH)
  assert slates.nodes(jnp.asarray(shared)).hop == NONE
  np.testing.assert_array_equal(spread(slates.nodes(jnp.asarray(shared)))[:, 1], shared)
  np.testing.assert_array_equal(spread(slates.full(jnp.asarray(full))), full)
  # What depends on any node is the same in all configurations only where all nodes are.
  assert slates.from_all(full[:, :1], nodes_of(features(NONE), NONE)).hop == NONE
  assert slates.from_all(full, nodes_of(features(0), 0)).hop == EVERYWHERE
  assert GRAPHS in OF_GRAPH  # the batch has padding nodes
