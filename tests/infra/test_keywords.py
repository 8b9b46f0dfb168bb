"""Keyword arguments are options, or arguments of the function, and never silently the other."""

import functools

import pytest

from tpugraphs_jax.infra import keywords


@keywords.checked
def one(function, /, *args, target=None, budget=16, **kwargs):
  return target, budget, function(*args, **kwargs)


@keywords.checked
def several(function, /, *args, targets=("v5e",), **kwargs):
  return targets, function(*args, **kwargs)


def _any(*args, **kwargs):
  return args, kwargs


def test_both_words_for_targets_are_taken():
  assert one(_any, 1, target="v3") == one(_any, 1, targets="v3") == ("v3", 16, ((1,), {}))
  assert one(_any, targets=["v3"])[0] == "v3" and one(_any, targets=None)[0] is None
  assert several(_any, target="v3")[0] == "v3" and several(_any, targets=["v3"])[0] == ["v3"]
  with pytest.raises(ValueError, match=r"\['v3', 'v4'\], expected one target"):
    one(_any, targets=["v3", "v4"])
  with pytest.raises(ValueError, match="both given"):
    several(_any, target="v3", targets=["v4"])


@pytest.mark.parametrize("name", ["targt", "taget", "budgets", "bugdet", "Target"])
def test_a_name_near_an_option_is_asked_about(name):
  with pytest.raises(ValueError, match=f"no option '{name}'.*did you mean.*partial"):
    one(_any, **{name: 3})


def test_parameters_of_the_function_are_passed_on():
  function = lambda x, *, targt=1, targets=2, rate=3: (x, targt, targets, rate)
  assert one(function, 0, targt=5, targets=6, target="v3") == ("v3", 16, (0, 5, 6, 3))
  assert one(_any, rate=1)[2] == ((), {"rate": 1})
  assert one(functools.partial(_any, targt=3))[2] == ((), {"targt": 3})


def test_an_option_that_is_a_parameter_of_the_function_is_refused_unless_it_is_given():
  function = lambda x, budget=3: (x, budget)
  with pytest.raises(ValueError, match="budget= is an option of one and a parameter of.*position"):
    one(function, 1, budget=4)
  assert one(function, 1, 2, budget=4) == (None, 4, (1, 2))
  assert one(functools.partial(function, 1)) == (None, 16, (1, 3))
  assert one(functools.partial(function, 1, budget=5), budget=4) == (None, 4, (1, 5))


def test_what_has_no_signature_takes_every_other_name():
  assert one(dict, rate=1)[2] == {"rate": 1}
  with pytest.raises(ValueError, match="targt"):
    one(dict, targt=1)
