"""The published configuration indices that validation graphs are judged on."""

from __future__ import annotations

import json

import numpy as np

from tpugraphs_jax import remote


def load(indices_dir: str, source: str, search: str) -> dict[str, np.ndarray]:
  """Configuration numbers by graph name.

  Args:
    indices_dir: folder with `<source>_<search>.json`, as published with the data.
    source: `xla` or `nlp`.
    search: `random` or `default`.

  Returns:
    `[n]` int64 for each graph, as published: a number may occur twice.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not a table of index lists.
  """
  path = remote.fetch(indices_dir) / f"{source}_{search}.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: eval.indices_dir must name the folder "
                            "with the published index files")
  try:
    table = json.loads(path.read_text())
    return {name: _as_ids(ids) for name, ids in table.items()}
  except (ValueError, TypeError, AttributeError, OverflowError) as error:
    raise ValueError(f"{path} is not a table of configuration numbers: {error}") from None


def _as_ids(values: list[int]) -> np.ndarray:
  ids = np.array(values)
  if ids.ndim != 1 or ids.dtype != np.int64:
    raise ValueError(f"expected integers, found {str(values)[:40]}")
  return ids


def select(indices: dict[str, np.ndarray], name: str, configs: int) -> np.ndarray:
  """The configuration numbers of one graph, `[n]` int64.

  Raises:
    ValueError: the graph is not in the table, or has fewer configurations.
  """
  if name not in indices:
    raise ValueError(f"the published validation indices do not name graph {name}; leave "
                     "eval.indices_dir empty for other data")
  ids = indices[name]
  wrong = ids[(ids < 0) | (ids >= configs)]
  if len(wrong):
    raise ValueError(f"validation index {wrong[0]} of {name}, which has {configs} configurations")
  return ids
