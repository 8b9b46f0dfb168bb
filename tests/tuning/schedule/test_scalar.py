"""The scalar unit: bundles are executed as the core would, and nothing is guessed."""

import numpy as np
import pytest

from tests.support.schedules import CHIP, cost, EMPTY, schedule, text
from tpugraphs_jax.tuning.schedule import bundles, executor, kernel, linker
from tpugraphs_jax.tuning.schedule.arrays import Arrays
from tpugraphs_jax.tuning.schedule.bundles import Unreadable
from tpugraphs_jax.tuning.schedule.words import float_word, function, Unknown

_LOOP = (
  "%s1_s1 = smov 0",
  "@5 %s2_s1 = sadd.s32 1, %s3_s1 ;; %s3_s1 = sphi %s1_s1, %s2_s1",
  "%p4_p0 = scmp.ge.s32.totalorder %s2_s1, {times}",
  "%5 = sbr.rel (!%p4_p0) target = $region5",
  *[EMPTY] * 4,
  EMPTY,
)


def _signed(word):
  return int(np.uint32(word).view(np.int32))


def test_straight_code_takes_a_cycle_a_bundle():
  assert cost("%v1_v1 = vadd.f32 %v2_v2, %v3_v3", EMPTY, EMPTY).cycles == 3


def test_delays_add_their_cycles():
  assert cost("%1 = vdelay 3", EMPTY).cycles == 5


def test_a_block_lasts_until_the_products_of_its_busiest_matrix_unit_are_done():
  wide = "%1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu{} %v1_v1"
  narrow = "%1 = vmatmul.f32.gmra.mxu{} %v1_v1"
  both = f"{wide.format(0)} ;; {narrow.format(1)}"
  twice = CHIP.__class__(**vars(CHIP) | {"rows": 2.0})
  assert cost(both, wide.format(0)).cycles == 32
  assert cost(both, wide.format(0), chip=twice).cycles == 16
  assert cost(both, *[EMPTY] * 60, both).cycles == 62
  assert cost(both, both, *[narrow.format(1)] * 6).cycles == 64


@pytest.mark.parametrize("before, after", [(0, 0), (5, 0), (0, 7), (3, 4)])
def test_what_follows_the_last_product_waits_for_it_where_units_are_drained(before, after):
  product = "%1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v1_v1"
  lines = [EMPTY] * before + [product] * 4 + [EMPTY] * after
  drained = CHIP.__class__(**vars(CHIP) | {"drains": True})
  assert cost(*lines, chip=drained).cycles == before + 4 * 16 + after
  assert cost(*lines).cycles == 4 * 16


@pytest.mark.parametrize("times", [1, 2, 9])
def test_a_loop_runs_as_often_as_its_counter_says(times):
  found = cost(*(line.format(times=times) for line in _LOOP))
  assert found.cycles == found.bundles == 1 + times * 7 + 1


def test_a_branch_may_name_its_region_as_libtpu_before_0_0_35():
  loop = (
    line.format(times=3).replace("= $region5", "bundleno = 1 (0x1), region = 5") for line in _LOOP
  )
  assert cost(*loop).cycles == 1 + 3 * 7 + 1


@pytest.mark.parametrize("outer, inner", [(1, 1), (3, 4), (5, 2)])
def test_nested_loops_multiply(outer, inner):
  found = cost(
    "%s1_s1 = smov 0",
    "@5 %s2_s2 = smov 0",
    "@6 %s4_s2 = sadd.s32 1, %s3_s2 ;; %s3_s2 = sphi %s2_s2, %s4_s2",
    f"%p5_p0 = scmp.ge.s32.totalorder %s4_s2, {inner}",
    "%6 = sbr.rel (!%p5_p0) target = $region6",
    *[EMPTY] * 4,
    "%s8_s1 = sadd.s32 1, %s7_s1 ;; %s7_s1 = sphi %s1_s1, %s8_s1",
    f"%p9_p1 = scmp.ge.s32.totalorder %s8_s1, {outer}",
    "%10 = sbr.rel (!%p9_p1) target = $region5",
    *[EMPTY] * 4,
  )
  assert found.cycles == 1 + outer * (1 + inner * 7 + 7)


