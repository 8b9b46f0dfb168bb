"""Times of whole programs; the stored schedules are libtpu's, of Pallas kernels of this project."""

import numpy as np
import pytest

from tests.support.schedules import CHIP, EMPTY, stored, text
from tpugraphs_jax.hlo import integers, proto
from tpugraphs_jax.tuning.schedule import bundles, chips, executor, kernel, linker, program
from tpugraphs_jax.tuning.schedule.bundles import Unreadable

_ROWS, _REGISTER = 8, 8 * 128 * 4  # blocks of [8, 128] float32 are vector registers
_KERNEL = text(EMPTY, EMPTY, EMPTY)


def _call(name, *registers):
  return f"%1 = inlined_call {', '.join(registers)} /* %{name} = fusion(%x) */"


def _module(*instructions):
  nodes = [proto.HloInstructionProto(name=name, opcode="fusion") for name in instructions]
  return proto.HloModuleProto(
    computations=[proto.HloComputationProto(id=1, instructions=nodes)], entry_computation_id=1
  )


def _simulate(schedules, *instructions, **options):
  return program.Simulation(_module(*instructions), schedules, "tpu:v6e", **options).time(CHIP)


def _stored_time(name, **options):
  return program.Simulation(*stored(name), f"tpu:{name.rpartition('_')[2]}", **options).time()


@pytest.mark.parametrize("target", sorted(chips.chips()))
def test_every_generation_has_constants_that_are_possible(target):
  chip = chips.chips()[target]
  assert 0.5e9 < chip.clock < 3e9
  assert 0.5 < chip.share <= 1
  assert chip.latency >= 0 and chip.start >= 0 and chip.vmem > 0
  assert 0 < chip.written <= 1 and 0 < chip.mixed <= 1
  assert chip.slots in (1, 4, 6) and chip.source


def test_a_pallas_kernel_moves_the_bytes_of_its_blocks():
  time = _stored_time("blocks_v6e")
  (row,) = time.kernels
  assert time.milliseconds > 0 and not time.why
  assert (row.name, row.calls, row.hbm_bytes) == ("add_one.1", 1, 2 * 8 * _REGISTER)
  assert row.bound == "memory"


def test_windows_beyond_the_end_of_an_array_are_clipped():
  (row,) = _stored_time("clipped_v6e").kernels
  assert row.hbm_bytes == 2 * 8 * _REGISTER  # 60 rows in vector registers of 8
  assert not row.why


@pytest.mark.parametrize("target", ["v6e", "v3"])
def test_loops_of_a_kernel_run_as_often_as_its_scalar_prefetch_says(target):
  def executed(times):
    return _stored_time(f"times_{target}", arguments={0: np.array(times)}).kernels[0].bundles

  none = executed([0, 0, 0, 0])
  step = executed([1, 0, 0, 0]) - none
  assert step > 0
  assert executed([3, 0, 7, 1]) - none == pytest.approx(11 * step, abs=4 * step)
  assert executed([0, 0, 90, 0]) - executed([0, 0, 40, 0]) == executed([0, 80, 0, 0]) - executed(
    [0, 30, 0, 0]
  )


def test_a_kernel_without_its_scalar_prefetch_has_no_time():
  time = _stored_time("times_v6e")
  assert time.milliseconds is None
  assert "add_times.1" in time.why and "word" in time.why


def test_operands_of_a_kernel_may_be_given_by_its_name():
  given = _stored_time("times_v6e", operands={"add_times.1": {0: np.array([3, 0, 7, 1])}})
  assert (
    given.milliseconds
    == _stored_time("times_v6e", arguments={0: np.array([3, 0, 7, 1])}).milliseconds
  )


def test_a_kernel_in_a_loop_is_counted_as_often_as_the_loop_runs():
  calls = {row.name: row.calls for row in _stored_time("scan_v6e").kernels}
  assert calls == {"add_one.3": 5, "copy.11": 5}


