"""The plan is a pure function of seed and step on any number of devices; resuming is exact.

Slates follow their exact distributions. Budgets hold every batch and waste little.
"""

import collections
import itertools
import math

import jax
import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.data.plan import (
  Batches,
  BatchPlan,
  budgets_for,
  choose_budgets,
  config_draw,
  ConfigSampler,
  cost,
  draw_slates,
  graph_weights,
  MAX_BUDGETS,
  sample_block,
  SAMPLINGS,
  SlateDraft,
  training_batches,
)
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.infra import parallel


def graphs_of(count, seed=0):
  """Kernels of very different sizes."""
  rng = np.random.default_rng(seed)
  graphs = [
    random_graphs.tile_graph(rng, nodes=n, edges=int(rng.integers(0, 6 * n)), configs=20)
    for n in (rng.lognormal(2.5, 1, count).astype(int) + 2)
  ]
  return [batching.prepare(graph, graph.node_feat) for graph in graphs]


def plan_of(graphs, **options):
  def draw(number, rng, turn):
    def finish():
      ids = rng.choice(20, 3, replace=False)
      return Slate(graphs[number], ids, ids.astype(np.float32), number)

    return SlateDraft(graphs[number].sizes, finish)

  options = dict(slates_per_step=4, devices=1, seed=0, epochs=16) | options
  return BatchPlan(graphs, draw=draw, **options)


def slates_of(plan, step, devices=1):
  """(graph, its configurations) of a step, in the order of the devices."""
  return [
    (slot.graph_id, slot.config_ids.tolist())
    for device in range(devices)
    for slot in plan.slates(step, device)
  ]


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
  plan = plan_of(
    graphs_of(5), slates_per_step=1, weights=weights, slates_per_epoch=slates_per_epoch
  )
  length, counts = slates_per_epoch or 5, np.zeros(5)
  orders = [epoch_of(plan, epoch) for epoch in range(300)]
  for order in orders:
    assert len(order) == length
    found = np.bincount(order, minlength=5)
    assert (np.abs(found - weights / 8 * length) < 1).all()  # rounded up or down
    counts += found
  np.testing.assert_allclose(counts / 300, weights / 8 * length, atol=0.15)
  assert len({tuple(order) for order in orders}) > 40


