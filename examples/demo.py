"""What rankers gain on programs that they have not seen: the last part of `make demo`.

    python examples/demo.py out/demo_layout

The test programs of `data/own` are of families without a training program, and the time of each of
their layouts on a TPU v6e is known, as `tune` estimates it. Five layouts of each are tried in the
order of `tune`: the compiler's own choice first, then the most promising others. The given run is
compared with the model that ships and random tries.
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
  """Mean times after the tries, and how many programs got a better layout than their own.

  Args:
    name: of the orders.
    labels: of the layouts of each graph.
    orders: one or several of each graph, layout 0 first.
  """
  above, saved, found = [], [], 0.0
  for of_graph, some in zip(labels, orders):
    tried = np.array([of_graph[order[:TRIES]].min() for order in some])
    above.append(np.mean(tried) / of_graph.min() - 1)
    saved.append(1 - np.mean(tried) / of_graph[0])
    found += np.mean(tried < BETTER * of_graph[0])
  return [name, f"{np.mean(above):.1%}", f"{np.mean(saved):.1%}", f"{found:.0f}"]


def main(workdir):
  folder = pathlib.Path(__file__).parents[1] / "data/own/npz/layout/own"
  paths = sorted(folder.glob("outputs_v6e/test/*.npz")) + sorted(
    folder.glob("blocks_v6e/test/*.npz")
  )
  graphs = [graph for graph in map(tpugraphs_jax.read_layout, paths) if graph.configs.has_order]
  labels = [graph.configs.labels[:] for graph in graphs]
  rng = np.random.default_rng(0)
  fastest = np.mean([1 - of_graph.min() / of_graph[0] for of_graph in labels])
  own = np.mean([of_graph[0] / of_graph.min() - 1 for of_graph in labels])
  better = sum(of_graph.min() < BETTER * of_graph[0] for of_graph in labels)
  rows = [["the compiler's own layouts, no try", f"{own:.1%}", "0.0%", "0"]]
  draw = lambda count: [0, *(1 + rng.permutation(count - 1))]
  draws = ([draw(len(of_graph)) for _ in range(DRAWS)] for of_graph in labels)
  rows.append(row(f"{TRIES} random layouts", labels, draws))
  for name, model in (("this run", workdir), (f"{SHIPPED}, which ships", SHIPPED)):
    scores = tpugraphs_jax.load(model).scores(graphs)
    orders = [[order_of(*pair)] for pair in zip(graphs, scores)]
    rows.append(row(f"the first {TRIES} of {name}", labels, orders))
  rows.append(["all layouts", "0.0%", f"{fastest:.1%}", f"{better}"])
  title = (
    f"Time of {len(graphs)} test programs with the best of the layouts that were tried, mean over "
    f"programs. They are of families without a training program; {better} have layouts over 2 % "
    "faster than the compiler's own. Times are estimates for a TPU v6e, no measurements."
  )
  head = ["layouts tried", "above the fastest", "saved of the compiler's own", "better ones found"]
  print(f"\n{Table(head, rows, title)}")


if __name__ == "__main__":
  main(sys.argv[1])