@pytest.mark.parametrize("taken, cycles", [(0, 1 + 5 + 3 + 1), (1, 1 + 5 + 1)])
def test_a_branch_skips_its_region(taken, cycles):
  found = cost(
    f"%p1_p0 = scmp.eq.s32.totalorder {taken}, 1",
    "%2 = sbr.rel (%p1_p0) target = $region8",
    *[EMPTY] * 4,
    *[EMPTY] * 3,
    "@8 %v3_v3 = vnop",
  )
  assert found.cycles == cycles


def test_bundles_in_the_slots_of_a_branch_run_although_it_is_taken():
  # The counter is raised in the last slot: the loop ends after three rounds.
  found = cost(
    "%s1_s1 = smov 0",
    "@5 %p4_p0 = scmp.ge.s32.totalorder %s3_s1, 2 ;; %s3_s1 = sphi %s1_s1, %s2_s1",
    "%5 = sbr.rel (!%p4_p0) target = $region5",
    *[EMPTY] * 3,
    "%s2_s1 = sadd.s32 1, %s3_s1",
  )
  assert found.cycles == 1 + 3 * 6


def test_every_operand_is_read_before_a_bundle_writes():
  # s1 and s2 change places in one bundle.
  found = schedule(
    "%s1_s1 = smov 3 ;; %s2_s2 = smov 7",
    "%s3_s1 = smov %s2_s2 ;; %s4_s2 = smov %s1_s1",
    "%6 = sst [smem:[#allocation0]] %s3_s1 ;; %7 = sst [smem:[#allocation0 + $0x1]] %s4_s2",
    "%s8_s3 = sld [smem:[#allocation0]]",
    "%9 = vsyncadd [#allocation1], %s8_s3",
  )
  core = kernel.KernelCore(CHIP, Arrays(CHIP.granule))
  executor.run(found, core, found.registers(core, {}), CHIP)
  assert sorted(core.memory.values()) == [3, 7]
  assert core.memory[min(core.memory)] == 7


def test_a_pointer_of_an_integer_is_read_after_its_bundle_writes_it():
  lines = (
    "%s1_s1 = smov 4 ;; %s2_s2 = int_to_ptr.smem [resolvable:$false] %s1_s1",
    "%3 = dma.hbm_to_vmem %s4_s4, /*size_in_granules=*/%s2_s2, "
    "/*vmem=*/%s5_s5, /*dst_syncflagno=*/[#allocation0]",
    "%6 = dma.done.wait [#allocation0], 4",
  )
  assert cost(*lines).hbm_bytes == 4 * CHIP.granule


@pytest.mark.parametrize("space, shift, bits", [("vmem", 4, 18), ("hbm", 0, 22)])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_array_without_an_address_gets_none_that_another_array_has(space, shift, bits, number):
  operands = [(space, "input"), *[("hbm", "output")] * 3]
  lines = (
    " ;; ".join(
      f"%s{number}_s{number} = inlined_call_operand.{space} "
      f"[shape: s32[8], index: {number}, kind: {kind}, shape index: {{}}]"
      for number, (space, kind) in enumerate(operands)
    ),
    f"%s4_s4 = sshll.u32 %s0_s0, {shift}",
    f"%5 = dma.{space}_to_smem /*{space}=*/%s4_s4, /*size_in_granules=*/1, "
    "/*smem=*/[#allocation1], /*dst_syncflagno=*/[#allocation0]",
    "%6 = dma.done.wait [#allocation0], 1",
    "%s7_s7 = sld [smem:[#allocation1]]",
    "%8 = dma.hbm_to_vmem /*hbm=*/%s1_s1, /*size_in_granules=*/%s7_s7, /*vmem=*/%s9_s9, "
    "/*dst_syncflagno=*/[#allocation2]",
    "%9 = dma.done.wait [#allocation2], %s7_s7",
  )
  moved = [
    cost(*lines, registers={"s0": number << bits}, operands={0: [size] * 8}).hbm_bytes
    for size in (9, 5)
  ]
  assert moved[0] - moved[1] == 4 * CHIP.granule


