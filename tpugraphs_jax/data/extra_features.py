"""A second block of node features beside the released 140 columns."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from tpugraphs_jax.data import npz_archive
from tpugraphs_jax.graph import OpGraph


def append(graph: OpGraph, values: np.ndarray) -> OpGraph:
  """The graph with further columns after its node features.

  Args:
    graph: host graph.
    values: `[N, X]` float32, such as `hlo.extra_features(graph).values`.

  Raises:
    ValueError: not one row per node.
  """
  if values.ndim != 2 or len(values) != graph.num_nodes:
    raise ValueError(f"extra features of {graph.name} are {list(values.shape)}, expected "
                     f"{graph.num_nodes} rows, one per node")
  joined = np.concatenate([graph.node_feat, values.astype(np.float32)], axis=1)
  return dataclasses.replace(graph, node_feat=joined)


def read(graph: OpGraph, folder: str | os.PathLike[str]) -> np.ndarray:
  """The columns `[N, X]` float32 that `hlo convert --extra_out` wrote for a graph.

  Raises:
    FileNotFoundError: the folder has no file of the graph's name.
    ValueError: the file is damaged or belongs to another graph.
  """
  path = Path(folder).expanduser() / f"{graph.name}.npz"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: data.extra_dir must hold the extra features of "
                            "every graph, as hlo convert --extra_out writes them")
  with npz_archive.NpzArchive(path) as archive:
    return append(graph, archive.read("node_extra")).node_feat[:, graph.node_feat.shape[1]:]
