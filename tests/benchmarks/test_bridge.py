"""The bridge matches nodes with equations and counts combinations of output orders."""

import sys
import types

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import collect
from tpugraphs_jax.graph import factor_layout_configs
from tpugraphs_jax.columns import opcode_ids

sys.path.insert(0, str(commands.ROOT / "benchmarks"))
import bridge  # pylint: disable=wrong-import-position


def _graph(orders):
  """Two dots with outputs [4, 6] and [4, 8], output orders `[C, 2, 2]`."""
  feat = np.zeros((3, 140), np.float32)
  feat[1, 21:23], feat[2, 21:23] = (4, 6), (4, 8)
  rows = np.full((len(orders), 2, 18), -1, np.int8)
  rows[:, :, :2] = orders
  rows[:, :, 6] = np.arange(len(orders))[:, None] % 3  # operands, which do not count
  return types.SimpleNamespace(
      node_feat=feat, node_opcode=np.full(3, opcode_ids()["dot"]),
      config_node=np.array([1, 2]),
      configs=factor_layout_configs(rows, np.arange(1, len(orders) + 1)))


def _choices():
  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 5), (5, 6), (6, 8))]
  return collect.choices(lambda x, v, w: (x @ v) @ w, *shapes)


def test_configurations_of_equal_output_orders_are_one_combination():
  plain, turned = (1, 0), (0, 1)
  graph = _graph([[plain, plain], [turned, plain], [plain, plain], [plain, turned],
                  [plain, plain], [turned, plain]])
  assert bridge.keys(graph) == [("dot", (4, 6)), ("dot", (4, 8))]
  choices = _choices()
  found, which = bridge.combinations(graph, choices)
  assert which.tolist() == [0, 1, 0, 2, 0, 1]
  orders = [[choices.groups[place].options[number][0] for place, number in enumerate(numbers)]
            for numbers in found]
  assert orders == [[plain, plain], [turned, plain], [plain, turned]]


def test_tau_is_of_all_configurations():
  rows = [{"optimal_seconds": seconds, "estimated_cycles": 5, "bytes_accessed": 2 - seconds,
           "cycles": {"rest": [5]}} for seconds in (1., 2.)]
  found = bridge.taus(rows, [np.array([1, 1]), np.array([2, 2, 2])])
  assert found["optimal seconds"] == pytest.approx(1)
  assert found["bytes accessed"] == pytest.approx(-1)
