"""Costs of functions on TPUs, from modules as the compiler writes them and from the compiler."""

import contextlib
import importlib
import json
import os
import re
import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import hlo_modules, recorded, schedules, slices
import tpugraphs_jax
from tpugraphs_jax.hlo import integers, proto, topology, tpu
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import compiler, costs, estimate, estimate_command, summary
from tpugraphs_jax.tuning.schedule import chips, program

_MEMORY = tpu.MemoryPlan(arguments=2**31, outputs=2**30, temporaries=2**30)
_LARGE = (4096, 4096)  # the product of two takes .15 ms at the peak of a v6e, its bytes less


def _node(
  opcode, place, *, cycles=None, line=1, shape=(64, 64), target="", callees=(), operands=()
):
  node = hlo_modules.instruction(opcode, place, operands, shape, callees)
  if opcode == "dot":
    node.dot_dimension_numbers.lhs_contracting_dimensions.append(1)
  node.metadata.op_name = f"jit(f)/{opcode}_of_jax"
  node.metadata.source_file, node.metadata.source_line = "/home/me/model.py", line
  node.custom_call_target = target
  if cycles is not None:
    node.backend_config = json.dumps({"window_config": {"estimated_cycles": str(cycles)}}).encode()
  return node


def _program(*nodes, callees=()):
  module = hlo_modules.module(*callees, hlo_modules.computation(*nodes, id=9))
  module.entry_computation_id = 9
  return tpu.TpuProgram(module.SerializeToString(), -2.0, 1, 1.0, _MEMORY, None)


def _execute(module, schedules, target, **_):
  """A stand-in of `program.simulate`: kernels take their cycles, in one call or `schedules[name]`.

  `TLP` is the reason why there is no time.
  """
  clock, kernels = chips.chips()[target].clock, []
  for part in module.computations:
    for node in part.instructions:
      if node.backend_config:
        cycles = int(json.loads(node.backend_config)["window_config"]["estimated_cycles"])
        calls = schedules.get(node.name, 1)
        kernels.append(program.KernelTime(node.name, calls, calls * cycles, bound="memory"))
  total, why = sum(kernel.cycles for kernel in kernels), schedules.get("TLP", "")
  ms = None if why else 1e3 * total / clock
  return program.ProgramTime(ms, why, total, 0.0, 0.0, tuple(kernels), 0, stopped=why)


@pytest.fixture
def compiled(monkeypatch):
  """Sets what the compiler makes of any function, or the error with which it fails.

  Gives back the calls that are compiled.
  """
  calls = []

  def answer(outcome):
    def compile_lowered(lowered):
      del lowered
      if isinstance(outcome, Exception):
        raise outcome
      return outcome

    def lowered(call, target, *, placement=None):
      calls.append(call)
      return compiler.Lowered(b"", target, {}, ())

    process = contextlib.nullcontext(
      types.SimpleNamespace(compile_lowered=compile_lowered, kernels=0)
    )
    monkeypatch.setattr(compiler, "Compiler", lambda **_: process)
    monkeypatch.setattr(compiler, "lower", lowered)
    return calls

  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target}")
  monkeypatch.setattr(tpu, "libtpu_version", lambda: "0.0.42.1")
  monkeypatch.setattr(tpu, "as_device", lambda target: contextlib.nullcontext())
  monkeypatch.setattr(program, "simulate", _execute)
  return answer


def step(x=1.0):
  return x


def test_ctrl_c_leaves_the_rows_of_targets_that_are_done(compiled, monkeypatch):
  """The compilation of the other target, which never ends, is ended."""
  compiled(None)
  program_ = _program(_node("copy", 1, cycles=10**6))
  has_row, ended = threading.Event(), threading.Event()

  class Process:
    kernels = 0

    def __enter__(self):
      return self

    def __exit__(self, *error):
      ended.set()

    def compile_lowered(self, lowered):
      if lowered.target == "tpu:v5e":
        return program_
      has_row.wait()
      os.kill(os.getpid(), signal.SIGINT)
      ended.wait()
      raise compiler.Ended("killed")

  monkeypatch.setattr(compiler, "Compiler", lambda **_: Process())
  monkeypatch.setattr(console.Work, "update", lambda _: has_row.set())
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one target after the other
  with pytest.raises(KeyboardInterrupt) as raised:
    tpugraphs_jax.estimate(step, 1.0, targets=["v5e", "v6e"])
  done, stopped = raised.value.estimate.rows
  assert done.milliseconds and stopped.milliseconds is None and "stopped" in stopped.why


def test_targets_are_compiled_side_by_side(compiled, monkeypatch):
  """Each of two compilations waits for the other."""
  compiled(None)
  program_, meet = _program(_node("copy", 1, cycles=10**6)), threading.Barrier(2, timeout=60)

  def compile_lowered(lowered):
    meet.wait()
    return program_

  process = types.SimpleNamespace(compile_lowered=compile_lowered, kernels=0)
  monkeypatch.setattr(compiler, "Compiler", lambda **_: contextlib.nullcontext(process))
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  found = tpugraphs_jax.estimate(step, 1.0, targets=["v6e", "v5e"])
  assert [row.target for row in found.rows] == ["v6e", "v5e"]
  assert all(row.milliseconds for row in found.rows)


