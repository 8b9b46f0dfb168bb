"""DMAs beside a core: when they arrive, what waits for them, and waits that nothing ends."""

import pytest

from tests.support.schedules import CHIP, cost, EMPTY
from tpugraphs_jax.tuning.schedule import bundles, chips, kernel
from tpugraphs_jax.tuning.schedule.arrays import Arrays
from tpugraphs_jax.tuning.schedule.bundles import Unreadable


def _dma(size, flag, code="hbm_to_vmem", predicate=""):
  source, _, destination = code.partition("_to_")
  return (
    f"%1 = dma.{code} [thread:$0] {predicate} /*{source}=*/%s1_s1, /*size_in_granules=*/{size}, "
    f"/*{destination}=*/%s2_s2, /*dst_syncflagno=*/[#allocation{flag}]"
  )


def _wait(size, flag):
  return f"%2 = dma.done.wait [#allocation{flag}], {size} /* local-dma-wait */"


def _take(size, flag):
  return f"%3 = vsyncadd [#allocation{flag}], {2**32 - size}"


def test_a_wait_lasts_until_the_last_byte_has_arrived():
  found = cost(_dma(100, 1), EMPTY, _wait(100, 1), _take(100, 1))
  # Started in cycle 0: a granule a cycle, then the latency; the wait begins in cycle 2.
  assert found.stall == 100 + CHIP.latency - 2
  assert found.cycles == 4 + found.stall
  assert (found.hbm_bytes, found.vmem_bytes, found.dmas) == (3200, 0, 1)
  assert found.bound == "memory"


def test_a_dma_that_arrived_before_the_wait_costs_nothing():
  found = cost(_dma(5, 1), *[EMPTY] * 30, _wait(5, 1), _take(5, 1))
  assert (found.stall, found.cycles) == (0, 33)


def test_the_hbm_moves_one_dma_after_the_other():
  found = cost(_dma(100, 1), _dma(50, 2), _wait(50, 2), _take(50, 2), _wait(100, 1), _take(100, 1))
  assert found.cycles == 2 + (150 + CHIP.latency - 2) + 4  # the second wait finds its DMA there


def test_waits_may_come_in_another_order_than_their_dmas():
  lines = [_dma(10, 1), _dma(10, 2)]
  waits = [[_wait(10, flag), _take(10, flag)] for flag in (1, 2)]
  arrival = 20 + CHIP.latency  # of the second DMA, after which two or four bundles are left
  assert cost(*lines, *waits[0], *waits[1]).cycles == arrival + 2
  assert cost(*lines, *waits[1], *waits[0]).cycles == arrival + 4


def test_two_dmas_on_one_flag_are_awaited_together_or_one_by_one():
  lines = [_dma(10, 1), _dma(20, 1)]
  together = cost(*lines, _wait(30, 1), _take(30, 1))
  alone = cost(*lines, _wait(10, 1), _take(10, 1), _wait(20, 1), _take(20, 1))
  assert together.stall == 30 + CHIP.latency - 2
  assert alone.stall == together.stall - 2  # two bundles more pass before the last wait


def test_dmas_on_the_chip_do_not_use_the_hbm():
  found = cost(_dma(100, 1, "vmem_to_vmem"), _wait(100, 1), _take(100, 1))
  assert (found.hbm_bytes, found.vmem_bytes) == (0, 3200)
  assert found.stall == 50 - 1


def test_a_copy_within_the_hbm_moves_its_bytes_twice():
  found = cost(_dma(100, 1, "hbm_to_hbm"), _wait(100, 1))
  assert (found.hbm_bytes, found.stall) == (6400, 200 + CHIP.latency - 1)


