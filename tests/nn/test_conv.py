"""Convolutions in every form of node features against loops over edges.

The graphs have isolated nodes, edges that occur twice, and one of a single node.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.support.system_cases import (
  apply_to,
  check,
  dense,
  DIRECTIONS,
  FORMS,
  HOPS,
  neighbours,
  slow_appnp,
  slow_mean,
  softmax,
  WIDTH,
)
from tpugraphs_jax.nn.aggregation import BOTH, OPERANDS, USERS
from tpugraphs_jax.nn.conv import Appnp, Gatv2, Sage


def test_the_graphs_have_isolated_nodes_and_double_edges():
  heard = neighbours(BOTH)
  assert [] in heard and any(len(of) > len(set(of)) for of in heard)


@pytest.mark.parametrize("hop", FORMS)
@pytest.mark.parametrize("directions", [(BOTH,), (OPERANDS, USERS)])
def test_sage_adds_the_means_of_neighbours(directions, hop):
  params, x, found = apply_to(Sage(5, directions), hop)
  assert set(params) == {"self", *directions}
  assert all(set(params[direction]) == {"kernel"} for direction in directions)
  means = [slow_mean(x, direction) @ params[direction]["kernel"] for direction in directions]
  check(found, sum(means) + dense(x, params["self"]), 1e-4)


@pytest.mark.parametrize("hop", [hop for hop in FORMS if hop != 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_appnp_propagates_and_restarts(direction, hop):
  module = Appnp(WIDTH, direction, steps=HOPS)
  params, x, found = apply_to(module, hop)
  check(found, slow_appnp(x, params, direction), 1e-4)


def test_appnp_without_steps_is_a_linear_layer():
  params, x, found = apply_to(Appnp(WIDTH, USERS, steps=0), 0)
  check(found, dense(x, params["dense"]))


@pytest.mark.parametrize("hop", [FORMS[0], 0, FORMS[-1]])
@pytest.mark.parametrize("direction, heads", [(OPERANDS, 1), (USERS, 2), (BOTH, 2)])
def test_gatv2_weighs_every_edge_in_each_configuration(direction, heads, hop):
  params, x, found = apply_to(Gatv2(WIDTH, direction, heads), hop)
  sent, received = dense(x, params["senders"]), dense(x, params["receivers"])
  expected, size = np.zeros_like(sent), WIDTH // heads
  for v, heard in enumerate(neighbours(direction)):
    heard = [*heard, v]
    for head in range(heads):
      part = slice(head * size, (head + 1) * size)
      hidden = sent[heard][..., part] + received[v][..., part]
      logits = np.where(hidden > 0, hidden, 0.2 * hidden) @ params["attention"][head]
      weights = softmax(logits.T)  # [C, neighbours]
      expected[v, :, part] = np.einsum("cu,ucf->cf", weights, sent[heard][..., part])
  check(found, expected + params["bias"], 1e-4)


@pytest.mark.parametrize(
  "make", [functools.partial(Sage, directions=(BOTH,)), functools.partial(Gatv2, direction=BOTH)]
)
def test_an_isolated_node_hears_itself_alone(make):
  """SAGE has means of 0 there, GATv2 a loop."""
  isolated = neighbours(BOTH).index([])
  params, x, found = apply_to(make(WIDTH), 0)
  received = (
    dense(x, params["senders"]) + params["bias"]
    if "senders" in params
    else dense(x, params["self"])
  )
  np.testing.assert_allclose(found[isolated], received[isolated], rtol=1e-4, atol=1e-5)
