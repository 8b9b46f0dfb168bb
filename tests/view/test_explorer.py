"""The page that Model Explorer gets, and its server, where the extra `view` is installed."""

import collections
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, random_graphs
from tpugraphs_jax import hlo
from tpugraphs_jax.data import npz
from tpugraphs_jax.view import panes

pytest.importorskip("model_explorer", reason='pip install ".[view]"')
from tpugraphs_jax.view import explorer  # pylint: disable=wrong-import-position


def step(x, w):
  with jax.named_scope("outer"), jax.named_scope("inner"):
    x = x @ w
  return jax.lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(carry) + 1, x)


def nodes_of(page, side=0):
  """The nodes that a page shows, as Model Explorer reads them."""
  (graph,) = json.loads(page.get_model_explorer_graphs(side))["graphs"]
  return graph["nodes"]


def attributes(node):
  return {attribute["key"]: attribute["value"] for attribute in node["attrs"]}


@pytest.fixture(scope="module")
def module():
  return hlo.featurize(step, jnp.ones((4, 8)), jnp.ones((8, 6)))


def test_nodes_have_the_names_scopes_and_edges_of_the_module(module):
  nodes = nodes_of(explorer.Page(module, panes.graph_panes(module)))
  assert [node["label"] for node in nodes] == [origin.name for origin in module.origins]
  edges = {
    (int(node["id"]), int(edge["sourceNodeId"])) for node in nodes for edge in node["incomingEdges"]
  }
  assert edges == set(map(tuple, module.edge_index.tolist()))
  product = nodes[module.config_node[0]]
  assert product["namespace"] == "outer/inner"
  said = attributes(product)
  assert said["opcode"] == "dot" and said["shape"].startswith("f32[4,6]")
  assert said["source"].startswith("test_explorer.py:") and said["configurable"] == "yes"
  tanh = next(node for node in nodes if attributes(node)["opcode"] == "tanh")
  called = module.module.computations[0]  # whose instructions jax names without scopes
  assert attributes(tanh)["name in jax"] == "tanh" and tanh["namespace"] == called.name
  assert "while/body" in {node["namespace"] for node in nodes}


def test_an_argument_stands_with_its_first_user(module):
  nodes = nodes_of(explorer.Page(module, panes.graph_panes(module)))
  product = module.config_node[0]
  for consumer, producer in module.edge_index.tolist():
    if consumer == product and attributes(nodes[producer])["opcode"] == "parameter":
      assert nodes[producer]["namespace"] == "outer/inner"


def test_a_file_without_names_has_its_opcodes_shapes_and_computations():
  graph = random_graphs.whole_numbers(0, nodes=30, edges=40)
  graph = dataclasses.replace(graph, node_splits=np.array([0, 10, 30]))
  graph.node_feat[:] = 0
  graph.node_feat[4, [2 + 11, 21, 22, 27, 28]] = 1, 8, 6, 14, 48
  graph.node_feat[4, -6:-4] = 1, 0
  nodes = nodes_of(explorer.Page(graph, panes.graph_panes(graph)))
  assert [node["namespace"] for node in nodes] == (
    ["computations 1 of 2"] * 10 + ["computations 2 of 2"] * 20
  )
  assert attributes(nodes[4])["shape"] == "f32[8,6]{1,0}"


def test_large_computations_are_cut_into_sections_in_the_order_of_the_program():
  count = 3 * explorer.SECTION + 1
  graph = random_graphs.whole_numbers(0, nodes=count, edges=10)
  spaces = [node["namespace"] for node in nodes_of(explorer.Page(graph, panes.graph_panes(graph)))]
  assert max(collections.Counter(spaces).values()) <= explorer.SECTION
  assert spaces[0] == "section 1 of 4" and spaces[-1] == "section 4 of 4"
  assert spaces == sorted(spaces)


def test_two_sides_are_two_graphs_with_layouts_and_overlays():
  graph = random_graphs.whole_numbers(1, nodes=20, edges=30)
  shown = panes.graph_panes(graph, 1, against=0)
  page = explorer.Page(graph, shown)
  for side, pane in enumerate(shown):
    assert attributes(nodes_of(page, side)[0])["layouts"] == pane.orders[0]
  data = json.loads(urllib.parse.unquote(page.to_url_param_value()))
  sides = data["uiState"]["paneStates"]
  assert [side["selectedCollectionLabel"] for side in sides] == [
    "configuration 0",
    "configuration 1",
  ]
  assert data["nodeDataTargets"] == ["configuration 0", "configuration 1"]
  data = json.loads(page.get_node_data(1).to_json_string())
  marked = data[f"{graph.name} configuration 1"]["results"]
  assert {int(node) for node in marked} == set(shown[1].overlays[panes.CHANGED])


def test_two_sides_open_at_the_first_changed_node_also_when_overlays_arrive_late():
  graph = random_graphs.whole_numbers(1, nodes=120, edges=200)
  shown = panes.graph_panes(graph, 1, against=0)
  page = explorer.Page(graph, shown)
  data = json.loads(urllib.parse.unquote(page.to_url_param_value()))
  changed = {n for n, text in shown[0].orders.items() if text != shown[1].orders[n]}
  for side, pane in enumerate(data["uiState"]["paneStates"]):
    assert pane["selectedNodeId"] == str(min(changed))
    # Model Explorer lays a graph out anew, and forgets the node, where an overlay has this field.
    (overlay,) = json.loads(page.get_node_data(side).to_json_string()).values()
    assert "showExpandedSummaryOnGroupNode" not in overlay


def test_colours_are_red_above_zero_blue_below_and_stronger_if_larger():
  graph = random_graphs.whole_numbers(1, nodes=5, edges=4)
  pane = panes.Pane("costs", {}, {}, {"cost": {0: 4.0, 1: 1.0, 2: -4.0, 3: 0.0}})
  data = json.loads(explorer.Page(graph, [pane]).get_node_data(0).to_json_string())
  color = {
    int(node): [int(result["bgColor"][i : i + 2], 16) for i in (1, 3, 5)]
    for node, result in data[f"{graph.name} costs"]["results"].items()
  }
  assert color[3] == [255, 255, 255]
  assert color[0][2] < color[1][2] < 255 and color[0][0] > color[0][2]
  assert color[2][2] > color[2][0]


@contextlib.contextmanager
def served(*arguments):
  """The address of a page that the command serves."""
  process = subprocess.Popen(
    [sys.executable, "-u", "-m", "tpugraphs_jax.view", *map(str, arguments), "--no_browser"],
    cwd=commands.ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    yield next(line.strip() for line in process.stdout if line.startswith("http://"))
  finally:
    process.terminate()
    process.communicate()


def test_the_command_serves_the_graph_of_a_file(tmp_path):
  path = tmp_path / "program.npz"
  npz.write_layout(path, random_graphs.whole_numbers(0, nodes=30, edges=40))
  with served(path, "--config=1", "--against=0") as address:
    server = re.match(r"http://[^/]+", address)[0]
    with urllib.request.urlopen(f"{server}/api/v1/load_graphs_json?graph_index=1") as answer:
      (graph,) = json.load(answer)["graphs"]
    assert graph["id"] == "program configuration 1" and len(graph["nodes"]) == 30
    with urllib.request.urlopen(address) as answer:
      assert b"Model Explorer" in answer.read()
