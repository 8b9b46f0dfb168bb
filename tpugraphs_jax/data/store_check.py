"""Refuses a graph of the store whose arrays cannot belong together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tpugraphs_jax import graph


def check(
    arrays: Mapping[str, np.ndarray], meta: Mapping[str, int], *, with_mapped: bool
) -> None:
  """Compares sizes and ranges.

  Args:
    arrays: of a graph of the store, by name: `rows [R, 18]`, `node_group [K]`, ...
    meta: its `nodes`, `config_nodes`, `configs`, `groups` and `rows`.
    with_mapped: whether to read all of `group_row [C, groups]` for its range.

  Raises:
    ValueError: the name of the array and what is wrong with it.
  """
  for name, shape in _shapes(meta).items():
    found = arrays[name].shape
    if len(found) != len(shape) or any(n not in (None, f) for n, f in zip(shape, found)):
      expected = ", ".join("any" if size is None else str(size) for size in shape)
      raise ValueError(f"{name} of shape {list(found)}, expected [{expected}]")
    if arrays[name].dtype.kind not in ("f" if name == "node_feat" else "iu"):
      raise ValueError(f"{name} of dtype {arrays[name].dtype}")
  for name, (low, high) in _ranges(meta).items():
    array = arrays[name]
    if (with_mapped or name != "group_row") and array.size:
      if array.min() < low or array.max() > high:
        raise ValueError(f"{name} with values {array.min()} to {array.max()}, expected {low} to "
                         f"{high}")
  if (np.diff(arrays["node_splits"]) < 0).any():
    raise ValueError("node_splits that do not rise")


def _shapes(meta: Mapping[str, int]) -> dict[str, tuple[int | None, ...]]:
  nodes, config_nodes, configs = meta["nodes"], meta["config_nodes"], meta["configs"]
  return {
      "node_feat": (nodes, None), "node_opcode": (nodes,), "edge_index": (None, 2),
      "node_splits": (None,), "config_node": (config_nodes,), "node_group": (config_nodes,),
      "rows": (meta["rows"], graph.LAYOUT_CONFIG_FEATURES), "group_row": (configs, meta["groups"]),
      "runtime_ns": (configs,),
  }


def _ranges(meta: Mapping[str, int]) -> dict[str, tuple[int, int]]:
  return {
      "node_opcode": (0, graph.OPCODES - 1), "edge_index": (0, meta["nodes"] - 1),
      "node_splits": (0, meta["nodes"]), "config_node": (0, meta["nodes"] - 1),
      "node_group": (0, meta["groups"] - 1), "rows": graph.LAYOUT_VALUE_RANGE,
      "group_row": (0, meta["rows"] - 1), "runtime_ns": (0, np.iinfo(np.int64).max),
  }
