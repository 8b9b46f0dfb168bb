"""Collectives of a compiled module: their kinds, and which partitions exchange data.

A collective is an instruction of its own or the part of a fusion. The compiler writes the groups of
its partitions as a list, as a slice of an iota, or as axes of a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import math

import numpy as np

from tpugraphs_jax.hlo import proto

KINDS = (
  "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all "
  "reduce-scatter"
).split()
_OWNERS = ("fusion", "async-start")  # instructions of a schedule that have others inside
_WORD = 4  # bytes
_TABLE_WORDS = 4  # of a device in a table of neighbours: ordinal, successor, predecessor, place
_ROUTE_BITS = 14  # of the number of a route, as of the id of a device

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a module.

  Attributes:
    name: of the instruction that exchanges data.
    owner: of the instruction of the schedule: itself, or the fusion that has it.
    kind: one of `KINDS`; `reduce-scatter` of an all-reduce of which a fusion keeps a part.
    groups: partitions that exchange data, by number.
    pairs: source and target of each transfer, of a `collective-permute`.
    instruction: that exchanges data.
  """

  name: str
  owner: str
  kind: str
  groups: Groups
  pairs: tuple[tuple[int, int], ...]
  instruction: proto.HloInstructionProto


def find(module: proto.HloModuleProto, partitions: int) -> dict[str, list[Collective]]:
  """The collectives of a module by their owners."""
  computations = {computation.id: computation for computation in module.computations}
  called: set[int] = set()
  for node in proto.instructions(module):
    if node.opcode in _OWNERS:
      called |= _called(node, computations)
  found: dict[str, list[Collective]] = {}
  for computation in module.computations:
    if computation.id in called:
      continue
    for owner in computation.instructions:
      inside = list(_inside(owner, computations))
      for node in inside:
        kind = _kind(node)
        if kind is None:
          continue
        is_kept = any(other.opcode == "dynamic-slice" for other in inside)
        if kind == "all-reduce" and node is not owner and is_kept:
          kind = "reduce-scatter"
        pairs = tuple((pair.source, pair.target) for pair in node.source_target_pairs)
        groups = () if pairs else groups_of(node, partitions)
        found.setdefault(owner.name, []).append(
          Collective(node.name, owner.name, kind, groups, pairs, node)
        )
  return found


def _called(
  node: proto.HloInstructionProto, computations: dict[int, proto.HloComputationProto]
) -> set[int]:
  """The computations that an instruction fuses or starts, and those that these call."""
  found = {callee for callee in node.called_computation_ids if callee in computations}
  for callee in tuple(found):
    for inner in computations[callee].instructions:
      if inner.opcode in (*_OWNERS, "call"):
        found |= _called(inner, computations)
  return found


def _kind(node: proto.HloInstructionProto) -> str | None:
  kind = node.opcode.removesuffix("-start")
  return kind if kind in KINDS else None


def _inside(
  node: proto.HloInstructionProto, computations: dict[int, proto.HloComputationProto]
) -> Iterator[proto.HloInstructionProto]:
  """An instruction, and those of the computations that it fuses or starts."""
  yield node
  if node.opcode in _OWNERS:
    for callee in _called(node, computations):
      yield from computations[callee].instructions


def groups_of(node: proto.HloInstructionProto, partitions: int) -> Groups:
  """The groups of a collective; one of all partitions where it names none.

  Raises:
    ValueError: a group has partitions that the program does not have.
  """
  groups = _groups(node) or (tuple(range(partitions)),)
  if any(not 0 <= member < partitions for group in groups for member in group):
    raise ValueError(f"the groups of {node.name} have other partitions than 0 to {partitions - 1}")
  return groups


def _groups(node: proto.HloInstructionProto) -> Groups:
  iota = node.iota_collective_device_list
  lists = node.replica_groups or node.collective_device_list.replica_groups
  if lists:
    return tuple(tuple(group.replica_ids) for group in lists)
  if not iota.num_replica_groups:
    iota = node.collective_device_list.iota_replica_group_list
  if iota.num_replica_groups:
    order = np.arange(math.prod(iota.iota_reshape_dims)).reshape(tuple(iota.iota_reshape_dims))
    shape = iota.num_replica_groups, iota.num_devices_per_group
    return _tuples(order.transpose(tuple(iota.iota_transpose_perm)).reshape(shape))
  return _groups_of_axes(node.mesh_axes_replica_group_list)


