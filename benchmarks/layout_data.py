"""Store and training memory of layout data at the sizes of the full data set.

    python benchmarks/layout_data.py --workdir /some/disk --out layout_data.json

Every case runs in a process of its own, on generated graphs with the group structure
of the released files:

largest   the store of one graph with 11,560 configurations of 3,143 configurable nodes,
          the largest tensor of the released data: 2.6 GB as float32.
split     the store of a stand-in for the training split of nlp:random. Its graphs have the
          sizes of the released ones; its figures are scaled to the split's 207 graphs and
          13,457,555 configurations. Some training steps of `nlp-random,full` follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import timing
import workloads

from configs import layout as layout_config
from tpugraphs_jax import columns, graph
from tpugraphs_jax.data import graph_folder, npz, store
from tpugraphs_jax.infra import machine
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.run import training

_COLLECTION = "layout:nlp:random"
# Totals of the released split, to which the figures of the stand-in are scaled.
_SPLIT_NODES, _SPLIT_CONFIGS = 1_191_866, 13_457_555
_CONFIG_CAP = 100_040
_ROWS_PER_GROUP = 8  # two orders each of output, input and kernel
_MIB = 2**20
_CASES = ("largest", "split")
_TRAINING_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Size:
  """Sizes of one generated graph."""

  name: str
  nodes: int
  configs: int
  config_nodes: int
  groups: int

  @property
  def tensor_bytes(self) -> int:
    return self.configs * self.config_nodes * columns.LAYOUT_CONFIG_FEATURES * 4


# Published sizes. One group for about three configurable nodes, as in the smallest released
# graphs, is the worst case: large ones have far fewer groups.
LARGEST = Size("largest", nodes=25_544, configs=11_560, config_nodes=3_143, groups=1_100)


def split_sizes(graphs: int) -> list[Size]:
  """Sizes of transformer graphs, as functions of the number of layers.

  Inference and training graphs alternate. The number of configurations follows the fit
  ln C = 17.23 - 0.759 ln N up to a cap; groups are 7 % of the configurable nodes.
  """
  layers = (2, 4, 6, 8, 10, 12, 24)
  sizes = []
  for i in range(graphs):
    depth, training = layers[i // 2 % len(layers)], i % 2
    nodes = 1620 + 708 * depth if training else 656 + 110 * depth
    config_nodes = 56 + 24 * depth if training else 24 + 8 * depth
    configs = min(_CONFIG_CAP, round(np.exp(17.23 - 0.759 * np.log(nodes)) / 8) * 8)
    if not training and depth <= 12:
      configs = _CONFIG_CAP
    groups = max(14, round(0.07 * config_nodes))
    sizes.append(Size(f"g{i:03}", nodes, configs, config_nodes, groups))
  return sizes


def generate(size: Size, seed: int) -> graph.OpGraph:
  """A graph of the given size whose groups each choose among eight rows."""
  rng = np.random.default_rng(seed)
  rows = np.full((size.groups, _ROWS_PER_GROUP, columns.LAYOUT_CONFIG_FEATURES), -1, np.int8)
  for group in range(size.groups):
    for slot in range(3):
      pair = rng.choice(4, 2, replace=False)
      swapped = np.arange(_ROWS_PER_GROUP) >> slot & 1
      rows[group, :, 6 * slot:6 * slot + 2] = np.where(swapped[:, None], pair[::-1], pair)
  rows, number = np.unique(rows.reshape(-1, rows.shape[2]), axis=0, return_inverse=True)
  number = number.reshape(size.groups, _ROWS_PER_GROUP).astype(np.uint16)
  choice = rng.integers(0, _ROWS_PER_GROUP, (size.configs, size.groups), np.uint8)
  node_group = rng.permutation(np.arange(size.config_nodes) % size.groups)
  configs = graph.LayoutConfigs(
      rows, node_group.astype(np.int32), number[np.arange(size.groups), choice],
      rng.integers(10**6, 10**9, size.configs))
  return graph.OpGraph(
      name=size.name, configs=configs, edge_index=workloads.edges(rng, size.nodes),
      node_feat=rng.integers(0, 100, (size.nodes, columns.NODE_FEATURES)).astype(np.float32),
      node_opcode=rng.integers(1, columns.OPCODES, size.nodes).astype(np.uint8),
      node_splits=np.array([0, size.nodes]),
      config_node=np.arange(size.config_nodes, dtype=np.int32))


def write_files(root: Path, sizes: list[Size], *, split: str = "train") -> None:
  """Writes generated graphs as files in the released format."""
  folder = root.joinpath(*_COLLECTION.split(":"), split)
  for seed, size in enumerate(sizes):
    npz.write_layout(folder / f"{size.name}.npz", generate(size, seed))


def build(root: Path, *, workers: int) -> dict[str, float]:
  """Builds the store in a child process; returns its seconds and peak MiB.

  Peak memory is that of the largest process: the command or one of its workers.
  """
  command = [sys.executable, "-m", "tpugraphs_jax.data.store", "build", "--data_root",
             str(root), "--workers", str(workers), "--collection", _COLLECTION]
  start = time.perf_counter()
  process = subprocess.Popen(command)
  _, status, usage = os.wait4(process.pid, 0)
  if status:
    raise RuntimeError(f"building the store failed with status {status}")
  return {"build_s": time.perf_counter() - start, "peak_rss_mib": usage.ru_maxrss / 1024}


def folder_bytes(folder: Path) -> int:
  return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fetch_ms(folder: Path, *, fetched: int = 64, repeats: int = 200) -> dict[str, float]:
  """Median milliseconds to fetch 64 random configurations from files in the page cache."""
  configs = graph_folder.read(folder).configs
  rng = np.random.default_rng(0)
  groups, nodes = [], []
  configs.row_id(np.arange(len(configs)))  # touches every page
  for _ in range(repeats):
    ids = rng.choice(len(configs), fetched, replace=False)
    start = time.perf_counter()
    np.asarray(configs.group_row[ids])
    middle = time.perf_counter()
    configs.row_id(ids)
    groups.append(middle - start)
    nodes.append(time.perf_counter() - middle)
  return {"fetch_64_per_group_ms": 1e3 * float(np.median(groups)),
          "fetch_64_per_node_ms": 1e3 * float(np.median(nodes))}


def measure_largest(root: Path) -> dict[str, float]:
  """Build seconds, size and fetch times of the store of `LARGEST`."""
  write_files(root, [LARGEST])
  figures = build(root, workers=1)
  folder = next(root.joinpath("store").rglob("meta.json")).parent
  figures["disk_mib"] = folder_bytes(folder) / _MIB
  figures["build_mb_per_s"] = LARGEST.tensor_bytes / 1e6 / figures["build_s"]
  return figures | fetch_ms(folder)


def measure_split(root: Path, *, graphs: int, workers: int) -> dict[str, float]:
  """Figures of the stand-in's store, the same scaled to the split, and training figures."""
  sizes = split_sizes(graphs)
  write_files(root, sizes)
  figures = build(root, workers=workers)
  folders = store.ensure_store(root, _COLLECTION, "train", progress=False)
  nodes, configs = (sum(getattr(size, name) for size in sizes) for name in ("nodes", "configs"))
  stored = [graph_folder.read(folder).configs for folder in folders]
  config_bytes = sum(c.group_row.nbytes + c.runtime_ns.nbytes for c in stored)
  other_bytes = sum(map(folder_bytes, folders)) - config_bytes
  cells = sum(size.configs * size.config_nodes for size in sizes)
  whole = config_bytes * _SPLIT_CONFIGS / configs + other_bytes * _SPLIT_NODES / nodes
  return figures | {
      "graphs": graphs, "configs": configs, "tensor_gib": cells * 72 / 2**30,
      "cells_per_s": cells / figures["build_s"],
      "bytes_per_config": config_bytes / configs,
      "bytes_per_node": other_bytes / nodes,
      "whole_split_gib": whole / 2**30,
      "whole_split_build_s": figures["build_s"] * _SPLIT_CONFIGS / configs,
      **_train_over(root)}


