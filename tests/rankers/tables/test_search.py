import itertools

import numpy as np
import pytest

from tpugraphs_jax.rankers.tables import search


def instance(seed, *, groups=6, edges=9, most=4, ties=False):
  """Random costs; with `ties` they are small whole numbers."""
  rng = np.random.default_rng(seed)
  draw = (
    (lambda *shape: rng.integers(0, 3, shape).astype(float))
    if ties
    else (lambda *shape: rng.normal(size=shape))
  )
  sizes = rng.integers(1, most + 1, groups)
  unary = [draw(n) for n in sizes]
  # Either order of groups, and a group with itself.
  ends = rng.integers(0, groups, (edges, 2)).tolist()
  return unary, {(g, h): draw(sizes[g], sizes[h]) for g, h in ends}


def brute_force(unary, pairs):
  """All choices and their costs, cheapest first."""
  choices = np.array(list(itertools.product(*(range(len(costs)) for costs in unary))))
  cost = np.zeros(len(choices))
  for place, choice in enumerate(choices):
    cost[place] = sum(costs[x] for costs, x in zip(unary, choice))
    cost[place] += sum(costs[choice[g], choice[h]] for (g, h), costs in pairs.items())
  order = np.argsort(cost, kind="stable")
  return choices[order], cost[order]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("edges", [0, 3, 9, 20])
@pytest.mark.parametrize("seed", range(5))
def test_proposals_are_the_cheapest_of_all(seed, edges, ties):
  unary, pairs = instance(seed, edges=edges, ties=ties)
  _, cost = brute_force(unary, pairs)
  found = search.propose(unary, pairs, 7)
  assert found.is_exact
  np.testing.assert_allclose(found.cost, cost[:7], atol=1e-9)
  np.testing.assert_allclose(found.bound, cost[0], atol=1e-9)
  assert len(np.unique(found.choice, axis=0)) == len(found.choice)
  np.testing.assert_allclose(search.total(unary, pairs, found.choice), found.cost)


@pytest.mark.parametrize("limit", [1, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_small_tables_give_a_bound_below_and_proposals_above_the_cheapest(seed, limit):
  unary, pairs = instance(seed, edges=20)
  choice, cost = brute_force(unary, pairs)
  found = search.propose(unary, pairs, 3, table_limit=limit, beam=4)
  assert found.bound <= cost[0] + 1e-9 <= found.cost[0] + 2e-9
  assert found.gap == pytest.approx(max(found.cost[0] - found.bound, 0))
  assert len(np.unique(found.choice, axis=0)) == len(found.choice) == min(3, len(choice))
  np.testing.assert_allclose(search.total(unary, pairs, found.choice), found.cost)


def test_restarts_find_the_cheapest_of_a_dense_instance():
  unary, pairs = instance(1, groups=8, edges=60, most=3)
  _, cost = brute_force(unary, pairs)
  found = search.propose(unary, pairs, 1, table_limit=4, beam=16)
  assert not found.is_exact
  assert found.cost[0] == pytest.approx(cost[0])


def test_a_chain_of_thousands_is_exact():
  rng = np.random.default_rng(0)
  unary = list(rng.normal(size=(3_000, 4)))
  pairs = {(g, g + 1): rng.normal(size=(4, 4)) for g in range(2_999)}
  found = search.propose(unary, pairs, 2)
  least = unary[0]
  for g in range(2_999):
    least = unary[g + 1] + (least[:, None] + pairs[g, g + 1]).min(axis=0)
  assert found.is_exact and found.gap == pytest.approx(0, abs=1e-6)
  assert found.cost[0] == pytest.approx(least.min())
  assert found.cost[1] >= found.cost[0]


def test_no_group_gives_the_empty_choice():
  found = search.propose([], {}, 5)
  assert found.choice.shape == (1, 0) and found.cost == [0] and found.is_exact


@pytest.mark.parametrize("cost, n, word", [(0, 0, "n is 0"), (np.inf, 1, "finite")])
def test_no_proposals_and_costs_that_are_not_finite_are_refused(cost, n, word):
  with pytest.raises(ValueError, match=word):
    search.propose([np.array([0, cost])], {}, n)


def test_padded_tables_are_searched_without_their_padding():
  rng = np.random.default_rng(0)
  counts, columns = np.array([2, 3, 1]), np.array([[0, 1], [1, 1], [1, 2]])
  unary, pair = rng.normal(size=(3, 4)) - 50, rng.normal(size=(3, 4, 4)) - 50
  problem = search.unpad_tables(counts, columns, unary, pair)
  found = search.propose(*problem, 6)
  assert len(found.choice) == 6 and (found.choice < counts).all()
  np.testing.assert_allclose(found.cost, brute_force(*problem)[1])
  assert search.unpad_tables(counts, columns, unary, pair[:0])[1] == {}


def charges_that_suit(made, value, changes, cost):
  """The least and the largest charge per change with which no other choice is cheaper."""
  more, fewer, equal = changes > made, changes < made, changes == made
  least = max(((value - cost[more]) / (changes[more] - made)).max(initial=0), 0)
  largest = ((cost[fewer] - value) / (made - changes[fewer])).min(initial=np.inf)
  return (least, largest) if value <= cost[equal].min() + 1e-9 else (np.inf, 0)


@pytest.mark.parametrize("seed", range(6))
def test_proposals_near_a_start_are_the_cheapest_with_some_charge_per_change(seed):
  """This holds up to the cheapest of all choices; the next best of all follow it."""
  unary, pairs = instance(seed)
  start = np.array([len(costs) - 1 for costs in unary])
  found = search.propose_near(unary, pairs, start, 6)
  choices, cost = brute_force(unary, pairs)
  changes = (choices != start).sum(axis=1)
  way = found.cost.argmin() + 1
  for choice, value in zip(found.choice[:way], found.cost):
    least, largest = charges_that_suit((choice != start).sum(), value, changes, cost)
    assert least <= largest + 1e-9
  assert (np.diff((found.choice[:way] != start).sum(axis=1)) >= 0).all()
  assert (found.cost[way:] <= np.partition(cost, 6)[6] + 1e-9).all()
  np.testing.assert_allclose(search.total(unary, pairs, found.choice), found.cost)
  assert len(np.unique(found.choice, axis=0)) == len(found.choice)
  assert found.cost.min() == pytest.approx(cost[0])


def test_near_the_cheapest_the_next_best_are_proposed():
  unary = [np.array([0.0, 1, 5]), np.array([0.0, 2])]
  found = search.propose_near(unary, {}, np.array([0, 0]), 3)
  assert found.choice.tolist() == [[1, 0], [0, 1]]  # the three cheapest, without the start itself
  (alone,) = search.propose_near([np.array([1.0])], {}, np.array([0]), 3).choice.tolist()
  assert alone == [0]