def test_calls_take_their_cycles_one_after_the_other():
  time = _simulate(
    {"TLP": text(_call("a"), _call("b"), _call("a")), "a": _KERNEL, "b": text(EMPTY)}
  )
  assert time.cycles == 3 + 3 + 1 + 3
  assert time.milliseconds == 1e3 * time.cycles / CHIP.clock
  assert [(row.name, row.calls, row.cycles) for row in time.kernels] == [("a", 2, 6), ("b", 1, 1)]
  assert time.between == 3
  # The call of the next kernel lies between two kernels; what follows the last one counts for none.
  assert {row.name: row.after for row in time.kernels} == {"a": 1, "b": 1}


def test_equal_kernels_share_a_schedule_and_others_have_no_time():
  schedules = {"TLP": text(_call("a"), _call("b")), "a": _KERNEL}
  time = _simulate(schedules, "a", "b")
  assert {row.name: row.twin for row in time.kernels} == {"a": "", "b": "a"}
  alone = _simulate(schedules, "a")
  assert alone.milliseconds is None and "b: the compiler wrote no schedule" in alone.why
  assert alone.cycles == 2 + 3  # the part that has a time


def test_a_copy_hides_behind_kernels_or_stalls():
  copy = (
    "%1 = dma.hbm_to_vmem [thread:$1] /*hbm=*/%s1_s1, /*size_in_granules=*/100, "
    "/*vmem=*/%s2_s2, /*dst_syncflagno=*/[#allocation1]"
  )
  wait = "%2 = dma.done.wait [#allocation1], 100 ;; %3 = vsyncadd [#allocation1], 4294967196"
  slow = {"a": text(*[EMPTY] * 500)}
  hidden = _simulate({"TLP": text(copy, _call("a"), wait), **slow})
  assert (hidden.copy_stall, hidden.cycles) == (0, 3 + 500)
  stalled = _simulate({"TLP": text(_call("a"), copy, wait), **slow})
  assert stalled.copy_stall == 99 + CHIP.latency
  assert stalled.cycles == 3 + 500 + stalled.copy_stall


@pytest.mark.parametrize(
  "second, stalled", [("hbm_to_host_iova", 2 * 800 + 10), ("host_iova_to_hbm", 800 + 10 + 1)]
)
def test_copies_to_and_from_the_host_take_its_link_beside_kernels(second, stalled):
  """In each direction one after the other, 100 granules in 800 cycles; `a` takes 500."""
  copies = (
    f"%{number} = dma.{code} /*src_address=*/%s1_s1, /*host_iova_low=*/%s2_s2, "
    f"/*dst_syncflagno=*/[#allocation{number}], /*size_in_granules=*/100"
    for number, code in enumerate(("hbm_to_host_iova", second), 1)
  )
  wait = "%3 = dma.done.wait [#allocation2], 100 /* local-dma-wait */"
  slow = {"a": text(*[EMPTY] * 500)}
  found = _simulate({"TLP": text(*copies, _call("a"), wait), **slow})
  assert found.copy_stall == stalled - 3 - 500


def test_a_copy_arrives_after_its_latency_although_its_bytes_have_moved():
  copy = (
    "%1 = dma.hbm_to_vmem /*hbm=*/%s1_s1, /*size_in_granules=*/1, /*vmem=*/%s2_s2, "
    "/*dst_syncflagno=*/[#allocation1]"
  )
  wait = "%2 = dma.done.wait [#allocation1], 1 ;; %3 = vsyncadd [#allocation1], 4294967295"
  slow = {"a": text(*[EMPTY] * 50)}
  for empty in (0, 1, 4, 30):
    time = _simulate({"TLP": text(copy, *[EMPTY] * empty, wait, _call("a")), **slow})
    assert time.copy_stall == max(0, 1 + CHIP.latency - (empty + 1)), empty


def test_events_have_the_calls_copies_and_waits_of_a_run():
  copy = (
    "%9 = dma.hbm_to_vmem /*hbm=*/1, /*size_in_granules=*/4, /*vmem=*/2, "
    "/*dst_syncflagno=*/[#allocation1]"
  )
  wait = "%10 = dma.done.wait [#allocation1], 4"
  time = _simulate({"TLP": text(_call("a"), copy, wait, _call("b")), "a": _KERNEL, "b": _KERNEL})
  assert [(event.unit, event.name) for event in time.events] == [
    (program.CALL, "a"),
    (program.DMA, "hbm_to_vmem"),
    (program.WAIT, ""),
    (program.CALL, "b"),
  ]
  first, moved, waited, last = time.events
  assert first.end <= moved.start <= waited.start < waited.end <= last.start < last.end
  assert moved.size == 4 * CHIP.granule and moved.end <= waited.end
  cycles = {row.name: row.cycles for row in time.kernels}
  assert {event.name: event.end - event.start for event in (first, last)} == cycles
  assert waited.end - waited.start == time.copy_stall
  assert last.end <= time.cycles


