"""The graph types: `OpGraph` on the host, its configurations, and axis names.

Shape letters, unless a docstring defines its own: N nodes, E edges, G graphs,
C configurations, K configurable nodes, F features, R distinct configuration
rows, S - 1 stretches of HLO computations.

Direction of edges. A row `[u, v]` of `edge_index` says that instruction u
consumes the output of instruction v. On the device (`jraph.GraphsTuple`)
`senders = v` (producer) and `receivers = u` (consumer).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Generic, Self, TypeVar

import numpy as np

from tpugraphs_jax.columns import opcode_names
from tpugraphs_jax.infra.console import Table

DEFAULT_DATA_ROOT = "~/data/tpugraphs/npz"  # default of --data_root
SPLITS = ("train", "valid", "test")
# Stages of compilation at which a program becomes a graph.
LOWERED = "as jax lowers it"
BEFORE_LAYOUTS = "before layout assignment"  # as the released layout graphs
OPTIMIZED = "after all optimisations"


class _Configs:
  """Common to tile and layout configurations."""

  def __len__(self) -> int:
    return len(self.choices)

  def __repr__(self) -> str:
    labels = "not labelled"
    if self.is_labelled:  # the numbers of a file can be estimates: they have no unit here
      least, most = np.round([self.labels.min(), self.labels.max()], 3)
      labels = f"labels {least:,} to {most:,}"
    return f"<{type(self).__name__}: {len(self):,} {self._about()}, {labels}>"

  def _about(self) -> str:
    """The name of the configurations in `repr`, such as `tiles`."""
    raise NotImplementedError

  labels: np.ndarray  # [C] the numbers by which a ranking is judged; all zero = not labelled

  @property
  def choices(self) -> np.ndarray:
    """A row per configuration, `[C, ...]`; equal configurations have equal rows."""
    raise NotImplementedError

  def subset(self, config_ids: np.ndarray) -> Self:
    """The configurations `config_ids [n]` only, in that order."""
    raise NotImplementedError

  @property
  def differ(self) -> bool:
    """Whether any configuration differs from the first; reads rows until one differs."""
    return any((row != self.choices[0]).any() for row in self.choices)

  @property
  def has_order(self) -> bool:
    """Whether a ranker can be right: labels and choices of configurations differ."""
    return bool(np.ptp(self.labels)) and self.differ

  @property
  def is_labelled(self) -> bool:
    return bool(self.labels.any())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TileConfigs(_Configs):
  """Tile-size choices of one kernel and their measured runtimes."""

  config_feat: np.ndarray  # [C, 24 or more] float32: kernel, output, input bounds, added blocks
  runtime_ns: np.ndarray  # [C] int64 nanoseconds; all zero = not labelled
  normalizer_ns: np.ndarray  # [C] int64 nanoseconds of the default tile

  def _about(self) -> str:
    return "tiles"

  @property
  def labels(self) -> np.ndarray:  # type: ignore[override]
    """Runtime / normalizer, `[C]` float64: the numbers by which a ranking is judged.

    The normalizer can differ between configurations of one kernel. The README of the data set
    therefore defines the task by the quotient.
    """
    return self.runtime_ns / self.normalizer_ns

  def unit_ns(self, target: str) -> np.ndarray:
    """Nanoseconds `[C]` of one unit of a target.

    The unit of `official` is the runtime of the default tile. The unit of `absolute` is a
    millisecond times the normalizer over the mean normalizer of the kernel (5th place of the
    competition).
    """
    if target == "absolute":
      return 1e6 * self.normalizer_ns / self.normalizer_ns.mean()
    return self.normalizer_ns

  def subset(self, config_ids: np.ndarray) -> TileConfigs:
    return TileConfigs(
      self.config_feat[config_ids], self.runtime_ns[config_ids], self.normalizer_ns[config_ids]
    )

  @property
  def choices(self) -> np.ndarray:
    return self.config_feat


@dataclasses.dataclass(frozen=True, eq=False)
class KernelTimes:
  """The times of a program's kernels in each configuration; D kernels, M pairs.

  A kernel is a set of nodes of the program: those whose operations the compiler put into it.
  Kernels of equal nodes are one, and add up. A node can be in several kernels.
  """

  runtime: np.ndarray  # [C, D] int64, in the unit of the labels; 0 without such a kernel
  node: np.ndarray  # [M, 2] int32 rows (kernel, node), ascending; kernels of no node have none

  def subset(self, config_ids: np.ndarray) -> KernelTimes:
    """The kernels in the configurations `config_ids [n]` only, in that order."""
    return KernelTimes(self.runtime[config_ids], self.node)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayoutConfigs(_Configs):
  """Layout choices of one graph, factored so that a configuration is a few bytes.

  The 18 integers of configurable node k in configuration c are
  `rows[group_row[c, node_group[k]]]`: nodes whose choices agree in every
  configuration form a group, and each group stores the number of a row of the
  graph's dictionary. `group_row` may be a memory map.
  """

  rows: np.ndarray  # [R, 18] int8, distinct, values -1..5
  node_group: np.ndarray  # [K] int32, the group of each configurable node
  group_row: np.ndarray  # [C, groups] uint8 or uint16, index into rows
  # [C] int64 nanoseconds, or estimates in another unit; all zero = not labelled
  labels: np.ndarray
  kernels: KernelTimes | None = None  # where the labels came with the times of kernels

  def _about(self) -> str:
    return f"layouts of {len(self.node_group):,} nodes in {self.group_row.shape[1]:,} groups"

  @property
  def choices(self) -> np.ndarray:
    return self.group_row

  def subset(self, config_ids: np.ndarray) -> LayoutConfigs:
    group_row = np.asarray(self.group_row[config_ids])
    kernels = self.kernels and self.kernels.subset(config_ids)
    return dataclasses.replace(
      self, group_row=group_row, labels=self.labels[config_ids], kernels=kernels
    )

  def row_id(self, config_ids: np.ndarray) -> np.ndarray:
    """Row numbers `[len(config_ids), K]` of the given configurations."""
    return np.asarray(self.group_row[config_ids])[:, self.node_group]

  def decode(self, config_ids: np.ndarray) -> np.ndarray:
    """The released form `[len(config_ids), K, 18]` float32."""
    return self.rows[self.row_id(config_ids)].astype(np.float32)


Configs = TypeVar("Configs", bound=_Configs)  # `TileConfigs` or `LayoutConfigs`
AnyConfigs = TypeVar("AnyConfigs", bound=_Configs | None, covariant=True)  # None: a program alone


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph(Generic[AnyConfigs]):
  """One XLA program (or fused kernel) as a graph of HLO instructions."""

  name: str
  node_feat: np.ndarray  # [N, 140 or more] float32
  node_opcode: np.ndarray  # [N] uint8
  edge_index: np.ndarray  # [E, 2] int32 rows (consumer, producer)
  node_splits: np.ndarray  # [S] int64 cuts between stretches of HLO computations, from 0 to N
  config_node: np.ndarray  # [K] int32 configurable nodes; empty for tiles
  configs: AnyConfigs
  stage: str = ""  # such as `before layout assignment for tpu:v3`; empty where not known

  def __repr__(self) -> str:
    configs = "no" if self.configs is None else f"{len(self.configs):,}"
    return (
      f"<{type(self).__name__} {self.name}: {self.num_nodes:,} nodes, {self.num_edges:,} "
      f"edges, {len(self.config_node):,} configurable, {configs} configurations>"
    )

  def __str__(self) -> str:
    return str(self.table())

  def _repr_html_(self) -> str:
    return self.table()._repr_html_()

  def table(self) -> Table:
    """The opcodes of the nodes, the most frequent ones first."""
    counts = collections.Counter(self.node_opcode.tolist())
    configurable = collections.Counter(self.node_opcode[self.config_node].tolist())
    rows = []
    for opcode, count in counts.most_common():
      name = opcode_names().get(opcode, str(opcode))
      rows.append([name, f"{count:,}", f"{configurable[opcode] or ''}"])
    return Table(["opcode", "nodes", "configurable"], rows, repr(self)[1:-1])

  def for_rankers(self) -> OpGraph:
    """The graph with bytes for all element types, where an HLO module tells them."""
    return self

  def node_name(self, node: int) -> str:
    """The opcode and number of a node; graphs of HLO modules have the instruction's name here."""
    return f"{opcode_names().get(int(self.node_opcode[node]), 'unknown')} {node}"

  def node_place(self, node: int) -> tuple[str, str, str]:
    """Shape of the result, modules around the node and source line; texts of HLO modules."""
    return "", "", ""

  @property
  def num_nodes(self) -> int:
    return len(self.node_opcode)

  @property
  def num_edges(self) -> int:
    return len(self.edge_index)


def distinct_rows(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The first of every set of equal rows, and the set of each row.

  Args:
    array: `[n, ...]`; rows with equal bytes are equal.

  Returns:
    `[sets]` int64 ascending row numbers, and `[n]` int64 with
    `array == array[first][which]`.
  """
  row = np.dtype((np.void, array.dtype.itemsize * math.prod(array.shape[1:])))
  keys = np.ascontiguousarray(array).reshape(-1).view(row)
  _, first, which = np.unique(keys, return_index=True, return_inverse=True)
  order = np.argsort(first)
  place = np.empty(len(order), np.int64)
  place[order] = np.arange(len(order))
  return first[order], place[which]
