"""The rooflines and the programs of `benchmarks/own_times.py`; rooflines against plain Python."""

import math

import numpy as np

from benchmarks import own_times
from tests.rankers.tables import test_times
from tests.support import commands
from tpugraphs_jax.columns import NODE, opcode_names
from tpugraphs_jax.rankers.tables import times

RATE, PEAK = 2e9, 3e12
FREE = ("parameter", "constant", "tuple", "get-tuple-element")


def array_bytes(graph, config):
  """Bytes of the float32 outputs of nodes; orders are from minor to major."""
  orders = [(2, 1, 0)] * graph.num_nodes
  for node, row in zip(graph.config_node, graph.configs.decode([config])[0]):
    if row[0] >= 0:
      orders[node] = row[:3].astype(int)
  dims = graph.node_feat[:, NODE["shape"]][:, :3].astype(int).tolist()
  return [
    4 * math.ceil(size[a] / 128) * 128 * math.ceil(size[b] / 8) * 8 * size[c]
    for size, (a, b, c) in zip(dims, orders)
  ]


def roofline(graph, config, nodes):
  """Microseconds of nodes as one kernel."""
  edges = {(int(u), int(v)) for u, v in graph.edge_index}
  read = {v for u, v in edges if u in nodes and v not in nodes}
  written = {v for u, v in edges if v in nodes and u not in nodes}
  written |= {v for v in nodes if all(v != producer for _, producer in edges)}
  nbytes = array_bytes(graph, config)
  operations = sum(math.expm1(times.work(graph)[node, 2]) for node in nodes)
  return 1e6 * max(sum(nbytes[node] for node in read | written) / RATE, operations / PEAK)


def test_a_roofline_is_the_larger_of_bytes_and_operations_of_each_kernel():
  graph = test_times.program(0)
  programs, kernels = own_times.roofline(graph, RATE, PEAK)
  assert kernels.shape == graph.configs.kernels.runtime.shape
  timed = [v for v in range(graph.num_nodes) if opcode_names()[graph.node_opcode[v]] not in FREE]
  for config in range(len(graph.configs)):
    expected = sum(roofline(graph, config, {node}) for node in timed)
    np.testing.assert_allclose(programs[config], expected, rtol=1e-4)
    for d in range(kernels.shape[1]):
      nodes = {int(node) for kernel, node in graph.configs.kernels.node if kernel == d}
      expected = roofline(graph, config, nodes) if nodes else 0
      np.testing.assert_allclose(kernels[config, d], expected, rtol=1e-4)
  assert np.ptp(programs) > 0


def test_errors_are_medians_over_configurations_then_programs_and_kernels():
  graph = test_times.program(1, nodes=12, edges=8, config_nodes=[1, 2], configs=3)
  runtime, label = graph.configs.kernels.runtime, graph.configs.labels
  factor = np.array([0.5, 1.1, 4.0])  # errors .5, .1 and 3
  found = own_times.errors_of([graph], [factor * label / 1e6], [factor[:, None] * runtime / 1e6])
  assert math.isclose(found["program"], 0.5)
  errors = [
    np.median([abs(factor[c] - 1) for c in range(3) if runtime[c, d]])
    for d in sorted(set(graph.configs.kernels.node[:, 0]))
    if runtime[:, d].any()
  ]
  assert math.isclose(found["kernel"], np.median(errors))


def test_steps_are_judged_apart_from_drawn_programs():
  root = commands.ROOT / "data/own/npz"
  names = {
    split: {graph.name for graph in own_times.graphs(root, "v6e", split)}
    for split in own_times.SPLITS
  }
  assert all(names.values())
  assert not any(name.startswith("generated_") for name in names[own_times.STEPS])
  assert all(name.startswith("generated_") for name in names["valid"] | names["test"])