def test_both_sides_of_a_conditional_count_and_are_named():
  lines = (
    "%1 = dma.hbm_to_smem /*hbm=*/%s1_s1, /*size_in_granules=*/1, /*smem=*/[#allocation3], "
    "/*dst_syncflagno=*/[#allocation1]",
    "%2 = dma.done.wait [#allocation1], 1 ;; %3 = vsyncadd [#allocation1], 4294967295",
    "%s4_s4 = sld [smem:[#allocation3]]",
    "%p5_p0 = scmp.eq.s32.totalorder %s4_s4, 0",
    "%6 = sbr.rel (%p5_p0) target = $region9",
    *[EMPTY] * 4,
    _call("a"),
    "@9 %7 = vnop",
    _call("b"),
  )
  time = _simulate({"TLP": text(*lines), "a": _KERNEL, "b": _KERNEL})
  assert time.conditionals == 1
  assert {row.name for row in time.kernels} == {"a", "b"}


def _loop_on(condition):
  """A program whose loop goes on while a condition on `s1`, which vectors compute, holds."""
  start = ("%s4_s4 = smov 0", "@5 %s1_s1 = spop %9 ;; %s5_s4 = sadd.s32 1, %s4_s4")
  ends = ("%3 = sbr.rel (%p2_p0) target = $region5", *[EMPTY] * 4)
  return {"TLP": text(*start, *condition, _call("a"), *ends), "a": _KERNEL}


def test_calls_of_large_programs_are_those_of_small_ones():
  lines = [_call("a"), _call("b")]
  large = [line.replace("inlined_call", "call") for line in lines]
  kernels = {"a": _KERNEL, "b": text(*[EMPTY] * 7)}
  small, other = (_simulate({"TLP": text(*code), **kernels}, "a", "b") for code in (lines, large))
  assert other == small and len(other.kernels) == 2


@pytest.mark.parametrize("code, copied", [("eq", False), ("ne", True)])
def test_a_donated_parameter_is_not_copied_into_its_output(code, copied):
  """The runtime gives the address of the output; the branch skips the copy if it is the same."""
  lines = (
    "%s1_s1 = sld [smem:[#allocation4]]",
    "%s2_s2 = scalar_parameter_address 3",
    f"%p3_p0 = scmp.{code}.s32.totalorder %s1_s1, %s2_s2",
    "%4 = sbr.rel (%p3_p0) target = $region7",
    *[EMPTY] * 4,
    _call("copy"),
    f"@7 {_call('step')}",
  )
  time = _simulate({"TLP": text(*lines), "copy": _KERNEL, "step": _KERNEL}, "copy", "step")
  assert sorted(row.name for row in time.kernels) == ["copy"] * copied + ["step"]
  assert not time.conditionals


def test_a_loop_that_only_data_ends_has_assumed_iterations():
  loop = _loop_on(["%p2_p0 = scmp.eq.s32.totalorder %s1_s1, 0"])
  simulation = program.Simulation(_module(), loop, "tpu:v6e")
  times = [simulation.time(CHIP)]
  times += [simulation.at(how, {}).time(CHIP) for how in (integers.LOWEST, integers.HIGHEST)]
  assert [time.kernels[0].calls for time in times] == [10, 1, 100]
  assert "loop" in program.simulate(_module(), loop, "tpu:v6e").assumed


def test_a_loop_with_a_counter_that_data_may_end_before_runs_to_its_end():
  condition = (
    "%p6_p1 = scmp.lt.s32.totalorder %s5_s4, 37",
    "%p7_p3 = scmp.eq.s32.totalorder %s1_s1, 0",
    "%p2_p0 = pand %p6_p1, %p7_p3",
  )
  (time,) = _simulate(_loop_on(condition)).kernels
  assert time.calls == 37