def _train_over(root: Path) -> dict[str, float]:
  """Trains on the graphs of the stand-in; returns steps, seconds and peak MiB.

  `batch_shapes` and `padding_share` are of a run with as many steps as the preset's.
  """
  write_files(root, [Size("valid", 1_316, 200, 72, 14)], split="valid")
  preset = layout_config.get_config("nlp-random,full")
  config = preset.copy_and_resolve_references()
  config.data_root = str(root)
  config.batch.slates_per_epoch = 8 * _TRAINING_STEPS
  config.train.epochs = 1
  job, started = job_lib.Job.of(config), time.perf_counter()
  result = training.train(job, root / "run")
  seconds = time.perf_counter() - started
  config.batch.slates_per_epoch = preset.batch.slates_per_epoch
  plan = training.plan_of(
      config, job.ranker.family, job.prepare(job.data.load(str(root), "train")),
      job.data.targets, epochs=preset.train.epochs)
  return {"batch_shapes": len(plan.budgets), "padding_share": plan.padding(100),
          "training_steps": result.step, "training_s": seconds,
          "training_peak_mib": result.peak_bytes / _MIB}


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
  """Figures of one case, whose files are removed afterwards."""
  root = Path(tempfile.mkdtemp(prefix=f"layout_data_{case}_", dir=args.workdir))
  try:
    if case == "split":
      return measure_split(root, graphs=args.graphs, workers=args.workers)
    return measure_largest(root)
  finally:
    shutil.rmtree(root)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--workdir", help="folder for the generated files (default: temporary)")
  parser.add_argument("--graphs", type=int, default=20, help="number of graphs of the stand-in")
  parser.add_argument("--workers", type=int, default=os.cpu_count())
  parser.add_argument("--only", choices=_CASES, help="run one case, in this process")
  args = parser.parse_args()
  if args.only:
    timing.write(measure(args.only, args), args.out)
    return
  options = ["--graphs", str(args.graphs), "--workers", str(args.workers)]
  options += ["--workdir", args.workdir] if args.workdir else []
  results = {}
  for case in _CASES:
    results[case] = timing.in_subprocess("layout_data.py", "--only", case, *options)
    for name, value in results[case].items():
      print(f"{case:<8} {name:<24} {value:>16,.3f}", flush=True)
  timing.write(results, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
