"""Programs of meshes: routes and queues of links, and collectives whose schedules libtpu wrote."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support import hlo_modules, schedules
from tpugraphs_jax.hlo import collectives, topology
from tpugraphs_jax.tuning.schedule import chips, ici, mesh


def _slice(shape, *, wrap=(False,) * 3, axes=None, rings=()):
  """The devices of a torus, in order."""
  x, y, z = shape
  coords = [(i, j, k, 0) for k, j, i in itertools.product(range(z), range(y), range(x))]
  ids = tuple(range(len(coords)))
  return ici.Slice(axes or {"x": len(ids)}, ids, tuple(coords), wrap, tuple(rings))


def _shortest(sides, wrap, start, end):
  """Hops from a chip to another, by a search in the graph of links."""
  front, hops = {start}, 0
  seen = {start}
  while end not in front:
    after = set()
    for chip, axis, step in itertools.product(front, range(3), (-1, 1)):
      place = list(chip)
      place[axis] += step
      if wrap[axis]:
        place[axis] %= sides[axis]
      if 0 <= place[axis] < sides[axis]:
        after.add(tuple(place))
    front, hops = after - seen, hops + 1
    seen |= after
  return hops


@pytest.mark.parametrize("wrap", [(False,) * 3, (True, False, True), (True,) * 3])
def test_a_route_is_a_shortest_way_over_links_that_exist(wrap):
  sides = (4, 3, 5)
  devices = _slice(sides, wrap=wrap)
  torus = ici.Torus(devices)
  for start, end in itertools.product((0, 7, 23), range(len(devices.ids))):
    route = torus.route(start, end)
    places = [devices.coords[device][:3] for device in (start, end)]
    assert len(route) == _shortest(sides, wrap, *places)
    assert len(set(route)) == len(route) and all(0 <= link < 6 * 60 for link in route)


def test_transfers_over_one_link_take_turns():
  chip = schedules.CHIP  # 8 bytes a cycle over a link, 100 cycles a hop
  links = ici.Links(_slice((4, 1, 1)), chip)
  links.learn({0: 1, 1: 2, 2: 3})
  assert links.send(0.0, 0, 1, 800)[0] == 100
  # The next one waits for the link, and nothing comes to the first device of the line.
  assert links.send(50.0, 0, 1, 800) == (200, 50)
  # From the other end of the line: two hops share no link with these, one of three does.
  links.learn({0: 2, 1: 3, 2: 0, 3: 1})
  sent, arrival = links.send(200.0, 0, 2, 800)
  assert sent == 200 + 2 * 100 and arrival == 200 + 2 * 100 + 2 * 100
  assert links.bytes_sent == 2400 and links.unknown == 0


def test_a_ring_on_a_line_uses_every_link_in_both_directions_once():
  devices = _slice((4, 1, 1))
  ring, links = {0: 1, 1: 3, 3: 2, 2: 0}, ici.Links(devices, schedules.CHIP)
  links.learn(ring)
  links.learn({follower: device for device, follower in ring.items()})
  # Two transfers of 800 bytes over the same links: 100 cycles each.
  assert links.send(0.0, 0, 1, 800)[0] == 100
  assert links.send(0.0, 0, 2, 800)[0] == 200


def test_devices_send_alike_and_back_at_the_end_of_an_axis():
  pairs = ici.Torus(_slice((2, 2, 2))).alike(0, 4)
  assert pairs == {device: device ^ 4 for device in range(8)}
  line = ici.Torus(_slice((4, 1, 1))).alike(0, 1)
  assert line == {0: 1, 1: 2, 2: 3, 3: 2}
  ring = ici.Torus(_slice((4, 1, 1), wrap=(True, False, False))).alike(1, 0)
  assert ring == {0: 3, 1: 0, 2: 1, 3: 2}
  links = ici.Links(_slice((2, 2, 2)), schedules.CHIP)
  # Each chip has a link of its own to its neighbour: none waits for another.
  assert links.send(0.0, 0, 4, 800) == (100, 200) and links.unknown == 1


def test_the_device_of_a_chain_that_is_simulated_sends_and_receives():
  node = hlo_modules.instruction("collective-permute-start", 1)
  for source in range(3):
    node.source_target_pairs.add(source=source, target=source + 1)
  module = hlo_modules.module(hlo_modules.computation(node))
  module.entry_computation_id = 1
  assert mesh.Simulation(module, {}, "tpu:v5e", _slice((4, 1, 1))).device == 1
  ring = hlo_modules.module(hlo_modules.computation(hlo_modules.instruction("all-gather", 1)))
  ring.entry_computation_id = 1
  assert mesh.Simulation(ring, {}, "tpu:v5e", _slice((4, 1, 1))).device == 0


def test_equal_exchanges_are_told_apart_by_the_flags_of_their_dmas():
  nodes = [hlo_modules.instruction("collective-permute-start", number) for number in (1, 2)]
  for node in nodes:
    for source in range(4):
      node.source_target_pairs.add(source=source, target=(source + 1) % 4)
  module = hlo_modules.module(hlo_modules.computation(*nodes))
  module.entry_computation_id = 1
  run = mesh.Simulation(module, {}, "tpu:v5e", _slice((4, 1, 1))).start(schedules.CHIP)
  for flags in ((1, 2), (3, 4), (1, 2)):  # the first one in a loop
    names = dict(zip(("dst_syncflagno", "src_syncflagno"), flags))
    run.send(0.0, {"overrides": 1, "size_in_granules": 8, **names})
  assert [run.communication[node.name].calls for node in nodes] == [2, 1]


def test_the_axes_of_groups_are_those_along_which_partitions_differ():
  devices = _slice((4, 2, 1), axes={"data": 4, "model": 2})
  assert devices.axes_of([(0, 1), (2, 3)]) == ("model",)
  assert devices.axes_of([(0, 2, 4, 6)]) == ("data",)
  assert devices.axes_of([range(8)]) == ("data", "model")
  assert devices.axes_of([(3, 3)]) == ()


@pytest.mark.parametrize("kind", collectives.KINDS)
@pytest.mark.parametrize("wrap", [False, True])
def test_the_formula_of_a_line_is_that_of_its_bytes(kind, wrap):
  chip, links = schedules.CHIP, 1 + wrap
  devices = _slice((4, 1, 1), wrap=(wrap, False, False))
  passes = {"all-reduce": 2, "all-to-all": 0, "ragged-all-to-all": 0}.get(kind, 1)
  expected = passes * (6000 / 8 / links + 3 * 100)
  if kind == "collective-permute":
    expected = 8000 / 8 + 100
  elif not passes:  # two chips send half of what they have to the two others
    expected = 2 * 4000 / 8 / links + 3 * 100
  found = ici.formula_cycles(kind, 8000, [range(4)], devices, chip)
  assert found == pytest.approx(expected)
  alone = ici.formula_cycles(kind, 8000, [[0], [1]], devices, chip)
  assert alone == (8000 / 8 + 100 if kind == "collective-permute" else 0)


def _most_loaded(devices, groups, size):
  """Bytes over the link that an all-to-all loads most, by all routes of all devices."""
  torus, loads = ici.Torus(devices), {}
  for group in groups:
    for one, other in itertools.permutations(group, 2):
      for link in torus.route(one, other):
        loads[link] = loads.get(link, 0.0) + size / len(group)
  return max(loads.values())


@pytest.mark.parametrize(
  "shape, axes, along",
  [
    ((4, 1, 1), {"x": 4}, "x"),
    ((4, 2, 1), {"y": 2, "x": 4}, "yx"),
    ((4, 4, 1), {"y": 4, "x": 4}, "y"),
    ((2, 2, 4), {"z": 4, "y": 2, "x": 2}, "zyx"),
    ((2, 2, 4), {"z": 4, "y": 2, "x": 2}, "zx"),
    ((3, 2, 1), {"y": 2, "x": 3}, "yx"),
  ],
)
def test_an_all_to_all_takes_the_bytes_of_the_link_with_most_of_them(shape, axes, along):
  devices, chip = _slice(shape, axes=axes), schedules.CHIP
  groups = devices.groups_along(along)
  assert sorted(itertools.chain(*groups)) == list(range(len(devices.ids)))
  assert devices.axes_of(groups) == tuple(name for name in axes if name in along)
  found = ici.formula_cycles("all-to-all", 9600, groups, devices, chip)
  hops = sum(side - 1 for side, name in zip(shape, "xyz") if name in along)
  assert found == pytest.approx(_most_loaded(devices, groups, 9600) / 8 + hops * 100)


def test_groups_on_the_same_chips_share_their_links():
  one = _slice((2, 2, 1))
  coords = tuple((*place[:3], core) for place in one.coords for core in (0, 1))
  both = ici.Slice({"chip": 4, "core": 2}, tuple(range(8)), coords, one.wrap)
  cycles = lambda devices, groups: ici.formula_cycles(
    "all-gather", 8000, groups, devices, schedules.CHIP
  )
  assert cycles(one, [range(4)]) == 6000 / 8 / 2 + 2 * 100
  assert cycles(both, both.groups_along(["chip"])) == 6000 / 8 + 2 * 100
  assert cycles(both, [range(8)]) == pytest.approx(7000 / 8 / 2 + 2 * 100)
  # Both devices of a chip exchange over its memory.
  assert cycles(both, both.groups_along(["core"])) == 8000 / schedules.CHIP.bytes_per_cycle


def _with_link(name, **numbers):
  target = topology.generation_of(name)
  chip = chips.chips()[target]
  return dataclasses.replace(chip, link=dataclasses.replace(chip.link, **numbers))


def test_a_gather_on_a_line_moves_three_shards_over_each_link():
  simulation = schedules.stored_mesh("mesh_gather_v5e")
  time = simulation.time()
  (gather,) = time.communication
  assert (gather.kind, gather.axes, gather.devices, gather.calls) == ("all-gather", ("y",), 4, 1)
  assert gather.size == 2 * 2048 * 8192 and not gather.why and not time.why
  # Each link moves three of four shards; hops, a barrier and starts take less than 2 %.
  link = chips.chips()["tpu:v5e"].link
  least = gather.size * 3 / 4 / link.rate
  took = gather.cycles / chips.chips()["tpu:v5e"].clock
  assert least < took < 1.02 * least
  assert gather.exposed == gather.cycles == time.exposed
  slow = simulation.time(_with_link("tpu:v5e", bandwidth=link.bandwidth / 2)).communication[0]
  assert slow.cycles == pytest.approx(2 * gather.cycles, rel=0.02)


def _gathered():
  """A run of a gather, and a function that calls its kernel once more at a cycle."""
  run, calls = schedules.stored_mesh("mesh_gather_v5e").start(chips.chips()["tpu:v5e"]), []
  original = run.call
  run.call = lambda *given: calls.append(given) or original(*given)
  run.execute()
  name, start, words = next(call for call in calls if call[0] in run.communication)
  return run, start, lambda now: original(name, now, words)


def test_a_call_of_a_collective_like_one_before_takes_as_long_and_takes_its_links():
  run, start, again = _gathered()
  (gather,) = run.communication.values()
  took, sent, events = gather.cycles, run.links.bytes_sent, len(run.events)
  busy, later = run.links.busy(start), start + 1e9
  assert busy.any() and not run.links.busy(later).any()
  assert again(later) == pytest.approx(took)
  np.testing.assert_allclose(run.links.busy(later), busy, atol=1e-3)
  assert (gather.calls, run.links.bytes_sent) == (2, 2 * sent)
  assert gather.cycles == gather.exposed == pytest.approx(2 * took)
  # The same DMAs are under way as in the first call, later by as much.
  remote = [event for event in sorted(run.events) if event.unit == "link"]
  half = len(remote) // 2
  for first, second in zip(remote[:half], remote[half:], strict=True):
    assert (second.name, second.size) == (first.name, first.size)
    assert second.end - first.end == pytest.approx(later - start)
  assert len(run.events) > events


def test_a_call_of_a_collective_waits_for_links_that_are_taken():
  run, start, again = _gathered()
  (gather,) = run.communication.values()
  took, later = gather.cycles, start + 1e9
  busy = np.where(run.links.busy(start) > 0, 1e6, 0.0)
  run.links.take(later, busy, 0)
  assert again(later) == pytest.approx(took + 1e6, rel=0.01)


def test_a_wait_for_another_device_costs_nothing_beside_the_start_of_its_dma():
  simulation, chip = schedules.stored_mesh("mesh_reduce_v5e"), chips.chips()["tpu:v5e"]
  cycles = lambda wait: (
    simulation.time(dataclasses.replace(chip, wait=wait)).communication[0].cycles
  )
  own = cycles(1_000.0) - cycles(0.0)  # of the core's own DMAs
  remote = simulation.time(_with_link("tpu:v5e", start=chip.link.start + 1_000.0))
  assert 0 <= own < (remote.communication[0].cycles - cycles(chip.wait)) / 2


def test_a_reduction_over_two_axes_computes_its_neighbours():
  time = schedules.stored_mesh("mesh_reduce_v5e").time()
  (reduction,) = time.communication
  assert (reduction.kind, reduction.axes, reduction.calls) == ("all-reduce", ("x", "y"), 1)
  assert not reduction.why and not time.why
  # Every chip of 4 x 4 has at most four links; the corners have two.
  link, clock = chips.chips()["tpu:v5e"].link, chips.chips()["tpu:v5e"].clock
  at_least = 2 * reduction.size * 15 / 16 / (4 * link.rate)
  assert at_least < reduction.cycles / clock < 4 * at_least


def test_exchanges_of_neighbours_are_executed_in_their_loop():
  simulation = schedules.stored_mesh("mesh_exchange_v5p")
  time = simulation.time()
  (exchange,) = time.communication
  assert (exchange.kind, exchange.axes, exchange.calls) == ("collective-permute", ("ring",), 64)
  chip = chips.chips()["tpu:v5p"]
  least = 64 * exchange.size / chip.link.rate
  assert least < exchange.exposed / chip.clock < least + 64 * 4e-6
  assert time.exposed == pytest.approx(exchange.exposed) and not time.why
  assert time.exposed == time.link_stall
  hops = simulation.time(_with_link("tpu:v5p", hop=chip.link.hop + 1e-6))
  # A barrier, and two links from the predecessor, which is across the square of chips.
  assert hops.cycles - time.cycles == pytest.approx(64 * 3e-6 * chip.clock, rel=0.05)


def test_a_collective_whose_schedule_cannot_be_executed_counts_with_the_formula():
  simulation = schedules.stored_mesh("mesh_gather_v5e")
  simulation.schedules["all-gather.4"] = "nothing"
  time = simulation.time()
  (gather,) = time.communication
  assert "no bundles" in gather.why and not time.why
  chip, size = chips.chips()["tpu:v5e"], gather.size
  groups = simulation.devices.groups_along(["y"])
  assert gather.cycles == ici.formula_cycles("all-gather", size, groups, simulation.devices, chip)


def test_damaged_schedules_of_a_mesh_give_a_reason_and_no_error():
  rng = np.random.default_rng(0)
  for name in ("mesh_gather_v5e", "mesh_exchange_v5p"):
    simulation = schedules.stored_mesh(name)
    texts = dict(simulation.schedules)
    for kernel in texts:
      lines = texts[kernel].splitlines()
      for _ in range(6):
        kept = [line for line in lines if rng.random() > 0.02]
        damaged = schedules.stored_mesh(name)
        damaged.schedules[kernel] = "\n".join(kept)
        time = damaged.time()
        assert time.why or time.cycles >= 0


def test_collectives_that_a_program_starts_itself_come_in_the_order_of_execution():
  gather = lambda id: hlo_modules.instruction("all-gather-start", id)
  body = hlo_modules.computation(gather(1), name="body", id=1)
  nodes = [gather(2), hlo_modules.instruction("while", 3, callees=(1,)), gather(4)]
  module = hlo_modules.module(body, hlo_modules.computation(*nodes, id=2))
  module.entry_computation_id = 2
  names = [nodes[0].name, body.instructions[0].name, nodes[2].name]
  kernels = {names[2]: "a schedule of its own"}
  made = mesh.Simulation(module, kernels, "tpu:v5e", _slice((2, 1, 1)))
  assert list(made.started) == names[:2] == list(made.rings)
