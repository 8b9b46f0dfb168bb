"""Figures of `benchmarks/measured_meshes.py`, without libtpu."""

import csv

import jax.numpy as jnp
import pytest

from benchmarks import measured_meshes
from tests.support import slices
from tpugraphs_jax.hlo import calls, meshes, topology, tpu

_BOOK = {
  "generation": "v5e",
  "topology": "mesh X:8,Y:4",
  "operation": "all_gather over Y",
  "shape_or_bytes": "bf16[2048,8192] sharded over Y",
  "time_us": "680",
  "source": "a book",
}
_MARIN = {
  "generation": "v5p",
  "topology": "v5p-8",
  "operation": "ppermute",
  "shape_or_bytes": "1 MiB",
  "time_us": "16.94",
  "source": "marin",
}


@pytest.fixture(autouse=True)
def chips(monkeypatch):
  monkeypatch.setattr(topology, "devices", slices.devices)
  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target.removeprefix('tpu:')}")


def _write(path, rows):
  with open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def test_rows_are_read_or_left_out_with_their_reason(tmp_path):
  issue = {
    "generation": "v5p",
    "topology": "mesh 2x2x2",
    "operation": "all_to_all",
    "shape_or_bytes": "f32[8192,8,128]",
    "time_us": "728",
    "source": "an issue",
  }
  rows = [_BOOK, _MARIN, _MARIN | {"time_us": "4.5 to 5.5"}, issue]
  _write(tmp_path / "collectives.csv", rows)
  recipe = {
    "generation": "v6e",
    "topology": "16x16",
    "collective": "psum (all_reduce)",
    "input": "bf16[64,64]",
    "output": "bf16[64,64]",
    "transferred_GB": "0.6",
    "achieved_GB_s": "240",
    "time_us": "",
    "source": "recipes",
  }
  _write(tmp_path / "recipes_collectives.csv", [recipe])
  found, left_out = measured_meshes.read(tmp_path)
  gather, exchange, all_to_all, reduction = found
  assert (gather.target, gather.axes, gather.along) == ("tpu:v5e:8x4", {"X": 8, "Y": 4}, ("Y",))
  assert (gather.kind, gather.shape, gather.size) == ("all-gather", (2048, 8192), 2**25)
  assert (exchange.target, exchange.kind, exchange.size) == (
    "tpu:v5p:2x2x1",
    "collective-permute",
    2**20,
  )
  assert exchange.is_fitted and not gather.is_fitted
  assert (all_to_all.target, all_to_all.axes) == ("tpu:v5p:2x2x2", {"x": 2, "y": 2, "z": 2})
  assert measured_meshes.program(all_to_all)[1].shape == (8 * 8192, 8, 128)
  assert reduction.microseconds == pytest.approx(5000) and reduction.axes == {"ring": 256}
  assert left_out == ["collectives.csv:4: the time is '4.5 to 5.5'"]


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
def test_a_measured_collective_is_a_function_with_its_mesh(kind):
  measured = measured_meshes.Measured(
    "tpu:v5e:4x4", {"x": 4, "y": 4}, ("x",), kind, (64, 128), jnp.float32, 1.0, ""
  )
  function, array = measured_meshes.program(measured)
  call = calls.Call(function, (array,), {})
  assert dict(meshes.find(call).shape) == {"x": 4, "y": 4}
  assert kind.replace("-", "_") in meshes.lower(call).as_text()


def test_errors_are_means_of_the_rows_that_have_a_time():
  rows = [
    {"target": "tpu:v5e:4x4", "measured_us": 10.0, "is_fitted": False, "simulated_us": 11.0},
    {"target": "tpu:v6e:4x4", "measured_us": 10.0, "is_fitted": True, "simulated_us": 7.0},
    {"target": "tpu:v6e:4x4", "measured_us": 10.0, "is_fitted": True, "simulated_us": None},
  ]
  rows = [row | {"collective_us": 10.0, "unfitted_us": 5.0, "formula_us": 20.0} for row in rows]
  found = measured_meshes.summary(rows)
  assert found["all"]["simulated"] == {"rows": 2, "error": 0.2}
  assert found["not fitted"]["simulated"] == {"rows": 1, "error": 0.1}
  assert found["tpu:v6e"]["formula"] == {"rows": 2, "error": 1.0}
  assert found["all"]["unfitted"] == {"rows": 3, "error": 0.5}
