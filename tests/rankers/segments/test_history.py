"""The history table has one entry per (graph, configuration, segment); snapshots are exact."""

from __future__ import annotations

import dataclasses
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import segment_cases
from tests.support.random_graphs import with_configs
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.segments import history
from tpugraphs_jax.rankers.segments.history import Snapshots

WIDTH = 2
CONFIGS = 4


@pytest.fixture(name="graphs", scope="module")
def _graphs():
  """Graphs of 3, 4 and 5 segments and 5, 6 and 7 configurations."""
  return segment_cases.graphs_of()


@pytest.fixture(name="keys", scope="module")
def _keys(graphs):
  return history.Keys.of(graphs)


def make(place: str, keys, tmp_path, dtype: str = "float32"):
  if place == "device":
    return history.DeviceHistory(keys.entries, WIDTH, dtype)
  return history.HostHistory(keys.entries, WIDTH, dtype, tmp_path / "host")


def create(keys, tmp_path):
  return history.create(keys, width=WIDTH, dtype="float32", folder=tmp_path / "history")


def shuffled_batch(graphs, rng):
  """Two shuffled slates on each of 4 devices, some shorter than a batch's."""
  batches = []
  for _ in range(parallel.local_device_count()):
    slots = []
    for number in rng.permutation(3)[:2]:
      graph = graphs[number]
      ids = rng.permutation(len(graph.configs))[: rng.integers(2, CONFIGS + 1)]
      segments = np.sort(rng.permutation(len(graph.segments))[:2])
      slots.append(segment_cases.slot(graph, int(number), ids, segments))
    batches.append(
      segment_cases.batch_of(slots, graphs=3, configs=CONFIGS, fresh=2, room_for=graphs)
    )
  return segment_cases.per_device(batches)


@pytest.mark.parametrize("place", ["device", "host"])
def test_entries_land_at_their_own_graph_configuration_and_segment(place, graphs, keys, tmp_path):
  table, written, rng = make(place, keys, tmp_path), {}, np.random.default_rng(1)
  for step in range(6):
    batch = shuffled_batch(graphs, rng)
    others, fresh = keys.rows(batch)
    known, value = (
      np.asarray(x) for x in (table.read(others).known_mask, table.read(others).value)
    )
    for d, g, c, j in np.ndindex(*known.shape):
      key = (int(batch.graph_id[d, g]), int(batch.config_id[d, g, c]), j)
      is_known = key in written and j not in batch.fresh_id[d, g]
      assert known[d, g, c, j] == is_known
      np.testing.assert_array_equal(value[d, g, c, j], written[key] if is_known else [0, 0])
    # Values are made from their key, so that equal keys of a step have equal values.
    new = np.zeros((*fresh.shape, WIDTH), np.float32)
    for d, g, s, c in np.ndindex(*fresh.shape):
      key = (int(batch.graph_id[d, g]), int(batch.config_id[d, g, c]), int(batch.fresh_id[d, g, s]))
      new[d, g, s, c] = (100 * key[0] + key[1], 10 * key[2] + step)
      if key[1] >= 0:
        written[key] = new[d, g, s, c]
    table.write(fresh, jnp.asarray(new))
  assert len(written) > 30


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_table_is_the_saved_one_bit_for_bit(place, dtype, keys, tmp_path):
  table, rng = make(place, keys, tmp_path, dtype), np.random.default_rng(2)
  snapshots = Snapshots(tmp_path / "history", keys, table)
  everything = np.arange(keys.entries + 2)[None].repeat(4, axis=0)
  rows = everything[:, 3:20]
  table.write(rows, jnp.asarray(rng.normal(size=(1, 17, WIDTH)).repeat(4, axis=0), jnp.float32))
  saved = [np.array(x) for x in table.read(everything)]
  found = snapshots.save()
  table.write(rows, jnp.zeros((4, 17, WIDTH)))
  table.write(rows + 20, jnp.zeros((4, 17, WIDTH)))
  snapshots.restore(found)
  for array, before in zip(table.read(everything), saved):
    np.testing.assert_array_equal(array, before)
  # Into a table of a later run as well, which may have room elsewhere.
  table.write(rows, jnp.zeros((4, 17, WIDTH)))
  for elsewhere in ("device", "host"):
    later = make(elsewhere, keys, tmp_path, dtype)
    Snapshots(tmp_path / "history", keys, later).restore(found)
    for array, before in zip(later.read(everything), saved):
      np.testing.assert_array_equal(array, before)


def test_the_two_newest_snapshots_are_kept(keys, tmp_path):
  snapshots = Snapshots(tmp_path, keys, make("device", keys, tmp_path))
  found = [snapshots.save() for _ in range(4)]
  names = [saved["table"] for saved in found]
  assert len(set(names)) == 4
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[-2:])
  with pytest.raises(FileNotFoundError, match=found[0]["table"]):
    snapshots.restore(found[0])


