"""Traces of estimates in Chrome's JSON."""

import dataclasses
import json

import pytest

from tests.support import steps
from tpugraphs_jax.tuning import summary
from tpugraphs_jax.tuning.schedule import program


def _saved(rows, tmp_path):
  path = tmp_path / "trace.json"
  summary.Estimate("step", tuple(rows)).save_trace(path)
  return json.loads(path.read_text())["traceEvents"], path


def _tracks(events):
  """The events of each process and track by their names."""
  processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
  threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
  tracks = {(processes[pid], name): [] for (pid, tid), name in threads.items()}
  for event in events:
    if event["ph"] == "X":
      place = processes[event["pid"]], threads[event["pid"], event["tid"]]
      tracks[place].append(event)
  return tracks


def _with_copy():
  row = steps.row([steps.kernel("a", 1.0), steps.kernel("b", 2.0, scope="LM")], between=0.5)
  copy = program.Event(0.2, 3.0, program.DMA, "hbm_to_vmem", 4096)
  wait = program.Event(3.5, 4.0, program.WAIT)
  return dataclasses.replace(row, milliseconds=4.2, events=(*row.events, copy, wait))


def test_operations_add_up_to_the_time_of_the_program(tmp_path):
  events, _ = _saved([_with_copy()], tmp_path)
  tracks = _tracks(events)
  (device,) = {process for process, _ in tracks}
  assert device.startswith("/device:TPU:0")
  operations = tracks[device, "XLA Ops"]
  assert sum(event["dur"] for event in operations) == pytest.approx(4200)
  ends = [event["ts"] + event["dur"] for event in operations]
  assert ends[:-1] == pytest.approx([event["ts"] for event in operations[1:]])
  assert [event["name"] for event in operations] == [
    "between kernels",
    "a",
    "b",
    "wait for a copy",
    "between kernels",
  ]
  (module,) = tracks[device, "XLA Modules"]
  assert (module["ts"], module["dur"]) == (0, 4200)


def test_copies_have_a_track_of_their_own_and_their_bytes(tmp_path):
  events, _ = _saved([_with_copy()], tmp_path)
  (copy,) = next(found for (_, name), found in _tracks(events).items() if name == "Async XLA Ops")
  assert (copy["name"], copy["ts"], copy["dur"]) == ("hbm_to_vmem", 200, 2800)
  assert copy["args"] == {"bytes": 4096}


def test_transfers_to_other_chips_have_a_track_and_waits_for_them_a_name(tmp_path):
  sent = program.Event(0.5, 1.5, program.LINK, "all-gather.1", 64)
  wait = program.Event(1.0, 1.5, program.WAIT, "all-gather.1")
  row = steps.row([steps.kernel("a", 1.0)])
  row = dataclasses.replace(row, milliseconds=1.5, events=(*row.events, sent, wait))
  tracks = {name: found for (_, name), found in _tracks(_saved([row], tmp_path)[0]).items()}
  assert [(e["name"], e["ts"], e["dur"]) for e in tracks["ICI"]] == [("all-gather.1", 500, 1000)]
  assert [event["name"] for event in tracks["XLA Ops"]] == ["a", "wait for all-gather.1"]


def test_a_kernel_with_a_bound_alone_is_an_operation(tmp_path):
  row = steps.row([steps.kernel("a", 1.0)])
  bound = steps.kernel("b", 0.5, is_bound=True, why="its schedule is unknown")
  row = dataclasses.replace(row, milliseconds=1.6, kernels=(*row.kernels, bound))
  tracks = {name: found for (_, name), found in _tracks(_saved([row], tmp_path)[0]).items()}
  shown = [(event["name"], event["dur"]) for event in tracks["XLA Ops"]]
  assert shown == [("a", 1000), ("b", 500), ("between kernels", pytest.approx(100))]


def test_a_kernel_has_its_operation_scope_and_line(tmp_path):
  events, _ = _saved([_with_copy()], tmp_path)
  (event,) = (event for event in events if event["name"] == "b")
  assert event["args"] == {
    "operation": "dot_general",
    "scope": "LM",
    "line": "model.py:12",
    "shape": "bf16[8,128]",
    "bound by": "products",
  }


def test_each_target_is_a_device(tmp_path):
  other = steps.row([steps.kernel("a", 1.0)], target="tpu:7x")
  events, _ = _saved([_with_copy(), other], tmp_path)
  devices = {process for process, _ in _tracks(events)}
  assert len(devices) == 2 and any("7x" in device for device in devices)


def test_a_large_step_has_some_megabytes_and_all_of_its_time(tmp_path):
  row = steps.large(60_000)
  events, path = _saved([row], tmp_path)
  assert path.stat().st_size < 8e6
  operations = next(found for (_, name), found in _tracks(events).items() if name == "XLA Ops")
  assert len(operations) <= 20_000
  total = sum(event["dur"] for event in operations)
  assert total == pytest.approx(1000 * row.milliseconds, rel=1e-6)
  longest = max(row.kernels, key=lambda kernel: kernel.milliseconds)
  assert any(event["name"] == longest.name for event in operations)


def test_without_a_time_there_is_no_trace(tmp_path):
  with pytest.raises(ValueError, match="no timeline"):
    _saved([steps.row([], milliseconds=None)], tmp_path)
  assert not list(tmp_path.iterdir())