@pytest.mark.parametrize(
  "first, second, lasts",
  [
    ("hbm_to_host_iova", "hbm_to_host_iova", 1600),  # one after the other
    ("hbm_to_host_iova", "host_iova_to_hbm", 1 + 800),  # both at a time
    ("hbm_to_host_iova", "hbm_to_vmem", 200),  # the second passes the HBM alone
  ],
)
def test_copies_to_and_from_the_host_take_its_link_in_their_direction(first, second, lasts):
  found = cost(_dma(100, 1, first), _dma(100, 2, second), _wait(100, 2))
  assert found.cycles == lasts + CHIP.latency + 1
  assert found.hbm_bytes == 6400


@pytest.mark.parametrize(
  "first, second, lasts",
  [
    ("hbm_to_vmem", "hbm_to_vmem", 100 + 100),
    ("vmem_to_hbm", "vmem_to_hbm", 200 + 200),
    ("hbm_to_vmem", "vmem_to_hbm", 100 + 400),
    ("vmem_to_hbm", "hbm_to_vmem", 200 + 200),
    ("hbm_to_vmem", "general", 100 + 100),
    ("hbm_to_vmem", "general, written", 100 + 400),
  ],
)
def test_dmas_to_the_hbm_and_beside_others_of_the_other_direction_are_slower(first, second, lasts):
  slow = CHIP.__class__(**vars(CHIP) | {"written": 0.5, "mixed": 0.5})
  code, _, is_written = second.partition(", ")
  overrides = f", /*overrides=*/{0 if is_written else 1 << 27}" if code == "general" else ""
  lines = _dma(100, 1, first), _dma(100, 2, code) + overrides, _wait(100, 2)
  assert cost(*lines, chip=slow).stall == lasts + CHIP.latency - 2


@pytest.mark.parametrize("first, second", [(30, 100), (100, 30), (100, 100)])
def test_only_as_many_bytes_are_slower_as_are_on_their_way_in_the_other_direction(first, second):
  slow = CHIP.__class__(**vars(CHIP) | {"mixed": 0.5})
  lines = [_dma(first, 1), _dma(second, 2, "vmem_to_hbm"), _dma(10, 3), _wait(10, 3)]
  met = min(first, second) + min(10, second)  # the last one meets the second once more
  lasts = first + second + 10 + met
  assert cost(*lines, chip=slow).stall == lasts + CHIP.latency - 3


def test_a_dma_after_one_of_the_other_direction_is_not_slower():
  slow = CHIP.__class__(**vars(CHIP) | {"mixed": 0.5})
  lines = _dma(10, 1), _wait(10, 1), _dma(100, 2, "vmem_to_hbm"), _wait(100, 2)
  assert cost(*lines, chip=slow).stall == 10 + CHIP.latency - 1 + 100 + CHIP.latency - 1


def test_a_clipped_window_is_paid_by_the_core():
  # 12 of 16 granules are inside: the core adds the 4 that no DMA moves.
  found = cost("%9 = vsyncadd [#allocation1], 4", _dma(12, 1), _wait(16, 1), _take(16, 1))
  assert found.stall == 12 + CHIP.latency - 1


def test_a_check_that_a_flag_is_clear_at_the_end_costs_its_bundles_alone():
  lines = _dma(16, 1), _wait(16, 1), _take(16, 1)
  check = (
    "%5 = vsyncmov [#allocation1]",
    "%s6_s3 = vpop.sfrf %5",
    "%p7_p1 = scmp.ne.s32.totalorder %s6_s3, 0",
    "%8 = shalt.err (%p7_p1)",
  )
  assert cost(*lines, *check).cycles == cost(*lines).cycles + len(check)


@pytest.mark.parametrize("between, waits", [(0, 6), (3, 3), (6, 0), (20, 0)])
def test_a_dma_is_started_some_cycles_after_the_one_before(between, waits):
  busy = CHIP.__class__(**vars(CHIP) | {"start": 7.0})
  found = cost(_dma(1, 1), *[EMPTY] * between, _dma(1, 1), EMPTY, chip=busy)
  assert (found.cycles, found.stall) == (between + 3 + waits, 0)


