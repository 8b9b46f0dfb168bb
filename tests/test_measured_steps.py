"""Decoders and figures of `benchmarks/measured_steps.py`, without libtpu."""

import csv
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decoder, measured_steps
from tests.support import slices
from tpugraphs_jax.hlo import calls, meshes, topology, tpu

_SMALL = decoder.Model(2, 256, 512, 4, 2, 128, 1024, has_head_norms=True)


@pytest.fixture(autouse=True)
def chips(monkeypatch):
  monkeypatch.setattr(topology, "devices", slices.devices)
  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target.removeprefix('tpu:')}")


@pytest.mark.parametrize(
  "name, billions", [("llama3.1-8b", 8.03), ("llama3.1-70b", 70.55), ("mistral-7b", 7.24)]
)
def test_a_model_has_as_many_weights_as_its_authors_say(name, billions):
  step = decoder.Step(decoder.MODELS[name], 1, 128, 8)
  (weights, *_), *_ = decoder.program(step)[1]
  count = sum(math.prod(array.shape) for array in jax.tree.leaves(weights))
  assert count == pytest.approx(1e9 * billions, rel=0.002)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tensor": 2, "saved": ("query_proj", decoder.CONTEXT), "chunks": 2},
    {"offloaded": decoder.NAMES, "weights": jnp.bfloat16, "is_fused": False},
    {"is_saved_whole": True, "is_scanned": False, "attention": "dense", "is_gathered": True},
  ],
)
def test_a_step_is_lowered_for_its_mesh_and_gives_back_its_state(changes):
  step = dataclasses.replace(decoder.Step(_SMALL, 2, 512, 2, blocks=(256,) * 4), **changes)
  function, arguments = decoder.program(step)
  call = calls.Call(function, arguments, {})
  assert dict(meshes.find(call).shape) == {"fsdp": 2, "tensor": step.tensor}
  state, loss = jax.eval_shape(function, *arguments)
  assert loss.shape == () and loss.dtype == jnp.float32
  given = jax.tree.map(lambda array: (array.shape, array.dtype), arguments[0])
  assert jax.tree.map(lambda array: (array.shape, array.dtype), state) == given
  text = meshes.lower(call).as_text()
  assert ("pinned_host" in text) == bool(step.offloaded)
  assert ("tpu_custom_call" in text) == (step.attention == "splash")


def _write(path, *rows):
  names = list(dict.fromkeys(name for row in rows for name in row))
  with open(path, "w", newline="") as file:
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)


def test_measured_steps_are_read_or_left_out_with_their_reason(tmp_path):
  recipe = {
    "device_type": "v6e-8",
    "benchmark": "a",
    "model": "llama3.1-8b",
    "per_device_batch": "3",
    "sequence": "8192",
    "seconds": "3.5",
    "xla_flag_groups": "DENSE_VMEM_LIMIT_FLAG+OTHER",
    "source": "recipes",
  }
  _write(tmp_path / "recipes_steps.csv", recipe, recipe | {"model": "gpt3-175b"})
  run = {
    "program": "qwen3_cx",
    "variant": "8B/v6e-8",
    "experiment": "2026-06-03-v022-splash",
    "tokens_s_chip": "",
    "step_ms_text": "787.6",
    "peak_hbm_gib": "25.9",
    "hbm_needed_gib": "",
    "source": "log",
  }
  large = run | {"experiment": "2026-06-03-v033-tp2", "hbm_needed_gib": "33.78"}
  _write(tmp_path / "wiki_runs.csv", run, run | {"experiment": "other"}, large)
  (step, small, large), left_out = measured_steps.read(tmp_path)
  assert (step.target, step.milliseconds, step.step.fsdp) == ("tpu:v6e:2x4", 3500, 8)
  assert step.step.offloaded == decoder.NAMES
  assert step.step.options == {"xla_tpu_scoped_vmem_limit_kib": 98304}
  assert (small.milliseconds, small.gib, small.fits) == (787.6, 25.9, True)
  assert (small.step.fsdp, small.step.tensor) == (4, 2)
  assert (large.milliseconds, large.gib, large.fits) == (None, 33.78, False)
  assert [reason.split(": ")[0] for reason in left_out] == [
    "recipes_steps.csv:3",
    "wiki_runs.csv:3",
  ]


def test_figures_are_of_the_rows_that_have_both_values():
  row = {
    "name": "llama3.1-8b v6e-8",
    "measured_ms": 10.0,
    "estimated_ms": 11.0,
    "roofline_ms": 5.0,
    "measured_gib": None,
    "estimated_gib": 8.0,
    "measured_fits": True,
    "estimated_fits": True,
  }
  large = {"estimated_ms": None, "measured_ms": None, "measured_gib": 40.0, "estimated_gib": 50.0}
  rows = [row, row | {"name": "qwen3_cc v1"} | large | {"measured_fits": False}]
  found = measured_steps.summary(rows)
  assert found["times"]["recipes"]["estimate"] == {"rows": 1, "error": 0.1, "tau": None}
  assert found["times"]["recipes"]["roofline"]["error"] == 0.5
  assert found["times"]["runs"]["estimate"]["rows"] == 0
  assert found["memory"] == {"rows": 1, "error": 0.25, "tau": None}
  assert found["fits"] == {"rows": 2, "right": 1}