def test_a_restored_table_outlives_checkpoints_that_were_not_written(keys, tmp_path):
  table = make("device", keys, tmp_path)
  folder = tmp_path / "history"
  restored = Snapshots(folder, keys, table).save()
  for _ in range(3):  # saves a table and stops before its checkpoint is written
    snapshots = Snapshots(folder, keys, table)
    snapshots.restore(restored)
    newest = snapshots.save()
    assert {path.name for path in folder.iterdir()} == {restored["table"], newest["table"]}


def changed(graphs):
  runtime = graphs[1].configs.labels.copy()
  runtime[0] += 1
  # As many segments, of the same sizes, but of other nodes.
  sizes = [len(piece.opcode) for piece in graphs[2].segments]
  segment = np.repeat(np.arange(5, dtype=np.int32), sizes)[::-1].copy()
  segment = np.random.default_rng(0).permutation(segment)
  other = segment_cases.segmented(segment_cases.op_graphs(nodes=(19, 26, 33))[2], segment=segment)
  assert [len(piece.opcode) for piece in other.segments] == sizes
  return {
    "configurations": [graphs[0], with_configs(graphs[1], labels=runtime), graphs[2]],
    "partition": [graphs[0], graphs[1], other],
    "order": [graphs[1], graphs[0], graphs[2]],
    "name": [dataclasses.replace(graphs[0], name="another"), graphs[1], graphs[2]],
  }


@pytest.mark.parametrize("what", ["configurations", "partition", "order", "name"])
def test_a_table_of_other_data_or_another_partition_is_refused(what, graphs, keys, tmp_path):
  table = make("device", keys, tmp_path)
  saved = Snapshots(tmp_path, keys, table).save()
  Snapshots(tmp_path, history.Keys.of(list(graphs)), table).restore(saved)
  other = Snapshots(tmp_path, history.Keys.of(changed(graphs)[what]), table)
  with pytest.raises(ValueError, match="partition"):
    other.restore(saved)


def test_size_is_logged_and_decides_where_the_table_is(keys, tmp_path, monkeypatch, caplog):
  size = keys.entries * (4 * WIDTH + 1)
  text = f"{keys.entries} entries (graph, configuration, segment) with {WIDTH} float32"
  caplog.set_level("INFO")
  monkeypatch.setattr(history, "_device_limit", lambda: size)
  assert isinstance(create(keys, tmp_path), history.DeviceHistory)
  monkeypatch.setattr(history, "_device_limit", lambda: size - 1)
  assert isinstance(create(keys, tmp_path), history.HostHistory)
  assert sum(text in message for message in caplog.messages) == 2
  assert caplog.messages[-1].endswith("on the host")


def test_a_table_that_does_not_fit_is_refused_with_the_alternatives(keys, tmp_path, monkeypatch):
  monkeypatch.setattr(history, "_device_limit", lambda: 100)
  monkeypatch.setattr(history, "_host_limit", lambda folder: 200)
  with pytest.raises(ValueError, match="history_dtype"):
    create(keys, tmp_path)
  assert not (tmp_path / "history").exists()


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", ["value", "is_written", "identity.json"])
def test_a_damaged_table_is_refused_in_one_line(name, place, keys, tmp_path):
  table = make(place, keys, tmp_path)
  snapshots = Snapshots(tmp_path / "history", keys, table)
  saved = snapshots.save()
  path = tmp_path / "history" / saved["table"] / name
  whole = path.read_bytes()
  for damaged in (b"", whole[: len(whole) // 2], whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]):
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"{name} is damaged") as error:
      snapshots.restore(saved)
    assert "\n" not in str(error.value)
  path.write_bytes(whole)
  snapshots.restore(saved)


def test_a_table_of_another_run_on_the_same_data_is_refused(keys, tmp_path):
  saved, rows = {}, np.zeros((4, 1), int)
  for number, run in enumerate(("own", "other")):
    table = make("device", keys, tmp_path / run)
    table.write(rows, jnp.full((4, 1, WIDTH), number, jnp.float32))
    saved[run] = Snapshots(tmp_path / run, keys, table).save()
  assert saved["own"]["table"] == saved["other"]["table"]
  shutil.rmtree(tmp_path / "own" / saved["own"]["table"])
  shutil.copytree(tmp_path / "other" / saved["other"]["table"], tmp_path / "own" / "table_0")
  snapshots = Snapshots(tmp_path / "own", keys, table)
  with pytest.raises(ValueError, match="another run"):
    snapshots.restore(saved["own"])