def test_a_dma_to_the_hbm_has_a_latency_of_its_own():
  chip = CHIP.__class__(**vars(CHIP) | {"latency_written": 3.0})
  for code, latency in (("hbm_to_vmem", 10), ("vmem_to_hbm", 3), ("hbm_to_hbm", 10)):
    twice = 2 if code == "hbm_to_hbm" else 1
    assert cost(_dma(50, 1, code), _wait(50, 1), chip=chip).stall == 50 * twice + latency - 1


@pytest.mark.parametrize("traces, waits", [(1, 0), (1023, 0), (1024, 0), (1500, 4 * 476 - 1500)])
def test_events_for_a_profiler_bound_a_kernel_that_writes_many(traces, waits):
  slow = CHIP.__class__(**vars(CHIP) | {"trace": 4.0})
  lines = ["%1 = vtrace 2415919104"] * traces
  assert cost(*lines, chip=slow).cycles == traces + waits


def test_a_wait_takes_the_core_its_cycles_although_the_dma_has_arrived():
  slow = CHIP.__class__(**vars(CHIP) | {"wait": 7.0})
  lines = (_dma(1, 1), *[EMPTY] * 40, _wait(1, 1))
  assert cost(*lines, chip=slow).cycles == cost(*lines).cycles + 7
  assert cost(*lines, chip=slow).stall == 0


def test_a_dma_whose_predicate_is_false_is_not_started():
  lines = ("%p1_p0 = scmp.eq.s32.totalorder 1, 2", _dma(9, 1, predicate="(%p1_p0),"), EMPTY)
  assert cost(*lines).dmas == 0


def test_a_descriptor_in_scalar_memory_is_a_dma():
  words = {0: 5, 1: 1024, 2: 8 << 16 | 8, 3: 9, 4: 512, 5: 8 << 16 | 8, 6: 0x1400000 | 16, 7: 7168}
  stores = [f"%{n} = sst [smem:[#allocation1 + {n:#x}]] {word}" for n, word in words.items()]
  lines = ["%s8_s9 = sor.u32 7168, [#allocation2]", *stores[:7]]
  lines += ["%7 = sst [smem:[#allocation1 + 0x7]] %s8_s9", "%10 = dma [#allocation1]"]
  found = cost(*lines, _wait(16, 2), _take(16, 2))
  assert found.hbm_bytes == 16 * CHIP.granule


@pytest.mark.parametrize(
  "lines, why",
  [
    ((_wait(1, 1),), "nothing starts"),
    ((_dma(3, 1), _wait(4, 1)), "nothing starts"),
    ((_dma(3, 1), _wait(3, 1), _take(3, 1), _wait(3, 1)), "nothing starts"),
    ((_dma("%s4_s4", 1),), "size of a DMA"),
    (("%1 = dma.hbm_to_vmem /*size_in_granules=*/1",), "flag"),
    (
      (
        "%1 = dma.hbm_to_smem /*hbm=*/%s1_s1, /*size_in_granules=*/1073741824, "
        "/*smem=*/[#allocation2], /*dst_syncflagno=*/[#allocation1]",
      ),
      "words into scalar memory",
    ),
    (("%1 = vwait.lt [#allocation1], 3",), "vwait.lt"),
    (("%1 = vsyncset [#allocation1], 3",), "vsyncset"),
    (("%1 = inlined_call %s1_s1 /* %f = fusion(%x) */",), "calls"),
  ],
)
def test_waits_that_nothing_ends_and_unknown_sizes_have_no_time(lines, why):
  with pytest.raises(Unreadable, match=why):
    cost(*lines)


