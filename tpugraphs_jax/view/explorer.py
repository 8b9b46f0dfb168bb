"""Programs and overlays as Model Explorer takes them, and its server.

Model Explorer folds nodes by namespace. An instruction of an HLO module has the scopes of its name,
or the name of its computation; a node of a released file has its stretch of computations.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import json
import sys
import threading
from urllib import parse

from model_explorer import apis, graph_builder, node_data_builder
from model_explorer.config import ModelExplorerConfig
import numpy as np
import portpicker

from tpugraphs_jax import columns
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.hlo import HloGraph, names, proto
from tpugraphs_jax.infra import console
from tpugraphs_jax.view.panes import CHANGED, Pane

_RED, _BLUE, _AMBER = (215, 48, 39), (69, 117, 180), "#f5c26b"
_OPEN = 100  # nodes; a larger program opens folded
SECTION = 200  # nodes of a namespace without inner ones; larger ones are folded once more
_IN_SHAPE = ("element_type", "shape", "minor_to_major")
_NO_FEATURES = columns.node_features({}, 1)[0]


class Page(ModelExplorerConfig):
  """A program with the values of its sides; with two sides they are beside each other."""

  def __init__(self, graph: OpGraph, panes: Sequence[Pane]):
    super().__init__()
    nodes = list(_nodes(graph))
    self._sides = [(pane.title, f"{graph.name} {pane.title}") for pane in panes]
    # The page opens at the first changed node.
    self._first = next((str(node) for node in panes[-1].overlays.get(CHANGED, ())), "")
    self._is_open = graph.num_nodes <= _OPEN
    for number, ((source, name), pane) in enumerate(zip(self._sides, panes)):
      graph_of_side = _with_orders(nodes, pane, name)
      self.graphs_list.append(json.dumps({"graphs": [graph_of_side]}, default=vars))
      self.model_sources.append({"url": f"graphs://{source}/{number}"})
      # Model Explorer reads the overlays of one graph from a source: each side has its own.
      for overlay, values in pane.overlays.items():
        data = node_data_builder.ModelNodeData({name: _node_data(values)})
        self.add_node_data(overlay, data, source)

  def to_url_param_value(self) -> str:
    """The part of the page's address that selects the program, on one side or two."""
    data = json.loads(parse.unquote(super().to_url_param_value()))
    states = [
      {
        "selectedCollectionLabel": source,
        "selectedGraphId": name,
        "selectedNodeId": self._first,
        "deepestExpandedGroupNodeIds": ["___all___"] if self._is_open and not self._first else [],
        "widthFraction": 1 / len(self._sides),
      }
      for source, name in self._sides
    ]
    data["uiState"] = {"paneStates": states}
    return parse.quote(json.dumps(data))


def serve(page: Page, *, port: int = 0, browser: bool = True) -> None:
  """Serves a page until it is interrupted; in a notebook the page is below the cell.

  Args:
    page: what is shown.
    port: of this machine; 0 takes a free one.
    browser: whether a browser is opened.
  """
  port = port or portpicker.pick_unused_port()
  is_colab = "google.colab" in sys.modules
  if is_colab or "ipykernel" not in sys.modules:
    with console.working("serving a page", is_on=False):
      apis.visualize_from_config(page, port=port, no_open_in_browser=not browser)
    return
  from IPython import display

  server = lambda: apis.visualize_from_config(page, port=port, no_open_in_browser=True)
  threading.Thread(target=server, daemon=True).start()
  address = f"http://localhost:{port}/?data={page.to_url_param_value()}"
  display.display(display.IFrame(address, "100%", 800))


def _nodes(graph: OpGraph) -> Iterator[graph_builder.GraphNode]:
  """The nodes with names, namespaces, attributes and edges."""
  configurable, features = set(graph.config_node.tolist()), _features(graph.node_feat)
  operands: list[list[int]] = [[] for _ in range(graph.num_nodes)]
  for consumer, producer in graph.edge_index.tolist():
    operands[consumer].append(producer)
  facts = _hlo_facts(graph) if isinstance(graph, HloGraph) else _file_facts(graph)
  names, scopes, attributes_of = zip(*facts)
  rows = zip(names, _sections(scopes), attributes_of, features)
  for node, (name, namespace, attributes, more) in enumerate(rows):
    opcode = columns.opcode_names().get(int(graph.node_opcode[node]), "unknown")
    attributes = {"opcode": opcode, "node": str(node), **attributes, **more}
    if node in configurable:
      attributes["configurable"] = "yes"
    edges = [
      graph_builder.IncomingEdge(str(producer), targetNodeInputId=str(place))
      for place, producer in enumerate(operands[node])
    ]
    yield graph_builder.GraphNode(
      str(node), name or opcode, namespace, attrs=_key_values(attributes), incomingEdges=edges
    )


