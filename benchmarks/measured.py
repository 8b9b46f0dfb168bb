"""Models that were trained on estimates alone, judged by times measured on a TPU v3.

    python -m benchmarks.measured --data_root DIR --workdir out/own_quality \
        --out benchmarks/measured.json

DIR holds the released layout data, such as `DIR/layout/xla/default/valid/alexnet.npz`. The models
are `TrafficTables`, trained with each seed on the estimates in `data/own`, whose programs are
neither AlexNet nor UNet3D (`own_quality.train`, in working folders that are kept), and the one
that ships. They order the measured configurations of AlexNet and of UNet3D. The other rows:

random         the mean over all orders
padding        groups changed plus padded elements, which needs no model
estimates      of the TPU v3 compiler, for the combinations of output orders that
               `benchmarks/bridge.json` has; the other configurations are left out of the row
one-hot fit    least squares of one number for each choice, on the 40,000 measured times of the
               split `train`: the ceiling of a sum of costs, trained on AlexNet itself

`kendaltau` is tau-b; `slowdown1` and `slowdown5` are of the first choice and of the best of five.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import own_quality, pages, timing
from tpugraphs_jax import metrics
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.data import npz
from tpugraphs_jax.rankers.ranker import load, Ranker
from tpugraphs_jax.tuning import choosing, programs

ROOT = Path(__file__).parents[1]
_OUTPUT = 6  # of a node's 18 integers
_DIMENSIONS = slice(21, 27)  # of a node's features: sizes of the output
_OPCODES = {"conv_general_dilated": "convolution", "dot_general": "dot", "reshape": "reshape"}
# The files of the split `test` were released without run times.
GRAPHS = {
  "AlexNet, valid": "valid/alexnet",
  "AlexNet, train": "train/alexnet",
  "UNet3D, valid": "valid/unet3d",
}
COLUMNS = ("kendaltau", "slowdown1", "slowdown5")
_KS = (1, 5)
_ESTIMATES = {
  "estimates: optimal seconds": "optimal_seconds",
  "estimates: cycles": "estimated_cycles",
}


def figures(scores: np.ndarray, runtime: np.ndarray) -> dict[str, float]:
  """Tau-b and slowdowns of scores `[C]` against run times `[C]` of one program."""
  slowdown = metrics.top_k_slowdown(scores, runtime, _KS)
  return {
    "kendaltau": metrics.kendall_tau(scores, runtime),
    **{f"slowdown{k}": float(value) for k, value in slowdown.items()},
  }


def one_hot_scores(data_root: str | Path, place: str) -> np.ndarray:
  """Predicted ln(run time) `[C]` of AlexNet's configurations, from a linear fit to choices.

  Args:
    data_root: the released data.
    place: of the predicted configurations, such as `valid/alexnet`; fitted are those of `train`.
  """
  train_, judged = (
    npz.read_layout(Path(data_root, "layout/xla/default", f"{name}.npz"))
    for name in ("train/alexnet", place)
  )
  assert (train_.configs.node_group == judged.configs.node_group).all()
  choices = np.concatenate(
    [graph.configs.rows[graph.configs.group_row] for graph in (train_, judged)]
  )  # [configs, groups, 18]
  numbers = [
    np.unique(column, axis=0, return_inverse=True)[1].reshape(-1)
    for column in choices.swapaxes(0, 1)
  ]
  design = np.concatenate([np.eye(column.max() + 1)[column] for column in numbers], axis=1)
  known = len(train_.configs)
  weights, *_ = np.linalg.lstsq(
    design[:known], np.log(train_.configs.labels.astype(np.float64)), rcond=None
  )
  return design[known:] @ weights


def combinations(graph: Any, choices: choosing.Choices) -> tuple[np.ndarray, np.ndarray]:
  """Distinct combinations of output orders, and the combination of each configuration.

  Returns:
    Option numbers `[combinations, groups]`, the commonest combination first, and the index of
    each configuration's combination `[C]`.

  Raises:
    ValueError: nodes that belong to one equation have different orders.
  """
  rows = graph.configs.decode(np.arange(len(graph.configs)))[:, :, :_OUTPUT]
  numbers = np.zeros((len(rows), len(choices.groups)), np.int64)
  names = {number: name for name, number in opcode_ids().items()}
  by_key: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # opcode and shape of the output
  for place, node in enumerate(graph.config_node):
    shape = tuple(int(size) for size in graph.node_feat[node, _DIMENSIONS] if size > 0)
    by_key.setdefault((names[int(graph.node_opcode[node])], shape), []).append(place)
  for place, group in enumerate(choices.groups):
    nodes = by_key.get((_OPCODES[group.primitive], group.shapes[0]))
    if nodes is None:
      continue
    orders = rows[:, nodes]
    if (orders != orders[:, :1]).any():
      raise ValueError(f"nodes of {group} differ in their output orders, expected one order")
    for option, (output, *_) in enumerate(group.options):
      order = (*output, *(-1,) * (_OUTPUT - len(output)))
      numbers[(orders[:, 0] == order).all(axis=1), place] = option
  distinct, which, count = np.unique(numbers, axis=0, return_inverse=True, return_counts=True)
  order = np.argsort(-count, kind="stable")
  return distinct[order], np.argsort(order)[which.ravel()]


def estimated(graph: Any) -> dict[str, np.ndarray]:
  """The compiler's estimates of AlexNet's configurations `[C]`, NaN where there is none."""
  (program,) = programs.load(f"{ROOT / 'examples' / 'programs' / 'alexnet.py'}:step")
  distinct, which = combinations(graph, choosing.choices(program.function, *program.args))
  record = json.loads((ROOT / "benchmarks" / "bridge.json").read_text())
  known = {tuple(row["numbers"]): row for row in record["combinations"]}
  rows = [known.get(tuple(numbers)) for numbers in distinct.tolist()]
  return {
    key: np.array([row[key] if row else np.nan for row in rows])[which]
    for key in _ESTIMATES.values()
  }


def estimates(graph: Any) -> dict[str, dict[str, float]]:
  """Figures of the compiler's estimates of AlexNet's configurations, with their number."""
  values, runtime = estimated(graph), graph.configs.labels[:]
  is_known = ~np.isnan(values["optimal_seconds"])
  return {
    name: figures(values[key][is_known], runtime[is_known]) | {"configs": int(is_known.sum())}
    for name, key in _ESTIMATES.items()
  }


def blind(graph: Any) -> dict[str, dict[str, float]]:
  """Figures of a random order and of the heuristic."""
  runtime = graph.configs.labels[:]
  random = metrics.random_slowdown(runtime, _KS)
  return {
    "random": {"kendaltau": 0.0, **{f"slowdown{k}": float(random[k]) for k in _KS}},
    "padding": figures(own_quality.heuristic(graph), runtime),
  }


def table(results: Mapping[str, Any]) -> str:
  """The figures of every program as a Markdown table; slowdowns in percent."""
  rows = []
  for name in GRAPHS:
    title = f"{name}, {results[name]['configs']:,} configurations"
    for way, result in results[name]["ways"].items():
      slowdowns = [pages.percent(result, column) for column in COLUMNS[1:]]
      rows.append([title, way, pages.figure(result, "kendaltau"), *slowdowns])
      title = ""
  return pages.table(["", "", "tau-b", "first choice", "best of five"], rows)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, type=Path, help="the released data")
  parser.add_argument("--own_root", default="data/own/npz", help="data of the estimates")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  trained = [
    Ranker.load(
      own_quality.train(
        "own",
        "recommended",
        seed,
        args.own_root,
        args.workdir.resolve() / "recommended" / str(seed),
      )
    )
    for seed in args.seeds
  ]
  shipped = load("layout-v3-estimate")
  results: dict[str, Any] = {"machine": timing.machine()}
  for name, place in GRAPHS.items():
    graph = npz.read_layout(args.data_root / "layout" / "xla" / "default" / f"{place}.npz")
    runtime = graph.configs.labels[:]
    judged = lambda ranker: figures(ranker.scores([graph])[0], runtime)
    ways = blind(graph)
    if "alexnet" in place:
      ways |= estimates(graph)
    ways |= {
      "trained on estimates of other programs": pages.summary(list(map(judged, trained))),
      "the one that ships": judged(shipped),
    }
    if "alexnet" in place:
      ways["one-hot fit to measured AlexNet"] = figures(
        one_hot_scores(args.data_root, place), runtime
      )
    results[name] = {"configs": len(runtime), "ways": ways}
    timing.write(results, args.out)
  print(table(results))


if __name__ == "__main__":
  main()
