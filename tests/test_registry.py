"""Names that configs give to what modules register."""

import pytest

from tpugraphs_jax.registry import Registry


def registry_of(*names):
  table = Registry("model.name")
  for name in names:
    table.register(name)(f"entry {name}")
  return table


def test_entries_are_found_by_name_in_the_order_of_their_registration():
  table = registry_of("b", "a", "c")
  assert list(table) == ["b", "a", "c"] and len(table) == 3
  assert table["a"] == "entry a" and dict(table)["c"] == "entry c"


def test_a_name_is_there_or_not_without_an_error():
  table = registry_of("a")
  assert "a" in table and "b" not in table and 3 not in table


def test_an_unknown_name_is_an_error_that_lists_all():
  with pytest.raises(ValueError, match="model.name is 'x', expected one of a, b, or a name that"):
    _ = registry_of("a", "b")["x"]


def test_registering_gives_the_entry_back_so_that_it_works_as_a_decorator():
  @Registry("data.features").register("ones")
  def ones(graph):
    return graph + 1

  assert ones(1) == 2
