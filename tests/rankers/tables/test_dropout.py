"""Dropout by slate: the same masks on any number of devices and beside any padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import parts, table_cases
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.dropout import SlateDropout
from tpugraphs_jax.rankers.tables.network import ScoreTables
from tpugraphs_jax.rankers.tables.traffic import TrafficTables

ROWS = (3, 5, 2, 4)  # of each slate
RATE = 0.4


def masks(devices, padding, seed=0):
  """What is left of ones `[rows, 6]`, of each slate of all devices."""
  shares = np.split(np.arange(len(ROWS)), devices)
  size = padding + max(sum(ROWS[i] for i in share) for share in shares)
  slate_of = np.full((devices, size), 1 << 30)
  for row, share in zip(slate_of, shares):
    rows = np.repeat(np.arange(len(share)), [ROWS[i] for i in share])
    row[: len(rows)] = rows
  left = np.asarray(dropped_ones(devices, size)(jax.random.key(seed), slate_of))
  return [
    left[device][slate_of[device] == i] for device in range(devices) for i in range(len(shares[0]))
  ]


@functools.cache
def dropped_ones(devices, size):
  """`SlateDropout` of ones `[size, 6]` on each device, which has its share of the slates."""
  network = SlateDropout(RATE)

  def of(key, slates):
    ones, count = jnp.ones((size, 6)), len(ROWS) // devices
    return network.apply({}, ones, slates, count, train=True, rngs={"dropout": key})

  return parallel.pmap(of, in_axes=(None, 0), devices=jax.local_devices()[:devices])


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("padding", [0, 3])
def test_masks_do_not_depend_on_devices_and_padding(devices, padding):
  for found, expected in zip(masks(devices, padding), masks(1, 1), strict=True):
    np.testing.assert_array_equal(found, expected)


def test_slates_rows_and_steps_have_masks_of_their_own():
  first, second = masks(1, 0)[:2]
  assert (first != second[:3]).any() and (second[0] != second[1]).any()
  assert any((a != b).any() for a, b in zip(masks(1, 0), masks(1, 0, seed=1)))
  np.testing.assert_allclose(np.unique(first), [0, 1 / (1 - RATE)], rtol=1e-6)
  every = np.concatenate([mask.ravel() for seed in range(20) for mask in masks(1, 0, seed=seed)])
  np.testing.assert_allclose(np.mean(every == 0), RATE, atol=2 / np.sqrt(every.size))


SMALL = dict(op_embed_dim=3, hidden_dim=8, num_gnns=1, rank=3, dropout=0.5)


@pytest.mark.parametrize(
  "model",
  [ScoreTables(**SMALL), TrafficTables(hidden_dim=8, dropout=0.5)],
  ids=lambda model: type(model).__name__,
)
def test_tables_train_alike_on_one_and_on_two_devices(model):
  programs = [
    table_cases.prepared(table_cases.program(i, nodes=nodes), describe=model.choice_features)
    for i, nodes in enumerate((30, 12, 45, 20))
  ]
  whole = table_cases.batch_of(programs, order=range(4), graphs=4)
  halves = [table_cases.batch_of(programs, order=order, graphs=2) for order in ((0, 1), (2, 3))]
  params = parts.params_of(model, whole)
  jax.eval_shape(model.apply, {"params": params}, whole)  # evaluation needs no key
  scores = lambda key, batch: model.apply(
    {"params": params}, batch, train=True, rngs={"dropout": key}
  )

  def step(*batches):
    devices = jax.local_devices()[: len(batches)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    mapped = parallel.pmap(scores, in_axes=(None, 0), devices=devices)
    return lambda seed: np.concatenate(mapped(jax.random.key(seed), stacked))

  whole_loss, halves_loss = step(whole), step(*halves)
  np.testing.assert_allclose(whole_loss(7), halves_loss(7), rtol=1e-4, atol=1e-4)
  assert np.abs(whole_loss(7) - whole_loss(8)).max() > 1e-3, "nothing was dropped"