def _groups_of_axes(axes: proto.MeshAxesReplicaGroupListProto) -> Groups:
  """Groups of partitions that differ along axes of a mesh, or along parts of axes."""
  sizes = [axis.size for axis in axes.mesh.axes]
  if not sizes:
    return ()
  order = np.array(axes.mesh.device_ids or range(math.prod(sizes)))
  within = {reference.mesh_axis_index: reference.sub_axis_info for reference in axes.axes}
  shape: list[int] = []  # of each axis: what is before its part, the part, what is after it
  for number, size in enumerate(sizes):
    part = within.get(number)
    before, own = (part.pre_size, part.size) if part is not None and part.size else (1, size)
    shape += [before, own, size // (before * own)]
  chosen = [3 * reference.mesh_axis_index + 1 for reference in axes.axes]
  rest = [number for number in range(len(shape)) if number not in chosen]
  members = math.prod(shape[number] for number in chosen)
  return _tuples(order.reshape(shape).transpose((*rest, *chosen)).reshape(-1, members))


def _tuples(groups: np.ndarray) -> Groups:
  return tuple(tuple(group) for group in groups.tolist())


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
  """The table of neighbours that the compiler made for the groups of a collective.

  Attributes:
    groups: partitions that exchange data, by number.
    table: `[devices, 4]` int32: ordinal in the group, successor, predecessor, place in the ring.
      Successors are ids of devices, or of a large slice numbers of routes.
    by_device: whether row i is that of the device with id i; else that of partition i.
  """

  groups: Groups
  table: np.ndarray
  by_device: bool

  def row(self, device: int, ids: Sequence[int]) -> list[int]:
    """The row of a device."""
    return self.table[device if self.by_device else ids.index(device)].tolist()

  def successors(self, ids: Sequence[int]) -> dict[int, int]:
    """The device that follows each device in its ring.

    Args:
      ids: of the device of each partition.
    """
    places = self.table[:, 3]
    row = lambda member: ids[member] if self.by_device else member
    result: dict[int, int] = {}
    for group in self.groups:
      order = list(group)
      if len(set(places)) > 1:
        order.sort(key=lambda member: places[row(member)])
      elif self._names_devices(ids):
        result |= {ids[member]: int(self.table[row(member), 1]) for member in group}
        continue
      result |= {ids[a]: ids[b] for a, b in zip(order, order[1:] + order[:1])}
    return result

  def _names_devices(self, ids: Sequence[int]) -> bool:
    return _is_table(self.table, self.groups, ids, self.by_device)


def ring(executable: bytes, groups: Groups, ids: Sequence[int]) -> Ring | None:
  """The table of neighbours that the compiler made for groups; None where it made none.

  The compiler keeps it among the constants of an executable, a row for each device.

  Args:
    executable: as jaxlib serializes it.
    groups: partitions that exchange data.
    ids: of the device of each partition.
  """
  count = len(ids)
  by_partition, by_device = np.zeros(count, np.int32), np.zeros(count, np.int32)
  for group in groups:
    for ordinal, member in enumerate(group):
      by_partition[member] = by_device[ids[member]] = ordinal
  routed = None
  for is_by_device, ordinals in ((False, by_partition), (True, by_device)):
    for table in _tables(executable, ordinals):
      if _is_table(table, groups, ids, is_by_device):
        return Ring(groups, table, is_by_device)
      if routed is None and _has_places(table, groups, ids, is_by_device):
        routed = Ring(groups, table, is_by_device)
  return routed


def _tables(executable: bytes, ordinals: np.ndarray) -> Iterator[np.ndarray]:
  """The words of an executable that have these ordinals where a table has them."""
  count = len(ordinals)
  for offset in range(_WORD):
    words = np.frombuffer(executable, "<i4", offset=offset, count=(len(executable) - offset) // 4)
    places = np.arange(max(0, len(words) - _TABLE_WORDS * count + 1))
    for row in np.argsort(ordinals == 0, kind="stable"):  # zeros are common among the words
      places = places[words[places + _TABLE_WORDS * row] == ordinals[row]]
    for place in places:
      yield words[place : place + _TABLE_WORDS * count].reshape(count, _TABLE_WORDS).copy()


def _is_table(table: np.ndarray, groups: Groups, ids: Sequence[int], by_device: bool) -> bool:
  """Whether the rows of each group are a ring of its devices, forwards and backwards."""
  for group in groups:
    rows = {ids[member]: table[ids[member] if by_device else member] for member in group}
    successors = {device: int(row[1]) for device, row in rows.items()}
    if set(successors.values()) != set(rows):
      return False
    if any(rows[follower][2] != device for device, follower in successors.items()):
      return False
  return True


def _has_places(table: np.ndarray, groups: Groups, ids: Sequence[int], by_device: bool) -> bool:
  """Whether the last column has all places of each group, which has more than two devices."""
  rows = lambda group: [ids[member] if by_device else member for member in group]
  is_route = (table[:, 1:3] >= 0).all() and (table[:, 1:3] < 1 << _ROUTE_BITS).all()
  return bool(is_route) and all(
    len(group) > 2 and sorted(table[rows(group), 3]) == list(range(len(group))) for group in groups
  )