@pytest.mark.parametrize("place", range(4))  # among the flags of an allocation
def test_a_dma_that_a_core_starts_for_both_raises_the_flag_of_its_own_core(place):
  core = kernel.KernelCore(chips.chips()["tpu:v5p"], Arrays(32))
  flag = (3 << 18) + place
  of_both = flag | (flag | 0x6000) << 16 & 0xFFFFFFFF  # as schedules of a v5p compute it
  core.start_dma("dma.hbm_to_vmem", 0.0, {"size_in_granules": 32, "dst_syncflagno": of_both})
  assert core.wait("dma.done.wait", 0.0, flag, 32) > 0


def test_two_cores_that_execute_one_program_do_not_wait_for_each_other():
  """As on a v4: each signals to the other, waits for its signal, and takes the count."""
  lines = (
    "%1 = vsyncadd.remote %s1_s1, 1",
    "%2 = vwait.ge.trace [#allocation4], 1 /* barrier-megacore-wait */",
    "%3 = vsyncadd [#allocation4], 4294967295",
  )
  assert cost(*lines, *lines).cycles == 6


def _of_core(number, *lines):
  """Bundles that only one core of a chip executes."""
  return (
    "%s70_s1 = sld [smem:[#allocation7]] /* core id */",
    f"%p70_p1 = scmp.ne.s32.totalorder %s70_s1, {number}",
    f"%71 = sbr.rel (%p70_p1) target = $region{number + 8}",
    *[EMPTY] * CHIP.slots,
    *lines,
    f"@{number + 8} {EMPTY}",
  )


@pytest.mark.parametrize("word, granules", [(0, 0), (5, 50)])
def test_words_that_the_other_core_of_a_chip_sends_decide_what_it_moves(word, granules):
  """As in a scatter on v5p: the second core takes the indices apart for the first one."""
  wait = "%80 = dma.done.wait [#allocation4], 4 ;; %81 = vsyncadd [#allocation4], 4294967292"
  sends = (
    f"%82 = sst [smem:[#allocation2]] {word}",
    "%83 = vwait.lt.trace [#allocation5], 4",
    "%s84_s2 = sor.u32 16384, [#allocation4] ;; %s85_s3 = sor.u32 131072, [#allocation3] ;; "
    "%s86_s4 = smov [#allocation2]",
    "%87 = dma.general /*src=*/%s86_s4, /*size_in_granules=*/4, /*dst=*/%s86_s4, "
    "/*dst_syncflagno=*/%s84_s2, /*src_syncflagno=*/%s85_s3 /* smem-to-smem */",
    wait.replace("allocation4", "allocation3"),
  )
  receives = (
    wait,
    "%88 = vsyncadd.remote %s1_s1, 4294967295",
    "%s89_s5 = sld [smem:[#allocation2]]",
  )
  runs = (
    "%s90_s6 = smul.u32 %s89_s5, 10",
    "%91 = dma.hbm_to_vmem /*hbm=*/%s1_s1, /*size_in_granules=*/%s90_s6, /*vmem=*/%s2_s2, "
    "/*dst_syncflagno=*/[#allocation6]",
    "%92 = dma.done.wait [#allocation6], %s90_s6",
  )
  lines = (*_of_core(1, *sends), *_of_core(0, *receives, *runs))
  assert cost(*lines).hbm_bytes == granules * 32
  with pytest.raises(Unreadable, match="nothing starts"):
    cost(*_of_core(0, *receives, *runs))


def test_words_for_the_other_core_arrive_before_dmas_that_were_started_earlier():
  core = kernel.KernelCore(CHIP, Arrays(CHIP.granule))
  core.start_dma("dma.hbm_to_vmem", 0.0, {"size_in_granules": 1_000, "dst_syncflagno": 1 << 18})
  core.start_dma(
    bundles.MESSAGE,
    0.0,
    {"src": 0, "dst": 0, "size_in_granules": 2, "dst_syncflagno": 2 << 18, "src_syncflagno": 0},
  )
  ((message,),) = core.sent.values()
  assert message.arrival == 2 * CHIP.granule / CHIP.vmem