@pytest.mark.parametrize("holds, size", [(1, 5), (0, 9)])
def test_an_operation_whose_predicate_is_false_keeps_the_old_value(holds, size):
  lines = (
    f"%p1_p0 = scmp.eq.s32.totalorder {holds}, 1 ;; %s2_s1 = smov 9",
    "%s3_s1 = smov (%p1_p0, %s2_s1), 5",
    "%4 = dma.hbm_to_vmem /*hbm=*/%s5_s5, /*size_in_granules=*/%s3_s1, "
    "/*vmem=*/%s6_s6, /*dst_syncflagno=*/[#allocation0]",
    "%7 = dma.done.wait [#allocation0], %s3_s1",
  )
  assert cost(*lines).hbm_bytes == size * CHIP.granule


def test_a_branch_to_a_region_without_a_mark_ends_at_the_exit_bundle():
  lines = text("%1 = sbr.rel target = $region9", *[EMPTY] * 4, EMPTY, EMPTY)
  exit_ = lines.rstrip() + "\n 0x7 PF:  {} /* exit bundle: %copy.1 = copy(%x) */\n"
  found = linker.Schedule(bundles.parse(exit_), slots=4)
  assert kernel.simulate(found, CHIP).cycles == 6


def test_joined_empty_bundles_fill_the_slots_of_a_branch():
  joined = CHIP.__class__(**vars(CHIP) | {"slots": 6, "nops_are_joined": True})
  lines = (
    "%p1_p0 = scmp.eq.s32.totalorder 1, 1",
    "%2 = sbr.rel (%p1_p0) target = $region8",
    "%s3_s1 = smov 2",
    EMPTY,  # stands for five
    "@7 %s4_s1 = smov 3",
    "@8 %s5_s2 = smov 3",
  )
  assert cost(*lines, chip=joined).cycles == 1 + 7 + 1


def test_the_slots_of_a_branch_last_until_the_region_of_the_branch_ends():
  joined = CHIP.__class__(**vars(CHIP) | {"slots": 6, "nops_are_joined": True})
  lines = (
    "@5 %p1_p0 = scmp.eq.s32.totalorder 1, 1",
    "%2 = sbr.rel (%p1_p0) target = $region8",
    EMPTY,
    "%3 = dma.hbm_to_vmem /*hbm=*/0, /*size_in_granules=*/20, /*vmem=*/0, "
    "/*dst_syncflagno=*/[#allocation0]",
    *[EMPTY] * 3,
    "%s4_s1 = smov 3 /* End region 5 */",
    "%s5_s1 = smov 3",
    "@8 %6 = dma.done.wait [#allocation0], 20",
  )
  assert cost(*lines, chip=joined).hbm_bytes == 20 * CHIP.granule


