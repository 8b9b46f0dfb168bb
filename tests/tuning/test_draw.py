import itertools

import numpy as np

from tpugraphs_jax.tuning import draw

_OPTIONS = [np.array([0, 2, 5]), np.array([0]), np.arange(9), np.array([0, 1])]


def _candidates(count, **options):
  return list(
    itertools.islice(draw.candidates(_OPTIONS, **({"seed": 0, "name": "a"} | options)), count)
  )


def test_candidates_begin_with_the_compilers_own_are_distinct_and_take_given_options():
  found = _candidates(40)
  assert found[0] == (0, 0, 0, 0)
  assert len(set(found)) == 40
  for place, options in enumerate(_OPTIONS):
    assert {numbers[place] for numbers in found} <= set(options.tolist())


def test_candidates_depend_on_seed_and_name_alone():
  assert _candidates(30) == _candidates(50)[:30]
  assert _candidates(30) != _candidates(30, seed=1)
  assert _candidates(30) != _candidates(30, name="b")


def test_candidates_end_where_everything_is_drawn():
  # All choices of this small program: 3 * 9 * 2.
  assert len(_candidates(1000)) == 54
  assert list(draw.candidates([np.zeros(1, int)], seed=0, name="a")) == [(0,)]


def test_single_double_and_other_changes_take_turns():
  found = _candidates(7)
  assert [sum(number > 0 for number in numbers) for numbers in found[1:3]] == [1, 2]
  assert sum(number > 0 for number in found[4]) == 1
  large = [np.arange(3)] * 30
  found = list(itertools.islice(draw.candidates(large, seed=0, name="a"), 400))
  changed = [sum(number > 0 for number in numbers) for numbers in found]
  assert changed.count(1) == 60 and max(changed) == 5
  assert len(set(found)) == 400


def test_ties_are_replaced_by_at_most_half_as_many_more_draws():
  assert draw.wanted({}, 8, draws=0) == 8
  assert draw.wanted({k: k for k in range(8)}, 8, draws=8) == 0
  assert draw.wanted({k: 0 for k in range(8)}, 8, draws=8) == 4
  assert draw.wanted({k: 0 for k in range(12)}, 8, draws=12) == 0
  assert draw.wanted({k: k for k in range(6)}, 8, draws=8) == 2  # two have failed


def test_first_candidates_of_a_label_are_kept_before_ties():
  labels = {0: 5, 1: 5, 2: 7, 3: 5, 4: 9, 5: 7}
  assert draw.kept(labels, 3) == [0, 2, 4]
  assert draw.kept(labels, 4) == [0, 1, 2, 4]
  assert draw.kept(labels, 9) == [0, 1, 2, 3, 4, 5]


def test_of_too_many_changes_random_ones_are_drawn():
  found = list(itertools.islice(draw.candidates([np.arange(3)] * 3000, seed=0, name="a"), 300))
  changed = [sum(number > 0 for number in numbers) for numbers in found]
  assert len(set(found)) == 300 and changed[1::3] == [1] * 100 and changed[2::3] == [2] * 100
