"""Programs of tokamax' caches and the figures of `benchmarks/measured_ops.py`, without tokamax."""

import json
import signal
import subprocess

import numpy as np
import pytest

from benchmarks import cycle_times, measured_ops, tokamax_ops
from tpugraphs_jax.tuning import label_file


def _cache(*rows):
  """A cache from arguments to times of plain XLA, or to another configuration for None."""
  return json.dumps(
    {
      json.dumps(arguments): {"{}": {"evaluation_times_ms": ms}} if ms else {'{"tile":8}': {}}
      for arguments, ms in rows
    }
  )


def test_twins_are_one_program_and_files_without_times_are_named(tmp_path):
  twin = {"x": "bf16[8,128]", "return_residuals": True}
  files = {
    "tpu_v5/norm.json": _cache(
      (twin, [3.0]), (twin | {"return_residuals": False}, [2.0]), ({"x": "f32[4]"}, [1.0])
    ),
    "tpu7x/tiled.json": _cache((twin, None)),
    "tpu7x/empty.json": "",
    "tpu7x/damaged.json": '{"a": ',
    "tpu7x/other.json": '{"{}": {"{}": {}}}',
    "nvidia_h100/norm.json": _cache((twin, [9.0])),
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  programs, without = tokamax_ops.read(tmp_path)
  assert [(program.device, program.operation, program.times_ms) for program in programs] == [
    ("tpu_v5", "norm", (2.0,)),
    ("tpu_v5", "norm", (1.0,)),
  ]
  names = sorted(line.split(":")[0] for line in without)
  assert names == [f"tpu7x/{name}" for name in ("damaged", "empty", "other", "tiled")]


def test_a_larger_sample_contains_the_smaller_one_smallest_programs_first():
  programs = [
    tokamax_ops.Program("tpu7x", operation, json.dumps({"x": f"bf16[{size}]"}), (1.0,))
    for operation in ("a", "b")
    for size in range(1, 9)
  ]
  few, more = (tokamax_ops.sample(programs, count) for count in (3, 5))
  assert len(few) == 6 and {program.name for program in few} < {program.name for program in more}
  assert [program.size for program in more] == sorted(program.size for program in more)
  assert len(tokamax_ops.sample(programs, None)) == 16


@pytest.mark.parametrize(
  "key, bits", [("bf16[2,3]", 96), ("bool[5]", 40), ("f32[]", 32), ("i4[6], u8[2]", 40)]
)
def test_the_size_of_a_program_is_that_of_its_arrays(key, bits):
  assert tokamax_ops.Program("tpu7x", "a", json.dumps({"x": key}), (1.0,)).size == bits


def test_a_crash_of_the_compiler_costs_one_program(tmp_path, monkeypatch):
  work = tokamax_ops.Work(tmp_path)
  statuses = iter([-signal.SIGSEGV, 0])

  def run(*_, **__):
    program = f"program {label_file.count(work.path)}"
    label_file.append(work.path, {"label": "compiled", "libtpu": "1", "program": program})
    return subprocess.CompletedProcess([], next(statuses))

  monkeypatch.setattr(subprocess, "run", run)
  measured_ops.compile_all(work)
  errors = [line for line in label_file.records(work.path) if "error" in line]
  assert [line["program"] for line in errors] == ["program 0"] and "-11" in errors[0]["error"]
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
  with pytest.raises(SystemExit, match="status 1"):
    measured_ops.compile_all(work)


def _record(**operations):
  """A record whose operations have cycles and milliseconds; a million cycles take 2 optimal ms."""
  rows = {
    f"tpu:v6e {name}": {
      "programs": {
        str(place): [ms, 1e6 * cycles, 0, 2e-3 * cycles - 1, 0, 0, 1 + place]
        for place, (cycles, ms) in enumerate(pairs)
      },
      "distinct": len(pairs) + 1,
      "failed": {"ValueError: no": 1},
      "without_estimate": {},
    }
    for name, pairs in operations.items()
  }
  return {"operations": rows}


def test_the_factor_of_an_operation_is_the_median_and_its_errors_are_those_of_the_table():
  found = _record(dot=[(1, 0.5), (2, 1.0), (4, 2.0), (8, 4.8)])
  (line,) = [row for row in measured_ops.table(found).splitlines() if "dot" in row]
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  # .5 ms of a million cycles; the last program is estimated at 4 of its 4.8 ms.
  assert cells[2:7] == ["4", "0.500", "1.000", "4.2%", "100%"]
  assert cells[8:13] == ["1, 0.0%", "4", "0.250", "1.000", "4.2%"] and cells[7] == cells[14]


def test_every_operation_is_estimated_by_the_others_for_the_interval():
  found = _record(a=[(1, 1.0)] * 3, b=[(1, 2.0)] * 30)
  operations = measured_ops.by_generation(found)["tpu:v6e"]
  ratios = {
    name: part.ratios(fitted).tolist()
    for name, (part, fitted) in measured_ops.left_out(operations, "tpu:v6e", "cycles").items()
  }
  assert ratios == {"a": [0.5] * 3, "b": [2.0] * 30}
  (time,) = measured_ops.times(found).values()
  # (x - 1)^2 + (x / 2 - 1)^2 is least at 1.2.
  numbers = {"product_ms": 0.0, "other_ms": 1.2}
  assert time == numbers | {"low": 0.5, "high": 2.0, "programs": 33, "operations": 2}
  assert "1 not compiled: ValueError: no" in measured_ops.without_table(found)


def test_a_program_below_its_least_time_is_outside_of_its_interval(monkeypatch):
  time = cycle_times.Time(0.1, 0.1, low=0.5, high=1.2, programs=4, operations=1)
  monkeypatch.setattr(cycle_times, "times", lambda: {"tpu:v6e": time})
  found = _record(copy=[(1, 0.65), (1, 0.8), (1, 0.8), (1, 0.85)])
  (row,) = found["operations"].values()
  for values in row["programs"].values():
    values[4] = 1.6e9  # bytes, 1 ms at the peak, of which 0.7 ms are counted
  (line,) = [line for line in measured_ops.worth_table(found).splitlines() if "copy" in line]
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  # The first is below 0.7 ms, the last above 0.84 ms.
  assert cells[5:] == ["13%", "50%"]


def test_two_terms_are_fitted_with_operations_of_equal_weight():
  rng = np.random.default_rng(0)
  terms = [rng.uniform(1, 9, 40), rng.uniform(1, 9, 40)]
  ms = 2 * terms[0] + 0.5 * terms[1]
  parts = [
    measured_ops.Part([term[few] for term in terms], ms[few], 0 * ms[few])
    for few in (slice(5), slice(5, None))
  ]
  np.testing.assert_allclose(measured_ops.fit(parts), [2, 0.5])


def test_no_time_is_estimated_below_its_least():
  part = measured_ops.Part([np.array([1.0, 4.0])], np.array([2.0, 4.0]), np.array([2.0, 2.0]))
  assert part.ratios(np.array([1.0])).tolist() == [1.0, 1.0]
