"""The time of tiles, on kernels small enough to add up, and that it depends on the graph."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import spatial

from tpugraphs_jax.data import synthetic
from tpugraphs_jax.data.synthetic import program as machine
from tpugraphs_jax.data.synthetic.program import Program
from tpugraphs_jax.data.synthetic.tiles import Kernel, tile_cost


def normalizing_kernel(before: str, after: str) -> Kernel:
  """`after(x * sum_n before(x))` on [256, 2048]."""
  program, dims = Program(), (256, 2048)
  x = program.add("parameter", dims)
  total = program.reduce(program.like(before, x), (1,))
  scaled = program.like("multiply", x, program.spread(total, dims, (0,)))
  root = program.like(after, scaled)
  program.end_computation()
  axes = {node: ("m", "n")[:len(program.dims(node))] for node in range(root + 1)}
  return Kernel(program, range(root + 1), axes, {"m": 256, "n": 2048}, ("m", "n"), ())


def test_tile_time_counts_what_feeds_a_reduction_once_per_tile():
  tile = np.array([[1, 1], [4, 2], [3, 16], [8, 5]])
  found, _ = tile_cost(
      normalizing_kernel("exponential", "negate"), tile, np.zeros((4, 0), int))
  for (rows, columns), time in zip(tile, found):
    tiles = math.ceil(32 / rows) * math.ceil(16 / columns)
    # The exponential needs whole rows of 16 registers, one register holds the sums.
    vector = machine.vector_cost("exponential") * rows * 16 + 1 + 2 * rows * columns
    memory = (rows * 16 + rows * columns) + rows * columns
    transfer = machine.REGISTER_BYTES / machine.BYTES_PER_NS
    start = machine.TILE_NS + machine.CUT_NS
    expected = tiles * (start + max(vector, memory * transfer))
    assert time == pytest.approx(expected, rel=1e-12)


def test_tile_time_charges_spills_beyond_the_memory_on_chip(monkeypatch):
  monkeypatch.setattr(machine, "VMEM_REGISTERS", 1024)
  kernel = normalizing_kernel("negate", "negate")
  (large, small), _ = tile_cost(
      kernel, np.array([[16, 16], [8, 16]]), np.zeros((2, 0), int))
  # Both fetch everything once per way of needing it; the large tile does not fit.
  assert 6 * 16 * 16 > machine.VMEM_REGISTERS >= 6 * 8 * 16
  assert large > small


def product_kernel(left_opcode: str, right_opcode: str) -> Kernel:
  """`left(x) @ right(y)` on square matrices."""
  program, dims = Program(), (4096, 4096)
  x, y = program.add("parameter", dims), program.add("parameter", dims, parameter_number=1)
  left, right = program.like(left_opcode, x), program.like(right_opcode, y)
  root = program.add("convolution", dims, left, right, contraction=4096)
  program.end_computation()
  axes = {x: ("m", "k"), left: ("m", "k"), y: ("k", "n"), right: ("k", "n"),
          root: ("m", "n")}
  return Kernel(program, range(root + 1), axes, dict.fromkeys("mnk", 4096), ("m", "n"),
                ("k", "n"))


def test_the_same_instructions_wired_differently_have_another_best_tile():
  tile = np.array(list(itertools.product(2 ** np.arange(10), 2 ** np.arange(6))))
  depth = np.full((len(tile), 2), 16)
  on_left, _ = tile_cost(product_kernel("tanh", "negate"), tile, depth)
  on_right, _ = tile_cost(product_kernel("negate", "tanh"), tile, depth)
  # The slow operand is computed anew for each tile along the axis it lacks.
  assert on_left[on_right.argmin()] > 1.2 * on_left.min()
  assert on_right[on_left.argmin()] > 1.2 * on_right.min()


def tile_table(split: str, kernels: int) -> list[tuple[np.ndarray, synthetic.Ceiling]]:
  """Configurations and runtimes of some kernels."""
  table = []
  for spec in synthetic.file_specs("medium", 1, "tile:xla", limit=kernels):
    if spec.split == split:
      op_graph, ceiling = synthetic.make_file(spec)
      if len(ceiling.runtime_ns) >= 20 and op_graph.configs.config_feat.any():
        table.append((op_graph.configs.config_feat, ceiling))
  return table


def tile_logarithms(config: np.ndarray) -> np.ndarray:
  """What a ranker sees that looks at the configuration alone, on an even scale."""
  return np.log1p(config[:, [0, 1, 6, 7, 8, 9, 10, 11, 14, 15]])


def neighbour_ranker(train):
  """Scores a tile by the mean relative log runtime of the 30 nearest training tiles.

  A good predictor of whatever can be told from the configuration alone.
  """
  points = np.concatenate([tile_logarithms(c) for c, _ in train])
  logs = [np.log(ceiling.runtime_ns) for _, ceiling in train]
  relative = np.concatenate([log - log.mean() for log in logs])
  scale = points.std(0) + 1e-6
  tree = spatial.KDTree(points / scale)
  return lambda config: relative[tree.query(tile_logarithms(config) / scale, k=30)[1]].mean(1)


def top_slowdown(scores: np.ndarray, measured_ns: np.ndarray) -> float:
  return measured_ns[np.argsort(scores)[:5]].min() / measured_ns.min() - 1


def test_a_tile_ranker_without_the_graph_is_clearly_worse():
  train, valid = tile_table("train", 100), tile_table("valid", 60)
  score = neighbour_ranker(train)
  blind = np.mean([top_slowdown(score(config), ceiling.measured_ns)
                   for config, ceiling in valid])
  seeing = np.mean([top_slowdown(c.runtime_ns, c.measured_ns) for _, c in valid])
  assert blind > 0.1
  assert seeing < 0.001
