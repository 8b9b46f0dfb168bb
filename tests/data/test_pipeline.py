"""The plan is a pure function of seed and step, whatever the devices; resuming is exact."""

import collections

import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import batching, buckets, pipeline
from tpugraphs_jax.data.batching import Slate


def graphs_of(count, seed=0):
  """Kernels of very different sizes."""
  rng = np.random.default_rng(seed)
  graphs = [
      random_graphs.tile_graph(rng, nodes=n, edges=int(rng.integers(0, 6 * n)), configs=20)
      for n in (rng.lognormal(2.5, 1, count).astype(int) + 2)
  ]
  return [batching.prepare(graph, graph.node_feat) for graph in graphs]


def plan_of(graphs, *, slates_per_step=4, devices=1, seed=0, epochs=16, **options):
  def draw(number, rng):
    def finish():
      ids = rng.choice(20, 3, replace=False)
      return Slate(graphs[number], ids, ids.astype(np.float32), number)

    return pipeline.Drawn(graphs[number].sizes, finish)

  return pipeline.BatchPlan(
      graphs, slates_per_step=slates_per_step, devices=devices, draw=draw, seed=seed,
      epochs=epochs, **options)


def slates_of(plan, step, devices=1):
  """(graph, its configurations) of a step, in the order of the devices."""
  return [(slot.graph_id, slot.config_ids.tolist())
          for device in range(devices) for slot in plan.slates(step, device)]


def epoch_of(plan, epoch):
  steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
  return [number for step in steps for share in plan.graphs_of_step(step) for number in share]


def test_the_plan_is_a_pure_function_of_seed_and_step():
  graphs = graphs_of(9)
  plan, again = plan_of(graphs, seed=5), plan_of(graphs, seed=5)
  steps = [0, 7, 3, 12, 7, 0]
  forward = {step: slates_of(again, step) for step in sorted(set(steps))}
  assert [slates_of(plan, step) for step in steps] == [forward[step] for step in steps]
  assert slates_of(plan_of(graphs, seed=6), 0) != forward[0]


@pytest.mark.parametrize("slates_per_epoch", [0, 7, 60])
def test_weighted_graphs_come_as_often_as_they_should(slates_per_epoch):
  weights = np.array([1.0, 4.0, 0.0, 2.5, 0.5])
  plan = plan_of(graphs_of(5), slates_per_step=1, weights=weights,
                 slates_per_epoch=slates_per_epoch)
  length, counts = slates_per_epoch or 5, np.zeros(5)
  orders = [epoch_of(plan, epoch) for epoch in range(300)]
  for order in orders:
    assert len(order) == length
    found = np.bincount(order, minlength=5)
    assert (np.abs(found - weights / 8 * length) < 1).all()  # rounded up or down
    counts += found
  np.testing.assert_allclose(counts / 300, weights / 8 * length, atol=0.15)
  assert len({tuple(order) for order in orders}) > 40
  assert orders[7] == epoch_of(plan_of(graphs_of(5), slates_per_step=1, weights=weights,
                                       slates_per_epoch=slates_per_epoch), 7)


