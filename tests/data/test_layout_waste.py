import dataclasses

import numpy as np
import table_cases

from tpugraphs_jax.data import layout_waste


def slow_padding(size, tile):
  if size < 1:
    return 0.0
  padded = size
  while padded % tile:
    padded += 1
  return np.log(padded / size)


def test_padding_rounds_up_to_whole_tiles():
  sizes = np.array([0, 1, 7, 8, 9, 127, 128, 129, 1000])
  for tile in (8, 128):
    np.testing.assert_allclose(
        layout_waste.padding(sizes, tile), [slow_padding(int(s), tile) for s in sizes], rtol=1e-6)


def test_node_padding_has_every_dimension_in_both_places():
  graph = table_cases.program(0)
  dims = graph.node_feat[:, 21:27]
  expected = [[slow_padding(int(d), tile) for tile in (128, 8) for d in row] for row in dims]
  np.testing.assert_allclose(layout_waste.node_padding(graph.node_feat), expected, rtol=1e-5)


def test_choices_are_told_the_padding_of_output_input_and_kernel():
  graph = table_cases.program(3, config_nodes=[5, 9, 20])
  layout = graph.configs
  rows = np.full((2, 18), -1, np.int8)
  rows[0, :2], rows[0, 6:8], rows[0, 12] = (1, 0), (0, 2), 2
  graph = dataclasses.replace(graph, configs=dataclasses.replace(layout, rows=rows))
  dims = graph.node_feat[:, 21:27].astype(int)
  found = layout_waste.choice_features(graph, np.array([0, 1, 2, 2]), np.array([0, 0, 0, 1]))
  assert found.dtype == np.float32 and found.shape == (4, layout_waste.FEATURES)
  for feat, node, row in zip(found, (5, 9, 20, 20), (0, 0, 0, 1)):
    operands = [v for u, v in graph.edge_index.tolist() if u == node][:2]
    tensors = [node, *operands, *[None] * (2 - len(operands))]
    for role, tensor in enumerate(tensors):
      minor, second = rows[row, 6 * role : 6 * role + 2]
      size = lambda axis: dims[tensor, axis] if tensor is not None and axis >= 0 else 0
      np.testing.assert_allclose(
          feat[[role, 3 + role, 6 + role]],
          [slow_padding(size(minor), 128), slow_padding(size(second), 8), minor < 0], rtol=1e-5)


def test_without_edges_and_without_nodes_there_is_nothing_to_round():
  graph = dataclasses.replace(table_cases.program(0), edge_index=np.zeros((0, 2), np.int32))
  none = np.zeros(0, np.int64)
  assert layout_waste.choice_features(graph, none, none).shape == (0, 9)
  assert (layout_waste.operand_table(graph) == -1).all()
