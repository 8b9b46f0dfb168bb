"""Costs of functions on TPUs, from modules as the compiler writes them and from the compiler."""

import importlib
import json

import hlo_modules
import jax
import jax.numpy as jnp
import pytest
import recorded

import tpugraphs_jax
from tpugraphs_jax.tuning import estimate, tpu

_TIME = estimate.Time(product_ms=2.0, other_ms=0.5, low=0.8, high=1.25, programs=9, operations=2)
_MEMORY = tpu.Memory(arguments=2**31, outputs=2**30, temporaries=2**30)
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


@pytest.fixture
def compiled(monkeypatch):
  """Sets what the compiler makes of any function, or the error with which it refuses it.

  Gives back the arguments and keyword arguments with which functions are compiled.
  """
  asked = []

  def answer(outcome):
    def compile_function(function, args, target, *, kwargs):
      asked.append((args, kwargs))
      if isinstance(outcome, Exception):
        raise outcome
      return outcome

    monkeypatch.setattr(tpu, "compile_function", compile_function)
    return asked

  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target}")
  monkeypatch.setattr(estimate, "times", lambda: {"tpu:v6e": _TIME})
  return answer


def step(x):
  return x


def test_the_time_is_that_of_measured_cycles_with_their_interval(compiled):
  kernels = (
    _node("copy", 1, cycles=10**6, line=3, shape=_LARGE),
    _node("dot", 2, cycles=3 * 10**6, operands=[1, 1], shape=_LARGE),
  )
  compiled(_program(*kernels))
  found = tpugraphs_jax.estimate(step, 1.0, targets=["v6e", "v3"])
  new, old = found.rows
  # A million cycles take .5 ms, three million of a dot 6 ms.
  assert (new.cycles, new.milliseconds) == (4 * 10**6, 6.5)
  assert new.interval == pytest.approx((5.2, 8.125))
  assert [kernel.cycles for kernel in new.kernels] == [3 * 10**6, 10**6]
  assert (new.flops, new.bytes_accessed) == (2 * 4096**3, 3 * 4 * 4096**2)
  assert (new.memory, new.fits, new.bound) == (_MEMORY, True, "compute")
  assert (old.cycles, old.milliseconds, old.interval) == (4 * 10**6, None, None)
  text = repr(found)
  assert "v3: no time, because no program" in text
  assert "75.0%  3         dot_of_jax   model.py:1" in text
  assert "9 programs of 2 operations" in text
  assert all(part in found._repr_html_() for part in ("5.2 to 8.12", "model.py:3", "9 programs"))


def test_no_time_is_below_the_peaks_of_the_device(compiled):
  copy = _node("copy", 1, cycles=1000, shape=_LARGE)
  compiled(_program(copy, _node("dot", 2, cycles=1, operands=[1, 1], shape=_LARGE)))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.milliseconds == row.interval[0] == pytest.approx(1e3 * 2 * 4096**3 / 918e12)
  compiled(_program(_node("copy", 1, cycles=1, shape=(4 * 10**11,))))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.milliseconds == pytest.approx(700) and row.bound == "memory"


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


def test_flops_bytes_and_the_least_time_count_every_iteration_of_a_loop(compiled):
  kernels = (
    _node("copy", 1, cycles=10, shape=_LARGE),
    _node("dot", 2, cycles=1, operands=[1, 1], shape=_LARGE),
    _node("gather", 3, shape=(64, 64)),
  )
  nodes, computations = _loop(1, 100, *kernels)
  compiled(_program(*nodes, callees=computations))
  (row,) = estimate.estimate(step, targets="v6e").rows
  assert row.cycles == 1100 and row.bound == "compute"
  assert row.flops == pytest.approx(100 * 2 * 4096**3)
  assert row.bytes_accessed == pytest.approx(100 * (12 * 4096**2 + 4 * 64**2))
  assert row.milliseconds == pytest.approx(1e3 * row.flops / 918e12)
  assert row.uncounted[0].size == 100 * 4 * 64**2


def test_what_the_compiler_does_not_estimate_is_named_and_hinders_a_time(compiled):
  kernel = _node("copy", 1, cycles=10**6, shape=(1400, 1400))
  body, condition = (
    hlo_modules.computation(_node("parameter", 1), name=name, id=place)
    for name, place in (("body", 1), ("condition", 2))
  )
  cases = {
    "a loop of unknown length": [_node("while", 2, callees=[1, 2], operands=[1])],
    "a kernel": [_node("fusion", 2, cycles=2**63 - 1, callees=[1])],
    "custom-call Cholesky": [_node("custom-call", 2, target="Cholesky", shape=())],
    "2 x sort": [_node("sort", place) for place in (2, 3)],
    "gather": [_node("gather", 2, shape=(600, 500))],  # 1.2 of 9 MB
  }
  for name, nodes in cases.items():
    compiled(_program(kernel, *nodes, callees=[body, condition]))
    (row,) = estimate.estimate(step, targets="v6e").rows
    assert (row.milliseconds, row.cycles) == (None, 10**6), name
    assert f"does not estimate {name} {nodes[0].opcode}_of_jax model.py:1" in row.why