def test_a_loop_on_what_is_not_known_has_no_time():
  time = _simulate(_loop_on(["%p2_p0 = sfancy.u32 1, 2"]))
  assert time.milliseconds is None and "sfancy" in time.why


@pytest.mark.parametrize("schedules", [{}, {"TLP": "nothing"}, {"TLP": text(EMPTY)}])
def test_a_program_without_calls_has_no_time(schedules):
  time = _simulate(schedules)
  assert time.milliseconds is None and time.why


def test_damaged_schedules_have_a_reason_and_never_end_in_an_error(monkeypatch):
  monkeypatch.setattr(executor, "MOST_BLOCKS", 20_000)
  _, texts = stored("clipped_v6e")
  lines = texts["add_clipped.1"].splitlines(keepends=True)
  rng = np.random.default_rng(0)
  outcomes = set()
  for _ in range(50):
    damaged = [line for line in lines if rng.random() > 0.02]
    cut = "".join(damaged)[: rng.integers(len(texts["add_clipped.1"]))]
    for changed in ("".join(damaged), cut, cut.replace("s1", "s2"), cut.replace("sadd", "shub")):
      try:
        found = linker.Schedule(bundles.parse(changed), slots=4)
        outcomes.add(kernel.simulate(found, CHIP).cycles >= 0)
      except Unreadable as error:
        outcomes.add(str(error)[:20])
  assert len(outcomes) > 3


def _with_sparse_core(size, *, loop=False):
  """A program whose SparseCore works while `k.1` runs and `k.2` not, in a loop of 5 or in none."""
  shape = proto.ShapeProto(element_type=11, dimensions=[size])
  sparse = b'{"sparse_core_config":{}}'
  nodes = [
    proto.HloInstructionProto(name="x", opcode="parameter", id=1, shape=shape),
    proto.HloInstructionProto(
      name="gather",
      opcode="async-start",
      id=2,
      shape=shape,
      operand_ids=[1],
      called_computation_ids=[7],
      backend_config=sparse,
    ),
    proto.HloInstructionProto(name="k.1", opcode="fusion", id=3),
    proto.HloInstructionProto(name="done", opcode="async-done", id=4, operand_ids=[2], shape=shape),
    proto.HloInstructionProto(name="k.2", opcode="fusion", id=5),
  ]
  part = proto.HloComputationProto(id=1, instructions=nodes, root_id=4)
  inner = proto.HloInstructionProto(name="y", opcode="parameter", id=8, shape=shape)
  copy = proto.HloInstructionProto(name="z", opcode="copy", id=9, shape=shape, operand_ids=[8])
  body = proto.HloComputationProto(id=7, instructions=[inner, copy], root_id=9)
  module = proto.HloModuleProto(computations=[body, part], entry_computation_id=1)
  module.schedule.sequences[1].instruction_ids.extend([1, 2, 3, 4, 5])
  calls = [_call(name) for name in ("k.1", "k.2") for _ in range(5 if loop else 1)]
  schedules = {"TLP": text(*calls), "k.1": text(*[EMPTY] * 100), "k.2": _KERNEL}
  return program.Simulation(module, schedules, "tpu:v6e").time(CHIP)


def test_a_sparse_core_hides_behind_the_kernels_that_run_before_its_result_is_awaited():
  small, large = _with_sparse_core(16), _with_sparse_core(6400)
  gather = lambda time: next(row for row in time.kernels if row.name == "gather")
  kernel_ = next(row for row in small.kernels if row.name == "k.1")
  assert gather(small).cycles == 0 and kernel_.cycles >= 100
  assert gather(large).cycles == large.cycles - small.cycles > 1000


def test_a_sparse_core_in_a_loop_works_in_every_iteration():
  one, looped = _with_sparse_core(6400), _with_sparse_core(6400, loop=True)
  rows = [next(row for row in time.kernels if row.name == "gather") for time in (one, looped)]
  assert (rows[1].calls, rows[1].cycles) == (5, pytest.approx(5 * rows[0].cycles))
