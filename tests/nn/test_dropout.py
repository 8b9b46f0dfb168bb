"""Dropout: the same features for all configurations, whatever the batch and the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import system_cases
from tests.support.system_cases import (
  BATCH,
  CONFIGS,
  features,
  FORMS,
  NODES,
  nodes_of,
  on_devices,
  REAL,
  WIDTH,
)
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.nodes import NONE, Slates


def kept(batch, rate=0.5, width=WIDTH, key=0):
  """What dropout makes of ones on all nodes, `[N, width]`."""
  x = Slates.of(batch).nodes(jnp.ones((len(batch.graph.nodes["opcode"]), width)))
  return (
    Dropout(rate).apply({}, x, train=True, rngs={"dropout": jax.random.key(key)}).everywhere()[:, 0]
  )


@pytest.mark.parametrize("hop", FORMS)
def test_the_same_features_are_left_out_of_every_configuration(hop):
  ones = tuple(None if part is None else np.ones_like(part) for part in features(hop))

  def drop(_):
    x = nodes_of(ones, hop)
    dropped = Dropout(0.5).apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
    assert dropped.hop == hop
    return jnp.broadcast_to(dropped.everywhere(), (NODES, CONFIGS, WIDTH))

  found = on_devices(drop, [np.zeros(())])[0]
  expected = on_devices(kept, [BATCH])[0]
  np.testing.assert_array_equal(found[REAL], np.repeat(expected[:, None], CONFIGS, axis=1)[REAL])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_others_are_scaled_up_by_the_share_that_stays(rate):
  found = on_devices(lambda batch: kept(batch, rate, 1000), [BATCH])[0][REAL]
  np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - rate)], rtol=1e-6)
  np.testing.assert_allclose((found == 0).mean(), rate, atol=0.02)
  np.testing.assert_allclose((found == 0).mean(axis=1), rate, atol=0.08)  # of every node


def test_two_devices_leave_out_what_one_does():
  programs = system_cases.raw_layouts()[:4]
  (whole,) = on_devices(kept, system_cases.batches_of(programs))
  first, second = on_devices(kept, system_cases.batches_of(programs[:2], programs[2:]))
  count, half = (sum(graph.num_nodes for graph in some) for some in (programs, programs[:2]))
  np.testing.assert_array_equal(first[:half], whole[:half])
  np.testing.assert_array_equal(second[: count - half], whole[half:count])


def test_graph_features_have_masks_by_slate():
  """Two devices with two slates each draw what one device with four slates draws."""
  x = np.ones((4, CONFIGS, 50), np.float32)
  drop = lambda x: Dropout(0.5).apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
  whole, halves = on_devices(drop, [x])[0], on_devices(drop, [x[:2], x[2:]])
  np.testing.assert_array_equal(halves.reshape(x.shape), whole)
  assert (whole == whole[:, :1]).all() and not (whole[0] == whole[1]).all()


def test_without_a_rate_or_training_nothing_is_left_out():
  x = nodes_of(features(NONE), NONE)
  assert Dropout(0.5).apply({}, x, train=False) is x
  assert Dropout(0.0).apply({}, x, train=True) is x


def test_keys_make_masks():
  masks = [on_devices(lambda batch, key=key: kept(batch, key=key), [BATCH])[0] for key in (0, 0, 1)]
  np.testing.assert_array_equal(masks[0], masks[1])
  assert (masks[0] != masks[2]).any()