def test_little_work_without_an_estimate_is_named_beside_the_time(compiled):
  little = _node("gather", 2, shape=(400, 400)), _node("add", 3, shape=())  # .64 of 8.5 MB
  free = _node("custom-call", 4, target="ConcatBitcast"), _node("bitcast", 5)
  compiled(_program(_node("copy", 1, cycles=10**6, shape=(1400, 1400)), *little, *free))
  found = estimate.estimate(step, targets="v6e")
  assert found.rows[0].milliseconds is not None
  assert [each.kind for each in found.rows[0].uncounted] == ["gather"]
  assert "v6e: without gather gather_of_jax model.py:1, which" in repr(found)


def test_a_long_list_of_names_is_cut_and_counted(compiled):
  compiled(_program(*(_node("custom-call", place, line=place) for place in range(1, 9))))
  assert estimate.estimate(step, targets="v6e").rows[0].why.endswith("model.py:5, 3 more")


def test_a_program_without_cycles_gets_no_time(compiled):
  compiled(_program(_node("parameter", 1)))
  assert "no cycles" in estimate.estimate(step, targets="v6e").rows[0].why


def test_a_program_that_the_compiler_refuses_is_a_row_with_its_reason(compiled):
  compiled(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM (74.58G)"))
  found = estimate.estimate(step, targets="v5e")
  assert found.rows[0].fits is False and "74.58G" in repr(found)
  assert "no, 15.75 GiB" in repr(found)
  compiled(jax.errors.JaxRuntimeError("UNIMPLEMENTED: complex128"))
  assert estimate.estimate(step, targets="v5e").rows[0].fits is None


def test_memory_beyond_that_of_the_device_does_not_fit(compiled):
  program = _program(_node("copy", 1, cycles=5))
  memory = tpu.Memory(arguments=2**34, outputs=0, temporaries=2**34)
  compiled(tpu.dataclasses.replace(program, memory=memory))
  rows = estimate.estimate(step, targets=("v6e", "7x")).rows
  assert [row.fits for row in rows] == [False, True]


def test_the_command_prints_every_program_and_refuses_unknown_ones(compiled, tmp_path, capsys):
  compiled(_program(_node("copy", 1, cycles=10**6)))
  path = tmp_path / "mine.py"
  path.write_text("PROGRAMS = {'step': (lambda x: x, (1.0,)), 'b': (lambda x: x, (1.0,))}\n")
  assert estimate.main([str(path), "--targets", "v6e"]) == 0
  printed = capsys.readouterr().out
  assert "mine_step: estimates" in printed and "mine_b: estimates" in printed
  assert estimate.main([f"{path}:other"]) == 2
  assert "other" in capsys.readouterr().err


def test_keyword_arguments_are_those_of_the_function(compiled, tmp_path):
  asked = compiled(_program(_node("copy", 1, cycles=10**6)))
  path = tmp_path / "mine.py"
  path.write_text("PROGRAMS = {'step': (lambda x, targets: x, (1.0,), {'targets': 2.0})}\n")
  assert estimate.main([str(path), "--targets", "v6e"]) == 0
  tpugraphs_jax.estimate(step, targets="v5e", x=3.0)
  assert asked == [((1.0,), {"targets": 2.0}), ((), {"x": 3.0})]


def test_the_command_does_not_take_the_functions_place_in_the_package():
  with pytest.raises(ImportError, match="function"):
    importlib.import_module("tpugraphs_jax.estimate")
  assert callable(tpugraphs_jax.estimate)


def test_every_target_has_a_device_and_shipped_times_are_of_targets():
  assert estimate.DEVICES.keys() == tpu.TARGETS.keys()
  assert estimate.times().keys() <= tpu.TARGETS.keys()
  for time in estimate.times().values():
    assert (
      0 < time.low < 1 < time.high
      and min(time.product_ms, time.other_ms) > 0
      and time.programs >= time.operations > 0
    )


@recorded.needs_libtpu
def test_estimates_of_a_real_target_have_time_memory_and_lines():
  def loss(kernel, x):
    return jnp.sum(jax.nn.relu(x @ kernel) @ kernel.T)

  shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
  (row,) = estimate.estimate(jax.grad(loss), shape, shape, targets="v6e").rows
  assert row.memory.arguments == 2 * 2 * 1024**2 and row.fits and not row.why
  assert row.interval[0] <= row.milliseconds < row.interval[1]
  assert sum(kernel.cycles for kernel in row.kernels) == row.cycles > 0
  assert row.kernels[0].origin.where.startswith("test_estimate.py:")
  (row,) = estimate.estimate(
    lambda x: jnp.linalg.cholesky(x @ x.T),
    jax.ShapeDtypeStruct((256, 256), jnp.float32),
    targets="v6e",
  ).rows
  assert row.milliseconds is None and "Cholesky" in row.why
