"""The links between the chips of a slice: routes in a torus, queues, neighbours of a device.

One device is simulated. All devices of a mesh run the same program: when this device sends to its
successor, its predecessor sends as much to it. A remote DMA therefore loads the links of the
transfers of all devices. A link moves one transfer after the other.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np

from tpugraphs_jax.hlo import collectives
from tpugraphs_jax.tuning.schedule.chips import Chip

Coords = tuple[int, int, int]
Transfers = Mapping[int, int]  # from each device to another


@dataclasses.dataclass(frozen=True)
class Slice:
  """The devices of a program with a mesh.

  Attributes:
    axes: of the mesh: size by name.
    ids: of the device of each partition.
    coords: x, y, z and core of the device of each partition.
    wrap: which axes of the chips have links from their last to their first chip.
    rings: tables of neighbours that the compiler made.
  """

  axes: Mapping[str, int]
  ids: tuple[int, ...]
  coords: tuple[tuple[int, int, int, int], ...]
  wrap: tuple[bool, bool, bool]
  rings: tuple[collectives.Ring, ...] = ()

  @property
  def on_chip(self) -> int:
    """Devices of a chip; the chip of device i is i divided by it."""
    return 1 + max(core for *_, core in self.coords)

  def axes_of(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The axes of the mesh along which partitions of a group differ."""
    found = set()
    for group in groups:
      places = [self._place(member) for member in group]
      found |= {name for name in self.axes if len({place[name] for place in places}) > 1}
    return tuple(name for name in self.axes if name in found)

  def groups_along(self, along: Sequence[str]) -> collectives.Groups:
    """The groups of partitions that differ along axes of the mesh alone."""
    order = np.arange(len(self.ids)).reshape(tuple(self.axes.values()))
    places = [number for number, name in enumerate(self.axes) if name in along]
    members = math.prod(order.shape[place] for place in places)
    last = np.moveaxis(order, places, range(-len(places), 0))
    return tuple(map(tuple, last.reshape(-1, members).tolist()))

  def _place(self, partition: int) -> dict[str, int]:
    """The indices of a partition in the mesh."""
    indices = {}
    for name, size in reversed(list(self.axes.items())):
      partition, indices[name] = divmod(partition, size)
    return indices


@dataclasses.dataclass
class Communication:
  """All calls of a collective in one run.

  Attributes:
    name: of the instruction of the schedule.
    exchange: of the instruction that exchanges data, itself or one inside.
    kind: of `collectives.KINDS`.
    axes: of the mesh along which it exchanges data.
    devices: that exchange data with one another.
    size: bytes of the largest of its arrays on one device.
    calls: how often it runs.
    cycles: in which its data is under way, or of its kernel.
    exposed: cycles in which the device waits for it.
    why: why its time is that of a formula; empty if its schedule was executed.
  """

  name: str
  exchange: str
  kind: str
  axes: tuple[str, ...]
  devices: int
  size: int
  calls: int = 0
  cycles: float = 0.0
  exposed: float = 0.0
  why: str = ""


class Torus:
  """Chips and their links.

  Args:
    devices: of the program.
  """

  def __init__(self, devices: Slice):
    self._places = dict(zip(devices.ids, devices.coords))
    self.chips = {id: place[:3] for id, place in self._places.items()}
    x, y, z = (1 + max(chip[axis] for chip in self.chips.values()) for axis in range(3))
    self.sides = x, y, z
    self._wrap = devices.wrap

  def alike(self, source: int, target: int) -> dict[int, int]:
    """To whom each device sends where all send as far as one does, and back at the ends of axes.

    Both devices of a chip send to the same core.
    """
    devices = {place: id for id, place in self._places.items()}
    here, there = self._places[source], self._places[target]
    transfers = {}
    for id, place in self._places.items():
      goal = []
      for axis, side in enumerate(self.sides):
        moved = place[axis] + there[axis] - here[axis]
        if not 0 <= moved < side and not self._wrap[axis]:
          moved = place[axis] - there[axis] + here[axis]
        goal.append(moved % side)
      core = place[3] ^ here[3] ^ there[3]
      transfers[id] = devices.get((goal[0], goal[1], goal[2], core), id)
    return transfers

  def route(self, source: int, target: int) -> list[int]:
    """The links from a device to another: axis by axis, the shorter way round.

    Link 6 i + 2 a + f leads from chip i along axis a, backwards (f = 0) or forwards.
    """
    here, there = list(self.chips[source]), self.chips[target]
    links: list[int] = []
    for axis, side in enumerate(self.sides):
      steps = there[axis] - here[axis]
      if self._wrap[axis] and abs(steps) > side / 2:
        steps -= side if steps > 0 else -side
      sign = 1 if steps > 0 else -1
      for _ in range(abs(steps)):
        chip = here[0] + self.sides[0] * (here[1] + self.sides[1] * here[2])
        links.append(6 * chip + 2 * axis + (sign > 0))
        here[axis] = (here[axis] + sign) % side
    return links


@dataclasses.dataclass(frozen=True)
class _Load:
  """The links that one transfer of each device uses."""

  links: np.ndarray  # that transfers use
  counts: np.ndarray  # how many of them use each
  sent: list[int]  # links of the transfer of the simulated device
  received: list[int]  # links of the transfer to it


