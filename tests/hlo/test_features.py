import hlo_modules
import numpy as np

from tpugraphs_jax import hlo


def _features(*instructions, **fields):
  module = hlo_modules.module(hlo_modules.computation(*instructions))
  for name, value in fields.items():
    setattr(module, name, value)
  return hlo.extra_features(hlo.featurize(module.SerializeToString()))


def _block(features, prefix):
  columns = [k for k, name in enumerate(features.names) if name.startswith(prefix)]
  return features.values[:, columns].tolist()


def _column(features, name):
  return features.values[:, features.names.index(name)]


def test_there_are_30_protobuf_and_16_operand_columns_with_distinct_names():
  features = _features(hlo_modules.instruction())
  assert features.values.shape == (1, 46)
  assert features.values.dtype == np.float32
  assert len(set(features.names)) == 46
  assert sum(name.startswith("operand_") for name in features.names) == 16


def test_dot_dimension_numbers_are_padded_with_minus_one_and_cut_after_three():
  dot = hlo_modules.instruction("dot", id=3)
  numbers = dot.dot_dimension_numbers
  numbers.lhs_contracting_dimensions.extend([2])
  numbers.rhs_contracting_dimensions.extend([1])
  numbers.lhs_batch_dimensions.extend([0, 1, 3, 4])
  features = _features(dot, hlo_modules.instruction(id=4))
  none = [-1, -1, -1]
  assert _block(features, "lhs_contracting") == [[2, -1, -1], none]
  assert _block(features, "rhs_contracting") == [[1, -1, -1], none]
  assert _block(features, "lhs_batch") == [[0, 1, 3], none]
  assert _block(features, "rhs_batch") == [none, none]


def test_gather_dimension_numbers_slice_sizes_and_sorted_indices():
  gather = hlo_modules.instruction("gather", id=3, indices_are_sorted=True)
  gather.gather_slice_sizes.extend([1, 4])
  numbers = gather.gather_dimension_numbers
  numbers.offset_dims.extend([1])
  numbers.start_index_map.extend([0, 2])
  features = _features(gather, hlo_modules.instruction(id=4))
  assert _block(features, "gather_offset")[0] == [1, -1, -1]
  assert _block(features, "gather_collapsed")[0] == [-1, -1, -1]
  assert _block(features, "gather_start")[0] == [0, 2, -1]
  assert _block(features, "gather_slice_size") == [[1, 4, -1, -1, -1], [-1] * 5]
  # Index 0 is a real dimension, so that "no gather" needs a number of its own.
  assert _column(features, "gather_index_vector_dimension").tolist() == [0, -1]
  assert _column(features, "indices_are_sorted").tolist() == [1, 0]


def test_the_roots_of_computations_and_dynamic_modules_are_marked():
  nodes = [hlo_modules.instruction(id=k) for k in range(3)]
  features = _features(*nodes)
  assert _column(features, "is_computation_root").tolist() == [0, 0, 1]
  assert _column(features, "has_dynamic_computation").tolist() == [0, 0, 0]
  features = _features(*nodes, is_dynamic=True)
  assert _column(features, "has_dynamic_computation").tolist() == [1, 1, 1]


def test_operand_shapes_are_in_operand_order_and_only_for_convolution_and_dot():
  features = _features(
      hlo_modules.instruction("parameter", id=1, shape=[2, 3]),
      hlo_modules.instruction("parameter", id=2, shape=[3, 5]),
      hlo_modules.instruction("dot", id=3, operands=[2, 1]),
      hlo_modules.instruction("dot", id=4, operands=[1, 1]),
      hlo_modules.instruction("convolution", id=5, operands=[2]),
      hlo_modules.instruction("add", id=6, operands=[1, 2]))
  first = [2, 3, 0, 0, 0, 0, 5, 6]
  second = [3, 5, 0, 0, 0, 0, 8, 15]
  assert _block(features, "operand_") == [
      [-2] * 16, [-2] * 16, second + first, first + first, second + [-1] * 8, [-2] * 16]
