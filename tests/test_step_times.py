"""The collection of steps, and the records of their times, sizes and assumed integers."""

from pathlib import Path
import time

import jax
import pytest

from benchmarks import assumed_integers, sizes, step_times
from tests.support import recorded
from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.tuning import compiler, costs, estimate, programs

# Each compiles in a second or two: a gradient, a sort, a cache, a kernel that fetches rows.
_QUICK = (
  "indices.py:take_gradient",
  "indices.py:top_k",
  "serving.py:rolling_window",
  "kernels.py:gather_rows",
)
_SWEPT = ("gather of rows", "sum over rows", "concatenation")


def test_a_row_says_what_has_a_time_of_its_schedule_and_what_a_bound():
  kernels = (
    costs.KernelCost("a", milliseconds=3.0),
    costs.KernelCost("b", milliseconds=1.0, is_bound=True, why="it is not known"),
  )
  row = costs.TargetEstimate("tpu:v6e", milliseconds=4.0, bounded_ms=1.0, kernels=kernels)
  found = step_times.described(row, 2.0)
  assert found == {"ms": 4.0, "bounded": 0.25, "why": "b: it is not known"}
  assert step_times.described(row, 5.0)["least_ms"] == 5.0
  assert step_times.described(costs.TargetEstimate("tpu:v6e", why="no kernel"), 2.0) == {
    "why": "no kernel"
  }


def test_the_table_counts_the_steps_of_each_target():
  steps = {
    "a_b": {"v6e": {"ms": 1.0, "least_ms": 1.5}, "7x": {"why": "no kernel"}},
    "in_c_d": {"v6e": {"ms": 2.0, "bounded": 0.05, "why": "c: none"}},
  }
  rows = [line.split("|")[1:-1] for line in step_times.table({"steps": steps}).splitlines()]
  counts = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
  assert counts["v6e"] == ["2", "1", "1", "0", "1"] and counts["7x"] == ["1", "0", "0", "1", "0"]
  assert "no kernel" in step_times.missing_table({"steps": steps})
  *_, first, second = step_times.all_table({"steps": steps}).splitlines()
  assert first.startswith("| a | b | 1 |") and "no time" in first
  assert second.startswith("| c | d | 2 (5% by a bound) |")


def test_a_part_that_takes_too_long_is_ended():
  with pytest.raises(step_times.Late, match="more than 0.05 s"), step_times.limit(0.05):
    time.sleep(60)
  with step_times.limit(0.05):
    pass
  time.sleep(0.1)  # nothing is raised later


def _row(ms, least_ms=1.0):
  return {"ms": ms, "least_ms": least_ms}


@pytest.mark.parametrize(
  "rows, odd",
  [
    ({"1": _row(1.1), "2": _row(2.2, 2.0), "4": _row(4.4, 4.0)}, []),
    ({"1": _row(0.9)}, [("1", "0.90 of")]),
    ({"1": _row(6.5)}, [("1", "6.5 times its bytes")]),
    ({"1": _row(0.019, 0.001)}, []),  # a launch
    ({"1": _row(1.1), "2": _row(3.5, 2.0)}, [("2", "3.18 times the size before")]),
    ({"1": _row(1.1), "2": _row(1.0, 0.5)}, [("2", "0.91 times the size before")]),
    ({"1": _row(1.1), "2": {"why": "it is data"}, "4": _row(4.4, 4.0)}, [("2", "no time")]),
  ],
)
def test_sizes_whose_times_are_odd_are_listed(rows, odd):
  found = list(sizes.outliers(rows))
  assert [size for size, _ in found] == [size for size, _ in odd]
  assert all(text in why for (_, why), (_, text) in zip(found, odd))


def test_times_with_other_integers_are_parts_of_the_time_with_assumed_ones():
  (case, *_) = assumed_integers.CASES
  times = dict.fromkeys(case.values, 3.0) | {"assumed": 2.0, "extremes": [1.0, 3.0]}
  *_, line = assumed_integers.table({"cases": {case.name: {"v6e": times}}}).splitlines()
  assert "uniform 1.50" in line and "0.50 to 1.50" in line


@pytest.mark.parametrize("case", assumed_integers.CASES, ids=lambda case: case.name)
def test_the_values_of_integers_have_the_shapes_of_their_arguments(case):
  (step,) = programs.load(str(Path(step_times.STEPS, case.source)))
  for arrays in case.values.values():
    for number, values in arrays.items():
      assert values.shape == step.args[number].shape
      assert values.dtype == step.args[number].dtype


@recorded.needs_libtpu
def test_operations_of_the_sweep_take_longer_than_their_bytes_and_twice_as_long_at_twice_the_size(
  tmp_path,
):
  work = step_times.Work(tmp_path)
  with compiler.Compiler() as use:
    for name in _SWEPT:
      make, first, _ = sizes.OPERATIONS[name]
      rows = {
        str(size): sizes.estimate(make(size), f"{name} {size}", "v6e", work, use, 600)
        for size in (2 ** (first + 6), 2 ** (first + 7))
      }
      assert not list(sizes.outliers(rows)), rows


@recorded.needs_libtpu
@pytest.mark.parametrize("source", _QUICK)
def test_steps_have_a_time_from_the_schedules_of_all_kernels(source):
  """Above the time of their bytes: their arguments are read, and their results are written."""
  (program,) = programs.load(str(Path(step_times.STEPS, source)))
  found = estimate.estimate(program.function, *program.args, targets=["v6e", "v5e"])
  for row in found.rows:
    assert row.milliseconds and not any(kernel.is_bound for kernel in row.kernels), row.why
    assert row.milliseconds >= costs.least_ms(row.generation, row.flops, 0)


def test_a_step_that_was_changed_is_compiled_again(tmp_path):
  work, x = step_times.Work(tmp_path), jax.ShapeDtypeStruct((8,), "float32")
  first, changed, same = (
    jaxprs.for_one_device(calls.Call(function, (x,), {}))
    for function in (lambda x: x + 1, lambda x: x + 2, lambda y: y + 1)
  )
  program = tpu.TpuProgram(b"", 0.0, 0, 0.0, tpu.MemoryPlan(0, 0, 0), b"")
  work.write("step", "v6e", first, program)
  assert work.read("step", "v6e", same) == program
  assert work.read("step", "v6e", changed) is None and work.read("step", "v5e", first) is None