def test_a_row_has_the_time_work_and_memory_of_the_program_and_its_dearest_kernels(compiled):
  kernels = (
    _node("copy", 1, cycles=10**6, line=3, shape=_LARGE),
    _node("dot", 2, cycles=3 * 10**6, operands=[1, 1], shape=_LARGE),
  )
  compiled(_program(*kernels))
  found = tpugraphs_jax.estimate(step, 1.0, targets=["v6e", "v3"])
  new, old = found.rows
  chip = chips.chips()["tpu:v6e"]
  assert new.milliseconds == pytest.approx(4e9 / chip.clock) and new.cycles == 4 * 10**6
  assert new.interval == pytest.approx((chip.low * new.milliseconds, chip.high * new.milliseconds))
  assert [kernel.cycles for kernel in new.kernels] == [3 * 10**6, 10**6]
  assert [kernel.milliseconds for kernel in new.kernels] == pytest.approx(
    [0.75 * new.milliseconds, 0.25 * new.milliseconds]
  )
  assert (new.flops, new.bytes_accessed) == (2 * 4096**3, 0)  # the stand-in moves none
  assert (new.memory, new.fits, new.bound) == (_MEMORY, True, "memory")
  assert old.milliseconds > new.milliseconds and old.fits
  (line, _) = (line for line in repr(found).splitlines() if line.startswith("75.0%"))
  assert line.split()[-3:] == ["dot_of_jax", "f32[4096,4096]", "model.py:1"]
  assert "model.py:3" in found._repr_html_()


def _loop(number, times, *nodes):
  """The nodes in a loop that counts to `times`, as an instruction and its computations."""
  s32 = lambda opcode, id, **fields: hlo_modules.instruction(opcode, id, **fields)
  scalars = [s32("parameter", 91), s32("constant", 92), s32("add", 93, operands=[91, 92])]
  bound = [s32("parameter", 94), s32("constant", 95), s32("compare", 96, operands=[94, 95])]
  bound[2].comparison_direction = "LT"
  start = s32("constant", 97)
  for node, value in ((scalars[1], 1), (bound[1], times), (start, 0)):
    node.literal.s32s.append(value)
  for node in (*scalars, *bound, start):
    node.shape.element_type = 4
  bound[2].shape.element_type = 1
  loop = _node("while", 98, callees=[10 * number, 10 * number + 1], operands=[97])
  body = hlo_modules.computation(*nodes, *scalars, name="body", id=10 * number)
  return [start, loop], [
    body,
    hlo_modules.computation(*bound, name="condition", id=10 * number + 1),
  ]


def test_a_copy_of_the_compiler_is_of_the_operation_that_it_copies(compiled):
  product = _node("dot", 2, cycles=10, operands=[1, 1], line=7)
  copy = _node("copy", 3, cycles=20, operands=[2])
  copy.metadata.Clear()
  compiled(_program(_node("parameter", 1), product, copy))
  (row,) = estimate.estimate(step, targets="v6e").rows
  expected = costs.Operation("jit(f)/dot_of_jax", "model.py:7", (64, 64))
  assert [kernel.operations for kernel in row.kernels] == [(expected,)] * 2


def test_flops_and_cycles_count_every_iteration_of_a_loop_that_was_executed(compiled):
  kernels = (
    _node("copy", 1, cycles=10, shape=_LARGE),
    _node("dot", 2, cycles=1, operands=[1, 1], shape=_LARGE),
    _node("gather", 3, shape=(64, 64)),
  )
  nodes, computations = _loop(1, 100, *kernels)
  made = _program(*nodes, callees=computations)
  calls = {node.name: 7 for node in kernels}
  for texts, count in (({"TLP": "an operation is not known"}, 100), (calls, 7)):
    compiled(tpu.dataclasses.replace(made, schedules=texts))
    (row,) = estimate.estimate(step, targets="v6e").rows
    assert row.cycles == 11 * count
    assert row.flops == pytest.approx(count * 2 * 4096**3)
  assert row.milliseconds == pytest.approx(1e3 * row.flops / 918e12)


