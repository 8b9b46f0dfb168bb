"""The order of the tiles of kernels: estimated from schedules, or measured here."""

import contextlib
import importlib
import types

import jax
import jax.numpy as jnp
import pytest

from tests.support import recorded
import tpugraphs_jax
from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.tuning import compiler, costs, measure, summary, tiles


def scaled(tile):
  def function(x):
    assert tile["block"] != 3, "block 3 does not divide 8"
    return x * tile["block"] / tile["block"]

  return function


@pytest.fixture
def compiled(monkeypatch):
  """Sets the row of a program, or an error, by the block of its tile."""
  outcomes = {}

  def compile_call(call, target):
    assert target == "tpu:v6e"
    outcome = outcomes[float(call.trace.program.jaxpr.eqns[0].invars[1].val)]
    if isinstance(outcome, Exception):
      raise outcome
    return outcome

  process = contextlib.nullcontext(types.SimpleNamespace(compile=compile_call))
  monkeypatch.setattr(compiler, "Compiler", lambda **_: process)
  monkeypatch.setattr(costs, "cost", lambda row, target, arrays: row)
  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target}")
  monkeypatch.setattr(tpu, "as_device", lambda _: contextlib.nullcontext())
  monkeypatch.setattr(summary, "versions", dict)
  return outcomes


def _row(ms, **fields):
  kernels = (
    costs.KernelCost("pallas", milliseconds=ms / 2, vmem_bytes=5, is_custom=True),
    costs.KernelCost("copy", milliseconds=ms / 4, vmem_bytes=2),
  )
  return costs.TargetEstimate("tpu:v6e", ms, kernels=kernels, **fields)


def _blocks(*blocks):
  return [{"block": block} for block in blocks]


def test_tiles_come_in_the_order_of_their_times_with_what_hinders_the_others(compiled):
  compiled[1.0] = _row(2.0, waits=0.5, bytes_accessed=10**6)
  compiled[2.0] = _row(1.0)
  compiled[4.0] = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20M of 16M of vmem\nmore")
  compiled[5.0] = compiler.Ended("it ended its process with signal 11")
  compiled[6.0] = costs.TargetEstimate("tpu:v6e", why="it has a loop of unknown length")
  given = _blocks(1, 2, 3, 4, 5, 6)
  found = tpugraphs_jax.tune_tiles(scaled, jnp.ones(8), tiles=given, target="v6e")
  assert [time.tile["block"] for time in found.times] == [2, 1, 3, 4, 5, 6]
  slow = found.times[1]
  assert (slow.milliseconds, slow.kernel_ms, slow.waits) == (2.0, 1.0, 0.5)
  assert (slow.hbm_bytes, slow.vmem_bytes) == (10**6, 7)
  whys = [time.why for time in found.times[2:]]
  for why, word in zip(whys, ("does not divide", "20M of 16M", "signal 11", "loop")):
    assert word in why and "\n" not in why
  assert found.best == {"block": 2} and "block 3 does not divide 8" in repr(found)
  assert "2.00" in found._repr_html_()


@pytest.mark.parametrize(
  "times, expected", [([1.0], 1), ([1.0, 5.0, 6.0], 2), ([1.0, 1.05, 1.1, 1.2], 3), ([1.0] * 9, 5)]
)
def test_tiles_that_are_close_to_the_fastest_are_to_be_measured(compiled, times, expected):
  compiled.update({float(10 + number): _row(ms) for number, ms in enumerate(times)})
  given = [{"block": block} for block in compiled]
  found = tiles.tune_tiles(scaled, jnp.ones(8), tiles=given, target="v6e")
  assert found.to_measure == expected
  assert f"measure the first {expected} on a device" in repr(found)


def test_no_tile_may_have_a_time(compiled):
  found = tiles.tune_tiles(scaled, jnp.ones(8), tiles=_blocks(3), target="v6e")
  assert (found.best, found.to_measure) == (None, 0) and "no tile has a time" in repr(found)


