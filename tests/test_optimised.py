"""What benchmarks count and show, and what CI refuses of it."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import device, gpus, optimised, pages
from tools import compilers


def _module(function, *shapes):
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return optimised.Module(jax.jit(function).lower(*arguments).compile())


def test_kernels_in_a_loop_count_as_often_as_it_iterates():
  def scan(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=11)[0]

  counts = _module(scan, (32, 32)).counts()
  assert counts["kernels_in_loops"] > 0 and counts["kernels_in_loops"] % 11 == 0
  assert counts["kernels"] >= counts["kernels_in_loops"]
  assert _module(lambda x: jnp.sin(x @ x), (32, 32)).counts()["kernels_in_loops"] == 0


def test_sums_over_devices_are_counted():
  add = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:2])
  compiled = add.lower(jax.ShapeDtypeStruct((2, 4), jnp.float32)).compile()
  assert optimised.Module(compiled).counts()["all_reduces"] == 1


def test_the_roofline_is_the_slower_of_bytes_and_products():
  gpu = gpus.GPUS["t4"]
  copied = 3 * 4 * 2**20  # two arrays are read and one is written
  times = _module(lambda x, y: x + y, (1024, 1024), (1024, 1024)).times(gpu, exact=True)
  assert times["roofline_ms"] == pytest.approx(copied / gpu.gb_per_s / 1e6, rel=0.01)
  multiply = _module(lambda x, y: x @ y, (1024, 1024), (1024, 1024))
  seconds = 2 * 1024**3 / (gpu.exact_tflops * 1e12)
  assert multiply.times(gpu, exact=True)["roofline_ms"] == pytest.approx(1e3 * seconds, rel=0.01)


_FINE = {
  "products": {"highest": 3},
  "precision": "highest",
  "kernels_in_loops": 0,
  "strided_scatters": 0,
  "all_reduces": 1,
  "devices": 8,
}


@pytest.mark.parametrize(
  "changes, word",
  [
    ({"products": {"highest": 3, "default": 1}}, "precision"),
    ({"products": {}}, "precision"),
    ({"kernels_in_loops": 2048}, "loops"),
    ({"strided_scatters": 1}, "columns"),
    ({"all_reduces": 0}, "all-reduces"),
  ],
)
def test_the_lane_refuses_a_step(changes, word):
  assert not compilers.complaints(_FINE, is_gpu=True, all_reduce=True)
  (complaint,) = compilers.complaints(_FINE | changes, is_gpu=True, all_reduce=True)
  assert word in complaint


def test_a_figure_of_one_seed_has_no_spread():
  run = {"kendaltau": 0.5}
  first, second = (
    pages.figure(pages.summary(runs), "kendaltau")
    for runs in ([run], [run, run | {"kendaltau": 0.7}])
  )
  assert (first, second) == ("0.500", "0.600 ± 0.141")


def test_a_part_that_fails_is_named_and_keeps_its_figures(tmp_path, monkeypatch):
  def part(small, repeats):
    yield {"scores": 1e-6}
    raise ValueError("no memory")

  monkeypatch.setitem(device._STEPS, "SAGE", part)
  with pytest.raises(ValueError, match="memory"):
    device.run_here("SAGE", False, True, tmp_path / "out.json")
  found = json.loads((tmp_path / "out.json").read_text())
  assert found["figures"] == {"scores": 1e-6} and "no memory" in found["failure"]
  record = {"machine": found["machine"], "small": False, "SAGE": found["figures"]}
  text = device.table(record | {"failures": {"SAGE": found["failure"]}})
  assert "1e-06" in text and "not measured" in text and "no memory" in text


def test_differences_are_relative_to_the_largest_number_of_an_array():
  assert device.difference({"a": [1.0, 3.0], "b": 0.5}, {"a": [2.0, 4.0], "b": 1.0}) == 0.5
  assert device.difference([0.0], [0.0]) == 0
  assert device.difference([1e-9, 1.0], [0.0, 1.0]) == pytest.approx(1e-7)
  assert math.isnan(device.difference([1.0, float("nan")], [1.0, 1.0]))
