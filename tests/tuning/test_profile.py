"""Measured times of profiles beside estimates."""

import json

import numpy as np
import pytest

from tests.support import hlo_modules, recorded
from tests.support.xplanes import RECORDED, space, write
from tpugraphs_jax.hlo import calls
from tpugraphs_jax.tuning import costs, estimate_command, profile
from tpugraphs_jax.tuning.schedule import chips

_MEASURED = 0.07575  # milliseconds of a call, as XProf shows it


def _module():
  """A fusion with estimated cycles in a loop, and a copy that has none."""
  fusion = hlo_modules.instruction("fusion", 1, shape=(64, 64), callees=[3])
  fusion.backend_config = json.dumps({"window_config": {"estimated_cycles": "1000"}}).encode()
  fusion.metadata.op_name = "jit(step)/CNN/Conv_0/dot_general"
  fusion.metadata.source_file, fusion.metadata.source_line = "/home/me/model.py", 12
  body = hlo_modules.computation(hlo_modules.instruction("add", 5), id=3, name="fused")
  copy = hlo_modules.instruction("copy", 2, [1], shape=(64, 64))
  entry = hlo_modules.computation(fusion, copy, id=9)
  module = hlo_modules.module(body, entry, name="jit_step")
  module.entry_computation_id = 9
  return module


def _row(*kernels, target="tpu:v6e", milliseconds=1.0):
  return costs.TargetEstimate(target, milliseconds=milliseconds, kernels=kernels)


def _compared(path, row=None, **options):
  asked = []

  def one(call, target):
    asked.append((call, target))
    return row

  return profile.compare(path, one, **options), asked


@pytest.fixture(autouse=True)
def _without_libtpu(monkeypatch):
  monkeypatch.setattr(profile.tpu, "full_name", lambda name: f"tpu:{name.removeprefix('tpu:')}")


@pytest.mark.parametrize(
  "kind, target",
  [
    ("TPU v6 Lite", "tpu:v6e"),
    ("TPU v6e", "tpu:v6e"),
    ("TPU v5 Lite", "tpu:v5e"),
    ("TPU v5p", "tpu:v5p"),
    ("TPU v5", "tpu:v5p"),
    ("TPU v4", "tpu:v4"),
    ("TPU7x", "tpu:7x"),
    ("TPU v3", "tpu:v3"),
    ("/host:CPU", ""),
    ("NVIDIA H100", ""),
  ],
)
def test_a_device_has_a_target(kind, target):
  assert profile.target_of(kind) == target


def test_a_pallas_kernel_of_a_profile_is_compiled_alone_and_stands_beside_its_time():
  kernel = costs.KernelCost("ffi", milliseconds=0.0678, is_custom=True)
  (measured,), asked = _compared(RECORDED, _row(kernel, milliseconds=0.07))
  (call, target) = asked[0]
  assert target == "tpu:v6e"
  assert [array.shape for array in call.arrays] == [(2048, 1024), (1024, 2048)]
  (operation,) = measured.operations
  assert operation.measured == pytest.approx(_MEASURED, abs=5e-6)
  assert operation.estimated == 0.0678
  assert (measured.kind, measured.runs, measured.devices) == ("TPU v6 Lite", 3, 1)
  text = str(measured)
  assert "0.07575" in text and "0.0678" in text and "0.90" in text


def test_equal_pallas_kernels_are_compiled_once(tmp_path):
  module = _module()
  for number, shape in ((4, (8, 128)), (5, (8, 128)), (6, (16, 128))):
    node = hlo_modules.instruction("custom-call", number, [1], shape=shape)
    node.custom_call_target = "tpu_custom_call"
    module.computations[1].instructions.append(node)
  events = [(f"custom-call.{number}", 10 * number, 2) for number in (4, 5, 6)]
  path = write(tmp_path, space(events, hlo_of={"jit_step(7)": module}))
  without = costs.TargetEstimate("tpu:v6e", why="it waits for nothing")
  (measured,), asked = _compared(path, without)
  assert len(asked) == 2
  assert str(measured).count("it waits for nothing") == 3


@recorded.needs_libtpu
@pytest.mark.skipif(not recorded.PROFILES.is_dir(), reason="no recorded profiles")
def test_the_product_of_the_public_profile_is_estimated(monkeypatch, capsys):
  monkeypatch.undo()
  assert estimate_command.main(["--profile", str(recorded.PROFILES / "xprof_cli")]) == 0
  printed = capsys.readouterr().out
  assert "0.07575" in printed
  ratio = float(printed.split("operations that both have")[1].split()[2])
  assert 0.8 < ratio < 1.25


def test_a_kernel_of_xla_has_its_cycles_at_the_clock_of_the_device(tmp_path):
  events = [("fusion.1", 0, 4), ("fusion.1", 10, 6), ("while.8", 20, 30)]
  path = write(tmp_path, space(events, hlo_of={"jit_step(7)": _module()}))
  (measured,), asked = _compared(path)
  assert not asked
  by_name = {operation.kernel.name: operation for operation in measured.operations}
  fusion = by_name["fusion.1"]
  assert (fusion.calls, fusion.measured) == (2, pytest.approx(0.01))
  assert fusion.estimated == pytest.approx(2 * 1e3 * 1000 / chips.chips()["tpu:v6e"].clock)
  assert (fusion.kernel.operation, fusion.kernel.scope) == ("dot_general", "CNN/Conv_0")
  assert fusion.kernel.where == "model.py:12"
  assert by_name["while.8"].estimated is None and by_name["while.8"].measured
  assert measured.measured_ms == pytest.approx(1.0)  # of the line of modules
  assert "only in the profile" in str(measured)