@pytest.mark.parametrize("slates_per_epoch", [0, 6, 50])
def test_the_number_of_devices_changes_nothing_but_the_places(slates_per_epoch):
  graphs = graphs_of(11)
  plans = {
    devices: plan_of(graphs, slates_per_step=4, devices=devices, slates_per_epoch=slates_per_epoch)
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
  """Sizes that depend on the draw are the sizes of the slates of that step."""

  def draw(number, rng, turn):
    nodes = int(rng.integers(1, 200))
    return SlateDraft(
      graphs[number].sizes | {"nodes": nodes},
      lambda: Slate(graphs[number], np.arange(nodes), np.zeros(0), number),
    )

  graphs = graphs_of(8)
  plan = BatchPlan(graphs, slates_per_step=4, devices=devices, draw=draw, seed=0, epochs=1000)
  budgets = set()
  for step in range(20):
    drawn = [
      sum(len(slot.config_ids) for slot in plan.slates(step, device)) for device in range(devices)
    ]
    assert max(drawn) < plan.budget(step)["nodes"]
    budgets.add(plan.budget(step)["nodes"])
  assert len(budgets) > 1  # not always the largest


@pytest.mark.parametrize("graphs, slates", [(12, 0), (11, 0), (11, 5), (11, 24), (11, 40)])
def test_an_epoch_passes_over_the_graphs_evenly_in_another_order(graphs, slates):
  """Slates that do not fill a batch are left out; they are of other graphs each epoch."""
  plan, length = plan_of(graphs_of(graphs), slates_per_epoch=slates), slates or graphs
  assert plan.steps_per_epoch == length // 4
  epochs = [epoch_of(plan, epoch) for epoch in range(30)]
  for epoch in epochs:
    assert len(epoch) == length // 4 * 4
    assert max(collections.Counter(epoch).values()) <= -(-length // graphs)
  assert len({tuple(epoch) for epoch in epochs}) == 30
  assert set(range(graphs)) == set().union(*epochs)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("graphs, slates, last", [(9, 0, 1), (11, 0, 3), (12, 0, 4), (5, 22, 2)])
def test_the_last_batch_of_an_epoch_can_be_smaller(graphs, slates, last, devices):
  plan = plan_of(graphs_of(graphs), devices=devices, slates_per_epoch=slates, drop_remainder=False)
  length = slates or graphs
  assert plan.steps_per_epoch == -(-length // 4)
  alone = plan_of(graphs_of(graphs), slates_per_epoch=slates, drop_remainder=False)
  for epoch in range(4):
    order = epoch_of(plan, epoch)
    counts = collections.Counter(order)
    assert len(order) == length and set(counts) == set(range(graphs))
    assert max(counts.values()) - min(counts.values()) <= 1
    step = (epoch + 1) * plan.steps_per_epoch - 1
    found = slates_of(plan, step, devices)
    assert len(found) == last and found == slates_of(alone, step)


@pytest.mark.parametrize("graphs, per_step", [(11, 8), (13, 8), (9, 4), (5, 8), (12, 4)])
def test_a_slate_has_the_same_key_on_any_number_of_devices(graphs, per_step):
  """Also in the last batch of an epoch, and where an epoch has fewer slates than a batch."""
  key = jax.random.key(3)
  for devices in (1, 2, 4):
    options = dict(slates_per_step=per_step, devices=devices, drop_remainder=False)
    plan = plan_of(graphs_of(graphs), **options)
    make = lambda _, rows=plan.slates_per_device: parallel.slate_keys(key, rows)
    keys = parallel.pmap(make, devices=jax.devices()[:devices])(np.arange(devices))
    for step in range(plan.steps_per_epoch):
      counts = [len(plan.slates(step, device)) for device in range(devices)]
      assert counts == sorted(counts, reverse=True)
      found = [keys[device, row] for device in range(devices) for row in range(counts[device])]
      assert found == [jax.random.fold_in(key, place) for place in range(sum(counts))]


def test_a_device_without_a_slate_gets_a_batch_of_padding():
  plan = plan_of(graphs_of(9), devices=4, drop_remainder=False)
  assemble = lambda slates, budget: batching.assemble_tile(
    slates, budget, graphs=1, configs=3, transform=lambda x: x
  )
  source = Batches(plan, 30, range(4), assemble, list)
  first, *others = source[2]
  assert first.config_mask.sum() == 3
  for batch in others:
    assert not batch.config_mask.any() and not batch.target.any()
    assert not batch.graph.n_node[:-1].any() and not batch.graph.n_edge[:-1].any()
    assert batch.graph.n_node.sum() == len(batch.graph.nodes["opcode"])
    for empty, real in zip(jax.tree.leaves(batch), jax.tree.leaves(first), strict=True):
      assert (empty.shape, empty.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("devices, shares", [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_fewer_graphs_than_a_batch_leave_slots_empty(devices, shares):
  plan = plan_of(graphs_of(3), slates_per_step=6, devices=devices)
  assert plan.steps_per_epoch == 1 and plan.slates_per_device == shares[0]
  for step in range(5):
    assert [len(plan.slates(step, device)) for device in range(devices)] == shares
    assert sorted(number for number, _ in slates_of(plan, step, devices)) == [0, 1, 2]


def test_fewer_slates_than_devices_are_refused():
  with pytest.raises(ValueError, match="devices"):
    plan_of(graphs_of(3), devices=4)
  plan = plan_of(graphs_of(3), devices=4, slates_per_epoch=4)
  assert len(slates_of(plan, 0, 4)) == 4


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("graphs", [5, 60])
def test_budgets_hold_every_batch_of_every_device(devices, graphs):
  plan = plan_of(graphs_of(graphs), devices=devices)
  assert len(plan.budgets) <= MAX_BUDGETS
  # Far beyond the epochs that the budgets were chosen from.
  for step in (*range(40), *range(1000, 1040)):
    budget = plan.budget(step)
    for device in range(devices):
      sizes = batching.total_sizes([slot.graph for slot in plan.slates(step, device)])
      assert sizes["nodes"] < budget["nodes"]
      assert all(sizes[key] <= budget[key] for key in sizes)


def batches_of(plan, local_devices=(0,), **options):
  def assemble(slots, budget):
    numbers = [[slot.graph_id, *slot.config_ids] for slot in slots]
    return {"slates": np.array(numbers), "nodes": np.array(budget["nodes"])}

  stack = lambda parts: {key: np.stack([part[key] for part in parts]) for key in parts[0]}
  return training_batches(Batches(plan, 11, local_devices, assemble, stack), **options)


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


def test_tasks_load_their_own_devices_of_the_same_batches():
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


def least_waste(nodes, runs):
  """Brute force over all ways to cut the sorted sizes into at most `runs` runs."""
  nodes = sorted(nodes)
  best = 1.0
  for count in range(runs):
    for cuts in itertools.combinations(range(1, len(nodes)), count):
      parts = [nodes[a:b] for a, b in zip((0, *cuts), (*cuts, len(nodes)))]
      padded = sum(len(part) * part[-1] for part in parts)
      best = min(best, 1 - sum(nodes) / padded)
  return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_budgets", [1, 2, 3])
def test_waste_of_an_endless_run_is_the_least_possible(seed, max_budgets):
  nodes = np.random.default_rng(seed).integers(1, 400, 9)
  # Only nodes, so that no other entry forces a batch into a larger budget.
  sizes = [{"nodes": int(n) - 1} for n in nodes]
  budgets = choose_budgets(sizes, max_budgets=max_budgets, multiple=1)
  found = 1 - nodes.sum() / sum(budgets_for([size], budgets)[0]["nodes"] for size in sizes)
  assert found <= least_waste(nodes, max_budgets) + 0.02


def test_a_budget_must_save_more_padding_than_its_compilation_costs():
  sizes = [{"nodes": n} for n in (100, 200, 400, 800)]
  # The second of two budgets saves 1,200 nodes in four steps, each in 16 configurations.
  saved_rows = 16 * (4 * 800 - (2 * 200 + 2 * 800)) / 4
  short, long = (1.5e6 / saved_rows * factor for factor in (0.99, 1.01))
  assert len(choose_budgets(sizes, steps=short)) == 1
  assert len(choose_budgets(sizes, steps=long)) == 2
  assert len(choose_budgets(sizes)) == 4


def test_nodes_of_score_tables_count_once():
  kernels = [{"nodes": n} for n in (100, 200, 400, 800)]
  tables = [size | {"choices": 7} for size in kernels]
  assert cost(tables).tolist() == [100, 200, 400, 800]
  assert len(choose_budgets(kernels, steps=600)) > 1
  assert len(choose_budgets(tables, steps=600)) == 1


DRAWS = 20_000


def counts_of(runtime, count, kind):
  rng, draw = np.random.default_rng(0), config_draw(np.array(runtime), count, kind)
  return collections.Counter(tuple(sorted(draw(rng).tolist())) for _ in range(DRAWS))


def assert_frequencies(counts, probability):
  """Every outcome within four standard errors of its exact probability."""
  assert math.isclose(sum(probability.values()), 1)
  assert counts.keys() <= probability.keys()
  for outcome, p in probability.items():
    assert abs(counts[outcome] / DRAWS - p) < 4 * math.sqrt(p * (1 - p) / DRAWS), outcome


def gumbel_top_k(keys, count):
  """Probability of each set drawn one by one with weights exp(key), without replacement."""
  total = collections.Counter()
  for order in itertools.permutations(range(len(keys)), count):
    left, p = list(range(len(keys))), 1.0
    for config in order:
      p *= math.exp(keys[config]) / sum(math.exp(keys[rest]) for rest in left)
      left.remove(config)
    total[tuple(sorted(order))] += p
  return total


@pytest.mark.parametrize("count", [1, 2, 4])
def test_skewed_slates_follow_gumbel_top_k(count):
  # Official weights: the share of configurations that are not faster.
  assert_frequencies(
    counts_of([900, 100, 300, 500, 700], count, "skewed"),
    gumbel_top_k([1 / 5, 5 / 5, 4 / 5, 3 / 5, 2 / 5], count),
  )


def test_slates_with_replacement_are_independent_draws():
  expected = collections.Counter()
  for pair in itertools.product(range(3), repeat=2):
    expected[tuple(sorted(pair))] += 1 / 9
  assert_frequencies(counts_of([50, 10, 30], 2, "uniform_replacement"), expected)


def test_uniform_slates_give_every_set_the_same_chance():
  sets = list(itertools.combinations(range(5), 3))
  assert_frequencies(counts_of(range(5), 3, "uniform"), dict.fromkeys(sets, 1 / len(sets)))


def test_graphs_weigh_by_their_configurations():
  configs = [configs_of(np.arange(1, n + 1)) for n in (4, 9, 1)]
  assert graph_weights(configs, "uniform", 2) is None
  np.testing.assert_array_equal(graph_weights(configs, "sqrt", 2), [2, 3, 1])
  np.testing.assert_array_equal(graph_weights(configs, "every_config", 2), [2, 4, 1])


@pytest.mark.parametrize("configs, count", [(40, 10), (4, 4), (4, 5), (4, 16)])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_slate_is_a_pure_function_of_the_generator_and_has_what_there_is(kind, configs, count):
  draw = config_draw(np.arange(configs)[::-1], count, kind)
  first, second = (draw(np.random.default_rng(7)) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert set(first.tolist()) <= set(range(configs))
  if kind.endswith("replacement"):
    assert len(first) == count
  else:
    assert len(first) == len(set(first.tolist())) == min(configs, count)


def configs_of(labels):
  return LayoutConfigs(
    np.zeros((1, 18), np.int8),
    np.zeros(1, np.int32),
    np.zeros((len(labels), 1), np.uint8),
    np.asarray(labels),
  )


@pytest.mark.parametrize("nodes, keep", [(10, 3), (9, 3), (3, 3), (2, 5), (1, 1)])
def test_blocks_partition_the_graph_and_each_is_drawn_evenly(nodes, keep):
  rng, draws = np.random.default_rng(4), 4000
  counts = collections.Counter(sample_block(nodes, keep, rng) for _ in range(draws))
  covered = [node for start, stop in sorted(counts) for node in range(start, stop)]
  assert covered == list(range(nodes))
  assert max(stop - start for start, stop in counts) == min(nodes, keep)
  p = 1 / len(counts)
  assert all(abs(n / draws - p) <= 4 * math.sqrt(p * (1 - p) / draws) for n in counts.values())


@pytest.mark.parametrize("per_epoch", [0, 5])
def test_every_configuration_comes_once_before_any_comes_twice(per_epoch):
  """Slates of 3 of 10, 6 and 2 configurations: three, two and one of them in a pass."""
  graphs, sizes = graphs_of(3), (10, 6, 2)
  configs = [graph.configs.subset(np.arange(size)) for graph, size in zip(graphs, sizes)]
  sampler = ConfigSampler(
    configs, count=3, sampling="uniform", targets=lambda configs, ids: ids, every=7
  )
  plan = BatchPlan(
    graphs,
    slates_per_step=1,
    devices=1,
    draw=draw_slates(graphs, sampler),
    seed=0,
    epochs=8,
    slates_per_epoch=per_epoch,
    weights=graph_weights(configs, "every_config", 3),
  )
  assert plan.steps_per_epoch == (per_epoch or 6)
  seen = {number: [] for number in range(3)}
  for step in range(18):
    (slate,) = plan.slates(step, 0)
    seen[slate.graph_id].append(slate.config_ids.tolist())
  assert {number: len(slates) for number, slates in seen.items()} == {0: 9, 1: 6, 2: 3}
  for number, slates in seen.items():
    per_pass = len(slates) // 3
    passes = [sum(slates[i : i + per_pass], []) for i in range(0, len(slates), per_pass)]
    assert all(len(set(ids)) == len(ids) for ids in passes)
    assert passes[0] != passes[1] or number == 2