@pytest.mark.parametrize(
  "code, formula",
  [
    ("sadd.s32", lambda a, b: a + b),
    ("ssub.s32", lambda a, b: a - b),
    ("smul.u32", lambda a, b: a * b),
    ("smul.u24", lambda a, b: (a % 2**24) * (b % 2**24)),
    ("sand.u32", lambda a, b: a & b),
    ("sor.u32", lambda a, b: a | b),
    ("sxor.u32", lambda a, b: a ^ b),
    ("smin.u32", min),
    ("smax.u32", max),
    ("smin.s32", lambda a, b: min(_signed(a), _signed(b))),
    ("smax.s32", lambda a, b: max(_signed(a), _signed(b))),
    ("sdivrem.u32.kDiv", lambda a, b: a // b),
    ("sdivrem.u32.kRem", lambda a, b: a % b),
    ("scmp.lt.s32.totalorder", lambda a, b: _signed(a) < _signed(b)),
    ("scmp.ge.s32.totalorder", lambda a, b: _signed(a) >= _signed(b)),
    ("scmp.lt.u32.totalorder", lambda a, b: a < b),
    ("scmp.ne.s32.totalorder", lambda a, b: a != b),
    ("sc.u32", lambda a, b: a + b >= 2**32),
  ],
)
def test_arithmetic_is_that_of_32_bits(code, formula):
  rng = np.random.default_rng(0)
  edges = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
  words = np.concatenate([rng.integers(2**32, size=40), edges]).astype(np.uint32).astype(int)
  compute = function(code)
  for a in words.tolist():
    for b in np.maximum(words[::3], 1).tolist():
      assert int(compute(a, b, None)) == int(formula(a, b)) % 2**32


@pytest.mark.parametrize("shift", [0, 1, 31])
def test_shifts_move_zeros_ones_and_signs(shift):
  word = 0x80000001
  assert function("sshll.u32")(word, shift, None) == (word << shift) % 2**32
  assert function("sshrl.u32")(word, shift, None) == word >> shift
  assert function("sshra.s32")(word, shift, None) == (_signed(word) >> shift) % 2**32
  assert function("sshllo.u32")(0, shift, None) == 2**shift - 1


def test_a_division_waits_in_a_queue():
  lines = (
    "%1 = sdivrem.u32 17, 5 /* kRem */",
    "%s2_s1 = spop.drf %1",
    "%4 = dma.hbm_to_vmem /*hbm=*/%s5_s5, /*size_in_granules=*/%s2_s1, "
    "/*vmem=*/%s6_s6, /*dst_syncflagno=*/[#allocation0]",
    "%7 = dma.done.wait [#allocation0], 2",
  )
  assert cost(*lines).hbm_bytes == 2 * CHIP.granule


@pytest.mark.parametrize("used, word", [("%s2_s1", 3), ("%s3_s2", 2)])
def test_a_quotient_leaves_the_queue_before_its_remainder(used, word):
  lines = (
    "%1 = sdivrem.u32 17, 5 /* kDivAndRem */",
    "%s2_s1 = spop.drf %1",
    "%s3_s2 = spop.drf %1",
    f"%4 = dma.hbm_to_vmem /*hbm=*/%s5_s5, /*size_in_granules=*/{used}, "
    "/*vmem=*/%s6_s6, /*dst_syncflagno=*/[#allocation0]",
    f"%7 = dma.done.wait [#allocation0], {word}",
  )
  assert cost(*lines).hbm_bytes == word * CHIP.granule


def test_a_division_with_one_result_gives_it_to_each_branch():
  lines = (
    "%1 = sdivrem.u32 17, 5 /* kDiv */",
    "%s2_s1 = spop.drf %1",
    "%s3_s2 = spop.drf %1",
    "%4 = dma.hbm_to_vmem /*hbm=*/%s5_s5, /*size_in_granules=*/%s3_s2, "
    "/*vmem=*/%s6_s6, /*dst_syncflagno=*/[#allocation0]",
    "%7 = dma.done.wait [#allocation0], 3",
  )
  assert cost(*lines).hbm_bytes == 3 * CHIP.granule


def test_a_division_has_at_most_two_results():
  pops = [f"%s{number}_s{number} = spop.drf %1" for number in (2, 3, 4)]
  with pytest.raises(Unreadable, match="more than two results"):
    cost("%1 = sdivrem.u32 17, 5 /* kDivAndRem */", *pops)


def _branch_on(operation: str) -> tuple[str, ...]:
  return (operation, "%9 = sbr.rel (%p1_p0) target = $region8", *[EMPTY] * 4, "@8 %v3_v3 = vnop")


def test_what_vectors_decide_runs_and_a_loop_that_they_alone_end_has_assumed_iterations():
  word, skips = "%s1_s1 = spop %9", _branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0")
  found = cost(word, *skips)
  assert (found.cycles, found.branches) == (1 + len(skips), 1)
  loop = ("@8 %p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0", *skips[1:-1])
  found = cost(word, *loop, iterations=7)
  assert found.cycles == 1 + 7 * len(loop) and found.has_open_loops


def test_a_kernel_of_xla_runs_what_a_word_without_a_value_decides():
  word, skips = (
    "%s1_s1 = sld [smem:[#allocation1]]",
    _branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0"),
  )
  assert cost(word, *skips, is_of_xla=True).cycles == 1 + len(skips)
  with pytest.raises(Unreadable, match="word"):
    cost(word, *skips)


@pytest.mark.parametrize(
  "lines, why",
  [
    (_branch_on("%p1_p0 = sfancy.u32 1, 2"), "sfancy"),
    (_branch_on("%p1_p0 = scmp.gt.bf16.partialorder 1.0, 2.0"), "not known"),
    (
      ("%s1_s1 = scvt.f32.s32 2.5", *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 2")),
      "2.5 becomes an integer",
    ),
    (
      (
        "%s1_s1 = inlined_call_operand.<no memory space> [shape: s32[], index: 3, kind: input]",
        *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0"),
      ),
      "operand 3",
    ),
    (
      (
        "%s2_s1 = sld [smem:[#allocation1]]",
        *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s2_s1, 0"),
      ),
      "word",
    ),
    (("%s1_s1 = sadd.s32 1", *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0")), "operands"),
    (
      ("%s1_s1 = sadd.f32 1.0", *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s1_s1, 0")),
      "operand",
    ),
    (
      (
        "%1 = sdivrem.u32 17, 5 /* kDivAndRem */",
        *_branch_on("%p1_p0 = scmp.gt.f32.partialorder %1, 1.0"),
      ),
      "another type",
    ),
    (("%1 = sbr.rel target = $region77", *[EMPTY] * 4), "no target"),
    (
      ("%1 = sbr.rel target = $region7", "%2 = sbr.rel target = $region7", *[EMPTY] * 5, "@7 {}"),
      "slots",
    ),
    (("%1 = dma.mystery",), "unknown"),
    (("%s1_s1 = sadd.s32 1, ?",), "cannot be read"),
    (("%1 = swhatever %s2_s2",), "swhatever"),
  ],
)
def test_what_is_not_understood_has_no_time_and_a_reason(lines, why):
  with pytest.raises(Unreadable, match=why):
    cost(*lines)


@pytest.mark.parametrize("code", ["sadd", "ssub", "smul", "smin", "smax"])
def test_scalar_arithmetic_is_that_of_float32(code):
  rng = np.random.default_rng(0)
  pairs = rng.normal(size=(50, 2)).astype(np.float32) * np.float32(1e3)
  edges = np.array([[0.1, 0.2], [3e38, 3e38], [-0.0, 0.0], [1e-40, 1.0]], np.float32)
  expected = {"sadd": np.add, "ssub": np.subtract, "smul": np.multiply}
  expected |= {"smin": np.minimum, "smax": np.maximum}
  for a, b in (*pairs, *edges):
    with np.errstate(all="ignore"):
      result = expected[code](a, b)
    words = (int(number.view(np.uint32)) for number in (a, b))
    assert function(f"{code}.f32")(*words, None) == int(result.view(np.uint32))


@pytest.mark.parametrize("rows, blocks", [(1, 1), (128, 1), (129, 2), (1000, 8)])
def test_a_loop_may_run_as_often_as_float32_arithmetic_says(rows, blocks):
  found = cost(
    "%p9_p2 = scmp.gt.f32.partialorder 1e300, 1e38",
    f"%s10_s1 = scvt.s32.f32 {rows}",
    "%s11_s1 = smul.f32 0.0078125, %s10_s1",
    "%s12_s1 = sceil.f32 %s11_s1",
    "%p13_p1 = scmp.lt.f32.partialorder %s12_s1, 0.0",
    "%s14_s3 = scvt.f32.s32 %s12_s1",
    "%s15_s3 = smov (!%p13_p1, 77), %s14_s3",
    *(line.format(times="%s15_s3") for line in _LOOP),
  )
  assert found.cycles == 7 + 1 + 7 * blocks + 1


def test_negative_words_keep_their_sign_as_float32():
  to_float, to_integer = function("scvt.s32.f32"), function("scvt.f32.s32")
  for number in (0, 1, -1, -4096, 2**20):
    word = to_float(number & 0xFFFFFFFF, None, None)
    assert _signed(to_integer(word, None, None)) == number
    assert function("scmp.lt.f32.partialorder")(word, 0, None) is (number < 0)
  for number in (np.inf, np.nan, 3e9, 0.5):
    assert isinstance(to_integer(float_word(number), None, None), Unknown)


def test_a_dma_whose_predicate_is_false_never_starts():
  dma = (
    "dma.general {}src=%s1_s1, size_in_granules={}, dst_syncflagno=[#allocation0] /* hbm-to-vmem */"
  )
  lines = (f"%4 = {dma.format('(0), ', 99)}", f"%5 = {dma.format('', 3)}")
  found = cost(*lines, "%7 = dma.done.wait [#allocation0], 3")
  assert found.hbm_bytes == 3 * CHIP.granule


def test_what_decides_nothing_may_be_unknown():
  lines = ("%s1_s1 = sfancy.u32 1, 2", "%s2_s2 = sadd.s32 1, %s1_s1", "%3 = shalt.err (%p4_p4)")
  assert cost(*lines).cycles == 3


@pytest.mark.parametrize("first, second, cycles", [(1, 0, 7), (0, 1, 9), (0, 0, 10)])
def test_of_two_branches_in_each_others_slots_the_one_that_is_taken_jumps(first, second, cycles):
  lines = (
    f"%p1_p0 = scmp.eq.s32.totalorder {first}, 1 ;; %p2_p1 = scmp.eq.s32.totalorder {second}, 1",
    "%1 = sbr.rel (%p1_p0) target = $region7",
    "%2 = sbr.rel (%p2_p1) target = $region8",
    *[EMPTY] * 5,
    "@8 {}",
    "@7 {}",
  )
  assert cost(*lines).cycles == cycles


def test_a_region_that_begins_in_the_slots_of_a_branch_can_be_entered_from_elsewhere():
  lines = (
    "%s1_s1 = smov 0",
    "%1 = sbr.rel target = $region7",  # over the branch below, into its slots
    *[EMPTY] * 4,
    "%2 = sbr.rel target = $region9",
    EMPTY,
    "@7 {}",
    *[EMPTY] * 3,
    "@9 {}",
  )
  assert cost(*lines).cycles == 2 + 4 + 4 + 1


def test_a_store_at_an_unknown_address_forgets_the_words_of_its_allocation():
  lines = (
    "%s1_s1 = sld [smem:[#allocation3]]",
    "%1 = sst [smem:[#allocation1]] 1 ;; %2 = sst [smem:[#allocation2]] 1",
    "%3 = sst [smem:[#allocation1 + %s1_s1]] 2",
    "%s4_s4 = sld [smem:[#allocation{}]]",
    *_branch_on("%p1_p0 = scmp.eq.s32.totalorder %s4_s4, 0"),
  )
  assert cost(*(line.format(2) for line in lines)).cycles
  with pytest.raises(Unreadable, match="word"):
    cost(*(line.format(1) for line in lines))


def test_a_loop_that_does_not_end_has_no_time(monkeypatch):
  monkeypatch.setattr(executor, "MOST_BLOCKS", 100)
  with pytest.raises(Unreadable, match="does not end"):
    cost("@5 %1 = sbr.rel target = $region5", *[EMPTY] * 4)


def test_a_text_without_bundles_or_of_too_many_bytes_is_refused(monkeypatch):
  with pytest.raises(Unreadable, match="no bundles"):
    bundles.parse("hello")
  with pytest.raises(Unreadable, match="an operation has"):
    bundles.parse(text("%s1_s1 = sadd.s32 1, " + "1 + " * 10_000 + "1"))
  monkeypatch.setattr(bundles, "MOST_TEXT", 10)
  with pytest.raises(Unreadable, match="MB"):
    bundles.parse(text(EMPTY))


def test_what_follows_a_loop_does_not_run_in_the_slots_of_its_branch():
  """Where empty bundles are joined: the region around the loop ends where the slots would end."""
  lines = (
    "@1 %s1_s1 = smov 0",
    "@5 %s2_s1 = sadd.s32 1, %s3_s1 ;; %s3_s1 = sphi %s1_s1, %s2_s1",
    "%p4_p0 = scmp.ge.s32.totalorder %s2_s1, 3",
    "%5 = sbr.rel (!%p4_p0) target = $region5",
    EMPTY,
    "%s6_s1 = smov 0",
    "%s7_s1 = smov 0 /* End region 1 */",
    *[EMPTY] * 4,
  )
  joined = CHIP.__class__(**vars(CHIP) | {"nops_are_joined": True})
  ends = [line.replace("/* End region 1 */", "} /* End region 1 */") for line in lines]
  assert cost(*ends, chip=joined).cycles == 1 + 3 * 7 + 2 + 4
