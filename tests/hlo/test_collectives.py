"""Groups of collectives in each form in which XLA writes them, and tables of neighbours."""

import numpy as np
import pytest

from tests.support import hlo_modules
from tpugraphs_jax.hlo import collectives


def _collective(opcode="all-gather", id=1, **fields):
  return hlo_modules.instruction(opcode, id=id, **fields)


def test_groups_are_read_in_every_form():
  listed = _collective()
  for members in ((0, 2), (1, 3)):
    listed.collective_device_list.replica_groups.add(replica_ids=members)
  old = _collective()
  for members in ((0, 2), (1, 3)):
    old.replica_groups.add(replica_ids=members)
  iota = _collective()
  iota.iota_collective_device_list.num_replica_groups = 2
  iota.iota_collective_device_list.num_devices_per_group = 2
  iota.iota_collective_device_list.iota_reshape_dims.extend((2, 2))
  iota.iota_collective_device_list.iota_transpose_perm.extend((1, 0))
  axes = _collective()
  for name in ("a", "b"):
    axes.mesh_axes_replica_group_list.mesh.axes.add(name=name, size=2)
  axes.mesh_axes_replica_group_list.axes.add(mesh_axis_index=0)
  for node in (listed, old, iota, axes):
    assert collectives.groups_of(node, 4) == ((0, 2), (1, 3))
  assert collectives.groups_of(_collective(), 3) == ((0, 1, 2),)


def test_groups_along_a_part_of_an_axis():
  node = _collective()
  node.mesh_axes_replica_group_list.mesh.axes.add(name="a", size=8)
  reference = node.mesh_axes_replica_group_list.axes.add(mesh_axis_index=0)
  reference.sub_axis_info.pre_size, reference.sub_axis_info.size = 2, 2
  # Partition 4 i + 2 j + k: those that differ in j.
  assert collectives.groups_of(node, 8) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_groups_of_partitions_that_do_not_exist_are_refused():
  node = _collective()
  node.replica_groups.add(replica_ids=(0, 9))
  with pytest.raises(ValueError, match="partitions"):
    collectives.groups_of(node, 4)


def test_collectives_are_found_by_the_instruction_of_the_schedule():
  scatter = hlo_modules.computation(
    _collective("all-reduce", 1), hlo_modules.instruction("dynamic-slice", 2, (1,)), id=1
  )
  permute = _collective("collective-permute-start", 4)
  permute.source_target_pairs.add(source=0, target=1)
  entry = hlo_modules.computation(
    hlo_modules.instruction("fusion", 3, callees=(1,)), permute, _collective("all-reduce", 5), id=2
  )
  found = collectives.find(hlo_modules.module(scatter, entry), 2)
  kinds = {
    owner: [(one.kind, one.groups, one.pairs) for one in ones] for owner, ones in found.items()
  }
  names = [node.name for node in entry.instructions]
  assert kinds == {
    names[0]: [("reduce-scatter", ((0, 1),), ())],
    names[1]: [("collective-permute", (), ((0, 1),))],
    names[2]: [("all-reduce", ((0, 1),), ())],
  }


def test_a_collective_that_is_started_belongs_to_its_start():
  gather = hlo_modules.computation(_collective("all-gather", 1), id=1)
  started = hlo_modules.computation(hlo_modules.instruction("call", 2, callees=(1,)), id=2)
  start = hlo_modules.instruction("async-start", 3, callees=(2,))
  found = collectives.find(
    hlo_modules.module(gather, started, hlo_modules.computation(start, id=3)), 2
  )
  assert {owner: [one.kind for one in ones] for owner, ones in found.items()} == {
    start.name: ["all-gather"]
  }


@pytest.mark.parametrize("by_device", [False, True])
def test_a_table_of_neighbours_is_found_among_other_words(by_device):
  ids, groups = (0, 2, 3, 1), ((0, 2), (1, 3))
  rows = {0: (0, 3, 3, 0), 2: (1, 0, 0, 0), 1: (0, 1, 1, 0), 3: (1, 2, 2, 0)}  # by partition
  order = [ids.index(device) for device in range(4)] if by_device else range(4)
  words = np.array([rows[partition] for partition in order], "<i4")
  noise = np.random.default_rng(0).integers(0, 3, 4000).astype("<i4").tobytes()
  found = collectives.ring(noise + b"\1\2\3" + words.tobytes() + noise, groups, ids)
  assert found.by_device is by_device and (found.table == words).all()
  assert found.successors(ids) == {0: 3, 3: 0, 2: 1, 1: 2}
  assert collectives.ring(noise, groups, ids) is None


def test_places_order_a_ring_whose_neighbours_are_numbers_of_routes():
  ids, groups = (5, 6, 7, 4, 3, 2, 1, 0)[::-1], ((0, 1, 2, 3), (4, 5, 6, 7))
  places = (0, 1, 3, 2)
  words = np.array([(n % 4, 20 + n, 30 + n, places[n % 4]) for n in range(8)], "<i4")
  found = collectives.ring(words.tobytes(), groups, ids)
  # The ring of the first group is 0, 1, 3, 2.
  assert [found.successors(ids)[ids[n]] for n in (0, 1, 3, 2)] == [ids[n] for n in (1, 3, 2, 0)]