def test_without_a_target_tiles_are_measured_and_the_others_go_on_after_a_failure(monkeypatch):
  asked = []

  def measured(functions, args, seed=0):
    functions = list(functions)
    asked.append([number for number, _, _ in functions])
    for number, function, _ in functions:
      if number == 1:
        yield number, ValueError("its outputs differ")
        if number == functions[0][0]:
          return
        continue
      assert function(*args)[0] == 1
      yield number, {"seconds": [3e-3 / (number + 1), 1.0]}

  monkeypatch.setattr(measure, "measure", measured)
  found = tiles.tune_tiles(scaled, jnp.ones(8), tiles=_blocks(3, 7, 1, 2))
  assert asked == [[1, 2, 3], [2, 3]]
  assert [time.tile["block"] for time in found.times] == [2, 1, 3, 7]
  assert found.times[0].milliseconds == 0.75 and found.to_measure == 1
  assert "measured on the machine" in repr(found) and "outputs differ" in repr(found)


@pytest.mark.parametrize("given", [[], [4], ["block"], None, 4, {"block": [1]}, [{1: 2}]])
def test_tiles_that_are_no_dictionaries_are_refused(given):
  with pytest.raises(ValueError, match="dictionaries"):
    tiles.tune_tiles(scaled, jnp.ones(8), tiles=given, target="v6e")


def test_the_command_reads_kernels_of_a_file(compiled, tmp_path, capsys):
  compiled[1.0], compiled[2.0] = _row(2.0), _row(1.0)
  path = tmp_path / "mine.py"
  path.write_text(
    "KERNEL = lambda tile: lambda x: x * tile['block']\n"
    "TILES = {'scale': (KERNEL, (1.0,), [{'block': 1.0}, {'block': 2.0}]), 'bad': (KERNEL,)}\n"
  )
  assert tiles.main([f"{path}:scale", "--target", "v6e"]) == 0
  assert "scale: tiles by time" in capsys.readouterr().out
  for source, word in ((f"{path}:bad", "expected"), (f"{path}:other", "other"), ("x.txt", ".py")):
    assert tiles.main([source, "--target", "v6e"]) == 2
    assert word in capsys.readouterr().err


def test_the_command_does_not_take_the_functions_place_in_the_package():
  with pytest.raises(ImportError, match="function"):
    importlib.import_module("tpugraphs_jax.tune_tiles")
  assert callable(tpugraphs_jax.tune_tiles)


@recorded.needs_libtpu
def test_a_real_product_is_faster_in_larger_tiles_and_too_large_ones_are_refused():
  from jax.experimental import pallas as pl

  def product(tile):
    assert "v6" in jax.devices()[0].device_kind  # of the target
    size = tile["block"]

    def kernel(x_ref, y_ref, out_ref):
      out_ref[...] = x_ref[...] @ y_ref[...]

    spec = lambda index: pl.BlockSpec((size, 1024) if index == 0 else (1024, size), _index(index))
    return pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
      grid=(1024 // size, 1024 // size),
      in_specs=[spec(0), spec(1)],
      out_specs=pl.BlockSpec((size, size), lambda i, j: (i, j)),
    )

  shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
  given = _blocks(128, 512, 100)
  found = tpugraphs_jax.tune_tiles(product, shape, shape, tiles=given, target="v6e")
  assert [time.tile["block"] for time in found.times] == [512, 128, 100]
  assert found.times[2].why and 0 < found.times[0].kernel_ms <= found.times[0].milliseconds


def _index(operand):
  return (lambda i, j: (i, 0)) if operand == 0 else (lambda i, j: (0, j))


def test_a_measured_tile_with_other_outputs_has_its_reason():
  kernel = lambda tile: lambda x: x * tile["b"]
  found = tiles.tune_tiles(kernel, jnp.ones(8), tiles=({"b": b} for b in (8, 4, 2)))
  assert [time.tile["b"] for time in found.times] == [8, 4, 2]
  first, *others = found.times
  assert first.milliseconds and not first.why
  assert all("outputs differ" in time.why and time.milliseconds is None for time in others)
