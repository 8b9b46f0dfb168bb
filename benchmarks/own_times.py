r"""Models that learn the times of programs and of their kernels, with and without those of kernels.

    python -m benchmarks.own_times --workdir out/own_times --out benchmarks/own_times.json

Trains each variant of `configs/layout.py` with every seed on the labels by time of a target, in
working folders that are kept, and judges it on the validation families, which choose its best
checkpoint, and on the test families, which choose nothing. The labels are estimates of the
compiler's schedules and no measurements. `--variants` trains some variants, or none, and leaves the
rows of the others in `--out` as they are. Beside the columns of `own_quality`:

  program   median over programs of the error of a predicted time, |predicted / label - 1|, the
            median over the configurations of a program
  kernel    the same over the kernels of programs, those of no node left out, from the nodes of each

The rows `steps` are of steps that people write: `benchmarks/steps`, its files of validation and of
test, with which nothing is chosen.

A roofline needs no training: a kernel takes the larger of its operations at the peak of the target
and its bytes at a rate, of its memory or of copies on the chip. The bytes are those of its operands
and results, padded in the orders of the choice. A program takes the sum of its nodes, each as a
kernel of its own, because fusions are not known before it is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kept_runs, own_quality, pages, timing
from tpugraphs_jax.columns import MAX_RANK, NODE, opcode_ids
from tpugraphs_jax.data import features, npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.rankers.ranker import load, Ranker
from tpugraphs_jax.rankers.tables import node_pairs, times
from tpugraphs_jax.tuning.schedule.chips import chips

# The name of each variant, its variant of the config file and further flags.
WITHOUT = "--config.loss.kernels=0"
MORE = "more"  # the collection of further programs, whose validation and test are steps
ALSO = f"--config.data.also=('layout:own:{MORE}_{{target}}',)"
VARIANTS = {
  "times": ("`TimeTables`", "times", ()),
  "times_alone": ("`TimeTables`, without times of kernels", "times", (WITHOUT,)),
  "sage": ("`TimeSAGE`", "times_sage", ()),
  "sage_alone": ("`TimeSAGE`, without times of kernels", "times_sage", (WITHOUT,)),
  "traffic": ("`TrafficTables`", "traffic", ()),
  "traffic_more": ("`TrafficTables`, more programs", "traffic", (ALSO,)),
}
STEPS = "steps"
SPLITS = (*own_quality.SPLITS, STEPS)
OLD = "layout-v3-estimate"
ERRORS = ("program", "kernel")
# Names of values, which move nothing.
_FREE = [opcode_ids()[name] for name in ("parameter", "constant", "tuple", "get-tuple-element")]
COLUMNS = (*own_quality.COLUMNS, *ERRORS)


def graphs(data_root: Path, target: str, split: str) -> list[OpGraph]:
  """The programs of a split whose configurations have an order, of the collections of a target.

  Args:
    data_root: folder with layout/.
    target: of the labels.
    split: `valid` or `test`, without the steps of `benchmarks/steps`, or `steps`.
  """
  folder = data_root / "layout" / "own"
  is_steps = lambda path: path.parents[1].name == f"{MORE}_{target}"
  splits = own_quality.SPLITS if split == STEPS else (split,)
  paths = [path for each in splits for path in sorted(folder.glob(f"*_{target}/{each}/*.npz"))]
  found = [npz.read_layout(path) for path in paths if is_steps(path) == (split == STEPS)]
  return [graph for graph in found if graph.configs.has_order and not _is_kept_out(graph)]


def _is_kept_out(graph: OpGraph) -> bool:
  return graph.name.startswith(own_quality.KEPT_OUT)


def train(variant: str, seed: int, data_root: str, target: str, workdir: Path) -> Ranker:
  """Trains a run unless it is finished."""
  _, name, flags = VARIANTS[variant]
  folder = workdir.resolve() / variant / str(seed)
  kept_runs.train(
    "layout",
    (f"own-outputs_{target}", name),
    data_root,
    folder,
    "--do=train",
    f"--config.seed={seed}",
    f"--compilation_cache={workdir.resolve() / 'compilation_cache'}",
    *(flag.format(target=target) for flag in flags),
  )
  return Ranker.load(folder)


def errors(ranker: Ranker, members: Sequence[OpGraph]) -> dict[str, float]:
  """`program` and `kernel` of a model that predicts times; empty for any other."""
  if not ranker.family.network.predicts_kernels:
    return {}
  return errors_of(members, ranker.scores(members), ranker.kernel_times(members))


def errors_of(
  members: Sequence[OpGraph], scores: Sequence[np.ndarray], kernels: Sequence[np.ndarray]
) -> dict[str, float]:
  """`program` and `kernel` of times in microseconds.

  Args:
    members: programs with labels in picoseconds and the times of kernels.
    scores: `[C]` times of each program.
    kernels: `[C, D]` times of the kernels of each program.
  """
  of_programs = [
    np.median(np.abs(1e6 * predicted / graph.configs.labels - 1))
    for graph, predicted in zip(members, scores)
  ]
  of_kernels = [
    error
    for graph, predicted in zip(members, kernels)
    for error in kernel_errors(graph, 1e6 * predicted)
  ]
  return {"program": float(np.median(of_programs)), "kernel": float(np.median(of_kernels))}


def kernel_errors(graph: OpGraph, predicted: np.ndarray) -> list[float]:
  """The error of each kernel that has nodes, the median over the configurations that have it.

  Args:
    graph: with the times of kernels.
    predicted: `[C, D]` times in the unit of the labels.
  """
  kernels = graph.configs.kernels
  return [
    float(np.median(np.abs(predicted[there, d] / kernels.runtime[there, d] - 1)))
    for d in np.unique(kernels.node[:, 0])
    if (there := kernels.runtime[:, d] > 0).any()
  ]


def rates(target: str) -> dict[str, float]:
  """Bytes a second at which a roofline moves what its kernels read and write, by row."""
  chip = chips()[f"tpu:{target}"]
  return {
    "roofline, bytes at the rate of the memory": GENERATIONS[f"tpu:{target}"].bandwidth,
    "roofline, bytes at the rate on the chip": chip.vmem * chip.clock,
  }


def roofline(graph: OpGraph, rate: float, peak: float) -> tuple[np.ndarray, np.ndarray]:
  """Microseconds of programs `[C]` and of kernels `[C, D]`, 0 for kernels of no node.

  Args:
    graph: with the times of kernels.
    rate: bytes a second.
    peak: operations a second.
  """
  operations = np.expm1(times.work(graph)[:, 2])
  nbytes = np.stack([padded_bytes(graph, config) for config in range(len(graph.configs))])
  kernels = np.zeros(graph.configs.kernels.runtime.shape)
  time = lambda nodes: (
    1e6
    * np.maximum(nbytes[:, _moved(graph, nodes)].sum(axis=1) / rate, operations[nodes].sum() / peak)
  )
  kernel, node = graph.configs.kernels.node.T
  for d in np.unique(kernel):
    kernels[:, d] = time(node[kernel == d])
  timed = np.flatnonzero(~np.isin(graph.node_opcode, _FREE))
  return sum((time(timed[[place]]) for place in range(len(timed))), np.zeros(len(nbytes))), kernels


def padded_bytes(graph: OpGraph, config: int) -> np.ndarray:
  """Bytes `[N]` of the outputs of nodes, padded to 8 x 128 in the orders of a configuration."""
  dims, given = graph.node_feat[:, features.DIMENSIONS], graph.configs
  order = graph.node_feat[:, NODE["minor_to_major"]][:, :2].astype(int)
  order[np.arange(2) >= (dims > 0).sum(axis=1)[:, None]] = -1
  chosen = given.rows[given.row_id(np.array([config]))[0], :2].astype(int)
  is_open = chosen[:, :1] < 0
  order[graph.config_node] = np.where(is_open, order[graph.config_node], chosen)
  is_known = (order >= 0) & (order < MAX_RANK)
  sizes = np.take_along_axis(dims, np.where(is_known, order, 0), axis=1) * is_known
  padding = features.padding(sizes[:, 0], features.LANES)
  padding = padding + features.padding(sizes[:, 1], features.SUBLANES)
  return node_pairs.tensor_bytes(graph.node_feat) * np.exp(padding)


def _moved(graph: OpGraph, nodes: np.ndarray) -> np.ndarray:
  """The nodes outside of `nodes` that these read, and those of `nodes` that others read, or none.

  Each is there once. A node that nothing reads is a result.
  """
  is_in = np.isin(np.arange(graph.num_nodes), nodes)
  consumer, producer = graph.edge_index.T
  crosses = is_in[consumer] != is_in[producer]
  results = np.flatnonzero(is_in & ~np.isin(np.arange(graph.num_nodes), producer))
  return np.union1d(producer[crosses], results)


def roofline_rows(members: Sequence[OpGraph], target: str) -> dict[str, dict[str, float]]:
  """Mean figures and errors of the rooflines of a target."""
  rows, peak = {}, GENERATIONS[f"tpu:{target}"].flops
  for name, rate in rates(target).items():
    found = [roofline(graph, rate, peak) for graph in members]
    figures = [own_quality.figures(graph, scores) for graph, (scores, _) in zip(members, found)]
    rows[name] = own_quality.means(figures) | errors_of(members, *zip(*found))
  return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The figures of a split as a Markdown table, with standard deviations over seeds."""
  shown = [column for column in COLUMNS if any(column in row for row in rows.values())]
  return pages.table(
    ["", *shown],
    [
      [name, *(pages.figure(row, column, empty="-") for column in shown)]
      for name, row in rows.items()
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", type=Path, default=Path("data/own/npz"))
  parser.add_argument("--target", default="v6e", help="of the labels")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  members = {split: graphs(args.data_root, args.target, split) for split in SPLITS}
  results: dict[str, Any] = {
    "target": args.target,
    "seeds": args.seeds,
    "programs": {split: [graph.name for graph in of_split] for split, of_split in members.items()},
  }
  for split, of_split in members.items():
    old = own_quality.means(own_quality.rows_of(load(OLD), of_split))
    results[split] = own_quality.blind_rows(of_split) | own_quality.heuristic_rows(of_split)
    results[split] |= roofline_rows(of_split, args.target)
    results[split][f"`{OLD}`"] = old
  known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  for variant, (name, *_) in VARIANTS.items():
    if variant not in args.variants:
      for split in members:
        results[split] |= {key: row for key, row in known.get(split, {}).items() if key == name}
      continue
    rankers = [
      train(variant, seed, str(args.data_root), args.target, args.workdir) for seed in args.seeds
    ]
    for split, of_split in members.items():
      results[split][name] = pages.summary(
        [
          own_quality.means(own_quality.rows_of(ranker, of_split)) | errors(ranker, of_split)
          for ranker in rankers
        ]
      )
  for split in members:
    print(f"{split}: {len(members[split])} programs\n\n{table(results[split])}\n", flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
