"""Compares estimates of training steps on TPU slices with times and memory that others measured.

    python -m venv ENV
    ENV/bin/pip install '.[tpu]'
    ENV/bin/python -m benchmarks.measured_steps --data DIR --work WORK --out RECORD.json

`DIR` has `recipes_steps.csv`, steps of MaxText's recipes, and `wiki_runs.csv`, runs of a log of
experiments with Qwen3 8B. Each run is a decoder of the same shapes (`decoder`), compiled for its
topology by the libtpu at hand. A step takes a quarter of an hour to compile: `--only` names some,
runs that the file of `--out` has are kept, and `WORK` keeps what the compiler wrote, which
`--again` reads anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
import csv
import dataclasses
import json
from pathlib import Path
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from benchmarks import decoder, step_times
from tpugraphs_jax.hlo import calls, meshes, topology, tpu
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.infra import files
from tpugraphs_jax.tuning import compiler, costs
from tpugraphs_jax.tuning import estimate as estimates

_GIB = 2**30
# Options of the compiler by their names in the recipes; those of a SparseCore, which has no
# schedule, are left out.
_OPTIONS = {
  "DENSE_VMEM_LIMIT_FLAG": {"xla_tpu_scoped_vmem_limit_kib": 98304},
  "LAYOUT_FOR_ALL_REDUCE_SCATTER": {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
  },
  "DATA_PARALLEL_OVERLAP": {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
  },
  "HOST_OFFLOAD_FLAGS": {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": 100,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
  },
  "DISABLE_COLLECTIVE_MATMUL": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000},
}
# What the recipes move to the host: of models with more weights no result of attention.
_OFFLOADED = {"llama3.1-70b": tuple(name for name in decoder.NAMES if name != "out_proj")}
_SCHEDULER = _OPTIONS["HOST_OFFLOAD_FLAGS"]
_NOT_WINDOWED = _OPTIONS["DISABLE_COLLECTIVE_MATMUL"]
# Runs of the log, by the beginning of the name of the experiment: what its page says and the table
# does not, or not rightly. `ms` and `gib` are measured. Weights and moments are in bfloat16.
# All have a loop over layers here, also where the run has none, except v083 for its memory. For
# the memory, products are windowed except in runs that turned that off; for the time they never
# are: the kernels of windowed products take the compiler several times as long.
_SAVED = ("query_proj", "key_proj", "value_proj")
_BLOCKS = (2048, 1024, 2048, 2048)
_LONG = {"length": 8192, "blocks": _BLOCKS}
_CHUNKED = {"length": 8192, "blocks": _BLOCKS, "loss": "gathered", "chunks": 8}
_SHORT = {"length": 2048, "loss": "gathered"}
_TWO = {"tensor": 2, **_CHUNKED, "options": _SCHEDULER}
_RUNS: Mapping[tuple[str, str], Mapping[str, Any]] = {
  ("qwen3_cc", "2026-06-02-v018-xla-flag-stack"): {"batch": 4, **_SHORT, "options": _SCHEDULER},
  ("qwen3_cc", "2026-06-02-v033-maxtext-ce-s8k-bs1"): {"batch": 1, **_LONG},
  ("qwen3_cx", "2026-06-03-v017"): {"batch": 8, **_TWO, "length": 2048, "ms": 1369},
  ("qwen3_cx", "2026-06-03-v022"): {"batch": 2, **_TWO, "length": 4096},
  ("qwen3_cx", "2026-06-03-v023"): {"batch": 1, **_TWO},
  ("qwen3_cx", "2026-06-03-v025"): {"batch": 4, **_TWO, "tensor": 4, "fits": False},
  ("qwen3_cx", "2026-06-03-v027"): {"batch": 3, **_LONG, "blocks": (2048, 512, 2048, 2048)},
  ("qwen3_cx", "2026-06-03-v028"): {"batch": 3, **_LONG, "blocks": (2048, 1024, 2048, 1024)},
  ("qwen3_cx", "2026-06-03-v029"): {"batch": 3, **_LONG, "is_fused": False},
  ("qwen3_cx", "2026-06-03-v033"): {"batch": 6, **_LONG, "tensor": 2, "fits": False},
  ("qwen3_cx", "2026-06-04-v122"): {"batch": 5, **_LONG, "options": _NOT_WINDOWED, "fits": False},
  ("qwen3_cx", "2026-06-04-v123"): {"batch": 4, **_LONG, "options": _NOT_WINDOWED},
  ("qwen3_cc5", "2026-06-12-v020-scan"): {"batch": 1, **_CHUNKED},
  ("qwen3_cc5", "2026-06-12-v021"): {"batch": 2, **_CHUNKED},
  ("qwen3_cc5", "2026-06-12-v038"): {
    "batch": 2,
    **_CHUNKED,
    "saved": (*_SAVED, decoder.ATTENTION),
    "gib": 28.62,
  },
  ("qwen3_cc5", "2026-06-12-v039"): {
    "batch": 3,
    **_CHUNKED,
    "saved": (*_SAVED, decoder.ATTENTION),
    "fits": False,
  },
  ("qwen3_cc5", "2026-06-12-v057-2kbs4"): {
    "batch": 4,
    **_SHORT,
    "saved": (*_SAVED, decoder.CONTEXT),
    "gib": 23.82,
    "ms": 1094.5,
    "options": _SCHEDULER,
  },
  ("qwen3_cx", "2026-06-12-v083-2k-batch8"): {
    "batch": 8,
    "length": 2048,
    "is_scanned": False,
    "options": _NOT_WINDOWED,
    "gib": 22.54,
  },
}


@dataclasses.dataclass(frozen=True)
class Measured:
  """A measured step.

  Attributes:
    name: of the row.
    target: such as `tpu:v6e:2x4`.
    step: a decoder of the same shapes.
    milliseconds: of a step; None where it ran out of memory.
    gib: the peak of a device's memory, or what it needed; None where it is not told.
    fits: whether it ran.
    source: its address.
  """

  name: str
  target: str
  step: decoder.Step
  milliseconds: float | None
  gib: float | None
  fits: bool
  source: str


def read(folder: Path) -> tuple[list[Measured], list[str]]:
  """The steps of both tables of a folder, and the reasons of rows that are left out."""
  found, left_out = [], []
  for name, parse in (("recipes_steps.csv", _recipe), ("wiki_runs.csv", _run)):
    with open(folder / name, newline="", encoding="utf-8") as file:
      for number, row in enumerate(csv.DictReader(file), 2):
        try:
          found.append(parse(row))
        except ValueError as error:
          left_out.append(f"{name}:{number}: {error}")
  return found, left_out


def _recipe(row: Mapping[str, str]) -> Measured:
  """A step of MaxText: weights in float32, words embedded by a product, activations on the host."""
  model = decoder.MODELS.get(row["model"])
  target = topology.full_name(row["device_type"])
  devices = len(topology.devices(target))
  if model is None or not row["sequence"]:
    raise ValueError(f"the model is {row['model']}, the sequence {row['sequence']!r}")
  options: dict[str, Any] = {}
  for name in row["xla_flag_groups"].split("+"):
    options |= _OPTIONS.get(name, {})
  step = decoder.Step(
    model,
    int(row["per_device_batch"]),
    int(row["sequence"]),
    devices,
    offloaded=_OFFLOADED.get(row["model"], decoder.NAMES),
    weights=jnp.bfloat16 if "bfloat16" in row["benchmark"] else jnp.float32,
    options=options,
  )
  name = f"{row['model']} {row['device_type']}"
  return Measured(name, target, step, 1e3 * float(row["seconds"]), None, True, row["source"])


def _run(row: Mapping[str, str]) -> Measured:
  """A run of the log of experiments."""
  key = (row["program"], row["experiment"])
  found = [
    run for (program, start), run in _RUNS.items() if program == key[0] and key[1].startswith(start)
  ]
  if not found or row["variant"] != "8B/v6e-8":
    raise ValueError(f"{key[0]} {key[1]} is not rebuilt")
  run = {"tensor": 1, "fits": True, "gib": None, "ms": None, **found[0]}
  ms, gib, fits = run.pop("ms"), run.pop("gib"), run.pop("fits")
  fsdp = 8 // run["tensor"]
  if ms is None and fits:
    rate = float(row["tokens_s_chip"] or 0)
    tokens = run["batch"] * fsdp * run["length"] / 8
    ms = float(row["step_ms_text"] or 0) or 1e3 * tokens / rate
  gib = gib or float(row["hbm_needed_gib" if not fits else "peak_hbm_gib"] or 0) or None
  options = _OPTIONS["DENSE_VMEM_LIMIT_FLAG"] | run.pop("options", {})
  step = decoder.Step(
    decoder.MODELS["qwen3-8b"],
    fsdp=fsdp,
    weights=jnp.bfloat16,
    is_gathered=True,
    options=options,
    **run,
  )
  name = f"{key[0]} {key[1][11:]}"
  return Measured(name, topology.full_name("v6e-8"), step, ms, gib, fits, row["source"])


def estimate(measured: Measured, work: step_times.Work | None) -> dict[str, Any]:
  """A row of the record: milliseconds and GiB, measured and estimated.

  Args:
    measured: a step.
    work: what the compiler wrote of steps; None: memory alone.
  """
  step = measured.step
  if work is not None and step.is_gathered:  # a run of the log
    options = {**step.options, **_NOT_WINDOWED}
    step = dataclasses.replace(step, options=options, is_scanned=True)
  function, arguments = decoder.program(step)
  call = calls.Call(function, arguments, {})
  start = time.monotonic()
  if work is None:
    (row,) = estimates.estimate_call(call, [measured.target], memory_only=True).rows
  else:
    row = _with_time(measured, call, work)
  return {
    "name": measured.name,
    "target": measured.target,
    "source": measured.source,
    "measured_ms": measured.milliseconds,
    "estimated_ms": row.milliseconds,
    "exposed_ms": row.exposed_ms,
    "roofline_ms": 1e3 * flops(measured.step) / GENERATIONS[row.generation].flops,
    "measured_gib": measured.gib,
    "estimated_gib": row.needed / _GIB if row.needed else None,
    "measured_fits": measured.fits,
    "estimated_fits": row.fits,
    "groups": dict(row.groups),
    "seconds": round(time.monotonic() - start),
    "why": row.why,
  }


def _with_time(measured: Measured, call: calls.Call, work: step_times.Work) -> costs.TargetEstimate:
  """The estimate of a step whose compiled program is kept."""
  with tpu.as_device(topology.generation_of(measured.target)):
    mesh = meshes.find(call)
  assert mesh is not None  # of a decoder
  placement = meshes.place(mesh, measured.target)
  program = work.read(measured.name, measured.target, call)
  if program is None:
    try:
      with compiler.Compiler() as made:
        program = made.compile(call, measured.target, placement=placement)
    except (compiler.OutOfMemory, compiler.Ended) as error:
      fits = False if isinstance(error, compiler.OutOfMemory) else None
      return costs.without_kernels(error.module, measured.target, str(error), fits=fits)
    work.write(measured.name, measured.target, call, program)
  return costs.cost(program, measured.target, call, placement)


def flops(step: decoder.Step) -> float:
  """Operations of the products of a step on a device, without those that are computed again."""
  model = step.model
  width = model.head * (2 * model.heads + 2 * model.groups) + 3 * model.hidden
  weights = model.layers * model.width * width + model.width * model.words
  of_token = 6 * weights + 6 * model.layers * model.heads * model.head * step.length
  return of_token * step.batch * step.length / step.tensor


def errors(rows: Sequence[Mapping[str, Any]], measured: str, estimated: str) -> dict[str, Any]:
  """The mean relative error and tau-b of the rows that have both figures."""
  pairs = [(row[measured], row[estimated]) for row in rows if row[measured] and row[estimated]]
  if not pairs:
    return {"rows": 0, "error": None, "tau": None}
  true, made = np.array(pairs).T
  tau = float(stats.kendalltau(true, made).statistic) if len(pairs) > 2 else None
  return {
    "rows": len(pairs),
    "error": round(float(np.mean(np.abs(made / true - 1))), 4),
    "tau": tau,
  }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Errors of recipes and of runs, of times and memory, and how many are told to fit rightly."""
  told = [row for row in rows if row["estimated_fits"] is not None]
  groups = {
    "recipes": [row for row in rows if not row["name"].startswith("qwen3_")],
    "runs": [row for row in rows if row["name"].startswith("qwen3_")],
  }
  return {
    "times": {
      name: {
        "estimate": errors(each, "measured_ms", "estimated_ms"),
        "roofline": errors([r for r in each if r["estimated_ms"]], "measured_ms", "roofline_ms"),
      }
      for name, each in groups.items()
    },
    "memory": errors(rows, "measured_gib", "estimated_gib"),
    "fits": {
      "rows": len(told),
      "right": sum(row["estimated_fits"] == row["measured_fits"] for row in told),
    },
  }


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
  for row in record["rows"]:
    parts = [
      f"{key} {row[f'measured_{key}'] or 0:.4g} / {row[f'estimated_{key}'] or 0:.4g}"
      for key in ("ms", "gib")
    ]
    fits = f"fits {row['measured_fits']} / {row['estimated_fits']}"
    yield f"{row['name']}: {', '.join(parts)}, {fits} {row['why'][:100]}"
  yield json.dumps(record["summary"], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
  parser.add_argument("--out", type=Path, required=True, help="file of the record")
  parser.add_argument("--only", nargs="*", default=[], help="parts of the names of steps")
  parser.add_argument("--again", action="store_true", help="also runs that the record has")
  how = parser.add_mutually_exclusive_group(required=True)
  how.add_argument("--work", type=Path, help="folder for what the compiler writes")
  how.add_argument("--memory", action="store_true", help="memory alone, in less time")
  args = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")
  measured, left_out = read(args.data)
  rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
  for each in measured:
    if args.only and not any(part in each.name for part in args.only):
      continue
    kept = {row["name"]: row for row in rows}
    has = kept.get(each.name)
    if has and not args.again and (args.memory or has["estimated_ms"] or not has["estimated_fits"]):
      continue
    row = estimate(each, step_times.Work(args.work) if args.work else None)
    if has and args.work and each.step.is_gathered:  # the time is of other options than the memory
      row |= {name: has[name] for name in ("estimated_gib", "estimated_fits")}
    kept[each.name] = row
    rows = list(kept.values())
    record = {
      "versions": {"jax": jax.__version__, "libtpu": tpu.libtpu_version()},
      "rows": rows,
      "summary": summary(rows),
      "left_out": left_out,
    }
    files.write_json(args.out, record, indent=1)
    print("\n".join(_lines({**record, "rows": [kept[each.name]]})), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
