"""What rankers gain on programs that they have not seen: the last part of `make demo`.

    python examples/demo.py out/demo_layout

The test programs of `data/own` are of families without a training program, and their labels are
known. Five layouts of each are tried in the order of `tune`: the compiler's own choice first, then
the most promising others. The given run is compared with the model that ships and random tries.
"""

import pathlib
import sys

import numpy as np

import tpugraphs_jax
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import strategies

TRIES = 5
SHIPPED = "layout-v3-estimate"
BETTER = 0.98  # of the compiler's own choice: smaller gains do not count
DRAWS = 1000  # of random orders


def order_of(graph, scores):
  """The layouts of a graph in the order in which `tune` tries them."""
  changed = graph.configs.group_row[:] != graph.configs.group_row[0]
  return strategies.spread(np.argsort(scores, kind="stable"), scores, changed)


def row(name, labels, orders):
  """Mean time above the fastest layout, and how many programs got a better layout than their own.

  Args:
    name: of the orders.
    labels: of the layouts of each graph.
    orders: one or several of each graph, layout 0 first.
  """
  above, found = [], 0.0
  for of_graph, some in zip(labels, orders):
    tried = np.array([of_graph[order[:TRIES]].min() for order in some])
    above.append(np.mean(tried) / of_graph.min() - 1)
    found += np.mean(tried < BETTER * of_graph[0])
  return [name, f"{np.mean(above):.1%}", f"{found:.0f}"]


def main(workdir):
  folder = pathlib.Path(__file__).parents[1] / "data/own/npz/layout/own/outputs/test"
  graphs = [tpugraphs_jax.read_layout(path) for path in sorted(folder.glob("*.npz"))]
  labels = [graph.configs.labels[:] for graph in graphs]
  rng = np.random.default_rng(0)
  own = np.mean([of_graph[0] / of_graph.min() - 1 for of_graph in labels])
  rows = [["the compiler's own layouts, no try", f"{own:.1%}", ""]]
  draw = lambda count: [0, *(1 + rng.permutation(count - 1))]
  draws = ([draw(len(of_graph)) for _ in range(DRAWS)] for of_graph in labels)
  rows.append(row("random layouts", labels, draws))
  for name, model in (("this run", workdir), (f"{SHIPPED}, which ships", SHIPPED)):
    scores = tpugraphs_jax.load(model).scores(graphs)
    rows.append(row(name, labels, [[order_of(*pair)] for pair in zip(graphs, scores)]))
  better = sum(of_graph.min() < BETTER * of_graph[0] for of_graph in labels)
  title = (
    f"Layouts of {len(graphs)} test programs after {TRIES} tries each, of families without a "
    f"training program; {better} of them have layouts over 2 % faster than the compiler's own. "
    "Times are estimates of the TPU compiler, no measurements."
  )
  head = ["order of the tries", "above the fastest", f"better layouts found, of {better}"]
  print(f"\n{Table(head, rows, title)}")


if __name__ == "__main__":
  main(sys.argv[1])
