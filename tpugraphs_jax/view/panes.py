"""The values that the sides of the program view show, such as layouts, costs and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.hlo import HloGraph, proto, tpu_kernels
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.rankers import explain, ranker
from tpugraphs_jax.tuning import layouts

CYCLES, COST, CHANGED = "estimated cycles", "cost", "changed orders"
TIMES = "estimated µs"


class Pane(NamedTuple):
  """One side of the view."""

  title: str
  about: Mapping[str, str]  # facts about the side, by name
  orders: Mapping[int, str]  # layouts of configurable nodes
  # Values of nodes by the name of the overlay: numbers, or texts of nodes that are marked.
  overlays: Mapping[str, Mapping[int, float | str]]


def graph_panes(
  graph: OpGraph, config: int | None = None, *, against: int | None = None, model: Any = None
) -> list[Pane]:
  """The sides of a graph: none of its configurations, one, or `against` and then `config`.

  Args:
    graph: with the configurations that are named.
    config: number of a configuration.
    against: number of another one.
    model: as for `tpugraphs_jax.explain`: costs of layouts by node. They are differences to the
      other side where there is one.

  Raises:
    ValueError: a number that the graph does not have, or a model without a configuration or for
      tiles, whose costs belong to no node.
    FileNotFoundError: as `tpugraphs_jax.load`.
  """
  about = {"nodes": f"{graph.num_nodes:,}", "edges": f"{graph.num_edges:,}"}
  about |= {"stage": graph.stage} if graph.stage else {}
  cycles = _compiler_cycles(graph)
  shared = {CYCLES: cycles} if cycles else {}
  if config is None:
    if against is not None or model is not None:
      raise ValueError("no configuration was given to compare or explain: give its number")
    return [Pane(graph.stage or "program", about, {}, shared)]
  if graph.configs is None:
    raise ValueError(f"{graph.name} has no configurations, found configuration {config}")
  explain.check_numbers(graph, config, against)
  if model is not None and isinstance(graph.configs, TileConfigs):
    raise ValueError(
      f"{graph.name} has tiles, whose costs belong to no node: leave the model out, "
      "and print tpugraphs_jax.explain(model, graph, number)"
    )
  panes = []
  sides = [(config, None)] if against is None else [(against, config), (config, against)]
  for number, second in sides:
    orders = _orders(graph, number)
    overlays: dict[str, Mapping[int, float | str]] = dict(shared)
    if model is not None:
      overlays[COST] = ranker.explain(model, graph, number, against=second).by_node()
    if second is not None:
      instead = _orders(graph, second)
      overlays[CHANGED] = {node: text for node, text in orders.items() if text != instead[node]}
    facts = about | _config_facts(graph, number)
    panes.append(Pane(f"configuration {number}", facts, orders, overlays))
  return panes


def program_panes(program: layouts.TunedProgram) -> list[Pane]:
  """The sides of a program before and after its layouts were chosen."""
  panes = []
  for place, title in enumerate(("before", "after")):
    orders = {node: change.orders[place] for change in program.changes for node in change.nodes}
    overlays: dict[str, Mapping[int, float | str]] = {CHANGED: orders}
    if program.picoseconds:
      times = {node: times[place] / 1e6 for node, times in program.picoseconds.items()}
      overlays = {TIMES: times, **overlays}
    panes.append(Pane(title, {"layouts": program.summary}, orders, overlays))
  return panes if program.changes else panes[:1]


def table(graph: OpGraph, panes: list[Pane]) -> Table:
  """The layouts and overlays of nodes on each side, of changed nodes alone where there are two."""
  values = [
    (f"{name}, {pane.title}", of_node)
    for pane in panes
    for name, of_node in [("layouts", pane.orders), *pane.overlays.items()]
    if of_node and name != CHANGED
  ]
  if not values:
    return graph.table()
  shown = [of_node for pane in panes for of_node in pane.overlays.values()]
  nodes = sorted(set().union(*(shown if len(panes) > 1 else (of_node for _, of_node in values))))
  rows = []
  for node in nodes:
    rows.append([graph.node_name(node), *(_text(of_node.get(node, "")) for _, of_node in values)])
  return Table(["node", *(name for name, _ in values)], rows, repr(graph)[1:-1])


def _text(value: float | str) -> str:
  return value if isinstance(value, str) else f"{value:,.4g}"


def _compiler_cycles(graph: OpGraph) -> dict[int, int]:
  """The compiler's estimate for each kernel of a module after all optimisations for a TPU."""
  if not isinstance(graph, HloGraph):
    return {}
  windows = map(tpu_kernels.window, proto.instructions(graph.module))
  return {
    node: window.estimated_cycles
    for node, window in enumerate(windows)
    if window is not None and window.estimated_cycles is not None
  }


def _orders(graph: OpGraph, number: int) -> dict[int, str]:
  """The layouts that a configuration gives to configurable nodes."""
  if not isinstance(graph.configs, LayoutConfigs):
    return {}
  rows = graph.configs.rows[graph.configs.row_id(np.array([number]))[0]]
  return dict(zip(graph.config_node.tolist(), map(columns.row_text, rows.tolist())))


def _config_facts(graph: OpGraph[TileConfigs | LayoutConfigs], number: int) -> dict[str, str]:
  configs = graph.configs
  facts = {"label": f"{np.round(configs.labels[number], 3):,}"} if configs.is_labelled else {}
  if isinstance(configs, TileConfigs):
    for name, block in columns.TILE.items():
      sizes = configs.config_feat[number][columns.sizes(block)]
      facts[name.replace("_", " ")] = " ".join(f"{size:g}" for size in sizes)
  return facts