def _sections(namespaces: Sequence[str]) -> list[str]:
  """The namespaces of nodes, large ones cut into sections in the order of the program."""
  sizes, result = collections.Counter(namespaces), []
  seen: collections.Counter[str] = collections.Counter()
  for namespace in namespaces:
    if sizes[namespace] > SECTION:
      section = seen[namespace] // SECTION + 1
      of = -(-sizes[namespace] // SECTION)
      seen[namespace] += 1
      namespace = "/".join(filter(None, [namespace, f"section {section} of {of}"]))
    result.append(namespace)
  return result


def _hlo_facts(graph: HloGraph) -> Iterator[tuple[str, str, dict[str, str]]]:
  """Name, namespace and attributes of every instruction of a module."""
  namespaces = _namespaces(graph)
  nodes = proto.instructions(graph.module)
  for node, origin, namespace in zip(nodes, graph.origins, namespaces):
    shape = proto.shape_text(node.shape)
    attributes = {"shape": shape, "source": origin.where, "name in jax": origin.op_name}
    yield node.name, namespace, {name: text for name, text in attributes.items() if text}


def _namespaces(graph: HloGraph) -> list[str]:
  """Scopes of each instruction, or its computation; in the entry, scopes of its first user."""
  module = graph.module
  nodes, result = proto.instructions(module), []
  for node, origin, owner in zip(nodes, graph.origins, proto.owners(module)):
    computation = "" if owner.id == module.entry_computation_id else owner.name
    # The first part is the jitted function, the last one the operation.
    scopes = [] if node.opcode == "parameter" else origin.op_name.split("/")[1:-1]
    result.append(
      "/".join(s for s in scopes if not s.startswith(names.LAYOUT_GROUP)) or computation
    )
  is_open = [not namespace for namespace in result]
  for consumer, producer in graph.edge_index[::-1].tolist():
    if is_open[producer]:
      result[producer] = result[consumer]
  return result


def _file_facts(graph: OpGraph) -> Iterator[tuple[str, str, dict[str, str]]]:
  """The same of a graph without a module."""
  stretches = len(graph.node_splits) - 1
  of_node = np.searchsorted(graph.node_splits, np.arange(graph.num_nodes), side="right")
  for number, feat in zip(of_node, graph.node_feat):
    namespace = f"computations {number} of {stretches}" if stretches > 1 else ""
    yield "", namespace, {"shape": _shape_text(feat)}


def _shape_text(feat: np.ndarray) -> str:
  """A shape from the features `[140]` of a node, as HLO text writes it."""
  kinds = np.flatnonzero(feat[columns.NODE["element_type"]])
  sizes = feat[columns.sizes(columns.NODE["shape"])].astype(np.int64)
  sizes = sizes[: np.count_nonzero(sizes)]
  order = feat[columns.NODE["minor_to_major"]].astype(np.int64)[: len(sizes)]
  layout = f"{{{','.join(map(str, order))}}}" if len(sizes) else ""
  name = columns.ELEMENT_TYPES[kinds[0]].name if len(kinds) else "invalid"
  return f"{name}[{','.join(map(str, sizes))}]{layout}"


def _features(node_feat: np.ndarray) -> list[dict[str, str]]:
  """The feature blocks of each node that differ from an empty node, without its shape."""
  result: list[dict[str, str]] = [{} for _ in node_feat]
  for name, block in columns.NODE.items():
    if name not in _IN_SHAPE:
      for node in np.flatnonzero((node_feat[:, block] != _NO_FEATURES[block]).any(axis=1)):
        result[node][name.replace("_", " ")] = " ".join(map("{:g}".format, node_feat[node, block]))
  return result


def _with_orders(nodes: Sequence[graph_builder.GraphNode], pane: Pane, name: str) -> dict:
  """The graph of a side: all nodes, configurable ones with their layouts."""
  shown = list(nodes)
  for number, order in pane.orders.items():
    attrs = [*_key_values({"layouts": order}), *nodes[number].attrs]
    shown[number] = graph_builder.GraphNode(**{**vars(nodes[number]), "attrs": attrs})
  return vars(graph_builder.Graph(name, shown, {"": dict(pane.about)}))


def _key_values(attributes: Mapping[str, str]) -> list[graph_builder.KeyValue]:
  return [graph_builder.KeyValue(name, text) for name, text in attributes.items()]


def _node_data(values: Mapping[int, float | str]) -> node_data_builder.GraphNodeData:
  """An overlay: marks for texts; for numbers red above 0 and blue below, stronger if larger."""
  largest = max((abs(v) for v in values.values() if not isinstance(v, str)), default=0) or 1
  results = {}
  for node, value in values.items():
    color = _AMBER if isinstance(value, str) else _color(value / largest)
    results[str(node)] = node_data_builder.NodeDataResult(value, color, "#000")
  # With a value, also False, overlays that arrive late lay the graph out anew, and the page no
  # longer opens at its node.
  return node_data_builder.GraphNodeData(results, showExpandedSummaryOnGroupNode=None)


def _color(strength: float) -> str:
  """White at 0, red at 1, blue at -1."""
  full = _RED if strength > 0 else _BLUE
  return "#" + "".join(f"{round(255 + abs(strength) * (c - 255)):02x}" for c in full)