@pytest.mark.parametrize("slates_per_epoch", [0, 6, 50])
def test_the_number_of_devices_changes_nothing_but_the_places(slates_per_epoch):
  graphs = graphs_of(11)
  plans = {
      devices: plan_of(graphs, slates_per_step=4, devices=devices,
                       slates_per_epoch=slates_per_epoch)
      for devices in (1, 2, 4)
  }
  for step in range(3 * plans[1].steps_per_epoch):
    expected = slates_of(plans[1], step)
    assert len(expected) == 4
    for devices in (2, 4):
      assert plans[devices].steps_per_epoch == plans[1].steps_per_epoch
      assert slates_of(plans[devices], step, devices) == expected
      shares = [len(plans[devices].slates(step, device)) for device in range(devices)]
      assert shares == [4 // devices] * devices


@pytest.mark.parametrize("devices", [1, 2])
def test_budgets_can_follow_what_is_drawn_of_a_graph(devices):
  """Sizes that depend on the draw are those of the slots of that very step."""
  def draw(number, rng):
    nodes = int(rng.integers(1, 200))
    return pipeline.Drawn(
        graphs[number].sizes | {"nodes": nodes},
        lambda: Slate(graphs[number], np.arange(nodes), np.zeros(0), number))

  graphs = graphs_of(8)
  plan = pipeline.BatchPlan(
      graphs, slates_per_step=4, devices=devices, draw=draw, seed=0, epochs=1000)
  budgets = set()
  for step in range(20):
    drawn = [sum(len(slot.config_ids) for slot in plan.slates(step, device))
             for device in range(devices)]
    assert max(drawn) < plan.budget(step)["nodes"]
    budgets.add(plan.budget(step)["nodes"])
  assert len(budgets) > 1  # not always the largest


def test_a_short_run_compiles_one_shape_and_a_long_one_several():
  graphs = graphs_of(40)
  shapes = {
      epochs: {plan.budget(step)["nodes"] for step in range(epochs * plan.steps_per_epoch)}
      for epochs in (3, 3000) for plan in [plan_of(graphs, epochs=epochs)]
  }
  assert len(shapes[3]) == 1 and len(shapes[3000]) > 3


def test_every_epoch_has_every_graph_once_in_another_order():
  plan = plan_of(graphs_of(12))
  epochs = [epoch_of(plan, epoch) for epoch in range(4)]
  assert plan.steps_per_epoch == 3
  assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4


def test_configurations_are_drawn_anew_every_epoch():
  plan = plan_of(graphs_of(4))
  drawn = [dict(slates_of(plan, epoch)) for epoch in range(5)]
  assert len({tuple(drawn[epoch][0]) for epoch in range(5)}) > 1


def test_slates_that_do_not_fill_a_batch_are_left_out():
  plan = plan_of(graphs_of(11))
  assert plan.steps_per_epoch == 2
  left_out = set()
  for epoch in range(30):
    chosen = epoch_of(plan, epoch)
    assert len(set(chosen)) == len(chosen) == 8
    left_out |= set(range(11)) - set(chosen)
  assert left_out == set(range(11))  # never the same graphs for ever


@pytest.mark.parametrize("slates", [5, 11, 24, 40])
def test_an_epoch_of_given_length_passes_over_the_graphs_evenly(slates):
  plan = plan_of(graphs_of(11), slates_per_epoch=slates)
  assert plan.steps_per_epoch == slates // 4
  counts = collections.Counter(epoch_of(plan, 1))
  assert sum(counts.values()) == slates // 4 * 4
  assert max(counts.values()) <= -(-slates // 11)


@pytest.mark.parametrize("devices, shares", [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_fewer_graphs_than_a_batch_leave_slots_empty(devices, shares):
  plan = plan_of(graphs_of(3), slates_per_step=6, devices=devices)
  assert plan.steps_per_epoch == 1 and plan.slates_per_device == 6 // devices
  for step in range(5):
    assert [len(plan.slates(step, device)) for device in range(devices)] == shares
    assert sorted(number for number, _ in slates_of(plan, step, devices)) == [0, 1, 2]


def test_fewer_slates_than_devices_are_refused():
  with pytest.raises(ValueError, match="3 slates per epoch for 4 devices; set batch.sl"):
    plan_of(graphs_of(3), devices=4)
  plan = plan_of(graphs_of(3), devices=4, slates_per_epoch=4)
  assert len(slates_of(plan, 0, 4)) == 4


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("graphs", [5, 60])
def test_budgets_hold_every_batch_of_every_device(devices, graphs):
  plan = plan_of(graphs_of(graphs), devices=devices)
  assert len(plan.budgets) <= buckets.MAX_BUDGETS
  # Far beyond the epochs that the budgets were chosen from.
  for step in (*range(40), *range(1000, 1040)):
    budget = plan.budget(step)
    for device in range(devices):
      sizes = batching.total_sizes([slot.graph for slot in plan.slates(step, device)])
      assert sizes["nodes"] < budget["nodes"]
      assert all(sizes[key] <= budget[key] for key in sizes)


def test_padding_is_the_share_of_unused_nodes():
  plan = plan_of(graphs_of(9), devices=2)
  used = room = 0
  for step in range(6):
    used += sum(len(slot.graph.opcode) for device in (0, 1) for slot in plan.slates(step, device))
    room += 2 * plan.budget(step)["nodes"]
  assert plan.padding(6) == pytest.approx(1 - used / room)


def batches_of(plan, total_steps=11, local_devices=(0,), **options):
  def assemble(slots, budget):
    numbers = [[slot.graph_id, *slot.config_ids] for slot in slots]
    return {"slates": np.array(numbers), "nodes": np.array(budget["nodes"])}

  stack = lambda parts: {key: np.stack([part[key] for part in parts]) for key in parts[0]}
  return pipeline.training_batches(
      pipeline.Batches(plan, total_steps, local_devices, assemble, stack), **options)


def assert_same(found, expected):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a["slates"], b["slates"])
    np.testing.assert_array_equal(a["nodes"], b["nodes"])


def test_batches_are_the_plan_in_order():
  plan = plan_of(graphs_of(10), devices=2)
  batches = list(batches_of(plan, local_devices=(0, 1)))
  assert len(batches) == 11
  for step, batch in enumerate(batches):
    found = [(row[0], row[1:]) for row in batch["slates"].reshape(-1, 4).tolist()]
    assert found == slates_of(plan, step, 2)
    assert (batch["nodes"] == plan.budget(step)["nodes"]).all()


def test_processes_load_their_own_devices_of_the_same_batches():
  plan = plan_of(graphs_of(10), devices=4)
  whole = list(batches_of(plan, local_devices=range(4)))
  for devices in ((0, 1), (2, 3)):
    part = list(batches_of(plan, local_devices=devices))
    assert_same(part, [{k: v[list(devices)] for k, v in batch.items()} for batch in whole])


@pytest.mark.parametrize("taken", [0, 1, 5, 10])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_iterator_goes_on_exactly_in_the_middle_of_an_epoch(taken, threads):
  plan = plan_of(graphs_of(13))
  expected = list(batches_of(plan))
  iterator = batches_of(plan, threads=threads)
  assert_same([next(iterator) for _ in range(taken)], expected[:taken])
  state = iterator.get_state()
  resumed = batches_of(plan_of(graphs_of(13)), threads=threads, prefetch=2)
  resumed.set_state(state)
  assert_same(list(resumed), expected[taken:])
