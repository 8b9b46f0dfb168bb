"""What the sides of the program view show."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax import hlo, view
from tpugraphs_jax.data.factoring import factor_layout_configs
from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.tuning import layouts
from tpugraphs_jax.view import panes


@pytest.fixture(scope="module")
def graph():
  """A program with three products and three labelled configurations."""
  made = hlo.featurize(
    lambda x, y, z: jnp.tanh(x @ y) @ z @ z, jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.ones((6, 6))
  )
  rows = np.full((3, 3, 18), -1)
  rows[1, 0, :2] = 0, 1
  rows[2, 0, :4] = 0, 1, -1, -1
  rows[2, 2, :2] = 1, 0
  return dataclasses.replace(made, configs=factor_layout_configs(rows, np.array([30, 20, 10])))


def test_two_configurations_mark_the_nodes_in_which_they_differ(graph):
  before, after = panes.graph_panes(graph, 2, against=1)
  first, _, last = graph.config_node.tolist()
  assert before.orders[first] == after.orders[first] == "output {0,1}"
  assert before.overlays[panes.CHANGED] == {last: "open"}
  assert after.overlays[panes.CHANGED] == {last: "output {1,0}"}
  assert (before.about["label"], after.about["label"]) == ("20", "10")


def test_costs_are_those_of_explain_by_node(graph):
  model = tpugraphs_jax.load("layout-cpu-measured")
  (pane,) = panes.graph_panes(graph, 2, model=model)
  rows = tpugraphs_jax.explain(model, graph, 2)
  assert sum(pane.overlays[panes.COST].values()) == pytest.approx(
    sum(row.change for row in rows if row.places)
  )
  _, after = panes.graph_panes(graph, 2, against=0, model=model)
  difference = tpugraphs_jax.explain(model, graph, 2, against=0)
  for node, value in after.overlays[panes.COST].items():
    assert value == pytest.approx(sum(row.change for row in difference if node in row.places))


def test_the_table_has_the_changed_nodes_by_name(graph):
  shown = panes.graph_panes(graph, 2, against=0)
  lines = str(panes.table(graph, shown)).splitlines()
  names = [graph.node_name(graph.config_node[place]) for place in (0, 2)]
  assert [line.split()[0] for line in lines[-2:]] == names
  assert "layouts, configuration 0" in lines[-3] and "output {1,0}" in lines[-1]


@pytest.mark.parametrize(
  "options, message",
  [
    ({"against": 0}, "no configuration was given"),
    ({"model": "layout-cpu-measured"}, "no configuration was given"),
    ({"config": 3}, "configuration 3 of .*, expected 0 to 2"),
    ({"config": 0, "against": -1}, "configuration -1"),
  ],
)
def test_mistakes_are_refused(graph, options, message):
  with pytest.raises(ValueError, match=message):
    panes.graph_panes(graph, **options)


def test_a_graph_without_configurations_or_with_tiles_says_so(graph):
  with pytest.raises(ValueError, match="has no configurations"):
    panes.graph_panes(dataclasses.replace(graph, configs=None), 0)
  tiles = graph.as_kernel(
    TileConfigs(np.arange(24, dtype=np.float32)[None], np.array([5]), np.array([5]))
  )
  (pane,) = panes.graph_panes(tiles, 0)
  assert pane.about["kernel bounds"] == "0 1 2 3 4 5" and not pane.orders
  with pytest.raises(ValueError, match="print tpugraphs_jax.explain"):
    panes.graph_panes(tiles, 0, model="layout-cpu-measured")


@pytest.mark.parametrize("program", ["program.npz", None, len])
def test_only_graphs_and_results_of_tune_are_shown(program):
  with pytest.raises(ValueError, match="expected a graph .* or the result of tune"):
    view.show(program)


def test_layouts_that_were_chosen_are_shown_as_a_graph_is(graph, capsys):
  program = layouts.TunedProgram(graph, [], {}, "5 of 9 layouts tried")
  view.show(program, as_table=True)
  assert "5 of 9 layouts tried" in capsys.readouterr().out
  with pytest.raises(ValueError, match="layouts that were chosen have no numbers"):
    view.show(program, 1)
