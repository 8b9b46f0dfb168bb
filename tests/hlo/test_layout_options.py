import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.support import hlo_modules, recorded
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo.layout_options import distinct_choices


def _graph(*instructions):
  module = hlo_modules.module(hlo_modules.computation(*instructions))
  return hlo.featurize(module.SerializeToString())


def _parameter(id, shape, **fields):
  return hlo_modules.instruction("parameter", id=id, shape=shape, **fields)


def _conv(id, operands, shape, output, input_, kernel):
  conv = hlo_modules.instruction("convolution", id=id, operands=operands, shape=shape)
  numbers = conv.convolution_dimension_numbers
  numbers.output_batch_dimension, numbers.output_feature_dimension = output
  numbers.input_batch_dimension, numbers.input_feature_dimension = input_
  (numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension) = kernel
  return conv


def _rows(*tensors):
  """All combinations of the orders of three tensors, and the default."""
  padded = [[(*order, *(-1,) * (6 - len(order))) for order in orders] for orders in tensors]
  combined = {tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*padded)}
  return combined | {(-1,) * 18}


def _node_rows(graph, node):
  configs = graph.with_layouts(10_000).configs
  return {tuple(row) for row in configs.decode(np.arange(len(configs))).astype(int)[:, node]}


def test_convolution_orders_batch_and_feature_of_every_tensor():
  graph = _graph(
    _parameter(1, [32, 8, 8, 64]),
    _parameter(2, [3, 3, 64, 128]),
    _conv(3, [1, 2], [32, 8, 8, 128], (0, 3), (0, 3), (2, 3)),
  )
  assert _node_rows(graph, 0) == _rows([(0, 3), (3, 0)], [(0, 3), (3, 0)], [(2, 3), (3, 2)])


def test_dot_orders_the_last_two_dimensions_of_output_and_operands():
  graph = _graph(
    _parameter(2, [16, 32]),
    _parameter(1, [4, 8, 16]),
    hlo_modules.instruction("dot", id=3, operands=[1, 2], shape=[4, 8, 32]),
  )
  assert _node_rows(graph, 0) == _rows([(1, 2), (2, 1)], [(1, 2), (2, 1)], [(0, 1), (1, 0)])


@pytest.mark.parametrize(
  "output, operand, count",
  [
    ((32, 6400), (32, 5, 5, 256), 2),
    ((32, 5, 5, 256), (32, 6400), 2),
    ((96, 96, 96), (1, 96, 96, 96), 6),
    ((6, 4), (2, 12), 1),
    ((), (1, 1), 1),
    ((2, 3, 5), (2, 3, 5), 6),
    ((4, 1, 6), (2, 2, 3, 2), 2),
    ((0, 4), (4, 0), 1),
  ],
)
def test_reshape_orders_keep_every_element_in_its_place(output, operand, count):
  graph = _graph(
    _parameter(1, operand), hlo_modules.instruction("reshape", id=2, operands=[1], shape=output)
  )
  rows = _node_rows(graph, 0)
  assert (-1,) * 18 in rows and len(rows) == count + 1
  values = np.arange(np.prod(output, dtype=int))
  for row in rows - {(-1,) * 18}:
    physical = []
    for shape, start in ((output, 0), (operand, 6)):
      minor_to_major = row[start : start + len(shape)]
      assert sorted(minor_to_major) == list(range(len(shape)))
      physical.append(values.reshape(shape).transpose(minor_to_major[::-1]).ravel())
    np.testing.assert_array_equal(*physical)


def test_the_first_configuration_leaves_all_to_the_compiler_and_all_differ():
  graph = hlo.featurize(Path(__file__).parents[1] / "data" / "hlo" / "transformer_train.hlo.pb")
  configs = graph.with_layouts(300, 5).configs
  assert len(configs) == 300 and len(configs.node_group) == len(graph.config_node)
  assert (configs.decode(np.array([0])) == -1).all()
  assert len(np.unique(configs.group_row, axis=0)) == 300
  assert len(np.unique(configs.rows, axis=0)) == len(configs.rows)
  assert not configs.is_labelled
  same, other = (graph.with_layouts(300, seed).configs.group_row for seed in (5, 6))
  np.testing.assert_array_equal(configs.group_row, same)
  assert not np.array_equal(configs.group_row, other)


def test_equal_instructions_decide_together():
  instructions = [_parameter(1, [8, 16]), _parameter(2, [16, 4])]
  instructions += [
    hlo_modules.instruction("dot", id=k, operands=[1, 2], shape=[8, 4]) for k in (3, 4)
  ]
  instructions += [
    _parameter(5, [16, 9]),
    hlo_modules.instruction("dot", id=6, operands=[1, 5], shape=[8, 9]),
  ]
  configs = _graph(*instructions).with_layouts(1000).configs
  assert configs.node_group.tolist() == [0, 0, 1]
  assert len(configs) == 81


@pytest.mark.parametrize(
  "instructions, n, message",
  [
    ([], 5, "configurable"),
    ([hlo_modules.instruction("dot", id=2, operands=[1])], 5, "operands"),
    ([_conv(2, [1, 1], [2, 2], (0, 7), (0, 1), (0, 1))], 5, "dimension numbers"),
    ([hlo_modules.instruction("reshape", id=2, operands=[1], shape=[2])], 0, "at least"),
  ],
)
def test_what_cannot_be_configured_is_refused(instructions, n, message):
  with pytest.raises(ValueError, match=message):
    _graph(_parameter(1, [2]), *instructions).with_layouts(n)


@pytest.mark.parametrize("options, n", [((2, 3), 10), ((2, 3), 4), ((50,) * 4, 200)])
def test_choices_are_distinct_in_range_and_sorted_with_the_first_option(options, n):
  choices = distinct_choices(options, n, seed=3)
  assert len(choices) == min(n, np.prod(options))
  assert (choices >= 0).all() and (choices < options).all()
  assert not choices[0].any()
  assert [tuple(choice) for choice in choices] == sorted({tuple(choice) for choice in choices})


@recorded.needs_hlo
def test_every_layout_that_was_measured_is_among_the_choices():
  graph = hlo.read_tuning(recorded.HLO / "module_tuning_data_layout.pb").graphs[0]
  measured = graph.configs.decode(np.arange(len(graph.configs))).astype(int)
  for node in range(0, len(graph.config_node), 5):
    single = dataclasses.replace(graph, config_node=graph.config_node[node : node + 1])
    assert {tuple(row) for row in measured[:, node]} <= _node_rows(single, 0)
