"""Times of layouts, on programs small enough to compute by hand."""

import itertools

import numpy as np

from tpugraphs_jax.synthetic.layouts import layout_cost
from tpugraphs_jax.synthetic.program import BYTES_PER_NS, FLOPS_PER_NS, ProgramBuilder


def test_layout_time_charges_a_copy_where_neighbours_disagree():
  program = ProgramBuilder()
  left, right = (program.add("parameter", (256, 256)) for _ in range(2))
  first = program.add("dot", (256, 256), left, right, contraction=256, role="a")
  turned = program.add("transpose", (256, 256), first, dimensions=(1, 0))
  second = program.add("dot", (256, 256), turned, right, contraction=256, role="b")
  program.like("tanh", second)
  program.end_computation()
  cost = layout_cost(program, {first: 0, second: 1}, steps=1)
  times = [cost(np.array(bits)) for bits in itertools.product((0, 1), repeat=2)]
  # No padding anywhere; the transpose makes equal orders disagree.
  copy_ns = round(2 * 256 * 256 * 4 / BYTES_PER_NS)
  np.testing.assert_array_equal(times, times[1] + copy_ns * np.array([1, 0, 0, 1]))


def test_layout_time_charges_the_padding_of_the_minor_dimensions():
  program = ProgramBuilder()
  left = program.add("parameter", (16, 4096))
  right = program.add("parameter", (4096, 128))
  dot = program.add("dot", (16, 128), left, right, contraction=4096, role="a")
  program.end_computation()
  cost = layout_cost(program, {dot: 0}, steps=10)
  unit = 2 * 4096 / FLOPS_PER_NS  # of one element
  # In order 0 the 16 rows fill two registers; in order 1 they are padded to 128 lanes.
  assert cost(np.array([0])) == round(10 * unit * 16 * 128)
  assert cost(np.array([1])) == round(10 * unit * 128 * 128)
