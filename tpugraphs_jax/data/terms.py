"""What configurations choose, as numbers of terms that a score table has a cost for.

A score table prices a program once: a cost for every choice of a group of nodes (a
unary term: group and row) and for every two choices of groups whose layouts meet (a
pair term). Only choices that occur get a term. A configuration is then a few small
integers, a term number within each column:

    columns   the groups, then the pairs of groups
    terms     of a group its rows, of a pair of groups the pairs of their terms
    code      for every column the number of the term within the column

and its score is the sum of the costs of its terms. Nodes of one group choose alike, so
that their costs add up in one column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import hashlib
import os
from pathlib import Path
import zipfile

from absl import logging
import numpy as np

from tpugraphs_jax import atomic
from tpugraphs_jax.data import node_pairs
from tpugraphs_jax.graph import LayoutConfigs, OpGraph

_VERSION = 1
_BLOCK_CONFIGS = 4096  # at a time
_BLOCK_CELLS = 1 << 18  # numbers at a time, so that they stay in a core's cache
_DENSE = 1 << 26  # pairs of choices up to which a table has a place for each
_REDO = "delete it, and it is made again"


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
  """The terms of one graph; P pairs of nodes, Q pairs of groups.

  Groups of one node are columns like all others, and so are pairs of a group with
  itself, whose terms have one choice twice.
  """

  pairs: node_pairs.NodePairs
  pair_column: np.ndarray  # [P] int32 which pair of groups each pair of nodes belongs to
  is_turned: np.ndarray  # [P] bool: the first end is in the second group
  columns: np.ndarray  # [Q, 2] int32 groups, first <= second, ascending
  row: np.ndarray  # [unary terms] int32 dictionary row, group after group, ascending within
  row_start: np.ndarray  # [groups + 1] int64 first unary term of each group
  choices: np.ndarray  # [pair terms, 2] int32 unary terms, column after column
  pair_start: np.ndarray  # [Q + 1] int64 first pair term of each column

  @property
  def sizes(self) -> np.ndarray:
    """Terms of each column, `[groups + Q]` int64."""
    return np.concatenate([np.diff(self.row_start), np.diff(self.pair_start)])

  @property
  def code_dtype(self) -> np.dtype:
    """The smallest type that holds a code, and one number more."""
    return np.min_scalar_type(int(self.sizes.max(initial=1)))

  def encode(self, group_row: np.ndarray) -> np.ndarray:
    """Codes `[groups + Q, C]`, in `code_dtype`, of rows chosen `[C, groups]`.

    Raises:
      ValueError: a choice has no term.
    """
    groups = len(self.row_start) - 1
    codes = np.empty((groups + len(self.columns), len(group_row)), self.code_dtype)
    space = _PairSpace(self)
    local = np.arange(len(self.choices)) - np.repeat(self.pair_start[:-1], np.diff(self.pair_start))
    code_at = space.table(local, self.code_dtype, missing=np.iinfo(self.code_dtype).max)
    for block, choice in _blocks(group_row, self._choice_of_row()):
      codes[:groups, block] = choice
      for part, key in space.keys(choice):
        codes[groups:][part, block] = found = code_at(key)
        if found.max(initial=0) == np.iinfo(self.code_dtype).max:
          raise ValueError("a configuration has a pair of choices without a term; find the terms "
                           "of all configurations that are to be encoded")
    return codes

  def total(
      self, group_row: np.ndarray, unary_cost: np.ndarray, pair_cost: np.ndarray
  ) -> np.ndarray:
    """The sum of the costs of each configuration's terms, `[C]` float64.

    Args:
      group_row: `[C, groups]` rows chosen.
      unary_cost: `[unary terms]`.
      pair_cost: `[pair terms]`.

    Raises:
      ValueError: a choice has no term.
    """
    total, space = np.zeros(len(group_row)), _PairSpace(self)
    cost_at = space.table(pair_cost, np.float32, missing=np.nan)
    for block, choice in _blocks(group_row, self._choice_of_row()):
      costs = np.asarray(unary_cost, np.float32)[choice + self.row_start[:-1, None]]
      total[block] = costs.sum(axis=0, dtype=np.float64)
      for _, key in space.keys(choice):
        total[block] += cost_at(key).sum(axis=0, dtype=np.float64)
    if np.isnan(total).any():
      raise ValueError("a cost is NaN, or a configuration has a pair of choices without a term; "
                       "find the terms of all configurations that are to be scored")
    return total

  def _choice_of_row(self) -> np.ndarray:
    """`[groups, rows]` int32 code of each row in each group, -1 if it has none."""
    groups = len(self.row_start) - 1
    group = np.repeat(np.arange(groups), np.diff(self.row_start))
    table = np.full((groups, int(self.row.max(initial=-1)) + 1), -1, np.int32)
    table[group, self.row] = np.arange(len(self.row)) - self.row_start[group]
    return table


class _PairSpace:
  """All pairs of choices of all columns, one after the other, most of which may not occur."""

  def __init__(self, terms: Terms):
    counts = np.diff(terms.row_start)
    self._columns, self._width = terms.columns, counts[terms.columns[:, 1]]
    size = counts[terms.columns[:, 0]] * self._width
    self.start = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    self._dtype = np.int32 if self.start[-1] < 1 << 31 else np.int64
    column = np.repeat(np.arange(len(size)), np.diff(terms.pair_start))
    local = terms.choices - terms.row_start[terms.columns[column]]
    self._known = self.start[column] + local[:, 0] * self._width[column] + local[:, 1]

  def keys(self, choice: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some columns at a time: which, and the places `[columns, c]` of their choices.

    Args:
      choice: `[groups, c]` unary codes.
    """
    step = max(1, _BLOCK_CELLS // max(1, choice.shape[1]))
    for begin in range(0, len(self._columns), step):
      part = slice(begin, min(begin + step, len(self._columns)))
      first, second = self._columns[part].T
      key = choice[first].astype(self._dtype)
      key *= self._width[part, None].astype(self._dtype)
      key += choice[second]
      key += self.start[:-1][part, None].astype(self._dtype)
      yield part, key

  def table(self, values: np.ndarray, dtype: np.dtype, *, missing) -> Callable:
    """A function from places to values `[pair terms]`, or to `missing` where there is no term."""
    if self.start[-1] <= _DENSE:
      dense = np.full(int(self.start[-1]), missing, dtype)
      dense[self._known] = values
      return dense.__getitem__
    # Few of very many pairs of choices occur: look them up among those.
    known, padded = np.append(self._known, -1), np.append(values, 0).astype(dtype)

    def look_up(key: np.ndarray) -> np.ndarray:
      at = np.searchsorted(self._known, key)
      return np.where(known[at] == key, padded[at], np.asarray(missing, dtype))
    return look_up

  def occurring(self, choices: Iterable[np.ndarray]) -> np.ndarray:
    """The places of all choices `[groups, c]`, ascending, each once."""
    occurs = np.zeros(int(self.start[-1]) if self.start[-1] <= _DENSE else 0, bool)
    found = [np.zeros(0, np.int64)]
    for choice in choices:
      for _, key in self.keys(choice):
        if len(occurs):
          occurs[key] = True
        else:
          found = [np.union1d(found[0], key)]
    return np.flatnonzero(occurs) if len(occurs) else found[0]

  def choices(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Column `[n]` and codes of both choices `[n, 2]` of places."""
    column = np.searchsorted(self.start, place, side="right") - 1
    within = place - self.start[column]
    return column, np.stack(np.divmod(within, self._width[column]), axis=1)


def _blocks(
    group_row: np.ndarray, choice_of_row: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
  """Configurations some at a time: which, and their unary codes `[groups, c]` int32."""
  groups, rows = choice_of_row.shape
  for start in range(0, len(group_row), _BLOCK_CONFIGS):
    block = slice(start, start + _BLOCK_CONFIGS)
    row = np.ascontiguousarray(group_row[block].T).astype(np.intp)
    choice = choice_of_row[np.arange(groups)[:, None], np.minimum(row, rows - 1)]
    unknown = (choice < 0) | (row >= rows)
    if unknown.any():
      group, config = np.argwhere(unknown)[0]
      raise ValueError(f"configuration {start + config} chooses row {row[group, config]} for group "
                       f"{group}, which has no term; find the terms of all configurations that "
                       "are to be encoded")
    yield block, choice


def find_terms(
    configs: LayoutConfigs, pairs: node_pairs.NodePairs, *, config_ids: np.ndarray | None = None
) -> Terms:
  """The terms that occur in the given configurations.

  Args:
    configs: of one graph.
    pairs: of the same graph.
    config_ids: which configurations; all of them unless given.
  """
  group_row = configs.group_row if config_ids is None else configs.group_row[config_ids]
  groups = group_row.shape[1]
  occurs = np.zeros((groups, len(configs.rows)), bool)
  for start in range(0, len(group_row), _BLOCK_CONFIGS):
    occurs[np.arange(groups), group_row[start : start + _BLOCK_CONFIGS]] = True
  _, row = np.nonzero(occurs)
  row_start = np.concatenate([[0], np.cumsum(occurs.sum(axis=1))])
  ends = configs.node_group[pairs.ends].reshape(-1, 2)
  columns, pair_column = np.unique(np.sort(ends, axis=1), axis=0, return_inverse=True)
  terms = Terms(
      pairs, pair_column.ravel().astype(np.int32), ends[:, 0] > ends[:, 1],
      columns.astype(np.int32), row.astype(np.int32), row_start,
      np.zeros((0, 2), np.int32), np.zeros(len(columns) + 1, np.int64))
  space = _PairSpace(terms)
  column, local = space.choices(space.occurring(
      choice for _, choice in _blocks(group_row, terms._choice_of_row())))
  choices = local + row_start[columns[column]].reshape(-1, 2)
  pair_start = np.searchsorted(column, np.arange(len(columns) + 1))
  return dataclasses.replace(terms, choices=choices.astype(np.int32), pair_start=pair_start)


def identity(graph: OpGraph, **options: int | bool) -> str:
  """A name for what `find_terms` finds in all configurations of a graph with these options.

  It changes with anything that the terms depend on: edges, configurable nodes, sizes of
  tensors, groups, rows chosen and the options of `node_pairs.find_pairs`.
  """
  digest = hashlib.sha256(repr((_VERSION, sorted(options.items()))).encode())
  configs = graph.configs
  for array in (graph.edge_index, graph.config_node, node_pairs.tensor_bytes(graph.node_feat),
                configs.node_group, configs.rows):
    digest.update(repr((array.shape, array.dtype.str)).encode())
    digest.update(np.ascontiguousarray(array))
  digest.update(repr((configs.group_row.shape, configs.group_row.dtype.str)).encode())
  for start in range(0, len(configs), _BLOCK_CONFIGS):
    digest.update(np.ascontiguousarray(configs.group_row[start : start + _BLOCK_CONFIGS]))
  return digest.hexdigest()


def save(path: str | os.PathLike[str], terms: Terms, name: str) -> None:
  """Writes terms, under the name that `identity` gave, as one `.npz` file.

  Raises:
    OSError: it cannot be written; what was there before is untouched.
  """
  arrays = {f.name: getattr(terms, f.name) for f in dataclasses.fields(Terms)[1:]}
  arrays |= {f"pairs_{f.name}": np.asarray(getattr(terms.pairs, f.name))
             for f in dataclasses.fields(node_pairs.NodePairs)}
  with atomic.replacing(path, "wb") as file:
    np.savez(file, identity=np.array(name), **arrays)


def load(path: str | os.PathLike[str], name: str) -> Terms | None:
  """Reads what `save` wrote; None if there is no file, or it holds terms of another name.

  Raises:
    ValueError: the file is damaged.
  """
  path = Path(path)
  if not path.exists():
    return None
  try:
    with open(path, "rb") as file, np.load(file) as members:
      if members["identity"].item() != name:
        return None
      pairs = {f.name: members[f"pairs_{f.name}"] for f in dataclasses.fields(node_pairs.NodePairs)}
      pairs["hop_limit"] = pairs["hop_limit"].item()
      return Terms(node_pairs.NodePairs(**pairs), **{
          f.name: members[f.name] for f in dataclasses.fields(Terms)[1:]})
  except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path} is damaged ({error}); {_REDO}") from error


def terms_of(graph: OpGraph, *, folder: str | os.PathLike[str] | None = None, **options) -> Terms:
  """The terms of all configurations of a graph, kept in a folder of a store if one is given.

  Args:
    graph: with `LayoutConfigs`.
    folder: the graph's folder in the store.
    **options: of `node_pairs.find_pairs`.

  Raises:
    ValueError: what is kept there is damaged.
  """
  if folder is None:
    return find_terms(graph.configs, node_pairs.find_pairs(graph, **options))
  path, name = Path(folder) / "terms.npz", identity(graph, **options)
  kept = load(path, name)
  if kept is None:
    kept = find_terms(graph.configs, node_pairs.find_pairs(graph, **options))
    try:
      save(path, kept, name)
    except OSError as error:
      logging.warning("terms of %s are not kept: %s", graph.name, error)
  return kept
