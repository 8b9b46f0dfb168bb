"""Store and training memory of layout data at the sizes of the full data set.

    python benchmarks/layout_data.py --workdir /some/disk --out layout_data.json

Every case runs in a process of its own, on generated graphs with the group structure
of the released files:

largest   the store of one graph with 11,560 configurations of 3,143 configurable nodes,
          the largest tensor of the released data: 2.6 GB as float32.
split     some training steps of `nlp-random,full` on 20 graphs that have the sizes of those
          of the training split of nlp:random, from the beginning: the store is built too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
import tempfile

import numpy as np
import timing
import workloads

from tpugraphs_jax import columns, graph
from tpugraphs_jax.data import npz, store
from tpugraphs_jax.infra import machine
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import training
from tpugraphs_jax.train.experiment import Experiment

_COLLECTION = "layout:nlp:random"
_CONFIG_CAP = 100_040
_ROWS_PER_GROUP = 8  # two orders each of output, input and kernel
_MIB = 2**20
_GRAPHS = 20
_TRAINING_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Size:
  """Sizes of one generated graph."""

  name: str
  nodes: int
  configs: int
  config_nodes: int
  groups: int


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
      rows[group, :, 6 * slot : 6 * slot + 2] = np.where(swapped[:, None], pair[::-1], pair)
  rows, number = np.unique(rows.reshape(-1, rows.shape[2]), axis=0, return_inverse=True)
  number = number.reshape(size.groups, _ROWS_PER_GROUP).astype(np.uint16)
  choice = rng.integers(0, _ROWS_PER_GROUP, (size.configs, size.groups), np.uint8)
  node_group = rng.permutation(np.arange(size.config_nodes) % size.groups)
  configs = graph.LayoutConfigs(
    rows,
    node_group.astype(np.int32),
    number[np.arange(size.groups), choice],
    rng.integers(10**6, 10**9, size.configs),
  )
  return graph.OpGraph(
    name=size.name,
    configs=configs,
    edge_index=workloads.edges(rng, size.nodes),
    node_feat=rng.integers(0, 100, (size.nodes, columns.NODE_FEATURES)).astype(np.float32),
    node_opcode=rng.integers(1, columns.OPCODES, size.nodes).astype(np.uint8),
    node_splits=np.array([0, size.nodes]),
    config_node=np.arange(size.config_nodes, dtype=np.int32),
  )


def write_files(root: Path, sizes: list[Size], *, split: str = "train") -> None:
  """Writes generated graphs as files in the released format."""
  folder = root.joinpath(*_COLLECTION.split(":"), split)
  for seed, size in enumerate(sizes):
    npz.write_layout(folder / f"{size.name}.npz", generate(size, seed))


def measure_largest(root: Path) -> dict[str, float]:
  """MiB of the store of `LARGEST` on disk."""
  write_files(root, [LARGEST])
  (folder,) = store.ensure_store(root, _COLLECTION, "train", progress=False)
  return {"disk_mib": sum(path.stat().st_size for path in folder.iterdir()) / _MIB}


def measure_split(root: Path) -> dict[str, float]:
  """Number of configurations of the stand-in, and peak MiB of a training run."""
  sizes = split_sizes(_GRAPHS)
  write_files(root, sizes)
  write_files(root, [Size("valid", 1_316, 200, 72, 14)], split="valid")
  config = configs.load("layout.py:nlp-random,full")
  config.data_root = str(root)
  config.batch.slates_per_epoch = 8 * _TRAINING_STEPS
  config.train.epochs = 1
  result = training.train(Experiment.of(config), root / "run")
  return {
    "graphs": len(sizes),
    "configs": sum(size.configs for size in sizes),
    "training_peak_mib": result.peak_bytes / _MIB,
  }


_CASES = {"largest": measure_largest, "split": measure_split}


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--workdir", help="folder for the generated files (default: temporary)")
  parser.add_argument("--only", choices=_CASES, help="run one case, in this process")
  args = parser.parse_args()
  if args.only:
    with tempfile.TemporaryDirectory(dir=args.workdir) as root:
      timing.report(_CASES[args.only](Path(root)), args.out)
    return
  options = ["--workdir", args.workdir] if args.workdir else []
  timing.write(
    {case: timing.in_subprocess("layout_data.py", "--only", case, *options) for case in _CASES},
    args.out,
  )


if __name__ == "__main__":
  machine.keep_freed()
  main()