class Links:
  """The queues of all links; times in cycles of the core.

  Args:
    devices: of the program.
    chip: constants of their generation.

  Attributes:
    bytes_sent: by the simulated device.
    unknown: how many DMAs went to a device that no collective of the program names.
  """

  def __init__(self, devices: Slice, chip: Chip):
    self._torus, self._chip = Torus(devices), chip
    self._rate = chip.link.rate / chip.clock  # bytes a cycle
    self._free = np.zeros(6 * math.prod(self._torus.sides))
    self._loads: dict[tuple[int, int], _Load] = {}
    self._known: list[Transfers] = []
    self._devices = devices
    self.bytes_sent = self.unknown = 0

  @property
  def hop(self) -> float:
    """Cycles between the last byte that enters a link and its arrival."""
    return self._chip.link.hop * self._chip.clock

  def learn(self, transfers: Transfers) -> None:
    """Adds transfers of a collective: whom each device sends to."""
    if transfers and transfers not in self._known:
      self._known.append(dict(transfers))
      self._loads.clear()

  def transfers(self, source: int, target: int) -> Transfers:
    """What all devices send when one of them sends to another.

    Without a collective that tells it, all send as far along the axes of the chips.
    """
    for known in self._known:
      if known.get(source) == target:
        return known
    for ring in self._devices.rings:
      successors = ring.successors(self._devices.ids)
      predecessors = {follower: device for device, follower in successors.items()}
      _, following, before, _ = ring.row(source, self._devices.ids)
      if target in (successors[source], following):
        return successors
      if target in (predecessors[source], before):
        return predecessors
    self.unknown += 1
    return self._torus.alike(source, target)

  def send(self, now: float, source: int, target: int, size: int) -> tuple[float, float]:
    """Starts a DMA of every device; when it has left this one, and when one has arrived here.

    Args:
      now: cycle.
      source: id of the simulated device.
      target: id of the device to which it sends.
      size: bytes.
    """
    load = self._load(source, target)
    self.bytes_sent += size
    begun = np.maximum(self._free[load.links], now)
    self._free[load.links] = begun + load.counts * size / self._rate
    sent = float(self._free[load.sent].max(initial=now))
    arrival = float(self._free[load.received].max(initial=now))
    return sent, arrival + len(load.received) * self.hop

  def busy(self, now: float) -> np.ndarray:
    """Cycles from now until which each link is taken."""
    return np.maximum(self._free - now, 0.0)

  def take(self, now: float, busy: np.ndarray, size: int) -> None:
    """Takes links as transfers of `size` bytes did that began as now, while no link was taken."""
    self._free = np.maximum(self._free, now + busy)
    self.bytes_sent += size

  def _load(self, source: int, target: int) -> _Load:
    if (source, target) not in self._loads:
      transfers = self.transfers(source, target)
      target = transfers.get(source, target)
      counts = collections.Counter(
        link for pair in transfers.items() for link in self._torus.route(*pair)
      )
      before = next((device for device, other in transfers.items() if other == source), None)
      received = [] if before is None else self._torus.route(before, source)
      links, each = (np.array(list(part), int) for part in (counts.keys(), counts.values()))
      load = _Load(links, each, self._torus.route(source, target), received)
      self._loads[source, target] = load
    return self._loads[source, target]


def formula_cycles(
  kind: str, size: int, groups: Sequence[Sequence[int]], devices: Slice, chip: Chip
) -> float:
  """Cycles of a collective by the formulas of the scaling book, for links of a torus.

  https://jax-ml.github.io/scaling-book/sharding: an all-gather and a reduce-scatter move the whole
  array over the links of a chip once, an all-reduce twice. A chip has two links along an axis that
  wraps around, else one at the end of the axis. An all-to-all is bound by the link in the middle of
  the longest axis. Groups whose devices share chips share the links.

  Args:
    kind: of `collectives.KINDS`.
    size: bytes of the largest array on a device.
    groups: partitions that exchange data; none of a `collective-permute`.
    devices: of the program.
    chip: constants of their generation.
  """
  link = chip.link
  if kind == "collective-permute":  # over one link
    return chip.clock * (size / link.rate + link.hop)
  members = len(groups[0]) if groups else 0
  if members < 2:
    return 0.0
  coords = [devices.coords[member][:3] for member in groups[0]]
  sides = [1 + max(chips) - min(chips) for chips in zip(*coords)]
  whole = [1 + max(chips) for chips in zip(*devices.coords)]
  links = [
    2 if wraps and side == most else 1
    for wraps, side, most in zip(devices.wrap, sides, whole)
    if side > 1
  ]
  on_chip = sum(place[:3] == coords[0] for place in devices.coords)
  if not links:  # both devices of one chip
    return size / chip.bytes_per_cycle
  if kind in ("all-to-all", "ragged-all-to-all"):
    crossing = [(side // 2) * ((side + 1) // 2) / side for side in sides if side > 1]
    moved = on_chip * size * max(part / count for part, count in zip(crossing, links))
    return chip.clock * (moved / link.rate + (sum(sides) - 3) * link.hop)
  sharing = on_chip / coords.count(coords[0])
  moved = sharing * size * (members - 1) / members / sum(links)
  passes = 2 if kind == "all-reduce" else 1
  return chip.clock * passes * (moved / link.rate + (sum(sides) - 3) * link.hop)
