"""The collection of steps, and the record of `benchmarks/step_times.py`."""

from pathlib import Path

import pytest

from benchmarks import step_times
from tests.support import recorded
from tpugraphs_jax.tuning import costs, estimate, programs

# Each compiles in a second or two: a gradient, a sort, a cache, a kernel that fetches rows.
_QUICK = (
  "indices.py:take_gradient",
  "indices.py:top_k",
  "serving.py:rolling_window",
  "kernels.py:gather_rows",
)


def test_a_row_says_what_has_a_time_of_its_schedule_and_what_a_bound():
  kernels = (
    costs.KernelCost("a", milliseconds=3.0),
    costs.KernelCost("b", milliseconds=1.0, is_bound=True, why="it is not known"),
  )
  row = costs.Row("tpu:v6e", milliseconds=4.0, bounded_ms=1.0, kernels=kernels)
  found = step_times.described(row)
  assert found == {"ms": 4.0, "bounded": 0.25, "why": "b: it is not known"}
  assert step_times.described(costs.Row("tpu:v6e", why="no kernel")) == {"why": "no kernel"}


def test_the_table_counts_the_steps_of_each_target():
  steps = {
    "a": {"v6e": {"ms": 1.0}, "7x": {"why": "no kernel"}},
    "b": {"v6e": {"ms": 2.0, "bounded": 0.05, "why": "c: none"}},
  }
  rows = [line.split("|")[1:-1] for line in step_times.table({"steps": steps}).splitlines()]
  counts = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
  assert counts["v6e"] == ["2", "1", "1", "0"] and counts["7x"] == ["1", "0", "0", "1"]
  assert "no kernel" in step_times.missing_table({"steps": steps})


@recorded.needs_libtpu
@pytest.mark.parametrize("source", _QUICK)
def test_steps_have_a_time_from_the_schedules_of_all_kernels(source):
  """Above the time of their bytes: their arguments are read, and their results are written."""
  (program,) = programs.load(str(Path(step_times.STEPS, source)))
  found = estimate.estimate(program.function, *program.args, targets=["v6e", "v5e"])
  for row in found.rows:
    assert row.milliseconds and not any(kernel.is_bound for kernel in row.kernels), row.why
    assert row.milliseconds >= costs.least_ms(row.generation, row.flops, 0)