def test_a_program_that_the_compiler_refuses_is_a_row_with_its_reason(compiled):
  compiled(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM (74.58G)"))
  found = estimate.estimate(step, targets="v5e")
  assert found.rows[0].fits is False and "74.58G" in repr(found)
  assert "no, 15.75 GiB" in repr(found)
  compiled(jax.errors.JaxRuntimeError("UNIMPLEMENTED: complex128"))
  assert estimate.estimate(step, targets="v5e").rows[0].fits is None


def test_a_program_whose_compilation_is_ended_has_its_memory(compiled):
  node = _node("add", 1, shape=_LARGE)
  node.shape.layout.minor_to_major.extend([1, 0])
  module = hlo_modules.module(hlo_modules.computation(node, id=9))
  module.entry_computation_id = 9
  module.schedule.sequences[9].instruction_ids.append(1)
  compiled(compiler.Ended("it took more than 60 s", module.SerializeToString()))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.fits and row.live.peak_bytes == 4 * 4096**2
  assert row.milliseconds is None and "more than 60 s" in row.why
  plan = proto.HloProto(hlo_module=module)
  plan.buffer_assignment.buffer_allocations.add(size=33 * 2**30)
  compiled(compiler.Ended("it took more than 60 s", plan.SerializeToString()))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.fits is False and row.needed == 33 * 2**30
  said = "RESOURCE_EXHAUSTED: Used 33.50G of 31.25G hbm."
  compiled(compiler.OutOfMemory(said, module.SerializeToString()))
  found = estimate.estimate(step, targets="v6e")
  assert found.rows[0].fits is False and found.rows[0].needed == 33.5 * 2**30
  assert "no, 33.5 of 31.25 GiB" in repr(found)
  said = "the total memory required for HLO temporaries (32.11G) exceeds available HBM (31.25G)."
  compiled(compiler.OutOfMemory(said, module.SerializeToString()))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.needed == round(32.11 * 2**30)
  compiled(compiler.Ended("killed"))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.fits is None and "failed: killed" in row.why


def test_memory_beyond_that_of_the_device_does_not_fit(compiled):
  program = _program(_node("copy", 1, cycles=5))
  memory = tpu.MemoryPlan(arguments=2**34, outputs=0, temporaries=2**34)
  compiled(tpu.dataclasses.replace(program, memory=memory))
  rows = estimate.estimate(step, targets=("v6e", "7x")).rows
  assert [row.fits for row in rows] == [False, True]


def test_the_command_prints_every_program_and_refuses_unknown_ones(compiled, tmp_path, capsys):
  compiled(_program(_node("copy", 1, cycles=10**6)))
  path = tmp_path / "mine.py"
  path.write_text("PROGRAMS = {'step': (lambda x: x, (1.0,)), 'b': (lambda x: x, (1.0,))}\n")
  assert estimate_command.main([str(path), "--targets", "v6e"]) == 0
  printed = capsys.readouterr().out
  assert "mine_step: estimates" in printed and "mine_b: estimates" in printed
  assert estimate_command.main([f"{path}:other"]) == 2
  assert "other" in capsys.readouterr().err


_STEP = "import jax.numpy as jnp\ndef step(x, y):\n  return {}\nPROGRAMS = {{'step': (step, {})}}\n"


@pytest.mark.parametrize(
  "body, arguments, told",
  [
    ("jnp.dott(x, y)", "(1.0, 2.0)", "mine.py:3: AttributeError: module 'jax.numpy' has no attri"),
    ("x @ z", "(1.0, 2.0)", "mine.py:3: NameError: name 'z' is not defined"),
    ("x @ y", "(jnp.ones((8, 9)), jnp.ones((8, 9)))", "mine.py:3: TypeError: dot_general requires"),
    ("x @ y", "(1.0,)", "step does not take its arguments: missing a required argument: 'y'"),
    ("x", "(jnp.ones(2), 3), {'z': 4}", "step does not take its arguments: got an unexpected"),
    ("x @ y", "[1.0]", "mine.py:step is a tuple, expected"),
  ],
)
def test_a_mistake_in_a_step_is_a_line_that_names_the_place(
  compiled, tmp_path, capsys, body, arguments, told
):
  compiled(_program(_node("copy", 1, cycles=10**6)))
  (tmp_path / "mine.py").write_text(_STEP.format(body, arguments))
  assert estimate_command.main([str(tmp_path / "mine.py"), "--targets", "v6e"]) == 2
  (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
  assert told in line


@pytest.mark.parametrize(
  "flags, told",
  [
    (["--save", "mine.py"], "--save is mine.py, a file of another kind: name a new one"),
    (["--html", "before.json"], "--html is before.json, a file of another kind"),
    (["--trace", "none/a.json"], "--trace is none/a.json, and there is no folder none"),
    (["--save", "."], "--save is ., a folder: name a file"),
    (["--slower", "0.02"], "name a file with --against"),
    (
      ["--against", "before.json", "--targets", "v5e"],
      "nothing to compare: the file has b for v6e",
    ),
  ],
)
def test_mistakes_in_flags_are_told_before_the_work(
  compiled, tmp_path, monkeypatch, capsys, flags, told
):
  monkeypatch.chdir(tmp_path)
  asked = compiled(_program(_node("copy", 1, cycles=10**6)))
  text = "PROGRAMS = {'step': (lambda x: x, (1.0,))}\n"
  (tmp_path / "mine.py").write_text(text)
  summary.save([summary.Estimate("b", (costs.TargetEstimate("tpu:v6e", 1.0),))], "before.json")
  assert estimate_command.main(["mine.py", *flags]) == 2
  assert told in capsys.readouterr().err and not asked
  assert (tmp_path / "mine.py").read_text() == text


def test_targets_may_have_commas_and_files_that_are_written_are_named(
  compiled, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  compiled(_program(_node("copy", 1, cycles=10**6)))
  (tmp_path / "mine.py").write_text("PROGRAMS = {'step': (lambda x: x, (1.0,))}\n")
  assert estimate_command.main(["mine.py", "--targets", "v6e,v5e", "--save", "a.json"]) == 0
  assert [row.target for row in summary.load("a.json")[0].rows] == ["v6e", "v5e"]
  assert "a.json: written" in capsys.readouterr().out
  summary.save([summary.Estimate("b", summary.load("a.json")[0].rows)], "b.json")
  assert estimate_command.main(["mine.py", "--against", "b.json"]) in (0, 1)
  assert "mine_step (before: b)" in capsys.readouterr().out


def test_a_misspelt_option_is_told_its_nearest():
  for command, keyword, told in (
    (tpugraphs_jax.estimate, "target", "did you mean targets?"),
    (tpugraphs_jax.tune, "bugdet", "did you mean budget?"),
    (tpugraphs_jax.tune, "y", "y is no argument of step and no option of tune, which has target"),
  ):
    with pytest.raises(TypeError, match=re.escape(told)):
      command(step, 1.0, **{keyword: 2})
  with pytest.raises(SystemExit):
    estimate_command.main(["mine.py", "--targts", "v6e"])


def test_keyword_arguments_are_those_of_the_function(compiled, tmp_path):
  asked = compiled(_program(_node("copy", 1, cycles=10**6)))
  path = tmp_path / "mine.py"
  path.write_text("PROGRAMS = {'step': (lambda x, targets: x, (1.0,), {'targets': 2.0})}\n")
  assert estimate_command.main([str(path), "--targets", "v6e"]) == 0
  tpugraphs_jax.estimate(step, targets="v5e", x=3.0)
  assert [call.arrays for call in asked] == [(1.0, 2.0), (3.0,)]
  assert asked[1](5.0) == 5.0


def _simulated(**changes):
  kernels = (
    program.KernelTime("dot.2", 3, 1.72e6, 0.43e6, 1000, 10, bound="products"),
    program.KernelTime("copy.1", 1, 0.86e6, 0.43e6, 100, 10, bound="memory"),
    program.KernelTime("own", 1, 0.0, 0.0, 0, 0),
  )
  time = program.ProgramTime(2.0, "", 3.44e6, 0.86e6, 0.43e6, kernels, conditionals=1)
  return program.dataclasses.replace(time, **changes)


@pytest.fixture
def simulated(compiled, monkeypatch):
  """Sets what the schedules of a program with a copy and a product say."""
  chip = tpu.dataclasses.replace(
    chips.chips()["tpu:v6e"], clock=1.72e9, low=None, high=None, source="a test"
  )
  monkeypatch.setattr(chips, "chips", lambda: {"tpu:v6e": chip})

  def answer(time):
    nodes = (
      _node("parameter", 9, shape=_LARGE),
      _node("copy", 1, cycles=10**6, line=3, shape=_LARGE, operands=[9]),
      _node("dot", 2, cycles=10**6, operands=[1, 1], shape=_LARGE),
      _node("conditional", 3),
    )
    for node, order in zip(nodes, ([1, 0], [0, 1], [1, 0])):
      node.shape.layout.minor_to_major.extend(order)
    nodes[0].metadata.op_name = "w"
    nodes[2].metadata.op_name = "jit(f)/transpose(jvp(Net))/Dense_1/dot_general"
    compiled(tpu.dataclasses.replace(_program(*nodes), schedules={"TLP": ""}))
    monkeypatch.setattr(program, "simulate", lambda *args, **options: time)

  return answer


def test_the_time_of_schedules_says_where_it_goes(simulated):
  simulated(_simulated())
  found = tpugraphs_jax.estimate(step, 1.0, targets="v6e")
  (row,) = found.rows
  assert (row.milliseconds, row.interval) == (2, None)
  expected = {"products": 1.0, "memory": 0.75, costs.BETWEEN: 0.25}
  assert row.groups == pytest.approx(expected) and row.bound == "products"
  assert row.waits == pytest.approx(1.29 / 3.44)
  product, copy, own = row.kernels
  assert (product.milliseconds, product.calls, product.stall) == (1, 3, 0.25)
  assert (product.scope, product.operation) == ("gradient of Net/Dense_1", "dot_general")
  assert own.operation == "own"
  assert copy.move.of == "argument w" and copy.move.remedy == "an entry layout"
  assert copy.move.change == "{1,0} to {0,1}" and row.moves_ms == copy.milliseconds == 0.5
  assert row.bytes_accessed == 1100  # what kernels move, without copies beside them
  text = repr(found)
  for part in (
    "products 50%",
    "gradient of Net/Dense_1",
    "branches of 1 cond",
    "25%",
    "argument w",
  ):
    assert part in text, part


def test_kernels_of_one_operation_and_line_are_one_row_of_the_text():
  def kernel(number, milliseconds, where, stall=None):
    return costs.KernelCost(
      f"fusion.{number}", "scatter", "", where, "f32[8]", 100, milliseconds, stall
    )

  kernels = (
    kernel(1, 0.5, "a.py:3", 0.9),
    kernel(2, 0.25, "a.py:3", 0.3),
    kernel(3, 0.2, "a.py:7"),
    kernel(4, 0.02, ""),
    kernel(5, 0.01, ""),
  )
  text = repr(summary.Estimate("step", (costs.TargetEstimate("tpu:v6e", 1.0, kernels=kernels),)))
  lines = [line.split() for line in text.splitlines()]
  assert "v6e: the 4 dearest of 4 lines with 5 kernels" in text
  first = next(line for line in lines if line and line[0] == "75.0%")
  assert first[1:4] == ["0.75", "100", "70%"] and first[-1] == "a.py:3"
  assert "f32[8], 2 kernels" in text
  shares = [float(line[0][:-1]) for line in lines if line and line[0].endswith("%")]
  assert sum(shares) == pytest.approx(100) and shares[0] == 75


def test_the_interval_of_schedules_is_that_of_their_record_with_its_compilers(
  simulated, monkeypatch
):
  simulated(_simulated())
  chip = tpu.dataclasses.replace(chips.chips()["tpu:v6e"], low=0.9, high=1.1, source="60 programs")
  monkeypatch.setattr(chips, "chips", lambda: {"tpu:v6e": chip})
  found = tpugraphs_jax.estimate(step, 1.0, targets="v6e")
  assert found.rows[0].interval == pytest.approx((1.8, 2.2))
  text = repr(found)
  assert "60 programs" in text and "0.90 to 1.10" in text and "libtpu 0.0.42.1" in text


def test_a_kernel_whose_operations_take_half_its_time_at_the_peak_is_bound_by_products(simulated):
  peak_ms = 1e3 * 2 * 4096**3 / 918e12
  for ms, bound in ((1.9 * peak_ms, "products"), (2.1 * peak_ms, "vector work")):
    kernels = (program.KernelTime("dot.2", 1, ms * 1.72e6, bound="vector work"),)
    simulated(_simulated(milliseconds=ms, kernels=kernels, between=0.0, copy_stall=0.0))
    (row,) = estimate.estimate(step, 1.0, targets="v6e").rows
    assert row.kernels[0].bound == bound and list(row.groups) == [bound]


@pytest.mark.parametrize("times, is_told", [(9, False), (11, True)])
def test_a_dear_kernel_that_is_far_from_its_bytes_and_operations_is_told(simulated, times, is_told):
  ms = times * 1e3 * 2 * 4096**3 / 918e12
  kernels = (program.KernelTime("dot.2", 1, ms * 1.72e6, bound="loop overhead"),)
  simulated(_simulated(milliseconds=ms, kernels=kernels, between=0.0, copy_stall=0.0))
  text = repr(estimate.estimate(step, 1.0, targets="v6e"))
  assert (f"takes {times} times what its bytes and operations need" in text) == is_told


@pytest.mark.parametrize("name", ["gather.7", "dot.2"])  # without operations, and with few
def test_a_kernel_of_which_nothing_is_counted_is_not_told_as_far_from_its_work(simulated, name):
  """Such as a gather from a table on the chip to the chip."""
  simulated(_simulated(kernels=(program.KernelTime(name, 1, 1e9, bound="loop overhead"),)))
  assert "times what its bytes" not in repr(estimate.estimate(step, 1.0, targets="v6e"))


@pytest.mark.parametrize("size, is_told", [(1 << 12, True), (1 << 20, False)])
def test_a_dear_kernel_of_many_small_copies_is_told(simulated, size, is_told):
  moved = 10_000 * size
  cycles = 3 * 0.7 * moved / 1638e9 * 1.72e9
  kernel = program.KernelTime("gather.7", 1, cycles, hbm_bytes=moved, dmas=10_000, bound="memory")
  simulated(_simulated(kernels=(kernel,), milliseconds=cycles / 1.72e6, cycles=cycles))
  text = repr(estimate.estimate(step, 1.0, targets="v6e"))
  assert ("10,000 copies, each with about 4,096 bytes of traffic" in text) == is_told


def test_no_time_of_schedules_is_below_the_operations_at_the_peak(simulated):
  simulated(_simulated(milliseconds=0.01, cycles=1.72e4))
  (row,) = estimate.estimate(step, 1.0, targets="v6e").rows
  assert row.milliseconds == pytest.approx(1e3 * 2 * 4096**3 / 918e12)


def test_without_a_time_there_is_a_reason_and_no_other_time(simulated):
  why = "an operation is not known"
  simulated(_simulated(milliseconds=None, why=why, stopped=why))
  found = estimate.estimate(step, 1.0, targets="v6e")
  assert found.rows[0].milliseconds is None and found.rows[0].cycles == 2 * 10**6
  assert "no time, because an operation is not known" in repr(found)


def _bounded(milliseconds):
  """A program of so many milliseconds, and of a product that has only a bound."""
  cycles = 1.72e6 * milliseconds
  kernels = (
    program.KernelTime("copy.1", 1, cycles, bound="memory"),
    program.KernelTime("dot.2", 1, why="the number of its steps is unknown"),
  )
  why = "1 kernel has no time"
  return _simulated(
    milliseconds=None, why=why, kernels=kernels, cycles=cycles, between=0.0, copy_stall=0.0
  )


def test_a_kernel_without_a_time_counts_with_its_bound(simulated):
  """The bound of the product is its million cycles, 0.58 ms."""
  bound = 1 / 1.72
  simulated(_bounded(20.0))
  found = estimate.estimate(step, 1.0, targets="v6e")
  (row,) = found.rows
  assert row.milliseconds == row.least_ms == pytest.approx(20 + bound)
  assert row.bounded_ms == pytest.approx(bound) and sum(row.groups.values()) == row.milliseconds
  (product,) = (kernel for kernel in row.kernels if kernel.is_bound)
  assert product.milliseconds == pytest.approx(bound)
  text = repr(found)
  assert "a bound: the number of its steps" in text and "1 kernels count with their bytes" in text


def test_a_time_without_its_dearest_kernel_is_none(simulated):
  simulated(_bounded(1.0))
  found = estimate.estimate(step, 1.0, targets="v6e")
  (row,) = found.rows
  assert row.milliseconds is None and row.interval is None and row.why == "1 kernel has no time"
  assert row.least_ms == pytest.approx(1 + 1 / 1.72) and "at least 1.58" in repr(found)


def test_assumed_integers_are_named_with_the_times_of_their_extremes_where_these_matter(simulated):
  meaning = integers.Meaning(integers.INDEX, (32_000,), "scatter.1")
  for extremes, matters in (((1.72e6, 5.16e6), True), ((3.42e6, 3.46e6), False)):
    simulated(_simulated(assumed={"indices": meaning}, extremes=extremes))
    found = estimate.estimate(step, 1.0, targets="v6e")
    text = repr(found)
    assert "an index is uniform over 32000 (scatter.1)" in text
    assert ("time is 1 ms" in text) == matters
    assert found.rows[0].extremes == (pytest.approx((1.0, 3.0)) if matters else None)


def test_kernels_that_change_a_layout_need_no_time(simulated):
  why = "the program has no time"
  simulated(_simulated(milliseconds=None, why=why, stopped=why, kernels=(), cycles=0.0))
  found = estimate.estimate(step, 1.0, targets="v6e")
  assert any(kernel.move for kernel in found.rows[0].kernels) and why in repr(found)


def test_a_loop_of_unknown_length_is_the_reason_that_is_named(compiled, monkeypatch):
  body = hlo_modules.computation(_node("parameter", 1), name="body", id=1)
  condition = hlo_modules.computation(_node("parameter", 1), name="condition", id=2)
  loop = _node("while", 2, callees=[1, 2], operands=[1])
  made = _program(_node("copy", 1, cycles=10), loop, callees=[body, condition])
  compiled(tpu.dataclasses.replace(made, schedules={"TLP": ""}))
  why = "the program writes scalar memory"
  time = _simulated(milliseconds=None, why=why, stopped=why)
  monkeypatch.setattr(program, "simulate", lambda *args, **options: time)
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.why == "it has a loop of unknown length while_of_jax model.py:1"


@pytest.mark.parametrize("is_told, cycles", [(True, 100_000), (False, 100_000_000)])
def test_arguments_that_the_run_before_has_loaded_are_told_where_they_matter(
  compiled, is_told, cycles
):
  start = _node("copy-start", 2, operands=[1], shape=_LARGE)
  start.cross_program_prefetch_index = 0
  compiled(_program(_node("parameter", 1, shape=_LARGE), start, _node("copy", 3, cycles=cycles)))
  found = estimate.estimate(step, 1.0, targets="v6e")
  assert found.rows[0].loaded == 4 * 4096**2
  assert ("the first takes up to 0.0419 ms longer" in repr(found)) == is_told


def test_a_loop_that_the_compiler_made_and_its_kernels_have_the_operation_and_line(compiled):
  """Its kernels have no name of their own: a copy of the state, and what uses it."""
  nodes, computations = _loop(
    1,
    40,
    _node("copy", 1, cycles=1000, shape=_LARGE),
    _node("reverse", 2, cycles=1000, operands=[1], shape=_LARGE),
  )
  nodes[1].metadata.op_name, nodes[1].metadata.source_line = "jit(f)/scatter-add", 12
  for node in computations[0].instructions[:2]:
    node.ClearField("metadata")
  made = _program(*nodes, callees=computations)
  compiled(tpu.dataclasses.replace(made, schedules={"copy.1": 40, "reverse.2": 40}))
  found = estimate.estimate(step, targets="v6e")
  (row,) = found.rows
  assert [kernel.operation for kernel in row.kernels] == ["scatter-add"] * 2
  assert [kernel.where for kernel in row.kernels] == ["model.py:12"] * 2
  assert "a loop of 40 steps of scatter-add model.py:12" in repr(found)


def test_the_control_of_a_loop_that_the_compiler_made_is_a_row_of_its_operation(
  compiled, monkeypatch
):
  nodes, computations = _loop(1, 40, _node("copy", 1, cycles=1000, shape=_LARGE))
  nodes[1].metadata.op_name, nodes[1].metadata.source_line = "jit(f)/scatter-add", 12
  compiled(_program(*nodes, callees=computations))
  clock = chips.chips()["tpu:v6e"].clock
  kernels = (program.KernelTime("copy.1", 40, 0.25e-3 * clock, after=0.5e-3 * clock),)
  ran = program.ProgramTime(1.0, "", 1e-3 * clock, 0.75e-3 * clock, 0.0, kernels, 0)
  monkeypatch.setattr(program, "simulate", lambda *_, **__: ran)
  (row,) = estimate.estimate(step, targets="v6e").rows
  loop, kernel = row.kernels
  assert (loop.operation, loop.where, loop.calls) == ("loop of scatter-add", "model.py:12", 40)
  assert (loop.milliseconds, kernel.milliseconds) == pytest.approx((0.5, 0.25))
  assert loop.is_loop and not kernel.is_loop
  assert sum(row.groups.values()) == pytest.approx(row.milliseconds)
  text = repr(estimate.estimate(step, targets="v6e"))
  assert "50% of it is loop of scatter-add, model.py:12, bound by loop overhead" in text


def test_shares_of_kernels_and_the_rest_sum_to_all(simulated):
  simulated(_simulated())
  lines = repr(estimate.estimate(step, 1.0, targets="v6e")).splitlines()
  shares = [float(line.split("%")[0]) for line in lines if line[:1].isdigit() and "%" in line[:6]]
  kernels = shares[: 1 + len(_simulated().kernels)]
  assert sum(kernels) == pytest.approx(100, abs=0.2)
  assert any("loop control" in line for line in lines)


def test_integers_among_the_arguments_reach_loops_and_kernels(compiled, monkeypatch):
  nodes, computations = _loop(1, 100, _node("copy", 1, cycles=1000, shape=_LARGE))
  start = _node("parameter", 97, shape=())
  start.shape.element_type, start.parameter_number = 4, 1
  sizes = _node("parameter", 96, shape=(3,))
  made = _program(sizes, start, nodes[1], callees=computations)
  compiled(tpu.dataclasses.replace(made, schedules={"TLP": ""}))
  given = []

  def simulate(*_, arguments, operands, create):
    given.append({number: value.tolist() for number, value in arguments.items()})
    why = "an operation is not known"
    return _simulated(milliseconds=None, why=why, stopped=why)

  monkeypatch.setattr(program, "simulate", simulate)
  second = lambda sizes, start: start
  found = [
    estimate.estimate(second, jnp.array([4, 5, 6]), start, targets="v6e")
    for start in (40, jnp.int32(90), jax.ShapeDtypeStruct((), jnp.int32))
  ]
  rows = [each.rows[0] for each in found]
  assert [row.cycles for row in rows] == [60_000, 10_000, 1000] and "loop" in rows[2].why
  key = jax.random.key(0, impl="rbg")  # an array without a type of numpy
  assert estimate.estimate(second, key, 1, targets="v6e").rows[0].cycles == 99_000
  assert given.pop() == {1: 1}
  assert given == [{0: [4, 5, 6], 1: 40}, {0: [4, 5, 6], 1: 90}, {0: [4, 5, 6]}]


def test_a_compiler_that_gives_no_answer_is_a_row_with_its_reason(compiled):
  compiled(compiler.Ended("it ended its process with signal 11"))
  found = estimate.estimate(step, 1.0, targets=["v5e", "v6e"])
  assert [row.milliseconds for row in found.rows] == [None, None]
  assert "v6e: no time, because the compiler failed: it ended its process with signal 11" in repr(
    found
  )


def test_a_function_with_a_mesh_is_estimated_for_one_of_its_devices(compiled, monkeypatch):
  monkeypatch.setattr(topology, "devices", slices.devices)
  compiled(_program(_node("copy", 1, cycles=10)))
  mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  shape = jax.ShapeDtypeStruct((2**30,), jnp.float32, sharding=sharding)
  found = estimate.estimate(step, shape, targets="v6e-8")
  assert found.rows[0].target == "v6e:2x4" and found.devices == 8
  assert "v6e:2x4" in repr(found) and "one of the 8 devices of its mesh" in repr(found)
  with pytest.raises(ValueError, match=r"data 4, model 2.* such as v6e:2x4"):
    estimate.estimate(step, shape, targets="v6e")
  with pytest.raises(ValueError, match="has 16 devices and the function has a mesh of 8"):
    estimate.estimate(step, shape, targets="v6e:4x4")
  single = estimate.estimate(step, 1.0, targets="v6e:2x4")
  assert single.devices == 1 and "v6e:2x4: the function has no mesh" in repr(single)


def test_the_collectives_of_a_mesh_are_listed_saved_and_loaded(compiled, monkeypatch, tmp_path):
  monkeypatch.setattr(topology, "devices", slices.devices)
  monkeypatch.setattr(program, "simulate", lambda *_, create, **__: gather.time())
  gather = schedules.stored_mesh("mesh_gather_v5e")
  module = gather._module
  node = next(node for node in module.computations[-1].instructions if "gather" in node.name)
  node.metadata.op_name, node.metadata.source_file = "jit(f)/dot_general", "/home/me/model.py"
  node.metadata.source_line = 7
  compiled(tpu.TpuProgram(module.SerializeToString(), -2.0, 1, 1.0, _MEMORY, None))
  mesh = jax.sharding.AbstractMesh((8, 4), ("x", "y"))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y"))
  shape = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16, sharding=sharding)
  found = estimate.estimate(step, shape, targets="v5e:8x4")
  (row,) = found.rows
  (one,) = row.communication
  assert (one.kind, one.axes, one.by, one.where) == (
    "all-gather",
    ("y",),
    costs.PARTITIONER,
    "model.py:7",
  )
  assert not one.is_full_copy and one.exposed_ms == pytest.approx(row.exposed_ms)
  assert row.bound == "links" and row.exposed_ms > 0.9 * row.milliseconds
  text = repr(found)
  assert "all-gather" in text and "partitioner" in text and "DCN" in text
  found.save(tmp_path / "a.json")
  (loaded,) = summary.load(tmp_path / "a.json")
  assert loaded.rows[0].communication == row.communication
  assert loaded.rows[0].exposed_ms == row.exposed_ms


def test_what_a_reader_has_to_know_of_the_function_is_said(compiled):
  from jax.experimental import pallas as pl

  def double(x):
    kernel = lambda x_ref, out_ref: out_ref.__setitem__(..., 2 * x_ref[...])
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True, name="doubling")(x)

  compiled(_program(_node("copy", 1, cycles=10)))
  text = repr(estimate.estimate(double, jnp.zeros((8, 128)), targets="v6e"))
  assert "Pallas interprets doubling" in text and "interpret=False" in text
  wide = jax.ShapeDtypeStruct((8,), "float64")
  assert "float64 arguments are estimated" in repr(estimate.estimate(step, wide, targets="v6e"))
  plain = repr(estimate.estimate(step, jnp.zeros(8), targets="v6e"))
  assert "Pallas" not in plain and "float64" not in plain


def test_the_command_saves_compares_and_fails_where_a_program_got_slower(
  compiled, tmp_path, capsys
):
  program, saved = tmp_path / "mine.py", tmp_path / "a.json"
  program.write_text("PROGRAMS = {'step': (lambda x: x, (1.0,))}\n")
  source = f"{program}:step"
  compiled(_program(_node("copy", 1, cycles=10**6, line=7)))
  assert estimate_command.main([source, "--targets", "v6e", "--save", str(saved)]) == 0
  assert (
    estimate_command.main([source, "--against", str(saved)]) == 0
  )  # for the targets of the file
  compiled(_program(_node("copy", 1, cycles=2 * 10**6, line=7)))
  capsys.readouterr()
  assert estimate_command.main([source, "--against", str(saved), "--slower", "0.02"]) == 1
  more = f"{1e9 / chips.chips()['tpu:v6e'].clock:.3g}"
  assert f"copy_of_jax model.py:7 (+{more} ms)" in capsys.readouterr().out
  assert estimate_command.main([source, "--against", str(saved), "--slower", "1.5"]) == 0
  saved.write_text("{}")
  assert estimate_command.main([source, "--against", str(saved)]) == 2
  assert "a.json" in capsys.readouterr().err


def test_the_command_does_not_take_the_functions_place_in_the_package():
  with pytest.raises(ImportError, match="function"):
    importlib.import_module("tpugraphs_jax.estimate")
  assert callable(tpugraphs_jax.estimate)


def test_every_generation_has_constants():
  assert GENERATIONS.keys() == chips.chips().keys()


@recorded.needs_libtpu
def test_estimates_of_a_real_target_have_time_memory_and_lines():
  def loss(kernel, x):
    return jnp.sum(jax.nn.relu(x @ kernel) @ kernel.T)

  shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
  (row,) = estimate.estimate(jax.grad(loss), shape, shape, targets="v6e").rows
  assert row.milliseconds
  assert row.memory.arguments == 2 * 2 * 1024**2 and row.fits and not row.why
  assert sum(kernel.cycles or 0 for kernel in row.kernels) == row.cycles > 0
  assert sum(kernel.milliseconds for kernel in row.kernels) <= row.milliseconds
  assert row.kernels[0].where.startswith("test_estimate.py:")


@pytest.mark.parametrize("targets", [[], None, 6, {"v6e": 1}, b"v6e"])
def test_targets_that_are_none_are_refused_in_a_line(targets):
  with pytest.raises(ValueError, match="expected TPU generations"):
    estimate.estimate(lambda x: x, 1.0, targets=targets)


@pytest.mark.parametrize(
  "flags", [["--timeout", "0"], ["--timeout", "nan"], ["--slower", "nan"], ["--slower", "-0.1"]]
)
def test_limits_that_are_none_are_refused_before_anything_is_compiled(flags, capsys):
  assert estimate_command.main(["programs.py", *flags]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert flags[0].removeprefix("--") in line and "expected" in line


def test_a_comparison_with_no_programs_ends_before_anything_is_compiled(tmp_path, capsys):
  tpugraphs_jax.tuning.summary.save([], tmp_path / "none.json")
  assert estimate_command.main(["programs.py", "--against", str(tmp_path / "none.json")]) == 2
  assert "no programs" in capsys.readouterr().err


@recorded.needs_libtpu
def test_a_cholesky_solve_and_a_scan_have_a_time():
  def solve(kernel, x):
    factor = jax.scipy.linalg.cho_factor(kernel @ kernel.T)
    step = lambda x, _: (jnp.tanh(kernel @ x), None)
    return jax.lax.scan(step, jax.scipy.linalg.cho_solve(factor, x), None, length=6)[0]

  shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
  (row,) = estimate.estimate(solve, shape, shape, targets="v5e").rows
  assert row.milliseconds and not row.why
  assert 0 < row.interval[0] < row.milliseconds < row.interval[1]
  assert any(kernel.calls == 6 for kernel in row.kernels)


@recorded.needs_libtpu
def test_the_time_of_ragged_groups_follows_from_the_sizes_among_the_arguments():
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  product = lambda rows, kernels, sizes: gmm(rows, kernels, sizes, jnp.float32)
  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (8, 512, 1024))]
  even, ragged, unknown = (
    estimate.estimate(product, *arrays, sizes, targets="v6e").rows[0]
    for sizes in (
      np.full(8, 128, np.int32),
      np.array([200, 0, 300, 100, 24, 300, 50, 50], np.int32),
      jax.ShapeDtypeStruct((8,), jnp.int32),
    )
  )
  kernels = [max(row.kernels, key=lambda kernel: kernel.is_custom) for row in (even, ragged)]
  # 8 blocks of 128 rows, and 14: seven blocks have rows of two groups.
  assert kernels[1].milliseconds > 1.4 * kernels[0].milliseconds
  assert unknown.assumed and unknown.milliseconds == even.milliseconds  # equal parts


def test_the_command_is_named_as_it_is_typed(monkeypatch):
  names = []
  monkeypatch.setattr(
    console, "working", lambda name: names.append(name) or contextlib.nullcontext()
  )
  assert estimate_command.main([]) == 2
  assert names == ["estimate"]