def test_with_a_source_operations_match_by_name_and_then_by_place(tmp_path):
  events = [("fusion.1", 0, 4), ("copy.2", 5, 2), ("other.9", 8, 1)]
  path = write(tmp_path, space(events, hlo_of={"jit_step(7)": _module()}))
  same = costs.KernelCost("copy.2", milliseconds=0.003)
  moved = costs.KernelCost(
    "fusion.77", "dot_general", "CNN/Conv_0", "model.py:12", "f32[64,64]", milliseconds=0.005
  )
  alone = costs.KernelCost("sort.3", "sort", milliseconds=0.5)
  call = calls.Call(lambda: None, (), {})
  (measured,), asked = _compared(path, _row(same, moved, alone), call=call)
  assert asked == [(call, "tpu:v6e")]
  times = {operation.estimated: operation.measured for operation in measured.operations}
  assert times[0.005] == pytest.approx(0.004) and times[0.003] == pytest.approx(0.002)
  assert times[0.5] is None and times[None] == pytest.approx(0.001)
  assert measured.estimated_ms == 1.0
  rows = {row[0]: row[1:] for row in measured._sums()}
  assert rows["operations that both have"] == ["0.006", "0.008", "1.33"]
  assert rows["only in the profile"] == ["0.001", "", ""]
  assert rows["only in the estimate"] == ["", "0.5", ""]


def test_the_module_of_the_source_is_that_with_its_name(tmp_path):
  def step():
    return None

  modules = [("jit_other(1)", 0, 500), ("jit_step(2)", 500, 100)]
  path = write(tmp_path, space([("a", 0, 400), ("b", 510, 5)], modules=modules))
  (measured,), _ = _compared(path, _row(), call=calls.Call(step, (), {}))
  assert measured.name == "jit_step(2)"


def test_modules_with_little_time_are_left_out(tmp_path):
  modules = [("jit_small(1)", 0, 5), ("jit_step(7)", 500, 1000)]
  path = write(
    tmp_path,
    space(
      [("a", 0, 1), ("fusion.1", 510, 500)], modules=modules, hlo_of={"jit_step(7)": _module()}
    ),
  )
  compared, _ = _compared(path)
  assert [measured.name for measured in compared] == ["jit_step(7)"]


@pytest.mark.parametrize(
  "events, options, message",
  [
    ([("a", 0, 1)], {"kind": "GPU"}, "expected a TPU"),
    ([("a", 0, 1)], {}, "no HLO modules"),
    ([], {}, "no operation"),
  ],
)
def test_profiles_that_cannot_be_compared_say_why(events, options, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    _compared(write(tmp_path, space(events, **options)))


def test_a_table_of_xprof_needs_a_target_and_a_source(tmp_path):
  path = tmp_path / "hlo_stats.csv"
  path.write_text("HLO op name,#Occurrences,Total self time (us)\nfusion.1,10,250\n")
  with pytest.raises(ValueError, match="--targets"):
    _compared(path)
  with pytest.raises(ValueError, match="name the program"):
    _compared(path, target="v6e")
  kernel = costs.KernelCost("fusion.1", milliseconds=0.02)
  call = calls.Call(lambda: None, (), {})
  (measured,), _ = _compared(path, _row(kernel), call=call, target="v6e")
  assert (measured.operations[0].measured, measured.operations[0].estimated) == (0.25, 0.02)


def test_damaged_profiles_never_end_in_another_error(tmp_path):
  events = [("fusion.1", 0, 4), ("custom-call.4", 20, 30)]
  module, random = _module(), np.random.default_rng(0)
  kernel = hlo_modules.instruction("custom-call", 4, [1], shape=(8, 128))
  kernel.custom_call_target = "tpu_custom_call"
  module.computations[1].instructions.append(kernel)
  good = space(events, hlo_of={"jit_step(7)": module}).SerializeToString()
  path, compared = tmp_path / "vm.xplane.pb", 0
  for _ in range(300):
    data = bytearray(good)
    for place in random.integers(len(data), size=random.integers(0, 4)):
      data[place] = random.integers(256)
    path.write_bytes(bytes(data))
    try:
      found, _ = _compared(path, _row(costs.KernelCost("x", milliseconds=1.0, is_custom=True)))
    except ValueError as error:
      assert str(path) in str(error) or "target" in str(error)
    else:
      compared += 1
      assert all(str(measured) for measured in found)
  assert compared > 50  # many bytes decide nothing


def test_the_command_takes_one_program_and_one_target(capsys):
  arguments = ["--profile", str(RECORDED), "--targets", "v5e", "v6e"]
  assert estimate_command.main(arguments) == 2
  assert "--targets has 2" in capsys.readouterr().err
  assert estimate_command.main(["--profile", str(RECORDED), "--trace", "a.json"]) == 2
  assert "--profile takes" in capsys.readouterr().err
  assert estimate_command.main([]) == 2
  assert "no source" in capsys.readouterr().err
