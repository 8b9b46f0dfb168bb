"""Times of tiles, on kernels small enough to compute by hand, and that they depend on edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tpugraphs_jax.synthetic import program
from tpugraphs_jax.synthetic.tiles import KernelBuilder, tile_cost


def normalizing_kernel(before: str, after: str) -> KernelBuilder:
  """`after(x * sum_n before(x))` on [256, 2048]."""
  kernel, axes = KernelBuilder({"m": 256, "n": 2048}), ("m", "n")
  x = kernel.parameter(axes)
  total = kernel.reduce(kernel.add(before, axes, x), "n")
  kernel.add(after, axes, kernel.add("multiply", axes, x, kernel.spread(total, axes)))
  return kernel.finish()


def test_tile_time_counts_what_feeds_a_reduction_once_per_tile():
  tile = np.array([[1, 1], [4, 2], [3, 16], [8, 5]])
  found, _ = tile_cost(normalizing_kernel("exponential", "negate"), tile, np.zeros((4, 0), int))
  for (rows, columns), time in zip(tile, found):
    tiles = math.ceil(32 / rows) * math.ceil(16 / columns)
    # The exponential needs whole rows of 16 registers, one register holds the sums.
    vector = program.vector_cost("exponential") * rows * 16 + 1 + 2 * rows * columns
    memory = (rows * 16 + rows * columns) + rows * columns
    transfer = program.REGISTER_BYTES / program.BYTES_PER_NS
    start = program.TILE_NS + program.CUT_NS
    expected = tiles * (start + max(vector, memory * transfer))
    assert time == pytest.approx(expected, rel=1e-12)


def product_kernel(left_opcode: str, right_opcode: str) -> KernelBuilder:
  """`left(x) @ right(y)` on square matrices."""
  kernel = KernelBuilder(dict.fromkeys("mnk", 4096))
  kernel.output_axes, kernel.kernel_axes = ("m", "n"), ("k", "n")
  x, y = kernel.parameter(("m", "k")), kernel.parameter(("k", "n"))
  left, right = kernel.add(left_opcode, ("m", "k"), x), kernel.add(right_opcode, ("k", "n"), y)
  kernel.add("convolution", ("m", "n"), left, right, contraction=4096)
  return kernel.finish()


def test_the_same_instructions_wired_differently_have_another_best_tile():
  tile = np.array(list(itertools.product(2 ** np.arange(10), 2 ** np.arange(6))))
  depth = np.full((len(tile), 2), 16)
  on_left, _ = tile_cost(product_kernel("tanh", "negate"), tile, depth)
  on_right, _ = tile_cost(product_kernel("negate", "tanh"), tile, depth)
  # The slow operand is computed anew for each tile along the axis it lacks.
  assert on_left[on_right.argmin()] > 1.2 * on_left.min()
  assert on_right[on_left.argmin()] > 1.2 * on_right.min()
