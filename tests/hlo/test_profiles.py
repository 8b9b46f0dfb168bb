"""Profiles: those that jax makes on a CPU, a recorded one of a TPU, made ones, and damaged ones."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import hlo_modules
from tests.support.xplanes import RECORDED, space, write
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import profiles, proto


@pytest.fixture(scope="module")
def of_cpu(tmp_path_factory):
  """A folder of a profile of two programs."""

  @jax.jit
  def twice(x):
    return jnp.tanh(jnp.tanh(x @ x) @ x)

  @jax.jit
  def ordered(x):
    return jnp.sort(x, axis=0)

  x = jnp.ones((64, 64))
  jax.block_until_ready((twice(x), ordered(x)))
  folder = tmp_path_factory.mktemp("profile")
  with jax.profiler.trace(str(folder)):
    for _ in range(3):
      jax.block_until_ready((twice(x), ordered(x)))
  return folder


def test_a_profile_of_a_cpu_has_its_modules_and_the_times_of_their_operations(of_cpu):
  profile = profiles.read(of_cpu)
  by_name = {trace.name.partition("(")[0]: trace for trace in profile.traces}
  assert {"jit_twice", "jit_ordered"} <= by_name.keys()
  twice = by_name["jit_twice"]
  assert twice.runs.calls == 3 and twice.milliseconds > 0
  module = proto.parse_module(profile.modules[twice.name], where="module")
  names = {node.name for node in proto.instructions(module)}
  assert twice.operations.keys() <= names
  assert all(times.calls == 3 for times in twice.operations.values())


def test_featurize_reads_a_module_of_a_profile_by_its_name(of_cpu):
  (file,) = of_cpu.rglob("*.xplane.pb")
  for source in (f"{of_cpu}:jit_twice", f"{file}:jit_twice"):
    graph = hlo.featurize(source)
    assert len(graph.config_node) == 2  # two products
    assert graph.name == "jit_twice"


def test_several_modules_are_listed_with_their_times(of_cpu):
  with pytest.raises(ValueError, match=r"jit_twice\(\d+\) [\d.e-]+ ms.*name one"):
    hlo.featurize(of_cpu)
  with pytest.raises(ValueError, match="0 are 'jit_other'"):
    hlo.featurize(f"{of_cpu}:jit_other")


def test_a_profile_without_modules_says_so(tmp_path):
  with pytest.raises(ValueError, match="without HLO modules"):
    hlo.featurize(write(tmp_path, space([("a", 0, 1)])))


def test_a_recorded_profile_of_a_tpu_has_the_times_that_xprof_shows():
  profile = profiles.read(RECORDED)
  (trace,) = profile.traces
  assert trace.kind == "TPU v6 Lite"
  times = trace.operations["matmul_optimized.1"]
  assert times.calls == trace.runs.calls == 3
  assert times.milliseconds / 3 == pytest.approx(0.07575, abs=5e-6)
  assert [node.opcode for node in hlo.featurize(RECORDED).module.computations[0].instructions] == [
    "parameter",
    "parameter",
    "custom-call",
  ]


def test_the_time_of_a_loop_is_without_that_of_its_body(tmp_path):
  events = [
    ("%while.1 = (s32[]) while(%x)", 0, 100),
    ("%fusion.2 = f32[8] fusion(%x)", 10, 30),
    ("%fusion.2 = f32[8] fusion(%x)", 50, 20),
    ("%copy.3 = f32[8] copy(%x)", 200, 5),
  ]
  (trace,) = profiles.read(write(tmp_path, space(events))).traces
  microseconds = {name: 1e3 * times.milliseconds for name, times in trace.operations.items()}
  assert microseconds == pytest.approx({"while.1": 50, "fusion.2": 50, "copy.3": 5})
  assert trace.operations["fusion.2"].calls == 2


def test_operations_belong_to_the_module_in_which_they_run(tmp_path):
  modules = [("jit_a(1)", 0, 100), ("jit_b(2)", 100, 100), ("jit_a(1)", 200, 100)]
  events = [("x", 10, 5), ("x", 110, 50), ("x", 220, 6)]
  profile = profiles.read(write(tmp_path, space(events, modules=modules)))
  assert [trace.name for trace in profile.traces] == ["jit_b(2)", "jit_a(1)"]
  assert profile.traces[1].operations["x"] == profiles.Times(2, pytest.approx(0.011))
  assert profile.traces[1].runs == profiles.Times(2, pytest.approx(0.2))


def test_hosts_of_the_latest_session_are_summed(tmp_path):
  for session, hosts in (("2026_01_01", 3), ("2026_02_02", 2)):
    folder = tmp_path / "plugins" / "profile" / session
    folder.mkdir(parents=True)
    for host in range(hosts):
      write(folder, space([("x", 0, 4)]), f"host{host}.xplane.pb")
  (trace,) = profiles.read(tmp_path).traces
  assert (trace.devices, trace.operations["x"].calls) == (2, 2)


@pytest.mark.parametrize("kind, devices", [("TPU v6 Lite", 8), ("TPU7x", 2)])
def test_devices_of_one_host_are_summed_and_sparse_cores_are_none(kind, devices, tmp_path):
  made = space([("x", 0, 4)], kind=kind)
  first = made.planes[1]
  for number in range(1, devices):
    made.planes.add().CopyFrom(first)
    made.planes[-1].name = f"/device:TPU:{number}"
  made.planes.add().CopyFrom(first)
  made.planes[-1].name = "/device:TPU:0 SparseCore 0"
  (trace,) = profiles.read(write(tmp_path, made)).traces
  assert (trace.kind, trace.devices, trace.runs.calls) == (kind, devices, devices)
  assert trace.operations["x"] == profiles.Times(devices, pytest.approx(devices * 0.004))


_ROWS = [("7", "fusion.1", 10, 250.0), ("7", "copy.2", 5, 1000.0), ("8", "sort.3", 1, 2.0)]
_IDS = ("program_id", "hlo_op_name", "occurrences", "total_self_time")
_LABELS = ("Program id", "HLO op name", "#Occurrences", "Total self time (us)")


def _as_csv(path):
  with path.open("w", newline="") as file:
    csv.writer(file).writerows([_LABELS, *_ROWS])


def _as_table(path):
  rows = [{"c": [{"v": value} for value in row]} for row in _ROWS]
  path.write_text(json.dumps({"cols": [{"id": id} for id in _IDS], "rows": rows}))


def _as_records(path):
  names = ("program_id", "op_name", "occurrences", "total_self_time_us")
  path.write_text(json.dumps([dict(zip(names, row)) for row in _ROWS]))


@pytest.mark.parametrize(
  "write, ending", [(_as_csv, "csv"), (_as_table, "json"), (_as_records, "json")]
)
def test_the_tables_of_xprof_have_the_same_times(write, ending, tmp_path):
  path = tmp_path / f"hlo_stats.{ending}"
  write(path)
  profile = profiles.read(path)
  assert [(trace.name, trace.operations) for trace in profile.traces] == [
    ("7", {"fusion.1": profiles.Times(10, 0.25), "copy.2": profiles.Times(5, 1.0)}),
    ("8", {"sort.3": profiles.Times(1, 0.002)}),
  ]


@pytest.mark.parametrize(
  "text", ["", "a,b\n1,2\n", "[]", "{}", "[1]", "[" * 10**5, '[{"op_name": "x"}]', "\x00\xff"]
)
def test_other_tables_are_refused(text, tmp_path):
  path = tmp_path / "table.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match="table.csv"):
    profiles.read(path)


@pytest.mark.parametrize("number", ["-1", "nan", "1e400", "x"])
def test_a_time_that_is_none_is_refused(number, tmp_path):
  path = tmp_path / "table.csv"
  path.write_text(f"HLO op name,Total self time (us)\nfusion,{number}\n")
  with pytest.raises(ValueError, match="table.csv"):
    profiles.read(path)


def test_damaged_profiles_never_end_in_another_error(tmp_path):
  good, random = RECORDED.read_bytes(), np.random.default_rng(0)
  for _ in range(300):
    data = bytearray(good[: random.integers(1, len(good) + 1)])
    for place in random.integers(len(data), size=random.integers(1, 8)):
      data[place] = random.integers(256)
    path = tmp_path / "vm.xplane.pb"
    path.write_bytes(bytes(data))
    try:
      profile = profiles.read(path)
    except ValueError as error:
      assert str(path) in str(error)
    else:
      assert all(trace.milliseconds >= 0 for trace in profile.traces)
      assert all(name.isprintable() for name in profile.names())


def test_names_of_a_profile_are_printable(tmp_path):
  modules = [("jit_\x1b[31m(1)", 0, 9)]
  made = space([("a\x1b]0;x\x07", 0, 1)], modules=modules, kind="TPU v6\x1b")
  (trace,) = profiles.read(write(tmp_path, made)).traces
  assert f"{trace.name}{trace.kind}{list(trace.operations)}".isprintable()


def test_another_file_is_no_profile(tmp_path):
  path = tmp_path / "vm.xplane.pb"
  path.write_bytes(hlo_modules.module(hlo_modules.computation()).SerializeToString())
  with pytest.raises(ValueError, match="no profile"):
    profiles.read(path)
  with pytest.raises(FileNotFoundError, match="other.xplane.pb"):
    profiles.read(tmp_path / "other.xplane.pb")
  empty = tmp_path / "empty"
  empty.mkdir()
  with pytest.raises(ValueError, match="no file"):
    profiles.read(empty)


def test_a_profile_that_takes_too_much_memory_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(profiles.machine, "available", lambda: 1000)
  with pytest.raises(ValueError, match="memory"):
    profiles.read(write(tmp_path, space([("x", 0, 1)] * 50)))
