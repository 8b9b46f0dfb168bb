"""Every sample protobuf gives exactly the arrays of the dataset's extractor.

A sample is a `NAME.pb` (or `NAME.hlo.pb`) with `NAME.expected.npz`, or with a
folder `NAME.expected` of one file per kernel. `TPUGRAPHS_HLO_DIR` names another
folder of samples.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support import recorded
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import proto, sources, tuning_data

_HERE = Path(__file__).parents[1]
_FOLDER = Path(os.environ.get("TPUGRAPHS_HLO_DIR", _HERE / "data" / "hlo"))
# Protobufs of the dataset are no part of this repository; they are tested where they lie.
_SHARED_SAMPLES = ("module_tuning_data_layout.pb", "op_tuning_data.pb")


def _expected_path(path):
  for suffix in (".expected.npz", ".expected"):
    expected = path.with_name(sources.stem(path) + suffix)
    if expected.exists():
      return expected
  return None


def _samples():
  paths = [*_FOLDER.glob("*.pb"), *(recorded.HLO / name for name in _SHARED_SAMPLES)]
  found = {path.resolve(): path for path in paths if path.is_file() and _expected_path(path)}
  return sorted(found.values())


def test_the_folder_has_samples():
  recorded_here = [path for path in _samples() if path.parent == _FOLDER]
  assert recorded_here, f"no .pb with an expected file in {_FOLDER}"


@pytest.mark.parametrize("path", _samples(), ids=lambda path: sources.stem(path))
def test_arrays_equal_those_of_the_extractor_bit_for_bit(path):
  expected = _expected_path(path)
  if expected.is_dir():
    graphs = _tile_graphs(path)
    files = sorted(expected.glob("*.npz"))
    assert len(files) == len(graphs) > 0
    for file, graph in zip(files, graphs):
      _compare(_read(file), _tile_arrays(graph))
  else:
    arrays = _read(expected)
    _compare(arrays, _produce(path, set(arrays)))


def _produce(path, keys):
  """By name, a function for every array that an expected file with these keys may have."""
  if "opcodes_values" in keys:
    return _tile_batch_arrays(_tile_graphs(path))
  if "config_feat" in keys:
    return _tile_arrays(_tile_graphs(path)[0])
  if keys & {"node_config_ids", "node_config_feat", "config_features"}:
    return _layout_arrays(path)
  return _module_arrays(path)


def _module_arrays(source):
  graph = hlo.featurize(source, edge_order="insertion")
  return {
    "node_feat": lambda: graph.node_feat,
    "node_opcode": lambda: graph.node_opcode,
    "node_splits": lambda: graph.node_splits[None],
    "edge_index_insertion": lambda: graph.edge_index.astype(np.int64),
    # Refused where an edge repeats; no expected file has it then.
    "edge_index": lambda: hlo.featurize(source).edge_index.astype(np.int64),
  }


def _layout_arrays(path):
  data = path.read_bytes()
  message = proto.ModuleTuningData.FromString(data)
  graph = tuning_data.layout_graph(message, where=str(path), name="sample")
  configs = graph.configs

  def decoded():
    return configs.decode(np.arange(len(configs)))

  return _module_arrays(message.module.SerializeToString()) | {
    "node_config_ids": lambda: graph.config_node.astype(np.int64),
    "node_config_feat": decoded,
    "config_features": decoded,
    "config_runtime": lambda: configs.labels,
    "compute_times_ns": lambda: configs.labels,
    "module_config_counts": lambda: np.full(len(configs), len(configs), np.int64),
    "normalization_values": lambda: np.full(len(configs), _default_ns(message), np.int64),
    # A hash of the extractor's path to the file, which is not compared.
    "module_ids": None,
  }


def _default_ns(message):
  for run in message.runs:
    is_whole = run.HasField("module_config") and run.HasField("profile")
    if run.is_default and not run.error and is_whole:
      return run.profile.compute_time_ns
  return 0


def _tile_graphs(path):
  message = proto.TuningData.FromString(path.read_bytes())
  return tuning_data.tile_graphs(message, where=str(path), name="sample").graphs


def _tile_arrays(graph):
  return {
    "node_feat": lambda: graph.node_feat,
    "node_opcode": lambda: graph.node_opcode,
    "edge_index": lambda: graph.edge_index.astype(np.int64),
    "node_splits": lambda: graph.node_splits[None],
    "config_feat": lambda: graph.configs.config_feat,
    "config_runtime": lambda: graph.configs.runtime_ns,
    "config_runtime_normalizers": lambda: graph.configs.normalizer_ns,
  }


def _tile_batch_arrays(graphs):
  """One graph per run, all in one batch, as a TensorFlow op of the extractor returns them."""
  samples = [graph for graph in graphs for _ in range(len(graph.configs))]
  splits = np.cumsum([0, *(graph.num_nodes for graph in samples)])
  edges = np.concatenate(
    [
      np.zeros((0, 3), np.int64),
      *(
        np.column_stack([np.full(graph.num_edges, number), graph.edge_index])
        for number, graph in enumerate(samples)
      ),
    ]
  )
  users = edges[:, [0, 2, 1]]
  users = users[np.lexsort(users.T[::-1])]
  nodes = edges[:, 1:].max(initial=0) + 1

  def joined(field):
    return np.concatenate([field(graph) for graph in graphs])

  batch = {
    "opcodes_values": np.concatenate([graph.node_opcode for graph in samples]),
    "opcodes_splits": splits,
    "node_features_values": np.concatenate([graph.node_feat for graph in samples]),
    "node_features_splits": splits,
    "operand_adj_matrix_indices": edges,
    "consumer_adj_matrix_indices": users,
    "module_config_counts": np.array([len(graph.configs) for graph in samples]),
    "module_ids": np.array([int(graph.name.rpartition("_")[2], 16) for graph in samples], np.int64),
    "compute_times_ns": joined(lambda graph: graph.configs.runtime_ns),
    "normalization_values": joined(lambda graph: graph.configs.normalizer_ns),
    "module_features": joined(lambda graph: graph.configs.config_feat),
  }
  for side in ("operand", "consumer"):
    batch[f"{side}_adj_matrix_values"] = np.ones(len(edges), np.uint8)
    batch[f"{side}_adj_matrix_shape"] = np.array([len(samples), nodes, nodes])
  return {name: lambda array=array: array for name, array in batch.items()}


def _read(path):
  with np.load(path) as archive:
    return {name: archive[name] for name in archive.files}


def _compare(expected, produced):
  assert expected
  unknown = set(expected) - set(produced)
  assert not unknown, f"the expected file has arrays of an unknown kind: {unknown}"
  for name, array in expected.items():
    if produced[name] is None:
      continue
    got = produced[name]()
    assert got.dtype == array.dtype, name
    if array.size or got.size:
      assert got.shape == array.shape, name
    assert got.tobytes() == array.tobytes(), name
